"""Launches of the short convolution: no synchronisation, nothing that depends on device values.

Memory beyond results: backward, W + 1 numbers a channel for each of P programs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.conv import triton_kernels
from slipstream.kernels.conv.inputs import (
    UNIT_EPS,
    UNIT_TENSORS,
    ConvInputs,
    GradInputs,
    UpdateInputs,
)
from slipstream.runtime import backends
from slipstream.runtime.launch_cache import cached


class Tile(NamedTuple):
    """BT tokens, BD channels, warps, programs at a time on each multiprocessor."""

    BT: int
    BD: int
    warps: int
    per_processor: int


# 4 channels a thread: the next tile is in registers too
FORWARD = Tile(8, 256, 2, 8)
# as many tokens as the widest has taps: 16 take 8 s to compile, these 2
BACKWARD = Tile(8, 256, 2, 4)


def forward(inputs: ConvInputs, sizes: Sequence[int] | None, unit: int, silu: bool) -> list[Tensor]:
    """y [B, T, D], or one of each of sizes channels. unit: as op.convolution."""
    inputs = ConvInputs._make(_contiguous(*inputs))
    x = inputs.x
    sizes = sizes or x.shape[2:]
    ys = [torch.empty(*x.shape[:2], n, dtype=x.dtype, device=x.device) for n in sizes]
    P, outputs = _outputs(FORWARD, inputs, sizes, unit, silu)
    for y, (_, blocks, arguments) in zip(ys, outputs):
        cached(triton_kernels.conv_fwd_kernel)[(P * blocks,)](
            **arguments, r_ptr=inputs.residual, y_ptr=y
        )
    return ys


def backward(t: GradInputs, unit: int, silu: bool) -> list[Tensor]:
    """dx, dweight and, where they are there, dbias and dstate."""
    t = GradInputs._make(_contiguous(*t))
    _, _, _, x, weight, bias, state, cu_seqlens = t
    inputs = ConvInputs(x, weight, bias, None, state, cu_seqlens)
    W, dys = weight.shape[1], t.dys()
    dx, dstate = torch.empty_like(x), None
    if state is not None:
        # the first tile of a sequence writes it, and where there are no tokens there are no tiles
        dstate = torch.empty_like(state) if x.numel() else torch.zeros_like(state)
    P, outputs = _outputs(BACKWARD, inputs, [dy.shape[-1] for dy in dys], unit, silu)
    partial = torch.empty(P, W + 1, x.shape[2], dtype=torch.float32, device=x.device)
    for dy, (begin, blocks, arguments) in zip(dys, outputs):
        n = dy.shape[-1]
        cached(triton_kernels.conv_bwd_kernel)[(P * blocks,)](
            **arguments,
            dy_ptr=dy,
            dx_ptr=dx.narrow(2, begin, n),
            ds_ptr=None if dstate is None else dstate.narrow(1, begin, n),
            partial_ptr=partial.narrow(2, begin, n),
        )
    sums = partial.sum(0)
    # copies: of float32 they would be views of both
    copy_options = {"copy": True, "memory_format": torch.contiguous_format}
    dweight = sums[:W].t().to(weight.dtype, **copy_options)
    dbias = None if bias is None else sums[W].to(bias.dtype, **copy_options)
    return [t for t in (dx, dweight, dbias, dstate) if t is not None]


def update(t: UpdateInputs, silu: bool) -> Tensor:
    """y [N, D]."""
    state = t.state
    x, weight, bias, residual, indices = _contiguous(t.x, *t[2:])
    N, D = x.shape
    if N > backends.GRID_ROWS:
        batches = backends.row_parts(N, x, residual, indices, state if indices is None else None)
        calls = (
            UpdateInputs(x, state if s is None else s, *t[2:4], r, i) for x, r, i, s in batches
        )
        return torch.cat([update(call, silu) for call in calls])
    W = weight.shape[1]
    y = torch.empty_like(x)
    BD = 128
    cached(triton_kernels.conv_update_kernel)[(-(-D // BD), N)](
        x_ptr=x,
        s_ptr=state,
        w_ptr=weight,
        b_ptr=bias,
        r_ptr=residual,
        index_ptr=indices,
        y_ptr=y,
        **dict(zip(("stride_n", "stride_d", "stride_w"), state.stride())),
        num_states=state.shape[0],
        D=D,
        W=W,
        BD=BD,
        SILU=silu,
        num_warps=2,
    )
    return y


def _outputs(
    tile: Tile, inputs: ConvInputs, sizes: Sequence[int], unit: int, silu: bool
) -> tuple[int, list[tuple[int, int, dict[str, Any]]]]:
    """Programs of each block of channels; and of each of y's tensors the first channel, the blocks
    and what its kernels have in common."""
    x, weight, bias, _, state, cu_seqlens = inputs
    tile, P, tiles = _programs(tile, x, cu_seqlens, max(sizes))
    tiles_each = max(-(-tiles // P), 1)
    N = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    begin, outputs = 0, []
    for i, n in enumerate(sizes):
        # a run that is normalised is a warp's
        is_unit = unit != 0 and i < UNIT_TENSORS
        BD, warps = (unit, 1) if is_unit else (tile.BD, tile.warps)
        arguments = {
            "x_ptr": x.narrow(2, begin, n),
            "w_ptr": weight.narrow(0, begin, n),
            "b_ptr": None if bias is None else bias.narrow(0, begin, n),
            "s_ptr": None if state is None else state.narrow(1, begin, n),
            "cu_ptr": cu_seqlens,
            "N": N,
            "bits": N.bit_length(),
            "T": x.shape[1],
            "tiles": tiles,
            "tiles_each": tiles_each,
            "eps": UNIT_EPS,
            "D": n,
            "SX": x.shape[2],
            "W": weight.shape[1],
            "BT": tile.BT,
            "BD": BD,
            "SILU": silu,
            "UNIT": is_unit,
            "num_warps": warps,
        }
        outputs.append((begin, -(-n // BD), arguments))
        begin += n
    return -(-tiles // tiles_each), outputs


def _contiguous(*tensors: Tensor | None) -> Any:
    return [None if t is None else t.contiguous() for t in tensors]


def _programs(tile: Tile, x: Tensor, cu_seqlens: Tensor | None, D: int) -> tuple[Tile, int, int]:
    """The tile cut to a launch's channels, programs for each block of channels, tiles in all."""
    B, T, _ = x.shape
    BD = min(tile.BD, max(32, 1 << (D - 1).bit_length()))
    warps = max(tile.warps * BD // tile.BD, 1)
    tiles = B * -(-T // tile.BT)
    if cu_seqlens is not None:
        # at most that many, whatever the offsets are
        tiles = T // tile.BT + cu_seqlens.shape[0] - 1
    max_programs = backends.sm_count(x.get_device()) * tile.per_processor * tile.warps // warps
    max_programs = max(max_programs // -(-D // BD), 1)
    rounds = max(-(-tiles // max_programs), 1)
    return tile._replace(BD=BD, warps=warps), max(-(-tiles // rounds), 1), tiles
