"""Launches over a cache of latents: into how many shares its keys are cut."""

import math

import torch
from torch import Tensor

from slipstream.kernels.attention.triton.decode_latent import softmax_latent_decode_kernel
from slipstream.kernels.attention.triton.decode_launch import choose_splits, combine
from slipstream.kernels.attention.triton.launch_utils import (
    LOG2E,
    STRIDES,
    device_of,
    fp32_dot_precision,
)
from slipstream.kernels.attention.triton.tiles import LATENT, Tile, family
from slipstream.runtime.backends import INTERPRETED, sm90_unsupported
from slipstream.runtime.launch_cache import cache, cached


@cache
def tile_of(device: torch.device) -> Tile:
    if INTERPRETED:
        return LATENT["interpreter"]
    of = family(torch.cuda.get_device_capability(device), hip=bool(torch.version.hip))
    return LATENT[of]


def decode(
    q: Tensor,
    latent: Tensor,
    lengths: Tensor | None,
    table: Tensor | None,
    width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, width] in q's dtype and lse [B, H, T], float32."""
    B, T, H, _ = q.shape
    size = latent.shape[1]
    capacity = size if table is None else size * table.shape[1]
    tile = tile_of(q.device)
    tiles = -(-T * H // tile.BM)
    splits = choose_splits(q.device, tiles * B, capacity, tile.BN, 1)
    partial_o = torch.empty(splits, B, T, H, width, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(splits, B, H, T, dtype=torch.float32, device=q.device)
    launch = _launch_triton
    if _uses_sm90(q, latent, width, table):
        from slipstream.kernels.attention.sm90.decode_latent_launch import launch
    shares = partial_o, partial_lse, splits, tiles, capacity
    with device_of(q.device):
        launch(q, latent, lengths, table, LOG2E * scale, *shares)
        return combine(partial_o, partial_lse, q, None, 1 << (width - 1).bit_length())


def _uses_sm90(q: Tensor, latent: Tensor, width: int, table: Tensor | None) -> bool:
    if sm90_unsupported(q):
        return False
    from slipstream.kernels.attention.sm90 import decode_latent_launch

    return decode_latent_launch.is_supported(q, latent, width, table)


def _launch_triton(
    q: Tensor,
    latent: Tensor,
    lengths: Tensor | None,
    table: Tensor | None,
    factor: float,
    partial_o: Tensor,
    partial_lse: Tensor,
    splits: int,
    tiles: int,
    capacity: int,
) -> None:
    B, T, H, D = q.shape
    width, tile = partial_o.shape[-1], tile_of(q.device)
    narrowest = 16 if tile.BM < 64 else 64
    q, latent = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, latent))
    strides = [*q.stride()[:3], *latent.stride()[:2]]
    unit = math.gcd(16 // q.element_size(), *strides)
    cached(softmax_latent_decode_kernel)[(tiles * splits * B,)](
        q_ptr=q,
        k_ptr=latent,
        o_ptr=partial_o,
        lse_ptr=partial_lse,
        lengths_ptr=lengths,
        table_ptr=table,
        factor=factor,
        T=T,
        H=H,
        B=B,
        tiles=tiles,
        splits=splits,
        capacity=capacity,
        cache_rows=latent.shape[0],
        stride_table=0 if table is None else table.stride(0),
        **{name: stride // unit for name, stride in zip(STRIDES, strides)},
        R=width,
        P=D - width,
        BR=max(narrowest, 1 << (width - 1).bit_length()),
        BP=max(narrowest, 1 << (D - width - 1).bit_length()),
        BM=tile.BM,
        BN=tile.BN,
        UNIT=unit,
        PAGE=0 if table is None else latent.shape[1],
        HAS_LENGTHS=lengths is not None,
        PRECISION=fp32_dot_precision(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
