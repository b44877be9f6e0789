"""Delta rule, no decay or one a token: the walks over chunks, forward and back.

With S [K, V] the state before a chunk and R from delta_solve.py,

    x = R beta (v - (p exp(G)) S)
    o = scale ((q exp(G)) S + tril(q k^T decay) x)            S <- exp(G_C) S + (k exp(G_C - G))^T x

and back, with dS' the gradient of the state after the chunk and A = scale tril(q k^T decay),

    y = R^T (A^T do + (k exp(G_C - G)) dS')                                     dv = beta y
    dS = exp(G_C) dS' + (q exp(G))^T scale do - (p exp(G))^T beta y

Columns of V are independent: BV of them a program. All of it is computed transposed, V as the rows:
the state, u = beta (v - p S) and x go from product to product as left operands, which tensor cores
take from registers, and what is on the right was loaded.
"""

# pyright knows neither what a jit function returns nor constexpr
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta_solve import decay_between, load_gates
from slipstream.kernels.linear.triton.walk import _rows, _store


@triton.jit
def _columns(p, stride, o_c, m_c, o_n, N: tl.constexpr, MASKED: tl.constexpr):
    """Rows o_c and columns o_n of a tile at p, transposed, zero outside."""
    p = p + o_n[:, None] + o_c[None, :] * stride
    if MASKED:
        return tl.load(p, mask=(o_n < N)[:, None] & m_c[None, :], other=0.0)
    return tl.load(p, mask=m_c[None, :], other=0.0)


@triton.jit
def _sequence(cu_ptr, i_n, T, C: tl.constexpr, PACKED: tl.constexpr):
    """First token, tokens and first slot (delta_solve.find_chunk) of a sequence."""
    if PACKED:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
        length = tl.maximum(end - begin, 0).to(tl.int32)
        first = begin // C + i_n
    else:
        begin = i_n * T
        length = T
        first = i_n * tl.cdiv(T, C)
    return begin, length, first


@triton.jit
def _store_state(p, at, b, o_v, o_k, m_s, K: tl.constexpr, V: tl.constexpr, TMA: tl.constexpr):
    """b [BV, BK] of a state of [slots, HV, V, K]. at: slot, value head and heads, column of V."""
    slot, i_h, HV, i_v = at
    if TMA:
        b = b.reshape(1, 1, o_v.shape[0], o_k.shape[0])
        p.store([slot.to(tl.int32), i_h, i_v, 0], b)
    else:
        p += (slot * HV + i_h) * (K * V)
        tl.store(p + o_v[:, None] * K + o_k[None, :], b, mask=m_s)


