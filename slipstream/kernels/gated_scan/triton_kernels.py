"""One kernel for the scan, forward and backward, that reads and writes everything once.

    y_r = a_r y_{r-1} + x_r                                      r = 0 .. rows - 1 of a sequence

Forward, row r is token r, x is x, a is exp(g) and y is h. Backward, row r is the r-th token from
the end, x is dh, y is D, the whole gradient of h, and a_r is the decay of the token after it:

    D_t = dh_t + a_{t+1} D_{t+1}        dx_t = D_t        dg_t = D_t a_t h_{t-1}

with the final state's gradient for D before row 0, where a is 1, and a_0 D_0 for the initial's.

A program takes a tile of RUNS runs of RUN rows and scans it as if y before it were 0, at the same
time as the other programs scan theirs: each run in the registers of a thread, then all runs across
threads. As a whole, tile i maps y before it to a_i y + x_i; its program publishes a_i and x_i. Then
it waits for those of the three tiles before, and for y after the tile before these, whose program
had to wait in the same way:

    y_before(i) = x_{i-1} + a_{i-1} (x_{i-2} + a_{i-2} (x_{i-3} + a_{i-3} y_after(i-4)))

So four chains of tiles wait side by side, about a microsecond a link. The order of sums never
depends on time: the same inputs, the same bits. Programs take their tiles by a ticket, so that the
tiles they wait for have been begun.

What is published is a word of 64 bits, 0 before that: a (or 1) as float32 in the high half, x (or
y) in the low half. a is never negative, so its sign bit says that the word is filled.

One launch, after memory for its words is zeroed. Tiles depend on nothing but the direction, and
what is before a tile on its own sequence alone: a sequence's result is the same bits in every
batch. Memory beyond results is 16 bytes for each tile and channel, 4 / (RUN * RUNS) of x in
float32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.primitives.device import tokens_of
from slipstream.runtime import backends, launch_cache

CHAINS = tl.constexpr(4)


@triton.jit
def combine(a, x, b, y):
    """z -> a z + x, followed by z -> b z + y, as one map: its factor and its summand."""
    return a * b, b * x + y


@triton.jit
def _then_also_before(a, x, pa, px, b, y, pb, py):
    """The same, and the map of all that is before the last."""
    return a * b, b * x + y, a * pb, pb * x + py


@triton.jit
def _last(b_x, axis: tl.constexpr, SIZE: tl.constexpr):
    """As integers, since the compiler may leave out a sum with 0 there."""
    o = tl.arange(0, SIZE)
    last = (o == SIZE - 1)[:, None] if axis == 0 else (o == SIZE - 1)[None, :, None]
    b_i = tl.where(last, b_x.to(tl.int32, bitcast=True), 0)
    return tl.sum(b_i, axis).to(tl.float32, bitcast=True)


@triton.jit
def _runs(b_a, b_x, RUN: tl.constexpr, RUNS: tl.constexpr):
    """The products of a and the sums before each run of a tile, and those of the whole tile. b_a,
    b_x: the same within a run, up to each row."""
    b_al, b_xl = _last(b_a, 1, RUN), _last(b_x, 1, RUN)  # [RUNS, BD]
    b_pa, b_px = tl.full(b_al.shape, 1.0, tl.float32), tl.zeros_like(b_xl)
    both = (b_al, b_xl, b_pa, b_px)
    b_al, b_xl, b_pa, b_px = tl.associative_scan(both, 0, _then_also_before)
    return b_pa, b_px, _last(b_al, 0, RUNS), _last(b_xl, 0, RUNS)


@triton.jit
def _tile_of(cu_ptr, tile, T, N, L: tl.constexpr):
    """The sequence of a slot, and which of its tiles of L rows it is.

    Packed, the tiles of sequence n have the slots from cu[n] // L + n on: never more than there are
    up to the next sequence's.
    """
    if cu_ptr is not None:
        i_n = 0
        end = N
        while end - i_n > 1:
            middle = (i_n + end) // 2
            before = tl.load(cu_ptr + middle).to(tl.int64) // L + middle <= tile
            i_n = tl.where(before, middle, i_n)
            end = tl.where(before, end, middle)
        i_t = tile - (tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0) // L + i_n)
    else:
        tiles = tl.cdiv(T, L)
        i_n = tile // tiles
        i_t = tile - i_n * tiles
    return i_n, i_t.to(tl.int32)


@triton.jit
def _load(x_ptr, g_ptr, begin, rows, o_r, stop, o_d, D: tl.constexpr, REVERSE: tl.constexpr):
    """Token, log decay and input of each row; those past `stop` leave y alone."""
    o_t = begin + (rows - 1 - o_r if REVERSE else o_r)
    m = (o_r < stop) & (o_d < D)[None, None, :]
    p = o_t * D + o_d[None, None, :]
    b_x = tl.load(x_ptr + p, mask=m, other=0.0).to(tl.float32)
    if REVERSE:
        b_g = tl.load(g_ptr + p + D, mask=m & (o_r > 0), other=0.0).to(tl.float32)
    else:
        b_g = tl.load(g_ptr + p, mask=m, other=0.0).to(tl.float32)
    return p, m, b_g, b_x


@triton.jit
def publish_prefix(p, m, b_a, b_x):
    b_w = b_a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    # the highest bit says that the word is there
    b_w |= (b_x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | -(1 << 63)
    tl.atomic_xchg(p, b_w, mask=m, sem="relaxed")


@triton.jit
def poll_prefix(p, m):
    # else 1 and 0, by which y stays y
    return tl.load(p, mask=m, other=-0x40800000 << 32, volatile=True)


@triton.jit
def load_prefix(b_w):
    b_a = tl.abs((b_w >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    return b_a, b_w.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _before(prefix_ptr, state_ptr, b_0, i_t, m, D: tl.constexpr):
    """y before a tile, the i_t-th of its sequence, whose words are there; b_0: before the first."""
    p_y, m_y = state_ptr - CHAINS * D, m & (i_t >= CHAINS)
    m_1, m_2, m_3 = m & (i_t >= 1), m & (i_t >= 2), m & (i_t >= 3)
    b_wy, b_w1 = poll_prefix(p_y, m_y), poll_prefix(prefix_ptr - D, m_1)
    b_w2, b_w3 = poll_prefix(prefix_ptr - 2 * D, m_2), poll_prefix(prefix_ptr - 3 * D, m_3)
    b_all = ((b_wy & b_w1 & b_w2 & b_w3) >> 32).to(tl.int32)
    # poll until the four words are there; they were published by programs that have begun. A
    # program gives up, with NaN, far beyond any kernel's time.
    looks = 0
    while (tl.max(b_all) >= 0) & (looks < 1 << 22):
        b_wy, b_w1 = poll_prefix(p_y, m_y), poll_prefix(prefix_ptr - D, m_1)
        b_w2, b_w3 = poll_prefix(prefix_ptr - 2 * D, m_2), poll_prefix(prefix_ptr - 3 * D, m_3)
        b_all = ((b_wy & b_w1 & b_w2 & b_w3) >> 32).to(tl.int32)
        looks += 1
    b_a1, b_x1 = load_prefix(b_w1)
    b_a2, b_x2 = load_prefix(b_w2)
    b_a3, b_x3 = load_prefix(b_w3)
    _, b_y = load_prefix(b_wy)
    b_y = tl.where(i_t >= CHAINS, b_y, b_0)
    b_y = b_x1 + b_a1 * (b_x2 + b_a2 * (b_x3 + b_a3 * b_y))
    return tl.where(b_all < 0, b_y, float("nan"))


@triton.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    x_ptr,  # [tokens, D]; so are g, y, h, dg
    g_ptr, y_ptr,
    s_in_ptr,  # [N, D]: y before the first row
    s_out_ptr,  # [N, D]: after the last, and backward through the first token's decay
    word_ptr,  # [1 + 2 * slots * D], zeros: the ticket, what tiles make of y, y after them
    h_ptr,  # backward: the scan's result
    initial_ptr,  # [N, D]: and its state before the first token
    dg_ptr,
    cu_ptr,  # [N + 1]
    T, N,
    D: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, BD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """grid (ceil(D / BD) * slots,)"""
    ND: tl.constexpr = (D + BD - 1) // BD
    L: tl.constexpr = RUN * RUNS
    # each warp looks at words by itself, at another time: what it waits for has to be all its own
    tl.static_assert(BD <= 32)
    # tiles are taken in order, so that a tile's predecessors have begun: no deadlock
    ticket = tl.atomic_add(word_ptr, 1, sem="relaxed").to(tl.int32)
    o_d = (ticket % ND) * BD + tl.arange(0, BD)
    m_d = o_d < D
    tile = (ticket // ND).to(tl.int64)
    i_n, i_t = _tile_of(cu_ptr, tile, T, N, L)
    begin, rows = tokens_of(cu_ptr, i_n, T)
    o_n = i_n.to(tl.int64) * D + o_d
    r = tl.maximum(i_t, 0) * L
    stop = tl.minimum(rows, r + L)
    # threads go along the first dimension
    o_r = r + RUN * tl.arange(0, RUNS)[:, None, None] + tl.arange(0, RUN)[None, :, None]
    p, m, b_g, b_x = _load(x_ptr, g_ptr, begin, rows, o_r, stop, o_d, D, REVERSE)
    # each run by itself, from y = 0
    b_a, b_y = tl.associative_scan((tl.exp(b_g), b_x), 1, combine)
    b_pa, b_px, b_al, b_xl = _runs(b_a, b_y, RUN, RUNS)
    prefix_ptr = word_ptr + 1 + tile * D + o_d
    state_ptr = prefix_ptr + tl.num_programs(0).to(tl.int64) // ND * D
    # the tile as a map y -> a y + x, for the three tiles after it
    if stop < rows:
        publish_prefix(prefix_ptr, m_d, b_al, b_xl)
    b_0 = tl.zeros((BD,), tl.float32)
    if s_in_ptr is not None:
        b_0 += tl.load(s_in_ptr + o_n, mask=m_d, other=0.0).to(tl.float32)
    if (i_t > 0) & (r < rows):
        b_0 = _before(prefix_ptr, state_ptr, b_0, i_t, m_d, D)
    # y after the tile, for the fourth tile after it
    b_last = b_xl + b_al * b_0
    if stop < rows:
        publish_prefix(state_ptr, m_d, tl.full((BD,), 1.0, tl.float32), b_last)
    # what came before enters each row through the product of decays up to it
    b_y += b_a * (b_pa * b_0[None, :] + b_px)[:, None, :]
    tl.store(y_ptr + p, b_y.to(y_ptr.dtype.element_ty), mask=m)
    if dg_ptr is not None:
        first = o_r == rows - 1
        b_before = tl.load(h_ptr + p - D, mask=m & (~first), other=0.0).to(tl.float32)
        if initial_ptr is not None:
            b_i = tl.load(initial_ptr + o_n, mask=m_d, other=0.0).to(tl.float32)
            b_before = tl.where(first, b_i[None, None, :], b_before)
        b_dg = b_y * b_before * tl.exp(tl.load(g_ptr + p, mask=m, other=0.0).to(tl.float32))
        tl.store(dg_ptr + p, b_dg.to(dg_ptr.dtype.element_ty), mask=m)
    if s_out_ptr is not None:
        if REVERSE:  # a sequence without tokens has no decay
            b_g = tl.load(g_ptr + begin * D + o_d, mask=m_d & (rows > 0), other=0.0)
            b_last *= tl.exp(b_g.to(tl.float32))
        # of the program that came to the last row
        m_s = m_d & (i_t == tl.maximum(tl.cdiv(rows, L) - 1, 0))
        tl.store(s_out_ptr + o_n, b_last.to(s_out_ptr.dtype.element_ty), mask=m_s)


class Tile(NamedTuple):
    """RUNS runs of RUN rows, and BD channels."""

    RUN: int
    RUNS: int
    BD: int
    warps: int


FORWARD = Tile(4, 32, 16, 2)
BACKWARD = Tile(4, 32, 32, 4)
# small, so that tests of a few tokens have several tiles
INTERPRETER = Tile(2, 4, 16, 4)


class Back(NamedTuple):
    """The backward scan's own arguments, by the names of scan_kernel."""

    h: Tensor
    initial: Tensor | None
    dg: Tensor


