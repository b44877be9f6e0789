"""Device functions of chunk.py's scan over chunks: gates, decayed scores, where a scan begins."""

import triton
import triton.language as tl

from slipstream.kernels.primitives.device import LOG2E

# exp2 of this is 0 in float32 times any state, and a chunk of it is still summed accurately.
LOWEST_GATE = tl.constexpr(-128.0)
# exp of it times anything is below the rounding of what it is added to, in float32 too.
MIN_CROSSED = tl.constexpr(-32.0)
# In a chunk that is not strong no token is further below the bound, however its sum is rounded.
ROUNDING = tl.constexpr(0.125)


@triton.jit
def locate_chunk(cu_ptr, i_chunk, T, N, C, PACKED: tl.constexpr):
    """First token of the sequence of chunk i_chunk, its tokens (int32), and the chunk within it, of
    C tokens; or of segments, which are numbered alike.

    Packed, the chunks of sequence n have the numbers from cu[n] // C + n on: never more than there
    are up to the next sequence's. A number that no chunk has gets one past its sequence's end:
    a program of one chunk ends there, and nothing of it is read.
    """
    if PACKED:
        i_n = 0
        past = N
        while past - i_n > 1:
            middle = (i_n + past) // 2
            # of wrong offsets none is below 0, so that they lead to no token before the first
            start = tl.maximum(tl.load(cu_ptr + middle).to(tl.int64), 0)
            before = start // C + middle <= i_chunk
            i_n = tl.where(before, middle, i_n)
            past = tl.where(before, past, middle)
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
        i_c = i_chunk - (begin // C + i_n)
        length = tl.maximum(end - begin, 0)
    else:
        chunks = tl.cdiv(T, C)
        i_n = i_chunk // chunks
        i_c = i_chunk - i_n * chunks
        begin = i_n.to(tl.int64) * T
        length = T
    return begin, length.to(tl.int32), i_c.to(tl.int32)


@triton.jit
def load_chunk_gates(p, stride, o_c, m_c, C: tl.constexpr, FP32: tl.constexpr):
    """G of a chunk in base 2 as a pair that adds up, [C] each, and its last row.

    FP32 sums in float64, so that differences of G are right to float32.
    """
    b_g = tl.load(p + o_c * stride, mask=m_c, other=0.0).to(tl.float32)
    # -inf would make NaN of G_i - G_j
    b_g = tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)
    if FP32:
        # 64 gates of -128 sum to 2^13: float32 would leave 2^-10 of a difference of two such
        b_wide = tl.cumsum(b_g.to(tl.float64) * LOG2E, 0)
        b_G = b_wide.to(tl.float32)
        b_low = (b_wide - b_G.to(tl.float64)).to(tl.float32)
    else:
        b_G = tl.cumsum(b_g * LOG2E, 0)
        b_low = tl.zeros_like(b_G)
    # by a mask: Triton has no index of one element of a tile
    G_C = tl.sum(tl.where(o_c == C - 1, b_G, 0.0), 0)
    low_C = tl.sum(tl.where(o_c == C - 1, b_low, 0.0), 0)
    return b_G, b_low, G_C, low_C


@triton.jit
def decay_between(seen, b_G, b_low, REVERSE: tl.constexpr, FP32: tl.constexpr):
    """exp of the gates between tokens j and i where i sees j, else 0, [j, i]."""
    between = b_G[None, :] - b_G[:, None]
    if FP32:
        between += b_low[None, :] - b_low[:, None]
    if REVERSE:
        between = -between
    # masked before exp2: the other triangle's differences are positive and may overflow
    return tl.exp2(tl.where(seen, between, float("-inf")))


@triton.jit
def rows_of_head(p, begin, heads, i_h, N: tl.constexpr, TMA: tl.constexpr):
    """Where a head's rows of width N begin, from token `begin` on. TMA: p is a descriptor, which
    has coordinates instead and is returned as it is."""
    if not TMA:
        p += (begin * heads + i_h) * N
    return p


@triton.jit
def load_initial_state(
    s_in_ptr, i, o, m, scale, BX: tl.constexpr, BD: tl.constexpr, HAS_S_IN: tl.constexpr
):
    """The state [BX, BD] that a scan begins with, at s_in_ptr + i + o; zeros without one."""
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + i + o, mask=m, other=0.0).to(tl.float32) * scale
    else:
        b_s = tl.zeros((BX, BD), tl.float32)
    return b_s


@triton.jit
def anchor_chunks(
    i_anchor, num_anchors, chunks, ANCHOR_INTERVAL: tl.constexpr, REVERSE: tl.constexpr
):
    """The i_anchor-th interval between anchors in the order of the scan: its number from the first
    token on, its first chunk, and how many chunks it has."""
    anchor = num_anchors - 1 - i_anchor if REVERSE else i_anchor
    first = anchor * ANCHOR_INTERVAL
    return anchor, first, tl.minimum(chunks - first, ANCHOR_INTERVAL)


@triton.jit
def masked_scores(
    b_a, o_c, b_G, b_low,
    REVERSE: tl.constexpr, HAS_GATE: tl.constexpr, DIAGONAL_LAST: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """A [j, i], decayed, where i sees j, else 0; and 0, or with DIAGONAL_LAST the diagonal, which
    A is without."""
    diag = 0.0
    if REVERSE:
        seen = o_c[:, None] >= o_c[None, :]
    else:
        seen = o_c[:, None] <= o_c[None, :]
    if HAS_GATE:
        if DIAGONAL_LAST:
            # added last, by the caller: it does not decay
            diag = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_a, 0.0), 0)
            seen = seen & (o_c[:, None] != o_c[None, :])
        b_a *= decay_between(seen, b_G, b_low, REVERSE, FP32)
    else:
        b_a = tl.where(seen, b_a, 0.0)
    return b_a, diag
