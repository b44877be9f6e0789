"""Delta rule, no decay or one a token: the inverse of every chunk's triangle, all at once.

    L[i, j] = [i = j] + [i > j] (k_i . k_j) exp(G_i - G_j) beta_j        R = L^-1        [C, C]

or with p, which reads the state before the decay, (p_i . k_j) exp(G_{i-1} - G_j) beta_j,

so that R w is what each token has yet to write, before beta: backward needs it where beta is 0 too.

Blocks of BASE rows on the diagonal are inverted by substitution, then joined: with X the inverse
of the blocks of `side` rows and M what L has in the squares below them, X - X M X is that of the
blocks of 2 side. Unlike the product of (I + N^2^n), which for keys alike sums terms of 2^C that
cancel, no step computes anything larger than parts of R and L.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block
from slipstream.kernels.linear.triton.scalar_decay.device import load_chunk_gates, locate_chunk

# the least side of tl.dot, which joins the blocks
BASE = tl.constexpr(16)


@triton.jit
def load_gates(p, o_c, C: tl.constexpr, FP32: tl.constexpr):
    """G of a chunk, of which the rest is lost to rounding, and the last of both."""
    b_G = tl.load(p + C + o_c)
    G_C = tl.load(p + C + C - 1)
    if FP32:
        b_low = tl.load(p + 2 * C + o_c)
        low_C = tl.load(p + 2 * C + C - 1)
    else:
        b_low = tl.zeros_like(b_G)
        low_C = 0.0
    return b_G, b_low, G_C, low_C


@triton.jit
def load_gates_before(p, o_c, C: tl.constexpr, FP32: tl.constexpr):
    """G of the token before each, 0 for the first, and the rest of it."""
    b_B = tl.load(p + C + o_c - 1, mask=o_c > 0, other=0.0)
    if FP32:
        b_low = tl.load(p + 2 * C + o_c - 1, mask=o_c > 0, other=0.0)
    else:
        b_low = tl.zeros_like(b_B)
    return b_B, b_low


@triton.jit
def decay_between(b_G, b_low, seen, FP32: tl.constexpr):
    """exp(G_i - G_j) where seen [i, j], else 0."""
    between = b_G[:, None] - b_G[None, :]
    if FP32:
        between += b_low[:, None] - b_low[None, :]
    return tl.exp2(tl.where(seen, between, float("-inf")))


@triton.jit
def decay_until(b_B, b_lowB, b_G, b_low, seen, FP32: tl.constexpr):
    """exp(B_i - G_j) where seen [i, j], else 0."""
    between = b_B[:, None] - b_G[None, :]
    if FP32:
        between += b_lowB[:, None] - b_low[None, :]
    return tl.exp2(tl.where(seen, between, float("-inf")))


@triton.jit
def _before(b_x, o_c):
    """b_x of the token before each, 0 for the first, [C]."""
    return tl.where(o_c > 0, tl.gather(b_x, tl.maximum(o_c - 1, 0), 0), 0.0)


@triton.jit
def _invert_blocks(b_a, C: tl.constexpr):
    """Inverses of the blocks of BASE rows on the diagonal of I + b_a, in their place [C, C]."""
    NB: tl.constexpr = C // BASE
    o_b = tl.arange(0, NB)
    o_r = tl.arange(0, BASE)
    is_diagonal = (o_b[:, None] == o_b[None, :])[:, None, :, None]
    b_d = tl.sum(tl.where(is_diagonal, tl.reshape(b_a, (NB, BASE, NB, BASE)), 0.0), 2)
    b_d = tl.permute(b_d, (0, 2, 1))  # [NB, j, i]: its columns are the rows of the blocks
    is_row = o_r[None, :, None]
    is_column = o_r[None, None, :]
    b_x = tl.where(is_row == is_column, 1.0, tl.zeros_like(b_d))  # [NB, i, j]
    for i in tl.static_range(1, BASE):
        b_row = tl.sum(tl.where(is_column == i, b_d, 0.0), 2)  # [NB, j]
        b_new = tl.sum(b_row[:, :, None] * b_x, 1)  # [NB, j]
        b_x = tl.where(is_row == i, b_x - b_new[:, None, :], b_x)
    return tl.reshape(tl.where(is_diagonal, b_x[:, :, None, :], 0.0), (C, C))


@triton.jit
def _split_blocks(b):
    """b rounded to bf16 (ties away from 0), and the rest of it, rounded too."""
    b_high = ((b.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    return b_high.to(tl.bfloat16), (b - b_high).to(tl.bfloat16)


@triton.jit
def tile_product(b_l, b_r, PRECISION: tl.constexpr):
    """b_l @ b_r in float32. "halves" leaves out 2^-16 of it, tf32 2^-11 and is slower.

    For that wants its right operand transposed in shared memory, 32 bits at a time.
    """
    if PRECISION == "halves":
        b_lh, b_ll = _split_blocks(b_l)
        b_rh, b_rl = _split_blocks(b_r)
        b = tl.dot(b_lh, b_rl)
        b = tl.dot(b_ll, b_rh, b)
        b = tl.dot(b_lh, b_rh, b)
    else:
        b = tl.dot(b_l, b_r, input_precision=PRECISION)
    return b


@triton.jit
def inverse(b_a, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + b_a)^-1 for b_a strictly lower triangular [C, C], C = BASE 2^LEVELS."""
    o_c = tl.arange(0, C)
    b_x = _invert_blocks(b_a, C)
    i_block = o_c // BASE
    # a loop when compiled too: b_x then has one layout, that of products
    for _ in range(LEVELS):
        below = (i_block[:, None] == i_block[None, :] + 1) & (i_block[:, None] % 2 == 1)
        b_m = tl.where(below, b_a, 0.0)
        b_x -= tile_product(tile_product(b_x, b_m, PRECISION), b_x, PRECISION)
        i_block = i_block // 2
    return b_x


