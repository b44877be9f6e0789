"""Tiles of the portable attention kernels in place of the table's: errors and times.

bench/attention_gpu.py --sweep and --candidates run this.
"""

import dataclasses
from typing import Any

import torch
from attention_gpu import CACHES, PLAIN, bench, cache_of, compare
from record import record

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.triton import decode_launch, launch, launch_utils, tiles
from slipstream.kernels.attention.triton.tiles import Tile

# BM, BN, warps, stages
SWEEP: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {
    ("forward", 64): [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3),
                      (64, 128, 4, 2), (128, 64, 4, 3)],
    ("forward", 128): [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2),
                       (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 3)],
    ("forward", 256): [(128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2)],
    ("dq", 64): [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2),
                 (64, 64, 4, 3), (64, 128, 4, 2)],
    ("dq", 128): [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
                  (64, 128, 8, 2)],
    ("dq", 256): [(64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 1), (128, 64, 8, 1)],
    ("dkv", 64): [(64, 128, 8, 2), (64, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2),
                  (64, 64, 4, 3), (64, 64, 8, 2)],
    ("dkv", 128): [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 1),
                   (64, 64, 8, 2)],
    ("dkv", 256): [(64, 64, 8, 2), (64, 64, 8, 1), (64, 64, 4, 1)],
    ("decode", 128): [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 128, 8, 2),
                      (64, 64, 4, 4)],
}  # fmt: skip
SWEPT = {64: (4, 4096, 32), 128: (4, 4096, 16), 256: (2, 8192, 8)}


def sweep() -> None:
    """One kernel's tile at a time in place of the table's; ms, causal / full."""
    for (part, D), rows in SWEEP.items():
        key = ("sm_90", 2, D)
        kept, line = tiles.TILES[key], []
        for row in rows:
            tiles.TILES[key] = dataclasses.replace(kept, **{part: Tile(*row)})
            launch_utils.tiles_of.cache_clear()
            try:
                line.append(f"{row} " + " / ".join(f"{x:.3f}" for x in swept(part, D)))
            except Exception as e:  # too much shared memory is a row too
                line.append(f"{row} {type(e).__name__}")
        print(f"{part} D{D}:", ", ".join(line), flush=True)
        tiles.TILES[key] = kept
    launch_utils.tiles_of.cache_clear()


def swept(part: str, D: int) -> list[float]:
    if part == "decode":
        caches = (cache_of(*CACHES[0]), cache_of(*CACHES[1]))
        return [
            bench(lambda c=c: decode_launch.decode(c, AttentionOptions(0.1, -1, 0))) for c in caches
        ]
    B, T, H = SWEPT[D]
    terms = AttentionInputs(
        *(torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    )
    found = []
    for options in (AttentionOptions(D**-0.5, -1, 0), AttentionOptions(D**-0.5)):
        o, lse = launch.forward(terms, options)
        do = torch.randn_like(o)
        if part == "forward":
            found.append(bench(lambda options=options: launch.forward(terms, options)))
        else:  # the whole of backward: the other kernel's time is the same in every row
            found.append(bench(
                lambda options=options, o=o, lse=lse, do=do: launch.backward(
                    terms, options, o, lse, do, None
                )
            ))  # fmt: skip
    return found


# tiles of the table, and what may replace them
CANDIDATES: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {
    ("forward", 64): [(128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3)],
    ("forward", 128): [(128, 128, 8, 2), (128, 64, 8, 3)],
    ("dq", 64): [(128, 128, 8, 2), (64, 64, 4, 3)],
    ("dq", 128): [(128, 64, 8, 2), (128, 64, 8, 3)],
    ("dq", 256): [(64, 64, 8, 2), (128, 64, 8, 1), (64, 64, 4, 2)],
    ("dkv", 64): [(64, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 3)],
    ("dkv", 128): [(64, 128, 8, 2), (64, 64, 4, 2)],
    ("dkv", 256): [(64, 64, 8, 2)],  # (128, 64, 8, 1) spills 1.8 KB
}  # fmt: skip
CHECKED: list[dict[str, Any]] = [
    {"B": 2, "H": 4, "T": 333, "S": 517, "right": 0},
    {"T": 1000, "S": 1000},
    {"T": 900, "S": 900, "lengths": (5, 0, 400, 1, 494), "right": 0},
]


def candidate(part: str, D: int, row: tuple[int, int, int, int]) -> tuple[float, list[float]]:
    """The worst error of a tile in place of the table's, and ms causal and full."""
    key = ("sm_90", 2, D)
    kept = tiles.TILES[key]
    tiles.TILES[key] = dataclasses.replace(kept, **{part: Tile(*row)})
    launch_utils.tiles_of.cache_clear()
    try:
        worst = 0.0
        for size in CHECKED:
            found = compare({**PLAIN, "D": D, "DV": D, **size}, torch.bfloat16)
            worst = max([worst, *found.values()], key=lambda x: (x != x, x))
        return worst, swept(part, D)
    finally:
        tiles.TILES[key] = kept
        launch_utils.tiles_of.cache_clear()


def candidates() -> None:
    rows = []
    for (part, D), given in CANDIDATES.items():
        for row in given:
            try:
                worst, (causal, full) = candidate(part, D, row)
            except Exception as e:
                print(f"{part} D{D} {row}: {type(e).__name__}: {str(e)[:150]}", flush=True)
                continue
            print(f"{part} D{D} {row}: error {worst:.1e}, {causal:.3f} / {full:.3f} ms", flush=True)
            rows.append({"kernel": part, "D": D, "tile_M_N_warps_stages": " ".join(map(str, row)),
                         "worst error": f"{worst:.1e}", "causal_ms": round(causal, 3),
                         "full_ms": round(full, 3)})  # fmt: skip
    record("attention_gpu_candidates", rows)


def main(with_sweep: bool, with_candidates: bool) -> None:
    if with_candidates:
        candidates()
    if with_sweep:
        sweep()