@triton.jit(do_not_specialize=["scale", "T", "HV", "H"])
def delta_walk_kernel(
    q_ptr,  # [tokens, H, K], or, if TMA, a descriptor of [B, T, H, K]; so all of tokens
    k_ptr,
    p_ptr,
    v_ptr,  # [tokens, HV, V]
    rows_ptr,  # [slots, HV, ROWS, C]: beta and G (delta_solve.py)
    r_ptr,  # [tokens, HV, C]
    o_ptr,  # [tokens, HV, V]
    x_ptr,  # [tokens, HV, V]
    states_ptr,  # [slots, HV, V, K]: S before each chunk
    s_in_ptr,  # [N, HV, K, V]
    s_out_ptr,  # [N, HV, K, V]
    cu_ptr,  # [N + 1]
    scale,
    T,
    HV,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_S_IN: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    TMA: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(V / BV) * HV * N,). KEEP writes x and the states for backward, else o, s_out."""
    if not GROUPED:
        H = HV
    NV: tl.constexpr = (V + BV - 1) // BV
    ROWS: tl.constexpr = 1 + HAS_GATE + (HAS_GATE and EXACT)
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_n = (pid // NV // HV).to(tl.int64)
    begin, length, first = _sequence(cu_ptr, i_n, T, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_n = tl.arange(0, BV)
    i_v = (pid % NV) * BV
    o_v = i_v + o_n
    i_b = pid // NV // HV
    at_k = (i_b, 0, i_h // (HV // H), 0)
    at_v = (i_b, 0, i_h, i_v)
    at_r = (i_b, 0, i_h, 0)
    if not TMA:
        i_k = (begin * H + i_h // (HV // H)) * K
        k_ptr += i_k
        r_ptr += (begin * HV + i_h) * C
        v_ptr += (begin * HV + i_h) * V
        if HAS_P:
            p_ptr += i_k
        if KEEP:
            x_ptr += (begin * HV + i_h) * V
        else:
            q_ptr += i_k
            o_ptr += (begin * HV + i_h) * V
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = (i_n * HV + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_s = tl.zeros((BV, BK), tl.float32)
    for i in range(tl.cdiv(length, C)):
        i_c = i
        t = i_c * C
        m_c = o_c < length - t
        b_k = _rows(k_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)  # [C, BK]
        if HAS_P:
            b_p = _rows(p_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)
        else:
            b_p = b_k
        if not KEEP:
            b_q = _rows(q_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)
        b_v = tl.trans(_rows(v_ptr, at_v, t, HV, o_c, m_c, o_n, V, BV, TMA))  # [BV, C]
        b_r = _rows(r_ptr, at_r, t, HV, o_c, m_c, o_c, C, C, TMA)
        p_rows = rows_ptr + ((first + i_c) * HV + i_h) * (ROWS * C)
        b_beta = tl.load(p_rows + o_c)
        if HAS_GATE:
            b_G, b_low, G_C, low_C = load_gates(p_rows, o_c, C, EXACT)
            b_start = tl.exp2(b_G)
        b_sb = b_s.to(b_k.dtype)
        # what o needs goes first, so that little else is live in registers
        if KEEP:
            at_s = (first + i_c, i_h, HV, i_v)
            _store_state(states_ptr, at_s, b_sb, o_v, o_k, m_s, K, V, TMA)
        else:
            b_a = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [j, i]
            seen = o_c[:, None] <= o_c[None, :]
            if HAS_GATE:
                b_a *= decay_between(-b_G, -b_low, seen, EXACT)
            else:
                b_a = tl.where(seen, b_a, 0.0)
            b_a = b_a.to(b_k.dtype)
            b_o = tl.dot(b_sb, tl.trans(b_q), input_precision=PRECISION)  # [BV, C]
            if HAS_GATE:
                b_o *= b_start[None, :]
        b_u = tl.dot(b_sb, tl.trans(b_p), input_precision=PRECISION)  # [BV, C]
        if HAS_GATE:
            b_u *= b_start[None, :]
        b_u = ((b_v - b_u) * b_beta[None, :]).to(b_k.dtype)
        b_x = tl.dot(b_u, tl.trans(b_r), input_precision=PRECISION)  # [BV, C]
        b_left = b_x.to(b_k.dtype)
        b_kept = b_left
        if HAS_GATE:
            b_kept = (b_x * tl.exp2((G_C - b_G) + (low_C - b_low))[None, :]).to(b_k.dtype)
            b_s *= tl.exp2(G_C)
        b_s = tl.dot(b_kept, b_k, b_s, input_precision=PRECISION)  # [BV, BK]
        if KEEP:
            _store(x_ptr, at_v, t, HV, b_left, o_c, m_c, o_n, V, BV, TMA)
        else:
            b_o = tl.dot(b_left, b_a, b_o, input_precision=PRECISION) * scale
            _store(o_ptr, at_v, t, HV, b_o, o_c, m_c, o_n, V, BV, TMA)
    if not KEEP:
        tl.store(s_out_ptr + o_s, b_s, mask=m_s)


@triton.jit(do_not_specialize=["scale", "T", "HV", "H"])
def delta_walk_back_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,
    p_ptr,
    do_ptr,  # [tokens, HV, V]
    rows_ptr,  # [slots, HV, ROWS, C]: beta and G (delta_solve.py)
    r_ptr,  # [tokens, HV, C]
    y_ptr,  # [tokens, HV, V]
    states_ptr,  # [slots, HV, V, K]: dS' after each chunk
    s_in_ptr,  # [N, HV, K, V]: gradient of the final state
    s_out_ptr,  # [N, HV, K, V]: of the initial one
    cu_ptr,  # [N + 1]
    scale,
    T,
    HV,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_S_IN: tl.constexpr,
    HAS_S_OUT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    TMA: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(V / BV) * HV * N,): one program walks one tile of V of one head back."""
    if not GROUPED:
        H = HV
    NV: tl.constexpr = (V + BV - 1) // BV
    ROWS: tl.constexpr = 1 + HAS_GATE + (HAS_GATE and EXACT)
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_n = (pid // NV // HV).to(tl.int64)
    begin, length, first = _sequence(cu_ptr, i_n, T, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_n = tl.arange(0, BV)
    i_v = (pid % NV) * BV
    o_v = i_v + o_n
    i_b = pid // NV // HV
    at_k = (i_b, 0, i_h // (HV // H), 0)
    at_v = (i_b, 0, i_h, i_v)
    at_r = (i_b, 0, i_h, 0)
    if not TMA:
        i_k = (begin * H + i_h // (HV // H)) * K
        k_ptr += i_k
        r_ptr += (begin * HV + i_h) * C
        q_ptr += i_k
        do_ptr += (begin * HV + i_h) * V
        y_ptr += (begin * HV + i_h) * V
        if HAS_P:
            p_ptr += i_k
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = (i_n * HV + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_s = tl.zeros((BV, BK), tl.float32)
    chunks = tl.cdiv(length, C)
    for step in range(chunks):
        i_c = chunks - 1 - step
        t = i_c * C
        m_c = o_c < length - t
        b_q = _rows(q_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)  # [C, BK]
        b_k = _rows(k_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)
        if HAS_P:
            b_p = _rows(p_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)
        else:
            b_p = b_k
        b_do = tl.trans(_rows(do_ptr, at_v, t, HV, o_c, m_c, o_n, V, BV, TMA))  # [BV, C]
        b_r = _rows(r_ptr, at_r, t, HV, o_c, m_c, o_c, C, C, TMA)
        p_rows = rows_ptr + ((first + i_c) * HV + i_h) * (ROWS * C)
        b_beta = tl.load(p_rows + o_c)
        b_sb = b_s.to(b_k.dtype)
        at_s = (first + i_c, i_h, HV, i_v)
        _store_state(states_ptr, at_s, b_sb, o_v, o_k, m_s, K, V, TMA)
        b_a = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale  # [i, j]
        seen = o_c[:, None] >= o_c[None, :]
        b_dx = tl.dot(b_sb, tl.trans(b_k), input_precision=PRECISION)  # [BV, C]
        b_read = b_do * scale
        if HAS_GATE:
            b_G, b_low, G_C, low_C = load_gates(p_rows, o_c, C, EXACT)
            b_start = tl.exp2(b_G)
            b_a *= decay_between(b_G, b_low, seen, EXACT)
            b_dx *= tl.exp2((G_C - b_G) + (low_C - b_low))[None, :]
            b_read *= b_start[None, :]
            b_beta *= b_start
            b_s *= tl.exp2(G_C)
        else:
            b_a = tl.where(seen, b_a, 0.0)
        b_s = tl.dot(b_read.to(b_k.dtype), b_q, b_s, input_precision=PRECISION)  # [BV, BK]
        b_dx = tl.dot(b_do, b_a.to(b_k.dtype), b_dx, input_precision=PRECISION)
        b_y = tl.dot(b_dx.to(b_k.dtype), b_r, input_precision=PRECISION)  # [BV, C]
        _store(y_ptr, at_v, t, HV, b_y, o_c, m_c, o_n, V, BV, TMA)
        b_left = (b_y * -b_beta[None, :]).to(b_k.dtype)
        b_s = tl.dot(b_left, b_p, b_s, input_precision=PRECISION)
    if HAS_S_OUT:
        tl.store(s_out_ptr + o_s, b_s.to(s_out_ptr.dtype.element_ty), mask=m_s)
