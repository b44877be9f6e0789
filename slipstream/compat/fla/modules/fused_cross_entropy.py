"""fla.modules.fused_cross_entropy: cross entropy of logits."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.ops.loss import cross_entropy


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row [N] of logits [N, V], and the part lse_square_scale lse^2 of it.

    inplace_backward has no effect: logits stay what they are.
    """
    loss = cross_entropy(
        logits,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=logit_softcapping,
        z_loss=lse_square_scale,
        logit_scale=logit_scale,
        reduction="none",
        group=process_group,
    )
    if not lse_square_scale:
        return loss, torch.zeros_like(loss).detach()
    if process_group is not None:
        raise NotImplementedError("lse_square_scale: its part of the loss beside process_group")
    with torch.no_grad():
        z = logits.float() * logit_scale
        z = z if logit_softcapping is None else logit_softcapping * (z / logit_softcapping).tanh()
        part = lse_square_scale * z.logsumexp(-1) ** 2
    return loss, part.masked_fill(target == ignore_index, 0.0)


class FusedCrossEntropyLoss(nn.Module):
    """Cross entropy of logits [N, V] and targets [N], reduced.

    "mean" of no rows at all is 0; fla has NaN.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'reduction: want "mean", "sum" or "none", got {reduction!r}')
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.logit_scale = label_smoothing, logit_scale
        self.lse_square_scale, self.logit_softcapping = lse_square_scale, logit_softcapping
        self.inplace_backward, self.process_group = inplace_backward, process_group
        self.return_z_loss = return_z_loss

    def forward(self, input: Tensor, target: Tensor) -> Any:
        if self.return_z_loss:
            options = self.label_smoothing, self.logit_scale, self.lse_square_scale
            rest = self.logit_softcapping, self.ignore_index, False, self.process_group
            return tuple(
                self._reduced(x, target) for x in cross_entropy_loss(input, target, *options, *rest)
            )
        return cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.logit_softcapping,
            z_loss=self.lse_square_scale,
            logit_scale=self.logit_scale,
            reduction=self.reduction,
            group=self.process_group,
        )

    def _reduced(self, loss: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "none":
            return loss
        count = (target != self.ignore_index).sum().clamp(min=1)
        return loss.sum() / count if self.reduction == "mean" else loss.sum()
