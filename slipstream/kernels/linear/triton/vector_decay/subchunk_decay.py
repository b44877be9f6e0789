"""Decay per channel inside a chunk of C tokens, so that no exponent overflows.

Between a read r_i and a write w_j, j < i, channels decay by exp(G_i - G_j), which as exp(G_i) times
exp(-G_j) would overflow. Halve the chunk, its halves, and so on: at level l blocks of 2^(l+1)
tokens have an earlier and a later half of 2^l, and every pair j < i lies, at exactly one level, in
the two halves of one block: siblings. With the seam between the halves,

    exp(G_i - G_j) = exp(gates after the seam, to i) * exp(gates after j, to the seam)

where both are at most 1. At one level a token is either in a later half, and reads, or in an
earlier one, and is read: one factor e_t and one row x_t = e_t * (later ? r_t : w_t) serve it, and

    scores     r_i . exp(G_i - G_j) w_j     siblings of X X^T
    gradients  of r_i and w_j               e_t * (siblings of P) X, P the gradient of scores

The sums of gates in e_t are a product of a matrix of zeros and ones with the gates: nothing
cancels, and with bfloat16 gates nothing is rounded. Its transpose takes the gradient of the
exponents, x_t * dx_t, back to the gates.

Where the gates of a block of 2^base tokens add up to no less than -BOUND, whatever the channel,
exp(G_i) and exp(-G_j) from its start are safe after all: one product takes the place of `base`
levels. Most chunks of a trained model are one such block.

In bfloat16, whose exponents have room for it, gradients take a chunk of which each half decays by
no more than 2^-HALF as one block, too: factors are exp(G_i - n) and exp(n - G_j), n the sum up to
the middle and APART more in the first half, less in the second. What a read of the second half has
of a write in the first comes out 2^(2 APART) times too large, which is taken off.

An output has the same bits whatever comes after it, so gates of later tokens must not choose how
it is computed. A read i takes the whole chunk as one block while the gates up to i allow that;
others take blocks of 2^BASE tokens, channel by channel, while the gates from the block's start to i
do, and levels above and else. Levels that no read wants are left out: they would add zeros.

Where a read sees the state before its own token's decay (BEFORE), its own gate is left out.
"""

from collections import namedtuple

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.common.gate_ones import BASE, EDGES, KINDS, load_ones
from slipstream.kernels.linear.triton.scalar_decay.device import LOG2E, LOWEST_GATE, ROUNDING

# numbers of a launch
Sizes = namedtuple("Sizes", "T N HV HK")

# What a half of a chunk, or a quarter, decays by at most where they take the place of one block, in
# base 2.
HALF = tl.constexpr(160.0)


@triton.jit
def _split(b_x, BF16_TERMS: tl.constexpr):
    """Parts of float32 for products with ones: 1 to 3 bfloat16 that add up, or with 0 itself.

    3 are all of float32, and cheaper than the three products that take it whole.
    """
    b_0 = b_x
    b_1 = b_x
    b_2 = b_x
    if BF16_TERMS > 0:
        b_0 = b_x.to(tl.bfloat16)
        b_rest = b_x - b_0.to(tl.float32)
        b_1 = b_rest.to(tl.bfloat16)
        b_2 = (b_rest - b_1.to(tl.float32)).to(tl.bfloat16)
    return b_0, b_1, b_2


@triton.jit
def split_bf16(b_x, dtype: tl.constexpr):
    """float32 as a first part of another dtype and the rest, which is rounded."""
    b_first = b_x.to(dtype)
    return b_first, (b_x - b_first.to(tl.float32)).to(dtype)


