"""Softmax attention: a kernel by tiles of queries, o or with do dq, and one of dk and dv by keys.

    m' = max(m, max_s x_ts)     l' = e^(m - m') l + sum_s e^(x_ts - m')     o' likewise with v_s

and at the end o / l and lse = m + log(l), in base 2 inside. Dropout leaves l as it is. Backward:

    p_ts = exp(x_ts - lse_t)      dp_ts = do_t . v_s      dx_ts = p_ts (dp_ts - delta_t)
    dq_t = scale sum_s dx_ts k_s      dk_s = scale sum_t dx_ts q_t      dv_s = sum_t p_ts do_t

with dx (1 - tanh^2) in place of dx beneath a softcap, and dropout's factors m_ts on p in dv and on
dp in dx. For dk and dv p and dp are transposed, keys by queries, so that neither kernel ever
transposes a product. Nothing is added by two programs. The sums over s and over t of dx are what
the gates' gradient is made of (sums.py). Heads whose width is no multiple of 8 are computed in
float32 elsewhere; here their dx is two numbers of 16 bits.

A kernel goes through BN keys or BM queries at a time, and only the tiles at the edges of what is
seen are masked: the loop is three loops.
"""

import triton
import triton.language as tl

from slipstream.kernels.attention.triton.scores import (
    add_product,
    block,
    finite,
    in_window,
    keep_mask,
    rows_of_sequence,
    scores,
    sequence_of_tile,
    visible_tiles,
)
from slipstream.kernels.primitives.device import LN2, LOG2E

# float32 of 16 bytes, the widest load
ALIGN = tl.constexpr(4)
_STRIDES = [f"stride_{x}{i}" for x in "qkv" for i in "bth"]
_SIZES = ["T", "S", "H", "N", "tiles", "search_steps", "left", "right", "group", "stride_slope"]
UNSPECIALIZED = ["factor", "cap", "scale", "threshold", "keep_scale", *_SIZES, *_STRIDES]


@triton.jit
def _exponentials(b_s, score_scale, b_m, b_l, MASKED: tl.constexpr):
    """Online softmax: e^(x - m'), what the new maximum m' rescales sums by, m' and l'."""
    b_top = tl.maximum(b_m, tl.max(b_s, 1) * score_scale)
    b_base = finite(b_top) if MASKED else b_top
    b_p = tl.exp2(b_s * score_scale - b_base[:, None])
    b_shrink = tl.exp2(b_m - b_base)
    return b_p, b_shrink, b_top, b_l * b_shrink + tl.sum(b_p, 1)


