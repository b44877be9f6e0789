"""Attention of few queries to a long cache: each program takes a share of the keys.

The queries of the heads that read one head of keys are rows of one tile: row r is query r / group
of head r % group. Each share leaves o and lse of its keys, and the second kernel joins them:

    lse = log sum_i exp(lse_i)      o = sum_i exp(lse_i - lse) o_i      with the sink as one more

How many shares depends on the size of the cache, not on the lengths, which the programs read.
Rows and pages outside of the `slots` that the cache has are not read, and hold no keys.

Keys and values in 8 bits have a scale each. For queries in 16 bits they are loaded as words of four
channels (decode_words.py): every product is then four, each of a quarter of the channels.
"""

import triton
import triton.language as tl

from slipstream.kernels.attention.triton.decode_words import channels, load_queries
from slipstream.kernels.attention.triton.scores import finite, in_window, scores
from slipstream.kernels.primitives.device import LN2, LOG2E

SIZES = ["T", "HKV", "B", "tiles", "splits", "left", "right", "group", "capacity", "cache_rows"]
SIZES += ["stride_slope"]
STRIDES = [f"stride_{x}{i}" for x in "qkv" for i in "bth"]

# what probabilities times a tile's largest scale of values are at most: float16 holds twice that
LARGEST = tl.constexpr(2.0**15)


@triton.jit
def factors_of_values(b_scale):
    """Factors of probabilities instead of their values' scales [BN], which the dtype of the product
    may not hold, and what the product is multiplied with after that."""
    unit = tl.max(b_scale, 0)
    return b_scale * (LARGEST / tl.where(unit == 0.0, 1.0, unit)), unit / LARGEST


