"""Delta rule, no decay or one a token: from what the walks left, the gradients, chunk by chunk.

With S before the chunk, dS' after it, x, y (delta_walk.py), and decay[i, j] = exp(G_i - G_j),

    dq  = scale (exp(G) (do S^T) + (tril(do x^T) decay) k)
    dp' =        exp(G) (y S^T)  + (stril(y x^T) decay) k               dp = -beta dp'
    dk  = exp(G_C - G) (x dS'^T) + (scale tril(do x^T) decay)^T q - (beta stril(y x^T) decay)^T p
    dv  = beta y                   dbeta = y . v - p . dp'

The gradient of g_t is what the pairs i >= t > j add to the loss, j also in the chunks before and i
in those after. With the pairs (i, i) left out of dq and dk, and e = k . exp(G_C - G) (x dS'^T),

    dg_t = sum over i >= t of (q . dq + p . dp - k . dk)_i + sum of all e + exp(G_C) sum(S * dS')

Sums over K: each tile of K writes its share of dbeta and dg.
"""

# pyright knows neither what a jit function returns nor constexpr
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta_solve import decay_between, find_chunk, load_gates
from slipstream.kernels.linear.triton.walk import _rows, _store_rows


@triton.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "tokens"])
def delta_grads_kernel(
    q_ptr,  # [tokens, H, K], or, if TMA, a descriptor of [B, T, H, K]; so all of tokens and states
    k_ptr,
    p_ptr,
    v_ptr,  # [tokens, HV, V]
    do_ptr,  # [tokens, HV, V]
    x_ptr,  # [tokens, HV, V]
    y_ptr,  # [tokens, HV, V]
    rows_ptr,  # [slots, HV, ROWS, C]: beta and G (delta_solve.py)
    states_ptr,  # [slots, HV, V, K]
    dstates_ptr,  # [slots, HV, V, K]
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,
    dp_ptr,
    dv_ptr,  # [tokens, HV, V]
    dbeta_ptr,  # [NK, tokens, HV]
    dg_ptr,  # [NK, tokens, HV]
    cu_ptr,  # [N + 1]
    scale,
    T,
    N,
    HV,
    H,
    tokens,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    TMA: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(K / BK) * HV * slots,): BK channels of one chunk and value head a program."""
    if not GROUPED:
        H = HV
    NK: tl.constexpr = (K + BK - 1) // BK
    ROWS: tl.constexpr = 1 + HAS_GATE + (HAS_GATE and EXACT)
    pid = tl.program_id(0)
    i_k = pid % NK
    i_h = (pid // NK) % HV
    slot = pid // NK // HV
    begin, length, i_c = find_chunk(cu_ptr, slot, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    o_n = tl.arange(0, BK)
    o_k = i_k * BK + o_n
    o_m = tl.arange(0, BV)
    t = i_c * C
    m_c = o_c < length - t
    row = begin + t
    i_b = slot // tl.cdiv(T, C)
    at_q = (i_b, 0, i_h // (HV // H), i_k * BK)
    at_k = (i_b, 0, i_h, i_k * BK)
    i_s = (slot.to(tl.int64) * HV + i_h) * (K * V)
    if not TMA:
        i_q = (begin * H + i_h // (HV // H)) * K
        i_v = (begin * HV + i_h) * V
        q_ptr += i_q
        k_ptr += i_q
        v_ptr += i_v
        do_ptr += i_v
        x_ptr += i_v
        y_ptr += i_v
        dv_ptr += i_v
        dq_ptr += (begin * HV + i_h) * K
        dk_ptr += (begin * HV + i_h) * K
        if HAS_P:
            p_ptr += i_q
            dp_ptr += (begin * HV + i_h) * K
    b_dq = tl.zeros((C, BK), tl.float32)
    b_dp = tl.zeros((C, BK), tl.float32)
    b_dk = tl.zeros((C, BK), tl.float32)
    # [i, j] and, so that no product is transposed, [j, i]
    b_a = tl.zeros((C, C), tl.float32)
    b_at = tl.zeros((C, C), tl.float32)
    b_m = tl.zeros((C, C), tl.float32)
    b_mt = tl.zeros((C, C), tl.float32)
    b_z = tl.zeros((BK,), tl.float32)
    b_dbeta = tl.zeros((C,), tl.float32)
    p_rows = rows_ptr + (slot.to(tl.int64) * HV + i_h) * (ROWS * C)
    b_beta = tl.load(p_rows + o_c)
    live = t < length
    for i in range(tl.cdiv(V, BV)):
        o_v = i * BV + o_m
        at_v = (i_b, 0, i_h, i * BV)
        b_do = _rows(do_ptr, at_v, t, HV, o_c, m_c, o_m, V, BV, TMA)  # [C, BV]
        b_x = _rows(x_ptr, at_v, t, HV, o_c, m_c, o_m, V, BV, TMA)
        b_y = _rows(y_ptr, at_v, t, HV, o_c, m_c, o_m, V, BV, TMA)
        if TMA:
            b_s = states_ptr.load([slot, i_h, i * BV, i_k * BK]).reshape(BV, BK)
            b_ds = dstates_ptr.load([slot, i_h, i * BV, i_k * BK]).reshape(BV, BK)
        else:
            o_s = i_s + o_v[:, None] * K + o_k[None, :]
            m_s = (o_v < V)[:, None] & (o_k < K)[None, :] & live
            b_s = tl.load(states_ptr + o_s, mask=m_s, other=0.0)
            b_ds = tl.load(dstates_ptr + o_s, mask=m_s, other=0.0)
        b_dq = tl.dot(b_do, b_s, b_dq, input_precision=PRECISION)
        b_dp = tl.dot(b_y, b_s, b_dp, input_precision=PRECISION)
        b_dk = tl.dot(b_x, b_ds, b_dk, input_precision=PRECISION)
        b_a = tl.dot(b_do, tl.trans(b_x), b_a, input_precision=PRECISION)
        b_at = tl.dot(b_x, tl.trans(b_do), b_at, input_precision=PRECISION)
        b_m = tl.dot(b_y, tl.trans(b_x), b_m, input_precision=PRECISION)
        b_mt = tl.dot(b_x, tl.trans(b_y), b_mt, input_precision=PRECISION)
        if HAS_GATE:
            b_z += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 0)
        b_v = _rows(v_ptr, at_v, t, HV, o_c, m_c & (i_k == 0), o_m, V, BV, TMA).to(tl.float32)
        b_y = b_y.to(tl.float32)
        b_dbeta += tl.sum(b_y * b_v, 1)
        if i_k == 0:
            _store_rows(dv_ptr, at_v, t, HV, b_y * b_beta[:, None], o_c, m_c, o_m, V, BV, TMA)

    b_q = _rows(q_ptr, at_q, t, H, o_c, m_c, o_n, K, BK, TMA)  # [C, BK]
    b_k = _rows(k_ptr, at_q, t, H, o_c, m_c, o_n, K, BK, TMA)
    if HAS_P:
        b_p = _rows(p_ptr, at_q, t, H, o_c, m_c, o_n, K, BK, TMA)
    else:
        b_p = b_k
    is_own = o_c[:, None] == o_c[None, :]
    earlier = o_c[:, None] > o_c[None, :]
    later = o_c[:, None] < o_c[None, :]
    b_own = tl.sum(tl.where(is_own, b_a, 0.0), 1) * scale
    b_enter = tl.zeros((C,), tl.float32)
    low = tokens.to(tl.int64) * HV
    if HAS_GATE:
        b_G, b_low, G_C, low_C = load_gates(p_rows, o_c, C, EXACT)
        b_start = tl.exp2(b_G)
        b_dq *= b_start[:, None]
        b_dp *= b_start[:, None]
        b_dk *= tl.exp2((G_C - b_G) + (low_C - b_low))[:, None]
        b_enter = tl.sum(b_dk * b_k, 1)
        b_decay = decay_between(b_G, b_low, earlier, EXACT)
        b_a *= b_decay
        b_m *= b_decay
        b_decay = decay_between(-b_G, -b_low, later, EXACT)
        b_at *= b_decay
        b_mt *= b_decay
    else:
        b_a = tl.where(earlier, b_a, 0.0)
        b_m = tl.where(earlier, b_m, 0.0)
        b_at = tl.where(later, b_at, 0.0)
        b_mt = tl.where(later, b_mt, 0.0)
    b_at *= scale
    b_mt *= -b_beta[None, :]
    b_dq = tl.dot(b_a.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION) * scale
    b_dp = tl.dot(b_m.to(b_k.dtype), b_k, b_dp, input_precision=PRECISION)
    b_dk = tl.dot(b_at.to(b_k.dtype), b_q, b_dk, input_precision=PRECISION)
    b_dk = tl.dot(b_mt.to(b_k.dtype), b_p, b_dk, input_precision=PRECISION)
    b_seen = tl.sum(b_dp * b_p, 1)
    o_t = i_k * low + (row + o_c) * HV + i_h
    if i_k > 0:  # y . v is the first tile's
        b_dbeta = tl.zeros((C,), tl.float32)
    tl.store(dbeta_ptr + o_t, b_dbeta - b_seen, mask=m_c)
    b_dp *= -b_beta[:, None]
    if HAS_GATE:
        b_row = tl.sum(b_dq * b_q - b_dk * b_k, 1) - b_beta * b_seen
        z = tl.sum(b_z, 0) * tl.exp2(G_C) + tl.sum(b_enter, 0)
        tl.store(dg_ptr + o_t, tl.cumsum(b_row, 0, reverse=True) + z, mask=m_c)
    b_dq += b_own[:, None] * b_k
    b_dk += b_own[:, None] * b_q
    if HAS_P:
        _store_rows(dp_ptr, at_k, t, HV, b_dp, o_c, m_c, o_n, K, BK, TMA)
    else:
        b_dk += b_dp
    _store_rows(dq_ptr, at_k, t, HV, b_dq, o_c, m_c, o_n, K, BK, TMA)
    _store_rows(dk_ptr, at_k, t, HV, b_dk, o_c, m_c, o_n, K, BK, TMA)
