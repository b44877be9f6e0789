"""fla.modules.fused_linear_cross_entropy: cross entropy behind a linear layer."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.compat.fla.modules.l2warp import l2_warp
from slipstream.ops.loss import cross_entropy, linear_cross_entropy


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: Any = None,
) -> Tensor:
    """The loss of x [N, D] and targets [N] with weight [V, D] and bias [V].

    Args:
        num_chunks, accumulate_grad_in_fp32: no effect.
        use_l2warp: l2_warp of the logits too, which are then stored whole.
    """
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": logit_softcapping,
        "logit_scale": logit_scale,
        "reduction": reduction,
        "group": process_group,
    }
    if not use_l2warp:
        return linear_cross_entropy(x, weight, target, bias, **options)
    if logit_softcapping is not None or logit_scale != 1.0 or process_group is not None:
        raise NotImplementedError(
            "use_l2warp: not with logit_softcapping, logit_scale or process_group"
        )
    logits = F.linear(x, weight, bias)
    loss = cross_entropy(logits, target, **options)
    return l2_warp(loss, logits.view(1, -1, logits.shape[-1]), l2_penalty_factor)


class FusedLinearCrossEntropyLoss(nn.Module):
    """fused_linear_cross_entropy_loss of x [..., D] and targets [...]."""

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        logit_softcapping: float | None = None,
        num_chunks: int = 8,
        reduction: str = "mean",
        use_l2warp: bool = False,
        l2_penalty_factor: float = 1e-4,
        accumulate_grad_in_fp32: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction: want "mean" or "sum", got {reduction!r}')
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.logit_scale, self.logit_softcapping = logit_scale, logit_softcapping
        self.num_chunks, self.reduction = num_chunks, reduction
        self.use_l2warp, self.l2_penalty_factor = use_l2warp, l2_penalty_factor
        self.accumulate_grad_in_fp32, self.process_group = accumulate_grad_in_fp32, process_group

    def forward(
        self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return fused_linear_cross_entropy_loss(
            x.reshape(-1, x.shape[-1]),
            target.reshape(-1),
            weight,
            bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            logit_softcapping=self.logit_softcapping,
            reduction=self.reduction,
            use_l2warp=self.use_l2warp,
            l2_penalty_factor=self.l2_penalty_factor,
            process_group=self.process_group,
        )
