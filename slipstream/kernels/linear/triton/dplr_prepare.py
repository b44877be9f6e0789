"""Transitions with a decay for every channel, or with free a and b: what needs no state.

A read of the state under a gives x_i, which is written under b; dplr writes v under k besides. The
delta rule is a = k after the decay, b = k, and its own right side. In a chunk, S the state before
it and ab, ak, qb, qk the decayed scores of its tokens (dplr_gates.py), strict for a,

    delta  (I + beta ab) x = beta v - beta (k exp(G)) S             R = (I + beta ab)^-1
    dplr   (I - ab) x      = ak v + (a exp(G_prev)) S               R = (I - ab)^-1

so that x = U + W S with

    delta  U = R beta v        W = -R beta (k exp(G))
    dplr   U = R ak v          W = R (a exp(G_prev))

and the walk's step has neither gates nor scores to compute. One program does one chunk of a value
head and writes W, U, scale (q exp(G)), b exp(G_C - G), k exp(G_C - G), exp(G_C), scale qb and
scale qk in the order in which the walk reads them: chunk by chunk, K filled up with zeros. Bytes
against recomputing the scores in the walk: 4.5 tensors of the size of k written (dplr 6) and read,
and no product of the walk but the two that follow from one another.
"""

# pyright knows neither what a jit function returns nor constexpr
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta_solve import find_chunk, inverse
from slipstream.kernels.linear.triton.dplr_gates import (
    at_step,
    from_start,
    load_channel_gates,
    of_chunk,
    pairs_of_step,
    to_end,
)
from slipstream.kernels.linear.triton.walk import _block


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
    HAS_GATE: tl.constexpr,
    STEPS: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the scores of a read r with b and k, of BK channels; OWN: also those of pairs (i, i).

    DELTA has b = k, and no scores with k besides.
    """
    i = o_c[:, None]
    j = o_c[None, :]
    seen = i >= j if OWN else i > j
    if HAS_GATE:
        if gates[6]:
            b_read = of_chunk(gates, False, BEFORE)
            b_write = of_chunk(gates, True, False)
            b_rb = _add_scores(b_rb, p_r, b_read, p_b, b_write, o_q, m_k, seen, PRECISION)
            if not DELTA:
                b_rk = _add_scores(b_rk, p_r, b_read, p_k, b_write, o_q, m_k, seen, PRECISION)
        else:
            first = gates[5]
            for step in range(first, STEPS + 1):
                seen = pairs_of_step(i, j, step, first)
                if OWN:
                    seen = seen | ((i == j) & (step == first))
                b_read = at_step(gates, o_c, step, False, BEFORE, EXACT, PRECISION)
                b_write = at_step(gates, o_c, step, True, False, EXACT, PRECISION)
                b_rb = _add_scores(b_rb, p_r, b_read, p_b, b_write, o_q, m_k, seen, PRECISION)
                if not DELTA:
                    b_rk = _add_scores(b_rk, p_r, b_read, p_k, b_write, o_q, m_k, seen, PRECISION)
    else:
        b_rb = _add_scores(b_rb, p_r, 1.0, p_b, 1.0, o_q, m_k, seen, PRECISION)
        b_rk = _add_scores(b_rk, p_r, 1.0, p_k, 1.0, o_q, m_k, seen, PRECISION)
    return b_rb, b_rk


@triton.jit(do_not_specialize=["scale", "keep", "T", "N", "HV", "H"])
def dplr_prepare_kernel(
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
    u_out_ptr,  # [slots, HV, V, C]: U
    total_ptr,  # [slots, HV, WIDE]: exp(G_C)
    qb_ptr,  # [slots, HV, C, C], scaled
    qk_ptr,  # scaled, dplr
    ak_ptr,  # dplr, if keep
    r_ptr,  # if keep
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
    HAS_GATE: tl.constexpr,
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
    i_h = pid % HV
    begin, length, i_c = find_chunk(cu_ptr, pid // HV, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    m_c = o_c < length - i_c * C
    i = o_c[:, None]
    j = o_c[None, :]
    row = begin + i_c * C
    i_k = (row * H + i_h // (HV // H)) * K
    i_g = (row * HV + i_h) * GK
    slot = pid.to(tl.int64)
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
            HAS_GATE, CHANNEL, STEPS, LIMIT, EXACT, PRECISION,
        )  # fmt: skip
        if HAS_GATE:
            tl.store(total_ptr + slot * WIDE + o_k, tl.exp2(gates[4]))
        b_qb, b_qk = _add_decayed(
            b_qb, b_qk, q_ptr + i_k, write_ptr + i_k, k_ptr + i_k, o_q, m_k, gates, o_c,
            True, False, DELTA, HAS_GATE, STEPS, EXACT, PRECISION,
        )  # fmt: skip
        b_e = from_start(gates, o_c, False, EXACT, PRECISION) if HAS_GATE else 1.0
        b_q = tl.load(q_ptr + i_k + o_q, mask=m_k, other=0.0).to(tl.float32)
        tl.store(q_out_ptr + i_w + o_w, (b_q * b_e * scale).to(act))
        b_e = to_end(gates, o_c, EXACT, PRECISION) if HAS_GATE else 1.0
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
            HAS_GATE, CHANNEL, STEPS, LIMIT, EXACT, PRECISION,
        )  # fmt: skip
        b_ab, b_ak = _add_decayed(
            b_ab, b_ak, read_ptr + i_k, write_ptr + i_k, k_ptr + i_k, o_q, m_k, gates, o_c,
            False, not DELTA, DELTA, HAS_GATE, STEPS, EXACT, PRECISION,
        )  # fmt: skip
    LEVELS: tl.constexpr = STEPS - 4
    if DELTA:
        b_beta = tl.load(beta_ptr + (row + o_c) * HV + i_h, mask=m_c, other=0.0).to(tl.float32)
        b_r = inverse(b_ab * b_beta[:, None], C, LEVELS, INNER)
    else:
        b_r = inverse(-b_ab, C, LEVELS, INNER)
    if keep != 0:
        tl.store(r_ptr + i_a + o_a, b_r.to(act))
        if not DELTA:
            tl.store(ak_ptr + i_a + o_a, b_ak.to(act))
    if DELTA:
        b_r *= b_beta[None, :]
    b_r = b_r.to(act)
    for n in range(WIDE // BK):
        o_k = n * BK + tl.arange(0, BK)
        m_k = m_c[:, None]
        if KM:
            m_k = m_k & (o_k < K)[None, :]
        p_a = read_ptr + i_k + i * (H * K) + o_k[None, :]
        b_a = tl.load(p_a, mask=m_k, other=0.0)  # [C, BK]
        gates = load_channel_gates(
            ones_ptr, g_ptr, i_g, HV * GK, o_c, m_k, o_k,
            HAS_GATE, CHANNEL, STEPS, LIMIT, EXACT, PRECISION,
        )  # fmt: skip
        if HAS_GATE:
            b_a = (b_a * from_start(gates, o_c, not DELTA, EXACT, PRECISION)).to(act)
        b_w = tl.dot(b_r, b_a, input_precision=PRECISION)
        if DELTA:
            b_w = -b_w
        tl.store(w_out_ptr + i_w + i * WIDE + o_k[None, :], b_w.to(act))
    if not DELTA:
        b_r = tl.dot(b_r, b_ak.to(act), input_precision=PRECISION).to(act)
    for n in range(tl.cdiv(V, BV)):
        o_v = n * BV + tl.arange(0, BV)
        b_v = _block(v_ptr + (row * HV + i_h) * V, HV * V, o_c, m_c, o_v, V, V % BV != 0)
        b_u = tl.dot(b_r, b_v, input_precision=PRECISION)  # [C, BV]
        p_u = u_out_ptr + slot * (V * C) + o_v[None, :] * C + i
        tl.store(p_u, b_u.to(act), mask=(o_v < V)[None, :])
