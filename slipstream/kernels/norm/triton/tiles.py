"""Tiles of the norms by the width of a row: tables, and what registers and shared memory hold.

A tile of BR rows has at least `elements`, so that short rows share a program. 16 to 32 elements a
thread are loaded at once; longer rows get more warps, until they no longer fit.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row of a table.

    widest: the largest BD that it is for. per_processor: programs on a multiprocessor at a time,
    each of which goes on to further tiles; 0: a program for each tile. stages: of loads ahead of
    their use; 1: none. lean: while its sums are computed, a forward row of 16 bits stays in the
    dtype it was loaded in, for norms that allow it (launch.py).
    """

    widest: int
    elements: int
    warps: int
    per_processor: int
    stages: int
    lean: bool = False


@dataclass(frozen=True)
class Tile:
    BR: int
    BD: int
    warps: int
    per_processor: int
    stages: int
    lean: bool = False


FORWARD = (
    Row(4096, 2048, 4, 0, 1, lean=True),
    Row(4096, 2048, 4, 0, 1),
    Row(8192, 8192, 8, 0, 1),
    Row(16384, 16384, 8, 0, 1, lean=True),
    Row(32768, 16384, 16, 0, 1),
)
BACKWARD = (
    Row(2048, 2048, 4, 3, 3),
    Row(4096, 4096, 8, 2, 3),
    Row(8192, 8192, 16, 1, 3),
    Row(16384, 16384, 16, 1, 1),
)
# Backward without a weight's or a bias's gradient: no program has to go on to other rows.
SINGLE = (Row(4096, 2048, 8, 0, 1), Row(8192, 8192, 8, 0, 1), Row(16384, 16384, 16, 0, 1))
# Of a row that is longer than the last entry: columns of one round or program. UNEVEN: of one whose
# rows do not begin at multiples of 16 bytes, and which takes more registers. SPLIT and SUMS: of
# backward, the gradient and the sums before it.
LOOPED, UNEVEN = Row(32768, 32768, 32, 0, 1), Row(8192, 8192, 8, 0, 1)
SPLIT, SUMS = Row(4096, 8192, 8, 2, 1), Row(4096, 4096, 8, 0, 1)


def choose(
    D: int,
    bytes_each: int,
    shared: int,
    backward: bool,
    heavy: bool = False,
    sums: bool = True,
    lean: bool = False,
) -> Tile:
    """The tile for rows of D features; BD < D if they take more than one.

    Args:
        shared: bytes of shared memory that a program may use.
        heavy: there is a gate or a bias, whose sums or factors take registers in backward.
        sums: of a weight's or a bias's gradient are made in backward.
        lean: rows of the table for forward rows that stay as they were loaded may be taken.
    """
    table = FORWARD if not backward else BACKWARD if sums else SINGLE
    BD = 1 << max(D - 1, 0).bit_length()
    # wider, backward with a gate or a bias spills registers
    max_columns = 8192 if heavy and backward else BD
    rows = [row for row in table if lean or not row.lean]
    row = next((row for row in rows if row.widest >= BD and max_columns >= BD), None)
    if row is None:
        row = SPLIT if backward else UNEVEN if D * bytes_each % 16 else LOOPED
        BD = row.widest
    BR = max(1, row.elements // BD)
    # dy, h, gate, dh and w; one tile ahead is slower than none
    ahead = (row.stages - 1) * 5 * BR * BD * bytes_each
    stages = row.stages if ahead <= shared else 1
    return Tile(BR, BD, row.warps, row.per_processor, stages, row.lean)
