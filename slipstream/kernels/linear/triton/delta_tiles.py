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
    tma: bool = False  # rows by tensor descriptors, where they are aligned


def _tile(C: int, solve: tuple, walk: tuple, back: tuple, grads: tuple) -> DeltaTile:
    return DeltaTile(C, Part(*solve), Part(*walk), Part(*walk), Part(*back), Part(*grads))


# (family, bytes an element, next power of two of K, at least 64) -> C and the kernels' B, warps,
# stages. What is larger than this on sm_80 makes ptxas put every register on the stack.
# float32 with K = 256 does so everywhere: right, but slow. On sm_90 its chunks of 64 don't fit, and
# narrower dots are only right there with 2 warps, which don't use wgmma.
# The row of sm_90 with K = 128 in 16 bits by bench/results/delta_gpu_sweep.csv.
TILES = {
    ("sm_70", 2, 64): _tile(32, (32, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1)),
    ("sm_80", 2, 64): _tile(32, (64, 4, 2), (64, 4, 2), (64, 4, 2), (32, 4, 2)),
    ("sm_80", 2, 128): _tile(32, (64, 4, 2), (32, 4, 1), (32, 4, 2), (32, 4, 2)),
    ("sm_80", 2, 256): _tile(32, (64, 4, 1), (16, 4, 1), (16, 4, 1), (32, 4, 1)),
    ("sm_80", 4, 64): _tile(16, (32, 4, 1), (32, 4, 1), (32, 4, 1), (16, 4, 1)),
    ("sm_80", 4, 128): _tile(16, (32, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
    ("sm_80", 4, 256): _tile(16, (32, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
    ("sm_90", 2, 64): _tile(64, (64, 4, 1), (64, 4, 3), (64, 4, 3), (64, 4, 2)),
    ("sm_90", 2, 128): DeltaTile(
        64,
        solve=Part(128, 4, 1),
        walk=Part(64, 4, 3),
        keep=Part(64, 4, 3),
        back=Part(64, 4, 3),
        grads=Part(64, 4, 2),
    ),
    ("sm_90", 2, 256): _tile(64, (64, 4, 2), (64, 8, 1), (64, 8, 1), (64, 4, 2)),
    ("sm_90", 4, 64): _tile(64, (64, 4, 1), (64, 8, 1), (64, 8, 1), (64, 8, 1)),
    ("sm_90", 4, 256): _tile(32, (32, 2, 1), (16, 2, 1), (16, 2, 1), (32, 2, 1)),
    ("interpreter", 4, 64): _tile(32, (16, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
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
    while (base[0], base[1], width) not in TILES:
        width //= 2
    tile = TILES[base[0], base[1], width]
    if narrowest > tile.C:
        narrowest = 16
    most_v = max(narrowest, power_of_two(V))
    walk, keep, back = (
        Part(min(x.B, most_v), x.warps, x.stages) for x in (tile.walk, tile.keep, tile.back)
    )
    solve, grads = (Part(min(x.B, BK), x.warps, x.stages) for x in (tile.solve, tile.grads))
    tma = base[0] == "sm_90" and tile.C >= 64
    return DeltaTile(tile.C, solve, walk, keep, back, grads, tma), BK
