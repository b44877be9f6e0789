"""The forward's weights of a tile of keys, and the running maximum of each row.

    p_ts = e^(x_ts - m)      m' = max_s x_ts where that is greater than m + SLACK, else m

m need not be the maximum: all sums are relative to it, and it cancels when acc is divided by l. So
it may lag behind by SLACK, and acc and l are rescaled for few tiles: in most calls hardly ever
after the first.
"""

from slipstream.kernels.attention.sm90.common import (
    LEFT,
    RIGHT,
    SOFTCAP,
    THREAD_COLUMN_BITS,
    THREAD_ROW_BITS,
    inverse,
    opaque,
    opaque_if_wide,
    opaque_range,
    where_below,
    where_within,
)
from slipstream.kernels.primitives.gluon_compat import gl, gluon

# how far, in powers of two, a maximum may grow before a row's sums are rescaled
SLACK = gl.constexpr(8.0)


@gluon.constexpr_function
def _scaling(n):
    """Asm that multiplies n numbers of a thread by n others, unless these are 1 in all rows of the
    warp. A thread has two rows, in alternating pairs of numbers."""
    lines = [f"setp.neu.f32 p, ${2 * n}, 0f3F800000;"]
    lines.append(f"setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;")
    lines.append("vote.sync.any.pred q, p, 0xffffffff;")
    lines += [f"mov.f32 ${i}, ${n + i};" for i in range(n)]
    lines.append("@!q bra DONE;")
    lines += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return f"{{ .reg .pred p, q; {' '.join(lines)} DONE: }}"


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=f"] * n + ["f"] * 2 * n)


@gluon.jit
def scaled(acc, by):
    """acc times a number for each row, mostly 1: where all of a warp are, nothing is multiplied."""
    by = gl.convert_layout(by, gl.SliceLayout(1, acc.type.layout))
    _, by = gl.broadcast(acc, by[:, None])
    N: gl.constexpr = 64 if acc.shape[1] >= 128 else acc.shape[1] // 2
    return gl.inline_asm_elementwise(
        _scaling(N), _operands(N), [acc, by], dtype=gl.float32, is_pure=False, pack=N
    )


@gluon.jit
def _row_max(s, like):
    """The maximum of each row, by halves first: one after another each would wait for the last."""
    for _ in gl.static_range(2):
        halves = gl.permute(gl.reshape(s, [s.shape[0], 2, s.shape[1] // 2]), (0, 2, 1))
        a, b = gl.split(halves)
        s = gl.maximum(a, b)
    return gl.convert_layout(gl.max(s, 1), like.type.layout)


@gluon.jit
def weights(s, m, mask_args, i_step, key, masked, DV: gl.constexpr, FLAGS: gl.constexpr):
    """p of a tile whose first key is `key`, the new m, and the factor of what was summed before.

    mask_args: the first query's position, the number of keys, the window, factor and cap. masked:
    whether a query may not see a key of the tile.
    """
    layout: gl.constexpr = s.type.layout
    at, keys, window, factor, cap = mask_args
    score_scale = factor
    if FLAGS & SOFTCAP:
        s = cap - 2.0 * cap * inverse(1.0 + gl.exp2(s * factor))
        score_scale = 1.0
    if masked:
        o_m = opaque_range(
            gl.arange(0, 64, m.type.layout), opaque_if_wide(i_step, DV), THREAD_ROW_BITS
        )
        o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        o_n = key + opaque_range(o_n, opaque_if_wide(i_step, DV), THREAD_COLUMN_BITS)
        low, high = at - window[0], at + window[1] + 1
        # with bounds on both sides: else kept in registers between masked tiles
        if FLAGS & LEFT:
            low, high = opaque((low, high), i_step)
        if FLAGS & RIGHT:
            high = gl.minimum(high + o_m, keys)
        # an opaque zero: comparisons that all rows share would be kept as bits
        elif FLAGS & SOFTCAP:
            high = keys + (o_m & (i_step >> 30))
        else:
            high = keys + o_m * 0
        if FLAGS & LEFT:
            low += o_m
            width = gl.maximum(high - low, 0)
            s = where_within(s, o_n[None, :], low[:, None], width[:, None])
        else:
            s = where_below(s, o_n[None, :], high[:, None])
    top = _row_max(s, m) * score_scale
    top = gl.where(top > m + SLACK, top, m)
    base = gl.where(top == float("-inf"), 0.0, top)
    return gl.exp2(s * score_scale - base[:, None]), top, gl.exp2(m - base)


@gluon.jit
def with_sink(m, l, sink):
    """m, l and their factor with one more key of this score and no value."""
    top = gl.maximum(m, sink)
    base = gl.where(top == float("-inf"), 0.0, top)
    shrink = gl.exp2(m - base)
    return top, l * shrink + gl.exp2(sink - base), shrink


@gluon.jit
def operand(e, acc, dtype: gl.constexpr):
    """Weights as the left operand of the next product, in registers."""
    return gl.convert_layout(e.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
