"""Every row of softmax attention in one process: ours for sm_90, ours portable, cuDNN, flash.

python bench/attention_rows.py               # all rows
python bench/attention_rows.py --rows 0,1,6  # these, by their place in attention_gpu.SHAPES
python bench/attention_rows.py --packed      # and mixed lengths beside equal ones of their work
python bench/attention_rows.py --warm        # compiles what the same without it needs, small

TFLOP/s, a causal mask counted as half. Of a row, all take turns for some rounds, so that each meets
the same clocks; in a round a few runs are queued one behind another, each with the L2 cache emptied
before, so that no time of the host is in them. Medians of all runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention_gpu import SHAPES, peer
from record import record
from torch import Tensor
from torch.nn.attention import SDPBackend

from slipstream.ops.attention import attention

EACH = 3
BARS = {64: 0.98, 128: 1.03, 256: 1.03}
MIXED = (4096, 512, 2048, 1, 3000, 130, 5000, 1597)
Run = Callable[..., Tensor]


def runs(causal: bool) -> dict[str, Run]:
    return {
        "sm90": partial(attention, causal=causal, impl="sm90"),
        "cudnn": peer(SDPBackend.CUDNN_ATTENTION, causal),
        "portable": partial(attention, causal=causal, impl="triton"),
        "flash": peer(SDPBackend.FLASH_ATTENTION, causal),
    }


def ways(run: Run, x: list[Tensor], do: Tensor) -> dict[str, Callable[[], Any]]:
    leaves = [y.detach().requires_grad_() for y in x]
    o = run(*leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(*x)

    return {
        "fwd": forward,
        "bwd": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True),
    }


def medians(fns: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of each."""
    trash = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    found: dict[str, list[float]] = {name: [] for name in fns}
    for fn in fns.values():
        fn()
    for _ in range(rounds):
        for name, fn in fns.items():
            events = []
            for _ in range(EACH):
                trash.zero_()
                events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                events[-1][0].record()
                fn()
                events[-1][1].record()
            torch.cuda.synchronize()
            found[name] += [start.elapsed_time(end) for start, end in events]
    return {name: statistics.median(x) for name, x in found.items()}


def row_of(shape: tuple[int, int, int, int, bool], rounds: int) -> dict[str, object]:
    B, T, H, D, causal = shape
    x = [torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    do = torch.randn_like(x[0])
    fns: dict[str, Callable[[], Any]] = {}
    for name, run in runs(causal).items():
        fns |= {f"{name} {way}": fn for way, fn in ways(run, x, do).items()}
    flops = 4 * B * H * T * T * D / (2 if causal else 1)
    row: dict[str, object] = {"shape": f"{B},{T},{H},{D}", "causal": causal}
    speed = {
        name: (2.5 if name.endswith("bwd") else 1.0) * flops / ms / 1e9
        for name, ms in medians(fns, rounds).items()
    }
    row |= {name: round(x) for name, x in speed.items()}
    for mine, other in (("sm90", "cudnn"), ("portable", "flash")):
        for way in ("fwd", "bwd"):
            row[f"{mine}/{other} {way}"] = round(
                speed[f"{mine} {way}"] / speed[f"{other} {way}"], 3
            )
    row["short"] = " ".join(short(row, D))
    return row


def short(row: dict[str, object], D: int) -> list[str]:
    """The ratios that are below their bars."""
    bars = {"sm90/cudnn fwd": BARS[D], "sm90/cudnn bwd": 0.95}
    bars |= {"portable/flash fwd": 0.95, "portable/flash bwd": 0.95}
    return [name.replace(" ", "-") for name, bar in bars.items() if float(str(row[name])) < bar]


def packed_ways(lengths: Tensor, D: int) -> dict[str, Callable[[], Any]]:
    cu = torch.tensor([0, *lengths.tolist()], device="cuda").cumsum(0).int()
    size = (1, int(lengths.sum()), 16, D)
    x = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return ways(partial(attention, causal=True, cu_seqlens=cu), x, torch.randn_like(x[0]))


def packed(D: int, rounds: int) -> dict[str, object]:
    """The same work in sequences of mixed lengths and of one length."""
    mixed = torch.tensor(MIXED)
    side = round(float(mixed.double().square().sum() / len(MIXED)) ** 0.5)
    fns, flops = {}, {}
    for kind, lengths in (("mixed", mixed), ("equal", torch.full((len(MIXED),), side))):
        fns |= {f"{kind} {way}": fn for way, fn in packed_ways(lengths, D).items()}
        flops[kind] = 2 * 16 * D * float(lengths.double().square().sum())
    row: dict[str, object] = {"shape": f"packed causal, 16, {D}"}
    for name, ms in medians(fns, rounds).items():
        kind, way = name.split()
        row[name] = round((2.5 if way == "bwd" else 1.0) * flops[kind] / ms / 1e9)
    return row


def warm(places: list[int], widths: tuple[int, ...]) -> None:
    fns: list[Callable[[], Any]] = []
    for shape in (SHAPES[i] for i in places):
        x = [torch.randn(1, 2304, 8, shape[3], device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
        for name in ("sm90", "portable"):
            fns += ways(runs(shape[4])[name], x, torch.randn_like(x[0])).values()
    for D in widths:
        fns += packed_ways(torch.tensor(MIXED), D).values()
    for fn in fns:
        fn()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(map(str, range(len(SHAPES)))))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9, help="then no further row begins")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    places = [int(i) for i in options.rows.split(",") if i]
    widths = (64, 128) if options.packed else ()
    if options.warm:
        warm(places, widths)
        return
    start = time.perf_counter()
    measures = [("attention_rows", partial(row_of, SHAPES[i])) for i in places]
    measures += [("attention_packed", partial(packed, D)) for D in widths]
    for name, measure in measures:
        if time.perf_counter() - start > options.seconds:
            print("no time left for what comes after")
            break
        row = measure(options.rounds)
        record(name, [row])
        spent = f"{time.perf_counter() - start:.1f} s"
        print(" ".join(f"{n} {x}" for n, x in row.items()), spent, flush=True)


if __name__ == "__main__":
    main()
