"""Gates of strong chunks on sm_90, relative to the middles of blocks of tokens (intra_safe.py).

Gates in base 2 come as wy.py has them, [4, 16, 64]: quarters of a chunk, their tokens, channels.
"""

from slipstream.kernels.linear.sm90.dplr import by_quarters, gate_sums
from slipstream.kernels.primitives.sm90 import gl, gluon


@gluon.jit
def tokens(layout: gl.constexpr, none):
    """The tokens of quarters [1, 16, 1]."""
    return gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None] + none


@gluon.jit
def sum_of_tokens(b_g, first: gl.constexpr, count: gl.constexpr):
    """[4, 64], of some tokens of each quarter."""
    three: gl.constexpr = b_g.type.layout
    o_t = tokens(three, 0)
    return gl.sum(gl.where((o_t >= first) & (o_t < first + count), b_g, 0.0), 1)


@gluon.jit
def lowest_of(b_g, COUNT: gl.constexpr):
    """[4, 64], of the sums of every COUNT tokens of a quarter the lowest."""
    b_low = sum_of_tokens(b_g, 0, COUNT)
    for i in gl.static_range(1, 16 // COUNT):
        b_low = gl.minimum(b_low, sum_of_tokens(b_g, COUNT * i, COUNT))
    return b_low


@gluon.jit
def block_level(b_g, excess, LIMIT: gl.constexpr):
    """The largest s of 5 to 2 whose blocks' halves all decay by no more than 2^(-2 LIMIT), or, with
    small inputs, by less (wy.excess_of)."""
    b_s = 2 + (lowest_of(b_g, 4) >= excess - 2 * LIMIT).to(gl.int32)
    b_s += (lowest_of(b_g, 8) >= excess - 2 * LIMIT).to(gl.int32)
    b_s += (gl.sum(b_g, 1) >= excess - 2 * LIMIT).to(gl.int32)
    return gl.min(gl.min(b_s, 1), 0)


@gluon.jit
def within_quarters(b_before, L: gl.constexpr, none):
    """Sums from a quarter's start to the middle of each of its blocks of 2^(L + 1) tokens, L up
    to 3: [4, 16, 64]."""
    three: gl.constexpr = b_before.type.layout
    o_t = tokens(three, none)
    b_sum = 0.0 * b_before
    for i in gl.static_range(8 >> L):
        b_middle = gl.sum(gl.where(o_t == ((2 * i + 1) << L), b_before, 0.0), 1)[:, None, :]
        b_sum = gl.where(o_t >> (L + 1) == i, b_middle, b_sum)
    return b_sum


@gluon.jit
def exponents(b_g, level, none, APART: gl.constexpr):
    """G - H [4, 16, 64] of blocks of 2^(level + 1) tokens, that without a token's own gate, and
    which tokens are in later halves [4, 16, 1]."""
    three: gl.constexpr = b_g.type.layout
    b_e, b_before, b_all = gate_sums.sums_of_quarters(b_g)
    four: gl.constexpr = b_all.type.layout
    quarter = by_quarters.quarters(four)
    b_base = gate_sums.sum_before(b_all, quarter, three)
    if level > 3:
        # the quarter that a block's later half begins with
        seam = (quarter >> (level - 3) << (level - 3)) + (1 << (level - 4))
        b_h = gate_sums.sum_before(b_all, seam, three) + 0.0 * b_e
    else:
        if level == 3:
            b_h = within_quarters(b_before, 3, none)
        elif level == 2:
            b_h = within_quarters(b_before, 2, none)
        elif APART > 0 or level == 1:
            b_h = within_quarters(b_before, 1, none)
        else:
            b_h = within_quarters(b_before, 0, none)
        b_h += b_base
    b_off = gl.floor(b_h) - b_base
    later = (16 * by_quarters.quarters(three) + tokens(three, none)) >> level & 1
    return b_e - b_off, b_before - b_off, later


@gluon.jit
def flattened(b, flat: gl.constexpr):
    """Tokens [4, 16, 64] as rows of a tile [64, 64]."""
    return gl.convert_layout(gl.reshape(b, [64, 64]), flat)


@gluon.jit
def put_product(tile, b, factor):
    tile.store((b.to(gl.float32) * factor).to(tile.dtype))
