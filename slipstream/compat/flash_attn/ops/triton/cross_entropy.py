"""flash_attn.ops.triton.cross_entropy: the loss of each row."""

from typing import Any

from torch import Tensor

from slipstream.common import checks
from slipstream.compat.fla.modules import fused_cross_entropy as fla


@checks.operator
def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row [N] of logits [N, V], and the part lse_square_scale lse^2 of it.

    precomputed_lse and inplace_backward have no effect: lse is computed, which is a read of the
    logits, and the logits stay what they are.
    """
    checks.expect_rank("logits", logits, 2, "[N, V]")
    checks.expect_shape("labels", labels, logits.shape[:1])
    return fla.cross_entropy_loss(
        logits,
        labels,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index=ignore_index,
        process_group=process_group,
    )
