"""Device functions of the family: where a sequence lies, the mask, and the scores.

Rows are queries or keys of a sequence, positions are those of its keys; query r stands at position
r + (keys - queries). Tiles of B rows: a tensor packed by cu [N + 1] has cu[N] / B + N of them, an
upper bound that needs no lengths, and the tiles of sequence n begin at cu[n] / B + n.
"""

import triton
import triton.language as tl

from slipstream.kernels.attention import dropout

ROUNDS = tl.constexpr(dropout.ROUNDS)


@triton.jit
def sequence_of_tile(tile, i_n, cu_ptr, N, search_steps, B: tl.constexpr, PACKED: tl.constexpr):
    """The sequence of a tile and the tile's first row in it; 2^steps >= N."""
    if PACKED:
        low = N * 0
        high = N
        for _ in range(search_steps):
            middle = (low + high) // 2
            before = tl.load(cu_ptr + middle).to(tl.int64) // B + middle <= tile
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        i_n = low
        tile -= (tl.load(cu_ptr + i_n).to(tl.int64) // B).to(tl.int32) + i_n
    return i_n, tile * B


@triton.jit
def rows_of_sequence(
    i_n, cu_ptr, lengths_ptr, rows, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr
):
    """Batch row, the first row in it, how many the sequence has and how many it uses."""
    if PACKED:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), rows)
        capacity = tl.maximum(end - begin, 0).to(tl.int32)
        i_b = begin * 0
    else:
        i_b = i_n.to(tl.int64)
        begin = i_b * 0
        capacity = rows
    used = capacity
    if HAS_LENGTHS:
        used = tl.minimum(tl.maximum(tl.load(lengths_ptr + i_n).to(tl.int32), 0), capacity)
    return i_b, begin, capacity, used


@triton.jit
def visible_tiles(
    first, last, count, before, after,
    B: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr,
):  # fmt: skip
    """Bounds of rows 0 .. count - 1 that first .. last see, `before` back and `after` ahead:
    from `low` to `high`, and between `inner` and `outer` in whole tiles that all of them see.
    """
    low = count * 0
    inner = low
    high = count
    outer = count
    if HAS_BEFORE:
        low = tl.maximum(first - before, 0) // B * B
        inner = tl.cdiv(tl.maximum(last - before, 0), B) * B
    if HAS_AFTER:
        high = tl.minimum(last + after + 1, count)
        outer = tl.minimum(first + after + 1, count)
    high = tl.maximum(high, low)
    inner = tl.minimum(inner, tl.cdiv(high, B) * B)
    outer = tl.maximum(tl.maximum(outer, 0) // B * B, inner)
    return low, inner, outer, high


@triton.jit
def block(p, stride, o_r, rows, o_c, C: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr):
    """Rows o_r and columns o_c of a matrix at p, zero outside of `rows` (if MASKED) and C."""
    p += o_r[:, None] * stride + o_c[None, :]
    if MASKED and C != BC:
        b = tl.load(p, mask=(o_r < rows)[:, None] & (o_c < C)[None, :], other=0.0)
    elif MASKED:
        b = tl.load(p, mask=(o_r < rows)[:, None], other=0.0)
    elif C != BC:
        b = tl.load(p, mask=(o_c < C)[None, :], other=0.0)
    else:
        b = tl.load(p)
    return b


@triton.jit
def scores(
    s, factor, cap, slope, age, b_gate,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 from products q . k, and the softcap's tanh. With no bias and no softcap
    they stay as they are, and are to be scaled under the exponential.

    age: how far the key is behind the query. factor: log2(e) scale, over cap / 2 with a softcap.
    """
    t = s
    if HAS_SOFTCAP:
        t = 1.0 - 2.0 / (1.0 + tl.exp2(s * factor))
        s = cap * t
    elif HAS_SLOPES or HAS_GATE:
        s = s * factor
    if HAS_SLOPES:
        s -= slope * tl.abs(age).to(tl.float32)
    if HAS_GATE:
        s += b_gate
    return s, t


@triton.jit
def add_product(acc, x, y, TWO_TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x y for float32 x, which is rounded to y's dtype.

    TWO_TERMS: what the rounding of x loses is multiplied as well, as a second product.
    """
    b_x = x.to(y.dtype)
    acc = tl.dot(b_x, y, acc, input_precision=PRECISION)
    if TWO_TERMS and y.dtype.primitive_bitwidth == 16:
        acc = tl.dot((x - b_x.to(tl.float32)).to(y.dtype), y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def in_window(age, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether the window lets a query see a key `age` behind it."""
    is_visible = age == age
    if HAS_LEFT:
        is_visible = is_visible & (age <= left)
    if HAS_RIGHT:
        is_visible = is_visible & (age >= -right)
    return is_visible


@triton.jit
def finite(x):
    """0 for -inf, so that differences with it are no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def keep_mask(
    seed_ptr, key, position, head, sequence, threshold, BN: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Which weights dropout keeps, [BM, BN], or [BN, BM] if transposed: attention/dropout.py.

    key: the first of BN, a multiple of 4. position: [BM], of the queries.
    """
    o_g = key // 4 + tl.arange(0, BN // 4)
    if TRANSPOSED:
        zero = o_g[:, None] * 0 + position[None, :] * 0
        c0, c1 = zero + o_g[:, None], zero + position[None, :]
    else:
        zero = o_g[None, :] * 0 + position[:, None] * 0
        c0, c1 = zero + o_g[None, :], zero + position[:, None]
    c2, c3 = zero + head.to(tl.int32), zero + sequence.to(tl.int32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3, ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [., ., 2, 2]
    if TRANSPOSED:
        words = tl.permute(words, (0, 2, 3, 1))
    BM: tl.constexpr = position.shape[0]
    words = tl.reshape(words, (BN, BM) if TRANSPOSED else (BM, BN))
    return (words >> 1).to(tl.int32) < threshold
