"""Launches of the selective scan: one kernel forward, one backward and the sums of what it leaves.

Tiles depend on nothing but the direction, and a tile's states on its own sequence alone: a
sequence's result is the same bits in every batch. Memory beyond results: forward a state each CHUNK
tokens, 4 N / CHUNK bytes an element of u; backward the same again, and 8 N / BACKWARD.BD for dB
and dC.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.selective_scan.inputs import CHUNK, ScanInputs, empty_states
from slipstream.kernels.selective_scan.triton.backward import selective_scan_backward_kernel
from slipstream.kernels.selective_scan.triton.forward import selective_scan_forward_kernel
from slipstream.runtime.backends import INTERPRETED, device_of
from slipstream.runtime.launch_cache import cached


class Tile(NamedTuple):
    """RUNS runs of RUN tokens, CHUNK in all, and BD channels, VEC a thread."""

    RUN: int
    RUNS: int
    BD: int
    VEC: int
    warps: int


INTERPRETER = Tile(2, 4, 16, 2, 4)
FORWARD = INTERPRETER if INTERPRETED else Tile(8, 8, 16, 4, 1)
BACKWARD = INTERPRETER if INTERPRETED else Tile(8, 8, 8, 2, 1)
assert FORWARD.RUN * FORWARD.RUNS == BACKWARD.RUN * BACKWARD.RUNS == CHUNK
# Programs that share the sequences of a backward: each leaves a sum over its own.
SEQUENCE_PROGRAMS = 64


def forward(inputs: ScanInputs, delta_softplus: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D] in u's dtype, the final state [S, D, N], and the states that backward reads."""
    u, S = inputs.u, inputs.sequences
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    states = empty_states(inputs)
    final = states.new_empty(S, *inputs.A.shape)
    tile = _tile(FORWARD, inputs)
    with device_of(u.device):
        cached(selective_scan_forward_kernel)[_channel_blocks(inputs, tile), S](
            y_ptr=y,
            final_ptr=final,
            states_ptr=states,
            cu_ptr=_contiguous(inputs.cu_seqlens),
            T=u.shape[1],
            rows=u.shape[0] * u.shape[1],
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
    tile = _tile(BACKWARD, inputs)
    blocks, programs = _channel_blocks(inputs, tile), min(S, SEQUENCE_PROGRAMS)
    names = ("u", "delta", "z", "initial_state")
    du, ddelta, dz, ds_in = (_empty_like(getattr(inputs, name)) for name in names)
    dA = states.new_zeros(programs, N, D)
    dB, dC = states.new_empty(2, blocks, N, rows * T)
    dD, dbias = (
        None if x is None else states.new_empty(programs, D) for x in (inputs.D, inputs.delta_bias)
    )
    with device_of(u.device):
        cached(selective_scan_backward_kernel)[blocks, programs](
            states_ptr=states,
            dy_ptr=dy,
            dfinal_ptr=_contiguous(dfinal),
            carry_ptr=torch.empty_like(states),
            du_ptr=du,
            ddelta_ptr=ddelta,
            dz_ptr=dz,
            dA_ptr=dA,
            dB_ptr=dB,
            dC_ptr=dC,
            dD_ptr=dD,
            dbias_ptr=dbias,
            ds_in_ptr=ds_in,
            cu_ptr=_contiguous(inputs.cu_seqlens),
            T=T,
            S=S,
            rows=rows * T,
            dy_row=dy_row,
            **_layout(inputs),
            **_constants(inputs, tile, delta_softplus),
        )
    of_groups = (
        x.view(G, -1, N, rows * T).sum(1).permute(2, 0, 1).reshape(B.shape).to(like.dtype)
        for x, like in ((dB, B), (dC, inputs.C))
    )
    of_channels = (
        None if x is None or like is None else x.sum(0).to(like.dtype)
        for x, like in ((dD, inputs.D), (dbias, inputs.delta_bias))
    )
    dD, dbias = of_channels
    return [du, ddelta, dA.sum(0).T.contiguous().to(A.dtype), *of_groups, dD, dz, dbias, ds_in]


def _layout(inputs: ScanInputs) -> dict[str, Any]:
    """Arguments of the kernels: the tensors, A, B and C in float32 and without gaps; and how far it
    is from token to token of u, delta and z."""
    u, u_row = _rows(inputs.u)
    delta, delta_row = _rows(inputs.delta)
    z, z_row = (None, 0) if inputs.z is None else _rows(inputs.z)
    # [G, N, B, T]: runs of tokens, which are lanes', share a line of the cache
    B, C = (x.float().permute(2, 3, 0, 1).contiguous() for x in (inputs.B, inputs.C))
    A = inputs.A.float().T.contiguous()
    D, bias, state = map(_contiguous, (inputs.D, inputs.delta_bias, inputs.initial_state))
    tensors = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "bias": bias}
    named: dict[str, Any] = {f"{name}_ptr": x for name, x in tensors.items()}
    return named | {"s_in_ptr": state, "u_row": u_row, "delta_row": delta_row, "z_row": z_row}


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


def _tile(tile: Tile, inputs: ScanInputs) -> Tile:
    """With VEC that divides the channels of a group: where they begin has to be a multiple."""
    width = inputs.u.shape[2] // inputs.B.shape[2]
    return tile if width % tile.VEC == 0 else tile._replace(VEC=1)


def _channel_blocks(inputs: ScanInputs, tile: Tile) -> int:
    groups = inputs.B.shape[2]
    return groups * -(-inputs.u.shape[2] // groups // tile.BD)


def _constants(inputs: ScanInputs, tile: Tile, delta_softplus: bool) -> dict[str, int | bool]:
    return {
        "D": inputs.u.shape[2],
        "N": inputs.A.shape[1],
        "G": inputs.B.shape[2],
        "SOFTPLUS": delta_softplus,
        "RUN": tile.RUN,
        "RUNS": tile.RUNS,
        "BD": tile.BD,
        "VEC": tile.VEC,
        "num_warps": tile.warps,
    }