@triton.jit
def pages_of(j, keys, o_n, p_table, PAGE: tl.constexpr, BN: tl.constexpr):
    """The pages of keys j + o_n, j a multiple of BN: one for all of them, or [BN]."""
    if PAGE == 0:
        page = j
    elif PAGE % BN == 0:
        page = tl.load(p_table + j // PAGE, mask=j < keys, other=0)
    else:
        page = tl.load(p_table + (j + o_n) // PAGE, mask=o_n < keys - j, other=0)
    return page


@triton.jit
def offsets_of_keys(stride_b, stride_t, j, o_n, page, PAGE: tl.constexpr, BN: tl.constexpr):
    """Offsets of keys j + o_n [BN], from a sequence's first key, or from page 0."""
    if PAGE == 0:
        row = j.to(tl.int64) * stride_t + o_n * stride_t
    elif PAGE % BN == 0:
        row = page.to(tl.int64) * stride_b + (j % PAGE) * stride_t + o_n * stride_t
    else:
        row = page.to(tl.int64) * stride_b + ((j + o_n) % PAGE) * stride_t
    return row


@triton.jit
def rows_of_keys(p, stride_b, stride_t, j, o_n, page, PAGE: tl.constexpr, BN: tl.constexpr):
    """Pointers [BN, 1] to keys j + o_n of a sequence whose first key, or page, is at p."""
    return p + offsets_of_keys(stride_b, stride_t, j, o_n, page, PAGE, BN)[:, None]


@triton.jit
def place_of(
    lengths_ptr, rows_ptr, leftpad_ptr, HKV, tiles, splits, capacity, cache_rows,
    HAS_LENGTHS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LEFTPAD: tl.constexpr,
):  # fmt: skip
    """This program's share, tile of queries, head of keys and sequence; where the sequence's keys
    are, before how many of them it begins, and how many it has."""
    pid = tl.program_id(0)
    i_s = pid % splits
    tile = pid // splits % tiles
    i_kv = (pid // splits // tiles % HKV).to(tl.int64)
    i_b = (pid // splits // tiles // HKV).to(tl.int64)
    i_kb = i_b
    if HAS_ROWS:
        i_kb = tl.load(rows_ptr + i_b).to(tl.int64)
    pad = 0
    if HAS_LEFTPAD:
        pad = tl.maximum(tl.load(leftpad_ptr + i_b).to(tl.int32), 0)
    # keys in use: a length beyond the cache is cut, a row outside of it holds none
    keys = capacity - pad
    if HAS_LENGTHS:
        keys = tl.minimum(tl.load(lengths_ptr + i_b).to(tl.int32), capacity) - pad
    keys = tl.maximum(keys, 0)
    if HAS_ROWS:
        keys = tl.where((i_kb >= 0) & (i_kb < cache_rows), keys, 0)
    return i_s, tile, i_kv, i_b, i_kb, pad, keys


@triton.jit
def keys_of_share(
    i_s, tile, keys, T, splits, left, right, group, BM: tl.constexpr, BN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """The first key of a program, and the one behind its last."""
    # what the tile sees, from its first query to its last, in shares of whole tiles
    low = keys * 0
    high = keys
    if HAS_LEFT:
        low = tl.maximum(tile * BM // group + keys - T - left, 0) // BN * BN
    if HAS_RIGHT:
        last = tl.minimum((tile * BM + BM - 1) // group, T - 1)
        high = tl.minimum(last + keys - T + right + 1, keys)
    # this program's split, in whole tiles
    split_keys = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BN), splits) * BN
    low += i_s * split_keys
    high = tl.minimum(low + split_keys, high)
    return low, high


@triton.jit
def visible(
    b_s, b_slope, position, j, o_n, m_n, factor, cap, left, right, HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Scores [BM, BN] of products with keys j + o_n, -inf where a query sees none."""
    age = position[:, None] - (j + o_n)[None, :]
    b_s = scores(b_s, factor, cap, b_slope, age, b_s, HAS_SOFTCAP, HAS_SLOPES, False)[0]
    is_visible = in_window(age, left, right, HAS_LEFT, HAS_RIGHT) & m_n[None, :]
    return tl.where(is_visible, b_s, float("-inf"))


@triton.jit
def softmax_step(b_s, b_m, b_l, score_scale):
    """Online softmax, as in softmax.py: probabilities, maxima and sums after these scores, and what
    remains of what was added up before."""
    b_top = tl.maximum(b_m, tl.max(b_s, 1) * score_scale)
    b_base = finite(b_top)
    b_p = tl.exp2(b_s * score_scale - b_base[:, None])
    b_shrink = tl.exp2(b_m - b_base)
    return b_p, b_top, b_l * b_shrink + tl.sum(b_p, 1), b_shrink


@triton.jit
def _scaled(b_os, b_factor, CODES: tl.constexpr):
    result = ()
    for c in tl.static_range(CODES):
        result = result + (b_os[c] * b_factor,)
    return result


@triton.jit
def _scores(
    b_qs, b_k, CODES: tl.constexpr, WORDS: tl.constexpr, FLOAT8: tl.constexpr, ASM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q k^T [BM, BN]: the sum of the products of every CODES-th channel."""
    b_codes = channels(b_k, 0, b_qs[0].dtype, WORDS, FLOAT8, ASM)
    b_s = tl.dot(b_qs[0], tl.trans(b_codes), input_precision=PRECISION)
    for c in tl.static_range(1, CODES):
        b_codes = channels(b_k, c, b_qs[0].dtype, WORDS, FLOAT8, ASM)
        b_s = tl.dot(b_qs[c], tl.trans(b_codes), b_s, input_precision=PRECISION)
    return b_s


@triton.jit
def _add_values(
    b_os, b_p, b_v, unit, CODES: tl.constexpr, WORDS: tl.constexpr, FLOAT8: tl.constexpr,
    ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o + unit p v, CODES of [BM, BV / CODES]; unit None: 1."""
    added = ()
    for c in tl.static_range(CODES):
        b_codes = channels(b_v, c, b_p.dtype, WORDS, FLOAT8, ASM)
        if unit is None:
            b_o = tl.dot(b_p, b_codes, b_os[c], input_precision=PRECISION)
        else:
            b_o = b_os[c] + unit * tl.dot(b_p, b_codes, input_precision=PRECISION)
        added = added + (b_o,)
    return added


@triton.jit
def _store_share(
    b_os, b_m, b_l, o_ptr, lse_ptr, i_s, i_b, b_h, o_t, o_v, m_m, B, T, HKV, group,
    DV: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """o and lse of a share's keys: 0 and -inf where a query sees none of them."""
    has_no_key = b_l == 0.0
    b_l = tl.where(has_no_key, 1.0, b_l)
    b_os = _scaled(b_os, (1.0 / b_l)[:, None], CODES)
    b_lse = tl.where(has_no_key, float("-inf"), b_m + tl.log2(b_l))
    H = HKV * group
    row = ((i_s * B + i_b) * T + o_t) * H + b_h
    p_o = o_ptr + row[:, None] * DV + CODES * o_v[None, :]
    m_o = m_m[:, None] & (o_v < DV // CODES)[None, :]
    for c in tl.static_range(CODES):
        tl.store(p_o + c, b_os[c], mask=m_o)
    tl.store(lse_ptr + ((i_s * B + i_b) * H + b_h) * T + o_t, b_lse, mask=m_m)


@triton.jit(do_not_specialize=["factor", "cap", "stride_table", *SIZES, *STRIDES])
def softmax_decode_kernel(
    q_ptr,  # [B, T, H, D] by strides, which are in units of UNIT elements
    k_ptr,  # [N, S, HKV, D], or pages [M, PAGE, HKV, D], by strides; with WORDS D / 4 of int32
    v_ptr,  # [N, S, HKV, DV], or pages, by strides; the same
    o_ptr,  # [shares, B, T, H, DV]
    lse_ptr,  # [shares, B, H, T], in base 2
    slopes_ptr,  # [B or 1, H]
    lengths_ptr,  # [B]
    rows_ptr,  # [B]
    leftpad_ptr,  # [B]
    table_ptr,  # [B, pages]
    k_scale_ptr,  # [N, S, HKV], or pages [M, PAGE, HKV], by strides; of keys in 8 bits, else None
    v_scale_ptr,  # the same, by the same strides
    factor, cap, T, HKV, B, tiles, splits, left, right, group, capacity, cache_rows,
    stride_slope, stride_table, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_sb,  # of scales
    stride_st,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LEFTPAD: tl.constexpr,
    WORDS: tl.constexpr, FLOAT8: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (shares * tiles * HKV * B,)"""
    i_s, tile, i_kv, i_b, i_kb, pad, keys = place_of(
        lengths_ptr, rows_ptr, leftpad_ptr, HKV, tiles, splits, capacity, cache_rows,
        HAS_LENGTHS, HAS_ROWS, HAS_LEFTPAD,
    )  # fmt: skip

    # a product is the sum of those of every CODES-th channel
    CODES: tl.constexpr = 4 if WORDS else 1
    ZERO: tl.constexpr = 0 if WORDS else 0.0
    # row r of the tile is query r / group of head r % group
    o_m = tile * BM + tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD // CODES)
    o_v = tl.arange(0, BV // CODES)
    o_t = o_m // group
    b_h = i_kv * group + o_m % group
    m_m = o_m < T * group
    stride_kt *= UNIT
    stride_vt *= UNIT
    stride_kb = stride_kb.to(tl.int64) * UNIT
    stride_vb = stride_vb.to(tl.int64) * UNIT
    p_q = q_ptr + (i_b * stride_qb + b_h * stride_qh + o_t * stride_qt) * UNIT
    b_qs, b_unit = load_queries(p_q, o_d, m_m, D, CODES, FLOAT8)  # CODES of [BM, BD / CODES]
    k_ptr += i_kv * stride_kh * UNIT
    v_ptr += i_kv * stride_vh * UNIT
    p_table = table_ptr
    IN_8_BITS: tl.constexpr = k_scale_ptr is not None
    if IN_8_BITS:
        k_scale_ptr += i_kv
        v_scale_ptr += i_kv
        if PAGE == 0:
            k_scale_ptr += i_kb * stride_sb + (i_kb * 0 + pad) * stride_st
            v_scale_ptr += i_kb * stride_sb + (i_kb * 0 + pad) * stride_st
    if PAGE == 0:
        k_ptr += i_kb * stride_kb + (i_kb * 0 + pad) * stride_kt
        v_ptr += i_kb * stride_vb + (i_kb * 0 + pad) * stride_vt
    else:
        p_table += i_b * stride_table
    position = o_t + keys - T

    SCALED: tl.constexpr = HAS_SOFTCAP or HAS_SLOPES
    score_scale = 1.0 if SCALED else factor
    b_slope = b_qs[0]
    if HAS_SLOPES:
        b_slope = tl.load(slopes_ptr + i_b * stride_slope + b_h, mask=m_m, other=0.0) * LOG2E
        b_slope = b_slope[:, None]

    low, high = keys_of_share(
        i_s, tile, keys, T, splits, left, right, group, BM, BN, HAS_LEFT, HAS_RIGHT
    )
    b_m = tl.full((BM,), float("-inf"), tl.float32)
    b_l = tl.zeros((BM,), tl.float32)
    b_os = (tl.zeros((BM, BV // CODES), tl.float32),) * CODES
    # the pages of a tile are known a tile ahead: a load of keys waits for no other
    page = pages_of(low, keys, o_n, p_table, PAGE, BN)
    for i in range(tl.cdiv(high - low, BN)):
        j = low + i * BN
        m_n = o_n < keys - j
        if PAGE != 0:
            m_n &= (page >= 0) & (page < cache_rows)
        after = pages_of(j + BN, keys, o_n, p_table, PAGE, BN)
        p_k = rows_of_keys(k_ptr, stride_kb, stride_kt, j, o_n, page, PAGE, BN)
        b_k = tl.load(
            p_k + o_d[None, :], mask=m_n[:, None] & (o_d < D // CODES)[None, :], other=ZERO
        )
        b_s = _scores(b_qs, b_k, CODES, WORDS, FLOAT8, ASM, PRECISION)  # [BM, BN]
        if IN_8_BITS:
            p_s = k_scale_ptr + offsets_of_keys(stride_sb, stride_st, j, o_n, page, PAGE, BN)
            b_scale = tl.load(p_s, mask=m_n, other=0.0)[None, :]
            if WORDS:
                b_scale *= b_unit
            b_s *= b_scale
        b_s = visible(
            b_s, b_slope, position, j, o_n, m_n, factor, cap, left, right,
            HAS_SOFTCAP, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        b_p, b_m, b_l, b_shrink = softmax_step(b_s, b_m, b_l, score_scale)
        b_os = _scaled(b_os, b_shrink[:, None], CODES)
        p_v = rows_of_keys(v_ptr, stride_vb, stride_vt, j, o_n, page, PAGE, BN)
        if IN_8_BITS:
            p_s = v_scale_ptr + offsets_of_keys(stride_sb, stride_st, j, o_n, page, PAGE, BN)
            b_scale = tl.load(p_s, mask=m_n, other=0.0)
            b_scale, unit = factors_of_values(b_scale)
            b_p *= b_scale[None, :]
            if FLOAT8:
                unit *= 256.0
        page = after
        b_v = tl.load(
            p_v + o_v[None, :], mask=m_n[:, None] & (o_v < DV // CODES)[None, :], other=ZERO
        )
        b_os = _add_values(
            b_os, b_p.to(b_qs[0].dtype), b_v, unit if IN_8_BITS else None,
            CODES, WORDS, FLOAT8, ASM, PRECISION,
        )  # fmt: skip

    _store_share(
        b_os, b_m, b_l, o_ptr, lse_ptr, i_s, i_b, b_h, o_t, o_v, m_m, B, T, HKV, group,
        DV, CODES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "H", "B", "splits"])
def softmax_combine_kernel(
    partial_o_ptr,  # [shares, B, T, H, DV], float32
    partial_lse_ptr,  # [shares, B, H, T], in base 2
    sinks_ptr,  # [H]
    o_ptr,  # [B, T, H, DV]
    lse_ptr,  # [B, H, T]
    T, H, B, splits,
    DV: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """grid (B * T * H,); BS >= shares."""
    pid = tl.program_id(0).to(tl.int64)
    i_h, i_t, i_b = pid % H, pid // H % T, pid // H // T
    o_s = tl.arange(0, BS)
    o_v = tl.arange(0, BV)
    at = (i_b * H + i_h) * T + i_t
    p_lse = partial_lse_ptr + o_s.to(tl.int64) * B * H * T + at
    b_partial_lse = tl.load(p_lse, mask=o_s < splits, other=float("-inf"))
    # lse of all splits, and of the sink
    top = tl.max(b_partial_lse, 0)
    total = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + i_h).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - finite(top))
    total += tl.sum(tl.exp2(b_partial_lse - finite(top)), 0)
    size = (B * T).to(tl.int64) * H * DV
    p = partial_o_ptr + pid * DV + o_v
    b_o = tl.zeros((BV,), tl.float32)
    # as many at once as registers hold
    STEP: tl.constexpr = BS if BS * BV <= 8192 else 8192 // BV
    for i in range(0, splits, STEP):
        o_i = (i + tl.arange(0, STEP)).to(tl.int64)
        b_lse = tl.load(
            partial_lse_ptr + o_i * B * H * T + at, mask=o_i < splits, other=float("-inf")
        )
        m = (o_i < splits)[:, None] & (o_v < DV)[None, :]
        b_partial_o = tl.load(p[None, :] + o_i[:, None] * size, mask=m, other=0.0)
        b_o += tl.sum(b_partial_o * tl.exp2(b_lse - finite(top))[:, None], 0)
    has_no_key = total == 0.0
    total = tl.where(has_no_key, 1.0, total)
    b_o /= total
    tl.store(o_ptr + pid * DV + o_v, b_o.to(o_ptr.dtype.element_ty), mask=o_v < DV)
    tl.store(lse_ptr + at, tl.where(has_no_key, float("-inf"), (top + tl.log2(total)) * LN2))


@triton.jit(do_not_specialize=["T", "HKV", "capacity", "cache_rows", "stride_table", *STRIDES[3:]])
def softmax_append_kernel(
    k_ptr,  # [N, S, HKV, D], or pages [M, PAGE, HKV, D], by strides
    v_ptr,
    new_k_ptr,  # [B, T, HKV, D]
    new_v_ptr,  # [B, T, HKV, DV]
    lengths_ptr,  # [B]
    rows_ptr,  # [B]
    table_ptr,  # [B, pages]
    after_ptr,  # [B], lengths after the new keys
    T, HKV, capacity, cache_rows, stride_table, stride_kb, stride_kt, stride_kh, stride_vb,
    stride_vt, stride_vh,
    D: tl.constexpr, DV: tl.constexpr, BX: tl.constexpr, PAGE: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """grid (HKV * T * B,): one new key behind those there are; none where there is no room, or the
    length, row or page is negative or past the cache."""
    pid = tl.program_id(0).to(tl.int64)
    i_h, i_t, i_b = pid % HKV, pid // HKV % T, pid // HKV // T
    # one program a sequence writes its new length; a negative one stays
    length = tl.load(lengths_ptr + i_b)
    after = tl.where(length < 0, length, length + T)
    tl.store(after_ptr + i_b, after, mask=(i_h == 0) & (i_t == 0))
    at = length.to(tl.int64) + i_t
    fits = (length >= 0) & (at < capacity)
    row = i_b
    if HAS_ROWS:
        row = tl.load(rows_ptr + i_b).to(tl.int64)
    if PAGE != 0:
        row = tl.load(table_ptr + i_b * stride_table + at // PAGE, mask=fits, other=0).to(tl.int64)
        at = at % PAGE
    fits &= (row >= 0) & (row < cache_rows)
    o_x = tl.arange(0, BX)
    b_k = tl.load(new_k_ptr + pid * D + o_x, mask=o_x < D, other=0.0)
    b_v = tl.load(new_v_ptr + pid * DV + o_x, mask=o_x < DV, other=0.0)
    p_k = k_ptr + row * stride_kb + at * stride_kt + i_h * stride_kh + o_x
    p_v = v_ptr + row * stride_vb + at * stride_vt + i_h * stride_vh + o_x
    tl.store(p_k, b_k.to(k_ptr.dtype.element_ty), mask=fits & (o_x < D))
    tl.store(p_v, b_v.to(v_ptr.dtype.element_ty), mask=fits & (o_x < DV))
