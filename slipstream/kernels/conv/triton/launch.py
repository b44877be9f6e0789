"""Launches of the short convolution: no synchronisation, nothing that depends on device values.

Memory beyond results: packed, two numbers a token; backward, W + 1 numbers a channel for each of P
programs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.conv.inputs import UNIT_EPS, UNIT_TENSORS, ConvInputs
from slipstream.kernels.conv.triton.bwd_rolling import conv_bwd_rolling_kernel
from slipstream.kernels.conv.triton.conv import (
    conv_bwd_kernel,
    conv_fwd_kernel,
    conv_positions_kernel,
    conv_state_bwd_kernel,
    conv_update_kernel,
)
from slipstream.runtime.backends import device_of, sm_count
from slipstream.runtime.launch_cache import cached


class Tile(NamedTuple):
    """BT tokens, BD channels, warps, programs at a time on each multiprocessor."""

    BT: int
    BD: int
    warps: int
    per_processor: int


# 4 channels a thread: forward the next tile is in registers too, backward there are more rows
FORWARD = Tile(8, 256, 2, 8)
BACKWARD = Tile(16, 256, 4, 10)
# of one that is not packed; as many tokens as the widest has taps: 16 take 8 s to compile, these 2
BACKWARD_ROLLING = Tile(8, 256, 2, 4)


def forward(
    inputs: ConvInputs, silu: bool, sizes: Sequence[int] | None, unit: int = 0
) -> list[Tensor]:
    """y [B, T, D], or one of each of sizes channels, and `where` of packed sequences for backward.
    All contiguous. unit: as op.convolution."""
    x, weight, bias, residual, state, cu_seqlens = inputs
    T, D = x.shape[1:]
    W = weight.shape[1]
    ys = [torch.empty(*x.shape[:2], n, dtype=x.dtype, device=x.device) for n in sizes or (D,)]
    with device_of(x.device):
        positions = None if cu_seqlens is None else _positions(cu_seqlens, T)
        plain, P, tiles = _programs(FORWARD, x, W, max(y.shape[-1] for y in ys))
        tiles_each = max(-(-tiles // P), 1)
        begin = 0
        for i, y in enumerate(ys):
            n, tile, is_unit = y.shape[-1], *_tile_of_output(plain, i, unit)
            cached(conv_fwd_kernel)[(-(-tiles // tiles_each) * -(-n // tile.BD),)](
                x_ptr=x.narrow(2, begin, n),
                w_ptr=weight.narrow(0, begin, n),
                b_ptr=None if bias is None else bias.narrow(0, begin, n),
                r_ptr=residual,
                s_ptr=None if state is None else state.narrow(1, begin, n),
                positions_ptr=positions,
                y_ptr=y,
                T=T,
                tiles=tiles,
                tiles_each=tiles_each,
                eps=UNIT_EPS,
                D=n,
                SX=D,
                W=W,
                BT=tile.BT,
                BD=tile.BD,
                SILU=silu,
                UNIT=is_unit,
                num_warps=tile.warps,
            )
            begin += n
    return ys if positions is None else [*ys, positions]


def backward(
    dys: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    positions: Tensor | None,
    silu: bool,
    unit: int = 0,
) -> list[Tensor]:
    """dx, dweight and, where they are there, dbias and dstate."""
    T, D = x.shape[1:]
    W = weight.shape[1]
    dx, dstate = torch.empty_like(x), None if state is None else torch.empty_like(state)
    with device_of(x.device):
        table = BACKWARD if positions is not None else BACKWARD_ROLLING
        plain, P, tiles = _programs(table, x, W, max(dy.shape[-1] for dy in dys))
        tiles_each = max(-(-tiles // P), 1)
        if positions is None:
            P = -(-tiles // tiles_each)
        partial = torch.empty(P, W + 1, D, dtype=torch.float32, device=x.device)
        kernel: Any = conv_bwd_kernel if positions is not None else conv_bwd_rolling_kernel
        begin = 0
        for i, dy in enumerate(dys):
            n, tile, is_unit = dy.shape[-1], *_tile_of_output(plain, i, unit)
            where: Any = {"positions_ptr": positions}
            if positions is None:
                where = {"tiles_each": tiles_each, "eps": UNIT_EPS, "UNIT": is_unit}
            inputs = {
                "dy_ptr": dy,
                "x_ptr": x.narrow(2, begin, n),
                "w_ptr": weight.narrow(0, begin, n),
                "b_ptr": None if bias is None else bias.narrow(0, begin, n),
                "s_ptr": None if state is None else state.narrow(1, begin, n),
            }
            cached(kernel)[(P * -(-n // tile.BD),)](
                **inputs,
                dx_ptr=dx.narrow(2, begin, n),
                partial_ptr=partial.narrow(2, begin, n),
                T=T,
                tiles=tiles,
                **where,
                D=n,
                SX=D,
                W=W,
                BT=tile.BT,
                BD=tile.BD,
                SILU=silu,
                num_warps=tile.warps,
            )
            if dstate is not None:
                cached(conv_state_bwd_kernel)[(-(-n // 128), dstate.shape[0])](
                    **inputs,
                    cu_ptr=cu_seqlens,
                    ds_ptr=dstate.narrow(1, begin, n),
                    T=T,
                    D=n,
                    SX=D,
                    W=W,
                    BD=128,
                    SILU=silu,
                    num_warps=2,
                )
            begin += n
        sums = partial.sum(0)
    # copies: of float32 they would be views of both
    copy_options = {"copy": True, "memory_format": torch.contiguous_format}
    dweight = sums[:W].t().to(weight.dtype, **copy_options)
    dbias = None if bias is None else sums[W].to(bias.dtype, **copy_options)
    return [t for t in (dx, dweight, dbias, dstate) if t is not None]


def update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    indices: Tensor | None,
    silu: bool,
) -> Tensor:
    """y [N, D]; all contiguous but state."""
    N, D = x.shape
    W = weight.shape[1]
    y = torch.empty_like(x)
    BD = 128
    with device_of(x.device):
        cached(conv_update_kernel)[(-(-D // BD), N)](
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


def _tile_of_output(tile: Tile, output: int, unit: int) -> tuple[Tile, bool]:
    """The tile for one of y's tensors; and whether its runs are normalised, each by a warp."""
    if unit == 0 or output >= UNIT_TENSORS:
        return tile, False
    return tile._replace(BD=unit, warps=1), True


def _programs(tile: Tile, x: Tensor, width: int, D: int) -> tuple[Tile, int, int]:
    """The tile cut to the channels of a launch and the taps, programs for each block of channels,
    tiles in all."""
    B, T, _ = x.shape
    BD = min(tile.BD, max(32, 1 << (D - 1).bit_length()))
    warps = max(tile.warps * BD // tile.BD, 1)
    BT = tile.BT if width <= 4 or tile.BT == 8 else tile.BT // 2
    tiles = B * -(-T // BT)
    max_programs = max(sm_count(x.get_device()) * tile.per_processor * tile.warps // warps, 1)
    max_programs = max(max_programs // -(-D // BD), 1)
    rounds = max(-(-tiles // max_programs), 1)
    return Tile(BT, BD, warps, tile.per_processor), max(-(-tiles // rounds), 1), tiles


def _positions(cu_seqlens: Tensor, T: int) -> Tensor:
    N = cu_seqlens.shape[0] - 1
    positions = torch.empty(2, T, dtype=torch.int32, device=cu_seqlens.device)
    grid = (-(-T // 1024),)
    cached(conv_positions_kernel)[grid](
        cu_seqlens, positions, T, N, N.bit_length(), 1024, num_warps=4
    )
    return positions
