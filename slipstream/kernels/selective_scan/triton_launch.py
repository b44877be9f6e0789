"""Launches of the selective scan: one kernel forward, one backward and the sums of what it leaves.

Tiles depend on nothing but the direction, and a tile's states on its own sequence alone: a
sequence's result is the same bits in every batch. Memory beyond results: forward a state each CHUNK
tokens, 4 N / CHUNK bytes an element of u; backward the same again, and 8 N / BACKWARD.BD for dB
and dC.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.selective_scan import inputs as arguments
from slipstream.kernels.selective_scan import triton_kernels as kernels
from slipstream.runtime import backends, launch_cache


class Tile(NamedTuple):
    """RUNS runs of RUN tokens, CHUNK in all, and BD channels, VEC a thread."""

    RUN: int
    RUNS: int
    BD: int
    VEC: int
    warps: int


INTERPRETER = Tile(2, 4, 16, 2, 4)
FORWARD = INTERPRETER if backends.INTERPRETED else Tile(8, 8, 16, 4, 1)
BACKWARD = INTERPRETER if backends.INTERPRETED else Tile(8, 8, 8, 2, 1)
assert FORWARD.RUN * FORWARD.RUNS == BACKWARD.RUN * BACKWARD.RUNS == arguments.CHUNK


def forward(
    inputs: arguments.ScanInputs, delta_softplus: bool, for_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D] in u's dtype, the final state [S, D, N], and the states that backward reads."""
    u, S = inputs.u, inputs.sequences
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    states = arguments.empty_states(inputs)
    final = states.new_empty(S, *inputs.A.shape)
    tile = _tile(FORWARD, inputs)
    launch_cache.cached(kernels.selective_scan_forward_kernel)[
        (arguments.channel_blocks(inputs, tile.BD) * S,)
    ](
        y_ptr=y,
        final_ptr=final,
        states_ptr=states,
        cu_ptr=arguments.contiguous(inputs.cu_seqlens),
        T=u.shape[1],
        rows=u.shape[0] * u.shape[1],
        **_layout(inputs),
        **_constants(inputs, tile, delta_softplus),
    )
    return y, final, states if for_backward else states.new_empty(0, *states.shape[1:])


def backward(
    inputs: arguments.ScanInputs,
    states: Tensor,
    dy: Tensor | None,
    dfinal: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor | None]:
    """Gradients of the nine tensors of ScanInputs that have one, None for those not given."""
    (B, T, _), S = inputs.u.shape, inputs.sequences
    dy, dy_row = arguments.rows(torch.zeros_like(inputs.u) if dy is None else dy)
    tile = _tile(BACKWARD, inputs)
    blocks = arguments.channel_blocks(inputs, tile.BD)
    programs = min(S, arguments.SEQUENCE_PROGRAMS)
    grads = arguments.empty_gradients(inputs, states, programs, blocks, tokens_last=True)
    launch_cache.cached(kernels.selective_scan_backward_kernel)[blocks, programs](
        states_ptr=states,
        dy_ptr=dy,
        dfinal_ptr=arguments.contiguous(dfinal),
        carry_ptr=torch.empty_like(states),
        **grads.pointers(),
        cu_ptr=arguments.contiguous(inputs.cu_seqlens),
        T=T,
        S=S,
        rows=B * T,
        dy_row=dy_row,
        **_layout(inputs),
        **_constants(inputs, tile, delta_softplus),
    )
    return grads.summed(inputs, tokens_last=True)


def _layout(inputs: arguments.ScanInputs) -> dict[str, Any]:
    # [G, N, B, T]: runs of tokens, which are lanes', share a line of the cache
    B, C = (x.float().permute(2, 3, 0, 1).contiguous() for x in (inputs.B, inputs.C))
    return arguments.pointers(inputs, B, C)


def _tile(tile: Tile, inputs: arguments.ScanInputs) -> Tile:
    """With VEC that divides the channels of a group: where they begin has to be a multiple."""
    width = inputs.u.shape[2] // inputs.B.shape[2]
    return tile if width % tile.VEC == 0 else tile._replace(VEC=1)


def _constants(
    inputs: arguments.ScanInputs, tile: Tile, delta_softplus: bool
) -> dict[str, int | bool]:
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
