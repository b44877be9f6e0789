"""Decay inside a chunk, a gate for every channel, for chunks that decay little enough to be whole.

Let c be the middle of a chunk of C tokens and, in base 2,

    E_i = sum of g from c to i, if i is at c or after it, else - (sum of g from i + 1 to c - 1)
    early = sum of g before c        late = sum of g from c on

Each is a sum of numbers of one sign. The decay between j and i is exp(E_i) exp(-E_j), that from the
start to i exp(early) exp(E_i), that from j to the end exp(late) exp(-E_j). While no |E| is more
than LIMIT, both factors are finite and lose no digits, and one product has the scores of all pairs,
those that nothing reads among them. A chunk with a channel beyond that is "strong": the kernels
here leave it to those of intra_safe.py and intra_safe_bwd.py (gate_sums.py).

In bfloat16, whose exponents have room for it, a chunk may decay further, each half by 2^(-2 LIMIT):
E is then APART less in the first half and APART more in the second, and what a read of the second
half has of a write in the first one comes out 2^(2 APART) times too large, which is taken off.

That is for the gradients. An output must not depend on later tokens, not even by what its decays
are relative to, so forward takes G, the sum of g from the start to i, and a whole number,

    exp(G_i - n) exp(n - G_j)      n = early, cut, + APART in the first half, - APART in the second

where G is rounded to multiples of 2^-14, so that n moves exponents alone (exp2_by_parts); without
APART n is 0.
Inputs that are 0 or at least 2^-46 keep all digits that n could cost: early is cut at
-(LIMIT + APART), so that where later gates move n, no factor of the first half is below 2^-80, and
tokens of the second half have n from their past. A read beyond the cut has one n always.
Also in strong chunks that is how a token reads whose own gates allow it (is_read_anchored).
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.dplr.gate_sums import load_gates_of, product_of_gates
from slipstream.kernels.linear.triton.scalar_decay.device import ROUNDING
from slipstream.kernels.primitives.device import WHOLE

FAR = tl.constexpr(1000.0)


@triton.jit
def load_anchored(
    g_ptr, at, stride, o_c, m_g, o_k, apart,
    CHANNEL: tl.constexpr, BEFORE: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """E [C, BK], E without a token's own gate (if BEFORE, else E), early, late [BK].

    apart: what E has less in the first half, and more in the second.
    """
    C: tl.constexpr = o_c.shape[0]
    p_g = g_ptr + at + o_c[:, None] * stride + o_k[None, :] * CHANNEL
    b_g = load_gates_of(p_g, m_g)
    later = (o_c >= C // 2)[:, None]
    # of one sign each, so that neither sum cancels
    b_early = tl.sum(tl.where(later, 0.0, b_g), 0)
    b_late = tl.sum(tl.where(later, b_g, 0.0), 0)
    i = o_c[:, None]
    t = o_c[None, :]
    past = (t >= C // 2) & (t <= i)
    ahead = (t < C // 2) & (t > i)
    # a product with -1, 0 and 1: a scan along rows would cross warps at each step
    b_e = product_of_gates(past.to(tl.float32) - ahead.to(tl.float32), b_g, FP32, PRECISION)
    b_before = b_e
    if BEFORE:
        past = (t >= C // 2) & (t < i)
        ahead = (t < C // 2) & (t >= i)
        b_seen = past.to(tl.float32) - ahead.to(tl.float32)
        b_before = product_of_gates(b_seen, b_g, FP32, PRECISION)
    b_apart = tl.where(later, apart, -apart)
    return b_e + b_apart, b_before + b_apart, b_early, b_late


@triton.jit
def half_sums(b_g):
    """Sums of gates [C, BK] over the chunk's halves, early and late [BK]."""
    C: tl.constexpr = b_g.shape[0]
    later = (tl.arange(0, C) >= C // 2)[:, None]
    return tl.sum(tl.where(later, 0.0, b_g), 0), tl.sum(tl.where(later, b_g, 0.0), 0)


@triton.jit
def load_from_start(
    g_ptr, at, stride, o_c, m_g, o_k,
    CHANNEL: tl.constexpr, BEFORE: tl.constexpr, LIMIT: tl.constexpr, APART: tl.constexpr,
    FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """G - n [C, BK], that without a token's own gate (if BEFORE, else the same); the middle, early,
    late [BK]."""
    C: tl.constexpr = o_c.shape[0]
    p_g = g_ptr + at + o_c[:, None] * stride + o_k[None, :] * CHANNEL
    b_g = load_gates_of(p_g, m_g)
    b_early, b_late = half_sums(b_g)
    i = o_c[:, None]
    t = o_c[None, :]
    # from the chunk's start, which no later token moves
    b_e = product_of_gates((t <= i).to(tl.float32), b_g, FP32, PRECISION)
    b_before = b_e
    if BEFORE:
        b_before = product_of_gates((t < i).to(tl.float32), b_g, FP32, PRECISION)
    b_middle = tl.zeros_like(b_early)
    if APART > 0:
        b_middle = middle_of(b_early, LIMIT, APART)
        later = (o_c >= C // 2)[:, None]
        b_far = b_middle[None, :] + tl.where(later, FAR - APART, FAR + APART)
        # a sum with FAR is a multiple of 2^-14, and a whole number less is exact
        b_e = (b_e + FAR) - b_far
        b_before = (b_before + FAR) - b_far
    return b_e, b_before, b_middle, b_early, b_late


@triton.jit
def middle_of(b_early, LIMIT: tl.constexpr, APART: tl.constexpr):
    """early [BK], cut where both factors of a half that decays by 2^(-2 LIMIT) have like room."""
    return tl.maximum(tl.floor(b_early), -(LIMIT + APART), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def strongest_half(b_early, b_late, LIMIT: tl.constexpr, APART: tl.constexpr):
    """Of the two halves of a chunk the decay [BK] of that which decays more. Reads of the second
    one have what the middle was cut by, too."""
    if APART > 0:
        b_late += tl.minimum(b_early + (LIMIT + APART), 0.0)
    return -tl.minimum(b_early, b_late)


@triton.jit
def exp2_by_parts(b, APART: tl.constexpr):
    """2^b, but at least 2^-126; b: below 126, multiples of 2^-14. A whole number more moves the
    exponent alone, as n may be: a GPU's instruction rounds otherwise below 0 than above it, so that
    it gets what is after the point. Without APART there is no n."""
    if APART > 0:
        b = tl.maximum(b, -126.0, propagate_nan=tl.PropagateNan.ALL)
        b_whole = (b - (0.5 - 2.0**-16)) + WHOLE
        b_mantissa = tl.exp2(b - (b_whole - WHOLE))
        bits = b_mantissa.to(tl.int32, bitcast=True) + (b_whole.to(tl.int32, bitcast=True) << 23)
        # the bits of a NaN would become those of a number
        b_power = bits.to(tl.float32, bitcast=True) + 0.0 * b
    else:
        b_power = tl.exp2(b)
    return b_power


@triton.jit
def exp2_of_start(b_middle, o_c, APART: tl.constexpr):
    """exp(n) [C, BK] of the middle [BK]."""
    later = o_c >= o_c.shape[0] // 2
    b_n = b_middle[None, :] + tl.where(later, -APART, APART)[:, None]
    if APART > 0:  # of a whole number nothing but the exponent
        bits = ((b_n + WHOLE).to(tl.int32, bitcast=True) << 23) + 0x3F800000
        b_power = tl.where(b_n < -126, 0.0, bits.to(tl.float32, bitcast=True) + 0.0 * b_n)
    else:
        b_power = tl.exp2(b_n)
    return b_power


@triton.jit
def until_end(b_sum, o_c, APART: tl.constexpr):
    """exp(b_sum - APART) [C, BK] in the first half of a chunk, then more; b_sum [BK]."""
    later = o_c >= o_c.shape[0] // 2
    return tl.exp2(b_sum[None, :] + tl.where(later, APART, -APART)[:, None])


@triton.jit
def together(b_scores, o_c, APART: tl.constexpr):
    """Scores [C, C] of operands whose halves are APART."""
    if APART > 0:
        later = o_c >= o_c.shape[0] // 2
        apart = later[:, None] & (later == 0)[None, :]
        b_scores *= tl.where(apart, 2.0 ** (-2 * APART), 1.0)
    return b_scores


@triton.jit
def anchored_writes(b_e, LIMIT: tl.constexpr, APART: tl.constexpr):
    """exp(n - G) [C, BK], and where no such read has it, something finite."""
    # such a write is multiplied by a read's decay that is 0, and inf times 0 would be NaN
    return exp2_by_parts(tl.minimum(-b_e, 2 * LIMIT + 1 - APART), APART)


@triton.jit
def lowest_read(b_e, b_middle, b_early, o_c, LIMIT: tl.constexpr, APART: tl.constexpr):
    """G [C] of each token's lowest channel, or from the middle on what is lower, early or the sum
    from the middle, cut."""
    b_sum = b_e
    if APART > 0:
        later = (o_c >= o_c.shape[0] // 2)[:, None]
        b_sum += b_middle[None, :] + tl.where(later, -APART, APART)
        b_cut = tl.maximum(b_early, -(LIMIT + APART))
        b_sum = tl.where(later, tl.minimum(b_sum - b_cut[None, :], b_early[None, :]), b_sum)
    return tl.min(b_sum, 1)


@triton.jit
def is_read_anchored(b_lowest, LIMIT: tl.constexpr):
    """Whether tokens read as in chunks that are not strong, by lowest_read."""
    return b_lowest >= -(2 * LIMIT + ROUNDING)


@triton.jit
def add_anchored_bwd(b_dg, b_x, o_c, BEFORE: tl.constexpr, FP32: tl.constexpr, PRECISION):
    """b_dg plus the sum over i >= t (BEFORE: i > t) of b_x [C, BK], for each t."""
    t = o_c[:, None]
    i = o_c[None, :]
    seen = i > t if BEFORE else i >= t
    b_seen = tl.where(seen, 1.0, 0.0)
    return b_dg + product_of_gates(b_seen, b_x, FP32, PRECISION)