@triton.jit
def dot_with(b_p, b_x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """P X of x in float32: rounded to dtype, as P is, or, where P is float32 and dtype is not,
    both in two parts."""
    if b_p.dtype == dtype:
        b_y = tl.dot(b_p, b_x.to(dtype), input_precision=PRECISION)
    else:
        b_p_first, b_p_rest = split_bf16(b_p, dtype)
        b_x_first, b_x_rest = split_bf16(b_x, dtype)
        b_y = tl.dot(b_p_rest, b_x_first)
        b_y = tl.dot(b_p_first, b_x_rest, b_y)
        b_y = tl.dot(b_p_first, b_x_first, b_y)
    return b_y


@triton.jit
def anchored_reads(
    b_p, b_w, b_dqs, b_early, rows, dtype: tl.constexpr, BEFORE: tl.constexpr,
    APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dqs + (lower triangle of P) w [C, BK], in float32."""
    C: tl.constexpr = rows.shape[0]
    i, j = rows[:, None], tl.arange(0, C)[None, :]
    b_p = tl.where(i > j if BEFORE else i >= j, b_p, 0.0)
    if APART > 0:
        # writes of the first half are 2^(2 APART) times what they are to the other's reads
        b_dr = b_dqs * tl.exp2(b_early + APART)[None, :]
        b_dr += dot_with(tl.where(j < C // 2, b_p, 0.0), b_w, dtype, PRECISION)
        b_dr *= tl.where(i < C // 2, 1.0, 2.0 ** (-2 * APART))
        b_dr += dot_with(tl.where(j < C // 2, 0.0, b_p), b_w, dtype, PRECISION)
    else:
        b_dr = dot_with(b_p, b_w, dtype, PRECISION) + b_dqs
    return b_dr


@triton.jit
def _add_sums(b_ones, b_terms, b_sum, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """b_sum plus, at t, the sum over the tokens where b_ones [t, u] is 1, [C, BK]."""
    b_sum = tl.dot(b_ones, b_terms[0], b_sum, input_precision=PRECISION)
    if BF16_TERMS > 1:
        b_sum = tl.dot(b_ones, b_terms[1], b_sum)
    if BF16_TERMS > 2:
        b_sum = tl.dot(b_ones, b_terms[2], b_sum)
    return b_sum


@triton.jit
def _dot_ones(span, b_terms, b_sum, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """b_sum plus, at t, the sum over the span of t, [C, BK]."""
    b_ones = _ones(span, b_sum.shape[0], b_terms[0].dtype)
    return _add_sums(b_ones, b_terms, b_sum, BF16_TERMS, PRECISION)


@triton.jit
def split_gates(b_g, BF16_TERMS: tl.constexpr):
    """Gates in float32, and split."""
    b_g = b_g.to(tl.float32)
    b_g = tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)
    return b_g, _split(b_g, BF16_TERMS)


@triton.jit
def tokens(C: tl.constexpr, dtype: tl.constexpr):
    """0 .. C - 1 as the rows of a dot's result: masks made of them stay in registers."""
    b_zero = tl.zeros((C, C), dtype)
    return tl.arange(0, C) + tl.sum(tl.dot(b_zero, b_zero), 1).to(tl.int32)


# Spans of tokens of a chunk, the first and how many: the gates between a token t and an edge, or,
# the other way round (*_back), all tokens whose span a gate is in.


@triton.jit
def prefix_span(t, BEFORE: tl.constexpr):
    """The gates from a chunk's start to t."""
    return t * 0, t + (0 if BEFORE else 1)


@triton.jit
def prefix_span_bwd(t, C: tl.constexpr, BEFORE: tl.constexpr):
    first = t + (1 if BEFORE else 0)
    return first, C - first


@triton.jit
def suffix_span(t, C: tl.constexpr):
    """The gates after t, to the chunk's end."""
    return t + 1, C - 1 - t


@triton.jit
def suffix_span_bwd(t):
    return t * 0, t


@triton.jit
def block_span(t, base, BEFORE: tl.constexpr):
    """The gates from the start of the block of 2^base tokens to t."""
    start = (t >> base) << base
    return start, t - start + (0 if BEFORE else 1)


@triton.jit
def block_span_bwd(t, base, BEFORE: tl.constexpr):
    first = t + (1 if BEFORE else 0)
    return first, ((t >> base) << base) + (1 << base) - first


@triton.jit
def _ones(span, C: tl.constexpr, dtype: tl.constexpr):
    """1 at [t, u] if u is in the span of t, else 0."""
    first, count = span
    u = tl.arange(0, C)[None, :]
    inside = (u - first[:, None]).to(tl.uint32) < count[:, None].to(tl.uint32)
    return tl.where(inside, tl.full((1, 1), 1.0, dtype), tl.zeros((1, 1), dtype))


@triton.jit
def _mild(b_decay, BOUND: tl.constexpr):
    """1 for a channel's decay that is safe, else 0, also for NaN, which a minimum would drop."""
    return (b_decay >= tl.exp2(-BOUND * LOG2E)).to(tl.int32)


@triton.jit
def is_block_safe(p_decay, K: tl.constexpr, ALL: tl.constexpr, BOUND: tl.constexpr):
    """Whether a chunk is one safe block in all of its channels; ALL: the power of two >= K."""
    o_k = tl.arange(0, ALL)
    b_decay = tl.load(p_decay + o_k, mask=o_k < K, other=1.0)
    return tl.min(_mild(b_decay, BOUND), 0) == 1


@triton.jit
def is_chunk_safe(
    p_decay, total, each,
    K: tl.constexpr, ALL: tl.constexpr, BOUND: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Whether all chunks of this program are, of [0, total) every num_programs-th, each // `each`.

    One load for up to MAX_CHUNKS chunks: a program that only looked at one would cost as much.
    """
    at = tl.program_id(0) + tl.arange(0, MAX_CHUNKS) * tl.num_programs(0)
    o_k = tl.arange(0, ALL)
    m = (at < total)[:, None] & (o_k < K)[None, :]
    p_decay += (at // each).to(tl.int64)[:, None] * K + o_k[None, :]
    b_decay = tl.load(p_decay, mask=m, other=1.0)
    return tl.min(tl.min(_mild(b_decay, BOUND), 1), 0) == 1


@triton.jit
def half_sums(b_g, C: tl.constexpr):
    """The gates of both halves of a chunk added up, in base 2, [C, BK] -> [BK]."""
    later = (tl.arange(0, C) >= C // 2)[:, None]
    b_early = tl.sum(tl.where(later, 0.0, b_g), 0) * LOG2E
    return b_early, tl.sum(tl.where(later, b_g, 0.0), 0) * LOG2E


@triton.jit
def are_halves_safe(b_early, b_late):
    """Whether both are in all channels; not so for NaN."""
    safe = (b_early >= -HALF) & (b_late >= -HALF)
    return tl.min(safe.to(tl.int32), 0) == 1


@triton.jit
def quarter_halves(b_g):
    """Half of what each quarter of a chunk decays by, in base 2, [C, BK] -> [4, BK]."""
    C: tl.constexpr = b_g.shape[0]
    return tl.sum(tl.reshape(b_g, (4, C // 4, b_g.shape[1])), 1) * (0.5 * LOG2E)


@triton.jit
def are_quarters_safe(b_h):
    """Whether all are in all channels, by quarter_halves; not so for NaN."""
    # flat: sm_100 takes no axis after the other (two-axis-sum in compiler/known_bugs.py)
    return tl.min((b_h >= -HALF / 2).to(tl.int32)) == 1


@triton.jit
def offsets(b_early, rows, APART: tl.constexpr):
    """n [C, BK]: the sum up to the middle, and APART more in the first half, less in the other."""
    later = rows >= rows.shape[0] // 2
    return b_early[None, :] + tl.where(later, -APART, APART)[:, None]


@triton.jit
def is_read_safe(b_sum, BOUND: tl.constexpr):
    """Whether reads take the whole chunk as one block, by the gates from its start to each."""
    return b_sum >= -(BOUND + ROUNDING) * LOG2E


@triton.jit
def chunk_writes(b_sum, BOUND: tl.constexpr):
    """exp(-G), and where no safe read has it, something finite: it is multiplied by zeros."""
    return tl.exp2(tl.minimum(-b_sum, (BOUND + ROUNDING) * LOG2E))


@triton.jit
def block_factors(
    ones_ptr, b_terms, BOUND: tl.constexpr, SHIFT: tl.constexpr, BEFORE: tl.constexpr,
    BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """exp(G_i) and exp(-G_j) in blocks of 2^BASE tokens, the first level besides, and which reads
    and channels are safe, [C, BK]; other reads have a factor of 0.

    SHIFT: where the exponents of both have room for it, they lie on both sides of 0.
    """
    C: tl.constexpr = b_terms[0].shape[0]
    b_write = sums_of(
        load_ones(ones_ptr, EDGES.BLOCK, C, KINDS.WRITES), b_terms, BF16_TERMS, PRECISION
    )
    b_read = b_write
    if BEFORE:
        b_read = sums_of(
            load_ones(ones_ptr, EDGES.BLOCK, C, KINDS.READS), b_terms, BF16_TERMS, PRECISION
        )
    safe = b_read >= -(BOUND + SHIFT) * LOG2E
    # flat: sm_100 takes no axis after the other (two-axis-sum in compiler/known_bugs.py)
    first = tl.where(tl.min(safe.to(tl.int32)) == 1, BASE, 0)
    b_read = tl.where(safe, tl.exp2(b_read + SHIFT * LOG2E), 0.0)
    b_write = tl.exp2(tl.minimum(-b_write - SHIFT * LOG2E, BOUND * LOG2E))
    return b_read, b_write, first, safe


@triton.jit
def safe_base(b_g, LEVELS: tl.constexpr, BOUND: tl.constexpr):
    """The largest blocks that are safe: LEVELS if the chunk is one, else by the lowest gate; none
    of fewer than 8 tokens, for one takes longer than two levels."""
    lowest = tl.min(tl.min(b_g, 1), 0)
    base = 0
    for level in tl.static_range(1, LEVELS):
        base += (lowest * (1 << level) >= -BOUND).to(tl.int32)
    base = tl.where(base < 3, 0, base)
    return tl.where(tl.min(tl.sum(b_g, 0), 0) >= -BOUND, LEVELS, base)


@triton.jit
def sums(span, b_terms, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """The sums of the gates of each span, in base 2, [C] -> [C, BK]."""
    b_zero = tl.zeros(b_terms[0].shape, tl.float32)
    return _dot_ones(span, b_terms, b_zero, BF16_TERMS, PRECISION) * LOG2E


@triton.jit
def decay(span, b_terms, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """exp of the sums of the gates of each span, [C] -> [C, BK]."""
    return tl.exp2(sums(span, b_terms, BF16_TERMS, PRECISION))


@triton.jit
def sums_of(b_ones, b_terms, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """The sums of the gates at ones [C, C] (gate_ones.py), in base 2, [C, BK]."""
    b_zero = tl.zeros(b_terms[0].shape, tl.float32)
    return _add_sums(b_ones, b_terms, b_zero, BF16_TERMS, PRECISION) * LOG2E


@triton.jit
def sums_to_gates_bwd(b_ones, b_de, b_dg, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """Adds to the gates' gradient that of the sums by b_ones transposed, b_de [C, BK]."""
    return _add_sums(b_ones, _split(b_de, BF16_TERMS), b_dg, BF16_TERMS, PRECISION)


@triton.jit
def spans_to_gates_bwd(span_back, b_de, b_dg, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """Adds to the gates' gradient that of the sums of their spans, b_de [C, BK]."""
    return _dot_ones(span_back, _split(b_de, BF16_TERMS), b_dg, BF16_TERMS, PRECISION)


@triton.jit
def is_in_later_half(t, level):
    return (((t >> level) & 1) == 1)[:, None]


@triton.jit
def siblings(rows, level):
    """Whether two tokens lie in the two halves of one block of a level, [C, C]."""
    u = tl.arange(0, rows.shape[0])
    return ((rows >> level)[:, None] ^ (u >> level)[None, :]) == 1


@triton.jit
def same_block(rows, base):
    """Whether two tokens lie in one block of 2^base tokens, [C, C]."""
    u = tl.arange(0, rows.shape[0])
    return ((rows >> base)[:, None] ^ (u >> base)[None, :]) == 0
