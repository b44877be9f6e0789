"""States in 11 bits a number (common/int8_states.py) in Triton: to and from float32 in registers.

A block of a state is [BK, BV] with BK = 8 R, or [BV, 8, R] if COLUMNS_FIRST: row j R + r of the
state at j, r, so that what a word holds is one axis. Words are [R, BV] or [BV, R]. In memory the
rows of a column are next to each other if V_FIRST, whatever the block.
"""

import triton
import triton.language as tl

from slipstream.common.int8_states import LARGEST, MARGIN, TINY

_STEPS = tl.constexpr(MARGIN / LARGEST)
_TINY = tl.constexpr(TINY)
# 1.5 * 2^23: the low bits of a float32 that was added to it are that number, rounded to even
_MAGIC = tl.constexpr(12582912.0)
# the bits of 2^23 + 1024 as a float32, and that number
_DIGITS = tl.constexpr(0x4B000400)
_OFFSET = tl.constexpr(8389632.0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _shifts(COLUMNS_FIRST: tl.constexpr):
    o = 3 * tl.arange(0, 8)
    return o[None, :, None] if COLUMNS_FIRST else o[:, None, None]


@triton.jit
def _columns(x, COLUMNS_FIRST: tl.constexpr):
    return x[:, None, None] if COLUMNS_FIRST else x[None, None, :]


@triton.jit
def _words_at(
    residual_ptr, o_c, live, V: tl.constexpr, R: tl.constexpr, V_FIRST: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr,
):  # fmt: skip
    """Where the lowest bytes of words are, which there are, and how far the next bytes are."""
    o_r = tl.arange(0, R)
    if COLUMNS_FIRST:
        o_r, o_c = o_r[None, :], o_c[:, None]
    else:
        o_r, o_c = o_r[:, None], o_c[None, :]
    p = residual_ptr + (o_c * (3 * R) + o_r if V_FIRST else o_r * V + o_c)
    if not V_FIRST and not COLUMNS_FIRST:
        p = tl.max_contiguous(p, (1, 4))  # a thread has the words of its codes
    return p, (o_c < V) & (o_r < R) & live, (R if V_FIRST else R * V)


@triton.jit
def load_state(
    p_s, m_s, scale_ptr, residual_ptr, o_c, live, V: tl.constexpr, BK: tl.constexpr,
    V_FIRST: tl.constexpr, COLUMNS_FIRST: tl.constexpr,
):  # fmt: skip
    """The arguments of `decoded`: codes at p_s where m_s, words and scale of columns o_c.

    scale_ptr: [V]; residual_ptr: [3 R, V], or [V, 3 R] if V_FIRST, of one head's state."""
    codes = tl.load(p_s, mask=m_s, other=0)
    p, m, step = _words_at(residual_ptr, o_c, live, V, BK // 8, V_FIRST, COLUMNS_FIRST)
    low = tl.load(p, mask=m, other=0)
    middle = tl.load(p + step, mask=m, other=0)
    high = tl.load(p + 2 * step, mask=m, other=0)
    scale = tl.load(scale_ptr + o_c, mask=(o_c < V) & live, other=0.0)
    return codes, low, middle, high, scale


@triton.jit
def decoded(state, BK: tl.constexpr, COLUMNS_FIRST: tl.constexpr):
    """float32 of what load_state returned."""
    codes, low, middle, high, scale = state
    words = low.to(tl.int32) | (middle.to(tl.int32) << 8) | (high.to(tl.int32) << 16)
    if not COLUMNS_FIRST:
        codes = tl.reshape(codes, (8, BK // 8, codes.shape[1]))
    words = tl.expand_dims(words, 1 if COLUMNS_FIRST else 0)
    # the last digits of 2^23 + 1024 + m: a conversion takes four times as long as a sum
    b_m = codes.to(tl.int32) * 8 + (((words >> _shifts(COLUMNS_FIRST)) & 7) | _DIGITS)
    b_s = b_m.to(tl.float32, bitcast=True) - _OFFSET
    b_s *= _columns(scale.to(tl.float32) * 0.125, COLUMNS_FIRST)
    if not COLUMNS_FIRST:
        b_s = tl.reshape(b_s, (BK, b_s.shape[2]))
    return b_s


@triton.jit
def store_state(
    b_s, p_s, m_s, scale_ptr, residual_ptr, o_c, live, V: tl.constexpr, BK: tl.constexpr,
    V_FIRST: tl.constexpr, COLUMNS_FIRST: tl.constexpr,
):  # fmt: skip
    """Rounds b_s, of columns o_c, to where load_state reads; nothing unless `live`."""
    AXIS: tl.constexpr = 1 if COLUMNS_FIRST else 0
    if not COLUMNS_FIRST:
        b_s = tl.reshape(b_s, (8, BK // 8, b_s.shape[1]))
    b_top = tl.reduce(tl.reduce(tl.abs(b_s), AXIS, _larger), AXIS, _larger)
    b_top = tl.where(b_top < _TINY, 0.0, b_top)
    scale = (b_top * _STEPS).to(tl.bfloat16).to(tl.float32)
    inverse = 1.0 / tl.where(scale == 0.0, 1.0, scale)
    b_m = (b_s * _columns(inverse, COLUMNS_FIRST) + _MAGIC).to(tl.int32, bitcast=True)
    words = tl.reduce((b_m & 7) << _shifts(COLUMNS_FIRST), AXIS, _or)
    codes = (b_m >> 3).to(tl.int8)
    if not COLUMNS_FIRST:
        codes = tl.reshape(codes, (BK, codes.shape[2]))
    tl.store(p_s, codes, mask=m_s)
    tl.store(scale_ptr + o_c, (scale * 8.0).to(tl.bfloat16), mask=(o_c < V) & live)
    p, m, step = _words_at(residual_ptr, o_c, live, V, BK // 8, V_FIRST, COLUMNS_FIRST)
    tl.store(p, (words & 255).to(tl.uint8), mask=m)
    tl.store(p + step, ((words >> 8) & 255).to(tl.uint8), mask=m)
    tl.store(p + 2 * step, ((words >> 16) & 255).to(tl.uint8), mask=m)
