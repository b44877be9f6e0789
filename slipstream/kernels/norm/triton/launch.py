"""Launches of the norm kernels: no synchronisation, nothing that depends on device values.

Memory beyond results: one or two numbers a row, and in backward P rows of partial sums, P a small
multiple of the multiprocessors.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.norm import inputs
from slipstream.kernels.norm.triton import norm, tiles
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.primitives.partial_sums import add_partial_sums
from slipstream.runtime import backends, launch_cache

# rows up to which it is one of a decoding step's launches, which begin ahead
STEP_ROWS = 64


@launch_cache.cache
def _tile(index: int, D: int, bytes_each: int, backward: bool, **options: bool) -> tiles.Tile:
    tile = tiles.choose(D, bytes_each, backends.shared_memory_bytes(index), backward, **options)
    # AMD's warps have 64 threads, of which a program takes 1024
    return replace(tile, warps=min(tile.warps, 16)) if torch.version.hip else tile


def _programs(rows: int, tile: tiles.Tile, groups: int, index: int) -> int:
    """Programs of a group; as few as take no more rounds than the most would."""
    count = -(-rows // tile.BR)
    if tile.per_processor == 0:
        return count
    max_programs = max(backends.sm_count(index) * tile.per_processor // groups, 1)
    rounds = max(-(-count // max_programs), 1)
    return max(-(-count // rounds), 1)


def forward(
    t: inputs.NormInputs, n: NormOptions, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, h where it is neither x nor dropped, and if `save` the statistics for backward."""
    x, weight, bias, gate, residual = t
    groups, width = n.groups or 1, x.shape[-1]
    D, R = width // groups, x.numel() // width
    sum_dtype = n.h_dtype(x, residual)
    # what is normalised is x itself, which comes two features to a register
    lean = residual is None and sum_dtype == x.dtype and not n.centre and not n.gate_first
    lean = lean and x.element_size() == 2 and D % 8 == 0
    tile = _tile(x.get_device(), D, x.element_size(), False, lean=lean)
    x = x.contiguous()
    weight, bias = (None if w is None else w.contiguous() for w in (weight, bias))
    y, h, stats = torch.empty_like(x), None, None
    if n.stores_h(x, residual, save):
        h = torch.empty_like(x, dtype=sum_dtype)
    if (shape := n.stats_shape(x, save)) is not None:
        stats = torch.empty(shape, dtype=torch.float32, device=x.device)
    pdl = R <= STEP_ROWS and backends.supports_pdl(x.device)
    with backends.device_of(x.device):
        launch_cache.cached(norm.norm_fwd_kernel)[(-(-R // tile.BR) * groups,)](
            x_ptr=x,
            r_ptr=None if residual is None else residual.contiguous(),
            w_ptr=weight,
            b_ptr=bias,
            gate_ptr=None if gate is None else gate.contiguous(),
            y_ptr=y,
            h_ptr=h,
            stats_ptr=stats,
            R=R,
            eps=n.eps,
            G=groups,
            D=D,
            BR=tile.BR,
            BD=tile.BD,
            L2=n.l2,
            **n.constants(),
            ROUND=sum_dtype == x.dtype,
            LEAN=tile.lean,
            PDL=pdl,
            num_warps=tile.warps,
            **({"launch_pdl": True} if pdl else {}),
        )
    return y, h, stats


def backward(
    t: inputs.BackwardInputs, n: NormOptions, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, ...]:
    """dx, dresidual if it has another dtype, dweight, dbias, dgate."""
    dy, dh, h, weight, bias, gate, stats, residual_dtype = t
    groups = n.groups or 1
    width = h.shape[-1]
    D, R = width // groups, h.numel() // width
    device = h.device
    h, dy = h.contiguous(), dy.contiguous()
    dh = None if dh is None else dh.contiguous()
    weight, bias, gate = (None if w is None else w.contiguous() for w in (weight, bias, gate))
    heavy, needs_sums = gate is not None or needs_bias, needs_weight or needs_bias
    tile = _tile(h.get_device(), D, h.element_size(), True, heavy=heavy, sums=needs_sums)
    blocks = -(-D // tile.BD)
    P = _programs(R, tile, groups * blocks, h.get_device())
    dx = torch.empty_like(dy)
    dr = None
    if residual_dtype not in (None, dx.dtype):
        dr = torch.empty_like(dy, dtype=residual_dtype)
    dgate = None if gate is None else torch.empty_like(gate)
    partial_sums = torch.empty(
        needs_weight + needs_bias, P, width, dtype=torch.float32, device=device
    )
    shared: dict[str, Any] = {
        "dy_ptr": dy, "h_ptr": h, "w_ptr": weight, "gate_ptr": gate,
        "R": R, "G": groups, "D": D, **n.constants(),
    }  # fmt: skip
    with backends.device_of(device):
        sums = None
        if blocks > 1:
            sums = torch.empty(2, R * groups, dtype=torch.float32, device=device)
            launch_cache.cached(norm.norm_sums_kernel)[(R * groups,)](
                **shared,
                stats_ptr=stats,
                sums_ptr=sums,
                BD=tiles.SUMS.widest,
                STAGES=tiles.SUMS.stages,
                num_warps=tiles.SUMS.warps,
            )
        launch_cache.cached(norm.norm_bwd_kernel)[(P, blocks, groups)](
            **shared,
            dh_ptr=dh,
            b_ptr=bias,
            stats_ptr=None if n.stats_shape(h, True) is None else stats,
            sums_ptr=sums,
            dx_ptr=dx,
            dr_ptr=dr,
            dgate_ptr=dgate,
            dw_ptr=partial_sums[0] if needs_weight else None,
            db_ptr=partial_sums[-1] if needs_bias else None,
            eps=n.eps,
            BR=tile.BR,
            BD=tile.BD,
            L2=n.l2,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
        dweight = torch.empty_like(weight) if needs_weight and weight is not None else None
        dbias = torch.empty_like(bias) if needs_bias and bias is not None else None
        if partial_sums.shape[0]:
            outs = [dweight] * needs_weight + [dbias] * needs_bias
            add_partial_sums(partial_sums.transpose(0, 1), outs)
    return dx, dr, dweight, dbias, dgate
