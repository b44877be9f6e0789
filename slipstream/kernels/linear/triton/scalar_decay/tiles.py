"""Tiles of the scan by architecture, widths and dtype: a table, and what a device can hold.

C tokens a chunk, BX columns of the state a program; the state has BD = next power of two of D rows.
Shared memory is what the compiler reports for the tile (tests/compiler/test_tile_limits.py checks
each row against compiler/arch.py).
"""

from dataclasses import dataclass

import torch

from slipstream.runtime.launch_cache import cache


@dataclass(frozen=True)
class Tile:
    C: int
    BX: int
    warps: int
    stages: int
    tma: bool = False  # loads and stores by tensor descriptors, where rows are aligned


# Narrower dots beside others are miscompiled on sm_90 by Triton 3.6's ptxas 12.8.
NARROWEST = {"sm_90": 64}
# Triton 3.6 refuses to pipeline a loop with a store by a descriptor there.
UNPIPELINED = ("sm_100",)
# (family, bytes an element, BD) -> Tile; BX is cut to the width there is. Chosen so that the loop
# does not spill in 16 bits (float32 takes three products for one, and spills); the rows of sm_90
# with BD = 128 have of four tiles, on an H200, the least product of the times at 96 heads of 8192
# tokens and 8 heads of 32768.
TILES = {
    ("sm_70", 2, 64): Tile(32, 32, 4, 1),
    ("sm_70", 2, 128): Tile(32, 32, 4, 1),
    ("sm_70", 2, 256): Tile(16, 16, 4, 1),
    ("sm_70", 4, 64): Tile(32, 32, 4, 1),
    ("sm_70", 4, 128): Tile(16, 32, 4, 1),
    ("sm_70", 4, 256): Tile(16, 16, 4, 1),
    ("sm_80", 2, 64): Tile(64, 64, 4, 3),
    ("sm_80", 2, 128): Tile(32, 64, 4, 3),
    ("sm_80", 2, 256): Tile(32, 32, 4, 2),
    ("sm_80", 4, 64): Tile(32, 32, 4, 2),
    ("sm_80", 4, 128): Tile(16, 32, 4, 2),
    ("sm_80", 4, 256): Tile(16, 16, 4, 2),
    ("sm_90", 2, 64): Tile(64, 64, 4, 3, tma=True),
    ("sm_90", 2, 128): Tile(64, 64, 4, 3, tma=True),
    ("sm_90", 2, 256): Tile(64, 64, 8, 2, tma=True),
    ("sm_90", 4, 64): Tile(64, 64, 4, 2, tma=True),
    ("sm_90", 4, 128): Tile(64, 64, 4, 1, tma=True),
    ("sm_90", 4, 256): Tile(64, 64, 4, 1, tma=True),
    ("interpreter", 2, 64): Tile(16, 32, 4, 1),
    ("interpreter", 4, 64): Tile(16, 16, 4, 1),
}
# Families that use another's rows.
ROWS = {"sm_75": "sm_70", "sm_86": "sm_80", "sm_100": "sm_90"}


def family(capability: tuple[int, int], hip: bool = False) -> str:
    """The row of the tables for a device: sm_86 stands for all with 99 KB of shared memory, sm_75
    for those with 64 KB, as AMD's, whose capabilities are other GPUs': (9, 0) of gfx90a."""
    if hip or capability == (7, 5):
        return "sm_75"
    if capability[0] < 8:
        return "sm_70"
    if capability == (8, 0):
        return "sm_80"
    if capability[0] == 9:
        return "sm_90"
    return "sm_100" if capability[0] in (10, 11) else "sm_86"


@cache
def family_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    return family(torch.cuda.get_device_capability(device), hip=bool(torch.version.hip))


def power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def choose(family: str, D: int, X: int, bytes_each: int) -> tuple[Tile, int]:
    """The tile and BD for a scan with a state of D x X."""
    narrowest = NARROWEST.get(family, 16)
    BD = max(narrowest, power_of_two(D))
    row = (ROWS.get(family, family), bytes_each, max(64, BD))
    if family == "interpreter":
        row = ("interpreter", bytes_each, 64)
    tile = TILES[row]
    BX = min(tile.BX, max(narrowest, power_of_two(X)))
    stages = 1 if tile.tma and family in UNPIPELINED else tile.stages
    # rows that come an element at a time take more registers than 4 warps of sm_90 have
    warps = 8 if family == "sm_90" and min(D, X) * bytes_each < 16 else tile.warps
    return Tile(tile.C, BX, warps, stages, tile.tma), BD
