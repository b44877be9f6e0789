"""What the tiles of this family ask of a GPU: the products of their kernels, and what they load.

C tokens a chunk, BX or BV columns of the state a program, BD or BK all of its rows.
"""

from dataclasses import replace
from typing import Any

from slipstream.compiler.arch import Arch
from slipstream.compiler.tile_limits import TileRequirements, check_tile
from slipstream.kernels.linear.triton.delta.tiles import DeltaTile
from slipstream.kernels.linear.triton.dplr.tiles import DplrTile
from slipstream.kernels.linear.triton.scalar_decay.tiles import Tile
from slipstream.kernels.linear.triton.vector_decay.tiles import VectorDecayTile

SIZES = (16, 32, 64, 128, 256)
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4)
_CHUNK_KERNELS = (
    "fwd", "fwd_states", "dstate",
    "oversubscribed_fwd", "oversubscribed_fwd_states", "oversubscribed_dstate",
)  # fmt: skip


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


def of(tile: Any, width: int, size: int) -> list[TileRequirements]:
    """Of a row of any of the family's tables, for K (or the scan's D) of `width`."""
    return (
        [chunk_requirements(tile, width, size)]
        if isinstance(tile, Tile)
        else list(kernel_requirements(tile, width, size).values())
    )


def check(tile: Any, width: int, size: int, arch: Arch) -> None:
    """Raises ValueError for a tile that cannot run on `arch`, with the nearest that can.

    Args:
        tile: a row of a table. width: of the state, as the table's key. size: bytes an element.
    """
    if isinstance(tile, Tile):
        sizes = {"C": SIZES[:4], "BX": SIZES, "warps": WARPS, "stages": STAGES}
        sizes["tma"] = (True, False) if tile.tma else (False,)
        check_tile(
            "fwd", tile, arch, replace, lambda x: [chunk_requirements(x, width, size)], sizes
        )
        return
    for name, kernel_tile in vars(tile).items():
        if name not in ("C", "tma"):
            wide = "BK" if isinstance(tile, VectorDecayTile) else "B"
            sizes = {wide: SIZES, "warps": WARPS, "stages": STAGES}

            def needs(kernel_tile: Any, name: str = name) -> list[TileRequirements]:
                return [
                    kernel_requirements(replace(tile, **{name: kernel_tile}), width, size)[name]
                ]

            check_tile(name, kernel_tile, arch, replace, needs, sizes)
