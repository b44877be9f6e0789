"""Tiles of the kernels with a decay per channel, by architecture and dtype.

C tokens a chunk, in all of them; K is the side that decays. The states' walk has a tile of BV x BK
of the state a program; the reads BV columns, and take K by BK at a time; the gradients BK channels,
and take V by BV.
"""

from dataclasses import dataclass

from slipstream.kernels.linear.triton.tiles import NARROWEST, ROWS, power_of_two


@dataclass(frozen=True)
class Part:
    BK: int
    BV: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ChannelTile:
    C: int
    states: Part
    read: Part
    grads: Part


def _tile(C: int, states: tuple, read: tuple, grads: tuple) -> ChannelTile:
    return ChannelTile(C, Part(*states), Part(*read), Part(*grads))


# (family, bytes an element) -> C and the kernels' BK, BV, warps, stages. Chosen by what spills
# least; with 8 warps and C = 64 both halves of a program would do the same work, since the rows of
# a product that follows another are not split further.
TILES = {
    ("sm_70", 2): _tile(32, (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("sm_80", 2): _tile(64, (64, 64, 4, 2), (32, 64, 4, 1), (32, 64, 4, 1)),
    ("sm_80", 4): _tile(32, (32, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("sm_90", 2): _tile(64, (64, 128, 4, 3), (64, 128, 4, 1), (64, 64, 4, 1)),
    ("sm_90", 4): _tile(64, (64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1)),
    ("interpreter", 4): _tile(32, (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
}
# Rows of these use others': (family, bytes) -> (family, bytes).
_SAME = {("sm_70", 4): ("sm_70", 2), ("interpreter", 2): ("interpreter", 4)}


def choose(family: str, K: int, V: int, bytes_each: int) -> ChannelTile:
    """The tile, no wider than K and V need."""
    row = ROWS.get(family, family), bytes_each
    tile = TILES[_SAME.get(row, row)]
    narrowest = NARROWEST.get(family, 16)
    most_k, most_v = (max(narrowest, power_of_two(width)) for width in (K, V))
    parts = (
        Part(min(x.BK, most_k), min(x.BV, most_v), x.warps, x.stages)
        for x in (tile.states, tile.read, tile.grads)
    )
    return ChannelTile(tile.C, *parts)
