"""Per-channel decay, or free a and b: the scans over chunks, forward and back.

From wy.py come, for each chunk, q~ = scale q exp(G), W, U, b^ = b exp(G_C - G), k^ the
same of k, total = exp(G_C) and the scores qb, qk, both with the scale in them. With S [K, V] the
state before the chunk,

    x = U + W S        o = q~ S + qb x + qk v        S <- total S + b^T x + k^T v

(delta has no qk v and no k^T v), and back, with dS' the gradient of the state after the chunk,

    dx = qb^T do + b^ dS'        y = R^T dx        dS = total dS' + q~^T do + W^T dx

Two products of a step follow from one another, the others wait for nothing but loads. Columns of V
are independent, BV of them a program, and are the rows here: the state and x go from product to
product as left operands, which tensor cores take from registers.

Long sequences of few heads are scanned in segments (SPLIT), a program each, as in delta/chunk.py: a
segment makes M S + E of the state S that it meets, and back M^T dS + dE. E is where the scan ends
that starts from 0, M where one without U and v does that starts from the identity.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.chunk import locate_segment, v_columns
from slipstream.kernels.linear.triton.scalar_decay.chunk import pool_rows_of, store_to_pool

_SIZES = ["T", "N", "HV", "segment"]


@triton.jit(do_not_specialize=_SIZES)
def dplr_chunk_fwd_kernel(
    v_ptr,  # [tokens, HV, V], dplr
    q_ptr,  # [chunks, HV, C, WIDE]
    w_ptr, b_ptr,
    k_ptr,  # dplr
    u_ptr,  # [chunks, HV, V, C]: U, float32
    x_ptr,  # [chunks, HV, V, C]
    total_ptr,  # [chunks, HV, WIDE]
    qb_ptr,  # [chunks, HV, C, C]
    qk_ptr,  # dplr
    o_ptr,  # [tokens, HV, V]
    states_ptr,  # [chunks, HV, V, WIDE]: S before each chunk
    s_in_ptr,  # [segments, HV, K, V]
    s_out_ptr,  # [segments, HV, K, V]: the final state; E
    m_ptr,  # [segments, HV, K, K]: M
    cu_ptr,  # [N + 1]
    T, N, HV, segment,
    K: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    OUTPUT: tl.constexpr, DELTA: tl.constexpr, HAS_GATE: tl.constexpr, HAS_S_IN: tl.constexpr,
    HAS_S_OUT: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    pool_ptr=None,  # [rows, HV, V, K], a pool
    to_ptr=None,  # [N, T / 64, rounded up]: rows of it for S after 64 tokens; none below 0
):  # fmt: skip
    """grid (tiles * HV * segments,). Without SPLIT a segment is a sequence.

    OUTPUT: "o"; "states", those and x, for backward; or "ends", E and M. Tiles: of V, BV columns
    each; for "ends" then of K, for M.
    """
    TRANSITION: tl.constexpr = OUTPUT == "ends"
    NV: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = NV + (K + BV - 1) // BV if TRANSITION else NV
    VM: tl.constexpr = V % BV != 0 or TRANSITION  # M's tiles are past V: they read zeros
    act = w_ptr.dtype.element_ty
    pid = tl.program_id(0)
    tile = pid % TILES
    i_h = (pid // TILES) % HV
    i_n = pid // TILES // HV
    begin, length, first, i_b, skip = locate_segment(cu_ptr, i_n, T, N, segment, C, PACKED, SPLIT)
    if to_ptr is not None:
        p_to = pool_rows_of(to_ptr, i_n, i_b, begin, skip, T, segment, PACKED, SPLIT)
    i_n = i_n.to(tl.int64)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, WIDE)
    o_v = tile * BV + tl.arange(0, BV)
    m_v = (o_v < V)[:, None]
    m_s = m_v & (o_k < K)[None, :]
    i_v = (begin * HV + i_h) * V
    o_s = (i_n * HV + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
    o_w = o_c[:, None] * WIDE + o_k[None, :]
    o_a = o_c[:, None] * C + o_c[None, :]
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BV, WIDE]
    else:
        b_s = tl.zeros((BV, WIDE), tl.float32)
    if TRANSITION:
        o_m = o_v - NV * BV
        b_s = tl.where(o_m[:, None] == o_k[None, :], 1.0, b_s)
    for i in range(tl.cdiv(length, C)):
        i_c = i
        m_c = o_c < length - i_c * C
        i_chunk_head = (first + i_c) * HV + i_h
        i_o = i_v + (i_c * C).to(tl.int64) * (HV * V)
        b_w = tl.load(w_ptr + i_chunk_head * (C * WIDE) + o_w)  # [C, WIDE]
        b_b = tl.load(b_ptr + i_chunk_head * (C * WIDE) + o_w)
        o_u = i_chunk_head * (V * C) + o_v[:, None] * C + o_c[None, :]
        b_u = tl.load(u_ptr + o_u, mask=m_v, other=0.0)  # [BV, C]
        b_lhs = b_s.to(act)
        if OUTPUT == "states":
            tl.store(
                states_ptr + i_chunk_head * (V * WIDE) + o_v[:, None] * WIDE + o_k, b_lhs, mask=m_v
            )
        if OUTPUT == "o":
            b_q = tl.load(q_ptr + i_chunk_head * (C * WIDE) + o_w)
            b_qb = tl.load(qb_ptr + i_chunk_head * (C * C) + o_a)  # [i, j]
            b_o = tl.dot(b_lhs, tl.trans(b_q), input_precision=PRECISION)  # [BV, C]
        b_x = tl.dot(b_lhs, tl.trans(b_w), b_u, input_precision=PRECISION)
        b_x = b_x.to(act)
        if HAS_GATE:
            b_s *= tl.load(total_ptr + i_chunk_head * WIDE + o_k)[None, :]
        b_s = tl.dot(b_x, b_b, b_s, input_precision=PRECISION)  # [BV, WIDE]
        if not DELTA:
            b_v = v_columns(v_ptr + i_o, HV * V, o_c, m_c, o_v, V, VM)  # [BV, C]
            b_k = tl.load(k_ptr + i_chunk_head * (C * WIDE) + o_w)
            b_s = tl.dot(b_v, b_k, b_s, input_precision=PRECISION)
        if to_ptr is not None:
            done = skip + i_c * C + C
            store_to_pool(pool_ptr, p_to, done, i_h, HV, b_s, o_v, o_k, m_s, V, K)
        if OUTPUT == "states":
            tl.store(x_ptr + o_u, b_x, mask=m_v)
        if OUTPUT == "o":
            b_o = tl.dot(b_x, tl.trans(b_qb), b_o, input_precision=PRECISION)
            if not DELTA:
                b_qk = tl.load(qk_ptr + i_chunk_head * (C * C) + o_a)
                b_o = tl.dot(b_v, tl.trans(b_qk), b_o, input_precision=PRECISION)
            p_o = o_ptr + i_o + o_c[None, :] * (HV * V) + o_v[:, None]
            tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=m_v & m_c[None, :])
    if TRANSITION:
        p_m = m_ptr + (i_n * HV + i_h) * (K * K) + o_k[None, :] * K + o_m[:, None]
        m_m = ((o_m >= 0) & (o_m < K))[:, None] & (o_k < K)[None, :]
        tl.store(p_m, b_s, mask=m_m)
    if HAS_S_OUT:
        tl.store(s_out_ptr + o_s, b_s, mask=m_s)


@triton.jit(do_not_specialize=_SIZES)
def dplr_chunk_dstate_kernel(
    do_ptr,  # [tokens, HV, V]
    q_ptr,  # [chunks, HV, C, WIDE]
    w_ptr, b_ptr,
    total_ptr,  # [chunks, HV, WIDE]
    qb_ptr,  # [chunks, HV, C, C]
    r_ptr,
    y_ptr,  # [chunks, HV, V, C]
    states_ptr,  # [chunks, HV, V, WIDE]: dS' after each chunk
    s_in_ptr,  # [segments, HV, K, V]: gradient of the state after the segment
    s_out_ptr,  # [segments, HV, K, V]: of that before it; dE
    cu_ptr,  # [N + 1]
    T, N, HV, segment,
    K: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    OUTPUT: tl.constexpr, HAS_GATE: tl.constexpr, HAS_S_IN: tl.constexpr, HAS_S_OUT: tl.constexpr,
    SPLIT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (ceil(V / BV) * HV * segments,): one program scans one tile of V of one head back.

    OUTPUT: "states", those and y; or "ends", s_out alone.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    act = w_ptr.dtype.element_ty
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_n = pid // NV // HV
    begin, length, first, _, _ = locate_segment(cu_ptr, i_n, T, N, segment, C, PACKED, SPLIT)
    i_n = i_n.to(tl.int64)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, WIDE)
    o_v = (pid % NV) * BV + tl.arange(0, BV)
    m_v = (o_v < V)[:, None]
    m_s = m_v & (o_k < K)[None, :]
    i_v = (begin * HV + i_h) * V
    o_s = (i_n * HV + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
    o_w = o_c[:, None] * WIDE + o_k[None, :]
    o_a = o_c[:, None] * C + o_c[None, :]
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BV, WIDE]
    else:
        b_s = tl.zeros((BV, WIDE), tl.float32)
    chunks = tl.cdiv(length, C)
    for step in range(chunks):
        i_c = chunks - 1 - step
        m_c = o_c < length - i_c * C
        i_chunk_head = (first + i_c) * HV + i_h
        b_b = tl.load(b_ptr + i_chunk_head * (C * WIDE) + o_w)  # [C, WIDE]
        b_w = tl.load(w_ptr + i_chunk_head * (C * WIDE) + o_w)
        b_q = tl.load(q_ptr + i_chunk_head * (C * WIDE) + o_w)
        b_qb = tl.load(qb_ptr + i_chunk_head * (C * C) + o_a)  # [i, j]
        if OUTPUT == "states":
            b_r = tl.load(r_ptr + i_chunk_head * (C * C) + o_a)
        p_do = do_ptr + i_v + (i_c * C).to(tl.int64) * (HV * V)
        b_do = v_columns(p_do, HV * V, o_c, m_c, o_v, V, V % BV != 0)  # [BV, C]
        b_lhs = b_s.to(act)
        if OUTPUT == "states":
            tl.store(
                states_ptr + i_chunk_head * (V * WIDE) + o_v[:, None] * WIDE + o_k, b_lhs, mask=m_v
            )
        b_dx = tl.dot(b_do, b_qb, input_precision=PRECISION)  # [BV, C]
        b_dx = tl.dot(b_lhs, tl.trans(b_b), b_dx, input_precision=PRECISION).to(act)
        if HAS_GATE:
            b_s *= tl.load(total_ptr + i_chunk_head * WIDE + o_k)[None, :]
        b_s = tl.dot(b_do, b_q, b_s, input_precision=PRECISION)  # [BV, WIDE]
        b_s = tl.dot(b_dx, b_w, b_s, input_precision=PRECISION)
        if OUTPUT == "states":
            b_y = tl.dot(b_dx, b_r, input_precision=PRECISION)  # [BV, C]
            p_y = y_ptr + i_chunk_head * (V * C) + o_v[:, None] * C + o_c[None, :]
            tl.store(p_y, b_y.to(act), mask=m_v)
    if HAS_S_OUT:
        tl.store(s_out_ptr + o_s, b_s.to(s_out_ptr.dtype.element_ty), mask=m_s)
