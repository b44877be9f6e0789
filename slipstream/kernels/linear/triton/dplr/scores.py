"""Per-channel decay, or free a and b: from what the scans left, gradients of scores, v and beta.

With dS' the gradient of the state after the chunk, x, y (chunk.py), z = -beta y for delta, -y for
gated delta and y for dplr,

    dqb = scale do x^T      dab = z x^T      dqk = scale do v^T      dak = z v^T
    dv  = beta y            dbeta = y . v - (dqkg.py)                                  delta
    dv  = write y           dwrite = y v                                         gated delta
    dv  = (scale qk)^T do + ak^T y + k^ dS'                                                  dplr

Scores [C, C] stay in memory between this kernel, which sums over V, and that of dqkg.py,
which works on some channels of K.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block


@triton.jit(do_not_specialize=["scale", "T", "N", "HV"])
def dplr_scores_kernel(
    v_ptr,  # [tokens, HV, V]
    do_ptr,
    beta_ptr,  # [tokens, HV], delta; none for gated delta
    write_ptr,  # [tokens, HV, V], gated delta
    x_ptr,  # [chunks, HV, V, C]
    y_ptr,
    k_ptr,  # [chunks, HV, C, WIDE]: k exp(G_C - G), dplr
    qk_ptr,  # [chunks, HV, C, C], dplr
    ak_ptr,
    dstates_ptr,  # [chunks, HV, V, WIDE], dplr
    dv_ptr,  # [tokens, HV, V]
    dwrite_ptr,  # [tokens, HV, V], gated delta
    dbeta_ptr,  # [1 + NK, tokens, HV], delta: y . v in the first
    dqb_ptr,  # [chunks, HV, C, C]
    dab_ptr,  # for delta without -beta
    dqk_ptr,  # dplr
    dak_ptr,
    diag_ptr,  # [chunks, HV, 2, C]: dqb and dqk of pairs (i, i), which are zero there
    cu_ptr,  # [N + 1]
    scale, T, N, HV,
    V: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DELTA: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (chunks * HV,): gradients of the scores, of v and of beta, all of V in one program."""
    VM: tl.constexpr = V % BV != 0
    act = dqb_ptr.dtype.element_ty
    pid = tl.program_id(0)
    i_h = pid % HV
    begin, length, i_c = locate_chunk(cu_ptr, pid // HV, T, N, C, PACKED)
    if PACKED and i_c * C >= length:
        return
    o_c = tl.arange(0, C)
    m_c = o_c < length - i_c * C
    row = begin + i_c * C
    i_chunk_head = pid.to(tl.int64)
    i_v = (row * HV + i_h) * V
    i_a = i_chunk_head * (C * C)
    o_a = o_c[:, None] * C + o_c[None, :]
    b_dqb = tl.zeros((C, C), tl.float32)
    b_dab = tl.zeros((C, C), tl.float32)
    if beta_ptr is not None:
        o_t = (row + o_c) * HV + i_h
        b_beta = tl.load(beta_ptr + o_t, mask=m_c, other=0.0).to(tl.float32)
        b_dbeta = tl.zeros((C,), tl.float32)
    if not DELTA:
        b_dqk = tl.zeros((C, C), tl.float32)
        b_dak = tl.zeros((C, C), tl.float32)
    for n in range(tl.cdiv(V, BV)):
        o_v = n * BV + tl.arange(0, BV)
        m_v = (o_v < V)[:, None]
        o_x = o_v[:, None] * C + o_c[None, :]
        b_do = load_block(do_ptr + i_v, HV * V, o_c, m_c, o_v, V, VM)  # [C, BV]
        b_v = load_block(v_ptr + i_v, HV * V, o_c, m_c, o_v, V, VM)
        b_x = tl.load(x_ptr + i_chunk_head * (V * C) + o_x, mask=m_v, other=0.0)  # [BV, C]
        b_y = tl.trans(
            tl.load(y_ptr + i_chunk_head * (V * C) + o_x, mask=m_v, other=0.0)
        )  # [C, BV]
        b_dqb = tl.dot(b_do, b_x, b_dqb, input_precision=PRECISION)
        b_dab = tl.dot(b_y, b_x, b_dab, input_precision=PRECISION)
        if write_ptr is not None:
            b_wide = b_y.to(tl.float32)
            p_dw = dwrite_ptr + i_v + o_c[:, None] * (HV * V) + o_v[None, :]
            b_dw = (b_wide * b_v).to(dwrite_ptr.dtype.element_ty)
            tl.store(p_dw, b_dw, mask=m_c[:, None] & (o_v < V)[None, :])
            b_dv = b_wide * load_block(write_ptr + i_v, HV * V, o_c, m_c, o_v, V, VM)
        elif DELTA:
            b_wide = b_y.to(tl.float32)
            b_dbeta += tl.sum(b_wide * b_v, 1)
            b_dv = b_wide * b_beta[:, None]
        else:
            b_dqk = tl.dot(b_do, tl.trans(b_v), b_dqk, input_precision=PRECISION)
            b_dak = tl.dot(b_y, tl.trans(b_v), b_dak, input_precision=PRECISION)
            b_a = tl.trans(tl.load(qk_ptr + i_a + o_a))
            b_dv = tl.dot(b_a, b_do, input_precision=PRECISION)
            b_a = tl.trans(tl.load(ak_ptr + i_a + o_a))
            b_dv = tl.dot(b_a, b_y, b_dv, input_precision=PRECISION)
            for m in tl.static_range(WIDE // BK):
                o_k = m * BK + tl.arange(0, BK)
                o_w = o_c[:, None] * WIDE + o_k[None, :]
                b_k = tl.load(k_ptr + i_chunk_head * (C * WIDE) + o_w)  # [C, BK]
                p_s = dstates_ptr + i_chunk_head * (V * WIDE) + o_v[:, None] * WIDE + o_k[None, :]
                b_ds = tl.load(p_s, mask=m_v, other=0.0)  # [BV, BK]
                b_dv = tl.dot(b_k, tl.trans(b_ds), b_dv, input_precision=PRECISION)
        p_dv = dv_ptr + i_v + o_c[:, None] * (HV * V) + o_v[None, :]
        tl.store(p_dv, b_dv.to(dv_ptr.dtype.element_ty), mask=m_c[:, None] & (o_v < V)[None, :])
    p_diag = diag_ptr + i_chunk_head * (2 * C) + o_c
    earlier = o_c[:, None] > o_c[None, :]
    same = o_c[:, None] == o_c[None, :]
    tl.store(p_diag, tl.sum(tl.where(same, b_dqb, 0.0), 1) * scale)
    tl.store(dqb_ptr + i_a + o_a, tl.where(earlier, b_dqb * scale, 0.0).to(act))
    tl.store(dab_ptr + i_a + o_a, tl.where(earlier, b_dab, 0.0).to(act))
    if beta_ptr is not None:
        tl.store(dbeta_ptr + o_t, b_dbeta, mask=m_c)
    if not DELTA:
        tl.store(p_diag + C, tl.sum(tl.where(same, b_dqk, 0.0), 1) * scale)
        tl.store(dqk_ptr + i_a + o_a, tl.where(earlier, b_dqk * scale, 0.0).to(act))
        tl.store(dak_ptr + i_a + o_a, tl.where(earlier, b_dak, 0.0).to(act))
