# pyright: reportCallIssue=false, reportIndexIssue=false
"""Launches of the scan (scan.py): one, or three for long sequences of few channels.

Tiles depend on dtypes, the split on T and D, and on nothing but a sequence's own length in its
effect: a sequence's result is the same bits in every batch. Split, the inputs are read twice;
memory beyond results is 3 / SEGMENT of x in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.kept import kept
from slipstream.kernels.launching import INTERPRETED, on
from slipstream.kernels.scan.triton.scan import scan_ends_kernel, scan_walk_kernel

# Tokens of a segment, and channels below which there are too few programs without any.
SEGMENT = 1024
NARROW = 768


class Tile(NamedTuple):
    """RUNS runs of RUN rows, and BD channels: 32 bytes of a row in 16 bits, a sector."""

    RUN: int
    RUNS: int
    BD: int
    warps: int
    stages: int


FORWARD = Tile(4, 64, 16, 4, 3)
BACKWARD = Tile(4, 64, 16, 4, 2)
INTERPRETER = Tile(2, 4, 16, 4, 1)


class Back(NamedTuple):
    """What only the backward walk has, by the names of scan.py."""

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
    """y of scan.py in x's dtype, s_out and what `back` has to be filled."""
    x, g = x.contiguous(), g.contiguous()
    s_in = None if s_in is None else s_in.contiguous()
    cu = None if cu is None else cu.contiguous()
    y, T, N = torch.empty_like(x), x.shape[1], _sequences(x, cu)
    sizes = (T, N, x.shape[2])
    tile = _tile(back is not None)
    with on(x.device):
        if T <= SEGMENT or x.shape[2] >= NARROW:
            _walk(tile, sizes, N, x, g, y, s_in, s_out, None, cu, back)
            return y
        slots = x.shape[0] * -(-T // SEGMENT) if cu is None else T // SEGMENT + N
        sums, ends, after = x.new_empty(3, slots, x.shape[2], dtype=torch.float32).unbind()
        _ends(tile, sizes, slots, x, g, sums, ends, cu, back is not None)
        _walk(_tile(False), sizes, N, ends, sums, after, s_in, None, None, cu, None, unit=SEGMENT)
        _walk(tile, sizes, slots, x, g, y, s_in, s_out, after, cu, back)
    return y


def _tile(back: bool) -> Tile:
    if INTERPRETED:
        return INTERPRETER
    return BACKWARD if back else FORWARD


def _ends(
    tile: Tile,
    sizes: tuple[int, int, int],
    slots: int,
    x: Tensor,
    g: Tensor,
    sums: Tensor,
    ends: Tensor,
    cu: Tensor | None,
    reverse: bool,
) -> None:
    T, N, D = sizes
    kept(scan_ends_kernel)[-(-D // tile.BD) * slots,](
        x,
        g,
        sums,
        ends,
        cu,
        T,
        N,
        D=D,
        RUN=tile.RUN,
        RUNS=tile.RUNS,
        STAGES=tile.stages,
        BD=tile.BD,
        L=SEGMENT,
        REVERSE=reverse,
        num_warps=tile.warps,
    )


def _walk(
    tile: Tile,
    sizes: tuple[int, int, int],
    programs: int,
    x: Tensor,
    g: Tensor,
    y: Tensor,
    s_in: Tensor | None,
    s_out: Tensor | None,
    after: Tensor | None,
    cu: Tensor | None,
    back: Back | None,
    unit: int = 1,
) -> None:
    T, N, D = sizes
    kept(scan_walk_kernel)[-(-D // tile.BD) * programs,](
        x,
        g,
        y,
        s_in,
        s_out,
        after,
        back.h if back else None,
        back.initial if back else None,
        back.dg if back else None,
        cu,
        T,
        N,
        D=D,
        RUN=tile.RUN,
        RUNS=tile.RUNS,
        STAGES=tile.stages,
        BD=tile.BD,
        L=SEGMENT,
        UNIT=unit,
        REVERSE=back is not None,
        num_warps=tile.warps,
    )
