"""decode.py of keys and values in 8 bits, for queries in 16: the products are of float16.

Keys are loaded as words of 4 channels, and converted where they lie in registers for a product: 4
products of a quarter of the channels each take the place of one. float16 holds every int8, and
every float8 (e4m3) times 2^-8, whose bits it has a place further left. So that it holds q and the
probabilities too, q is divided by the power of 2 below its largest number, and the probabilities
are multiplied by the scale of their value over the largest scale of a tile.
"""

import triton
import triton.language as tl

from slipstream.kernels.attention.triton.decode import (
    SIZES,
    STRIDES,
    factors_of_values,
    keys_of_share,
    offsets_of_keys,
    pages_of,
    place_of,
    rows_of_keys,
    softmax_step,
    visible,
)
from slipstream.kernels.attention.triton.scores import LOG2E

# Code J of two words as two numbers of float16.
_INT8 = """{{
    .reg .b32 t, u;
    prmt.b32 t, $1, $2, 0x{0}{0}{1}{1};
    lop3.b32 t, t, 0x00ff00ff, 0x64806480, 0x6a;
    mov.b32 u, 0x64806480;
    sub.rn.f16x2 $0, t, u;
}}"""
_FLOAT8 = """{{
    .reg .b32 t;
    prmt.b32 t, $1, $2, 0x{0}{0}{1}{1};
    shr.b32 $0, t, 1;
    and.b32 $0, $0, 0x3f803f80;
    lop3.b32 $0, t, 0x80008000, $0, 0xea;
}}"""
ASM_INT8 = tl.constexpr(tuple(_INT8.format(4 + j, j) for j in range(4)))
ASM_FLOAT8 = tl.constexpr(tuple(_FLOAT8.format(4 + j, j) for j in range(4)))


@triton.jit
def codes(words, J: tl.constexpr, FLOAT8: tl.constexpr, ASM: tl.constexpr):
    """Code J of each word, float16: an int8 as it is, a float8 times 2^-8.

    ASM: two at a time, by instructions of NVIDIA's GPUs.
    """
    if FLOAT8:
        if ASM:
            b = tl.inline_asm_elementwise(ASM_FLOAT8[J], "=r,r,r", [words], tl.float16, True, 2)
        else:
            high = words << (24 - 8 * J) >> 16  # the code above 8 zeros, its sign further up
            bits = (high & 0x8000) | ((high >> 1) & 0x3F80)
            b = bits.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        # 0x6400 is 1024, whose last bit is 1; a sign bit that is turned over adds 128
        if ASM:
            b = tl.inline_asm_elementwise(ASM_INT8[J], "=r,r,r", [words], tl.float16, True, 2)
        else:
            bits = ((words >> (8 * J)) & 0xFF) ^ 0x6480
            b = bits.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    return b


