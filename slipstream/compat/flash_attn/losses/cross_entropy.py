"""flash_attn.losses.cross_entropy: the reduced loss as a module."""

from typing import Any

from torch import Tensor

from slipstream.compat.fla.modules.fused_cross_entropy import FusedCrossEntropyLoss


class CrossEntropyLoss(FusedCrossEntropyLoss):
    """Cross entropy of logits [N, V] and targets [N].

    "mean" of no rows at all is 0; flash_attn has NaN.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__(
            ignore_index,
            reduction,
            label_smoothing,
            logit_scale,
            lse_square_scale,
            inplace_backward=inplace_backward,
            process_group=process_group,
            return_z_loss=return_z_loss,
        )

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        """precomputed_lse has no effect."""
        return super().forward(input, target)
