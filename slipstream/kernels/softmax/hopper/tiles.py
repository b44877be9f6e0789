"""Tiles of the sm_90 kernels by the width of a head.

A program has two warpgroups of 64 rows, the forward of some tiles three; at 256, where registers
end, dq has a kernel of its own, and one warpgroup makes dk and one dv.
tests/kernels/softmax/test_hopper_compiles.py holds each row against shared memory, registers and
the waits that a serialised wgmma would have.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """B: keys (of dk and dv: queries) a step. buffers: of each ring. persistent: a program a
    multiprocessor, which takes unit after unit, or a program a unit. rows: of a unit. Of the
    forward, shared: weights go by way of shared memory, not in registers; early: the product with
    values is waited for ahead of the exponentials, which takes fewer registers.
    """

    B: int
    buffers: tuple[int, int]
    persistent: bool = True
    rows: int = 128
    shared: bool = False
    early: bool = False


class Tiles(NamedTuple):
    """dq, dkv: where these have kernels of their own; launch_fused.py has the others."""

    forward: Tile
    open: Tile | None = None  # the forward without a mask, where another tile is faster
    dq: Tile | None = None
    dkv: Tile | None = None


TILES = {
    64: Tiles(Tile(128, (4, 4), shared=True), Tile(128, (5, 5), rows=192, early=True)),
    128: Tiles(Tile(128, (2, 2))),
    256: Tiles(Tile(64, (2, 2)), dq=Tile(64, (2, 1)), dkv=Tile(64, (2, 2), rows=64)),
}
# the forward of heads of q and k of one width and of v of another; the backward is the portable one
MIXED = {(192, 128): Tile(128, (2, 2))}
# what may replace a row, for bench/attention_hopper.py; the first of each is the row
TRIED = {
    64: {
        "forward": [Tile(128, (4, 4), shared=True), Tile(128, (4, 4))],
        "open": [
            Tile(128, (5, 5), rows=192, early=True),
            Tile(128, (4, 4), rows=192, early=True),
            Tile(128, (4, 4), shared=True),
        ],
    },
    128: {
        "forward": [Tile(128, (2, 2)), Tile(128, (2, 2), False)],
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
# of the queries and what comes to them in the fused backward, where few tiles of keys of a pair at
# a time wait less for one another
WALKED = 96 << 20
# the same of the forward: half of the cache is far from a multiprocessor
CLOSE = 8 << 20
