"""Gradients of heads wider than 256: weights and their gradients in memory, then plain products.

    p_ts = exp(x_ts - lse_t)      dx_ts = p_ts (do_t . v_s - delta_t)      in 16 bits, in memory
    dq_t = scale sum_s dx_ts k_s      dk_s = scale sum_t dx_ts q_t      dv_s = sum_t p_ts do_t

dk and dv of 64 keys would take all registers of a multiprocessor, and kernels for each of dq, dk
and dv would make the scores again: eight products. Here they are made once, five products, for
10 bytes of traffic a pair of query and key, little beside its 10 D operations. A launch has some
pairs of sequence and head of keys, and some tiles of their queries, as many as the workspace holds
(wide_launch.py).

Workspace [heads, rows, columns]: a row is a query of the launch's tiles of BM, a column a key of
its sequence. A tile that sees none of BN keys is neither written nor read there.
"""

import triton
import triton.language as tl

from slipstream.kernels.attention.triton.scores import (
    in_window,
    keep_mask,
    rows_of_sequence,
    scores,
    sequence_of_tile,
    visible_tiles,
)
from slipstream.kernels.attention.triton.softmax import ALIGN, UNSPECIALIZED
from slipstream.kernels.primitives.device import LOG2E

NUMBERS = [*UNSPECIALIZED, "first_pair", "first_tile", "rows", "column_tiles", "heads"]
NUMBERS += ["adds", "keeps", "stride_yb", "stride_yt", "stride_yh"]


@triton.jit
def _columns_of(p, m_row, o_c, C: tl.constexpr, BC: tl.constexpr, begin):
    """Columns begin + o_c of rows at p [B, 1], zero outside of m_row and C."""
    if C % BC == 0:
        b = tl.load(p + begin + o_c[None, :], mask=m_row[:, None], other=0.0)
    else:
        m = m_row[:, None] & (o_c < C - begin)[None, :]
        b = tl.load(p + begin + o_c[None, :], mask=m, other=0.0)
    return b


@triton.jit
def _product(
    acc, p_x, p_y, m_x, m_y, o_k, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):
    """acc + x y^T of rows at p_x and p_y, over C columns."""
    for begin in range(0, C, BK):
        b_x = _columns_of(p_x, m_x, o_k, C, BK, begin)
        b_y = _columns_of(p_y, m_y, o_k, C, BK, begin)
        acc = tl.dot(b_x, tl.trans(b_y), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=NUMBERS)
