"""Packed sequences in spans that many sequences take at once: which chunks of each, found on the
device.

    order of chunks: by (sequence // rows, chunk of the sequence, sequence)
    span i: those from number i * room to (i + 1) * room - 1

So the first chunks of `rows` sequences come first, then their second ones, and so on, and a span is
a window of each sequence, [first, past) of its chunks. A span has `room` chunks whatever the
lengths are, and T / C + N chunks at most are counted: the number of spans, their memory and that of
the states at their borders follow from shapes alone, and hold for every packing. At a border the
sequences of one group of `rows` go on: the state of sequence n is in slot n % rows.

Symbols: C tokens a chunk, N sequences, c chunks of one.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.kept import kept
from slipstream.kernels.launching import on
from slipstream.kernels.linear.hopper.plan import CHUNK, FUSED, TILE_V
from slipstream.kernels.linear.slices import COUNT, LITTLE, MOST, SPARSE
from slipstream.kernels.linear.terms import Terms

PROGRAMS = 128  # that keep all multiprocessors, about
ENOUGH = 0.1  # of memory, which is not worth another span where none is little enough
BLOCK = 128


@triton.jit
def chunks_of(cu_ptr, o_n, past, T, C: tl.constexpr):
    """Of sequences o_n; 0 from `past` on."""
    m_n = o_n < past
    b_begin = tl.maximum(tl.load(cu_ptr + o_n, mask=m_n, other=0).to(tl.int32), 0)
    b_end = tl.minimum(tl.load(cu_ptr + o_n + 1, mask=m_n, other=0).to(tl.int32), T)
    return tl.cdiv(tl.maximum(b_end - b_begin, 0), C)


@triton.jit
def border_of(cu_ptr, number, T, N, rows, C: tl.constexpr, BLOCK: tl.constexpr):
    """Where the order of chunks comes to `number`: the group's first sequence and the one past it,
    how many chunks all of these have had, and how many sequences have had one more."""
    met = 0
    groups = 0
    before = 0  # chunks of whole groups
    for at in range(0, N, BLOCK):
        o_n = at + tl.arange(0, BLOCK)
        b_met = met + tl.cumsum(chunks_of(cu_ptr, o_n, N, T, C), 0)
        ends = (o_n % rows == rows - 1) | (o_n == N - 1)
        whole = ends & (o_n < N) & (b_met <= number)
        groups += tl.sum(whole.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(whole, b_met, 0), 0))
        met = tl.max(b_met, 0)
    first = tl.minimum(groups * rows, N)
    past = tl.minimum(first + rows, N)
    level = 0
    beyond = tl.cdiv(T, C) + 1  # the level is below it
    of_level = 0
    while beyond - level > 1:
        middle = (level + beyond) // 2
        count = 0
        for at in range(first, past, BLOCK):
            b_c = chunks_of(cu_ptr, at + tl.arange(0, BLOCK), past, T, C)
            count += tl.sum(tl.minimum(b_c, middle), 0)
        fits = count <= number - before
        level = tl.where(fits, middle, level)
        of_level = tl.where(fits, count, of_level)
        beyond = tl.where(fits, beyond, middle)
    return first, past, level, number - before - of_level


@triton.jit
def cut_of(o_n, b_c, first, past, level, more, rank):
    """Chunks of sequences o_n before a border; rank: sequences before them with more than level."""
    within = (o_n >= first) & (o_n < past)
    b_more = (within & (b_c > level)).to(tl.int32)
    b_rank = rank + tl.cumsum(b_more, 0) - b_more
    b_cut = tl.minimum(b_c, level) + b_more * (b_rank < more).to(tl.int32)
    b_cut = tl.where(o_n < first, b_c, tl.where(within, b_cut, 0))
    return b_cut, rank + tl.sum(b_more, 0)


@triton.jit(do_not_specialize=["room", "T", "N", "rows"])
def delta_windows_kernel(
    cu_ptr,  # [N + 1]
    windows_ptr,  # [spans + 1, N, 4]: first, past, where S of the first is kept, slot
    room,
    T,
    N,
    rows,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (spans + 1,)"""
    i = tl.program_id(0)
    low_first, low_past, low_level, low_more = border_of(cu_ptr, i * room, T, N, rows, C, BLOCK)
    first, past, level, more = border_of(cu_ptr, (i + 1) * room, T, N, rows, C, BLOCK)
    low_rank = 0
    rank = 0
    kept = 0
    for at in range(0, N, BLOCK):
        o_n = at + tl.arange(0, BLOCK)
        b_c = chunks_of(cu_ptr, o_n, N, T, C)
        b_low, low_rank = cut_of(o_n, b_c, low_first, low_past, low_level, low_more, low_rank)
        b_high, rank = cut_of(o_n, b_c, first, past, level, more, rank)
        b_own = b_high - b_low
        p_n = windows_ptr + (i * N + o_n) * 4
        m_n = o_n < N
        tl.store(p_n, b_low, mask=m_n)
        tl.store(p_n + 1, b_high, mask=m_n)
        tl.store(p_n + 2, kept + tl.cumsum(b_own, 0) - b_own, mask=m_n)
        tl.store(p_n + 3, o_n % rows, mask=m_n)
        kept += tl.sum(b_own, 0)


