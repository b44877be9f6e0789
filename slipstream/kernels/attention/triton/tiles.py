"""Tables of the kernels' tiles, by architecture, head width and dtype.

BM queries and BN keys a tile. tests/kernels/attention/test_triton_compiles.py holds
each row against compiler/arch.py and the spills it may have.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Tile(NamedTuple):
    BM: int
    BN: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    forward: Tile
    dq: Tile
    dkv: Tile  # of dk alone, where dv has a launch of its own
    decode: Tile
    dv: Tile | None = None


# Narrower dots beside others are miscompiled on sm_90 by Triton 3.6's ptxas 12.8.
MIN_HEAD_DIM = {"sm_90": 64, "sm_100": 64}

# On these architectures float32 tiles of wider heads do not fit.
MAX_HEAD_DIM_FP32 = 128

# (family, bytes an element, widest head) -> Tiles
TILES = {
    ("sm_70", 2, 64): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("sm_70", 2, 128): Tiles(*[Tile(16, 32, 4, 1)] * 4),
    ("sm_70", 2, 256): Tiles(*[Tile(16, 16, 4, 1)] * 4),
    ("sm_70", 4, 64): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("sm_70", 4, 128): Tiles(*[Tile(16, 16, 4, 1)] * 4),
    ("sm_70", 4, 256): Tiles(*[Tile(16, 16, 4, 1)] * 4),
    ("sm_80", 2, 64): Tiles(
        Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)
    ),
    ("sm_80", 2, 128): Tiles(
        Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)
    ),
    ("sm_80", 2, 256): Tiles(
        Tile(64, 64, 8, 1), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(16, 32, 4, 2)
    ),
    ("sm_86", 2, 256): Tiles(
        Tile(64, 64, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 2)
    ),
    ("gfx942", 2, 64): Tiles(*[Tile(64, 64, 4, 1)] * 4),
    ("gfx942", 2, 128): Tiles(
        Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(32, 32, 4, 1)
    ),
    ("gfx942", 2, 256): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("gfx942", 4, 64): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("gfx942", 4, 128): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("gfx942", 4, 256): Tiles(*[Tile(16, 16, 4, 1)] * 4),
    ("sm_80", 4, 64): Tiles(
        Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2)
    ),
    ("sm_80", 4, 128): Tiles(
        Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 32, 4, 2)
    ),
    ("sm_80", 4, 256): Tiles(
        Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)
    ),
    # the fastest of a sweep on an H200, 21 November
    ("sm_90", 2, 64): Tiles(
        Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)
    ),
    ("sm_90", 2, 128): Tiles(
        Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(64, 64, 4, 3)
    ),
    ("sm_90", 2, 256): Tiles(
        Tile(128, 64, 8, 2),
        Tile(128, 64, 8, 1),
        Tile(64, 128, 8, 1),
        Tile(64, 64, 4, 2),
        dv=Tile(64, 128, 8, 2),
    ),
    ("sm_100", 2, 256): Tiles(
        Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(32, 32, 8, 1), Tile(64, 64, 4, 2)
    ),
    ("sm_90", 4, 64): Tiles(
        Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)
    ),
    ("sm_90", 4, 128): Tiles(
        Tile(64, 64, 4, 2), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(64, 64, 8, 2)
    ),
    # with larger ones dq and dkv want more tensor memory than there is
    ("sm_100", 4, 128): Tiles(
        Tile(64, 64, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(64, 64, 8, 2)
    ),
    ("interpreter", 2, 64): Tiles(*[Tile(16, 32, 4, 1)] * 4),
    ("interpreter", 4, 64): Tiles(*[Tile(32, 16, 4, 1)] * 4),
}
# Rows for calls with a gate, slopes, a softcap or a window to the left, where they differ: with the
# tiles above, forward and dq would spill in their loops.
BIASED_TILES = {
    ("sm_90", 2, 64): Tiles(
        Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 3)
    ),
    ("sm_90", 2, 128): Tiles(
        Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 3)
    ),
}
# of decode_latent.py, for latents up to 512 wide and 64 beside them, in 16 bits
LATENT = {
    "sm_80": Tile(16, 32, 4, 2),
    "sm_86": Tile(16, 32, 4, 2),
    "sm_90": Tile(64, 64, 8, 2),
    "interpreter": Tile(16, 16, 4, 1),
}
# (family, widest head) -> tile of decode_words.py, where it is not that of decode: few rows, since
# a row without a query costs as much as one with, and warps enough to share a row of values.
ROUNDED = {
    ("sm_90", 64): Tile(16, 32, 1, 3),
    ("sm_90", 128): Tile(16, 64, 2, 3),
    ("sm_90", 256): Tile(16, 64, 4, 3),
}
# Families that use another's rows where they have none of their own.
FALLBACK_FAMILY = {"sm_75": "sm_70", "sm_86": "sm_80", "sm_100": "sm_90"}


def family(capability: tuple[int, int], hip: bool = False) -> str:
    """The row of the tables for a device: sm_86 stands for all with 99 KB of shared memory."""
    if hip:
        return "gfx942"
    if capability[0] < 8:
        return "sm_75" if capability == (7, 5) else "sm_70"
    if capability == (8, 0):
        return "sm_80"
    if capability[0] == 9:
        return "sm_90"
    return "sm_100" if capability[0] in (10, 11) else "sm_86"


def rounded(family: str, widest: int, decode: Tile) -> Tile:
    """The tile of decode_words.py for heads of at most 64, 128 or 256."""
    row = FALLBACK_FAMILY.get(family, family)
    return ROUNDED.get((row, max(64, widest)), decode)


def choose(
    family: str, D: int, DV: int, bytes_each: int, has_bias: bool = False
) -> tuple[Tiles, int, int]:
    """The tiles, BD and BV for heads of widths D and DV."""
    narrowest = MIN_HEAD_DIM.get(family, 16)
    BD, BV = (max(narrowest, 16, 1 << (width - 1).bit_length()) for width in (D, DV))
    widest = 64 if family == "interpreter" else max(64, BD, BV)
    row = (family, bytes_each, widest)
    if row not in TILES:
        row = (FALLBACK_FAMILY[family], bytes_each, widest)
    return BIASED_TILES.get(row, TILES[row]) if has_bias else TILES[row], BD, BV
