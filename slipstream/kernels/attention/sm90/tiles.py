"""Tiles of the sm_90 kernels by the width of a head.

A program has two warpgroups of 64 rows; at 256, where registers end, dq has a kernel of its own,
and one warpgroup makes dk and one dv.
tests/kernels/attention/test_sm90_compiles.py holds each row against shared memory, registers and
the waits that a serialised wgmma would have.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """B: keys (of dk and dv: queries) a step. buffers: of each ring. persistent: a program a
    multiprocessor, which takes unit after unit, or a program a unit. rows: of a unit. queries: the
    forward's buffers of these, two where those of the next unit are to be there early.
    """

    B: int
    buffers: tuple[int, int]
    persistent: bool = True
    rows: int = 128
    queries: int = 1


class Tiles(NamedTuple):
    """dq, dkv: where these have kernels of their own; bwd_fused_launch.py has the others."""

    forward: Tile
    dq: Tile | None = None
    dkv: Tile | None = None


TILES = {
    64: Tiles(Tile(128, (4, 4), queries=2)),
    128: Tiles(Tile(128, (2, 2))),
    256: Tiles(Tile(64, (2, 2)), dq=Tile(64, (2, 1)), dkv=Tile(64, (2, 2), rows=64)),
}
# the forward of heads of q and k of one width and of v of another; the backward is the portable one
MIXED_WIDTHS = {(192, 128): Tile(128, (2, 2))}
# of a thread of the warpgroups that compute, of one that loads, and of each of the 12 warps before
# they are handed out
REGISTERS = 240, 24, 168
# bytes of keys and values at work at a time: they are to stay in the L2 cache
SECTION_BYTES = 32 << 20
# SECTION_BYTES of the forward: half of the cache is far from a multiprocessor
FWD_SECTION_BYTES = 8 << 20