@triton.jit(do_not_specialize=["T", "N", "HV", "H"])
def delta_solve_tril_kernel(
    k_ptr,  # [tokens, H, K]
    p_ptr,
    g_ptr,  # [tokens, HV]
    beta_ptr,  # [tokens, HV]
    r_ptr,  # [tokens, HV, C]
    rows_ptr,  # [chunks, HV, ROWS, C]: beta, G of base 2, its rest, exp(G_prev) for p
    cu_ptr,  # [N + 1]
    T, N, HV, H,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, HAS_P: tl.constexpr,
    HAS_GATE: tl.constexpr, PACKED: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """grid (chunks * HV,): one program inverts one chunk of one value head."""
    pid = tl.program_id(0)
    i_h = pid % HV
    begin, length, i_c = locate_chunk(cu_ptr, pid // HV, T, N, C, PACKED)
    if PACKED and i_c * C >= length:
        return
    o_c = tl.arange(0, C)
    m_c = o_c < length - i_c * C
    row = begin + i_c * C
    i_k = (row * H + i_h // (HV // H)) * K
    b_a = tl.zeros((C, C), tl.float32)
    for i in range(tl.cdiv(K, BK)):
        o_k = i * BK + tl.arange(0, BK)
        b_k = load_block(k_ptr + i_k, H * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        if HAS_P:
            b_p = load_block(p_ptr + i_k, H * K, o_c, m_c, o_k, K, K % BK != 0)
        else:
            b_p = b_k
        b_a = tl.dot(b_p, tl.trans(b_k), b_a, input_precision=PRECISION)  # [C, C]
    b_beta = tl.load(beta_ptr + (row + o_c) * HV + i_h, mask=m_c, other=0.0).to(tl.float32)
    b_a *= b_beta[None, :]
    ROWS: tl.constexpr = 1 + HAS_GATE * (1 + FP32 + HAS_P)
    p_rows = rows_ptr + pid.to(tl.int64) * (ROWS * C) + o_c
    tl.store(p_rows, b_beta)
    seen = o_c[:, None] > o_c[None, :]
    if HAS_GATE:
        b_G, b_low, _, _ = load_chunk_gates(g_ptr + row * HV + i_h, HV, o_c, m_c, C, FP32)
        if HAS_P:
            b_B = _before(b_G, o_c)
            b_a *= decay_until(b_B, _before(b_low, o_c), b_G, b_low, seen, FP32)
            tl.store(p_rows + (ROWS - 1) * C, tl.exp2(b_B))
        else:
            b_a *= decay_between(b_G, b_low, seen, FP32)
        tl.store(p_rows + C, b_G)
        if FP32:
            tl.store(p_rows + 2 * C, b_low)
    else:
        b_a = tl.where(seen, b_a, 0.0)
    b_x = inverse(b_a, C, LEVELS, INNER)
    p_r = r_ptr + ((row + o_c) * HV + i_h)[:, None] * C + o_c[None, :]
    tl.store(p_r, b_x.to(r_ptr.dtype.element_ty), mask=m_c[:, None])
