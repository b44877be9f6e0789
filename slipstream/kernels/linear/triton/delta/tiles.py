"""Tiles of the delta rule's kernels by architecture, width and dtype.

C tokens a chunk, in all of them. A scan has BV columns of V a program and all of K, BK = the next
power of two; the gradients' kernel BK channels of K, and takes V by BV at a time.
"""

from dataclasses import dataclass, replace

from slipstream.kernels.linear.triton.scalar_decay import tiles


@dataclass(frozen=True)
class KernelTile:
    B: int  # BV of a scan, BK of solve and grads
    warps: int
    stages: int


@dataclass(frozen=True)
class DeltaTile:
    C: int
    solve: KernelTile
    fwd: KernelTile
    dstate: KernelTile
    grads: KernelTile
    tma: bool = False  # rows by tensor descriptors, where they are aligned


def _tile(C: int, solve: tuple, fwd: tuple, dstate: tuple, grads: tuple) -> DeltaTile:
    return DeltaTile(
        C, KernelTile(*solve), KernelTile(*fwd), KernelTile(*dstate), KernelTile(*grads)
    )


# (family, bytes an element, next power of two of K, at least 64) -> C, and B, warps and stages of
# solve, fwd, dstate and grads. What is larger than this on sm_80 makes ptxas put every register on
# the stack. float32 with K = 256 does so everywhere: right, but slow. On sm_90 its chunks of 64
# don't fit, and narrower dots are only right there with 2 warps, which don't use wgmma.
# Rows of sm_90 are the fastest of sweeps on an H200 (22 November); with K = 128 in 16 bits
# those for more programs than multiprocessors, of which two stages let two share one.
TILES = {
    ("sm_70", 2, 64): _tile(32, (32, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1)),
    ("sm_80", 2, 64): _tile(32, (64, 4, 2), (64, 4, 2), (64, 4, 2), (32, 4, 2)),
    ("sm_80", 2, 128): _tile(32, (64, 4, 2), (32, 4, 1), (32, 4, 2), (32, 4, 2)),
    ("sm_80", 2, 256): _tile(32, (64, 4, 1), (16, 4, 1), (16, 4, 1), (32, 4, 1)),
    ("sm_80", 4, 64): _tile(16, (32, 4, 1), (32, 4, 1), (32, 4, 1), (16, 4, 1)),
    ("sm_80", 4, 128): _tile(16, (32, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
    ("sm_80", 4, 256): _tile(16, (32, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
    ("sm_90", 2, 64): _tile(64, (64, 4, 1), (64, 4, 3), (64, 4, 3), (64, 4, 2)),
    ("sm_90", 2, 128): _tile(64, (128, 4, 1), (64, 4, 2), (64, 4, 2), (64, 4, 2)),
    ("sm_90", 2, 256): _tile(64, (128, 4, 1), (64, 8, 2), (64, 8, 2), (64, 4, 2)),
    ("sm_90", 4, 64): _tile(64, (64, 4, 1), (64, 8, 1), (64, 8, 1), (64, 4, 1)),
    ("sm_90", 4, 256): _tile(32, (32, 2, 1), (16, 2, 1), (16, 2, 1), (32, 2, 1)),
    ("interpreter", 4, 64): _tile(32, (16, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
}
# Rows of these use others': (family, bytes) -> (family, bytes).
_SAME = {("sm_70", 4): ("sm_80", 4), ("interpreter", 2): ("interpreter", 4)}


def choose(family: str, K: int, V: int, bytes_each: int) -> tuple[DeltaTile, int]:
    """The tile, no wider than K and V need, and BK of the scans."""
    narrowest = tiles.NARROWEST.get(family, 16)
    BK = max(narrowest, tiles.power_of_two(K))
    base = tiles.ROWS.get(family, family), bytes_each
    base = _SAME.get(base, base)
    width = max(64, BK)
    while (base[0], base[1], width) not in TILES:
        width //= 2
    tile = TILES[base[0], base[1], width]
    if narrowest > tile.C:
        narrowest = 16
    width_v = max(narrowest, tiles.power_of_two(V))
    cut = {name: _segment_cost(getattr(tile, name), width_v) for name in ("fwd", "dstate")}
    cut |= {name: _segment_cost(getattr(tile, name), BK) for name in ("solve", "grads")}
    tma = base[0] == "sm_90" and tile.C >= 64
    if tma and family in tiles.UNPIPELINED:
        cut = {name: replace(kernel_tile, stages=1) for name, kernel_tile in cut.items()}
    return DeltaTile(tile.C, **cut, tma=tma), BK


def _segment_cost(kernel_tile: KernelTile, width: int) -> KernelTile:
    """A tile of 64 rows has work for 4 warps of sm_90's tensor cores."""
    warps = (
        kernel_tile.warps
        if width >= kernel_tile.B
        else max(4, kernel_tile.warps * width // kernel_tile.B)
    )
    return KernelTile(min(kernel_tile.B, width), min(kernel_tile.warps, warps), kernel_tile.stages)
