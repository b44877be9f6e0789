"""Delta rule, no decay or one a token: from what the scans left, the gradients, chunk by chunk.

With S before the chunk, dS' after it, x = beta w, dv (chunk.py), decay[i, j] = exp(G_i - G_j),

    dq  = scale (exp(G) (do S^T) + (tril(do x^T) decay) k)
    dp  =      - exp(G) (dv S^T) - (stril(dv x^T) decay) k         p = k if there is none
    dk' = exp(G_C - G) (w dS'^T) + (scale tril(do w^T) decay)^T q - (stril(dv w^T) decay)^T p
    dk  = beta dk'                 dbeta = k . dk'

for k_j and beta_j are met only in k_j beta_j w_j^T. dq and dp take kb_j = beta_j k_j, rounded as
the inputs are.

With p, which reads before the decay, G_{i-1} stands for G_i wherever dv_i does: row i of dv, p and
dp has the decays of row i - 1 of q. So those rows are turned by a token, and then one triangle of
decays does for both. Row i has token i + 1, and the pairs (i, i - 1), which no gate is between, are
the diagonal, as q's are. The last row has the chunk's first token, which reads S alone, undecayed.

The gradient of g_t is what the pairs i >= t > j add to the loss, j also in the chunks before and i
in those after. With the pairs (i, i) left out of dq and dk, e = kb . exp(G_C - G) (w dS'^T),

    dg_t = sum over i >= t of (q . dq + p . dp - kb . dk')_i + sum of all e + exp(G_C) sum(S * dS')

A pair (i, j) whose tokens are both after t cancels in that sum, and where t has a strong gate
nothing else is as large. So both sides multiply the same rounded numbers: triangles before beta,
q or p, and kb. With beta in the triangle of dq they would be rounded apart, and A_log's gradient
would be noise: with gates down to -37 in bf16 the sum of g dg was off by 4.0 times itself, and is
by 0.0017 so. What is left, a rounding of float32, is noise in g dg where g is -1e4: below
MIN_CROSSED dg_t is 0.

First sum(S * dS'), then the triangles (do w^T and dv w^T), then BK channels of K at a time. dk
takes the triangles transposed in shared memory: made again the other way round they would want
registers all the time. q, k and p are loaded after the products with the states for the same
reason. The loads of the loops feed products only, else they are not made in advance: so the sum is
the diagonal of one.
"""

from collections import namedtuple

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta import solve_tril
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block, load_rows, store_rows
from slipstream.kernels.linear.triton.scalar_decay.device import LOG2E, MIN_CROSSED

# pointers or descriptors, and constants of a launch
Refs = namedtuple("Refs", "do w dv s ds")
Constants = namedtuple("Constants", "K V BK BV C HAS_P TMA PRECISION")


@triton.jit
def _state(
    p, at, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr
):
    """Tile [BV, BK] of a state of [chunks, HV, V, K], zero outside."""
    i_chunk, i_h, HV, i_v, i_k, live = at
    if TMA:
        b = p.load([i_chunk, i_h, i_v, i_k]).reshape(BV, BK)
    else:
        o_v = i_v + tl.arange(0, BV)
        o_k = i_k + tl.arange(0, BK)
        o_s = (i_chunk.to(tl.int64) * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]
        b = tl.load(p + o_s, mask=(o_v < V)[:, None] & (o_k < K)[None, :] & live, other=0.0)
    return b


