"""What the tiles of the norms ask of a GPU: rows in registers, and loads ahead of their use."""

from dataclasses import replace

from slipstream.compiler.arch import Arch
from slipstream.compiler.tile_limits import TileRequirements, check_tile
from slipstream.kernels.norm.triton.tiles import AHEAD, Tile

SIZES = {
    "BR": (1, 2, 4, 8, 16, 32, 64, 128),
    "BD": tuple(1 << i for i in range(17)),
    "warps": (1, 2, 4, 8, 16, 32),
    "stages": (1, 2, 3, 4),
}


def of(tile: Tile, size: int) -> TileRequirements:
    row = tile.BR * tile.BD
    ahead = (row,) * AHEAD if tile.stages > 1 else ()
    return TileRequirements(size, tile.warps, tile.stages, loads=ahead, sums=row)


def check(tile: Tile, size: int, arch: Arch) -> None:
    """Raises ValueError for a tile that cannot run on `arch`, with the nearest that can."""
    check_tile("norm", tile, arch, replace, lambda x: [of(x, size)], SIZES)
