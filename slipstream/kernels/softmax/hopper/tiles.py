"""Tiles of the sm_90 kernels by the width of a head.

A program has two warpgroups of 64 rows; at 256, where registers end, one makes dk and one dv.
tests/kernels/softmax/test_hopper_compiles.py holds each
row against shared memory, registers and the waits that a serialised wgmma would have.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """B: keys (of dk and dv: queries) a step. buffers: of each ring. persistent: a program a
    multiprocessor, which takes unit after unit, or a program a unit. rows: of a unit.
    ahead: the forward's next queries are loaded before o is stored, from a buffer of its own.
    """

    B: int
    buffers: tuple[int, int]
    persistent: bool = True
    rows: int = 128
    ahead: bool = False


class Tiles(NamedTuple):
    forward: Tile
    dq: Tile
    dkv: Tile
    fused: Tile | None = None  # backward_fused.py in place of dq and dkv, where it suits


TILES = {
    64: Tiles(Tile(128, (4, 4)), Tile(64, (4, 4)), Tile(64, (4, 4))),
    128: Tiles(Tile(128, (2, 2)), Tile(64, (3, 3)), Tile(64, (2, 2))),
    256: Tiles(Tile(64, (2, 2)), Tile(64, (2, 1)), Tile(64, (2, 2), rows=64)),
}
# what may replace a row, for bench/attention_hopper.py; the first of each is the row
TRIED = {
    64: {
        "forward": [
            Tile(128, (4, 4)),
            Tile(128, (4, 4), ahead=True),
            Tile(128, (4, 4), rows=192),
            Tile(128, (4, 4), rows=192, ahead=True),
        ],
        "dq": [Tile(64, (4, 4)), Tile(64, (4, 4), False)],
        "dkv": [Tile(64, (4, 4)), Tile(64, (4, 4), False)],
        "fused": [None, Tile(64, (4, 4))],
    },
    128: {
        "forward": [Tile(128, (2, 2)), Tile(128, (2, 2), ahead=True), Tile(128, (2, 2), False)],
        "dq": [Tile(64, (3, 3)), Tile(64, (3, 3), False)],
        "dkv": [Tile(64, (2, 2)), Tile(64, (2, 2), False)],
        "fused": [None, Tile(64, (2, 2))],
    },
    256: {
        "forward": [Tile(64, (2, 2)), Tile(64, (2, 2), False)],
        "dq": [Tile(64, (2, 1)), Tile(64, (2, 1), False)],
        "dkv": [Tile(64, (2, 2), rows=64), Tile(64, (2, 2), False, 64)],
    },
}
# by warpgroups that compute: registers of a thread of theirs, of one that loads, and of each of the
# 12 or 16 warps before they are handed out
REGISTERS = {2: (240, 24, 168), 3: (160, 32, 128)}
# bytes of keys and values at work at a time: they are to stay in the L2 cache
SECTION = 32 << 20
