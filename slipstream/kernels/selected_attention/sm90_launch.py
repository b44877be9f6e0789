"""The forward of attention to selected blocks by the kernel for sm_90: inputs.takes_sm90 says of
which calls."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.sm90 import launch as dense
from slipstream.kernels.attention.triton import tiles
from slipstream.kernels.primitives.sm90 import TensorDescriptor, gl
from slipstream.kernels.selected_attention import sm90_kernels
from slipstream.kernels.selected_attention.inputs import SelectedInputs, SelectedOptions
from slipstream.runtime.backends import sm_count
from slipstream.runtime.launch_cache import cached


class Tile(NamedTuple):
    """BN keys a step, buffers of keys."""

    BN: int
    buffers: int


# by the width of a head
TILES = {64: Tile(128, 5), 128: Tile(128, 3)}
# warpgroups of 64 rows each
NC = 2


def forward(
    inputs: SelectedInputs,
    options: SelectedOptions,
    merge: Callable[[int], tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] and lse [B, H, T].

    Args:
        merge: joins the lists of that many neighbouring queries (selected_merge_kernel).
    """
    q, k, v = inputs[:3]
    q = q.contiguous()
    (B, T, H, D), HKV, G = q.shape, k.shape[2], inputs.selected.shape[2]
    tile, heads = TILES[D], max(HKV, G)
    R, BN = int(H // heads), min(tile.BN, options.block)
    merged, bits, counts = merge(NC * 64 // R)
    rows = counts.shape[0] // B
    units, box = rows * heads * B, [R, 64]
    o = q.new_empty(B, T, H, v.shape[-1])
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    layout = gl.NVMMASharedLayout.get_default_for(box, dense._DTYPES[q.dtype])
    cached(sm90_kernels.selected_fwd_sm90_kernel)[(min(units, sm_count(q.get_device())),)](
        desc_q=TensorDescriptor(q, [B * T * H, D], [D, 1], box, layout),
        **dense._matrix("k", k, BN, 64),
        **dense._matrix("v", v, BN),
        o_ptr=o,
        lse_ptr=lse,
        sinks_ptr=inputs.sinks,
        merged_ptr=merged,
        bits_ptr=bits,
        counts_ptr=counts,
        factor=tiles.LOG2E * options.scale,
        T=T,
        S=k.shape[1],
        H=H,
        heads=heads,
        share=heads // HKV,
        G=G,
        W=merged.shape[2],
        tiles=rows,
        units=units,
        NC=NC,
        QT=64 // R,
        R=R,
        BN=BN,
        D=D,
        DV=D,
        BLOCK=options.block,
        ST=tile.buffers * (tile.BN // BN),
        CAUSAL=options.causal,
        HAS_SINKS=inputs.sinks is not None,
        CONSUMER=240,
        PRODUCER=24,
        num_warps=4,
        maxnreg=168,
    )
    return o, lse
