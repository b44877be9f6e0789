"""The needs of the Triton kernels' tiles on a GPU, as compiler/tile_limits.py checks them.

C tokens a chunk, BX or BV columns of the state a program, BD or BK all of its rows; of attention BM
queries and BN keys, heads of BD (q, k) and BV (v); of norms BR rows of BD features.
"""

from typing import Any

from slipstream.compiler.tile_limits import TileRequirements
from slipstream.kernels.attention.triton import tiles as attention
from slipstream.kernels.linear.triton.delta.tiles import DeltaTile
from slipstream.kernels.linear.triton.dplr.tiles import DplrTile
from slipstream.kernels.linear.triton.scalar_decay.tiles import Tile
from slipstream.kernels.linear.triton.vector_decay.tiles import VectorDecayTile
from slipstream.kernels.norm.triton import tiles as norms

_CHUNK_KERNELS = ("fwd", "fwd_states", "dstate")


def chunk_requirements(tile: Tile, BD: int, size: int) -> TileRequirements:
    """y = s r^T + x a, s += x w: the state [BX, BD] stays in registers."""
    C, BX = tile.C, tile.BX
    return TileRequirements(
        size,
        tile.warps,
        tile.stages,
        ((C, C, BD), (BX, C, BD), (BX, C, C), (BX, BD, C)),
        loads=(C * BD, C * BX),
        sums=BX * BD,
        boxes=((1, C, 1, BD), (1, C, 1, BX)) if tile.tma else (),
    )


def kernel_requirements(
    tile: DeltaTile | VectorDecayTile | DplrTile, BK: int, size: int
) -> dict[str, TileRequirements]:
    """By the field of the tile: the scans keep [BV, BK], the other kernels make [C, C] and [C, B]
    of B channels at a time."""
    requirements = {}
    for name, kernel_tile in vars(tile).items():
        if name in ("C", "tma"):
            continue
        C, B = tile.C, kernel_tile.BK if isinstance(tile, VectorDecayTile) else kernel_tile.B
        if name in _CHUNK_KERNELS:
            products = ((C, C, BK), (B, C, BK), (B, C, C), (B, BK, C))
            requirements[name] = TileRequirements(
                size, kernel_tile.warps, kernel_tile.stages, products, (C * BK, C * B), sums=B * BK
            )
        else:
            products = ((C, C, B), (C, B, C))
            requirements[name] = TileRequirements(
                size, kernel_tile.warps, kernel_tile.stages, products, (C * B,), sums=C * B
            )
    return requirements


def of_linear(tile: Any, width: int, size: int) -> list[TileRequirements]:
    """Limits of a row of any of the family's tables, for K (or the scan's D) of `width`."""
    return (
        [chunk_requirements(tile, width, size)]
        if isinstance(tile, Tile)
        else list(kernel_requirements(tile, width, size).values())
    )


def of_attention(
    kernel: str, tile: attention.Tile, BD: int, BV: int, size: int
) -> TileRequirements:
    """kernel: a field of Tiles, or "latent"."""
    M, N = tile.BM, tile.BN
    queries, keys = M * (BD + BV), N * (BD + BV)
    scores = ((M, N, BD), (M, BV, N))
    if kernel == "forward":
        return TileRequirements(
            size, tile.warps, tile.stages, scores, (N * BD, N * BV), M * BD, sums=M * BV
        )
    if kernel in ("decode", "latent"):
        return TileRequirements(
            size, tile.warps, tile.stages, scores, (N * BD, N * BV), sums=M * BV
        )
    if kernel == "dq":
        products = ((M, N, BD), (M, N, BV), (M, BD, N))
        return TileRequirements(
            size, tile.warps, tile.stages, products, (N * BD, N * BV), queries, sums=M * BD
        )
    products = ((N, M, BD), (N, M, BV), (N, BV, M), (N, BD, M))
    return TileRequirements(
        size, tile.warps, tile.stages, products, (M * BD, M * BV), keys, sums=N * BD
    )


def of_norm(tile: norms.Tile, size: int) -> TileRequirements:
    row = tile.BR * tile.BD
    ahead = (row,) * norms.PREFETCHED_TENSORS if tile.stages > 1 else ()
    return TileRequirements(size, tile.warps, tile.stages, loads=ahead, sums=row)
