"""Per-channel decay, or free a and b: what needs no state, of strong chunks.

As wy.py, which marks the chunks, does it for the others, but with scores summed step by
step (gate_sums.py). Other programs have nothing to do.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.dplr.gate_sums import (
    at_step,
    from_start,
    load_channel_gates,
    pairs_of_step,
    to_end,
)
from slipstream.kernels.linear.triton.dplr.wy import solve_chunk


@triton.jit
def _add_scores(b_a, p_r, b_read, p_w, b_write, o_q, m_k, seen, PRECISION: tl.constexpr):
    """b_a + r w^T [C, C] where seen, of a read and a write times their decays."""
    b_r = tl.load(p_r + o_q, mask=m_k, other=0.0)
    b_w = tl.load(p_w + o_q, mask=m_k, other=0.0)
    b_r = (b_r * b_read).to(b_r.dtype)
    b_w = (b_w * b_write).to(b_w.dtype)
    return b_a + tl.where(seen, tl.dot(b_r, tl.trans(b_w), input_precision=PRECISION), 0.0)


@triton.jit
def _add_decayed(
    b_rb,
    b_rk,
    p_r,
    p_b,
    p_k,
    o_q,
    m_k,
    gates,
    o_c,
    OWN: tl.constexpr,
    BEFORE: tl.constexpr,
    DELTA: tl.constexpr,
    STEPS: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the scores of a read r with b and k, of BK channels; OWN: also those of pairs (i, i).

    DELTA has b = k, and no scores with k besides.
    """
    i = o_c[:, None]
    j = o_c[None, :]
    first = gates[3]
    for step in range(first, STEPS + 1):
        seen = pairs_of_step(i, j, step, first)
        if OWN:
            seen = seen | ((i == j) & (step == first))
        b_read = at_step(gates, o_c, step, False, BEFORE, EXACT, PRECISION)
        b_write = at_step(gates, o_c, step, True, False, EXACT, PRECISION)
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
    q_out_ptr,  # [slots, HV, C, WIDE]: scale q exp(G)
    w_out_ptr,  # W
    b_out_ptr,  # b exp(G_C - G)
    k_out_ptr,  # k exp(G_C - G), dplr
    u_out_ptr,  # [slots, HV, V, C]: U, float32
    total_ptr,  # [slots, HV, WIDE]: exp(G_C)
    qb_ptr,  # [slots, HV, C, C], scaled
    qk_ptr,  # scaled, dplr
    ak_ptr,  # dplr, if keep
    r_ptr,  # if keep
    strong_ptr,  # [slots, HV]
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
    BV: tl.constexpr,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNEL: tl.constexpr,
    PACKED: tl.constexpr,
    EXACT: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER: tl.constexpr,
):
    """grid (slots * HV,). keep, which backward wants, is no constant: one compilation for both."""
    act = q_ptr.dtype.element_ty
    GK: tl.constexpr = K**CHANNEL
    KM: tl.constexpr = K != WIDE
    pid = tl.program_id(0)
    slot = pid.to(tl.int64)
    if tl.load(strong_ptr + slot) == 0:
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
    i_a = slot * (C * C)
    i_w = slot * (C * WIDE)
    o_a = i * C + j
    b_qb = tl.zeros((C, C), tl.float32)
    b_qk = tl.zeros((C, C), tl.float32)
    write_ptr = k_ptr if DELTA else b_ptr
    for n in range(WIDE // BK):
        o_k = n * BK + tl.arange(0, BK)
        o_w = i * WIDE + o_k[None, :]
        o_q = i * (H * K) + o_k[None, :]
        m_k = m_c[:, None]
        if KM:
            m_k = m_k & (o_k < K)[None, :]
        gates = load_channel_gates(
            ones_ptr, g_ptr, i_g, HV * GK, o_c, m_k, o_k,
            CHANNEL, STEPS, LIMIT, EXACT, PRECISION,
        )  # fmt: skip
        tl.store(total_ptr + slot * WIDE + o_k, tl.exp2(gates[2]))
        b_qb, b_qk = _add_decayed(
            b_qb, b_qk, q_ptr + i_k, write_ptr + i_k, k_ptr + i_k, o_q, m_k, gates, o_c,
            True, False, DELTA, STEPS, EXACT, PRECISION,
        )  # fmt: skip
        b_e = from_start(gates, o_c, False, EXACT, PRECISION)
        b_q = tl.load(q_ptr + i_k + o_q, mask=m_k, other=0.0).to(tl.float32)
        tl.store(q_out_ptr + i_w + o_w, (b_q * b_e * scale).to(act))
        b_e = to_end(gates, o_c, EXACT, PRECISION)
        b_b = tl.load(write_ptr + i_k + o_q, mask=m_k, other=0.0)
        tl.store(b_out_ptr + i_w + o_w, (b_b * b_e).to(act))
        if not DELTA:
            b_k = tl.load(k_ptr + i_k + o_q, mask=m_k, other=0.0)
            tl.store(k_out_ptr + i_w + o_w, (b_k * b_e).to(act))
    tl.store(qb_ptr + i_a + o_a, (b_qb * scale).to(act))
    if not DELTA:
        tl.store(qk_ptr + i_a + o_a, (b_qk * scale).to(act))

    read_ptr = k_ptr if DELTA else a_ptr
    b_ab = tl.zeros((C, C), tl.float32)
    b_ak = tl.zeros((C, C), tl.float32)
    for n in range(WIDE // BK):
        o_k = n * BK + tl.arange(0, BK)
        o_q = i * (H * K) + o_k[None, :]
        m_k = m_c[:, None]
        if KM:
            m_k = m_k & (o_k < K)[None, :]
        gates = load_channel_gates(
            ones_ptr, g_ptr, i_g, HV * GK, o_c, m_k, o_k,
            CHANNEL, STEPS, LIMIT, EXACT, PRECISION,
        )  # fmt: skip
        b_ab, b_ak = _add_decayed(
            b_ab, b_ak, read_ptr + i_k, write_ptr + i_k, k_ptr + i_k, o_q, m_k, gates, o_c,
            False, not DELTA, DELTA, STEPS, EXACT, PRECISION,
        )  # fmt: skip
        b_a = tl.load(read_ptr + i_k + o_q, mask=m_k, other=0.0)
        b_a = (b_a * from_start(gates, o_c, not DELTA, EXACT, PRECISION)).to(act)
        tl.store(w_out_ptr + i_w + i * WIDE + o_k[None, :], b_a)
    solve_chunk(
        b_ab, b_ak, beta_ptr + row * HV + i_h if DELTA else None, HV,
        v_ptr + (row * HV + i_h) * V, w_out_ptr + i_w, u_out_ptr + slot * (V * C),
        None if DELTA else ak_ptr + i_a, r_ptr + i_a, keep, o_c, m_c,
        V, WIDE, BK, BV, STEPS, DELTA, PRECISION, INNER,
    )  # fmt: skip
