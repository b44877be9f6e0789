"""Launches of the short convolution: no synchronisation, nothing that depends on device values.

Memory beyond results: backward, W + 1 numbers a channel for each of P programs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.conv.inputs import UNIT_EPS, UNIT_TENSORS, ConvInputs
from slipstream.kernels.conv.triton.backward import conv_bwd_kernel
from slipstream.kernels.conv.triton.conv import conv_fwd_kernel, conv_update_kernel
from slipstream.runtime.backends import device_of, sm_count
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


def forward(
    inputs: ConvInputs, silu: bool, sizes: Sequence[int] | None, unit: int = 0
) -> list[Tensor]:
    """y [B, T, D], or one of each of sizes channels. All contiguous. unit: as op.convolution."""
    x, weight, bias, residual, state, cu_seqlens = inputs
    T, D = x.shape[1:]
    W = weight.shape[1]
    ys = [torch.empty(*x.shape[:2], n, dtype=x.dtype, device=x.device) for n in sizes or (D,)]
    with device_of(x.device):
        plain, P, tiles = _programs(FORWARD, x, cu_seqlens, max(y.shape[-1] for y in ys))
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
                y_ptr=y,
                T=T,
                **_packing(cu_seqlens),
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
    return ys


def backward(
    dys: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    unit: int = 0,
) -> list[Tensor]:
    """dx, dweight and, where they are there, dbias and dstate."""
    T, D = x.shape[1:]
    W = weight.shape[1]
    dx, dstate = torch.empty_like(x), None
    if state is not None:
        # the first tile of a sequence writes it, and where there are no tokens there are no tiles
        dstate = torch.empty_like(state) if x.numel() else torch.zeros_like(state)
    with device_of(x.device):
        plain, P, tiles = _programs(BACKWARD, x, cu_seqlens, max(dy.shape[-1] for dy in dys))
        tiles_each = max(-(-tiles // P), 1)
        P = -(-tiles // tiles_each)
        partial = torch.empty(P, W + 1, D, dtype=torch.float32, device=x.device)
        begin = 0
        for i, dy in enumerate(dys):
            n, tile, is_unit = dy.shape[-1], *_tile_of_output(plain, i, unit)
            cached(conv_bwd_kernel)[(P * -(-n // tile.BD),)](
                dy_ptr=dy,
                x_ptr=x.narrow(2, begin, n),
                w_ptr=weight.narrow(0, begin, n),
                b_ptr=None if bias is None else bias.narrow(0, begin, n),
                s_ptr=None if state is None else state.narrow(1, begin, n),
                dx_ptr=dx.narrow(2, begin, n),
                ds_ptr=None if dstate is None else dstate.narrow(1, begin, n),
                partial_ptr=partial.narrow(2, begin, n),
                T=T,
                **_packing(cu_seqlens),
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


def _programs(tile: Tile, x: Tensor, cu_seqlens: Tensor | None, D: int) -> tuple[Tile, int, int]:
    """The tile cut to a launch's channels, programs for each block of channels, tiles in all."""
    B, T, _ = x.shape
    BD = min(tile.BD, max(32, 1 << (D - 1).bit_length()))
    warps = max(tile.warps * BD // tile.BD, 1)
    tiles = B * -(-T // tile.BT)
    if cu_seqlens is not None:
        # at most that many, whatever the offsets are
        tiles = T // tile.BT + cu_seqlens.shape[0] - 1
    max_programs = max(sm_count(x.get_device()) * tile.per_processor * tile.warps // warps, 1)
    max_programs = max(max_programs // -(-D // BD), 1)
    rounds = max(-(-tiles // max_programs), 1)
    return tile._replace(BD=BD, warps=warps), max(-(-tiles // rounds), 1), tiles


def _packing(cu_seqlens: Tensor | None) -> dict[str, Any]:
    """Arguments of a kernel."""
    N = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return {"cu_ptr": cu_seqlens, "N": N, "bits": N.bit_length()}