@triton.jit
def _divided(
    b_o, b_m, b_l, sinks_ptr, i_h, keep_scale, HAS_SINKS: tl.constexpr, HAS_DROPOUT: tl.constexpr
):
    """o and lse; a sink is one more score without a value."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + i_h).to(tl.float32) * LOG2E
        b_top = tl.maximum(b_m, sink)
        b_shrink = tl.exp2(b_m - finite(b_top))
        b_l = b_l * b_shrink + tl.exp2(sink - finite(b_top))
        b_o *= b_shrink[:, None]
        b_m = b_top
    has_no_key = b_l == 0.0
    b_l = tl.where(has_no_key, 1.0, b_l)
    b_o *= (1.0 / b_l)[:, None]
    if HAS_DROPOUT:
        b_o *= keep_scale
    return b_o, tl.where(has_no_key, float("-inf"), (b_m + tl.log2(b_l)) * LN2)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def softmax_queries_kernel(
    q_ptr,  # [B, T, H, D] by strides, which are in units of UNIT elements
    k_ptr,  # [KB, S, HKV, D] by strides
    v_ptr,  # [KB, S, HKV, DV] by strides
    o_ptr,  # [B, T, H, DV]
    lse_ptr,  # [B, H, T]
    do_ptr,  # [B, T, H, DV]; with it dq is wanted, and o, lse and sinks are None, else the others
    dq_ptr,  # [B, T, H, D]
    base_ptr,  # [B, H, R], R = T rounded up to ALIGN: rows then begin at 16 bytes
    delta_ptr,  # [B, H, R]
    sums_ptr,  # [B, H, T]: sums of dx over the keys
    high_ptr,  # [KB, H, S]: sums of the gates in base 2
    low_ptr,  # [KB, H, S]: what float32 left of them
    sinks_ptr,  # [H]
    slopes_ptr,  # [N or 1, H]
    cu_q_ptr,  # [N + 1]
    cu_k_ptr,  # [N + 1]
    lengths_ptr,  # [N]
    seed_ptr,  # [1], of the dropout; None, as what follows it, if there is none
    threshold, keep_scale, factor, cap, scale, T, S, H, N, tiles, search_steps, left, right,
    group, stride_slope, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, UNIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PACKED_Q: tl.constexpr, PACKED_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (tiles * H * N,), or (tiles * H,) packed: neighbours share a head, and its keys."""
    pid = tl.program_id(0)
    # the last tiles see the most of a causal sequence, and go first
    i_n, row = sequence_of_tile(
        tiles - 1 - pid % tiles, pid // tiles // H, cu_q_ptr, N, search_steps, BM, PACKED_Q
    )
    i_h = (pid // tiles % H).to(tl.int64)
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, lengths_ptr, T, PACKED_Q, False)
    i_kb, begin_k, _, keys = rows_of_sequence(i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS)
    shift = keys - queries
    rows = queries - row  # in this tile and after it

    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_v = tl.arange(0, BV)
    # strides come in units of UNIT elements: the product tells the compiler how rows are aligned
    stride_qt *= UNIT
    stride_kt *= UNIT
    stride_vt *= UNIT
    q_ptr += (i_b * stride_qb + i_h * stride_qh) * UNIT + (begin + row) * stride_qt
    k_ptr += (i_kb * stride_kb + i_h // group * stride_kh) * UNIT + begin_k * stride_kt
    v_ptr += (i_kb * stride_vb + i_h // group * stride_vh) * UNIT + begin_k * stride_vt
    if do_ptr is not None:
        i_o = (i_b * T + begin + row) * H + i_h
        i_s = (i_b * H + i_h) * T + begin + row
    b_q = block(q_ptr, stride_qt, o_m, rows, o_d, D, BD, True)  # [BM, BD]
    if do_ptr is not None:
        b_do = block(do_ptr + i_o * DV, H * DV, o_m, rows, o_v, DV, BV, True)  # [BM, BV]
        # base (lse in base 2) and delta, in rows padded to ALIGN
        i_r = (i_b * H + i_h) * (tl.cdiv(T, ALIGN) * ALIGN) + begin + row
        b_base = tl.load(base_ptr + i_r + o_m, mask=o_m < rows, other=float("inf"))
        b_delta = tl.load(delta_ptr + i_r + o_m, mask=o_m < rows, other=0.0)
    position = row + shift + o_m

    # odd widths are computed in float32 elsewhere: dx in 16 bits is given as two terms
    TWO_TERMS: tl.constexpr = D % 8 != 0 or DV % 8 != 0
    # without bias or softcap the scores stay unscaled: the factor goes into the exponent
    SCALED: tl.constexpr = (HAS_SOFTCAP or HAS_SLOPES) or HAS_GATE
    score_scale = 1.0 if SCALED else factor  # what scales the scores under the exponential
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + i_n.to(tl.int64) * stride_slope + i_h) * LOG2E
    if HAS_GATE:
        i_g = (i_kb * H + i_h) * S + begin_k
        m_g = (position >= 0) & (o_m < rows)
        b_high = tl.load(high_ptr + i_g + position, mask=m_g, other=0.0)
        b_low = tl.load(low_ptr + i_g + position, mask=m_g, other=0.0)

    if do_ptr is None:
        b_m = tl.full((BM,), float("-inf"), tl.float32)
        b_l = tl.zeros((BM,), tl.float32)
        b_o = tl.zeros((BM, BV), tl.float32)
    else:
        if HAS_GATE:
            b_sum = tl.zeros((BM,), tl.float32)
        b_dq = tl.zeros((BM, BD), tl.float32)
    # tiles of keys from low to high, without a mask from inner to outer
    low, inner, outer, high = visible_tiles(
        row + shift,
        tl.minimum(row + BM, queries) - 1 + shift,
        tl.where(rows > 0, keys, 0),
        left,
        right,
        BN,
        HAS_LEFT,
        HAS_RIGHT,
    )
    for edge in tl.static_range(0 if HAS_LEFT else 1, 3):
        # before what all queries see, that, and after it
        start = low if edge == 0 else (inner if edge == 1 else outer)
        end = inner if edge == 0 else (outer if edge == 1 else high)
        for i in range(tl.cdiv(end - start, BN)):
            j = start + i * BN
            at = j.to(tl.int64)
            b_k = block(k_ptr + at * stride_kt, stride_kt, o_n, keys - j, o_d, D, BD, edge != 1)
            if do_ptr is not None:
                p_v = v_ptr + at * stride_vt
                b_v = block(p_v, stride_vt, o_n, keys - j, o_v, DV, BV, edge != 1)
            # scores in base 2, masked at the edges
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
            if do_ptr is not None:
                b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)  # [BM, BN]
            age = position[:, None] - (j + o_n)[None, :]
            b_gate = b_s
            if HAS_GATE:
                p_g = i_g + at + o_n
                b_gate = b_high[:, None] - tl.load(high_ptr + p_g, mask=o_n < keys - j, other=0.0)
                b_gate += b_low[:, None] - tl.load(low_ptr + p_g, mask=o_n < keys - j, other=0.0)
            b_s, b_t = scores(
                b_s, factor, cap, slope, age, b_gate, HAS_SOFTCAP, HAS_SLOPES, HAS_GATE
            )
            if edge != 1:
                m_s = in_window(age, left, right, HAS_LEFT, HAS_RIGHT) & (o_n < keys - j)[None, :]
                b_s = tl.where(m_s, b_s, float("-inf"))
            if do_ptr is None:
                b_p, b_shrink, b_m, b_l = _exponentials(b_s, score_scale, b_m, b_l, edge != 1)
                if HAS_DROPOUT:
                    b_keep = keep_mask(seed_ptr, j, position, i_h, i_n, threshold, BN, False)
                    b_p = tl.where(b_keep, b_p, 0.0)
                b_o *= b_shrink[:, None]
                p_v = v_ptr + at * stride_vt
                b_v = block(p_v, stride_vt, o_n, keys - j, o_v, DV, BV, edge != 1)
                b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)  # [BM, BV]
            else:
                if HAS_DROPOUT:
                    b_keep = keep_mask(seed_ptr, j, position, i_h, i_n, threshold, BN, False)
                    b_dp = tl.where(b_keep, b_dp * keep_scale, 0.0)
                # p (dp - delta), from the saved lse: no second softmax
                b_dx = tl.exp2(b_s * score_scale - b_base[:, None]) * (b_dp - b_delta[:, None])
                if HAS_GATE:
                    b_sum += tl.sum(b_dx, 1)
                if HAS_SOFTCAP:
                    b_dx *= 1.0 - b_t * b_t
                b_dq = add_product(b_dq, b_dx, b_k, TWO_TERMS, PRECISION)  # [BM, BD]

    if do_ptr is None:
        b_o, b_lse = _divided(
            b_o, b_m, b_l, sinks_ptr, i_h, keep_scale, HAS_SINKS, HAS_DROPOUT
        )  # fmt: skip
        m_o = (o_m < rows)[:, None] & (o_v < DV)[None, :]
        p_o = o_ptr + ((i_b * T + begin + row) * H + i_h) * DV
        p_o += o_m[:, None] * (H * DV) + o_v[None, :]
        tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=m_o)
        tl.store(lse_ptr + (i_b * H + i_h) * T + begin + row + o_m, b_lse, mask=o_m < rows)
    else:
        m_q = (o_m < rows)[:, None] & (o_d < D)[None, :]
        p_dq = dq_ptr + i_o * D + o_m[:, None] * (H * D) + o_d[None, :]
        tl.store(p_dq, (b_dq * scale).to(dq_ptr.dtype.element_ty), mask=m_q)
        if HAS_GATE:
            tl.store(sums_ptr + i_s + o_m, b_sum, mask=o_m < rows)


