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

from slipstream.kernels.linear.triton.common import gate_ones
from slipstream.kernels.linear.triton.common.gate_ones import BASE, EDGES, KINDS
from slipstream.kernels.primitives.device import LOG2E

# 2^-256 is 0 in float32, and little enough for sums of it to keep the gates beside it
LOWEST_GATE = tl.constexpr(-256.0)


@triton.jit
def load_gates_of(p_g, m_g):
    """Gates in base 2."""
    b_g = tl.load(p_g, mask=m_g, other=0.0).to(tl.float32) * LOG2E
    # -inf would make NaN of a difference of sums
    return tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)


@triton.jit
def split_gates(b_g, FP32: tl.constexpr):
    """Gates as sums_of takes them: two parts, which are right to 2^-17 and faster than float32."""
    b_high = b_g
    b_low = b_g
    if not FP32:
        b_high = b_g.to(tl.bfloat16)
        b_low = (b_g - b_high.to(tl.float32)).to(tl.bfloat16)
    return b_high, b_low


@triton.jit
def sums_of(b_seen, terms, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """b_seen [C, C] of -1, 0 and 1 times gates that are split."""
    if FP32:
        b_sum = tl.dot(b_seen.to(tl.float32), terms[0], input_precision=PRECISION)
    else:
        b_seen = b_seen.to(tl.bfloat16)
        b_sum = tl.dot(b_seen, terms[1])
        b_sum = tl.dot(b_seen, terms[0], b_sum)
    return b_sum


@triton.jit
def product_of_gates(b_seen, b_g, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """b_seen [C, C] of -1, 0 and 1 times b_g [C, BK]."""
    return sums_of(b_seen, split_gates(b_g, FP32), FP32, PRECISION)


@triton.jit
def sums_between(gates, edge, o_c, KIND: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of the gates between each token and an edge, of a kind, of gate_ones.py."""
    return sums_of(
        gate_ones.load_ones(gates[1], edge, o_c.shape[0], KIND), gates[0], FP32, PRECISION
    )


@triton.jit
def load_channel_gates(
    ones_ptr, g_ptr, at, stride, o_c, m_g, o_k,
    CHANNEL: tl.constexpr, STEPS: tl.constexpr, LIMIT: tl.constexpr, FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Values of a chunk and BK channels for the functions below:

    g [C, BK] in base 2, split, and gate_ones.py's; its sum [BK], and the first step.
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
    return split_gates(b_g, FP32), ones_ptr, b_last, first


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
def from_start(gates, o_c, KIND: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """Decay from the start of the chunk to each token."""
    b_seen = gate_ones.load_ones(gates[1], EDGES.START, o_c.shape[0], KIND)
    return tl.exp2(sums_of(b_seen, gates[0], FP32, PRECISION))


@triton.jit
def to_end(gates, o_c, FP32: tl.constexpr, PRECISION: tl.constexpr):
    """Decay from each token, without its own gate, to the end of the chunk."""
    b_seen = gate_ones.load_ones(gates[1], EDGES.START, o_c.shape[0], KINDS.READS, True)
    return tl.exp2(sums_of(b_seen, gates[0], FP32, PRECISION))


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
def is_pair_of_step(i, j, step):
    """Whether tokens i and j are in the two halves of one block of a step of forward."""
    return ((i ^ j) >> (step - 1)) == 1


@triton.jit
def block_factors(
    gates, o_c,
    LIMIT: tl.constexpr, SHIFT: tl.constexpr, BEFORE: tl.constexpr, FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Decays of reads and of writes relative to the start of their block of 2^BASE tokens, the
    first step besides, and where reads are among them [C, BK]; others read with a decay of 0."""
    b_write = sums_between(gates, EDGES.BLOCK, o_c, KINDS.WRITES, FP32, PRECISION)
    b_read = b_write
    if BEFORE:
        b_read = sums_between(gates, EDGES.BLOCK, o_c, KINDS.READS, FP32, PRECISION)
    # by this token's gates alone: later ones must not change its bits
    safe = b_read >= -2 * LIMIT
    # flat: sm_100 takes no axis after the other (two-axis-sum in compiler/known_bugs.py)
    first = tl.where(tl.min(safe.to(tl.int32)) == 1, BASE + 1, 1)
    b_read = tl.where(safe, tl.exp2(b_read + SHIFT), 0.0)
    # a write that only unsafe reads see would overflow: bounded, and those have a decay of 0
    return b_read, tl.exp2(tl.minimum(-b_write - SHIFT, 2 * LIMIT - SHIFT)), first, safe
