"""Shared by the forward and the backward kernel: tiles of tokens, and scans of them.

A tile is RUNS runs of RUN tokens by BD channels. The tokens of a run are a thread's: a tensor of a
tile is a tuple of RUN tensors [RUNS, BD], the i-th of the i-th token of every run.
"""

import triton
import triton.language as tl


@triton.jit
def _then_also_before(a, x, pa, px, b, y, pb, py):
    """y -> a y + x, and after it y -> b y + y; and the map of all that is before the last."""
    return a * b, b * x + y, a * pb, pb * x + py


@triton.jit
def scan_runs(b_a, b_x, b_0, REVERSE: tl.constexpr):
    """y before each run [RUNS, BD], if a run makes a y + x of y and b_0 [BD] is before the first;
    REVERSE: before the last, and y after each run."""
    if REVERSE:  # associative_scan's own way to go back takes more shuffles
        b_a, b_x = tl.flip(b_a, 0), tl.flip(b_x, 0)
    both = (b_a, b_x, tl.full(b_a.shape, 1.0, tl.float32), tl.zeros_like(b_x))
    b_a, b_x, b_pa, b_px = tl.associative_scan(both, 0, _then_also_before)
    b_y = b_px + b_pa * b_0[None, :]
    return tl.flip(b_y, 0) if REVERSE else b_y


@triton.jit
def scan_forward(b_a, b_x, b_total, b_0, RUN: tl.constexpr):
    """h before each run, and then h_t = a_t h_{t-1} + x_t of a tile; b_total: the product of a."""
    b_h = b_x[0]
    for i in tl.static_range(1, RUN):
        b_h = b_a[i] * b_h + b_x[i]
    b_h = scan_runs(b_total, b_h, b_0, False)
    h = (b_h,)
    for i in tl.static_range(RUN):
        b_h = b_a[i] * b_h + b_x[i]
        h = h + (b_h,)
    return h


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as exact for small results as for large ones."""
    e = tl.exp(-tl.abs(x))
    w = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(w == 1.0, e, tl.log(w) * (e / (w - 1.0)))


@triton.jit
def channels(i_d, D: tl.constexpr, G: tl.constexpr, BD: tl.constexpr, VEC: tl.constexpr):
    """Group of a program, its channels, and which of them are there."""
    NB: tl.constexpr = (D // G + BD - 1) // BD
    i_g = i_d // NB
    o_c = (i_d % NB) * BD + tl.arange(0, BD)
    o_d = i_g * (D // G) + o_c
    # channels a thread takes, fewer than it could load at once: the others go along the tokens
    o_d = tl.max_contiguous(tl.multiple_of(o_d, VEC), VEC)
    return i_g, o_d, o_c < D // G


@triton.jit
def load_wide(ptr, m):
    return tl.load(ptr, mask=m, other=0.0).to(tl.float32)


@triton.jit
def load_tile(ptr, row, begin, o_r, tokens, o_d, m_d, RUN: tl.constexpr):
    """A tile of x [tokens, D], a row each `row`: o_r are the first tokens of the runs."""
    tile = ()
    for i in tl.static_range(RUN):
        m = ((o_r + i) < tokens)[:, None] & m_d[None, :]
        tile = tile + (load_wide(ptr + (begin + o_r + i)[:, None] * row + o_d[None, :], m),)
    return tile


@triton.jit
def step_size(b_delta, m, SOFTPLUS: tl.constexpr):
    """dt, 0 where there is no token: such leave the state as it is."""
    b_dt = softplus(b_delta) if SOFTPLUS else b_delta
    return tl.where(m, b_dt, 0.0)
