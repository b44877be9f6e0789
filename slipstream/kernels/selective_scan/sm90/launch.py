"""Launches of the selective scan for sm_90: a kernel forward, one backward and the sums of what it
leaves.

A sequence's result is the same bits in every batch: the threads that share a channel are as many in
every tile. Sums over channels, dB and dC, follow the tile. Memory beyond results: for a backward
4 N / CHUNK bytes an element of u from forward on; backward 8 N / Tile.width for dB and dC.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.kernels.selective_scan.sm90.backward import selective_scan_backward_sm90_kernel
from slipstream.kernels.selective_scan.sm90.forward import selective_scan_forward_sm90_kernel
from slipstream.kernels.selective_scan.sm90.plan import CHUNK, empty_states, padded
from slipstream.runtime.backends import device_of, sm_count
from slipstream.runtime.launch_cache import cached


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
# Tokens whose states wait in shared memory.
SUB = 8
# Programs that share the sequences of a backward: each leaves a sum over its own.
SEQUENCE_PROGRAMS = 64


def forward(
    inputs: ScanInputs, delta_softplus: bool, for_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D] in u's dtype, the final state [S, D, N], and the states that backward reads."""
    u, S = inputs.u, inputs.sequences
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    states = empty_states(inputs, for_backward)
    final = states.new_empty(S, *inputs.A.shape)
    tile = _tile(FORWARD, inputs, S)
    blocks = _channel_blocks(inputs, tile)
    with device_of(u.device):
        cached(selective_scan_forward_sm90_kernel)[(blocks * S,)](
            y_ptr=y,
            final_ptr=final,
            states_ptr=states if for_backward else None,
            blocks=blocks,
            **_layout(inputs),
            **_constants(inputs, tile, delta_softplus),
        )
    return y, final, states


def backward(
    inputs: ScanInputs,
    states: Tensor,
    dy: Tensor | None,
    dfinal: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor | None]:
    """Gradients of the nine tensors of ScanInputs that have one, None for those not given."""
    u, A, B, S = inputs.u, inputs.A, inputs.B, inputs.sequences
    (rows, T, D), G, N = u.shape, B.shape[2], A.shape[1]
    dy, dy_row = _rows(torch.zeros_like(u) if dy is None else dy)
    programs = min(S, SEQUENCE_PROGRAMS)
    tile = _tile(BACKWARD, inputs, programs)
    blocks = _channel_blocks(inputs, tile)
    names = ("u", "delta", "z", "initial_state")
    du, ddelta, dz, ds_in = (_empty_like(getattr(inputs, name)) for name in names)
    dA = states.new_empty(programs, N, D)
    dB, dC = states.new_empty(2, blocks, rows * T, N)
    dD, dbias = (
        None if x is None else states.new_empty(programs, D) for x in (inputs.D, inputs.delta_bias)
    )
    with device_of(u.device):
        cached(selective_scan_backward_sm90_kernel)[(blocks * programs,)](
            states_ptr=states,
            dy_ptr=dy,
            dfinal_ptr=_contiguous(dfinal),
            du_ptr=du,
            ddelta_ptr=ddelta,
            dz_ptr=dz,
            dA_ptr=dA,
            dB_ptr=dB,
            dC_ptr=dC,
            dD_ptr=dD,
            dbias_ptr=dbias,
            ds_in_ptr=ds_in,
            rows=rows * T,
            blocks=blocks,
            sequences=S,
            programs=programs,
            dy_row=dy_row,
            SUB=SUB,
            **_layout(inputs),
            **_constants(inputs, tile, delta_softplus),
        )
    of_groups = (
        x.view(G, -1, rows * T, N).sum(1).movedim(0, 1).reshape(B.shape).to(like.dtype)
        for x, like in ((dB, B), (dC, inputs.C))
    )
    of_channels = (
        None if x is None or like is None else x.sum(0).to(like.dtype)
        for x, like in ((dD, inputs.D), (dbias, inputs.delta_bias))
    )
    dD, dbias = of_channels
    return [du, ddelta, dA.sum(0).T.contiguous().to(A.dtype), *of_groups, dD, dz, dbias, ds_in]


def _layout(inputs: ScanInputs) -> dict[str, Any]:
    """Arguments of the kernels: the tensors, and how far it is from token to token of those that
    may have gaps there."""
    u, u_row = _rows(inputs.u)
    delta, delta_row = _rows(inputs.delta)
    z, z_row = (None, 0) if inputs.z is None else _rows(inputs.z)
    B, B_row = _rows(inputs.B.flatten(2))
    C, C_row = _rows(inputs.C.flatten(2))
    A = inputs.A.float().T.contiguous()
    D, bias, state, cu = map(
        _contiguous, (inputs.D, inputs.delta_bias, inputs.initial_state, inputs.cu_seqlens)
    )
    tensors = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "bias": bias}
    named: dict[str, Any] = {f"{name}_ptr": x for name, x in tensors.items()}
    steps = {"u_row": u_row, "delta_row": delta_row, "z_row": z_row, "B_row": B_row, "C_row": C_row}
    return named | steps | {"s_in_ptr": state, "cu_ptr": cu, "total": inputs.u.shape[1]}


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, T, ...], and how far it is from each of the B T tokens to the next."""
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    if x.stride(-1) != 1 or not even:
        x = x.contiguous()
    return x, x.stride(1)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _empty_like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _tile(tiles: Sequence[tuple[Tile, int]], inputs: ScanInputs, sequences: int) -> Tile:
    """The first of which there are as many warps as it wants; the last wants none."""
    multiprocessors = sm_count(inputs.u.get_device())
    fitting = ((_fitting(tile, inputs), warps) for tile, warps in tiles)
    return next(
        tile
        for tile, warps in fitting
        if _channel_blocks(inputs, tile) * sequences * tile.warps >= warps * multiprocessors
    )


def _fitting(tile: Tile, inputs: ScanInputs) -> Tile:
    """With as many numbers a thread, and as many channels, as for states of 16."""
    times = max(padded(inputs.A.shape[1]) // 16, 1)
    return tile._replace(LANES=tile.LANES * times, warps=tile.warps * times)


def _channel_blocks(inputs: ScanInputs, tile: Tile) -> int:
    groups = inputs.B.shape[2]
    return groups * -(-inputs.u.shape[2] // groups // tile.width)


def _constants(inputs: ScanInputs, tile: Tile, delta_softplus: bool) -> dict[str, int | bool]:
    N = inputs.A.shape[1]
    return {
        "D": inputs.u.shape[2],
        "N": N,
        "G": inputs.B.shape[2],
        "SOFTPLUS": delta_softplus,
        "T": CHUNK,
        "NP": padded(N),
        "CHANNELS": tile.CHANNELS,
        "LANES": tile.LANES,
        "WARPS": tile.warps,
        "num_warps": tile.warps,
    }
