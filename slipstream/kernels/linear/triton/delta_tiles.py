"""Tiles of the delta rule's kernels by architecture, width and dtype.

C tokens a chunk, in all of them. A walk has BV columns of V a program and all of K, BK = the next
power of two; the gradients' kernel BK channels of K, and takes V by BV at a time.
"""

from dataclasses import dataclass

from slipstream.kernels.linear.triton.tiles import NARROWEST, ROWS, power_of_two


@dataclass(frozen=True)
class Part:
    B: int  # BV of a walk, BK of solve and grads
    warps: int
    stages: int


@dataclass(frozen=True)
class DeltaTile:
    C: int
    solve: Part
    walk: Part
    keep: Part  # the forward walk that keeps the states
    back: Part
    grads: Part


# (family, bytes an element, next power of two of K, at least 64)
TILES = {
    ("sm_70", 2, 64): DeltaTile(
        32, Part(32, 4, 1), Part(32, 4, 1), Part(32, 4, 1), Part(32, 4, 1), Part(32, 4, 1)
    ),
    ("sm_80", 2, 64): DeltaTile(
        64, Part(64, 4, 2), Part(64, 4, 2), Part(64, 4, 2), Part(64, 4, 2), Part(64, 8, 2)
    ),
    ("sm_80", 2, 128): DeltaTile(
        64, Part(64, 4, 2), Part(64, 4, 1), Part(64, 4, 1), Part(64, 4, 1), Part(64, 8, 1)
    ),
    ("sm_80", 2, 256): DeltaTile(
        32, Part(64, 4, 1), Part(32, 4, 1), Part(32, 4, 1), Part(32, 4, 1), Part(64, 8, 1)
    ),
    ("sm_80", 4, 64): DeltaTile(
        32, Part(32, 4, 1), Part(32, 4, 1), Part(32, 4, 1), Part(32, 4, 1), Part(32, 4, 1)
    ),
    ("sm_80", 4, 256): DeltaTile(
        16, Part(32, 4, 1), Part(16, 4, 1), Part(16, 4, 1), Part(16, 4, 1), Part(32, 4, 1)
    ),
    ("sm_90", 2, 64): DeltaTile(
        64, Part(64, 4, 2), Part(64, 4, 3), Part(64, 4, 3), Part(64, 4, 3), Part(64, 8, 2)
    ),
    ("sm_90", 2, 128): DeltaTile(
        64, Part(64, 4, 2), Part(64, 4, 2), Part(64, 4, 2), Part(64, 4, 2), Part(64, 8, 2)
    ),
    ("sm_90", 2, 256): DeltaTile(
        64, Part(64, 4, 2), Part(64, 8, 1), Part(64, 8, 1), Part(64, 8, 1), Part(64, 8, 1)
    ),
    ("sm_90", 4, 64): DeltaTile(
        64, Part(64, 4, 1), Part(64, 8, 1), Part(64, 8, 1), Part(64, 8, 1), Part(64, 8, 1)
    ),
    ("interpreter", 4, 64): DeltaTile(
        32, Part(16, 4, 1), Part(16, 4, 1), Part(16, 4, 1), Part(16, 4, 1), Part(16, 4, 1)
    ),
}
# Rows of these use others': (family, bytes) -> (family, bytes).
_SAME = {("sm_70", 4): ("sm_80", 4), ("interpreter", 2): ("interpreter", 4)}


def choose(family: str, K: int, V: int, bytes_each: int) -> tuple[DeltaTile, int]:
    """The tile, no wider than K and V need, and BK of the walks."""
    narrowest = NARROWEST.get(family, 16)
    BK = max(narrowest, power_of_two(K))
    base = ROWS.get(family, family), bytes_each
    base = _SAME.get(base, base)
    width = max(64, BK)
    while (*base, width) not in TILES:
        width //= 2
    tile = TILES[*base, width]
    most_v = max(narrowest, power_of_two(V))
    walks = [Part(min(x.B, most_v), x.warps, x.stages) for x in (tile.walk, tile.keep, tile.back)]
    solve, grads = (Part(min(x.B, BK), x.warps, x.stages) for x in (tile.solve, tile.grads))
    return DeltaTile(tile.C, solve, *walks, grads), BK