def forward(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h [B, T, D] in x's dtype and the final state [N, D], float32."""
    final = x.new_empty(_sequences(x, cu_seqlens), x.shape[2], dtype=torch.float32)
    return _scan(x, g, initial_state, final, cu_seqlens, None), final


def backward(
    g: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dh: Tensor | None,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, g and initial_state from h, the scan's result, and dh, dfinal."""
    dh = torch.zeros_like(h, memory_format=torch.contiguous_format) if dh is None else dh
    dg = g.new_empty(g.shape)
    dinitial = None
    if initial_state is not None:
        dinitial = initial_state.new_empty(initial_state.shape)
        initial_state = initial_state.contiguous()
    back = Back(h.contiguous(), initial_state, dg)
    dx = _scan(dh, g, dfinal, dinitial, cu_seqlens, back)
    return dx, dg, dinitial


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _scan(
    x: Tensor,
    g: Tensor,
    s_in: Tensor | None,
    s_out: Tensor | None,
    cu: Tensor | None,
    back: Back | None,
) -> Tensor:
    """y of scan_kernel in x's dtype; s_out and what `back` has to be filled."""
    x, g = x.contiguous(), g.contiguous()
    y, T, D, N = torch.empty_like(x), x.shape[1], x.shape[2], _sequences(x, cu)
    tile = INTERPRETER if backends.INTERPRETED else FORWARD if back is None else BACKWARD
    L = tile.RUN * tile.RUNS
    num_tiles = x.shape[0] * -(-T // L) if cu is None else T // L + N
    words = torch.zeros(1 + 2 * num_tiles * D, dtype=torch.int64, device=x.device)
    launch_cache.cached(scan_kernel)[-(-D // tile.BD) * num_tiles,](
        x_ptr=x,
        g_ptr=g,
        y_ptr=y,
        s_in_ptr=None if s_in is None else s_in.contiguous(),
        s_out_ptr=s_out,
        word_ptr=words,
        h_ptr=back.h if back else None,
        initial_ptr=back.initial if back else None,
        dg_ptr=back.dg if back else None,
        cu_ptr=None if cu is None else cu.contiguous(),
        T=T,
        N=N,
        D=D,
        RUN=tile.RUN,
        RUNS=tile.RUNS,
        BD=tile.BD,
        REVERSE=back is not None,
        num_warps=tile.warps,
    )
    return y
