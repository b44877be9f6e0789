"""Decay inside a chunk, a gate for every channel, however strong: sums of gates, halves of blocks.

With g [C, BK] the gates of a chunk in base 2, a sum of gates between a token and an edge is a
product of a matrix of zeros and ones with g: only numbers of one sign are added. In 16 bits g is
the sum of two bfloat16 numbers, right to 2^-17.

The scores r_i . exp(G_i - G_j) w_j factor at any token between j and i. Step s takes blocks of 2^s
tokens and the pairs that have i in the later half and j in the earlier one, with

    e_i = sum of g from the middle of the block to i        if i is in the later half
          sum of g from i + 1 to the middle                 if it is in the earlier one

for both factors, exp(e_i) exp(e_j), both at most 1. Steps 1 to log2(C) cover all j < i. Blocks that
decay by no more than 2^-LIMIT to and from their middle need no halving: there exp(-e) is finite,
and all pairs of the block are one product. So the steps of the gradients begin with the largest
such blocks and go on from there as above. Chunks that are such a block in all of their channels
never come here (intra_anchored.py).

An output has the same bits whatever comes after it. In forward, blocks of 2^BASE tokens are one
product, relative to their start, in those channels where the gates from there to the token that
reads allow it; steps within blocks have the other channels, if there are any, and add no more than
zeros to reads that have none.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# 2^-256 is 0 in float32, and little enough for sums of it to keep the gates beside it
LOWEST_GATE = tl.constexpr(-256.0)
BASE = tl.constexpr(4)


@triton.jit
def load_gates_of(p_g, m_g):
    """Gates in base 2."""
    b_g = tl.load(p_g, mask=m_g, other=0.0).to(tl.float32) * LOG2E
    # -inf would make NaN of a difference of sums
    return tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)


@triton.jit
def product_of_gates(b_seen, b_g, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """b_seen [C, C] of -1, 0 and 1 times b_g [C, BK]."""
    if FP32:
        b_sum = tl.dot(b_seen.to(tl.float32), b_g, input_precision=PRECISION)
    else:
        b_seen = b_seen.to(tl.bfloat16)
        # two products of 16 bits are right to 2^-17 and faster than one of float32
        b_high = b_g.to(tl.bfloat16)
        b_sum = tl.dot(b_seen, (b_g - b_high.to(tl.float32)).to(tl.bfloat16))
        b_sum = tl.dot(b_seen, b_high, b_sum)
    return b_sum


@triton.jit
def load_channel_gates(
    ones_ptr,
    g_ptr,
    at,
    stride,
    o_c,
    m_g,
    o_k,
    CHANNEL: tl.constexpr,
    STEPS: tl.constexpr,
    LIMIT: tl.constexpr,
    FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Values of a chunk and BK channels for the functions below:

    where g [C, BK] is, and which of it, and where the ones are (triangle): g itself would take too
    many registers; and for the gradients its sum [BK] in base 2, and the first step.
    """
    p_g = g_ptr + at + o_c[:, None] * stride + o_k[None, :] * CHANNEL
    b_g = load_gates_of(p_g, m_g)
    b_last = tl.sum(b_g, 0)
    strongest = -tl.min(tl.min(b_g, 1), 0)
    # the largest step whose blocks are safe if every token had the strongest gate
    first = (strongest <= LIMIT).to(tl.int32)
    for s in tl.static_range(1, STEPS):
        first += (strongest * (1 << s) <= LIMIT).to(tl.int32)
    # or the whole chunk, by its sum, which is less strict
    first = tl.where(-tl.min(b_last, 0) <= LIMIT, STEPS, first)
    return p_g, m_g, ones_ptr, b_last, first


@triton.jit
def triangle(ones_ptr, o_c, STRICT: tl.constexpr, UPPER: tl.constexpr):
    """[C, C], of ones_ptr [2, C, C]: 1 for i >= j, or i > j if STRICT, or that transposed."""
    C: tl.constexpr = o_c.shape[0]
    if UPPER:
        o_a = o_c[None, :] * C + o_c[:, None]
    else:
        o_a = o_c[:, None] * C + o_c[None, :]
    return tl.load(ones_ptr + STRICT * C * C + o_a)


