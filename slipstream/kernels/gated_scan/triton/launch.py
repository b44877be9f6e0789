"""Launches of the scan (scan.py): one, after memory for its words is zeroed.

Tiles depend on nothing but the direction, and what is before a tile on its own sequence alone: a
sequence's result is the same bits in every batch. Memory beyond results is 16 bytes for each tile
and channel, 4 / (RUN * RUNS) of x in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gated_scan.triton.scan import scan_kernel
from slipstream.runtime.backends import INTERPRETED, device_of
from slipstream.runtime.launch_cache import cached


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
    """The backward scan's own arguments, by the names of scan.py."""

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
    """y of scan.py in x's dtype; s_out and what `back` has to be filled."""
    x, g = x.contiguous(), g.contiguous()
    y, T, D, N = torch.empty_like(x), x.shape[1], x.shape[2], _sequences(x, cu)
    tile = INTERPRETER if INTERPRETED else FORWARD if back is None else BACKWARD
    L = tile.RUN * tile.RUNS
    num_tiles = x.shape[0] * -(-T // L) if cu is None else T // L + N
    with device_of(x.device):
        words = torch.zeros(1 + 2 * num_tiles * D, dtype=torch.int64, device=x.device)
        cached(scan_kernel)[-(-D // tile.BD) * num_tiles,](
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
