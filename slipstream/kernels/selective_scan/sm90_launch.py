"""Launches of the selective scan for sm_90: a kernel forward, one backward and the sums of what it
leaves.

A sequence's result is the same bits in every batch: the threads that share a channel are as many in
every tile. Sums over channels, dB and dC, follow the tile. Memory beyond results: for a backward
4 N / SM90_CHUNK bytes an element of u from forward on; backward 8 N / Tile.width for dB and dC.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.selective_scan import inputs as arguments
from slipstream.kernels.selective_scan import sm90_kernels as kernels
from slipstream.runtime import backends, launch_cache


class Tile(NamedTuple):
    """A thread has CHANNELS channels, N / LANES numbers of the state of each."""

    CHANNELS: int
    LANES: int
    warps: int

    @property
    def width(self) -> int:
        return self.CHANNELS * 32 // self.LANES * self.warps


# and the warps a multiprocessor that it wants: the first takes the fewest instructions
FORWARD = ((Tile(2, 2, 1), 6), (Tile(1, 2, 1), 0))
BACKWARD = ((Tile(4, 4, 1), 6), (Tile(2, 4, 1), 3), (Tile(1, 4, 1), 0))


def forward(
    inputs: arguments.ScanInputs, delta_softplus: bool, for_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D] in u's dtype, the final state [S, D, N], and the states that backward reads."""
    u, S = inputs.u, inputs.sequences
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    states = arguments.empty_states(inputs, arguments.SM90_CHUNK, for_backward)
    final = states.new_empty(S, *inputs.A.shape)
    tile = _tile(FORWARD, inputs, S)
    blocks = arguments.channel_blocks(inputs, tile.width)
    launch_cache.cached(kernels.selective_scan_forward_sm90_kernel)[(blocks * S,)](
        y_ptr=y,
        final_ptr=final,
        states_ptr=states if for_backward else None,
        blocks=blocks,
        **_layout(inputs),
        **_constants(inputs, tile, delta_softplus),
    )
    return y, final, states


def backward(
    inputs: arguments.ScanInputs,
    states: Tensor,
    dy: Tensor | None,
    dfinal: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor | None]:
    """Gradients of the nine tensors of ScanInputs that have one, None for those not given."""
    B, T, _ = inputs.u.shape
    dy, dy_row = arguments.rows(torch.zeros_like(inputs.u) if dy is None else dy)
    programs = min(inputs.sequences, arguments.SEQUENCE_PROGRAMS)
    tile = _tile(BACKWARD, inputs, programs)
    blocks = arguments.channel_blocks(inputs, tile.width)
    grads = arguments.empty_gradients(inputs, states, programs, blocks, tokens_last=False)
    launch_cache.cached(kernels.selective_scan_backward_sm90_kernel)[(blocks * programs,)](
        states_ptr=states,
        dy_ptr=dy,
        dfinal_ptr=arguments.contiguous(dfinal),
        **grads.pointers(),
        rows=B * T,
        blocks=blocks,
        sequences=inputs.sequences,
        programs=programs,
        dy_row=dy_row,
        SUB=8,  # tokens whose states wait in shared memory
        **_layout(inputs),
        **_constants(inputs, tile, delta_softplus),
    )
    return grads.summed(inputs, tokens_last=False)


def _layout(inputs: arguments.ScanInputs) -> dict[str, Any]:
    B, B_row = arguments.rows(inputs.B.flatten(2))
    C, C_row = arguments.rows(inputs.C.flatten(2))
    sequences = {"cu_ptr": arguments.contiguous(inputs.cu_seqlens), "total": inputs.u.shape[1]}
    return arguments.pointers(inputs, B, C) | {"B_row": B_row, "C_row": C_row} | sequences


def _tile(tiles: Sequence[tuple[Tile, int]], inputs: arguments.ScanInputs, sequences: int) -> Tile:
    """The first of which there are as many warps as it wants; the last wants none."""
    multiprocessors = backends.sm_count(inputs.u.get_device())
    fitting = ((_fitting(tile, inputs), warps * multiprocessors) for tile, warps in tiles)
    return next(
        tile
        for tile, min_warps in fitting
        if arguments.channel_blocks(inputs, tile.width) * sequences * tile.warps >= min_warps
    )


def _fitting(tile: Tile, inputs: arguments.ScanInputs) -> Tile:
    """With as many numbers a thread, and as many channels, as for states of 16."""
    times = max(_padded(inputs.A.shape[1]) // 16, 1)
    return tile._replace(LANES=tile.LANES * times, warps=tile.warps * times)


def _padded(N: int) -> int:
    """Numbers of a state in registers."""
    return max(4, 1 << (N - 1).bit_length())


def _constants(
    inputs: arguments.ScanInputs, tile: Tile, delta_softplus: bool
) -> dict[str, int | bool]:
    N = inputs.A.shape[1]
    return {
        "D": inputs.u.shape[2],
        "N": N,
        "G": inputs.B.shape[2],
        "SOFTPLUS": delta_softplus,
        "T": arguments.SM90_CHUNK,
        "NP": _padded(N),
        "CHANNELS": tile.CHANNELS,
        "LANES": tile.LANES,
        "WARPS": tile.warps,
        "num_warps": tile.warps,
    }