@triton.jit
def _sums(b_seen, gates, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """Sum of the gates of the tokens that each token sees, b_seen [C, C] of zeros and ones."""
    return product_of_gates(b_seen, load_gates_of(gates[0], gates[1]), FP32, PRECISION)


@triton.jit
def sums_bwd(b_seen, b_x, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient of the gates from that of their sums b_x [C, BK], b_seen transposed."""
    if FP32:
        b_sum = tl.dot(b_seen.to(tl.float32), b_x, input_precision=PRECISION)
    else:
        # rounded once: a gradient, unlike a gate, is not exponentiated
        b_sum = tl.dot(b_seen.to(tl.bfloat16), b_x.to(tl.bfloat16))
    return b_sum


@triton.jit
def from_start(gates, o_c, BEFORE: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """Decay from the start of the chunk to each token, with its own gate or BEFORE it."""
    b_seen = triangle(gates[2], o_c, BEFORE, False)
    return tl.exp2(_sums(b_seen, gates, FP32, PRECISION))


@triton.jit
def to_end(gates, o_c, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """Decay from each token, without its own gate, to the end of the chunk."""
    b_seen = triangle(gates[2], o_c, True, True)
    return tl.exp2(_sums(b_seen, gates, FP32, PRECISION))


@triton.jit
def is_pair_in_half(i, t, step, BEFORE: tl.constexpr):
    """Whether g_t is in e_i at a step; BEFORE: in that of a read of the state before token i."""
    half = (2 * i) >> step
    past = t < i if BEFORE else t <= i
    return (half == (2 * t) >> step) & (past == (half % 2 == 1)) & (step > 0)


@triton.jit
def pairs_of_step(i, j, step, first):
    """Whether the pair j < i belongs to a step, the first of which takes whole blocks."""
    halves = ((2 * i) >> step) > ((2 * j) >> step)
    return ((i >> step) == (j >> step)) & (i > j) & (halves | (step == first))


@triton.jit
def signed(b_e, o_c, step, first, WRITE: tl.constexpr):
    """In the first step the negative, of a write's later half, of a read's earlier one."""
    # in whole blocks one factor is above 1, its exponent positive
    later = ((2 * o_c) >> step) % 2 == 1
    other = (later == WRITE) & (step == first)
    return tl.where(other[:, None], -b_e, b_e)


@triton.jit
def at_step(
    gates,
    o_c,
    step,
    WRITE: tl.constexpr,
    BEFORE: tl.constexpr,
    FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Decay between each token and the middle of its block, of a read or of a WRITE."""
    b_seen = is_pair_in_half(o_c[:, None], o_c[None, :], step, BEFORE)
    b_e = _sums(b_seen, gates, FP32, PRECISION)
    return tl.exp2(signed(b_e, o_c, step, gates[4], WRITE))


@triton.jit
def is_pair_of_step(i, j, step):
    """Whether the pair j < i belongs to a step of forward."""
    return ((i >> step) == (j >> step)) & (((2 * i) >> step) > ((2 * j) >> step))


@triton.jit
def decay_of_step(
    gates, o_c, step, BEFORE: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr
):
    """exp(e) of a step; BEFORE: as a read of the state before each token has it, else of writes,
    and of reads after it; 1 at step 0."""
    b_seen = is_pair_in_half(o_c[:, None], o_c[None, :], step, BEFORE)
    return tl.exp2(_sums(b_seen, gates, FP32, PRECISION))


@triton.jit
def block_factors(
    gates,
    o_c,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    BEFORE: tl.constexpr,
    FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Decays of reads and of writes relative to the start of their block of 2^BASE tokens, the
    first step besides, and where reads are among them [C, BK]; others read with a decay of 0."""
    i = o_c[:, None]
    t = o_c[None, :]
    block = (i >> BASE) == (t >> BASE)
    b_write = _sums(block & (t <= i), gates, FP32, PRECISION)
    b_read = b_write
    if BEFORE:
        b_read = _sums(block & (t < i), gates, FP32, PRECISION)
    # by this token's gates alone: later ones must not change its bits
    safe = b_read >= -2 * LIMIT
    # flat: sm_100 takes no axis after the other (two-axis-sum in compiler/known_bugs.py)
    first = tl.where(tl.min(safe.to(tl.int32)) == 1, BASE + 1, 0)
    b_read = tl.where(safe, tl.exp2(b_read + SHIFT), 0.0)
    # a write that only unsafe reads see would overflow: bounded, and those have a decay of 0
    return b_read, tl.exp2(tl.minimum(-b_write - SHIFT, 2 * LIMIT - SHIFT)), first, safe
