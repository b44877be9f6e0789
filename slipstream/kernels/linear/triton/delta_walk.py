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
from slipstream.kernels.linear.triton.walk import _block


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


@triton.jit(do_not_specialize=["scale", "T", "HV", "H"])
def delta_walk_kernel(
    q_ptr,  # [tokens, H, K]
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
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(V / BV) * HV * N,). KEEP writes x and the states for backward, else o, s_out."""
    if not GROUPED:
        H = HV
    NV: tl.constexpr = (V + BV - 1) // BV
    ROWS: tl.constexpr = 1 + HAS_GATE + (HAS_GATE and EXACT)
    KM: tl.constexpr = K != BK
    VM: tl.constexpr = V % BV != 0
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_n = (pid // NV // HV).to(tl.int64)
    begin, length, first = _sequence(cu_ptr, i_n, T, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = (pid % NV) * BV + tl.arange(0, BV)
    i_k = (begin * H + i_h // (HV // H)) * K
    i_v = (begin * HV + i_h) * V
    i_t = begin * HV + i_h
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = (i_n * HV + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_s = tl.zeros((BV, BK), tl.float32)
    for i in range(tl.cdiv(length, C)):
        i_c = i
        t = (i_c * C).to(tl.int64)
        m_c = o_c < length - i_c * C
        b_k = _block(k_ptr + i_k + t * (H * K), H * K, o_c, m_c, o_k, K, KM)  # [C, BK]
        if HAS_P:
            b_p = _block(p_ptr + i_k + t * (H * K), H * K, o_c, m_c, o_k, K, KM)
        else:
            b_p = b_k
        if not KEEP:
            b_q = _block(q_ptr + i_k + t * (H * K), H * K, o_c, m_c, o_k, K, KM)
        b_v = _columns(v_ptr + i_v + t * (HV * V), HV * V, o_c, m_c, o_v, V, VM)  # [BV, C]
        b_r = tl.load(
            r_ptr + (i_t + (t + o_c) * HV)[:, None] * C + o_c[None, :], mask=m_c[:, None], other=0.0
        )
        p_rows = rows_ptr + ((first + i_c) * HV + i_h) * (ROWS * C)
        b_beta = tl.load(p_rows + o_c)
        if HAS_GATE:
            b_G, b_low, G_C, low_C = load_gates(p_rows, o_c, C, EXACT)
            b_start = tl.exp2(b_G)
        b_sb = b_s.to(b_k.dtype)
        # what o needs goes first, so that little else is live in registers
        if KEEP:
            p_s = states_ptr + ((first + i_c) * HV + i_h) * (K * V)
            tl.store(p_s + o_v[:, None] * K + o_k[None, :], b_sb, mask=m_s)
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
        m_o = m_c[None, :] & (o_v < V)[:, None] if VM else m_c[None, :]
        o_o = i_v + t * (HV * V) + o_c[None, :] * (HV * V) + o_v[:, None]
        if KEEP:
            tl.store(x_ptr + o_o, b_left, mask=m_o)
        else:
            b_o = tl.dot(b_left, b_a, b_o, input_precision=PRECISION)
            tl.store(o_ptr + o_o, (b_o * scale).to(o_ptr.dtype.element_ty), mask=m_o)
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
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(V / BV) * HV * N,): one program walks one tile of V of one head back."""
    if not GROUPED:
        H = HV
    NV: tl.constexpr = (V + BV - 1) // BV
    ROWS: tl.constexpr = 1 + HAS_GATE + (HAS_GATE and EXACT)
    KM: tl.constexpr = K != BK
    VM: tl.constexpr = V % BV != 0
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_n = (pid // NV // HV).to(tl.int64)
    begin, length, first = _sequence(cu_ptr, i_n, T, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = (pid % NV) * BV + tl.arange(0, BV)
    i_k = (begin * H + i_h // (HV // H)) * K
    i_v = (begin * HV + i_h) * V
    i_t = begin * HV + i_h
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = (i_n * HV + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_s = tl.zeros((BV, BK), tl.float32)
    chunks = tl.cdiv(length, C)
    for step in range(chunks):
        i_c = chunks - 1 - step
        t = (i_c * C).to(tl.int64)
        m_c = o_c < length - i_c * C
        b_q = _block(q_ptr + i_k + t * (H * K), H * K, o_c, m_c, o_k, K, KM)  # [C, BK]
        b_k = _block(k_ptr + i_k + t * (H * K), H * K, o_c, m_c, o_k, K, KM)
        if HAS_P:
            b_p = _block(p_ptr + i_k + t * (H * K), H * K, o_c, m_c, o_k, K, KM)
        else:
            b_p = b_k
        b_do = _columns(do_ptr + i_v + t * (HV * V), HV * V, o_c, m_c, o_v, V, VM)  # [BV, C]
        b_r = tl.load(
            r_ptr + (i_t + (t + o_c) * HV)[:, None] * C + o_c[None, :], mask=m_c[:, None], other=0.0
        )
        p_rows = rows_ptr + ((first + i_c) * HV + i_h) * (ROWS * C)
        b_beta = tl.load(p_rows + o_c)
        b_sb = b_s.to(b_k.dtype)
        p_s = states_ptr + ((first + i_c) * HV + i_h) * (K * V)
        tl.store(p_s + o_v[:, None] * K + o_k[None, :], b_sb, mask=m_s)
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
        m_o = m_c[None, :] & (o_v < V)[:, None] if VM else m_c[None, :]
        p_y = y_ptr + i_v + t * (HV * V) + o_c[None, :] * (HV * V) + o_v[:, None]
        tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_o)
        b_left = (b_y * -b_beta[None, :]).to(b_k.dtype)
        b_s = tl.dot(b_left, b_p, b_s, input_precision=PRECISION)
    if HAS_S_OUT:
        tl.store(s_out_ptr + o_s, b_s.to(s_out_ptr.dtype.element_ty), mask=m_s)
