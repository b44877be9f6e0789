"""Per-channel decay, or free a and b: the gradients of q, k, a, b and the gates, chunk by chunk.

With S before the chunk, dS' after it, x, y, z and the gradients of the scores of scores.py,
and E, early, late of intra_anchored.py, P = exp(E), N = exp(-E), P_prev = P before a token's own
gate,

    dq = P (exp(early) scale do S^T + dqb (b N) + dqk (k N))
    da = P_prev (exp(early) z S^T + dab (b N) + dak (k N))
    db = N (exp(late) x dS'^T + dqb^T (q P) + dab^T (a P_prev))
    dk = N (exp(late) v dS'^T + dqk^T (q P) + dak^T (a P_prev))

where delta has a = b = k and P for P_prev, so that its dk is da + db, and dbeta = y . v - a . (what
y alone would make of da). An exponent's gradient is the product of what it multiplies with its
gradient: gate t is in those of q from t on, of a after it, of what came of dS' before it, and with
a minus of what scores gave b and k from t on, less what is not in the decay from t to the end.
Pairs (i, i) have no decay; they come last. Where halves of a chunk are APART (intra_anchored.py)
what comes of one half of the tokens is taken, rows of the other half are rescaled, then comes what
is left. Strong chunks are left to intra_safe_bwd.py.
"""

from collections import namedtuple

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.dplr.intra_anchored import add_anchored_bwd, load_anchored
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block

# constants of a launch, for device functions
Constants = namedtuple("Constants", "DELTA APART PRECISION")
# gradients of the scores [chunks, HV, C, C]
Scores = namedtuple("Scores", "dqb dab dqk dak")


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
def _of_states_before(
    p_do, HV, p_y, p_states, p_dstates, o_c, m_c, o_k,
    V: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """do S^T and y S^T [C, BK], and if HAS_GATE the sum over V of S dS' [BK]."""
    b_dq = tl.zeros((o_c.shape[0], BK), tl.float32)
    b_da = tl.zeros((o_c.shape[0], BK), tl.float32)
    b_z = tl.zeros((BK,), tl.float32)
    # registers and products read S: loaded ahead it would be overwritten (compiler/smem_hazards.py)
    AHEAD: tl.constexpr = 1 if HAS_GATE else None
    for n in tl.range(0, tl.cdiv(V, BV), num_stages=AHEAD):
        o_v = n * BV + tl.arange(0, BV)
        b_s = _states(p_states, o_v, o_k, V, BV, WIDE)  # [BV, BK]
        if HAS_GATE:
            b_ds = _states(p_dstates, o_v, o_k, V, BV, WIDE)
            b_z += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 0)
        b_r = load_block(p_do, HV * V, o_c, m_c, o_v, V, V % BV != 0)  # [C, BV]
        b_dq = tl.dot(b_r, b_s, b_dq, input_precision=PRECISION)
        b_r = _columns_of(p_y, o_c, o_v, V, BV)
        b_da = tl.dot(b_r, b_s, b_da, input_precision=PRECISION)
    return b_dq, b_da, b_z