@triton.jit
def _load_sums(base_ptr, delta_ptr, i_r, o_m, m_m, MASKED: tl.constexpr):
    """base and delta of queries o_m from i_r on; of those that there are not, so that p is 0."""
    if MASKED:
        b_base = tl.load(base_ptr + i_r + o_m, mask=m_m, other=float("inf"))
        b_delta = tl.load(delta_ptr + i_r + o_m, mask=m_m, other=0.0)
    else:
        b_base = tl.load(base_ptr + i_r + o_m)
        b_delta = tl.load(delta_ptr + i_r + o_m)
    return b_base, b_delta


@triton.jit
def _store_gradient(
    ptr, b, scale, i_k, HKV, o_n, o_c, m_used, m_n, C: tl.constexpr, HAS_LENGTHS: tl.constexpr
):
    """Writes b to rows [KB S, HKV, C] of keys or values from i_k on: zero for keys not in use."""
    if HAS_LENGTHS:
        b = tl.where(m_used, b, 0.0)
    p = ptr + i_k * C + o_n[:, None] * (HKV * C) + o_c[None, :]
    if scale is not None:
        b = b * scale
    tl.store(p, b.to(ptr.dtype.element_ty), mask=m_n & (o_c < C)[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def softmax_dkv_kernel(
    q_ptr, k_ptr, v_ptr,
    do_ptr,  # [B, T, H, DV]
    dk_ptr,  # [KB, S, HKV, D]
    dv_ptr,  # [KB, S, HKV, DV]
    base_ptr,  # [B, H, R], R = T rounded up to ALIGN: rows then begin at 16 bytes
    delta_ptr,  # [B, H, R]
    sums_ptr,  # [KB, H, S]: sums of dx over the queries
    high_ptr, low_ptr, slopes_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, seed_ptr,
    threshold, keep_scale, factor, cap, scale, T, S, H, N, tiles, search_steps, left, right,
    group,
    stride_slope, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb,
    stride_vt, stride_vh,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, UNIT: tl.constexpr, GROUPED: tl.constexpr, HAS_DK: tl.constexpr,
    HAS_DV: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (tiles * HKV * N,), or (tiles * HKV,) packed: BN keys of a head, all its queries.

    Registers may not hold the sums of both: then a launch makes dk, and another dv.
    """
    if not GROUPED:
        group = 1
    pid = tl.program_id(0)
    HKV = H // group
    i_n, row = sequence_of_tile(
        pid % tiles, pid // tiles // HKV, cu_k_ptr, N, search_steps, BN, PACKED_K
    )
    i_kv = (pid // tiles % HKV).to(tl.int64)
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, lengths_ptr, T, PACKED_Q, False)
    i_kb, begin_k, capacity, keys = rows_of_sequence(
        i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS
    )
    shift = keys - queries

    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_v = tl.arange(0, BV)
    stride_qt *= UNIT
    stride_kt *= UNIT
    stride_vt *= UNIT
    q_ptr += i_b * stride_qb * UNIT + begin * stride_qt
    k_ptr += (i_kb * stride_kb + i_kv * stride_kh) * UNIT + (begin_k + row) * stride_kt
    v_ptr += (i_kb * stride_vb + i_kv * stride_vh) * UNIT + (begin_k + row) * stride_vt
    b_k = block(k_ptr, stride_kt, o_n, keys - row, o_d, D, BD, True)  # [BN, BD]
    if HAS_DK:
        b_v = block(v_ptr, stride_vt, o_n, keys - row, o_v, DV, BV, True)  # [BN, BV]

    TWO_TERMS: tl.constexpr = D % 8 != 0 or DV % 8 != 0
    SCALED: tl.constexpr = (HAS_SOFTCAP or HAS_SLOPES) or HAS_GATE
    score_scale = 1.0 if SCALED else factor
    if HAS_DK:
        b_dk = tl.zeros((BN, BD), tl.float32)
    if HAS_DV:
        b_dv = tl.zeros((BN, BV), tl.float32)
    # key s is seen by the queries from s - right to s + left
    low, inner, outer, high = visible_tiles(
        row - shift,
        tl.minimum(row + BN, keys) - 1 - shift,
        tl.where(row < keys, queries, 0),
        right,
        left,
        BM,
        HAS_RIGHT,
        HAS_LEFT,
    )
    for i_g in range(group):
        i_h = i_kv * group + i_g
        i_o = (i_b * T + begin) * H + i_h
        i_r = (i_b * H + i_h) * (tl.cdiv(T, ALIGN) * ALIGN) + begin
        p_q = q_ptr + i_h * stride_qh * UNIT
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + i_n.to(tl.int64) * stride_slope + i_h) * LOG2E
        if HAS_GATE:
            i_c = (i_kb * H + i_h) * S + begin_k
            b_high = tl.load(high_ptr + i_c + row + o_n, mask=o_n < keys - row, other=0.0)
            b_low = tl.load(low_ptr + i_c + row + o_n, mask=o_n < keys - row, other=0.0)
            b_sum = tl.zeros((BN,), tl.float32)
        for edge in tl.static_range(0 if HAS_RIGHT else 1, 3):
            start = low if edge == 0 else (inner if edge == 1 else outer)
            end = inner if edge == 0 else (outer if edge == 1 else high)
            for n in range(tl.cdiv(end - start, BM)):
                i = start + n * BM
                at = i.to(tl.int64)
                m_m = o_m < queries - i
                b_q = block(
                    p_q + at * stride_qt, stride_qt, o_m, queries - i, o_d, D, BD, edge != 1
                )
                p_do = do_ptr + (i_o + at * H) * DV
                b_do = block(p_do, H * DV, o_m, queries - i, o_v, DV, BV, edge != 1)
                b_base, b_delta = _load_sums(base_ptr, delta_ptr, i_r + at, o_m, m_m, edge != 1)
                # transposed, keys by queries: p and dx are left operands as they are
                b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BM]
                position = i + shift + o_m
                age = position[None, :] - (row + o_n)[:, None]
                b_gate = b_s
                if HAS_GATE:
                    p_g = i_c + position
                    m_g = m_m & (position >= 0)
                    b_gate = tl.load(high_ptr + p_g, mask=m_g, other=0.0) - b_high[:, None]
                    b_gate += tl.load(low_ptr + p_g, mask=m_g, other=0.0) - b_low[:, None]
                b_s, b_t = scores(
                    b_s, factor, cap, slope, age, b_gate, HAS_SOFTCAP, HAS_SLOPES, HAS_GATE
                )
                if edge != 1:
                    is_visible = in_window(age, left, right, HAS_LEFT, HAS_RIGHT)
                    b_s = tl.where(is_visible, b_s, float("-inf"))
                b_p = tl.exp2(b_s * score_scale - b_base[None, :])
                b_weight = b_p
                if HAS_DROPOUT:
                    b_keep = keep_mask(seed_ptr, row, position, i_h, i_n, threshold, BN, True)
                    b_weight = tl.where(b_keep, b_p * keep_scale, 0.0)
                if HAS_DV:
                    b_dv = tl.dot(b_weight.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
                if HAS_DK:
                    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)  # [BN, BM]
                    if HAS_DROPOUT:
                        b_dp = tl.where(b_keep, b_dp * keep_scale, 0.0)
                    b_dx = b_p * (b_dp - b_delta[None, :])
                    if HAS_GATE:
                        b_sum += tl.sum(b_dx, 1)
                    if HAS_SOFTCAP:
                        b_dx *= 1.0 - b_t * b_t
                    b_dk = add_product(b_dk, b_dx, b_q, TWO_TERMS, PRECISION)  # [BN, BD]
        # of one head of q: the sums of dx over the queries, for the gates' gradient
        if HAS_GATE and HAS_DK:
            b_sum = tl.where(o_n < keys - row, b_sum, 0.0)
            tl.store(sums_ptr + i_c + row + o_n, b_sum, mask=o_n < capacity - row)

    m_used = (o_n < keys - row)[:, None]
    i_k = (i_kb * S + begin_k + row) * HKV + i_kv
    m_n = (o_n < capacity - row)[:, None]
    if HAS_DK:
        _store_gradient(dk_ptr, b_dk, scale, i_k, HKV, o_n, o_d, m_used, m_n, D, HAS_LENGTHS)
    if HAS_DV:
        _store_gradient(dv_ptr, b_dv, None, i_k, HKV, o_n, o_v, m_used, m_n, DV, HAS_LENGTHS)
