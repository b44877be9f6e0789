"""Keys and values in 8 bits for decode.py, as words of 4 channels.

They are converted where they lie in registers for a product: 4 products of a quarter of the
channels each take the place of one. float16 holds every int8, and every float8 (e4m3) times 2^-8,
whose bits it has a place further left. So that it holds q and the probabilities too, q is divided
by the power of 2 below its largest number, and the probabilities are multiplied by the scale of
their value over the largest scale of a tile.
"""

import triton
import triton.language as tl

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
# by the byte of a word that is read
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
def channels(
    b_x, J: tl.constexpr, dtype, WORDS: tl.constexpr, FLOAT8: tl.constexpr, ASM: tl.constexpr
):
    """Keys or values as they are stored, in `dtype`: code J of each word, else all of them. 8 bits
    are exact in it."""
    if WORDS:
        return codes(b_x, J, FLOAT8, ASM)
    return b_x.to(dtype)


@triton.jit
def load_queries(p, o_d, m_m, D: tl.constexpr, CODES: tl.constexpr, FLOAT8: tl.constexpr):
    """Channels 0, 1, .. of every CODES of the queries at p [BM]. If these are more than one: in
    float16, divided by a power of 2 for each row, and what scores are multiplied with for that."""
    p = p[:, None] + CODES * o_d[None, :]
    m = m_m[:, None] & (o_d < D // CODES)[None, :]
    b_qs = (tl.load(p, mask=m, other=0.0),)
    for c in tl.static_range(1, CODES):
        b_qs = b_qs + (tl.load(p + c, mask=m, other=0.0),)
    unit = 1.0
    if CODES > 1:
        top = tl.abs(b_qs[0].to(tl.float32))
        for c in tl.static_range(1, CODES):
            top = tl.maximum(top, tl.abs(b_qs[c].to(tl.float32)))
        b_unit = power_below(tl.max(top, 1))[:, None]
        divided = ()
        for c in tl.static_range(CODES):
            divided = divided + ((b_qs[c].to(tl.float32) / b_unit).to(tl.float16),)
        b_qs = divided
        unit = b_unit * 256.0 if FLOAT8 else b_unit
    return b_qs, unit
