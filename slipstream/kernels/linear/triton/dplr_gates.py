"""Decay inside a chunk, a gate for every channel: sums of gates as products, halves of blocks.

With g [C, BK] the gates of a chunk in base 2, a sum of gates between a token and an edge is a
product of a matrix of zeros and ones with g: only numbers of one sign are added. In 16 bits g is
the sum of two bfloat16 numbers, right to 2^-17.

The scores r_i . exp(G_i - G_j) w_j factor at any token between j and i. Step s takes blocks of 2^s
tokens and the pairs that have i in the later half and j in the earlier one, with

    e_i = sum of g from the middle of the block to i        if i is in the later half
          sum of g from i + 1 to the middle                 if it is in the earlier one

for both factors, exp(e_i) exp(e_j), both at most 1. Steps 1 to log2(C) cover all j < i. Blocks that
decay by no more than 2^-LIMIT to and from their middle need no halving: there exp(-e) is finite,
and all pairs of the block are one product. So the steps begin with the largest such blocks and go
on from there as above. Most often that is the whole chunk, whose G is then small enough for all
exponents to be differences of it.
"""

# pyright knows neither what a jit function returns nor constexpr
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# 2^-256 is 0 in float32, and little enough for sums of it to keep the gates beside it
LOWEST_GATE = tl.constexpr(-256.0)


@triton.jit
def load_channel_gates(
    ones_ptr,
    g_ptr,
    at,
    stride,
    o_c,
    m_g,
    o_k,
    HAS_GATE: tl.constexpr,
    CHANNEL: tl.constexpr,
    STEPS: tl.constexpr,
    LIMIT: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a chunk and BK channels, what the functions below take:

    where g [C, BK] is, and which of it, G, its row in the middle and its last one [BK], in base 2,
    the first step, whether that is the whole chunk, and where the ones are (triangle). g itself
    would take too many registers.
    """
    if HAS_GATE:
        if CHANNEL:
            p_g = g_ptr + at + o_c[:, None] * stride + o_k[None, :]
        else:
            p_g = g_ptr + at + o_c[:, None] * stride + o_k[None, :] * 0
        b_g = _load(p_g, m_g)
        b_G = _sums(triangle(ones_ptr, o_c, False, False), p_g, m_g, EXACT, PRECISION)
        b_middle = tl.sum(tl.where((o_c < (1 << STEPS) // 2)[:, None], b_g, 0.0), 0)
        b_last = tl.sum(b_g, 0)
        strongest = -tl.min(tl.min(b_g, 1), 0)
        first = (strongest <= LIMIT).to(tl.int32)
        for s in tl.static_range(1, STEPS):
            first += (strongest * (1 << s) <= LIMIT).to(tl.int32)
        is_whole = -tl.min(b_last, 0) <= LIMIT
        first = tl.where(is_whole, STEPS, first)
        gates = p_g, m_g, b_G, b_middle, b_last, first, is_whole, ones_ptr
    else:
        gates = ()
    return gates


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
def _load(p_g, m_g):
    b_g = tl.load(p_g, mask=m_g, other=0.0).to(tl.float32) * LOG2E
    return tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)


@triton.jit
def _sums(b_seen, p_g, m_g, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """Sum of the gates of the tokens that each token sees, b_seen [C, C] of zeros and ones."""
    b_g = _load(p_g, m_g)
    if EXACT:
        b_sum = tl.dot(b_seen.to(tl.float32), b_g, input_precision=PRECISION)
    else:
        b_seen = b_seen.to(tl.bfloat16)
        b_high = b_g.to(tl.bfloat16)
        b_sum = tl.dot(b_seen, (b_g - b_high.to(tl.float32)).to(tl.bfloat16))
        b_sum = tl.dot(b_seen, b_high, b_sum)
    return b_sum


@triton.jit
def sums_back(b_seen, b_x, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient of the gates from that of their sums b_x [C, BK], b_seen transposed."""
    if EXACT:
        b_sum = tl.dot(b_seen.to(tl.float32), b_x, input_precision=PRECISION)
    else:
        b_sum = tl.dot(b_seen.to(tl.bfloat16), b_x.to(tl.bfloat16))
    return b_sum


@triton.jit
def G_of_read(gates, BEFORE: tl.constexpr):
    """G of a read, in a whole chunk."""
    b_G = gates[2]
    if BEFORE:
        b_G -= _load(gates[0], gates[1])
    return b_G


@triton.jit
def from_start(gates, o_c, BEFORE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """Decay from the start of the chunk to each token, with its own gate or BEFORE it."""
    p_g, m_g, b_G, _, _, _, is_whole, ones_ptr = gates
    b_e = b_G
    if BEFORE:
        if is_whole:
            b_e = tl.minimum(G_of_read(gates, True), 0.0)
        else:
            b_e = _sums(triangle(ones_ptr, o_c, True, False), p_g, m_g, EXACT, PRECISION)
    return tl.exp2(b_e)


@triton.jit
def to_end(gates, o_c, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """Decay from each token, without its own gate, to the end of the chunk."""
    p_g, m_g, b_G, _, b_last, _, is_whole, ones_ptr = gates
    if is_whole:
        b_e = tl.minimum(b_last[None, :] - b_G, 0.0)
    else:
        b_e = _sums(triangle(ones_ptr, o_c, True, True), p_g, m_g, EXACT, PRECISION)
    return tl.exp2(b_e)


@triton.jit
def of_chunk(gates, WRITE: tl.constexpr, BEFORE: tl.constexpr):
    """Decay between each token and the middle of a whole chunk, of a read or of a WRITE."""
    b_middle = gates[3][None, :]
    if WRITE:
        b_e = b_middle - gates[2]
    else:
        b_e = G_of_read(gates, BEFORE) - b_middle
    return tl.exp2(b_e)


@triton.jit
def seen_in_half(i, t, step, BEFORE: tl.constexpr):
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
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Decay between each token and the middle of its block, of a read or of a WRITE."""
    b_seen = seen_in_half(o_c[:, None], o_c[None, :], step, BEFORE)
    b_e = _sums(b_seen, gates[0], gates[1], EXACT, PRECISION)
    return tl.exp2(signed(b_e, o_c, step, gates[5], WRITE))
