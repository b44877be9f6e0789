"""Attention to selected keys: kernels that go through lists of tiles of queries, and of keys.

    lists ---keys kernel, a sort, merge kernel---> union of QT neighbouring queries' lists, with a
                                                   bit a query: o and dq, queries stay
    lists ---the same by query, a stable sort----> the queries that name a tile of keys, with a bit
                                                   a block: dk and dv, keys stay, queries gathered

Rows of a tile are QT queries by the R heads that share a list and a head of keys, BM with what is
left. Keys of the window, and with TAIL those of the query's open block, come first, as they lie
("near"); entries of the lists that name them count no more. Nothing is added by two programs.
"""

import triton
import triton.language as tl

from slipstream.kernels.attention.triton.scores import (
    add_product,
    finite,
    rows_of_sequence,
    sequence_of_tile,
)
from slipstream.kernels.primitives.device import LN2, LOG2E

_STRIDES = [f"stride_{x}{i}" for x in "qkv" for i in "bth"]
SIZES = ["T", "S", "H", "G", "N", "W", "units", "share", "tiles", "search_steps", "total"]
UNSPECIALIZED = ["factor", "scale", "left", "right", *SIZES, *_STRIDES]


@triton.jit
def _is_near(
    b_p,
    b_s,
    left,
    right,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Whether a key at b_s is in the window, or the open block, of a query at b_p."""
    b_near = (b_p != b_p) & (b_s != b_s)
    if HAS_WINDOW:
        b_near = b_near | ((b_p - b_s <= left) & (b_s - b_p <= right))
    if TAIL:
        b_near = b_near | ((b_s <= b_p) & (b_s >= (b_p + 1) // BLOCK * BLOCK))
    return b_near


@triton.jit
def seen(
    b_p,
    b_s,
    b_listed,
    m,
    left,
    right,
    IS_NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Of pairs in m, those that a loop meets: near ones, or those of lists that are not."""
    if IS_NEAR:
        return m & _is_near(b_p, b_s, left, right, BLOCK, TAIL, HAS_WINDOW)
    m = m & b_listed
    if CAUSAL:
        m = m & (b_s <= b_p)
    if TAIL or HAS_WINDOW:
        m = m & ~_is_near(b_p, b_s, left, right, BLOCK, TAIL, HAS_WINDOW)
    return m


@triton.jit
def _near_range(
    low,
    high,
    before,
    after,
    limit,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Positions that are near one of low .. high: from the first to behind the last."""
    begin = tl.maximum(high + 1, 0)
    end = begin * 0
    if HAS_WINDOW:
        begin = tl.minimum(begin, low - before)
        end = tl.maximum(end, high + after + 1)
    if TAIL:
        begin = tl.minimum(begin, tl.maximum(low + 1, 0) // BLOCK * BLOCK)
        end = tl.maximum(end, high + 1)
    begin = tl.maximum(begin, 0)
    return begin, tl.maximum(tl.minimum(end, limit), begin)


@triton.jit
def keys_of(
    merged_ptr, bits_ptr, e, end, o_n, IS_NEAR: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr
):
    """Positions and bits of BN keys from e on, in a list's order; end: behind its last key."""
    o_e = e + o_n
    if IS_NEAR:
        return o_e, o_e.to(bits_ptr.dtype.element_ty)
    if BLOCK >= BN:
        # BN keys of one entry
        m_e = e < end
        b_s = tl.load(merged_ptr + e // BLOCK, mask=m_e, other=0) * BLOCK + e % BLOCK + o_n
        return b_s, tl.load(bits_ptr + e // BLOCK, mask=m_e, other=0) + o_n * 0
    m_e = o_e < end
    b_s = tl.load(merged_ptr + o_e // BLOCK, mask=m_e, other=0) * BLOCK + o_e % BLOCK
    return b_s, tl.load(bits_ptr + o_e // BLOCK, mask=m_e, other=0)


@triton.jit
def rows_at(p, m_r, o_c, C: tl.constexpr, BC: tl.constexpr):
    """[rows, BC] at pointers p [rows], zero where there is no row or column."""
    if C != BC:
        return tl.load(p[:, None] + o_c[None, :], mask=m_r[:, None] & (o_c < C)[None, :], other=0.0)
    return tl.load(p[:, None] + o_c[None, :], mask=m_r[:, None], other=0.0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def selected_queries_kernel(
    q_ptr,  # [B, T, H, D] by strides, which are in units of UNIT elements
    k_ptr,  # [KB, S, HKV, D] by strides
    v_ptr,  # [KB, S, HKV, DV] by strides
    o_ptr,  # [B, T, H, DV]
    lse_ptr,  # [B, H, T]
    do_ptr,  # [B, T, H, DV]; with it dq is wanted, and o, lse and sinks are None, else the others
    dq_ptr,  # [B, T, H, D]
    base_ptr,  # [B, H, T rounded up to 4]
    delta_ptr,  # the same
    sinks_ptr,  # [H]
    merged_ptr,
    bits_ptr,  # [rows of tiles, G, W], of QT queries
    counts_ptr,  # [rows of tiles, G]
    cu_q_ptr,
    cu_k_ptr,
    lengths_ptr,
    factor,
    scale,
    T,
    S,
    H,
    units,
    share,
    G,
    N,
    W,
    tiles,
    search_steps,
    left,
    right,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    QT: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (tiles * units * N,), or (tiles * units,) packed. A unit is R heads with one list, and
    `share` of them have one head of keys."""
    pid = tl.program_id(0)
    # the last tiles see the most of a causal sequence, and go first
    tile = tiles - 1 - pid % tiles
    i_n, row = sequence_of_tile(
        tile, pid // tiles // units, cu_q_ptr, N, search_steps, QT, PACKED_Q
    )
    i_u = (pid // tiles % units).to(tl.int64)
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, lengths_ptr, T, PACKED_Q, False)
    i_kb, begin_k, _, keys = rows_of_sequence(i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS)
    shift = keys - queries
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_v = tl.arange(0, BV)
    o_q = o_m // R
    m_m = (row + o_q < queries) & (o_q < QT)
    i_h = i_u * R + o_m % R
    # strides come in units of UNIT elements: the product tells the compiler how rows are aligned
    stride_kt *= UNIT
    stride_vt *= UNIT
    k_ptr += (i_kb * stride_kb + i_u // share * stride_kh) * UNIT + begin_k * stride_kt
    v_ptr += (i_kb * stride_vb + i_u // share * stride_vh) * UNIT + begin_k * stride_vt
    i_t = begin + row + o_q
    b_q = rows_at(
        q_ptr + (i_b * stride_qb + i_t * stride_qt + i_h * stride_qh) * UNIT, m_m, o_d, D, BD
    )
    i_o = (i_b * T + i_t) * H + i_h
    if do_ptr is None:
        b_m = tl.full((BM,), float("-inf"), tl.float32)
        b_l = tl.zeros((BM,), tl.float32)
        b_o = tl.zeros((BM, BV), tl.float32)
    else:
        b_do = rows_at(do_ptr + i_o * DV, m_m, o_v, DV, BV)
        # base (lse in base 2) and delta, in rows of a multiple of 4
        i_r = (i_b * H + i_h) * (tl.cdiv(T, 4) * 4) + i_t
        b_base = tl.load(base_ptr + i_r, mask=m_m, other=float("inf"))
        b_delta = tl.load(delta_ptr + i_r, mask=m_m, other=0.0)
        b_dq = tl.zeros((BM, BD), tl.float32)
    b_p = (row + shift + o_q)[:, None]
    i_l = i_n * 0 + tile if PACKED_Q else i_n * tiles + tile
    i_l = i_l * G + (i_u % G).to(tl.int32)
    merged_ptr += i_l.to(tl.int64) * W
    bits_ptr += i_l.to(tl.int64) * W
    TWO_TERMS: tl.constexpr = D % 8 != 0 or DV % 8 != 0
    for loop in tl.static_range(0 if TAIL or HAS_WINDOW else 1, 2):
        if loop == 0:
            last = tl.minimum(row + QT, queries) - 1 + shift
            start, end = _near_range(row + shift, last, left, right, keys, BLOCK, TAIL, HAS_WINDOW)
        else:
            start = row * 0
            end = tl.load(counts_ptr + i_l) * BLOCK
        # an entry is there a turn before its keys are wanted: their loads need not wait for it
        b_s, b_bits = keys_of(merged_ptr, bits_ptr, start, end, o_n, loop == 0, BLOCK, BN)
        for i in range(tl.cdiv(end - start, BN)):
            o_e = start + i * BN + o_n
            b_s0, b_bits0 = b_s, b_bits
            b_s, b_bits = keys_of(
                merged_ptr, bits_ptr, start + i * BN + BN, end, o_n, loop == 0, BLOCK, BN
            )
            m_n = (o_e < end) & (b_s0 < keys)
            at = b_s0.to(tl.int64)
            b_k = rows_at(k_ptr + at * stride_kt, m_n, o_d, D, BD)
            b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
            b_listed = (b_bits0[None, :] >> o_q[:, None]) & 1 != 0
            m_x = seen(
                b_p,
                b_s0[None, :],
                b_listed,
                m_n[None, :],
                left,
                right,
                loop == 0,
                BLOCK,
                CAUSAL,
                TAIL,
                HAS_WINDOW,
            )
            b_x = tl.where(m_x, b_x, float("-inf"))
            b_v = rows_at(v_ptr + at * stride_vt, m_n, o_v, DV, BV)
            if do_ptr is None:
                b_top = tl.maximum(b_m, tl.max(b_x, 1) * factor)
                b_w = tl.exp2(b_x * factor - finite(b_top)[:, None])
                b_shrink = tl.exp2(b_m - finite(b_top))
                b_l = b_l * b_shrink + tl.sum(b_w, 1)
                b_m = b_top
                b_o *= b_shrink[:, None]
                b_o = tl.dot(b_w.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)
            else:
                b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
                b_dx = tl.exp2(b_x * factor - b_base[:, None]) * (b_dp - b_delta[:, None])
                b_dq = add_product(b_dq, b_dx, b_k, TWO_TERMS, PRECISION)
    if do_ptr is None:
        if HAS_SINKS:
            b_sink = tl.load(sinks_ptr + i_h).to(tl.float32) * LOG2E
            b_top = tl.maximum(b_m, b_sink)
            b_shrink = tl.exp2(b_m - finite(b_top))
            b_l = b_l * b_shrink + tl.exp2(b_sink - finite(b_top))
            b_o *= b_shrink[:, None]
            b_m = b_top
        has_no_key = b_l == 0.0
        b_l = tl.where(has_no_key, 1.0, b_l)
        b_lse = tl.where(has_no_key, float("-inf"), (b_m + tl.log2(b_l)) * LN2)
        b_o *= (1.0 / b_l)[:, None]
        p_o = o_ptr + i_o[:, None] * DV + o_v[None, :]
        tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=m_m[:, None] & (o_v < DV)[None, :])
        tl.store(lse_ptr + (i_b * H + i_h) * T + i_t, b_lse, mask=m_m)
    else:
        p_dq = dq_ptr + i_o[:, None] * D + o_d[None, :]
        b_dq = (b_dq * scale).to(dq_ptr.dtype.element_ty)
        tl.store(p_dq, b_dq, mask=m_m[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def selected_keys_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,  # [B, T, H, DV]
    dk_ptr,  # [KB, S, HKV, D]
    dv_ptr,  # [KB, S, HKV, DV]
    base_ptr,
    delta_ptr,
    named_ptr,  # the rows of queries that name a tile of SB keys, by list, tile and row
    bits_ptr,  # with the blocks that they name in it
    starts_ptr,  # [G * total + 1]: where those of each list and tile begin
    cu_q_ptr,
    cu_k_ptr,
    lengths_ptr,
    factor,
    scale,
    T,
    S,
    H,
    units,
    share,
    G,
    N,
    tiles,
    search_steps,
    total,
    left,
    right,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    QT: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UNIT: tl.constexpr,
    SB: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DK: tl.constexpr,
    HAS_DV: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (tiles * HKV * N,), or (tiles * HKV,) packed: BN keys of a head, QT queries at a time.

    Registers may not hold the sums of both: then a launch makes dk, and another dv.
    """
    pid = tl.program_id(0)
    HKV = units // share
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
    stride_kt *= UNIT
    stride_vt *= UNIT
    k_ptr += (i_kb * stride_kb + i_kv * stride_kh) * UNIT + (begin_k + row) * stride_kt
    v_ptr += (i_kb * stride_vb + i_kv * stride_vh) * UNIT + (begin_k + row) * stride_vt
    m_n = row + o_n < keys
    b_k = rows_at(k_ptr + o_n * stride_kt, m_n, o_d, D, BD)  # [BN, BD]
    if HAS_DK:
        b_v = rows_at(v_ptr + o_n * stride_vt, m_n, o_v, DV, BV)  # [BN, BV]
        b_dk = tl.zeros((BD, BN), tl.float32)
    if HAS_DV:
        b_dv = tl.zeros((BV, BN), tl.float32)
    b_s = (row + o_n)[None, :]
    # of the tile of SB keys among all, and each key's block in it
    if PACKED_K:
        i_s = (begin_k // SB).to(tl.int32) + i_n + row // SB
    else:
        i_s = i_n * tl.cdiv(S, SB) + row // SB
    o_bit = (row % SB + o_n) // BLOCK
    # the first of this sequence's rows of queries among all
    i_first = ((begin + i_n) if PACKED_Q else i_b * T).to(tl.int32)
    TWO_TERMS: tl.constexpr = D % 8 != 0 or DV % 8 != 0
    for i_share in range(share):
        i_u = i_kv * share + i_share
        i_h = (i_u * R).to(tl.int32) + o_m % R
        p_starts = starts_ptr + (i_u % G) * total + i_s
        for loop in tl.static_range(0 if TAIL or HAS_WINDOW else 1, 2):
            if loop == 0:
                last = tl.minimum(row + BN, keys) - 1
                start, end = _near_range(
                    row - shift, last - shift, right, left, queries, 1, False, HAS_WINDOW
                )
                if TAIL:
                    low = tl.maximum(row - shift, 0)
                    high = tl.minimum((last // BLOCK + 1) * BLOCK - 1 - shift, queries)
                    start = tl.minimum(start, low) if HAS_WINDOW else low
                    end = tl.maximum(end, high)
                end = tl.where(row < keys, end, 0)
            else:
                start = tl.load(p_starts)
                end = tl.where(row < keys, tl.load(p_starts + 1), 0)
            b_next = start + o_m // R
            b_next_bits = b_next
            if loop == 1:
                m_m = b_next < end
                b_next_bits = tl.load(bits_ptr + b_next, mask=m_m, other=0)
                b_next = tl.load(named_ptr + b_next, mask=m_m, other=0)
            for i in range(tl.cdiv(end - start, QT)):
                o_e = start + i * QT + o_m // R
                m_m = (o_e < end) & (o_m // R < QT)
                b_t, b_bits = b_next, b_next_bits
                b_next = o_e + QT
                if loop == 1:
                    # a turn before their rows are wanted, whose loads need not wait for it
                    b_t = b_t - i_first
                    b_next_bits = tl.load(bits_ptr + o_e + QT, mask=o_e + QT < end, other=0)
                    b_next = tl.load(named_ptr + o_e + QT, mask=o_e + QT < end, other=0)
                i_t = begin + b_t
                p_q = q_ptr + (i_b * stride_qb + i_t * stride_qt + i_h * stride_qh) * UNIT
                b_q = rows_at(p_q, m_m, o_d, D, BD)  # [BM, BD]
                b_do = rows_at(do_ptr + ((i_b * T + i_t) * H + i_h) * DV, m_m, o_v, DV, BV)
                i_r = (i_b * H + i_h) * (tl.cdiv(T, 4) * 4) + i_t
                b_base = tl.load(base_ptr + i_r, mask=m_m, other=float("inf"))
                # a row's numbers are few in a thread where rows are queries, as gathers want it
                b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
                b_p = (b_t + shift)[:, None]
                b_listed = (b_bits[:, None] >> o_bit[None, :]) & 1 != 0
                m_x = seen(
                    b_p,
                    b_s,
                    b_listed,
                    m_m[:, None] & m_n[None, :],
                    left,
                    right,
                    loop == 0,
                    BLOCK,
                    CAUSAL,
                    TAIL,
                    HAS_WINDOW,
                )
                b_w = tl.exp2(tl.where(m_x, b_x * factor, float("-inf")) - b_base[:, None])
                if HAS_DV:
                    b_dv = tl.dot(
                        tl.trans(b_do), b_w.to(b_do.dtype), b_dv, input_precision=PRECISION
                    )
                if HAS_DK:
                    b_delta = tl.load(delta_ptr + i_r, mask=m_m, other=0.0)
                    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)  # [BM, BN]
                    b_dx = b_w * (b_dp - b_delta[:, None])
                    b_high = b_dx.to(b_q.dtype)
                    b_dk = tl.dot(tl.trans(b_q), b_high, b_dk, input_precision=PRECISION)
                    if TWO_TERMS and b_q.dtype.primitive_bitwidth == 16:
                        b_low = (b_dx - b_high.to(tl.float32)).to(b_q.dtype)
                        b_dk = tl.dot(tl.trans(b_q), b_low, b_dk, input_precision=PRECISION)
    i_k = ((i_kb * S + begin_k + row + o_n) * HKV + i_kv)[:, None]
    m_k = (row + o_n < capacity)[:, None]
    if HAS_DK:
        b_dk = tl.trans((b_dk * scale).to(dk_ptr.dtype.element_ty))
        tl.store(dk_ptr + i_k * D + o_d[None, :], b_dk, mask=m_k & (o_d < D)[None, :])
    if HAS_DV:
        b_dv = tl.trans(b_dv.to(dv_ptr.dtype.element_ty))
        tl.store(dv_ptr + i_k * DV + o_v[None, :], b_dv, mask=m_k & (o_v < DV)[None, :])
