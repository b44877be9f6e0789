"""Decays per channel in bfloat16: operands of a chunk's scores by quarters of the chunk.

Where a half of a chunk decays by more than 2^(-2 LIMIT), but no quarter does, scores are three
products into the same sums. Each has operands of some tokens alone, so that a pair of tokens is in
one of them, and in the others as 0:

    reads of the second half, writes of the first    relative to the middle, as by halves
    the first half, the second half                  relative to its own middle, its quarters APART

A read and a write differ from those by halves by a whole power of 2 for each channel, which their
product does not have, so that sums have the same bits either way (intra_anchored.py).
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.dplr.gate_sums import load_gates_of, product_of_gates
from slipstream.kernels.linear.triton.dplr.intra_anchored import (
    FAR,
    WHOLE,
    half_sums,
    middle_of,
    strongest_half,
)

# the bits of WHOLE; those of a sum with it are more by the whole number
WHOLE_BITS = tl.constexpr(0x4B400000)
# less than what a token decays by that is read by quarters, and 0
LOWEST = tl.constexpr(-700.0)
# more than two quarters may decay by
LOWEST_MIDDLE = tl.constexpr(-400.0)
# what q exp(G) is relative to in the first half: exp(G) down to 2^-149 is two factors' product
START = tl.constexpr(-60)


@triton.jit
def split_exp2(b):
    """2^b less a power of 2, and its exponent, a whole number; b: multiples of 2^-14. As
    exp2_by_parts."""
    b_whole = (b - (0.5 - 2.0**-16)) + WHOLE
    b_exponent = b_whole.to(tl.int32, bitcast=True) - WHOLE_BITS
    return tl.exp2(b - (b_whole - WHOLE)), b_exponent


@triton.jit
def power_of_2(b_n):
    """2^n of whole numbers below 128; 0 below 2^-126."""
    return (tl.maximum(b_n + 127, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rounded_sum(b_sum):
    """G as multiples of 2^-14, from where no decay is more than 0 on."""
    b_sum = tl.maximum(b_sum, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    return (b_sum + FAR) - FAR


@triton.jit
def columns_of(b_x, piece, PIECES: tl.constexpr):
    """Columns of [C, BK], one piece of PIECES, 1 or 2. A product of gates with fewer than 64
    columns is what ptxas 12.8 gets wrong (compiler/known_bugs.py), and what comes after it has
    registers for 32."""
    if PIECES == 2:
        b_x = tl.permute(tl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2)), (0, 2, 1))
        b_low, b_high = tl.split(b_x)
        b_x = tl.where(piece == 0, b_low, b_high)
    return b_x


@triton.jit
def sums_from_start(
    p_g, o_k, o_c, m_c,
    BEFORE: tl.constexpr, K: tl.constexpr, CHANNEL: tl.constexpr, FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """G [C, BK] of the channels o_k, at p_g [C, 1] the first's gates; BEFORE: of the token
    before."""
    seen = o_c[None, :] < o_c[:, None] if BEFORE else o_c[None, :] <= o_c[:, None]
    b_g = load_gates_of(p_g + o_k[None, :] * CHANNEL, m_c[:, None] & (o_k < K)[None, :])
    return product_of_gates(seen.to(tl.float32), b_g, FP32, PRECISION)


@triton.jit
def quarter_sums(b_g):
    """Of gates [C, BK], the sums of the first and of the third quarter [BK]."""
    o_c = tl.arange(0, b_g.shape[0])[:, None]
    Q: tl.constexpr = b_g.shape[0] // 4
    b_first = tl.sum(tl.where(o_c < Q, b_g, 0.0), 0)
    return b_first, tl.sum(tl.where((o_c >= 2 * Q) & (o_c < 3 * Q), b_g, 0.0), 0)


@triton.jit
def farthest_quarter(b_first, b_third, b_early, b_late, LIMIT: tl.constexpr, APART: tl.constexpr):
    """The largest decay of a quarter in each channel [BK], of the sums of the first, the third and
    both halves."""
    b_early = strongest_half(b_first, b_early - b_first, LIMIT, APART)
    return tl.maximum(b_early, strongest_half(b_third, b_late - b_third, LIMIT, APART))


@triton.jit
def anchors(b_first, b_third, b_early, o_c, LIMIT: tl.constexpr, APART: tl.constexpr):
    """n by halves in the second half, and START in the first; n by quarters: [C, BK]."""
    C: tl.constexpr = o_c.shape[0]
    later = (o_c >= C // 2)[:, None]
    b_first = middle_of(b_first, LIMIT, APART)
    b_third = middle_of(b_third, LIMIT, APART)
    b_middle = tl.maximum(tl.floor(b_early), LOWEST_MIDDLE)
    b_half = (b_middle - APART).to(tl.int32)
    b_anchor = tl.where(later, (b_third + b_middle)[None, :], b_first[None, :])
    b_anchor += tl.where((o_c // (C // 4)) % 2 == 0, APART, -APART)[:, None]
    return tl.where(later, b_half[None, :], START), b_anchor.to(tl.int32)


@triton.jit
def from_start(b_r, b_e, b_half):
    """Reads [C, BK] times exp(G), less 2^b_half, and this: b_r has their decays less 2^b_e."""
    return b_r * power_of_2(b_e - b_half), power_of_2(b_half)


@triton.jit
def until_end(b_total, b_e):
    """Of writes whose decays are 2^b_e more: exp(total) of [BK]."""
    b_whole = tl.floor(b_total)
    b_power = power_of_2(b_e + b_whole.to(tl.int32)[None, :])
    return tl.exp2(b_total - b_whole)[None, :] * b_power


@triton.jit
def read_operands(b_r, b_wide, b_e, b_anchor, o_c, dtype: tl.constexpr):
    """Of reads: in the second half relative to the middle, which b_wide are; in each half by
    quarters."""
    later = (o_c >= o_c.shape[0] // 2)[:, None]
    b_r = b_r * power_of_2(b_e - b_anchor)
    b_early = tl.where(later, 0.0, b_r).to(dtype)
    b_late = tl.where(later, b_r, 0.0).to(dtype)
    return tl.where(later, b_wide, 0.0).to(dtype), b_early, b_late


@triton.jit
def write_powers(b_e, b_early, b_anchor, o_c, APART: tl.constexpr):
    """What writes are multiplied by whose decays are 2^b_e more: in the first half relative to the
    middle, 0 in the second; by quarters."""
    b_middle = (tl.maximum(tl.floor(b_early), LOWEST_MIDDLE) + APART).to(tl.int32)
    later = (o_c >= o_c.shape[0] // 2)[:, None]
    b_half = tl.where(later, 0.0, power_of_2(b_e + b_middle[None, :]))
    return b_half, power_of_2(b_e + b_anchor)


@triton.jit
def write_operands(b_w, powers, o_c, dtype: tl.constexpr):
    """Of writes: of the first half relative to the middle; by quarters all, those of the second
    half."""
    b_anchor = (b_w * powers[1]).to(dtype)
    later = (o_c >= o_c.shape[0] // 2)[:, None]
    return (b_w * powers[0]).to(dtype), b_anchor, tl.where(later, b_anchor, 0.0).to(dtype)


@triton.jit
def add_by_quarters(b_a, read, write, PRECISION: tl.constexpr):
    """b_a + r w^T [C, C]: between halves, in the first (and above the diagonal), in the second."""
    b_a = tl.dot(read[0], tl.trans(write[0]), b_a, input_precision=PRECISION)
    b_a = tl.dot(read[1], tl.trans(write[1]), b_a, input_precision=PRECISION)
    return tl.dot(read[2], tl.trans(write[2]), b_a, input_precision=PRECISION)


@triton.jit
def quarters_together(b_scores, o_c, APART: tl.constexpr):
    """Scores [C, C] of operands whose halves and quarters are APART."""
    quarter = o_c // (o_c.shape[0] // 4)
    apart = quarter[:, None] > quarter[None, :]
    return b_scores * tl.where(apart, 2.0 ** (-2 * APART), 1.0)


@triton.jit
def lowest_of_quarters(
    b_sum, b_first, b_third, b_early, o_c, LIMIT: tl.constexpr, APART: tl.constexpr
):
    """Sum [C] of a token's gates in its quarter, cut as middle_of, or of a quarter before if lower,
    of the lowest channel."""
    quarter = (o_c // (o_c.shape[0] // 4))[:, None]
    # what the second quarter writes has what the first one was cut by, too, and is beside a 0 there
    b_second = b_early - b_first + tl.minimum(b_first + (LIMIT + APART), 0.0)
    b_past = tl.where(quarter == 0, 0.0, b_first[None, :])
    b_past = tl.where(quarter >= 2, tl.minimum(b_past, b_second[None, :]), b_past)
    b_past = tl.where(quarter == 3, tl.minimum(b_past, b_third[None, :]), b_past)
    b_first = tl.maximum(b_first, -(LIMIT + APART))
    b_third = tl.maximum(b_third, -(LIMIT + APART))
    b_base = tl.where(quarter == 1, b_first[None, :], 0.0)
    b_base = tl.where(quarter == 2, b_early[None, :], b_base)
    b_base = tl.where(quarter == 3, (b_early + b_third)[None, :], b_base)
    return tl.min(tl.minimum(b_sum - b_base, b_past), 1)


@triton.jit
def add_scores_of_reads(b_ab, b_ak, p_a, p_b, p_k, p_w, p_g, b_sum, b_before, o_c, m_k, c):
    """Scores [C, C] with BK channels more of what reads x, with b and, but for DELTA, with k; and
    lowest_of_quarters. At p_w goes what was read times its decay from the start.

    b_sum, b_before: G [C, BK], and that of the token before where reads have that.
    """
    dtype: tl.constexpr = p_a.dtype.element_ty
    b_g = load_gates_of(p_g, m_k)
    b_early, _ = half_sums(b_g)
    b_first, b_third = quarter_sums(b_g)
    b_lowest = lowest_of_quarters(b_sum, b_first, b_third, b_early, o_c, c.LIMIT, c.APART)
    b_half, b_anchor = anchors(b_first, b_third, b_early, o_c, c.LIMIT, c.APART)
    b_read, b_e = split_exp2(rounded_sum(b_before))
    b_a = tl.load(p_a, mask=m_k, other=0.0) * b_read
    b_wide, b_start = from_start(b_a, b_e, b_half)
    tl.store(p_w, (b_wide * b_start).to(dtype))
    a = read_operands(b_a, b_wide, b_e, b_anchor, o_c, dtype)
    b_write, b_e = split_exp2(-rounded_sum(b_sum))
    powers = write_powers(b_e, b_early, b_anchor, o_c, c.APART)
    b_b = tl.load(p_b, mask=m_k, other=0.0) * b_write
    b_ab = add_by_quarters(b_ab, a, write_operands(b_b, powers, o_c, dtype), c.PRECISION)
    if not c.DELTA:
        b_k = tl.load(p_k, mask=m_k, other=0.0) * b_write
        b_ak = add_by_quarters(b_ak, a, write_operands(b_k, powers, o_c, dtype), c.PRECISION)
    return b_ab, b_ak, b_lowest
