"""Decay inside a chunk, a gate for every channel, for chunks that decay little enough to be whole.

Let c be the middle of a chunk of C tokens and, in base 2,

    E_i = sum of g from c to i, if i is at c or after it, else - (sum of g from i + 1 to c - 1)
    early = sum of g before c        late = sum of g from c on

Each is a sum of numbers of one sign. The decay between j and i is exp(E_i) exp(-E_j), that from the
start to i exp(early) exp(E_i), that from j to the end exp(late) exp(-E_j). While no |E| is more
than LIMIT, both factors are finite and lose no digits, and one product has the scores of all pairs,
those that nothing reads among them. A chunk with a channel beyond that is "strong": the kernels
here leave it to those of intra_safe.py and intra_safe_bwd.py (gate_sums.py).

That is for the gradients. An output must not depend on later tokens, not even by what its decays
are relative to, so forward takes G, the sum of g from the start to i, and a constant in place of E,

    exp(G_i + SHIFT) exp(-G_j - SHIFT)      from the start exp(-SHIFT) exp(G_i + SHIFT)

where SHIFT, if the dtype's exponents have room for it, has both on both sides of 1. Also in strong
chunks that is how a token reads for which G is no less than -2 LIMIT (is_read_anchored).
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.dplr.gate_sums import load_gates_of, product_of_gates

# in a chunk that is not strong all tokens are above the bound, however their sums are rounded
ROUNDING = tl.constexpr(0.125)


@triton.jit
def load_anchored(
    g_ptr,
    at,
    stride,
    o_c,
    m_g,
    o_k,
    CHANNEL: tl.constexpr,
    BEFORE: tl.constexpr,
    FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """E [C, BK], E without a token's own gate (if BEFORE, else E), early, late [BK]."""
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
    return b_e, b_before, b_early, b_late


@triton.jit
def load_from_start(
    g_ptr,
    at,
    stride,
    o_c,
    m_g,
    o_k,
    CHANNEL: tl.constexpr,
    BEFORE: tl.constexpr,
    SHIFT: tl.constexpr,
    FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """G + SHIFT [C, BK], that without a token's own gate (if BEFORE, else the same), early, late
    [BK]."""
    C: tl.constexpr = o_c.shape[0]
    p_g = g_ptr + at + o_c[:, None] * stride + o_k[None, :] * CHANNEL
    b_g = load_gates_of(p_g, m_g)
    later = (o_c >= C // 2)[:, None]
    b_early = tl.sum(tl.where(later, 0.0, b_g), 0)
    b_late = tl.sum(tl.where(later, b_g, 0.0), 0)
    i = o_c[:, None]
    t = o_c[None, :]
    # from the chunk's start, which no later token moves
    b_e = product_of_gates((t <= i).to(tl.float32), b_g, FP32, PRECISION) + SHIFT
    b_before = b_e
    if BEFORE:
        b_before = product_of_gates((t < i).to(tl.float32), b_g, FP32, PRECISION) + SHIFT
    return b_e, b_before, b_early, b_late


@triton.jit
def anchored_writes(b_e, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """exp(-G - SHIFT) [C, BK], and where no such read has it, something finite."""
    # such a write is multiplied by a read's decay that is 0, and inf times 0 would be NaN
    return tl.exp2(tl.minimum(-b_e, 2 * LIMIT + ROUNDING - SHIFT))


@triton.jit
def is_read_anchored(b_lowest, LIMIT: tl.constexpr):
    """Whether tokens read as in chunks that are not strong, by G of their lowest channel."""
    return b_lowest >= -(2 * LIMIT + ROUNDING)


@triton.jit
def add_anchored_bwd(
    b_dg, b_x, o_c, SIGN: tl.constexpr, BEFORE: tl.constexpr, FP32: tl.constexpr, PRECISION
):
    """b_dg + SIGN times the sum over i >= t (BEFORE: i > t) of b_x [C, BK], for each t."""
    t = o_c[:, None]
    i = o_c[None, :]
    seen = i > t if BEFORE else i >= t
    b_seen = tl.where(seen, 1.0 * SIGN, 0.0)
    return b_dg + product_of_gates(b_seen, b_x, FP32, PRECISION)
