"""Delta rule, no decay or one a token: from what the walks left, the gradients, chunk by chunk.

With S before the chunk, dS' after it, x, y (delta_walk.py), and decay[i, j] = exp(G_i - G_j),

    dq  = scale (exp(G) (do S^T) + (tril(do x^T) decay) k)
    dp' =        exp(G) (y S^T)  + (stril(y x^T) decay) k               dp = -beta dp'
    dk  = exp(G_C - G) (x dS'^T) + (scale tril(do x^T) decay)^T q - (beta stril(y x^T) decay)^T p
    dv  = beta y                   dbeta = y . v - p . dp'

The gradient of g_t is what the pairs i >= t > j add to the loss, j also in the chunks before and i
in those after. With the pairs (i, i) left out of dq and dk, and e = k . exp(G_C - G) (x dS'^T),

    dg_t = sum over i >= t of (q . dq + p . dp - k . dk)_i + sum of all e + exp(G_C) sum(S * dS')

First the four triangles (of do x^T and y x^T, and of their transposes), then BK channels of K at a
time. The loads of the loops feed products only, else they are not made in advance: what is summed
of S, dS', y and v is loaded once more.
"""

# pyright knows neither what a jit function returns nor constexpr
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta_solve import decay_between, find_chunk, load_gates
from slipstream.kernels.linear.triton.walk import _block, _rows, _store_rows


@triton.jit
def _state(
    p, at, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr
):
    """Tile [BV, BK] of a state of [slots, HV, V, K], zero outside."""
    slot, i_h, HV, i_v, i_k, live = at
    if TMA:
        b = p.load([slot, i_h, i_v, i_k]).reshape(BV, BK)
    else:
        o_v = i_v + tl.arange(0, BV)
        o_k = i_k + tl.arange(0, BK)
        o_s = (slot.to(tl.int64) * HV + i_h) * (K * V) + o_v[:, None] * K + o_k[None, :]
        b = tl.load(p + o_s, mask=(o_v < V)[:, None] & (o_k < K)[None, :] & live, other=0.0)
    return b


@triton.jit
def _values(v_ptr, y_ptr, dv_ptr, b_beta, stride, o_c, m_c, V: tl.constexpr, BV: tl.constexpr):
    """Writes dv = beta y of a chunk; y . v."""
    b_sum = tl.zeros_like(b_beta)
    for i in range(tl.cdiv(V, BV)):
        o_v = i * BV + tl.arange(0, BV)
        b_y = _block(y_ptr, stride, o_c, m_c, o_v, V, V % BV != 0).to(tl.float32)
        b_sum += tl.sum(b_y * _block(v_ptr, stride, o_c, m_c, o_v, V, V % BV != 0), 1)
        b_y = (b_y * b_beta[:, None]).to(dv_ptr.dtype.element_ty)
        m_v = m_c[:, None] & (o_v < V)[None, :]
        tl.store(dv_ptr + o_c[:, None] * stride + o_v[None, :], b_y, mask=m_v)
    return b_sum


