"""The forward's weights of a tile of keys, and the numbers of a row that keep them small.

    p_ts = e^(x_ts - m)      m' = max_s x_ts where that is greater than m + SLACK, else m

m need not be the maximum: what is added up is relative to it, and divided by a sum that is, too. So
it may lag behind, and sums are scaled anew for few tiles: hardly ever, in most calls, after the
first.
"""

from slipstream.kernels.attention.sm90.common import (
    COLUMNS_OWN,
    LEFT,
    RIGHT,
    ROWS_OWN,
    SOFTCAP,
    inverse,
    opaque,
    opaque_if_wide,
    opaque_range,
    where_below,
    where_within,
)
from slipstream.kernels.primitives.gluon_compat import gl, gluon

# how far, in powers of two, a maximum may grow before what there is of a row is scaled anew
SLACK = gl.constexpr(8.0)


@gluon.constexpr_function
def _scaling(n):
    """n numbers of a thread times n others, where one of these is not 1 in any row of the warp:
    a thread has two rows, in pairs of numbers by turns."""
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
    """acc times a number for each row, 1 for most: where all of a warp are, nothing is done."""
    by = gl.convert_layout(by, gl.SliceLayout(1, acc.type.layout))
    _, by = gl.broadcast(acc, by[:, None])
    N: gl.constexpr = 64 if acc.shape[1] >= 128 else acc.shape[1] // 2
    return gl.inline_asm_elementwise(
        _scaling(N), _operands(N), [acc, by], dtype=gl.float32, is_pure=False, pack=N
    )


@gluon.jit
def _most(s, like):
    """The greatest number of each row, by halves first: one after another would be waited for."""
    for _ in gl.static_range(2):
        halves = gl.permute(gl.reshape(s, [s.shape[0], 2, s.shape[1] // 2]), (0, 2, 1))
        a, b = gl.split(halves)
        s = gl.maximum(a, b)
    return gl.convert_layout(gl.max(s, 1), like.type.layout)


@gluon.jit
def weights(s, m, sight, turn, key, DV: gl.constexpr, MASKED: gl.constexpr,
            FLAGS: gl.constexpr):  # fmt: skip
    """p of a tile whose first key is `key`, the new m, and what shrinks what was before.

    sight: the first query's position, how many keys there are, the window, factor and cap.
    """
    layout: gl.constexpr = s.type.layout
    at, keys, window, factor, cap = sight
    under = factor
    if FLAGS & SOFTCAP:
        s = cap - 2.0 * cap * inverse(1.0 + gl.exp2(s * factor))
        under = 1.0
    if MASKED:
        o_m = opaque_range(gl.arange(0, 64, m.type.layout), opaque_if_wide(turn, DV), ROWS_OWN)
        o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        o_n = key + opaque_range(o_n, opaque_if_wide(turn, DV), COLUMNS_OWN)
        low, high = at - window[0], at + window[1] + 1
        if FLAGS & LEFT:  # bounds on both sides would take registers between masked tiles
            low, high = opaque((low, high), turn)
        if FLAGS & RIGHT:
            high = gl.minimum(high + o_m, keys)
        elif FLAGS & SOFTCAP:  # 0 as well, lest comparisons that rows share are kept as bits
            high = keys + (o_m & (turn >> 30))
        else:
            high = keys + o_m * 0
        if FLAGS & LEFT:
            low += o_m
            width = gl.maximum(high - low, 0)
            s = where_within(s, o_n[None, :], low[:, None], width[:, None])
        else:
            s = where_below(s, o_n[None, :], high[:, None])
    top = _most(s, m) * under
    top = gl.where(top > m + SLACK, top, m)
    base = top
    if MASKED:
        base = gl.where(top == float("-inf"), 0.0, top)
    return gl.exp2(s * under - base[:, None]), top, gl.exp2(m - base)


@gluon.jit
def with_sink(m, l, sink):
    """One more key, of this score and no value."""
    top = gl.maximum(m, sink)
    base = gl.where(top == float("-inf"), 0.0, top)
    shrink = gl.exp2(m - base)
    return top, l * shrink + gl.exp2(sink - base), shrink


@gluon.jit
def operand(e, acc, dtype: gl.constexpr):
    """Weights as the left operand of the next product, in registers."""
    return gl.convert_layout(e.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