def softmax_weights_kernel(
    q_ptr, k_ptr, v_ptr,  # [., ., ., .] by strides, in units of UNIT elements
    do_ptr,  # [B, T, H, DV]
    p_ptr,  # [heads, rows * BM, columns], with dropout's factors
    dx_ptr,  # the same
    base_ptr,  # [B, H, R], R = T rounded up to ALIGN
    delta_ptr,  # [B, H, R]
    slopes_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, seed_ptr,
    threshold, keep_scale, factor, cap, T, S, H, N, search_steps, left, right, group, stride_slope,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt,
    stride_vh,
    first_pair, first_tile,  # the launch's first pair of sequence and head, and tile of queries
    rows,  # tiles of queries
    column_tiles,  # of BN
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    UNIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PACKED_Q: tl.constexpr, PACKED_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (columns / BN * rows * heads,): p and dx of BM queries and BN keys."""
    pid = tl.program_id(0)
    columns = column_tiles * BN
    j = pid % column_tiles * BN
    i_w = pid // column_tiles // rows  # head of the launch
    at_tile = pid // column_tiles % rows
    pair = first_pair + i_w // group
    HKV = H // group
    i_n, row = sequence_of_tile(
        first_tile + at_tile, pair // HKV, cu_q_ptr, N, search_steps, BM, PACKED_Q
    )
    i_kv = (pair % HKV).to(tl.int64)
    i_h = i_kv * group + i_w % group
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, lengths_ptr, T, PACKED_Q, False)
    i_kb, begin_k, _, keys = rows_of_sequence(i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS)
    shift = keys - queries
    sees = (row < queries) & (j < keys)
    if HAS_LEFT:
        sees = sees & (j + BN - 1 >= row + shift - left)
    if HAS_RIGHT:
        sees = sees & (j <= row + BM - 1 + shift + right)
    if sees:
        o_m = tl.arange(0, BM)
        o_n = tl.arange(0, BN)
        o_k = tl.arange(0, BK)
        m_m = o_m < queries - row
        m_n = o_n < keys - j
        stride_qt *= UNIT
        stride_kt *= UNIT
        stride_vt *= UNIT
        p_q = q_ptr + (i_b * stride_qb + i_h * stride_qh) * UNIT + (begin + row) * stride_qt
        p_k = k_ptr + (i_kb * stride_kb + i_kv * stride_kh) * UNIT + (begin_k + j) * stride_kt
        p_v = v_ptr + (i_kb * stride_vb + i_kv * stride_vh) * UNIT + (begin_k + j) * stride_vt
        p_do = do_ptr + ((i_b * T + begin + row) * H + i_h) * DV
        i_r = (i_b * H + i_h) * (tl.cdiv(T, ALIGN) * ALIGN) + begin + row
        b_base = tl.load(base_ptr + i_r + o_m, mask=m_m, other=float("inf"))
        b_delta = tl.load(delta_ptr + i_r + o_m, mask=m_m, other=0.0)
        b_s = _product(
            tl.zeros((BM, BN), tl.float32), p_q + o_m[:, None] * stride_qt,
            p_k + o_n[:, None] * stride_kt, m_m, m_n, o_k, D, BK, PRECISION,
        )  # fmt: skip
        position = row + shift + o_m
        age = position[:, None] - (j + o_n)[None, :]
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + i_n.to(tl.int64) * stride_slope + i_h) * LOG2E
        b_s, b_t = scores(b_s, factor, cap, slope, age, b_s, HAS_SOFTCAP, HAS_SLOPES, False)
        score_scale = 1.0 if HAS_SOFTCAP or HAS_SLOPES else factor
        m_s = in_window(age, left, right, HAS_LEFT, HAS_RIGHT) & m_n[None, :]
        b_p = tl.where(m_s, tl.exp2(b_s * score_scale - b_base[:, None]), 0.0)
        b_dp = _product(
            tl.zeros((BM, BN), tl.float32), p_do + o_m[:, None] * (H * DV),
            p_v + o_n[:, None] * stride_vt, m_m, m_n, o_k, DV, BK, PRECISION,
        )  # fmt: skip
        b_weight = b_p
        if HAS_DROPOUT:
            b_keep = keep_mask(seed_ptr, j, position, i_h, i_n, threshold, BN, False)
            b_weight = tl.where(b_keep, b_p * keep_scale, 0.0)
            b_dp = tl.where(b_keep, b_dp * keep_scale, 0.0)
        b_dx = b_p * (b_dp - b_delta[:, None])
        if HAS_SOFTCAP:
            b_dx *= 1.0 - b_t * b_t
        to = (i_w.to(tl.int64) * rows + at_tile) * BM * columns + j
        o_w = o_m[:, None] * columns + o_n[None, :]
        tl.store(p_ptr + to + o_w, b_weight.to(p_ptr.dtype.element_ty))
        tl.store(dx_ptr + to + o_w, b_dx.to(dx_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=NUMBERS)
def softmax_wide_dq_kernel(
    dx_ptr,  # [heads, rows * BM, columns]
    k_ptr,  # [KB, S, HKV, D] by strides, in units of UNIT elements
    dq_ptr,  # [B, T, H, D]
    cu_q_ptr, cu_k_ptr, lengths_ptr,
    scale, T, S, H, N, search_steps, left, right, group, stride_kb, stride_kt, stride_kh,
    first_pair, first_tile, rows, column_tiles,
    heads,  # of the launch
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
    UNIT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, PACKED_Q: tl.constexpr, PACKED_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (columns of D / BC * heads * rows,): dq of BM queries, BS keys at a time."""
    pid = tl.program_id(0)
    columns = column_tiles * BN
    BLOCKS: tl.constexpr = (D + BC - 1) // BC
    i_c = pid % BLOCKS * BC
    i_w = pid // BLOCKS % heads
    # the last tiles see the most of a causal sequence, and go first
    at_tile = rows - 1 - pid // BLOCKS // heads
    pair = first_pair + i_w // group
    HKV = H // group
    i_n, row = sequence_of_tile(
        first_tile + at_tile, pair // HKV, cu_q_ptr, N, search_steps, BM, PACKED_Q
    )
    i_kv = (pair % HKV).to(tl.int64)
    i_h = i_kv * group + i_w % group
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, lengths_ptr, T, PACKED_Q, False)
    i_kb, begin_k, _, keys = rows_of_sequence(i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS)
    shift = keys - queries
    low, _, _, high = visible_tiles(
        row + shift,
        tl.minimum(row + BM, queries) - 1 + shift,
        tl.where(row < queries, keys, 0),
        left,
        right,
        BN,
        HAS_LEFT,
        HAS_RIGHT,
    )
    o_m = tl.arange(0, BM)
    o_s = tl.arange(0, BS)
    o_c = tl.arange(0, BC)
    stride_kt *= UNIT
    p_k = k_ptr + (i_kb * stride_kb + i_kv * stride_kh) * UNIT + begin_k * stride_kt
    p_x = dx_ptr + (i_w.to(tl.int64) * rows + at_tile) * BM * columns
    p_x += o_m[:, None] * columns + o_s[None, :]
    b_dq = tl.zeros((BM, BC), tl.float32)
    for i in range(tl.cdiv(high - low, BS)):
        j = low + i * BS
        b_x = tl.load(p_x + j)
        p = p_k + j.to(tl.int64) * stride_kt + o_s[:, None] * stride_kt
        b_k = _columns_of(p, o_s < keys - j, o_c, D, BC, i_c)
        b_dq = tl.dot(b_x, b_k, b_dq, input_precision=PRECISION)
    m_q = (o_m < queries - row)[:, None] & (i_c + o_c < D)[None, :]
    p_dq = dq_ptr + ((i_b * T + begin + row) * H + i_h) * D + i_c
    p_dq += o_m[:, None] * (H * D) + o_c[None, :]
    tl.store(p_dq, (b_dq * scale).to(dq_ptr.dtype.element_ty), mask=m_q)


