"""Launches of the norm kernels: no synchronisation, nothing that depends on device values.

Memory beyond results: one or two numbers a row, and in backward P rows of partial sums, P a small
multiple of the multiprocessors.

Tiles go by the width of a row: by tables, and by what registers and shared memory hold. A tile of
BR rows has at least `elements`, so that short rows share a program. 16 to 32 elements a thread are
loaded at once; longer rows get more warps, until they no longer fit.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.norm import inputs, triton_kernels
from slipstream.kernels.primitives.device import add_partial_sums
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.runtime import backends, launch_cache


@dataclass(frozen=True)
class Row:
    """A row of a table.

    widest: the largest BD that it is for. per_processor: programs on a multiprocessor at a time,
    each of which goes on to further tiles; 0: a program for each tile. stages: of loads ahead of
    their use; 1: none. lean: while its sums are computed, a forward row of 16 bits stays in the
    dtype it was loaded in, for norms that allow it (_tile).
    """

    widest: int
    elements: int
    warps: int
    per_processor: int
    stages: int
    lean: bool = False


@dataclass(frozen=True)
class Tile:
    BR: int
    BD: int
    warps: int
    per_processor: int
    stages: int
    lean: bool = False


FORWARD = (
    Row(4096, 2048, 4, 0, 1, lean=True),
    Row(4096, 2048, 4, 0, 1),
    Row(8192, 8192, 8, 0, 1),
    Row(16384, 16384, 8, 0, 1, lean=True),
    Row(32768, 16384, 16, 0, 1),
)
BACKWARD = (
    Row(2048, 2048, 4, 3, 3),
    Row(4096, 4096, 8, 2, 3),
    Row(8192, 8192, 16, 1, 3),
    Row(16384, 16384, 16, 1, 1),
)
# Backward without a weight's or a bias's gradient: no program has to go on to other rows.
SINGLE = (Row(4096, 2048, 8, 0, 1), Row(8192, 8192, 8, 0, 1), Row(16384, 16384, 16, 0, 1))
# Of a row that is longer than the last entry: columns of one round or program. UNEVEN: of one whose
# rows do not begin at multiples of 16 bytes, and which takes more registers. SPLIT and SUMS: of
# backward, the gradient and the sums before it.
LOOPED, UNEVEN = Row(32768, 32768, 32, 0, 1), Row(8192, 8192, 8, 0, 1)
SPLIT, SUMS = Row(4096, 8192, 8, 2, 1), Row(4096, 4096, 8, 0, 1)


def choose(
    D: int,
    bytes_each: int,
    shared: int,
    backward: bool,
    heavy: bool = False,
    sums: bool = True,
    lean: bool = False,
) -> Tile:
    """The tile for rows of D features; BD < D if they take more than one.

    Args:
        shared: bytes of shared memory that a program may use.
        heavy: there is a gate or a bias, whose sums or factors take registers in backward.
        sums: of a weight's or a bias's gradient are made in backward.
        lean: rows of the table for forward rows that stay as they were loaded may be taken.
    """
    table = FORWARD if not backward else BACKWARD if sums else SINGLE
    BD = 1 << max(D - 1, 0).bit_length()
    # wider, backward with a gate or a bias spills registers
    max_columns = 8192 if heavy and backward else BD
    rows = [row for row in table if lean or not row.lean]
    row = next((row for row in rows if row.widest >= BD and max_columns >= BD), None)
    if row is None:
        row = SPLIT if backward else UNEVEN if D * bytes_each % 16 else LOOPED
        BD = row.widest
    BR = max(1, row.elements // BD)
    # dy, h, gate, dh and w; one tile ahead is slower than none
    ahead = (row.stages - 1) * 5 * BR * BD * bytes_each
    stages = row.stages if ahead <= shared else 1
    return Tile(BR, BD, row.warps, row.per_processor, stages, row.lean)


@launch_cache.cache
def _tile(index: int, D: int, bytes_each: int, backward: bool, **options: bool) -> Tile:
    tile = choose(D, bytes_each, backends.shared_memory_bytes(index), backward, **options)
    # AMD's warps have 64 threads, of which a program takes 1024
    return replace(tile, warps=min(tile.warps, 16)) if torch.version.hip else tile


def _programs(rows: int, tile: Tile, groups: int, index: int) -> int:
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
    # up to 64 rows it is one of a decoding step's launches, which begin ahead
    pdl = R <= 64 and backends.supports_pdl(x.device)
    launch_cache.cached(triton_kernels.norm_fwd_kernel)[(-(-R // tile.BR) * groups,)](
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
    sums = None
    if blocks > 1:
        sums = torch.empty(2, R * groups, dtype=torch.float32, device=device)
        launch_cache.cached(triton_kernels.norm_sums_kernel)[(R * groups,)](
            **shared,
            stats_ptr=stats,
            sums_ptr=sums,
            BD=SUMS.widest,
            STAGES=SUMS.stages,
            num_warps=SUMS.warps,
        )
    launch_cache.cached(triton_kernels.norm_bwd_kernel)[(P, blocks, groups)](
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
