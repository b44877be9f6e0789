"""Per-channel decay, or free a and b: the gradients of q, k, a, b and the gates, chunk by chunk.

With S before the chunk, dS' after it, x, y, z and the gradients of the scores of dplr_scores.py,
and E, early, late of dplr_whole.py, P = exp(E), N = exp(-E), P_prev = P before a token's own gate,

    dq = P (exp(early) scale do S^T + dqb (b N) + dqk (k N))
    da = P_prev (exp(early) z S^T + dab (b N) + dak (k N))
    db = N (exp(late) x dS'^T + dqb^T (q P) + dab^T (a P_prev))
    dk = N (exp(late) v dS'^T + dqk^T (q P) + dak^T (a P_prev))

where delta has a = b = k and P for P_prev, so that its dk is da + db, and dbeta = y . v - a . (what
y alone would make of da). An exponent's gradient is the product of what it multiplies with its
gradient: gate t is in those of q from t on, of a after it, of what came of dS' before it, and with
a minus of what scores gave b and k from t on, less what is not in the decay from t to the end.
Pairs (i, i) have no decay; they come last. Strong chunks are left to dplr_strong_grads.py.
"""

# pyright knows neither what a jit function returns nor constexpr
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta_solve import find_chunk
from slipstream.kernels.linear.triton.dplr_gates import load_gates_of
from slipstream.kernels.linear.triton.dplr_whole import load_whole, since
from slipstream.kernels.linear.triton.walk import _block


@triton.jit
def _states(p, o_v, o_k, V: tl.constexpr, BV: tl.constexpr, WIDE: tl.constexpr):
    """Rows o_v and columns o_k of a state [V, WIDE]."""
    p = p + o_v[:, None] * WIDE + o_k[None, :]
    if V % BV != 0:
        b = tl.load(p, mask=(o_v < V)[:, None], other=0.0)
    else:
        b = tl.load(p)
    return b


@triton.jit
def _columns_of(p, o_c, o_v, V: tl.constexpr, BV: tl.constexpr):
    """Rows [C, BV] of a chunk of [V, C]."""
    p = p + o_v[:, None] * o_c.shape[0] + o_c[None, :]
    if V % BV != 0:
        b = tl.load(p, mask=(o_v < V)[:, None], other=0.0)
    else:
        b = tl.load(p)
    return tl.trans(b)