@triton.jit(do_not_specialize=NUMBERS)
def softmax_wide_dkv_kernel(
    x_ptr,  # [heads, rows * BM, columns]: dx for dk, p for dv
    y_ptr,  # [B, T, H, D]: q or do, by strides in units of UNIT elements
    out_ptr,  # [KB, S, HKV, D]: dk or dv
    sums_ptr,  # [pairs, keys of a pair, D], float32: of the tiles of queries of launches before
    cu_q_ptr, cu_k_ptr, lengths_ptr,
    scale, T, S, H, N, tiles, search_steps, left, right, group, stride_yb, stride_yt, stride_yh,
    first_pair, first_tile, rows, column_tiles,
    adds,  # 1: there are such sums
    keeps,  # 1: sums are for the next launch too
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
    UNIT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, PACKED_Q: tl.constexpr, PACKED_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (columns of D / BC * tiles of keys * pairs,): BN keys, BS queries at a time of the heads
    that share them. tiles: of keys of a pair, of all sequences where queries are packed."""
    pid = tl.program_id(0)
    columns = column_tiles * BN
    BLOCKS: tl.constexpr = (D + BC - 1) // BC
    i_c = pid % BLOCKS * BC
    i_p = pid // BLOCKS // tiles
    tile = pid // BLOCKS % tiles
    pair = first_pair + i_p
    HKV = H // group
    i_n = pair // HKV
    if PACKED_Q and not PACKED_K:
        # the keys of each sequence are a row
        steps = tl.cdiv(S, BN)
        i_n = tile // steps
        tile = tile % steps
    i_n, row = sequence_of_tile(tile, i_n, cu_k_ptr, N, search_steps, BN, PACKED_K)
    i_kv = (pair % HKV).to(tl.int64)
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, lengths_ptr, T, PACKED_Q, False)
    i_kb, begin_k, capacity, keys = rows_of_sequence(
        i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS
    )
    shift = keys - queries
    low, _, _, high = visible_tiles(
        row - shift, tl.minimum(row + BN, keys) - 1 - shift, tl.where(row < keys, queries, 0),
        right, left, BM, HAS_RIGHT, HAS_LEFT,
    )  # fmt: skip
    # of these the rows that the launch has; the tiles of packed queries begin as scores.py says
    first_row = first_tile * BM
    if PACKED_Q:
        first_row -= ((begin // BM).to(tl.int32) + i_n) * BM
    low = tl.maximum(low, first_row)
    high = tl.minimum(high, first_row + rows * BM)
    o_n = tl.arange(0, BN)
    o_s = tl.arange(0, BS)
    o_c = tl.arange(0, BC)
    stride_yt *= UNIT
    m_c = (i_c + o_c < D)[None, :]
    m_n = (o_n < capacity - row)[:, None] & m_c
    at = begin_k + row
    if PACKED_Q and not PACKED_K:
        at += i_kb * S
    # of keys of a pair
    size = S.to(tl.int64)
    if PACKED_Q and not PACKED_K:
        size *= N
    p_sums = sums_ptr + (i_p * size + at) * D + i_c + o_n[:, None] * D + o_c[None, :]
    b_acc = tl.load(p_sums, mask=m_n & (adds != 0), other=0.0)
    for i_g in range(group):
        p_y = y_ptr + (i_b * stride_yb + (i_kv * group + i_g) * stride_yh) * UNIT
        p_y += begin * stride_yt
        p_x = x_ptr + (i_p * group + i_g).to(tl.int64) * rows * BM * columns + row
        p_x += o_s[:, None] * columns + o_n[None, :]
        for i in range(tl.cdiv(high - low, BS)):
            r = low + i * BS
            b_x = tl.load(p_x + (r - first_row).to(tl.int64) * columns)  # [BS, BN]
            p = p_y + r.to(tl.int64) * stride_yt + o_s[:, None] * stride_yt
            b_y = _columns_of(p, o_s < queries - r, o_c, D, BC, i_c)
            b_acc = tl.dot(tl.trans(b_x), b_y, b_acc, input_precision=PRECISION)
    tl.store(p_sums, b_acc, mask=m_n & (keeps != 0))
    p_out = out_ptr + ((i_kb * S + begin_k + row) * HKV + i_kv) * D + i_c
    p_out += o_n[:, None] * (HKV * D) + o_c[None, :]
    tl.store(p_out, (b_acc * scale).to(out_ptr.dtype.element_ty), mask=m_n)
