"""What norm_tries.py tries, by work.

Symbols: R rows of D features, words of two bf16.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Try:
    """kernel: of norm_tries_rows, or of norm_tries_tma if it takes TMA or warps; none: what is
    called, with another tile. rows: of a tile. per: programs a multiprocessor of a walk, 0: a
    program a tile. registers: at most."""

    name: str
    kernel: str
    warps: int
    rows: int = 1
    per: int = 0
    registers: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


def row(name: str, warps: int, rows: int = 1, registers: int | None = None, **options: Any) -> Try:
    options = {"EARLY": False, "LEAN": True, "APART": 1, "LOAD": "", "STORE": "", **options}
    return Try(name, "norm_rows_kernel", warps, rows, registers=registers, options=options)


def walk(
    name: str, warps: int, per: int, rows: int = 1, registers: int | None = None, **options: Any
) -> Try:
    options = {"BLOCKED": False, "LOAD": "", "STORE": "", **options}
    return Try(name, "norm_walk_kernel", warps, rows, per, registers, options)


def by_tma(
    name: str, warps: int, rows: int = 1, pieces: int = 1, registers: int | None = None
) -> Try:
    return Try(name, "norm_tma_kernel", warps, rows, 0, registers, {"PIECES": pieces})


def ring(name: str, warps: int, per: int, slots: int, rows: int = 1, lag: int = 1) -> Try:
    return Try(name, "norm_ring_kernel", warps, rows, per, options={"SLOTS": slots, "LAG": lag})


def l2_rows(name: str, warps: int, rows: int, again: bool = True, **options: Any) -> Try:
    options = {"AGAIN": again, "LOAD": "", "STORE": "", **options}
    return Try(name, "l2_rows_kernel", warps, rows, options=options)


def l2_pairs(name: str, warps: int, rows: int, **options: Any) -> Try:
    options = {"LOAD": "", "STORE": "", **options}
    return Try(name, "l2_pairs_kernel", warps, rows, options=options)


def tile(warps: int, lean: bool, rows: int = 1) -> Try:
    name = f"called, {rows} rows, {warps} warps" + lean * ", as loaded"
    return Try(name, "", warps, rows, options={"lean": lean})


TRIES: dict[str, list[Try]] = {
    "rms": [
        tile(16, False),
        tile(16, True),
        tile(8, True),
        tile(4, True),
        row("float32, no mask, 16 warps", 16, LEAN=False),
        row("words, 16 warps, 40 registers", 16, registers=40),
        row("words, 8 warps", 8),
        row("words, 8 warps, w early", 8, registers=80, EARLY=True),
        row("words, 4 warps", 4),
        row("words, 16 warps, two rows", 16, 2, 64),
        row("words, 8 warps, x .cg", 8, LOAD="cg"),
        row("words, 8 warps, x y evict first", 8, LOAD="first", STORE="first"),
        row("words, 8 warps, y evict first", 8, STORE="first"),
        row("words, 8 warps, y .wt", 8, STORE="wt"),
        row("words, 8 warps, rows apart", 8, APART=64),
        walk("next row in registers, 16 warps", 16, 2, registers=64),
        walk("next row in registers, 8 warps", 8, 2),
        walk("next row in registers, 8 warps, blocks", 8, 2, BLOCKED=True),
        by_tma("TMA, 4 warps, 4 pieces", 4, 1, 4, 80),
        by_tma("TMA, 8 warps, 2 pieces", 8, 1, 2, 64),
        by_tma("TMA, 8 warps, 4 pieces", 8, 1, 4, 40),
        ring("TMA ring of 3, two a processor", 8, 2, 3),
        ring("TMA ring of 6", 16, 1, 6, lag=2),
    ],
    "short": [
        tile(4, False),
        tile(4, True),
        tile(2, True),
        row("words, 4 warps", 4),
        walk("next row in registers, 4 warps", 4, 8),
        by_tma("TMA, 4 warps", 4),
    ],
    "gated": [
        tile(4, False),
        tile(4, True),
        tile(8, True),
        tile(2, True),
        tile(4, True, 2),
        row("float32, no mask, w late", 4, LEAN=False),
        row("float32, no mask, 8 warps", 8, LEAN=False),
        row("words, 4 warps", 4),
        row("words, 2 warps", 2),
        row("words, 4 warps, w early", 4, EARLY=True),
        row("words, 4 warps, two rows", 4, 2),
        row("words, 8 warps, four rows", 8, 4),
        row("words, 4 warps, all evict first", 4, LOAD="first", STORE="first"),
        row("words, 4 warps, y evict first", 4, STORE="first"),
        row("words, 4 warps, x .cg", 4, LOAD="cg"),
        row("words, 4 warps, rows apart", 4, APART=64),
        Try("a warp a row, 4 warps", "norm_warps_kernel", 4, 4),
        Try("a warp a row, 2 warps", "norm_warps_kernel", 2, 2),
        walk("next row in registers, 4 warps", 4, 8),
        walk("next two rows in registers, 8 warps", 8, 4, 2),
        by_tma("TMA, 4 warps", 4),
        by_tma("TMA, 4 warps, two rows", 4, 2),
        by_tma("TMA, 8 warps, four rows", 8, 4),
        ring("TMA ring of 4, four rows", 8, 1, 4, 4, 2),
        ring("TMA ring of 4, two rows, three a processor", 8, 3, 4, 2, 2),
    ],
    "l2": [
        tile(8, False, 16),
        tile(4, False, 16),
        tile(4, False, 8),
        tile(8, False, 32),
        l2_rows("no mask, 16 rows, 8 warps", 8, 16, again=False),
        l2_rows("r again, 16 rows, 8 warps", 8, 16),
        l2_rows("r again, 8 rows, 4 warps", 4, 8),
        l2_rows("r again, 32 rows, 16 warps", 16, 32),
        l2_pairs("two tiles of 8 rows, 4 warps", 4, 8),
        l2_pairs("two tiles of 16 rows, 8 warps", 8, 16),
        l2_pairs("two tiles of 4 rows, 2 warps", 2, 4),
        l2_pairs("two tiles of 16 rows, 8 warps, dx evict first", 8, 16, STORE="first"),
        l2_rows("r again, all evict first", 8, 16, LOAD="first", STORE="first"),
        l2_rows("r again, dx evict first", 8, 16, STORE="first"),
        l2_rows("r again, x dy .cg", 8, 16, LOAD="cg"),
        Try("TMA, 32 rows, 4 warps", "l2_tma_kernel", 4, 32),
        Try("TMA, 64 rows, 4 warps", "l2_tma_kernel", 4, 64),
        Try("TMA, 64 rows, 8 warps", "l2_tma_kernel", 8, 64),
    ],
}
