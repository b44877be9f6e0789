"""Gradients of keys in small blocks: a tile of queries makes those of each entry of its lists, and
those of a block are then added up, each block's in the order of the tiles.

    for entries first .. until of all tiles' lists:
        entries kernel: a tile's queries stay, keys of its entries are gathered: dk, dv of each
        add kernel:     a block's keys stay, and what its entries have is gathered
"""

import triton
import triton.language as tl

from slipstream.kernels.attention.triton.scores import (
    add_product,
    rows_of_sequence,
    sequence_of_tile,
)
from slipstream.kernels.selected_attention.triton_kernels import (
    SIZES,
    UNSPECIALIZED,
    keys_of,
    rows_at,
    seen,
)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "first", "until", "most", "list_steps"])
def selected_entries_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,  # [B, T, H, DV]
    sums_ptr,  # [units / G, most, BLOCK, D + DV]: dk and dv of an entry, by a tile's queries
    base_ptr,
    delta_ptr,
    merged_ptr,
    bits_ptr,  # [rows of tiles, G, W], of QT queries
    offsets_ptr,  # [rows of tiles * G + 1]: of each list's first entry among those of all lists
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
    list_steps,  # 2^list_steps >= lists
    total,  # lists
    first,
    until,
    most,
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
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (most / SPAN, units / G): SPAN of the entries first .. until of all lists, which
    may be of several tiles of queries."""
    at = first + tl.program_id(0) * SPAN
    end = tl.minimum(at + SPAN, tl.load(offsets_ptr + total))
    end = tl.minimum(end, until)
    p = tl.program_id(1)
    # the list of entry `at`
    i_l = total * 0
    high = total
    for _ in range(list_steps):
        middle = (i_l + high) // 2
        before = tl.load(offsets_ptr + middle) <= at
        i_l = tl.where(before, middle, i_l)
        high = tl.where(before, high, middle)
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_v = tl.arange(0, BV)
    o_q = o_m // R
    stride_kt *= UNIT
    stride_vt *= UNIT
    TWO_TERMS: tl.constexpr = D % 8 != 0 or DV % 8 != 0
    while at < end:
        begin_l = tl.load(offsets_ptr + i_l)
        stop = tl.minimum(tl.load(offsets_ptr + i_l + 1), end)
        tile = i_l // G
        i_u = (i_l % G * (units // G) + p).to(tl.int64)
        i_n, row = sequence_of_tile(
            tile % tiles, tile // tiles, cu_q_ptr, N, search_steps, QT, PACKED_Q
        )
        i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, lengths_ptr, T, PACKED_Q, False)
        i_kb, begin_k, _, keys = rows_of_sequence(
            i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS
        )
        m_m = (row + o_q < queries) & (o_q < QT)
        i_h = i_u * R + o_m % R
        i_t = begin + row + o_q
        b_q = rows_at(
            q_ptr + (i_b * stride_qb + i_t * stride_qt + i_h * stride_qh) * UNIT, m_m, o_d, D, BD
        )
        b_do = rows_at(do_ptr + ((i_b * T + i_t) * H + i_h) * DV, m_m, o_v, DV, BV)
        i_r = (i_b * H + i_h) * (tl.cdiv(T, 4) * 4) + i_t
        b_base = tl.load(base_ptr + i_r, mask=m_m, other=float("inf"))
        b_delta = tl.load(delta_ptr + i_r, mask=m_m, other=0.0)
        b_p = (row + keys - queries + o_q)[None, :]
        p_k = k_ptr + (i_kb * stride_kb + i_u // share * stride_kh) * UNIT + begin_k * stride_kt
        p_v = v_ptr + (i_kb * stride_vb + i_u // share * stride_vh) * UNIT + begin_k * stride_vt
        p_merged = merged_ptr + i_l.to(tl.int64) * W
        p_bits = bits_ptr + i_l.to(tl.int64) * W
        start = (at - begin_l) * BLOCK
        last = (stop - begin_l) * BLOCK
        p_sums = sums_ptr + (p.to(tl.int64) * most + begin_l - first) * BLOCK * (D + DV)
        b_s, b_bits = keys_of(p_merged, p_bits, start, last, o_n, False, BLOCK, BN)
        for i in range(tl.cdiv(last - start, BN)):
            o_e = start + i * BN + o_n
            b_s0, b_bits0 = b_s, b_bits
            b_s, b_bits = keys_of(
                p_merged, p_bits, start + i * BN + BN, last, o_n, False, BLOCK, BN
            )
            m_n = (o_e < last) & (b_s0 < keys)
            i_s = b_s0.to(tl.int64)
            b_k = rows_at(p_k + i_s * stride_kt, m_n, o_d, D, BD)
            b_v = rows_at(p_v + i_s * stride_vt, m_n, o_v, DV, BV)
            b_x = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BM]
            b_listed = (b_bits0[:, None] >> o_q[None, :]) & 1 != 0
            m_x = seen(
                b_p,
                b_s0[:, None],
                b_listed,
                m_n[:, None] & m_m[None, :],
                left,
                right,
                False,
                BLOCK,
                CAUSAL,
                TAIL,
                HAS_WINDOW,
            )
            b_w = tl.exp2(tl.where(m_x, b_x * factor, float("-inf")) - b_base[None, :])
            b_dv = tl.dot(b_w.to(b_do.dtype), b_do, input_precision=PRECISION)  # [BN, BV]
            p_out = p_sums + o_e.to(tl.int64)[:, None] * (D + DV)
            m_out = (o_e < last)[:, None]
            tl.store(
                p_out + D + o_v[None, :],
                b_dv.to(sums_ptr.dtype.element_ty),
                mask=m_out & (o_v < DV)[None, :],
            )
            b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
            b_dx = b_w * (b_dp - b_delta[None, :])
            b_dk = tl.zeros((BN, BD), tl.float32)
            b_dk = add_product(b_dk, b_dx, b_q, TWO_TERMS, PRECISION) * scale
            tl.store(
                p_out + o_d[None, :],
                b_dk.to(sums_ptr.dtype.element_ty),
                mask=m_out & (o_d < D)[None, :],
            )
        at = tl.maximum(stop, at)
        i_l += 1


@triton.jit(do_not_specialize=[*SIZES, "first", "until", "most", "lists"])
def selected_add_entries_kernel(
    sums_ptr,  # [units / G, most, BLOCK, D + DV]
    dk_ptr,  # float32 [KB, S, HKV, D]
    dv_ptr,  # float32 [KB, S, HKV, DV]
    named_ptr,  # the entries of all lists by the block that they name, each block's in order
    starts_ptr,  # [G * total + 1]: where those of each list's block begin
    next_ptr,  # [units, total]: the first of them that is not added yet
    offsets_ptr,  # [lists + 1]: of each list's first entry among those of all lists
    cu_k_ptr,
    lengths_ptr,
    S,
    units,
    share,
    G,
    N,
    tiles,
    search_steps,
    total,  # blocks
    until,
    first,
    most,
    lists,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PACKED_K: tl.constexpr,
):
    """grid (total, HKV): adds to a block's gradients those that its entries among first .. until
    have, ROWS keys at a time, in their order."""
    i_j = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_n, row = sequence_of_tile(
        i_j % tiles, i_j // tiles, cu_k_ptr, N, search_steps, BLOCK, PACKED_K
    )
    i_kb, begin_k, capacity, _ = rows_of_sequence(
        i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS
    )
    o_w = tl.arange(0, 64)
    o_e = tl.arange(0, ROWS) // BLOCK
    o_b = tl.arange(0, BLOCK)
    o_d = tl.arange(0, BD)
    o_v = tl.arange(0, BV)
    m_b = (row + o_b < capacity)[:, None]
    i_k = (i_kb * S + begin_k + row + o_b) * tl.num_programs(1) + i_kv
    p_dk = dk_ptr + i_k[:, None] * D + o_d[None, :]
    p_dv = dv_ptr + i_k[:, None] * DV + o_v[None, :]
    U = units // G
    b_dk = tl.zeros((BLOCK, BD), tl.float32)
    b_dv = tl.zeros((BLOCK, BV), tl.float32)
    added = total * 0
    # the host knows a bound of the entries alone: many a launch has none
    there_are = (tl.load(offsets_ptr + lists) > first).to(tl.int32)
    for i_share in range(share * there_are):
        i_u = i_kv * share + i_share
        p_next = next_ptr + i_u * total + i_j
        start = tl.load(p_next)
        end = tl.load(starts_ptr + i_u // U * total + i_j + 1)
        stop = start
        count = start * 0 + 64
        while count == 64:
            b_at = tl.load(named_ptr + stop + o_w, mask=stop + o_w < end, other=2147483647)
            count = tl.sum((b_at < until).to(tl.int32), 0)
            stop += count
        added += stop - start
        if stop > start:
            p_sums = sums_ptr + (i_u % U).to(tl.int64) * most * BLOCK * (D + DV)
            for i in range(start, stop, ROWS // BLOCK):
                m_e = (i + o_e < stop)[:, None]
                b_at = tl.load(named_ptr + i + o_e, mask=i + o_e < stop, other=0) - first
                i_r = b_at.to(tl.int64) * BLOCK + tl.arange(0, ROWS) % BLOCK
                p_r = p_sums + i_r[:, None] * (D + DV)
                b_k = tl.load(p_r + o_d[None, :], mask=m_e & (o_d < D)[None, :], other=0.0)
                b_v = tl.load(p_r + D + o_v[None, :], mask=m_e & (o_v < DV)[None, :], other=0.0)
                b_dk += tl.sum(tl.reshape(b_k.to(tl.float32), [ROWS // BLOCK, BLOCK, BD]), 0)
                b_dv += tl.sum(tl.reshape(b_v.to(tl.float32), [ROWS // BLOCK, BLOCK, BV]), 0)
            tl.store(p_next, stop)
    if added > 0:
        m_k = m_b & (o_d < D)[None, :]
        m_v = m_b & (o_v < DV)[None, :]
        tl.store(p_dk, tl.load(p_dk, mask=m_k, other=0.0) + b_dk, mask=m_k)
        tl.store(p_dv, tl.load(p_dv, mask=m_v, other=0.0) + b_dv, mask=m_v)
