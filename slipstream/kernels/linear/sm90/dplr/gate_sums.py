"""Sums of a chunk's gates on sm_90, of decays per channel (wy.py, intra_safe.py).

Gates are in base 2 [4, 16, 64], quarters of a chunk, their tokens and channels. A thread has 16
tokens of two channels, and adds them up.
"""

from slipstream.kernels.primitives.sm90 import gl, gluon

FAR = gl.constexpr(3072.0)  # float32 beside it are multiples of 2^-12


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def rounded(b):
    """To multiples of 2^-12, of which sums and differences are exact up to 2^12."""
    return (b + FAR) - FAR


@gluon.jit
def totals_of_quarters(b_g):
    """Sums of whole quarters [1, 4, 64], known to all threads, not rounded."""
    four: gl.constexpr = gl.BlockedLayout([1, 4, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    return gl.convert_layout(gl.sum(b_g, 1), gl.SliceLayout(0, four))[None, :, :]


@gluon.jit
def sums_of_quarters(b_g):
    """Sums of gates: from the quarter's start, the same without a token's own gate, and of whole
    quarters."""
    b_e = gl.associative_scan(b_g, 1, add)
    b_all = totals_of_quarters(b_g)
    return rounded(b_e), rounded(b_e - b_g), rounded(b_all)


@gluon.jit
def sum_before(b_all, quarter, three: gl.constexpr):
    """The sum of quarters before `quarter` [4, 1, 1], in the layout of tokens [4, 1, 64]."""
    four: gl.constexpr = b_all.type.layout
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    b_sum = gl.sum(gl.where(other < quarter, b_all, 0.0), 1)
    return gl.convert_layout(b_sum[:, None, :], three)


@gluon.jit
def sum_from(b_all, quarter, three: gl.constexpr):
    """The sum of `quarter` and those after it, as sum_before."""
    four: gl.constexpr = b_all.type.layout
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    b_sum = gl.sum(gl.where(other < quarter, 0.0, b_all), 1)
    return gl.convert_layout(b_sum[:, None, :], three)


@gluon.jit
def sum_until(b_all, end: gl.constexpr, three: gl.constexpr):
    """The sum of quarters before `end` [1, 1, 64], rounded down."""
    four: gl.constexpr = b_all.type.layout
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    b_sum = gl.floor(gl.sum(gl.where(other < end, b_all, 0.0), 1))
    return gl.convert_layout(b_sum[:, None, :], three)


@gluon.jit
def halves_of(b_all, three: gl.constexpr):
    """The sums of both halves [1, 1, 64], in the layout of tokens."""
    four: gl.constexpr = b_all.type.layout
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    b_early = gl.sum(gl.where(other < 2, b_all, 0.0), 1)
    b_late = gl.sum(gl.where(other < 2, 0.0, b_all), 1)
    b_early = gl.convert_layout(b_early[:, None, :], three)
    return b_early, gl.convert_layout(b_late[:, None, :], three)
