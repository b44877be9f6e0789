"""What the tiles of the portable attention kernels ask of a GPU.

BM queries and BN keys a tile, heads of BD (q, k) and BV (v).
"""

from typing import Any

from slipstream.compiler.arch import Arch
from slipstream.compiler.tile_limits import TileRequirements, check_tile
from slipstream.kernels.attention.triton.tiles import Tile, Tiles

SIZES = {
    "BM": (16, 32, 64, 128, 256),
    "BN": (16, 32, 64, 128, 256),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4),
}


def of(kernel: str, tile: Tile, BD: int, BV: int, size: int) -> TileRequirements:
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


def check(tiles: Tiles, BD: int, BV: int, size: int, arch: Arch) -> None:
    """Raises ValueError for tiles that cannot run on `arch`, with the nearest that can."""
    for kernel, tile in vars(tiles).items():
        if tile is not None:
            check_one(kernel, tile, BD, BV, size, arch)


def check_one(kernel: str, tile: Tile, BD: int, BV: int, size: int, arch: Arch) -> None:
    def needs(tile: Any) -> list[TileRequirements]:
        return [of(kernel, tile, BD, BV, size)]

    check_tile(kernel, tile, arch, lambda tile, **new: tile._replace(**new), needs, SIZES)
