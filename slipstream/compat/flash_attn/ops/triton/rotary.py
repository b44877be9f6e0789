"""flash_attn.ops.triton.rotary: apply_rotary, without gradients of its own."""

from torch import Tensor

from slipstream.common import checks
from slipstream.compat.flash_attn.layers.rotary import Offsets, apply_rotary_emb


@checks.operator
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """apply_rotary_emb; conjugate turns the other way."""
    sin = -sin if conjugate else sin
    return apply_rotary_emb(
        x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    )
