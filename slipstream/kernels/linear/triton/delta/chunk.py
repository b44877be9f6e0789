"""Delta rule, no decay or one a token: the scans over chunks, forward and back.

With S [K, V] the state before a chunk and R from solve_tril.py, what is written is x = beta w,

    w = R (v - (k exp(G)) S)
    o = scale ((q exp(G)) S + tril(q k^T decay) x)            S <- exp(G_C) S + (k exp(G_C - G))^T x

and back, with dS' the gradient of the state after the chunk and A = scale tril(q k^T decay),

    dv = R^T beta (A^T do + (k exp(G_C - G)) dS')
    dS = exp(G_C) dS' + (q exp(G))^T scale do - (k exp(G))^T dv

With p, which reads before the decay, p exp(G_prev) stands for k exp(G): sums up to the token before
each. Columns of V are independent: BV of them a program. All of it is computed transposed, V as the
rows: the state, v - p S and w go from product to product as left operands, which tensor cores take
from registers, and what is on the right was loaded.

Few heads with long sequences do not fill a device: SPLIT cuts sequences into segments, a program
each. A segment makes M S + E of the state S it meets. A first scan leaves M, the end of the
identity as a start without v, and E; common/state_passing.py makes of these the state each segment
meets.

K of fewer channels than a chunk has tokens: without decay every key is written over many times, and
each time rounds. SPLIT_BF16 then takes w, x and R as pairs of 16 bits.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import decay_between, load_gates
from slipstream.kernels.linear.triton.scalar_decay import chunk, device


@triton.jit
def v_columns(p, stride, o_c, m_c, o_n, N: tl.constexpr, MASKED: tl.constexpr):
    """Rows o_c and columns o_n of a tile at p, transposed, zero outside."""
    p = p + o_n[:, None] + o_c[None, :] * stride
    if MASKED:
        return tl.load(p, mask=(o_n < N)[:, None] & m_c[None, :], other=0.0)
    return tl.load(p, mask=m_c[None, :], other=0.0)


@triton.jit
def locate_sequence(cu_ptr, i_n, T, C, PACKED: tl.constexpr):
    """First token, tokens and first chunk (locate_chunk) of a sequence."""
    if PACKED:
        # offsets that are wrong read and write nothing outside of the tensors
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
def locate_segment(
    cu_ptr, i_seg, T, N, segment, C: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr
):
    """A segment's first token, tokens, first chunk, batch entry and tokens of that before it."""
    if SPLIT:
        begin, length, i_s = device.locate_chunk(cu_ptr, i_seg, T, N, segment, PACKED)
        if PACKED:
            i_b = 0
            first = begin // C + (i_seg - i_s - begin // segment)
        else:
            i_b = i_seg // tl.cdiv(T, segment)
            first = i_b.to(tl.int64) * tl.cdiv(T, C)
        skip = i_s * segment
        begin += skip
        first += i_s * (segment // C)
        length = tl.minimum(tl.maximum(length - skip, 0), segment)
    else:
        begin, length, first = locate_sequence(cu_ptr, i_seg.to(tl.int64), T, C, PACKED)
        i_b = i_seg
        skip = tl.full((), 0, tl.int32)
    return begin, length, first, i_b, skip


@triton.jit
def _pair(b, dtype: tl.constexpr):
    """b rounded, and the rest of it, rounded too."""
    # together they have twice the digits: products with either are exact in float32's sums
    b_high = b.to(dtype)
    return b_high, (b - b_high.to(tl.float32)).to(dtype)


@triton.jit
def _times(b_l, b_r, b, PRECISION: tl.constexpr, SPLIT_BF16: tl.constexpr):
    """b + b_l @ b_r, b_l in float32, of which b_r's dtype is left, or twice as many digits."""
    if SPLIT_BF16:
        b_high, b_rest = _pair(b_l, b_r.dtype)
        b = tl.dot(b_rest, b_r, b)
        b = tl.dot(b_high, b_r, b)
    else:
        b = tl.dot(b_l.to(b_r.dtype), b_r, b, input_precision=PRECISION)
    return b


@triton.jit
def _solved(b_l, b_r, dtype: tl.constexpr, PRECISION: tl.constexpr, SPLIT_BF16: tl.constexpr):
    """b_l @ b_r, b_l in float32, and b_r too if SPLIT_BF16."""
    if SPLIT_BF16:
        b_high, b_rest = _pair(b_l, dtype)
        b_rh, b_rl = _pair(b_r, dtype)
        b = tl.dot(b_rest, b_rh)
        b = tl.dot(b_high, b_rl, b)
        b = tl.dot(b_high, b_rh, b)
    else:
        b = tl.dot(b_l.to(dtype), b_r, input_precision=PRECISION)
    return b


@triton.jit
def _store_state(p, at, b, o_v, o_k, m_s, K: tl.constexpr, V: tl.constexpr, TMA: tl.constexpr):
    """b [BV, BK] of a state of [chunks, HV, V, K]. at: chunk, value head and heads, column of V."""
    i_chunk, i_h, HV, i_v = at
    if TMA:
        b = b.reshape(1, 1, o_v.shape[0], o_k.shape[0])
        p.store([i_chunk.to(tl.int32), i_h, i_v, 0], b)
    else:
        p += (i_chunk * HV + i_h) * (K * V)
        tl.store(p + o_v[:, None] * K + o_k[None, :], b, mask=m_s)


_SIZES = ["scale", "T", "N", "HV", "H", "segment"]


@triton.jit(do_not_specialize=_SIZES)
def delta_chunk_fwd_kernel(
    q_ptr,  # [tokens, H, K], or, if TMA, a descriptor of [B, T, H, K]; so all of tokens
    k_ptr, p_ptr,
    v_ptr,  # [tokens, HV, V]
    rows_ptr,  # [chunks, HV, ROWS, C]: beta and G (solve_tril.py)
    r_ptr,  # [tokens, HV, C]
    o_ptr,  # [tokens, HV, V]: o or w
    states_ptr,  # [chunks, HV, V, K]: S before each chunk
    s_in_ptr,  # [segments, HV, K, V]
    s_out_ptr,  # [segments, HV, K, V]: S after the segment; E
    m_ptr,  # [segments, HV, K, K]: M
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H, segment,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    OUTPUT: tl.constexpr, HAS_P: tl.constexpr, HAS_GATE: tl.constexpr, HAS_S_IN: tl.constexpr,
    HAS_S_OUT: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr,
    TMA: tl.constexpr, SPLIT_BF16: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr,
    pool_ptr=None,  # [rows, HV, V, K], a pool
    to_ptr=None,  # [N, T / 64, rounded up]: rows of it for S after 64 tokens; none below 0
):  # fmt: skip
    """grid (tiles * HV * segments,): one program scans BV rows of one head's state in one segment.

    OUTPUT: "o"; "states", those and w, for backward; or "ends", E and M. Tiles: of V; for "ends"
    then of K, for M. Without SPLIT a segment is a sequence.
    """
    # HV // H is 1 then, which the compiler sees
    if not GROUPED:
        H = HV
    TRANSITION: tl.constexpr = OUTPUT == "ends"
    NV: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = NV + (K + BV - 1) // BV if TRANSITION else NV
    ROWS: tl.constexpr = 1 + HAS_GATE * (1 + FP32 + HAS_P)
    pid = tl.program_id(0)
    i_h = (pid // TILES) % HV
    i_seg = pid // TILES // HV
    i_n = i_seg.to(tl.int64)
    begin, length, first, i_b, skip = locate_segment(cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_n = tl.arange(0, BV)
    tile = pid % TILES
    i_v = tile * BV
    if TRANSITION:
        of_v = tile < NV
        i_v = tl.where(of_v, tile, tile - NV) * BV
    o_v = i_v + o_n
    at_k = (i_b, skip, i_h // (HV // H), 0)
    at_v = (i_b, skip, i_h, i_v)
    # M has no v: its programs load one, for the loop has no branch, and take zeros instead
    if TRANSITION:
        at_v = (i_b, skip, i_h, tl.where(of_v, i_v, 0))
    at_r = (i_b, skip, i_h, 0)
    if not TMA:
        i_k = (begin * H + i_h // (HV // H)) * K
        k_ptr += i_k
        r_ptr += (begin * HV + i_h) * C
        v_ptr += (begin * HV + i_h) * V
        if HAS_P:
            p_ptr += i_k
        if not TRANSITION:
            o_ptr += (begin * HV + i_h) * V
        if OUTPUT == "o":
            q_ptr += i_k
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = (i_n * HV + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_s = tl.zeros((BV, BK), tl.float32)
    # M is what becomes of the unit matrix
    if TRANSITION:
        b_s = tl.where((o_v[:, None] == o_k[None, :]) & (~of_v), 1.0, b_s)
    if to_ptr is not None:
        p_to = chunk.pool_rows_of(to_ptr, i_seg, i_b, begin, skip, T, segment, PACKED, SPLIT)
    for i in range(tl.cdiv(length, C)):
        i_c = i
        t = i_c * C
        m_c = o_c < length - t
        b_k = chunk.load_rows(k_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)  # [C, BK]
        if HAS_P:
            b_p = chunk.load_rows(p_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)
        else:
            b_p = b_k
        if OUTPUT == "o":
            b_q = chunk.load_rows(q_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)
        b_v = tl.trans(chunk.load_rows(v_ptr, at_v, t, HV, o_c, m_c, o_n, V, BV, TMA))  # [BV, C]
        b_r = chunk.load_rows(r_ptr, at_r, t, HV, o_c, m_c, o_c, C, C, TMA)
        p_rows = rows_ptr + ((first + i_c) * HV + i_h) * (ROWS * C)
        b_beta = tl.load(p_rows + o_c)
        if HAS_GATE:
            b_G, b_low, G_C, low_C = load_gates(p_rows, o_c, C, FP32)
            b_start = tl.exp2(b_G)
        # rounded for the products of this chunk; what is carried on stays in float32
        b_sb = b_s.to(b_k.dtype)
        # what o needs goes first, so that little else is live in registers
        if OUTPUT == "states":
            at_s = (first + i_c, i_h, HV, i_v)
            _store_state(states_ptr, at_s, b_sb, o_v, o_k, m_s, K, V, TMA)
        if OUTPUT == "o":
            b_a = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [j, i]
            seen = o_c[:, None] <= o_c[None, :]
            if HAS_GATE:
                b_a *= decay_between(-b_G, -b_low, seen, FP32)
            else:
                b_a = tl.where(seen, b_a, 0.0)
            b_a = b_a.to(b_k.dtype)
            b_o = tl.dot(b_sb, tl.trans(b_q), input_precision=PRECISION)  # [BV, C]
            if HAS_GATE:
                b_o *= b_start[None, :]
        b_w = tl.dot(b_sb, tl.trans(b_p), input_precision=PRECISION)  # [BV, C]
        if HAS_GATE:
            if HAS_P:
                b_w *= tl.load(p_rows + (ROWS - 1) * C + o_c)[None, :]
            else:
                b_w *= b_start[None, :]
        if TRANSITION:
            b_v = tl.where(of_v, b_v, 0.0)
        b_w = _solved(b_v - b_w, tl.trans(b_r), b_k.dtype, PRECISION, SPLIT_BF16)  # [BV, C]
        if OUTPUT == "states":
            chunk.store_block(o_ptr, at_v, t, HV, b_w, o_c, m_c, o_n, V, BV, TMA)
        if OUTPUT == "o":
            b_x = b_w * b_beta[None, :]
            b_o = _times(b_x, b_a, b_o, PRECISION, SPLIT_BF16) * scale
        if HAS_GATE:
            # sums of many gates are long and close to each other: their difference first, then that
            # of what rounding took from them
            b_beta *= tl.exp2((G_C - b_G) + (low_C - b_low))
            b_s *= tl.exp2(G_C)
        b_s = _times(b_w * b_beta[None, :], b_k, b_s, PRECISION, SPLIT_BF16)  # [BV, BK]
        if to_ptr is not None:
            done = skip + t + C
            chunk.store_to_pool(pool_ptr, p_to, done, i_h, HV, b_s, o_v, o_k, m_s, V, K)
        if OUTPUT == "o":
            chunk.store_block(o_ptr, at_v, t, HV, b_o, o_c, m_c, o_n, V, BV, TMA)
    if TRANSITION:
        o_m = (i_n * HV + i_h) * (K * K) + o_k[None, :] * K + o_v[:, None]
        m_m = (o_v < K)[:, None] & (o_k < K)[None, :]
        tl.store(m_ptr + o_m, b_s, mask=m_m & (~of_v))
        m_s &= of_v
    if HAS_S_OUT:
        tl.store(s_out_ptr + o_s, b_s, mask=m_s)


@triton.jit(do_not_specialize=_SIZES)
def delta_chunk_dstate_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr, p_ptr,
    do_ptr,  # [tokens, HV, V]
    rows_ptr,  # [chunks, HV, ROWS, C]: beta and G (solve_tril.py)
    r_ptr,  # [tokens, HV, C]
    dv_ptr,  # [tokens, HV, V]
    states_ptr,  # [chunks, HV, V, K]: dS' after each chunk
    s_in_ptr,  # [segments, HV, K, V]: gradient of the state after the segment
    s_out_ptr,  # [segments, HV, K, V]: of that before it
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H, segment,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    OUTPUT: tl.constexpr, HAS_P: tl.constexpr, HAS_GATE: tl.constexpr, HAS_S_IN: tl.constexpr,
    HAS_S_OUT: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr,
    TMA: tl.constexpr, SPLIT_BF16: tl.constexpr, FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (ceil(V / BV) * HV * segments,): as delta_chunk_fwd_kernel, from the last token back.

    OUTPUT: "states", those and dv; or "ends", s_out alone, which for a start of 0 is what a segment
    adds. Its factor is M^T.
    """
    if not GROUPED:
        H = HV
    NV: tl.constexpr = (V + BV - 1) // BV
    ROWS: tl.constexpr = 1 + HAS_GATE * (1 + FP32 + HAS_P)
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_seg = pid // NV // HV
    i_n = i_seg.to(tl.int64)
    begin, length, first, i_b, skip = locate_segment(cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_n = tl.arange(0, BV)
    i_v = (pid % NV) * BV
    o_v = i_v + o_n
    at_k = (i_b, skip, i_h // (HV // H), 0)
    at_v = (i_b, skip, i_h, i_v)
    at_r = (i_b, skip, i_h, 0)
    if not TMA:
        i_k = (begin * H + i_h // (HV // H)) * K
        k_ptr += i_k
        r_ptr += (begin * HV + i_h) * C
        q_ptr += i_k
        do_ptr += (begin * HV + i_h) * V
        if OUTPUT == "states":
            dv_ptr += (begin * HV + i_h) * V
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
        b_q = chunk.load_rows(q_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)  # [C, BK]
        b_k = chunk.load_rows(k_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)
        if HAS_P:
            b_p = chunk.load_rows(p_ptr, at_k, t, H, o_c, m_c, o_k, K, BK, TMA)
        else:
            b_p = b_k
        b_do = tl.trans(chunk.load_rows(do_ptr, at_v, t, HV, o_c, m_c, o_n, V, BV, TMA))  # [BV, C]
        b_r = chunk.load_rows(r_ptr, at_r, t, HV, o_c, m_c, o_c, C, C, TMA)
        p_rows = rows_ptr + ((first + i_c) * HV + i_h) * (ROWS * C)
        b_beta = tl.load(p_rows + o_c)
        b_sb = b_s.to(b_k.dtype)
        if OUTPUT == "states":
            at_s = (first + i_c, i_h, HV, i_v)
            _store_state(states_ptr, at_s, b_sb, o_v, o_k, m_s, K, V, TMA)
        # the gradient of what a token writes: from o of its chunk by scores, from later ones by dS'
        b_a = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale  # [i, j]
        seen = o_c[:, None] >= o_c[None, :]
        b_dx = tl.dot(b_sb, tl.trans(b_k), input_precision=PRECISION)  # [BV, C]
        b_read = b_do * scale
        if HAS_GATE:
            b_G, b_low, G_C, low_C = load_gates(p_rows, o_c, C, FP32)
            b_start = tl.exp2(b_G)
            b_a *= decay_between(b_G, b_low, seen, FP32)
            b_dx *= tl.exp2((G_C - b_G) + (low_C - b_low))[None, :]
            b_read *= b_start[None, :]
            b_s *= tl.exp2(G_C)
        else:
            b_a = tl.where(seen, b_a, 0.0)
        b_s = tl.dot(b_read.to(b_k.dtype), b_q, b_s, input_precision=PRECISION)  # [BV, BK]
        b_dx = tl.dot(b_do, b_a.to(b_k.dtype), b_dx, input_precision=PRECISION)
        b_dv = _solved(b_dx * b_beta[None, :], b_r, b_k.dtype, PRECISION, SPLIT_BF16)  # [BV, C]
        if OUTPUT == "states":
            chunk.store_block(dv_ptr, at_v, t, HV, b_dv, o_c, m_c, o_n, V, BV, TMA)
        # what the token's erase hands back to the state before the chunk
        b_lhs = -b_dv
        if HAS_GATE:
            if HAS_P:
                b_lhs *= tl.load(p_rows + (ROWS - 1) * C + o_c)[None, :]
            else:
                b_lhs *= b_start[None, :]
        b_s = _times(b_lhs, b_p, b_s, PRECISION, SPLIT_BF16)
    if HAS_S_OUT:
        tl.store(s_out_ptr + o_s, b_s.to(s_out_ptr.dtype.element_ty), mask=m_s)
