"""Losses over a vocabulary; with the linear layer before it, none holds the logits."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.common.checks import expect_tensor
from slipstream.nn.linear import Linear, plain_linear
from slipstream.ops import loss


class CrossEntropyLoss(nn.Module):
    """Cross entropy of logits [..., V] and targets [...], as torch.nn.CrossEntropyLoss of [N, V].

    Args:
        As ops.cross_entropy, which says what each is.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        group: Any = None,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "z_loss": z_loss,
            "logit_scale": logit_scale,
            "group": group,
        }

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return loss.cross_entropy(logits, target, **self.options)


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer and the cross entropy of its outputs, never stored whole, as
    torch.nn.LinearCrossEntropyLoss: its parameters are linear.weight and linear.bias.

    Args:
        in_features: D. num_classes: V; of a rank, with a group.
        bias: whether the layer has one.
        weight: a matrix [V, D] to be used instead, an embedding's say, whose gradient it shares.
        The rest: as ops.linear_cross_entropy.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: nn.Parameter | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.linear = Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        if weight is not None:
            self.linear.weight = weight
        # says so now if there is no such option
        self.options = CrossEntropyLoss(**options).options

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        layer = self.linear
        if not plain_linear(layer):
            return loss.cross_entropy(layer(hidden), target, **self.options)
        return loss.linear_cross_entropy(hidden, layer.weight, target, layer.bias, **self.options)


class LinearKLDivLoss(nn.Module):
    """The KL divergence of a student's classes from a teacher's, both behind linear layers that the
    caller has: distillation without logits.

    Args:
        temperature, reduction: as ops.linear_kl_div.
    """

    def __init__(self, temperature: float = 1.0, reduction: str = "mean") -> None:
        super().__init__()
        self.temperature, self.reduction = temperature, reduction

    def forward(
        self,
        student: Tensor,
        student_layer: nn.Linear,
        teacher: Tensor,
        teacher_layer: nn.Linear,
        mask: Tensor | None = None,
    ) -> Tensor:
        """student [..., D], teacher [..., E], mask bool [...]."""
        expect_tensor("student", student)
        expect_tensor("teacher", teacher)
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "mask": mask,
            "reduction": self.reduction,
        }
        if not (plain_linear(student_layer) and plain_linear(teacher_layer)):
            with torch.no_grad():
                wanted = teacher_layer(teacher)
            return loss.kl_div(student_layer(student), wanted, **options)
        theirs = teacher_layer.bias
        return loss.linear_kl_div(
            student,
            student_layer.weight,
            teacher.detach(),
            teacher_layer.weight.detach(),
            student_bias=student_layer.bias,
            teacher_bias=None if theirs is None else theirs.detach(),
            **options,
        )
