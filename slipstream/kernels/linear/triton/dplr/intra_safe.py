"""Per-channel decay, or free a and b: what needs no state, of strong chunks.

As wy.py and wy_quarters.py, which mark the chunks, do it for the others, but with scores summed
step by step (gate_sums.py) where tokens have decayed too far for that (intra_anchored.py,
by_quarters.py). q exp(G), and rows of scores of tokens that have not, are what they left; those of
a, which they did not leave, are made once more as they make them. Other programs have nothing to
do.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.dplr.by_quarters import (
    add_scores_of_reads,
    columns_of,
    quarters_together,
    sums_from_start,
)
from slipstream.kernels.linear.triton.dplr.gate_sums import (
    BASE,
    block_factors,
    decay_of_step,
    is_pair_of_step,
    to_end,
)
from slipstream.kernels.linear.triton.dplr.intra_anchored import (
    anchored_writes,
    is_read_anchored,
    load_from_start,
)
from slipstream.kernels.linear.triton.dplr.wy import solve_chunk


@triton.jit
def _add_scores(b_a, p_r, b_read, p_w, b_write, o_q, m_k, seen, PRECISION: tl.constexpr):
    """b_a, and where seen r w^T [C, C] more, of a read and a write times their decays."""
    b_r = tl.load(p_r + o_q, mask=m_k, other=0.0)
    b_w = tl.load(p_w + o_q, mask=m_k, other=0.0)
    b_r = (b_r * b_read).to(b_r.dtype)
    b_w = (b_w * b_write).to(b_w.dtype)
    return tl.where(seen, b_a + tl.dot(b_r, tl.trans(b_w), input_precision=PRECISION), b_a)


@triton.jit
def _add_decayed(
    b_rb,
    b_rk,
    p_r,
    p_b,
    p_k,
    o_q,
    m_k,
    read_mask,
    gates,
    o_c,
    DIAGONAL: tl.constexpr,
    BEFORE: tl.constexpr,
    DELTA: tl.constexpr,
    STEPS: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    FP32: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the scores of a read r with b and k, of BK channels; DIAGONAL: also of pairs (i, i).

    read_mask: which tokens' reads, [C, 1].
    DELTA has b = k, and no scores with k besides.
    """
    i = o_c[:, None]
    j = o_c[None, :]
    b_read, b_write, first, safe = block_factors(gates, o_c, LIMIT, SHIFT, BEFORE, FP32, PRECISION)
    seen = read_mask & ((i >> BASE) == (j >> BASE)) & (i >= j if DIAGONAL else i > j)
    b_rb = _add_scores(b_rb, p_r, b_read, p_b, b_write, o_q, m_k, seen, PRECISION)
    if not DELTA:
        b_rk = _add_scores(b_rk, p_r, b_read, p_k, b_write, o_q, m_k, seen, PRECISION)
    for step in range(first, STEPS + 1):
        seen = is_pair_of_step(i, j, step)
        if DIAGONAL:
            seen = seen | ((i == j) & (step == 0))
        seen = seen & read_mask
        b_write = decay_of_step(gates, o_c, step, False, FP32, PRECISION)
        b_read = b_write
        if BEFORE:
            b_read = decay_of_step(gates, o_c, step, True, FP32, PRECISION)
        b_read = tl.where(safe & (step <= BASE), 0.0, b_read)
        b_rb = _add_scores(b_rb, p_r, b_read, p_b, b_write, o_q, m_k, seen, PRECISION)
        if not DELTA:
            b_rk = _add_scores(b_rk, p_r, b_read, p_k, b_write, o_q, m_k, seen, PRECISION)
    return b_rb, b_rk


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
    ones_ptr,  # [2, C, C]: dplr_gates.triangle
    cu_ptr,  # [N + 1]
    scale,
    keep,
    T,
    N,
    HV,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDE: tl.constexpr,
    BK: tl.constexpr,
    PIECES: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNEL: tl.constexpr,
    PACKED: tl.constexpr,
    FP32: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    APART: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER: tl.constexpr,
):
    """grid (chunks * HV,). keep, which backward wants, is no constant: one compilation for both."""
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
                    m_k, DELTA, LIMIT, APART, PRECISION,
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
    anchored = is_read_anchored(b_lowest, LIMIT)[:, None]
    other = anchored == 0
    b_ab = tl.where(anchored & (i > j), b_ab, 0.0)
    b_ak = tl.where(anchored & (i > j), b_ak, 0.0)

    for n in range(WIDE // BK):
        o_k = n * BK + tl.arange(0, BK)
        o_q = i * (H * K) + o_k[None, :]
        m_k = m_c[:, None]
        if KM:
            m_k = m_k & (o_k < K)[None, :]
        # gates are read again by each step: registers do not hold them beside two squares
        gates = (p_g + o_k[None, :] * CHANNEL, m_k, ones_ptr)
        b_ab, b_ak = _add_decayed(
            b_ab, b_ak, read_ptr + i_k, write_ptr + i_k, k_ptr + i_k, o_q, m_k, other, gates, o_c,
            False, not DELTA, DELTA, STEPS, LIMIT, SHIFT, FP32, PRECISION,
        )  # fmt: skip
    solve_chunk(
        b_ab, b_ak, beta_ptr + row * HV + i_h if DELTA else None, HV,
        v_ptr + (row * HV + i_h) * V, w_out_ptr + i_w, u_out_ptr + i_chunk_head * (V * C),
        None if DELTA else ak_ptr + i_a, r_ptr + i_a, keep, o_c, m_c,
        V, WIDE, BK, BV, STEPS, DELTA, PRECISION, INNER,
    )  # fmt: skip

    b_qb = tl.zeros((C, C), tl.float32)
    b_qk = tl.zeros((C, C), tl.float32)
    for n in range(WIDE // BK):
        o_k = n * BK + tl.arange(0, BK)
        o_w = i * WIDE + o_k[None, :]
        o_q = i * (H * K) + o_k[None, :]
        m_k = m_c[:, None]
        if KM:
            m_k = m_k & (o_k < K)[None, :]
        gates = (p_g + o_k[None, :] * CHANNEL, m_k, ones_ptr)
        b_qb, b_qk = _add_decayed(
            b_qb, b_qk, q_ptr + i_k, write_ptr + i_k, k_ptr + i_k, o_q, m_k, other, gates, o_c,
            True, False, DELTA, STEPS, LIMIT, SHIFT, FP32, PRECISION,
        )  # fmt: skip
        b_e = to_end(gates, o_c, FP32, PRECISION)
        b_b = tl.load(write_ptr + i_k + o_q, mask=m_k, other=0.0)
        tl.store(b_out_ptr + i_w + o_w, (b_b * b_e).to(act))
        if not DELTA:
            b_k = tl.load(k_ptr + i_k + o_q, mask=m_k, other=0.0)
            tl.store(k_out_ptr + i_w + o_w, (b_k * b_e).to(act))
    tl.store(qb_ptr + i_a + o_a, (b_qb * scale).to(act), mask=other)
    if not DELTA:
        tl.store(qk_ptr + i_a + o_a, (b_qk * scale).to(act), mask=other)