class Cut(NamedTuple):
    """spans: how many. rows: sequences that go at once, and on at a border. room: chunks of one."""

    spans: int
    rows: int
    room: int


class Window(NamedTuple):
    """A span of packed sequences, as launches take it."""

    table: Tensor  # [N, 4]
    before: Tensor  # [rows, HV, K, V]: states, or their gradients, at the border it begins from
    after: Tensor  # at that it ends with


def cut_for(terms: Terms) -> Cut | None:
    """By shapes alone, so that what there is beyond arguments and results stays below MOST percent
    of those, in as few spans as that takes; if none do, about as little as can be: short sequences,
    whose states are as much as their tokens. None: whole. Either is so for every packing; where the
    graph is kept, two states at borders come on top.

    All sequences at once, so that none waits for another, or, where their states at the borders
    would take too much, as many as keep the card busy. Spans have SPARSE tokens at least for each.
    """
    T, HV, V = terms.v.shape[1:]
    N, E = terms.sequences, terms.v.element_size()
    if V < 2 * TILE_V:
        return None
    slots = T // CHUNK + N
    state = prod(terms.state_shape[1:])  # of one sequence
    given = sum(x.numel() * x.element_size() for x in terms if x is not None)
    allowed = (given + T * HV * V * E) * 2 * int(10 * MOST) // 1000
    allowed -= HV * (T * CHUNK * E + slots * CHUNK * 8)  # R, beta and G
    if slots * state * E <= max(allowed, LITTLE):
        return None
    most = max(1, min(COUNT, T // (SPARSE * N)))
    found = {Cut(1, N, slots): slots * state * E}
    for rows in (N, *(min(N, -(-x // HV)) for x in (PROGRAMS, FUSED))):
        for spans in range(2, most + 1):
            # of a group, each sequence that has not ended has a chunk in every span
            cut = Cut(spans, rows, max(-(-slots // spans), rows))
            found[cut] = cut.room * state * E + (spans - 1) * rows * state * 4
    fitting = [cut for cut, size in found.items() if size <= allowed]
    if not fitting:
        best = (1 + ENOUGH) * min(found.values())
        fitting = [min((cut for cut, size in found.items() if size <= best), key=lambda x: x.spans)]
    cut = fitting[0]
    return cut if cut.spans > 1 else None


def windows(terms: Terms, cut: Cut) -> Tensor:
    """[spans + 1, N, 4] int32, as delta_windows_kernel has them; the last has no chunks."""
    assert terms.cu_seqlens is not None
    cu, N = terms.cu_seqlens.contiguous(), terms.sequences
    table = torch.empty(cut.spans + 1, N, 4, dtype=torch.int32, device=cu.device)
    launch: Any = kept(delta_windows_kernel)[(cut.spans + 1,)]
    with on(cu.device):
        launch(
            cu, table, cut.room, terms.q.shape[1], N, cut.rows, C=CHUNK, BLOCK=BLOCK, num_warps=4
        )
    return table
