"""Tiles of the sm_90 kernels by the width of a head.

A program has two warpgroups of 64 rows; at 256, where registers end, one makes dk and one dv.
tests/kernels/softmax/test_hopper_compiles.py holds each
row against shared memory, registers and the waits that a serialised wgmma would have.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """B: keys (of dk and dv: queries) a step. buffers: of each ring. persistent: a program a
    multiprocessor, which takes unit after unit, or a program a unit. rows: of a unit.
    """

    B: int
    buffers: tuple[int, int]
    persistent: bool = True
    rows: int = 128


class Tiles(NamedTuple):
    forward: Tile
    dq: Tile
    dkv: Tile


TILES = {
    64: Tiles(Tile(128, (4, 4)), Tile(64, (4, 4)), Tile(64, (4, 4))),
    128: Tiles(Tile(128, (2, 2)), Tile(64, (3, 3)), Tile(64, (2, 2))),
    256: Tiles(Tile(64, (2, 2)), Tile(64, (2, 1)), Tile(64, (2, 2), rows=64)),
}
# what may replace a row, for bench/attention_hopper.py; the first of each is the row
TRIED = {
    64: {
        "forward": [Tile(128, (4, 4)), Tile(128, (4, 4), False), Tile(128, (2, 2))],
        "dq": [Tile(64, (4, 4)), Tile(64, (4, 4), False)],
        "dkv": [Tile(64, (4, 4)), Tile(64, (4, 4), False), Tile(64, (2, 2))],
    },
    128: {
        "forward": [Tile(128, (2, 2)), Tile(128, (2, 2), False), Tile(64, (4, 4))],
        "dq": [Tile(64, (3, 3)), Tile(64, (3, 3), False), Tile(64, (2, 2))],
        "dkv": [Tile(64, (2, 2)), Tile(64, (2, 2), False), Tile(64, (3, 3))],
    },
    256: {
        "forward": [Tile(64, (2, 2)), Tile(64, (2, 2), False)],
        "dq": [Tile(64, (2, 1)), Tile(64, (2, 1), False)],
        "dkv": [Tile(64, (2, 2), rows=64), Tile(64, (2, 2), False, 64)],
    },
}
# of a thread that computes and of one that loads: 12 warps of 168 before they are handed out
REGISTERS = {"CONSUMER": 240, "PRODUCER": 24}
MAXNREG = 168
# bytes of keys and values at work at a time: they are to stay in the L2 cache
SECTION = 32 << 20