@triton.jit
def _sum_of_states(
    s_ptr, ds_ptr, i_chunk, i_h, HV, live,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sum(S * dS') of a chunk: the diagonal of S dS'^T."""
    o_m = tl.arange(0, BV)
    b_z = tl.zeros((BV, BV), tl.float32)
    NV: tl.constexpr = (V + BV - 1) // BV
    for i in range(NV * tl.cdiv(K, BK)):
        at_s = (i_chunk, i_h, HV, i % NV * BV, i // NV * BK, live)
        b_s = _state(s_ptr, at_s, K, V, BK, BV, TMA)
        b_ds = _state(ds_ptr, at_s, K, V, BK, BV, TMA)
        b_z = tl.dot(b_s, tl.trans(b_ds), b_z, input_precision=PRECISION)
    # flat: sums by both axes of a product break Triton 3.6's compiler on sm_100
    return tl.sum(tl.reshape(tl.where(o_m[:, None] == o_m[None, :], b_z, 0.0), (BV * BV,)), 0)


@triton.jit
def _triangular_products(refs, i_b, i_h, t, HV, o_c, m_c, o_p, m_p, c):
    """do w^T and dv w^T [i, j]."""
    o_m = tl.arange(0, c.BV)
    b_a = tl.zeros((c.C, c.C), tl.float32)
    b_m = tl.zeros((c.C, c.C), tl.float32)
    for i in range(tl.cdiv(c.V, c.BV)):
        at_v = (i_b, 0, i_h, i * c.BV)
        b_do = load_rows(refs.do, at_v, t, HV, o_c, m_c, o_m, c.V, c.BV, c.TMA)  # [C, BV]
        b_w = load_rows(refs.w, at_v, t, HV, o_c, m_c, o_m, c.V, c.BV, c.TMA)
        b_dv = load_rows(refs.dv, at_v, t, HV, o_p, m_p, o_m, c.V, c.BV, c.TMA and not c.HAS_P)
        b_a = tl.dot(b_do, tl.trans(b_w), b_a, input_precision=c.PRECISION)
        b_m = tl.dot(b_dv, tl.trans(b_w), b_m, input_precision=c.PRECISION)
    return b_a, b_m


@triton.jit
def _of_states(refs, i_b, i_chunk, i_h, i_k, t, HV, live, o_c, m_c, o_p, m_p, c):
    """do S^T, dv S^T and w dS'^T, [C, BK] from column i_k on."""
    o_m = tl.arange(0, c.BV)
    b_dq = tl.zeros((c.C, c.BK), tl.float32)
    b_dp = tl.zeros((c.C, c.BK), tl.float32)
    b_dk = tl.zeros((c.C, c.BK), tl.float32)
    for i in range(tl.cdiv(c.V, c.BV)):
        at_v = (i_b, 0, i_h, i * c.BV)
        at_s = (i_chunk, i_h, HV, i * c.BV, i_k, live)
        b_do = load_rows(refs.do, at_v, t, HV, o_c, m_c, o_m, c.V, c.BV, c.TMA)
        b_w = load_rows(refs.w, at_v, t, HV, o_c, m_c, o_m, c.V, c.BV, c.TMA)
        b_dv = load_rows(refs.dv, at_v, t, HV, o_p, m_p, o_m, c.V, c.BV, c.TMA and not c.HAS_P)
        b_s = _state(refs.s, at_s, c.K, c.V, c.BK, c.BV, c.TMA)
        b_ds = _state(refs.ds, at_s, c.K, c.V, c.BK, c.BV, c.TMA)
        b_dq = tl.dot(b_do, b_s, b_dq, input_precision=c.PRECISION)
        b_dp = tl.dot(b_dv, b_s, b_dp, input_precision=c.PRECISION)
        b_dk = tl.dot(b_w, b_ds, b_dk, input_precision=c.PRECISION)
    return b_dq, b_dp, b_dk


@triton.jit(do_not_specialize=["scale", "T", "N", "HV", "H"])
def delta_dqkg_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr, p_ptr,
    do_ptr,  # [tokens, HV, V], or, if TMA, a descriptor of [B, T, HV, V]; so down to dp
    w_ptr, dv_ptr,
    s_ptr,  # [chunks, HV, V, K]: states, dstates
    ds_ptr,
    dq_ptr,  # [tokens, HV, K]
    dk_ptr, dp_ptr,
    rows_ptr,  # [chunks, HV, ROWS, C]: beta and G (solve_tril.py)
    dbeta_ptr,  # [tokens, HV]
    dg_ptr,  # [tokens, HV]
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HAS_P: tl.constexpr, HAS_GATE: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr,
    TMA: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (HV * chunks,): one program takes one chunk of one value head."""
    c: tl.constexpr = Constants(K, V, BK, BV, C, HAS_P, TMA, PRECISION)
    if not GROUPED:
        H = HV
    ROWS: tl.constexpr = 1 + HAS_GATE * (1 + FP32 + HAS_P)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    pid = tl.program_id(0)
    i_h = pid % HV
    i_chunk = pid // HV
    begin, length, i_c = solve_tril.locate_chunk(cu_ptr, i_chunk, T, N, C, PACKED)
    if PACKED and i_c * C >= length:
        return
    o_c = tl.arange(0, C)
    o_n = tl.arange(0, BK)
    t = i_c * C
    m_c = o_c < length - t
    live = t < length
    i_b = i_chunk // tl.cdiv(T, C)
    if not TMA:
        i_v = (begin * HV + i_h) * V
        do_ptr += i_v
        w_ptr += i_v
        dq_ptr += (begin * HV + i_h) * K
        dk_ptr += (begin * HV + i_h) * K
    if HAS_P or not TMA:
        dv_ptr += (begin * HV + i_h) * V
    o_p, m_p = o_c, m_c
    if HAS_P:
        dp_ptr += (begin * HV + i_h) * K
        # row i of p, dv and dp has token i + 1, the last one the first
        o_p = (o_c + 1) % C
        m_p = o_p < length - t
    row = begin + t
    i_q = (row * H + i_h // (HV // H)) * K
    p_rows = rows_ptr + (i_chunk.to(tl.int64) * HV + i_h) * (ROWS * C)
    b_beta = tl.load(p_rows + o_c)

    refs = Refs(do_ptr, w_ptr, dv_ptr, s_ptr, ds_ptr)
    z = 0.0
    if HAS_GATE:
        z = _sum_of_states(s_ptr, ds_ptr, i_chunk, i_h, HV, live, K, V, BK, BV, TMA, PRECISION)

    b_a, b_m = _triangular_products(refs, i_b, i_h, t, HV, o_c, m_c, o_p, m_p, c)
    is_diagonal = o_c[:, None] == o_c[None, :]
    b_diag = tl.sum(tl.where(is_diagonal, b_a, 0.0), 1) * scale
    earlier = o_c[:, None] > o_c[None, :]
    if HAS_P:
        inside = o_c < C - 1  # all but the first token, of which no pair is in the chunk
        b_next = tl.where(inside, tl.sum(tl.where(is_diagonal, b_m, 0.0), 1), 0.0)
        b_m = tl.where(inside[:, None], b_m, 0.0)
    if HAS_GATE:
        b_G, b_low, G_C, low_C = solve_tril.load_gates(p_rows, o_c, C, FP32)
        b_decay = solve_tril.decay_between(b_G, b_low, earlier, FP32)
        b_a *= b_decay
        b_m *= b_decay
    else:
        b_a = tl.where(earlier, b_a, 0.0)
        b_m = tl.where(earlier, b_m, 0.0)
    b_a = (b_a * scale).to(dtype)
    b_m = (-b_m).to(dtype)

    b_sum = tl.zeros((C,), tl.float32)  # k . dk'
    b_row = tl.zeros((C,), tl.float32)  # q . dq + p . dp - kb . dk'
    e = 0.0
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + o_n
        at_k = (i_b, 0, i_h, i_k * BK)
        b_dq, b_dp, b_dk = _of_states(
            refs, i_b, i_chunk, i_h, i_k * BK, t, HV, live, o_c, m_c, o_p, m_p, c
        )
        b_k = load_block(k_ptr + i_q, H * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_q = load_block(q_ptr + i_q, H * K, o_c, m_c, o_k, K, K % BK != 0)
        if HAS_P:
            b_p = load_block(p_ptr + i_q, H * K, o_p, m_p, o_k, K, K % BK != 0)
        else:
            b_p = b_k
        b_kb = (b_k * b_beta[:, None]).to(dtype)
        b_dq *= scale
        if HAS_GATE:
            b_dq *= tl.exp2(b_G)[:, None]
            b_dp *= -tl.exp2(tl.where(inside, b_G, 0.0) if HAS_P else b_G)[:, None]
            b_dk *= tl.exp2((G_C - b_G) + (low_C - b_low))[:, None]
            e += tl.sum(tl.reshape(b_dk * b_kb, (C * BK,)), 0)
        else:
            b_dp *= -1.0
        b_dk = tl.dot(tl.trans(b_a), b_q, b_dk, input_precision=PRECISION)
        b_dk = tl.dot(tl.trans(b_m), b_p, b_dk, input_precision=PRECISION)
        if HAS_GATE:
            b_row -= tl.sum(b_dk * b_kb, 1)
        b_dk += b_diag[:, None] * b_q
        if HAS_P:
            b_dk -= b_next[:, None] * b_p
        b_sum += tl.sum(b_dk * b_k, 1)
        b_dk *= b_beta[:, None]
        if HAS_P:
            store_rows(dk_ptr, at_k, t, HV, b_dk, o_c, m_c, o_n, K, BK, TMA)
        b_dq = tl.dot(b_a, b_kb, b_dq, input_precision=PRECISION)
        b_dp = tl.dot(b_m, b_kb, b_dp, input_precision=PRECISION)
        if HAS_GATE:
            if HAS_P:
                b_row += tl.sum(b_dq * b_q + tl.where(inside[:, None], b_dp * b_p, 0.0), 1)
            else:
                b_row += tl.sum(b_dq * b_q + b_dp * b_p, 1)
        b_dq += b_diag[:, None] * b_kb
        if HAS_P:
            b_dp -= b_next[:, None] * b_kb
            store_rows(dp_ptr, at_k, t, HV, b_dp, o_p, m_p, o_n, K, BK, False)
        else:
            b_dk += b_dp
        store_rows(dq_ptr, at_k, t, HV, b_dq, o_c, m_c, o_n, K, BK, TMA)
        if not HAS_P:
            store_rows(dk_ptr, at_k, t, HV, b_dk, o_c, m_c, o_n, K, BK, TMA)

    o_t = (row + o_c) * HV + i_h
    if HAS_GATE:
        z = e + z * tl.exp2(G_C)
        p_dg = dg_ptr + o_t
        b_dg = tl.cumsum(b_row, 0, reverse=True) + z
        b_B, b_lowB = solve_tril.load_gates_before(p_rows, o_c, C, FP32)
        strong = (b_G - b_B) + (b_low - b_lowB) < MIN_CROSSED * LOG2E
        tl.store(p_dg, tl.where(strong, 0.0, b_dg), mask=m_c)
    tl.store(dbeta_ptr + o_t, b_sum, mask=m_c)
