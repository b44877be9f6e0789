"""Per-channel decay, or free a and b: what needs no state, of strong chunks.

wy.py and wy_quarters.py mark the chunks that decay too far for their products (intra_anchored.py,
by_quarters.py). This kernel computes these chunks again; its other programs end at once. Rows of
tokens that have not decayed too far keep their scores and q exp(G), except for the rows of a, which
were not stored and are computed once more as before. The scores of other rows are summed step by
step (gate_sums.py).
"""

from collections import namedtuple

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.common.gate_ones import BASE, BOTH, MIDDLE, WRITES
from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.dplr.by_quarters import (
    add_scores_of_reads,
    columns_of,
    quarters_together,
    sums_from_start,
)
from slipstream.kernels.linear.triton.dplr.gate_sums import (
    block_factors,
    is_pair_of_step,
    load_gates_of,
    split_gates,
    sums_between,
    to_end,
)
from slipstream.kernels.linear.triton.dplr.intra_anchored import (
    anchored_writes,
    is_read_anchored,
    load_from_start,
)
from slipstream.kernels.linear.triton.dplr.wy import solve_chunk

# constants of a launch, for device functions
Constants = namedtuple(
    "Constants", "K V WIDE BK BV STEPS DELTA CHANNEL LIMIT SHIFT APART FP32 PRECISION INNER"
)


@triton.jit
def _products(b_r, b_b, b_k, factor, DELTA: tl.constexpr, dtype: tl.constexpr, PRECISION):
    """r b^T and r k^T of reads and writes times a factor each; of DELTA b b^T and r b^T."""
    b_r, b_w = (b_r * factor[0]).to(dtype), tl.trans((b_b * factor[1]).to(dtype))
    b_1 = tl.dot(b_r, b_w, input_precision=PRECISION)
    if DELTA:
        b_2 = b_1
        b_b = (b_b * factor[0]).to(dtype)
        b_1 = tl.dot(b_b, b_w, input_precision=PRECISION)
    else:
        b_k = (b_k * factor[1]).to(dtype)
        b_2 = tl.dot(b_r, tl.trans(b_k), input_precision=PRECISION)
    return b_1, b_2