@triton.jit
def _by_states(
    p,
    stride,
    p_states,
    o_c,
    m_c,
    o_k,
    V: tl.constexpr,
    WIDE: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BY_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows [C, V] of a chunk, of tokens or BY_CHUNK [V, C], times its states [V, BK]."""
    b_d = tl.zeros((o_c.shape[0], BK), tl.float32)
    for n in range(tl.cdiv(V, BV)):
        o_v = n * BV + tl.arange(0, BV)
        b_s = _states(p_states, o_v, o_k, V, BV, WIDE)
        if BY_CHUNK:
            b_r = _columns_of(p, o_c, o_v, V, BV)
        else:
            b_r = _block(p, stride, o_c, m_c, o_v, V, V % BV != 0)
        b_d = tl.dot(b_r, b_s, b_d, input_precision=PRECISION)
    return b_d


@triton.jit
def _inner(p_l, p_r, o_k, V: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """Sum over V of two states' products [BK]."""
    b_z = tl.zeros((BK,), tl.float32)
    for n in range(tl.cdiv(V, BV)):
        o_v = n * BV + tl.arange(0, BV)
        b_l = _states(p_l, o_v, o_k, V, BV, WIDE).to(tl.float32)
        b_z += tl.sum(b_l * _states(p_r, o_v, o_k, V, BV, WIDE).to(tl.float32), 0)
    return b_z


@triton.jit
def _decayed(p, m_k, b_e, HAS_GATE: tl.constexpr):
    """A tile times 2^b_e, in its own dtype."""
    b = tl.load(p, mask=m_k, other=0.0)
    if HAS_GATE:
        b = (b * tl.exp2(b_e)).to(b.dtype)
    return b


@triton.jit
def _square(p_d, o_c):
    """Gradients of scores [C, C]."""
    return tl.load(p_d + o_c[:, None] * o_c.shape[0] + o_c[None, :])


@triton.jit
def _through(b_d, p_d, o_c, b_m, PRECISION: tl.constexpr):
    """b_d + d^T m [C, BK], d the gradients of scores [C, C]."""
    return tl.dot(tl.trans(_square(p_d, o_c)), b_m, b_d, input_precision=PRECISION)


@triton.jit
def _read(
    p,
    stride,
    scale,
    p_states,
    b_early,
    p_sb,
    b_wb,
    p_sk,
    b_wk,
    o_c,
    m_c,
    o_k,
    V: tl.constexpr,
    WIDE: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BY_CHUNK: tl.constexpr,
    TWO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of q or a [C, BK] but for its own decay: by states, by b N and, if TWO, by k N."""
    b_sb = _square(p_sb, o_c)
    if TWO:
        b_sk = _square(p_sk, o_c)
    b_d = _by_states(p, stride, p_states, o_c, m_c, o_k, V, WIDE, BV, BK, BY_CHUNK, PRECISION)
    b_d *= scale * b_early
    b_d = tl.dot(b_sb, b_wb, b_d, input_precision=PRECISION)
    if TWO:
        b_d = tl.dot(b_sk, b_wk, b_d, input_precision=PRECISION)
    return b_d


@triton.jit
def _write(
    b_t,
    b_after,
    p_own,
    p,
    stride,
    p_states,
    b_late,
    b_e,
    p_sq,
    b_rq,
    p_sa,
    b_ra,
    m_k,
    o_c,
    m_c,
    o_k,
    V: tl.constexpr,
    WIDE: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BY_CHUNK: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of b or k [C, BK], and with it the sums for the gates."""
    b_d = _by_states(p, stride, p_states, o_c, m_c, o_k, V, WIDE, BV, BK, BY_CHUNK, PRECISION)
    if HAS_GATE:
        b_d *= b_late
        b_after += tl.sum(tl.load(p_own, mask=m_k, other=0.0) * tl.exp2(-b_e) * b_d, 0)
    b_d = _through(b_d, p_sq, o_c, b_rq, PRECISION)
    b_d = _through(b_d, p_sa, o_c, b_ra, PRECISION)
    if HAS_GATE:
        b_d *= tl.exp2(-b_e)
        b_t -= tl.load(p_own, mask=m_k, other=0.0) * b_d
    return b_d, b_t, b_after


@triton.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "tokens"])
def dplr_grads_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,
    a_ptr,  # none for delta
    b_ptr,
    g_ptr,  # [tokens, HV, K] or [tokens, HV]
    beta_ptr,  # [tokens, HV], delta
    v_ptr,  # [tokens, HV, V], dplr
    do_ptr,  # [tokens, HV, V]
    x_ptr,  # [slots, HV, V, C]
    y_ptr,
    states_ptr,  # [slots, HV, V, WIDE]
    dstates_ptr,
    dqb_ptr,  # [slots, HV, C, C]
    dab_ptr,
    dqk_ptr,  # dplr
    dak_ptr,
    own_ptr,  # [slots, HV, 2, C]: gradients of the scores qb and qk of pairs (i, i)
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,
    da_ptr,  # dplr
    db_ptr,
    dg_ptr,
    dbeta_ptr,  # [1 + NK, tokens, HV], delta, but for the first
    strong_ptr,  # [slots, HV]
    cu_ptr,  # [N + 1]
    scale,
    T,
    N,
    HV,
    H,
    tokens,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_GATE: tl.constexpr,
    CHANNEL: tl.constexpr,
    PACKED: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(K / BK) * HV * slots,): BK channels of one chunk and value head a program."""
    NK: tl.constexpr = (K + BK - 1) // BK
    GK: tl.constexpr = K**CHANNEL
    act = q_ptr.dtype.element_ty
    pid = tl.program_id(0)
    slot = (pid // NK).to(tl.int64)
    if HAS_GATE:  # noqa: SIM102 - there is no strong_ptr without
        if tl.load(strong_ptr + slot) != 0:
            return
    i_k = pid % NK
    i_h = (pid // NK) % HV
    begin, length, i_c = find_chunk(cu_ptr, pid // NK // HV, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    i = o_c[:, None]
    o_k = i_k * BK + tl.arange(0, BK)
    m_c = o_c < length - i_c * C
    m_k = m_c[:, None]
    if K % BK != 0:
        m_k = m_k & (o_k < K)[None, :]
    row = begin + i_c * C
    i_v = (row * HV + i_h) * V
    i_a = slot * (C * C)
    i_x = slot * (V * C)
    i_s = slot * (V * WIDE)
    o_q = (row * H + i_h // (HV // H)) * K + i * (H * K) + o_k[None, :]
    o_o = (row * HV + i_h) * K + i * (HV * K) + o_k[None, :]
    b_sign = 1.0
    if DELTA:
        o_t = (row + o_c) * HV + i_h
        b_sign = -tl.load(beta_ptr + o_t, mask=m_c, other=0.0).to(tl.float32)[:, None]  # z / y
        p_a = k_ptr + o_q
        p_b = k_ptr + o_q
    else:
        p_a = a_ptr + o_q
        p_b = b_ptr + o_q

    p_k = k_ptr + o_q
    p_q = q_ptr + o_q
    b_own = tl.load(own_ptr + slot * (2 * C) + o_c)
    if not DELTA:
        b_own_k = tl.load(own_ptr + slot * (2 * C) + C + o_c)
    p_qb = dqb_ptr + i_a
    p_ab = dab_ptr + i_a
    p_qk = p_qb if DELTA else dqk_ptr + i_a
    p_ak = p_ab if DELTA else dak_ptr + i_a
    b_e = 0.0
    b_early = 1.0
    b_late = 1.0
    b_t = 0.0
    b_after = 0.0
    if HAS_GATE:
        b_z = _inner(states_ptr + i_s, dstates_ptr + i_s, o_k, V, WIDE, BV, BK)
        p_g, b_e, b_early, b_late = load_whole(
            g_ptr, (row * HV + i_h) * GK, HV * GK, o_c, m_k, o_k,
            CHANNEL, EXACT, PRECISION,
        )  # fmt: skip
        b_z *= tl.exp2(b_early + b_late)
        b_early = tl.exp2(b_early)[None, :]
        b_late = tl.exp2(b_late)[None, :]

    # q, by way of what the tokens wrote
    b_wb = _decayed(p_b, m_k, -b_e, HAS_GATE)
    b_wk = b_wb
    if not DELTA:
        b_wk = _decayed(p_k, m_k, -b_e, HAS_GATE)
    b_d = _read(
        do_ptr + i_v, HV * V, scale, states_ptr + i_s, b_early, p_qb, b_wb, p_qk, b_wk,
        o_c, m_c, o_k, V, WIDE, BV, BK, False, not DELTA, PRECISION,
    )  # fmt: skip
    b_rq = tl.load(p_q, mask=m_k, other=0.0)
    if HAS_GATE:
        b_f = tl.exp2(b_e)
        b_d *= b_f
        b_t = b_rq * b_d
        b_rq = (b_rq * b_f).to(act)
    b_d += b_own[:, None] * tl.load(p_b, mask=m_k, other=0.0)
    if not DELTA:
        b_d += b_own_k[:, None] * tl.load(p_k, mask=m_k, other=0.0)
    tl.store(dq_ptr + o_o, b_d.to(act), mask=m_k)

    # a likewise
    b_d = _read(
        y_ptr + i_x, 0, 1.0, states_ptr + i_s, b_early, p_ab, b_wb, p_ak, b_wk,
        o_c, m_c, o_k, V, WIDE, BV, BK, True, not DELTA, PRECISION,
    )  # fmt: skip
    b_a = tl.load(p_a, mask=m_k, other=0.0)
    b_ra = b_a * b_sign
    if HAS_GATE:
        b_f = tl.exp2(b_e if DELTA else b_e - load_gates_of(p_g, m_k))
        b_d *= b_f
        b_ra *= b_f
    b_ra = b_ra.to(act)
    if DELTA:
        o_t += (1 + i_k) * (tokens.to(tl.int64) * HV)
        tl.store(dbeta_ptr + o_t, -tl.sum(b_d * b_a, 1), mask=m_c)
        b_da = b_d * b_sign
        if HAS_GATE:
            b_t += b_a * b_da
    else:
        tl.store(da_ptr + o_o, b_d.to(act), mask=m_k)
        if HAS_GATE:
            b_dg = b_a * b_d
            b_t += b_dg

    # b, by way of what the tokens read
    if HAS_GATE:
        # 0, which keeps the compiler from having had this exponential since b_wb
        b_e += tl.load(strong_ptr + slot, volatile=True).to(tl.float32)
    b_d, b_t, b_after = _write(
        b_t, b_after, p_b, x_ptr + i_x, 0, dstates_ptr + i_s, b_late, b_e, p_qb, b_rq, p_ab, b_ra,
        m_k, o_c, m_c, o_k, V, WIDE, BV, BK, True, HAS_GATE, PRECISION,
    )  # fmt: skip
    b_d += b_own[:, None] * tl.load(p_q, mask=m_k, other=0.0)
    if DELTA:
        tl.store(dk_ptr + o_o, (b_d + b_da).to(act), mask=m_k)
    else:
        tl.store(db_ptr + o_o, b_d.to(act), mask=m_k)
        # k likewise
        b_d, b_t, b_after = _write(
            b_t, b_after, p_k, v_ptr + i_v, HV * V, dstates_ptr + i_s, b_late, b_e,
            p_qk, b_rq, p_ak, b_ra,
            m_k, o_c, m_c, o_k, V, WIDE, BV, BK, False, HAS_GATE, PRECISION,
        )  # fmt: skip
        b_d += b_own_k[:, None] * tl.load(p_q, mask=m_k, other=0.0)
        tl.store(dk_ptr + o_o, b_d.to(act), mask=m_k)
    if HAS_GATE:
        b_t = since(b_t, o_c, EXACT, PRECISION) + b_after[None, :] + b_z[None, :]
        if not DELTA:
            b_t -= b_dg  # a is read before a token's own gate
        tl.store(dg_ptr + o_o, b_t, mask=m_k)