@triton.jit(do_not_specialize=["scale", "T", "N", "HV", "H"])
def delta_grads_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,
    p_ptr,
    v_ptr,  # [tokens, HV, V]
    do_ptr,  # [tokens, HV, V], or, if TMA, a descriptor of [B, T, HV, V]; so down to dp
    x_ptr,
    y_ptr,
    s_ptr,  # [slots, HV, V, K]: states, dstates
    ds_ptr,
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,
    dp_ptr,
    rows_ptr,  # [slots, HV, ROWS, C]: beta and G (delta_solve.py)
    y_again_ptr,  # y, s, ds once more, not as descriptors
    s_again_ptr,
    ds_again_ptr,
    dv_ptr,  # [tokens, HV, V]
    dbeta_ptr,  # [tokens, HV]
    dg_ptr,  # [tokens, HV]
    cu_ptr,  # [N + 1]
    scale,
    T,
    N,
    HV,
    H,
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
    """grid (HV * slots,): one program takes one chunk of one value head."""
    if not GROUPED:
        H = HV
    ROWS: tl.constexpr = 1 + HAS_GATE + (HAS_GATE and EXACT)
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    pid = tl.program_id(0)
    i_h = pid % HV
    slot = pid // HV
    begin, length, i_c = find_chunk(cu_ptr, slot, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    o_n = tl.arange(0, BK)
    o_m = tl.arange(0, BV)
    t = i_c * C
    m_c = o_c < length - t
    live = t < length
    i_b = slot // tl.cdiv(T, C)
    i_v = (begin * HV + i_h) * V
    if not TMA:
        do_ptr += i_v
        x_ptr += i_v
        y_ptr += i_v
        dq_ptr += (begin * HV + i_h) * K
        dk_ptr += (begin * HV + i_h) * K
        if HAS_P:
            dp_ptr += (begin * HV + i_h) * K
    row = begin + t
    i_q = (row * H + i_h // (HV // H)) * K
    i_v = (row * HV + i_h) * V
    p_rows = rows_ptr + (slot.to(tl.int64) * HV + i_h) * (ROWS * C)
    b_beta = tl.load(p_rows + o_c)

    # [i, j] and, so that no product is transposed, [j, i]
    b_a = tl.zeros((C, C), tl.float32)
    b_m = tl.zeros((C, C), tl.float32)
    b_at = tl.zeros((C, C), tl.float32)
    b_mt = tl.zeros((C, C), tl.float32)
    for i in range(tl.cdiv(V, BV)):
        at_v = (i_b, 0, i_h, i * BV)
        b_do = _rows(do_ptr, at_v, t, HV, o_c, m_c, o_m, V, BV, TMA)  # [C, BV]
        b_x = _rows(x_ptr, at_v, t, HV, o_c, m_c, o_m, V, BV, TMA)
        b_y = _rows(y_ptr, at_v, t, HV, o_c, m_c, o_m, V, BV, TMA)
        b_a = tl.dot(b_do, tl.trans(b_x), b_a, input_precision=PRECISION)
        b_m = tl.dot(b_y, tl.trans(b_x), b_m, input_precision=PRECISION)
        b_at = tl.dot(b_x, tl.trans(b_do), b_at, input_precision=PRECISION)
        b_mt = tl.dot(b_x, tl.trans(b_y), b_mt, input_precision=PRECISION)
    b_own = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_a, 0.0), 1) * scale
    earlier = o_c[:, None] > o_c[None, :]
    later = o_c[:, None] < o_c[None, :]
    if HAS_GATE:
        b_G, b_low, G_C, low_C = load_gates(p_rows, o_c, C, EXACT)
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
    b_a = b_a.to(dtype)
    b_m = b_m.to(dtype)
    b_at = (b_at * scale).to(dtype)
    b_mt = (b_mt * -b_beta[None, :]).to(dtype)

    b_seen = tl.zeros((C,), tl.float32)  # p . dp'
    b_row = tl.zeros((C,), tl.float32)  # q . dq - k . dk
    b_z = tl.zeros((C,), tl.float32)
    b_zs = tl.zeros((BV,), tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + o_n
        at_k = (i_b, 0, i_h, i_k * BK)
        b_k = _block(k_ptr + i_q, H * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_q = _block(q_ptr + i_q, H * K, o_c, m_c, o_k, K, K % BK != 0)
        if HAS_P:
            b_p = _block(p_ptr + i_q, H * K, o_c, m_c, o_k, K, K % BK != 0)
        else:
            b_p = b_k
        b_dq = tl.zeros((C, BK), tl.float32)
        b_dp = tl.zeros((C, BK), tl.float32)
        b_dk = tl.zeros((C, BK), tl.float32)
        for i in range(tl.cdiv(V, BV)):
            at_v = (i_b, 0, i_h, i * BV)
            at_s = (slot, i_h, HV, i * BV, i_k * BK, live)
            b_do = _rows(do_ptr, at_v, t, HV, o_c, m_c, o_m, V, BV, TMA)
            b_x = _rows(x_ptr, at_v, t, HV, o_c, m_c, o_m, V, BV, TMA)
            b_y = _rows(y_ptr, at_v, t, HV, o_c, m_c, o_m, V, BV, TMA)
            b_s = _state(s_ptr, at_s, K, V, BK, BV, TMA)
            b_ds = _state(ds_ptr, at_s, K, V, BK, BV, TMA)
            b_dq = tl.dot(b_do, b_s, b_dq, input_precision=PRECISION)
            b_dp = tl.dot(b_y, b_s, b_dp, input_precision=PRECISION)
            b_dk = tl.dot(b_x, b_ds, b_dk, input_precision=PRECISION)
        if HAS_GATE:
            b_start = tl.exp2(b_G)[:, None]
            b_dq *= b_start
            b_dp *= b_start
            b_dk *= tl.exp2((G_C - b_G) + (low_C - b_low))[:, None]
            b_z += tl.sum(b_dk * b_k, 1)
            for i in range(tl.cdiv(V, BV)):
                at_s = (slot, i_h, HV, i * BV, i_k * BK, live)
                b_s = _state(s_again_ptr, at_s, K, V, BK, BV, False).to(tl.float32)
                b_zs += tl.sum(b_s * _state(ds_again_ptr, at_s, K, V, BK, BV, False), 1)
        b_dq = tl.dot(b_a, b_k, b_dq, input_precision=PRECISION) * scale
        b_dp = tl.dot(b_m, b_k, b_dp, input_precision=PRECISION)
        b_dk = tl.dot(b_at, b_q, b_dk, input_precision=PRECISION)
        b_dk = tl.dot(b_mt, b_p, b_dk, input_precision=PRECISION)
        b_seen += tl.sum(b_dp * b_p, 1)
        if HAS_GATE:
            b_row += tl.sum(b_dq * b_q - b_dk * b_k, 1)
        b_dp *= -b_beta[:, None]
        b_dq += b_own[:, None] * b_k
        b_dk += b_own[:, None] * b_q
        if HAS_P:
            _store_rows(dp_ptr, at_k, t, HV, b_dp, o_c, m_c, o_n, K, BK, TMA)
        else:
            b_dk += b_dp
        _store_rows(dq_ptr, at_k, t, HV, b_dq, o_c, m_c, o_n, K, BK, TMA)
        _store_rows(dk_ptr, at_k, t, HV, b_dk, o_c, m_c, o_n, K, BK, TMA)

    o_t = (row + o_c) * HV + i_h
    if HAS_GATE:
        b_row -= b_beta * b_seen
        z = tl.sum(b_z, 0) + tl.sum(b_zs, 0) * tl.exp2(G_C)
        tl.store(dg_ptr + o_t, tl.cumsum(b_row, 0, reverse=True) + z, mask=m_c)
    b_dbeta = _values(v_ptr + i_v, y_again_ptr + i_v, dv_ptr + i_v, b_beta, HV * V, o_c, m_c, V, BV)
    tl.store(dbeta_ptr + o_t, b_dbeta - b_seen, mask=m_c)
