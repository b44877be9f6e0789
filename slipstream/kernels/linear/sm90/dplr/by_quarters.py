"""Decays per channel on sm_90: operands of wy.py by halves of a chunk, or by quarters.

A chunk by quarters has two products: the first for pairs of tokens of one half, the second for
pairs of different halves, of the same operands relative to the chunk's middle. Operands of the two
differ by a whole power of 2 for each quarter and channel, so that they are moved in place and no
digit changes.
"""

from collections import namedtuple

from slipstream.kernels.linear.sm90.common import exp2_by_parts
from slipstream.kernels.linear.sm90.dplr.solve_tril import put, put_late, ready, scores
from slipstream.kernels.primitives.sm90 import gl, gluon

# tiles of inputs, by 64 channels: q, a, b and k by their use (wy.py)
Tiles = namedtuple("Tiles", "q a b k")
# a chunk's scores
Scores = namedtuple("Scores", "qb qk ak")


@gluon.jit
def quarters(layout: gl.constexpr):
    return gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]


@gluon.constexpr_function
def takes_quarters(K: int, delta: bool, apart: float) -> bool:
    """Whether chunks are taken by quarters. With four tiles of 128 channels only two programs would
    fit a multiprocessor, instead of three."""
    return apart > 0 and (delta or K <= 64)


@gluon.jit
def tiles_at(tiles, i):
    """The tiles of 64 channels."""
    return Tiles(tiles.q.index(i), tiles.a.index(i), tiles.b.index(i), tiles.k.index(i))


@gluon.jit
def anchors_of(b_middle, b_first, b_third, APART: gl.constexpr):
    """n [4, 1, 64] by halves and by quarters, from the sums of gates up to the chunk's middle and
    up to the middle of either half [1, 1, 64]."""
    three: gl.constexpr = b_middle.type.layout
    quarter = quarters(three)
    b_halves = b_middle + gl.where(quarter < 2, APART, -APART)
    b_quarters = gl.where(quarter < 2, b_first, b_third)
    return b_halves, b_quarters + gl.where((quarter & 1) == 0, APART, -APART)


@gluon.jit
def of_tokens(b, flat: gl.constexpr):
    """b [4, 1, 64] for each token [64, 64]."""
    three: gl.constexpr = b.type.layout
    b, _ = gl.broadcast(b, gl.zeros([4, 16, 64], gl.float32, three))
    return gl.convert_layout(gl.reshape(b, [64, 64]), flat)


@gluon.jit
def load_anchors(anchors, n, three: gl.constexpr):
    """m, and the middles of both halves [1, 1, 64]."""
    line: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, three))
    NK: gl.constexpr = anchors.shape[0] // 3
    b_middle = anchors.index(n).load(line)[None, None, :]
    b_first = anchors.index(NK + n).load(line)[None, None, :]
    return b_middle, b_first, anchors.index(2 * NK + n).load(line)[None, None, :]


@gluon.jit
def move(tile, b_n, flat: gl.constexpr):
    """A tile times 2^b_n [4, 1, 64], whole numbers, in two steps: float32 has the sum's powers."""
    b_half = gl.floor(0.5 * b_n)
    b = tile.load(flat).to(gl.float32) * of_tokens(exp2_by_parts(b_half), flat)
    tile.store((b * of_tokens(exp2_by_parts(b_n - b_half), flat)).to(tile.dtype))


@gluon.jit
def to_quarters(anchors, n, tile, c):
    """Moves operands in place: relative to halves of the chunk before, to quarters after."""
    q, a, b, k = tile
    b_middle, b_first, b_third = load_anchors(anchors, n, c.three)
    b_halves, b_quarters = anchors_of(b_middle, b_first, b_third, c.APART)
    b_n = b_halves - b_quarters
    move(q, b_n, c.flat)
    move(a, b_n, c.flat)
    move(b, -b_n, c.flat)
    if not c.DELTA:
        move(k, -b_n, c.flat)


@gluon.jit
def to_middle(anchors, n, tile, c):
    """Operands by quarters relative to the middle, in place: reads of the second half and writes of
    the first; a of the first half to the start."""
    q, a, b, k = tile
    b_middle, b_first, b_third = load_anchors(anchors, n, c.three)
    late = quarters(c.three) >= 2
    _, b_n = anchors_of(b_middle, b_first, b_third, c.APART)
    b_read = b_n - gl.where(late, b_middle, 0.0)
    move(q, gl.where(late, b_read, 0.0), c.flat)
    move(a, b_read, c.flat)
    b_write = gl.where(late, 0.0, b_middle - b_n)
    move(b, b_write, c.flat)
    if not c.DELTA:
        move(k, b_write, c.flat)


@gluon.jit
def to_start(anchors, n, a, c):
    """And a of the second half to the start, 2^(2 APART) times that, as solve has it where m is
    -APART."""
    b_middle, _, _ = load_anchors(anchors, n, c.three)
    late = quarters(c.three) >= 2
    move(a, gl.where(late, b_middle + 2 * c.APART, 0.0), c.flat)


@gluon.jit
def load_beta(p, token_heads, num_rows, layout: gl.constexpr, none=0):
    """beta of a chunk's tokens, as rows of `layout`. none: as put has it."""
    o_i = gl.arange(0, 64, gl.SliceLayout(1, layout)) + none
    return gl.load(p + o_i * token_heads, mask=o_i < num_rows, other=0.0).to(gl.float32)


@gluon.jit
def with_halves(
    b_a, by_quarters, tiles, aks, anchors, beta_ptr, token_heads, num_rows, outs, keep, scale, T, c
):
    """Scores b_a with those between halves: by_quarters they are missing, and operands are moved
    to make them. Otherwise b_a has them already."""
    qs, reads, bs, keys = tiles
    C: gl.constexpr = 64
    NK: gl.constexpr = qs.shape[0]
    DELTA: gl.constexpr = aks is None
    act: gl.constexpr = qs.dtype
    al: gl.constexpr = b_a.type.layout
    line: gl.constexpr = gl.SliceLayout(0, c.flat)
    if by_quarters != 0:
        none = T + by_quarters >> 31 << 10  # 0: what is made of it is not kept since the products
        gl.thread_barrier()
        for n in range(NK):
            to_middle(anchors, n, tiles_at(tiles, none + n), c)
        ready()
        zero = gl.zeros([64, 64], gl.float32, al)
        o_i = gl.arange(0, 64, gl.SliceLayout(1, al))[:, None]
        late = (o_i >= 32) & (gl.arange(0, 64, gl.SliceLayout(0, al)) < 32)[None, :]
        put_late(outs.qb, (scores(qs, bs, NK, zero, none) * scale).to(act), C, c.rows)
        if not DELTA:
            put_late(outs.qk, (scores(qs, keys, NK, zero, none) * scale).to(act), C, c.rows)
            b_ak = gl.where(late, scores(reads, keys, NK, zero, none).to(act), aks.load(al))
            aks.store(b_ak)
            if keep != 0:
                put(outs.ak, b_ak, C, c.rows)
        b_late = scores(reads, bs, NK, zero, none)
        if beta_ptr is not None:
            b_late *= load_beta(beta_ptr, token_heads, num_rows, al, none)[:, None]
        b_a = gl.where(late, b_late, b_a)
        gl.thread_barrier()
        for n in range(NK):
            to_start(anchors, n, reads.index(none + n), c)
        ready()
        for n in range(NK):
            anchors.index(n).store(gl.full([64], -c.APART, gl.float32, line))
    return b_a