@triton.jit
def _add_step(
    b_1, b_2, b_r, b_b, b_k, b_factor, rows, step, o_c,
    DELTA: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b_x, b_y = _products(b_r, b_b, b_k, (b_factor, b_factor), DELTA, dtype, PRECISION)
    seen = is_pair_of_step(o_c[:, None], o_c[None, :], step) & rows
    return b_1 + tl.where(seen, b_x, 0.0), b_2 + tl.where(seen, b_y, 0.0)


@triton.jit
def _add_decayed(
    b_1, b_2, b_r, b_b, b_k, rows, gates, o_c, BEFORE: tl.constexpr, DELTA: tl.constexpr, c,
    dtype: tl.constexpr,
):  # fmt: skip
    """Adds the scores of _products below the diagonal, of BK channels and reads in rows [C, 1];
    what is above it is left undefined. BEFORE: reads have the state before their token.
    """
    KIND: tl.constexpr = BOTH if BEFORE else WRITES
    i = o_c[:, None]
    j = o_c[None, :]
    b_read, b_write, first, safe = block_factors(
        gates, o_c, c.LIMIT, c.SHIFT, BEFORE, c.FP32, c.PRECISION
    )
    b_x, b_y = _products(b_r, b_b, b_k, (b_read, b_write), DELTA, dtype, c.PRECISION)
    seen = ((i >> BASE) == (j >> BASE)) & rows
    b_1 += tl.where(seen, b_x, 0.0)
    b_2 += tl.where(seen, b_y, 0.0)
    for step in range(first, BASE + 1):
        b_e = sums_between(gates, MIDDLE + step - 1, o_c, KIND, c.FP32, c.PRECISION)
        # a token of a later half reads: where it is safe, the block has it
        block_has = safe & (((i >> (step - 1)) & 1) == 1)
        b_e = tl.where(block_has, 0.0, tl.exp2(b_e))
        b_1, b_2 = _add_step(
            b_1, b_2, b_r, b_b, b_k, b_e, rows, step, o_c, DELTA, dtype, c.PRECISION
        )
    for step in range(BASE + 1, c.STEPS + 1):
        b_e = sums_between(gates, MIDDLE + step - 1, o_c, KIND, c.FP32, c.PRECISION)
        b_e = tl.exp2(b_e)
        b_1, b_2 = _add_step(
            b_1, b_2, b_r, b_b, b_k, b_e, rows, step, o_c, DELTA, dtype, c.PRECISION
        )
    return b_1, b_2


@triton.jit
def _store_until_end(
    p_b, p_k, b_b, b_k, gates, o_c, DELTA: tl.constexpr, FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """b exp(G_C - G), and that of k unless DELTA."""
    b_e = to_end(gates, o_c, FP32, PRECISION)
    tl.store(p_b, (b_b * b_e).to(p_b.dtype.element_ty))
    if not DELTA:
        tl.store(p_k, (b_k * b_e).to(p_k.dtype.element_ty))


@triton.jit(do_not_specialize=["scale", "keep", "T", "N", "HV", "H"])
def dplr_intra_safe_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,
    a_ptr,  # none for delta
    b_ptr,
    v_ptr,  # [tokens, HV, V]
    g_ptr,  # [tokens, HV, K] or [tokens, HV]
    beta_ptr,  # [tokens, HV], delta
    q_out_ptr,  # [chunks, HV, C, WIDE]: scale q exp(G)
    w_out_ptr,  # W
    b_out_ptr,  # b exp(G_C - G)
    k_out_ptr,  # k exp(G_C - G), dplr
    u_out_ptr,  # [chunks, HV, V, C]: U, float32
    total_ptr,  # [chunks, HV, WIDE]: exp(G_C)
    qb_ptr,  # [chunks, HV, C, C], scaled
    qk_ptr,  # scaled, dplr
    ak_ptr,  # dplr, if keep
    r_ptr,  # if keep
    strong_ptr,  # [chunks, HV]: 2 where the chunk is, 3 where halves may be APART
    ones_ptr,  # gate_ones.py's
    cu_ptr,  # [N + 1]
    scale, keep, T, N, HV, H,
    K: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, PIECES: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, STEPS: tl.constexpr, DELTA: tl.constexpr,
    CHANNEL: tl.constexpr, PACKED: tl.constexpr, FP32: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """grid (chunks * HV,). keep, which backward wants, is no constant: one compilation for both."""
    c: tl.constexpr = Constants(
        K, V, WIDE, BK, BV, STEPS, DELTA, CHANNEL, LIMIT, SHIFT, APART, FP32, PRECISION, INNER
    )
    act = q_ptr.dtype.element_ty
    GK: tl.constexpr = K**CHANNEL
    KM: tl.constexpr = K != WIDE
    BP: tl.constexpr = BK // PIECES
    pid = tl.program_id(0)
    i_chunk_head = pid.to(tl.int64)
    # most programs end here: others have made all that a weak chunk needs
    if tl.load(strong_ptr + i_chunk_head) < (3 if APART > 0 else 2):
        return
    i_h = pid % HV
    begin, length, i_c = locate_chunk(cu_ptr, pid // HV, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    m_c = o_c < length - i_c * C
    i = o_c[:, None]
    j = o_c[None, :]
    row = begin + i_c * C
    i_k = (row * H + i_h // (HV // H)) * K
    i_g = (row * HV + i_h) * GK
    i_a = i_chunk_head * (C * C)
    i_w = i_chunk_head * (C * WIDE)
    o_a = i * C + j
    p_g = g_ptr + i_g + i * (HV * GK)
    read_ptr = k_ptr if DELTA else a_ptr
    write_ptr = k_ptr if DELTA else b_ptr
    b_ab = tl.zeros((C, C), tl.float32)
    b_ak = tl.zeros((C, C), tl.float32)
    b_lowest = tl.zeros((C,), tl.float32)
    for n in range(WIDE // BK):
        o_n = n * BK + tl.arange(0, BK)
        # of each token over all channels: rows that stay within range keep the product of wy.py or
        # wy_quarters.py, bit for bit
        if APART > 0:
            b_sums = sums_from_start(p_g, o_n, o_c, m_c, False, K, CHANNEL, FP32, PRECISION)
            b_before = b_sums
            if not DELTA:
                b_before = sums_from_start(p_g, o_n, o_c, m_c, True, K, CHANNEL, FP32, PRECISION)
            for piece in range(PIECES):
                o_k = n * BK + piece * BP + tl.arange(0, BP)
                o_q = i * (H * K) + o_k[None, :]
                m_k = m_c[:, None]
                if KM:
                    m_k = m_k & (o_k < K)[None, :]
                b_ab, b_ak, b_low = add_scores_of_reads(
                    b_ab, b_ak, read_ptr + i_k + o_q, write_ptr + i_k + o_q, k_ptr + i_k + o_q,
                    w_out_ptr + i_w + i * WIDE + o_k[None, :], p_g + o_k[None, :] * CHANNEL,
                    columns_of(b_sums, piece, PIECES), columns_of(b_before, piece, PIECES), o_c,
                    m_k, c,
                )  # fmt: skip
                b_lowest = tl.minimum(b_lowest, b_low)
        else:
            o_q = i * (H * K) + o_n[None, :]
            m_n = m_c[:, None]
            if KM:
                m_n = m_n & (o_n < K)[None, :]
            b_e, b_before, _, _, _ = load_from_start(
                g_ptr, i_g, HV * GK, o_c, m_n, o_n, CHANNEL, not DELTA, LIMIT, APART, FP32,
                PRECISION,
            )  # fmt: skip
            b_lowest = tl.minimum(b_lowest, tl.min(b_e, 1))
            b_a = tl.load(read_ptr + i_k + o_q, mask=m_n, other=0.0)
            b_a = (b_a * tl.exp2(b_before)).to(act)
            tl.store(w_out_ptr + i_w + i * WIDE + o_n[None, :], b_a)
            b_write = anchored_writes(b_e, LIMIT, APART)
            b_b = tl.load(write_ptr + i_k + o_q, mask=m_n, other=0.0)
            b_b = (b_b * b_write).to(act)
            b_ab = tl.dot(b_a, tl.trans(b_b), b_ab, input_precision=PRECISION)
            if not DELTA:
                b_k = tl.load(k_ptr + i_k + o_q, mask=m_n, other=0.0)
                b_k = (b_k * b_write).to(act)
                b_ak = tl.dot(b_a, tl.trans(b_k), b_ak, input_precision=PRECISION)
    if APART > 0:
        b_ab = quarters_together(b_ab, o_c, APART)
        b_ak = quarters_together(b_ak, o_c, APART)
    # rows whose decay from the chunk's start is in range; the others are added by sub-chunks
    other = is_read_anchored(b_lowest, LIMIT)[:, None] == 0
    b_ab = tl.where(other, 0.0, b_ab)
    b_ak = tl.where(other, 0.0, b_ak)
    b_qb = tl.zeros((C, C), tl.float32)
    b_diagonal = tl.zeros((C,), tl.float32)
    for n in range(WIDE // BK):
        o_k = n * BK + tl.arange(0, BK)
        o_q = i_k + i * (H * K) + o_k[None, :]
        m_k = m_c[:, None]
        if KM:
            m_k = m_k & (o_k < K)[None, :]
        b_g = load_gates_of(p_g + o_k[None, :] * CHANNEL, m_k)
        gates = (split_gates(b_g, FP32), ones_ptr)
        b_b = tl.load(write_ptr + o_q, mask=m_k, other=0.0)
        b_k = tl.load(k_ptr + o_q, mask=m_k, other=0.0)
        if DELTA:
            b_q = tl.load(q_ptr + o_q, mask=m_k, other=0.0)
            b_diagonal += tl.sum(b_q.to(tl.float32) * b_b, 1)
            o_w = i_w + i * WIDE + o_k[None, :]
            _store_until_end(b_out_ptr + o_w, None, b_b, b_k, gates, o_c, DELTA, FP32, PRECISION)
            b_ab, b_qb = _add_decayed(
                b_ab, b_qb, b_q, b_b, b_k, other, gates, o_c, False, DELTA, c, act
            )
        else:
            b_a = tl.load(a_ptr + o_q, mask=m_k, other=0.0)
            b_ab, b_ak = _add_decayed(
                b_ab, b_ak, b_a, b_b, b_k, other, gates, o_c, True, DELTA, c, act
            )
    if DELTA:
        _store_scores(qb_ptr + i_a + o_a, b_qb, b_diagonal, o_c, other, scale)
    b_ab = tl.where(i > j, b_ab, 0.0)
    b_ak = tl.where(i > j, b_ak, 0.0)
    solve_chunk(
        b_ab, b_ak, beta_ptr + row * HV + i_h if DELTA else None, HV, v_ptr + (row * HV + i_h) * V,
        w_out_ptr + i_w, u_out_ptr + i_chunk_head * (V * C), None if DELTA else ak_ptr + i_a,
        r_ptr + i_a, keep, o_c, m_c, c,
    )  # fmt: skip

    if not DELTA:
        o_q = i_k + i * (H * K)
        _scores_of_q(
            q_ptr + o_q, b_ptr + o_q, k_ptr + o_q, p_g, b_out_ptr + i_w + i * WIDE,
            k_out_ptr + i_w + i * WIDE, qb_ptr + i_a + o_a, qk_ptr + i_a + o_a, ones_ptr, other,
            o_c, m_c, scale, c,
        )  # fmt: skip


@triton.jit
def _scores_of_q(
    p_q, p_b, p_k, p_g, p_b_out, p_k_out, p_qb, p_qk, ones_ptr, rows, o_c, m_c, scale, c
):
    """Those with b and k, of some rows [C, 1], and b and k until the chunk's end."""
    C: tl.constexpr = o_c.shape[0]
    b_qb = tl.zeros((C, C), tl.float32)
    b_qk = tl.zeros((C, C), tl.float32)
    b_diagonal = tl.zeros((C,), tl.float32)
    b_diagonal_k = tl.zeros((C,), tl.float32)
    for n in range(c.WIDE // c.BK):
        o_k = n * c.BK + tl.arange(0, c.BK)[None, :]
        m_k = m_c[:, None]
        if c.K != c.WIDE:
            m_k = m_k & (o_k < c.K)
        gates = (split_gates(load_gates_of(p_g + o_k * c.CHANNEL, m_k), c.FP32), ones_ptr)
        b_q = tl.load(p_q + o_k, mask=m_k, other=0.0)
        b_b = tl.load(p_b + o_k, mask=m_k, other=0.0)
        b_k = tl.load(p_k + o_k, mask=m_k, other=0.0)
        b_diagonal += tl.sum(b_q.to(tl.float32) * b_b, 1)
        b_diagonal_k += tl.sum(b_q.to(tl.float32) * b_k, 1)
        _store_until_end(
            p_b_out + o_k, p_k_out + o_k, b_b, b_k, gates, o_c, False, c.FP32, c.PRECISION
        )
        b_qb, b_qk = _add_decayed(
            b_qb, b_qk, b_q, b_b, b_k, rows, gates, o_c, False, False, c, b_q.dtype
        )
    _store_scores(p_qb, b_qb, b_diagonal, o_c, rows, scale)
    _store_scores(p_qk, b_qk, b_diagonal_k, o_c, rows, scale)


@triton.jit
def _store_scores(p_a, b_a, b_diagonal, o_c, rows, scale):
    """Of some rows, [C, 1], with b_diagonal as the diagonal."""
    i = o_c[:, None]
    j = o_c[None, :]
    b_a = tl.where(i == j, b_diagonal[:, None], tl.where(i > j, b_a, 0.0))
    tl.store(p_a, (b_a * scale).to(p_a.dtype.element_ty), mask=rows)