@triton.jit
def _of_states_after(
    p_x, p_v, HV, p_dstates, o_c, m_c, o_k,
    V: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x dS'^T and, except for DELTA, v dS'^T [C, BK]."""
    b_db = tl.zeros((o_c.shape[0], BK), tl.float32)
    b_dk = tl.zeros((o_c.shape[0], BK), tl.float32)
    for n in range(tl.cdiv(V, BV)):
        o_v = n * BV + tl.arange(0, BV)
        b_ds = _states(p_dstates, o_v, o_k, V, BV, WIDE)
        b_r = _columns_of(p_x, o_c, o_v, V, BV)
        b_db = tl.dot(b_r, b_ds, b_db, input_precision=PRECISION)
        if not DELTA:
            b_r = load_block(p_v, HV * V, o_c, m_c, o_v, V, V % BV != 0)
            b_dk = tl.dot(b_r, b_ds, b_dk, input_precision=PRECISION)
    return b_db, b_dk


@triton.jit
def _scores_grad(
    b_d, p_d, o_c, b_m, of, HALF: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr
):
    """b_d + d m [C, BK], d the gradient of scores [C, C], or d^T m; if HALF what comes `of` some
    tokens, [C]."""
    b_a = tl.load(p_d + o_c[:, None] * o_c.shape[0] + o_c[None, :])
    if TRANSPOSED:
        b_a = tl.trans(b_a)
    if HALF:
        b_a = tl.where(of[None, :], b_a, 0.0)
    return tl.dot(b_a, b_m, b_d, input_precision=PRECISION)


@triton.jit
def _scores_grads(
    b_d, p_1, b_1, p_2, b_2, o_c, apart, c, TWO: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """b_d + d_1 m_1 + d_2 m_2 [C, BK], or with d^T; without the second unless TWO.

    apart: APART, or 0 in a chunk whose operands are not.
    """
    if c.APART > 0 and apart > 0:
        of = (o_c >= o_c.shape[0] // 2) == TRANSPOSED
        for half in tl.static_range(2):
            b_d = _scores_grad(b_d, p_1, o_c, b_1, of, True, TRANSPOSED, c.PRECISION)
            if TWO:
                b_d = _scores_grad(b_d, p_2, o_c, b_2, of, True, TRANSPOSED, c.PRECISION)
            if half == 0:
                b_d *= tl.where(of, 1.0, 2.0 ** (-2 * c.APART))[:, None]
                of = of == 0
    else:
        b_d = _scores_grad(b_d, p_1, o_c, b_1, None, False, TRANSPOSED, c.PRECISION)
        if TWO:
            b_d = _scores_grad(b_d, p_2, o_c, b_2, None, False, TRANSPOSED, c.PRECISION)
    return b_d


@triton.jit
def _load_writes(p, m_k, b_e, HAS_GATE: tl.constexpr):
    b = tl.load(p, mask=m_k, other=0.0)
    if HAS_GATE:
        b = (b * tl.exp2(-b_e)).to(b.dtype)
    return b


@triton.jit
def _of_writes(b_dq, b_da, b_w, b_u, scores, i_a, o_c, apart, c):
    """dq and da with what comes of what tokens wrote, w and except for DELTA u."""
    p_qk = scores.dqb if c.DELTA else scores.dqk + i_a
    p_ak = scores.dqb if c.DELTA else scores.dak + i_a
    b_dq = _scores_grads(b_dq, scores.dqb + i_a, b_w, p_qk, b_u, o_c, apart, c, not c.DELTA, False)
    b_da = _scores_grads(b_da, scores.dab + i_a, b_w, p_ak, b_u, o_c, apart, c, not c.DELTA, False)
    return b_dq, b_da


@triton.jit
def _of_reads(b_d, b_r, b_s, p_q, p_a, o_c, apart, c):
    """db or dk with what comes of what tokens read, r and s."""
    return _scores_grads(b_d, p_q, b_r, p_a, b_s, o_c, apart, c, True, True)


@triton.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "tokens"])
def dplr_dqkg_kernel(
    q_ptr, k_ptr,  # [tokens, H, K]
    a_ptr, b_ptr,  # none for delta
    g_ptr,  # [tokens, HV, K] or [tokens, HV]
    beta_ptr,  # [tokens, HV], delta
    v_ptr,  # [tokens, HV, V], dplr
    do_ptr,  # [tokens, HV, V]
    x_ptr, y_ptr,  # [chunks, HV, V, C]
    states_ptr, dstates_ptr,  # [chunks, HV, V, WIDE]
    dqb_ptr, dab_ptr,  # [chunks, HV, C, C]
    dqk_ptr, dak_ptr,  # dplr
    diag_ptr,  # [chunks, HV, 2, C]: gradients of the scores qb and qk of pairs (i, i)
    dq_ptr, dk_ptr,  # [tokens, HV, K]
    da_ptr, db_ptr,  # dplr
    dg_ptr,
    dbeta_ptr,  # [1 + NK, tokens, HV], delta, except for the first
    strong_ptr, cu_ptr,  # [chunks, HV], [N + 1]
    scale, T, N, HV, H, tokens,
    K: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DELTA: tl.constexpr, HAS_GATE: tl.constexpr, CHANNEL: tl.constexpr,
    PACKED: tl.constexpr, FP32: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (ceil(K / BK) * HV * chunks,): BK channels of one chunk and value head a program."""
    scores = Scores(dqb_ptr, dab_ptr, dqk_ptr, dak_ptr)
    c: tl.constexpr = Constants(DELTA, APART, PRECISION)
    NK: tl.constexpr = (K + BK - 1) // BK
    GK: tl.constexpr = K**CHANNEL
    act = q_ptr.dtype.element_ty
    pid = tl.program_id(0)
    i_chunk_head = (pid // NK).to(tl.int64)
    apart = 0.0
    if HAS_GATE:  # there is no strong_ptr without
        strength = tl.load(strong_ptr + i_chunk_head)
        if strength > 1:
            return
        apart = strength * APART
    i_k = pid % NK
    i_h = (pid // NK) % HV
    begin, length, i_c = locate_chunk(cu_ptr, pid // NK // HV, T, N, C, PACKED)
    if PACKED and i_c * C >= length:
        return
    o_c = tl.arange(0, C)
    i = o_c[:, None]
    o_k = i_k * BK + tl.arange(0, BK)
    m_c = o_c < length - i_c * C
    m_k = m_c[:, None]
    if K % BK != 0:
        m_k = m_k & (o_k < K)[None, :]
    row = begin + i_c * C
    i_v = (row * HV + i_h) * V
    i_a = i_chunk_head * (C * C)
    i_x = i_chunk_head * (V * C)
    i_s = i_chunk_head * (V * WIDE)
    o_q = (row * H + i_h // (HV // H)) * K + i * (H * K) + o_k[None, :]
    o_o = (row * HV + i_h) * K + i * (HV * K) + o_k[None, :]
    b_sign = 1.0
    if DELTA:
        o_t = (row + o_c) * HV + i_h
        b_sign = -tl.load(beta_ptr + o_t, mask=m_c, other=0.0).to(tl.float32)[:, None]  # z / y
    p_a = (k_ptr if DELTA else a_ptr) + o_q
    p_b = (k_ptr if DELTA else b_ptr) + o_q

    b_dq, b_da, b_z = _of_states_before(
        do_ptr + i_v, HV, y_ptr + i_x, states_ptr + i_s, dstates_ptr + i_s, o_c, m_c, o_k,
        V, WIDE, BV, BK, HAS_GATE, PRECISION,
    )  # fmt: skip
    b_dq *= scale

    # by way of what the tokens wrote
    b_e = 0.0
    if HAS_GATE:
        b_e, b_before, b_early, b_late = load_anchored(
            g_ptr, (row * HV + i_h) * GK, HV * GK, o_c, m_k, o_k, apart, CHANNEL, not DELTA, FP32,
            PRECISION,
        )  # fmt: skip
        b_z *= tl.exp2(b_early + b_late)
        b_early = tl.exp2(b_early + apart)[None, :]
        b_dq, b_da = b_dq * b_early, b_da * b_early
    b_w = _load_writes(p_b, m_k, b_e, HAS_GATE)
    b_u = b_w if DELTA else _load_writes(k_ptr + o_q, m_k, b_e, HAS_GATE)
    b_dq, b_da = _of_writes(b_dq, b_da, b_w, b_u, scores, i_a, o_c, apart, c)

    b_a = tl.load(p_a, mask=m_k, other=0.0)
    b_f = tl.exp2(b_before) if HAS_GATE else 1.0
    b_ra = (b_a * b_sign * b_f).to(act)
    b_dg = tl.zeros((C, BK), tl.float32)
    if DELTA:
        o_t += (1 + i_k) * (tokens.to(tl.int64) * HV)
        tl.store(dbeta_ptr + o_t, -tl.sum(b_da * b_f * b_a, 1), mask=m_c)
        # of the same rounded factors as the other products, so that what cancels does so exactly
        b_t = b_ra * b_da
        b_da *= b_f * b_sign
    else:
        tl.store(da_ptr + o_o, (b_da * b_f).to(act), mask=m_k)
        if HAS_GATE:
            b_dg = add_anchored_bwd(b_dg, b_ra * b_da, o_c, True, FP32, PRECISION)
            b_t = 0.0
    b_q = tl.load(q_ptr + o_q, mask=m_k, other=0.0)
    b_rq = b_q
    if HAS_GATE:
        b_f = tl.exp2(b_e)
        b_rq = (b_q * b_f).to(act)
        b_t += b_rq * b_dq
        b_dq *= b_f
    b_qb = tl.load(diag_ptr + i_chunk_head * (2 * C) + o_c)[:, None]
    b_b = tl.load(p_b, mask=m_k, other=0.0)
    b_dq += b_qb * b_b
    if not DELTA:
        b_qk = tl.load(diag_ptr + i_chunk_head * (2 * C) + C + o_c)[:, None]
        b_k = tl.load(k_ptr + o_q, mask=m_k, other=0.0)
        b_dq += b_qk * b_k
    tl.store(dq_ptr + o_o, b_dq.to(act), mask=m_k)

    # by way of what the tokens read
    b_db, b_dk = _of_states_after(
        x_ptr + i_x, None if DELTA else v_ptr + i_v, HV, dstates_ptr + i_s, o_c, m_c, o_k,
        V, WIDE, BV, BK, DELTA, PRECISION,
    )  # fmt: skip
    b_w = _load_writes(p_b, m_k, b_e, HAS_GATE)
    if HAS_GATE:
        b_late = tl.exp2(b_late + apart)[None, :]
        b_db *= b_late
        # the decay to the chunk's end that a write needs beside its operand's and the last ones'
        b_back = tl.exp2(tl.where(o_c >= C // 2, 0.0, -2 * apart))[:, None]
        b_z += tl.sum(b_w * (b_db * b_back), 0)
    b_db = _of_reads(b_db, b_rq, b_ra, dqb_ptr + i_a, dab_ptr + i_a, o_c, apart, c)
    if HAS_GATE:
        b_t -= _load_writes(p_b, m_k, b_e, HAS_GATE) * b_db  # read again: kept, it would spill
        b_db *= tl.exp2(-b_e)
    b_db += b_qb * b_q
    if DELTA:
        tl.store(dk_ptr + o_o, (b_db + b_da).to(act), mask=m_k)
    else:
        tl.store(db_ptr + o_o, b_db.to(act), mask=m_k)
        b_u = _load_writes(k_ptr + o_q, m_k, b_e, HAS_GATE)
        if HAS_GATE:
            b_dk *= b_late
            b_z += tl.sum(b_u * (b_dk * b_back), 0)
        b_dk = _of_reads(b_dk, b_rq, b_ra, dqk_ptr + i_a, dak_ptr + i_a, o_c, apart, c)
        if HAS_GATE:
            b_t -= _load_writes(k_ptr + o_q, m_k, b_e, HAS_GATE) * b_dk
            b_dk *= tl.exp2(-b_e)
        tl.store(dk_ptr + o_o, (b_dk + b_qk * b_q).to(act), mask=m_k)
    if HAS_GATE:
        b_dg = add_anchored_bwd(b_dg + b_z[None, :], b_t, o_c, False, FP32, PRECISION)
        tl.store(dg_ptr + o_o, b_dg, mask=m_k)
