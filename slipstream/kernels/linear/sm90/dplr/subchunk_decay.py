"""Sums of gates by levels, as products: what strong chunks take on sm_90.

At level l the tokens lie in halves of 2^l, later and earlier ones by turns, and what reads in a
later half sees what the earlier half beside it wrote. With the seam of two halves between them,

    e_t = sum of g from the seam to t       in a later half
          sum of g from t + 1 to the seam   in an earlier one

the decay of such a pair is exp(e_i + e_j), both at most 1. Levels 0 to 5 have every pair of a chunk
once. No sum is a difference of larger ones. Levels 0 to BASE - 1 are the pairs within 16 tokens.
"""

from slipstream.kernels.linear.triton.common.gate_ones import BASE
from slipstream.kernels.primitives.device import Names
from slipstream.kernels.primitives.sm90 import gl, gluon, warpgroup_mma, warpgroup_mma_wait

LEVELS = gl.constexpr(6)
SUMS = Names("WITHIN", "END", "START", first=-3)  # in place of a level


@gluon.jit
def gates_seen(
    C: gl.constexpr, layout: gl.constexpr, level, none, BACK: gl.constexpr, INCLUSIVE: gl.constexpr
):
    """[C, C]: whether row i's exponent has gate t in it; BACK: row t, whether it is in i's.

    level: or of SUMS: START, from the chunk's first gate on, END, up to its last, WITHIN, from the
    first of its 16 tokens on. INCLUSIVE: a read has its.
    none: 0, and no compiler knows it (dplr_grads_parts.seen).
    """
    i = gl.arange(0, C, gl.SliceLayout(0 if BACK else 1, layout)) + none
    t = gl.arange(0, C, gl.SliceLayout(1 if BACK else 0, layout))
    if BACK:
        i, t = i[None, :], t[:, None]
    else:
        i, t = i[:, None], t[None, :]
    past = t <= i if INCLUSIVE else t < i
    if level is SUMS.START:
        seen = past
    elif level is SUMS.END:
        seen = t > i
    elif level is SUMS.WITHIN:
        seen = past & (i >> BASE == t >> BASE)
    else:
        later = ((i >> level) & 1) == 1
        seen = ((i >> level) == (t >> level)) & gl.where(later, past, t > i)
    return gl.where(seen, 1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def sum_gates(seen, high, low, zero):
    """Sums of gates, which are given as two parts in bfloat16."""
    b = warpgroup_mma(seen, low, zero, use_acc=False, is_async=True)
    b = warpgroup_mma(seen, high, b, is_async=True)
    return warpgroup_mma_wait(0, deps=(b,))
