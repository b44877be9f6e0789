"""flash_attn.losses.cross_entropy: the reduced loss as a module."""

from typing import Any

from torch import Tensor

from slipstream.compat.fixed import fixed
from slipstream.compat.fla.modules.fused_cross_entropy import FusedCrossEntropyLoss


class CrossEntropyLoss(FusedCrossEntropyLoss):
    """Cross entropy of logits [N, V] and targets [N].

    "mean" of no rows at all is 0; flash_attn has NaN.
    """

    __init__ = fixed(FusedCrossEntropyLoss.__init__, "__init__", logit_softcapping=None)

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        """precomputed_lse has no effect."""
        return super().forward(input, target)