@triton.jit
def power_below(x):
    """2^floor(log2 x) of x >= 0; 1 for 0."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def load_q(p, m):
    """Channels 0, 1, 2, 3 of every 4 in float16, divided by a power of 2 for each row, and it."""
    b_q0 = tl.load(p, mask=m, other=0.0).to(tl.float32)
    b_q1 = tl.load(p + 1, mask=m, other=0.0).to(tl.float32)
    b_q2 = tl.load(p + 2, mask=m, other=0.0).to(tl.float32)
    b_q3 = tl.load(p + 3, mask=m, other=0.0).to(tl.float32)
    top = tl.maximum(tl.abs(b_q0), tl.abs(b_q1))
    top = tl.maximum(top, tl.maximum(tl.abs(b_q2), tl.abs(b_q3)))
    unit = power_below(tl.max(top, 1))[:, None]
    b_q0 = (b_q0 / unit).to(tl.float16)
    b_q1 = (b_q1 / unit).to(tl.float16)
    b_q2 = (b_q2 / unit).to(tl.float16)
    b_q3 = (b_q3 / unit).to(tl.float16)
    return b_q0, b_q1, b_q2, b_q3, unit


@triton.jit
def load_words(p, o_w, m_n, D: tl.constexpr, BW: tl.constexpr):
    """Words o_w of rows at p [BN, 1], zero outside."""
    if 4 * BW == D:
        return tl.load(p + o_w[None, :], mask=m_n[:, None], other=0)
    return tl.load(p + o_w[None, :], mask=m_n[:, None] & (o_w < D // 4)[None, :], other=0)


@triton.jit(do_not_specialize=["factor", "cap", "stride_table", *SIZES, *STRIDES])
def softmax_decode_rounded_kernel(
    q_ptr,  # [B, T, H, D] by strides
    k_ptr,  # [N, S, HKV, D / 4], or pages [M, PAGE, HKV, D / 4], int32, by strides over UNIT
    v_ptr,  # [N, S, HKV, DV / 4], or pages, by strides
    o_ptr,  # [shares, B, T, H, DV]
    lse_ptr,  # [shares, B, H, T], in base 2
    slopes_ptr,  # [B or 1, H]
    lengths_ptr,  # [B]
    rows_ptr,  # [B]
    leftpad_ptr,  # [B]
    table_ptr,  # [B, pages]
    k_scale_ptr,  # [N, S, HKV], or pages [M, PAGE, HKV], by strides
    v_scale_ptr,  # the same, by the same strides
    factor,
    cap,
    T,
    HKV,
    B,
    tiles,
    splits,
    left,
    right,
    group,
    capacity,
    cache_rows,
    stride_slope,
    stride_table,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_sb,  # of scales
    stride_st,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    FLOAT8: tl.constexpr,
    ASM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
):
    """grid (shares * tiles * HKV * B,)"""
    i_s, tile, i_kv, i_b, i_kb, pad, keys = place_of(
        lengths_ptr, rows_ptr, leftpad_ptr, HKV, tiles, splits, capacity, cache_rows,
        HAS_LENGTHS, HAS_ROWS, HAS_LEFTPAD,
    )  # fmt: skip

    WK: tl.constexpr = BD // 4
    WV: tl.constexpr = BV // 4
    o_m = tile * BM + tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_k = tl.arange(0, WK)
    o_v = tl.arange(0, WV)
    o_t = o_m // group
    b_h = i_kv * group + o_m % group
    m_m = o_m < T * group
    stride_kt *= UNIT
    stride_vt *= UNIT
    stride_kb = stride_kb.to(tl.int64) * UNIT
    stride_vb = stride_vb.to(tl.int64) * UNIT
    stride_sb = stride_sb.to(tl.int64)
    p_q = q_ptr + (i_b * stride_qb + b_h * stride_qh + o_t * stride_qt) * UNIT
    p_q = p_q[:, None] + 4 * o_k[None, :]
    m_q = m_m[:, None] & (4 * o_k < D)[None, :]
    b_q0, b_q1, b_q2, b_q3, b_unit = load_q(p_q, m_q)
    if FLOAT8:
        b_unit *= 256.0
    k_ptr += i_kv * stride_kh * UNIT
    v_ptr += i_kv * stride_vh * UNIT
    k_scale_ptr += i_kv
    v_scale_ptr += i_kv
    p_table = table_ptr
    if PAGE == 0:
        k_ptr += i_kb * stride_kb + (i_kb * 0 + pad) * stride_kt
        v_ptr += i_kb * stride_vb + (i_kb * 0 + pad) * stride_vt
        k_scale_ptr += i_kb * stride_sb + (i_kb * 0 + pad) * stride_st
        v_scale_ptr += i_kb * stride_sb + (i_kb * 0 + pad) * stride_st
    else:
        p_table += i_b * stride_table
    position = o_t + keys - T

    SCALED: tl.constexpr = HAS_SOFTCAP or HAS_SLOPES
    score_scale = 1.0 if SCALED else factor
    b_slope = b_unit
    if HAS_SLOPES:
        b_slope = tl.load(slopes_ptr + i_b * stride_slope + b_h, mask=m_m, other=0.0) * LOG2E
        b_slope = b_slope[:, None]

    low, high = keys_of_share(
        i_s, tile, keys, T, splits, left, right, group, BM, BN, HAS_LEFT, HAS_RIGHT
    )

    b_m = tl.full((BM,), float("-inf"), tl.float32)
    b_l = tl.zeros((BM,), tl.float32)
    b_o0 = tl.zeros((BM, WV), tl.float32)
    b_o1 = tl.zeros((BM, WV), tl.float32)
    b_o2 = tl.zeros((BM, WV), tl.float32)
    b_o3 = tl.zeros((BM, WV), tl.float32)
    page = pages_of(low, keys, o_n, p_table, PAGE, BN)
    for i in range(tl.cdiv(high - low, BN)):
        j = low + i * BN
        m_n = o_n < keys - j
        if PAGE != 0:
            m_n &= (page >= 0) & (page < cache_rows)
        after = pages_of(j + BN, keys, o_n, p_table, PAGE, BN)
        p_k = rows_of_keys(k_ptr, stride_kb, stride_kt, j, o_n, page, PAGE, BN)
        words = load_words(p_k, o_k, m_n, D, WK)
        b_s = tl.dot(b_q0, tl.trans(codes(words, 0, FLOAT8, ASM)))  # [BM, BN]
        b_s = tl.dot(b_q1, tl.trans(codes(words, 1, FLOAT8, ASM)), b_s)
        b_s = tl.dot(b_q2, tl.trans(codes(words, 2, FLOAT8, ASM)), b_s)
        b_s = tl.dot(b_q3, tl.trans(codes(words, 3, FLOAT8, ASM)), b_s)
        p_s = k_scale_ptr + offsets_of_keys(stride_sb, stride_st, j, o_n, page, PAGE, BN)
        b_ks = tl.load(p_s, mask=m_n, other=0.0)
        b_s *= b_unit * b_ks[None, :]
        b_s = visible(
            b_s, b_slope, position, j, o_n, m_n, factor, cap, left, right,
            HAS_SOFTCAP, HAS_SLOPES, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        b_p, b_m, b_l, b_shrink = softmax_step(b_s, b_m, b_l, score_scale)
        p_s = v_scale_ptr + offsets_of_keys(stride_sb, stride_st, j, o_n, page, PAGE, BN)
        b_vs = tl.load(p_s, mask=m_n, other=0.0)
        b_vs, unit = factors_of_values(b_vs)
        b_p = (b_p * b_vs[None, :]).to(tl.float16)
        if FLOAT8:
            unit *= 256.0
        p_v = rows_of_keys(v_ptr, stride_vb, stride_vt, j, o_n, page, PAGE, BN)
        words = load_words(p_v, o_v, m_n, DV, WV)
        page = after
        b_o0 = b_o0 * b_shrink[:, None] + unit * tl.dot(b_p, codes(words, 0, FLOAT8, ASM))
        b_o1 = b_o1 * b_shrink[:, None] + unit * tl.dot(b_p, codes(words, 1, FLOAT8, ASM))
        b_o2 = b_o2 * b_shrink[:, None] + unit * tl.dot(b_p, codes(words, 2, FLOAT8, ASM))
        b_o3 = b_o3 * b_shrink[:, None] + unit * tl.dot(b_p, codes(words, 3, FLOAT8, ASM))

    has_no_key = b_l == 0.0
    b_l = tl.where(has_no_key, 1.0, b_l)
    b_norm = (1.0 / b_l)[:, None]
    b_lse = tl.where(has_no_key, float("-inf"), b_m + tl.log2(b_l))
    H = HKV * group
    row = ((i_s * B + i_b) * T + o_t) * H + b_h
    p_o = o_ptr + row[:, None] * DV + 4 * o_v[None, :]
    m_o = m_m[:, None] & (4 * o_v < DV)[None, :]
    tl.store(p_o, b_o0 * b_norm, mask=m_o)
    tl.store(p_o + 1, b_o1 * b_norm, mask=m_o)
    tl.store(p_o + 2, b_o2 * b_norm, mask=m_o)
    tl.store(p_o + 3, b_o3 * b_norm, mask=m_o)
    tl.store(lse_ptr + ((i_s * B + i_b) * H + b_h) * T + o_t, b_lse, mask=m_m)
