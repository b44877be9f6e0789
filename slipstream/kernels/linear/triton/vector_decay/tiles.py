"""Tiles of the kernels with a decay per channel, by architecture and dtype.

C tokens a chunk, in all of them; K is the side that decays. Preparing takes K by BK channels at a
time, the gradients BK a program, both in `prepare` and `grads`; P takes V by as many as `prepare`.
The scans' are those of tiles.py except for C.
"""

from dataclasses import dataclass, replace

from slipstream.kernels.linear.segments import NUM_SMS
from slipstream.kernels.linear.triton.scalar_decay import tiles
from slipstream.kernels.linear.triton.scalar_decay.tiles import NARROWEST, ROWS, Tile, power_of_two


@dataclass(frozen=True)
class KernelTile:
    BK: int
    warps: int
    stages: int
    registers: int | None = None  # a thread at most, where halves are apart and one tile has all K


@dataclass(frozen=True)
class VectorDecayTile:
    C: int
    prepare: KernelTile
    grads: KernelTile


# (family, bytes an element) -> C and the kernels' BK, warps, stages. Chosen by what spills least;
# with 8 warps and C = 64 both halves of a program would do the same work, since the rows of a
# product that follows another are not split further.
TILES = {
    ("sm_70", 2): VectorDecayTile(32, KernelTile(32, 4, 1), KernelTile(32, 4, 1)),
    ("sm_80", 2): VectorDecayTile(64, KernelTile(32, 4, 1), KernelTile(32, 4, 1)),
    ("sm_80", 4): VectorDecayTile(32, KernelTile(32, 4, 1), KernelTile(32, 4, 1)),
    ("sm_90", 2): VectorDecayTile(64, KernelTile(64, 4, 3, registers=168), KernelTile(64, 4, 1)),
    ("sm_90", 4): VectorDecayTile(64, KernelTile(64, 4, 1), KernelTile(64, 4, 1)),
    ("interpreter", 4): VectorDecayTile(32, KernelTile(32, 4, 1), KernelTile(32, 4, 1)),
}
# Rows of these use others': (family, bytes) -> (family, bytes).
_SAME = {("sm_70", 4): ("sm_70", 2), ("interpreter", 2): ("interpreter", 4)}
# Scans of (family, bytes, BD) where those of tiles.py do not let two programs fit: scores come on
# top of their shared memory.
CHUNK_TILES = {
    ("sm_80", 2, 128): Tile(64, 32, 4, 2),
    ("sm_80", 2, 256): Tile(64, 32, 8, 1),
    ("sm_90", 2, 128): Tile(64, 64, 4, 2, tma=True),
}


def choose(family: str, K: int, bytes_each: int) -> VectorDecayTile:
    """The tile, no wider than K needs."""
    row = ROWS.get(family, family), bytes_each
    tile = TILES[_SAME.get(row, row)]
    width = max(NARROWEST.get(family, 16), power_of_two(K))
    prepare, grads = (replace(x, BK=min(x.BK, width)) for x in (tile.prepare, tile.grads))
    return VectorDecayTile(tile.C, prepare, grads)


def choose_chunk_tile(family: str, D: int, X: int, bytes_each: int, C: int) -> tuple[Tile, int]:
    """The tile and BD for a scan with a state of D x X."""
    tile, BD = tiles.choose(family, D, X, bytes_each)
    table_tile = CHUNK_TILES.get((ROWS.get(family, family), bytes_each, BD), tile)
    return replace(table_tile, C=C, BX=min(table_tile.BX, tile.BX)), BD


def scan_stages(tile: Tile, BD: int, bytes_each: int, programs: int, packed: bool) -> int:
    """Stages of a scan. programs: of one sequence. packed: it is of whole ones, not segments.

    All packed sequences wait for the longest. Where its programs are few, they get tiles one more
    chunk ahead, which leaves each a multiprocessor of its own: gla of eight heads in 0.83 to 0.87
    of the time with backward, on an H200.
    """
    fits = tile.tma and tile.stages > 1 and bytes_each == 2 and BD <= 128
    return tile.stages + (packed and fits and 8 * programs <= NUM_SMS)
