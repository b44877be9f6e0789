"""Tiles of the kernels of per-channel decay, and of free a and b, by architecture, width and dtype.

C tokens a chunk, in all of them; WIDE = the next power of two of K. intra takes B channels of K
and B columns of V at a time, the scans have B columns of V and all of K a program, scores takes B
of V at a time, grads has B channels of K a program and takes B columns of V at a time.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from slipstream.kernels.linear.triton.delta.plan import KernelTile
from slipstream.kernels.linear.triton.scalar_decay.tiles import NARROWEST, ROWS, power_of_two


@dataclass(frozen=True)
class DplrTile:
    C: int
    intra: KernelTile
    fwd: KernelTile
    fwd_states: KernelTile  # the forward scan that leaves the states for backward
    dstate: KernelTile
    scores: KernelTile
    grads: KernelTile

    @property
    def steps(self) -> int:
        return self.C.bit_length() - 1


def _tile(C: int, intra: tuple, fwd: tuple, dstate: tuple, scores: tuple, grads: tuple):
    chunk_tiles = KernelTile(*fwd), KernelTile(*fwd), KernelTile(*dstate)
    return DplrTile(C, KernelTile(*intra), *chunk_tiles, KernelTile(*scores), KernelTile(*grads))


# (family, bytes an element, next power of two of K, at least 64) -> C and the kernels' B, warps,
# stages. With 8 warps and 64 rows both halves of a program would do the same work on sm_90. There
# the scans with K = 128 have room for one program a multiprocessor. float32 there takes chunks
# that are too small for wgmma: with wgmma the gradients' kernel spilled, and its spilled addresses
# of shared memory were wrong.
TILES = {
    ("sm_70", 2, 64): _tile(32, (32, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1)),
    ("sm_80", 2, 64): _tile(32, (32, 4, 1), (64, 4, 2), (64, 4, 2), (32, 4, 2), (32, 4, 1)),
    ("sm_80", 2, 128): _tile(32, (32, 4, 1), (32, 4, 2), (32, 4, 1), (32, 4, 2), (32, 4, 1)),
    ("sm_80", 2, 256): _tile(32, (32, 4, 1), (16, 4, 1), (16, 4, 1), (32, 4, 2), (32, 4, 1)),
    ("sm_80", 4, 64): _tile(16, (32, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1), (16, 4, 1)),
    ("sm_80", 4, 128): _tile(16, (32, 4, 1), (16, 4, 2), (16, 4, 1), (32, 4, 1), (16, 4, 1)),
    ("sm_80", 4, 256): _tile(16, (32, 4, 1), (16, 4, 1), (16, 4, 1), (32, 4, 1), (16, 4, 1)),
    ("sm_90", 2, 64): DplrTile(
        64,
        intra=KernelTile(64, 4, 1),
        fwd=KernelTile(64, 4, 3),
        fwd_states=KernelTile(64, 4, 3),
        dstate=KernelTile(64, 4, 3),
        scores=KernelTile(64, 4, 2),
        grads=KernelTile(64, 4, 2),
    ),
    ("sm_90", 2, 128): _tile(64, (64, 4, 1), (128, 8, 2), (128, 8, 2), (64, 4, 1), (64, 4, 1)),
    ("sm_90", 2, 256): DplrTile(
        64,
        intra=KernelTile(64, 4, 1),
        fwd=KernelTile(64, 8, 1),
        fwd_states=KernelTile(64, 8, 2),
        dstate=KernelTile(64, 4, 1),
        scores=KernelTile(64, 4, 1),
        grads=KernelTile(64, 4, 2),
    ),
    ("interpreter", 4, 64): _tile(16, (16, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
}
# Rows of these use others': (family, bytes) -> (family, bytes).
_SAME = {
    ("sm_70", 4): ("sm_80", 4),
    ("sm_90", 4): ("sm_80", 4),
    ("interpreter", 2): ("interpreter", 4),
}


class Range(NamedTuple):
    """How far gates may decay in a dtype, in base 2.

    Attributes:
        whole: chunks of which no channel decays further before their middle or after it are taken
            whole (intra_anchored.py): 2^whole times an input must be finite, 2^-whole of a gradient
            and a sum of gates not lose digits.
        shift: forward takes the decays of twice as much from the start of the chunk on, of bf16
            half of it above 1, 2^shift; others would lose small numbers.
        apart: both halves of a chunk may decay by 2^(-2 whole): reads of the first half are
            2^-apart, and of the second 2^apart of what they are relative to the middle.
        limit: backward takes blocks that decay no further in other chunks (gate_sums.py).
    """

    whole: float
    shift: float
    apart: float
    limit: float


RANGES = {
    torch.bfloat16: Range(whole=80.0, shift=80.0, apart=55.0, limit=80.0),
    torch.float32: Range(whole=16.0, shift=0.0, apart=0.0, limit=48.0),
    torch.float16: Range(whole=3.0, shift=0.0, apart=0.0, limit=6.0),
}


def choose(
    family: str, K: int, V: int, bytes_each: int, free: bool = False
) -> tuple[DplrTile, int]:
    """The tile, no wider than K and V need, and WIDE.

    Args:
        free: of free a and b, whose scans load a tile of K channels more.
    """
    narrowest = NARROWEST.get(family, 16)
    wide = max(narrowest, power_of_two(K))
    base = ROWS.get(family, family), bytes_each
    base = _SAME.get(base, base)
    width = max(64, wide)
    while (base[0], base[1], width) not in TILES:
        width //= 2
    tile = TILES[base[0], base[1], width]
    if narrowest > tile.C:
        narrowest = 16
    width_v = max(narrowest, power_of_two(V))

    def cut(kernel_tile: KernelTile, width: int) -> KernelTile:
        warps = kernel_tile.warps if width >= kernel_tile.B else min(kernel_tile.warps, 4)
        return KernelTile(min(kernel_tile.B, width), warps, kernel_tile.stages)

    fwd, fwd_states = cut(tile.fwd, width_v), cut(tile.fwd_states, width_v)
    if free and wide > 128:  # there is no room for two stages; 4 warps are faster there, of 8
        fwd, fwd_states = (
            KernelTile(fwd.B, min(fwd.warps, 4), fwd.stages),
            KernelTile(fwd_states.B, fwd_states.warps, 1),
        )
    return DplrTile(
        tile.C,
        cut(tile.intra, wide),
        fwd,
        fwd_states,
        cut(tile.dstate, width_v),
        cut(tile.scores, width_v),
        cut(tile.grads, wide),
    ), wide
