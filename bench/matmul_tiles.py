"""Tiles of the matmul on a GPU: whether each runs or is refused, and which is best.

python bench/matmul_tiles.py --every 300   # so many that are allowed, twice as many others
python bench/matmul_tiles.py --rows                 # bf16 in turns with the library, to a CSV

--every: each configuration must give the right numbers, or be refused before anything is compiled
by an error that names one that is allowed. Processes compile and run them side by side for so many
--seconds; what has ended by then counts. They are drawn anew each time, or as a --seed has them.
"""

import argparse
import contextlib
import multiprocessing
import queue
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ahead import in_turns
from matmul_gpu import BF16, E4M3, FP16, FP32, LIMITS, error, factors, limit
from record import record
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipstream.kernels.matmul import config as tiles
from slipstream.kernels.matmul import op
from slipstream.kernels.matmul.inputs import FP8
from slipstream.ops.matmul import MatmulConfig, matmul

KINDS: list[tuple[torch.dtype, str]] = [
    (BF16, "tf32x3"), (FP16, "tf32x3"), (FP32, "tf32"), (FP32, "tf32x3"), (FP32, "ieee"),
    (E4M3, "tf32x3"), (torch.float8_e5m2, "tf32x3"),
]  # fmt: skip
SIZES = (8, 16, 32, 64, 96, 128, 256, 512)
M, N, K = 300, 272, 160


def draw(dice: random.Random) -> tuple[torch.dtype, str, str, MatmulConfig]:
    """Dtype, precision, layout and a configuration, of which many are not possible."""
    dtype, precision = dice.choice(KINDS)
    if dice.random() < 0.25:
        block_k = dice.choice((128 // dtype.itemsize,) * 4 + SIZES)
        c = MatmulConfig(
            dice.choice((128, 128, 128, 64)), dice.choice((32, 64, 128, 256)), block_k,
            dice.choice((8, 8, 8, 4)), dice.randint(1, 8), dice.choice((1, 8, 16)), "tma",
        )  # fmt: skip
    else:
        c = MatmulConfig(
            dice.choice(SIZES), dice.choice(SIZES), dice.choice(SIZES),
            dice.choice((1, 2, 3, 4, 8, 16)), dice.randint(1, 6), dice.choice((1, 8)),
            split_k=dice.choice((1, 1, 2, 4)),
        )  # fmt: skip
    return dtype, precision, dice.choice(("nn", "nt", "tn", "tt")), c


def plan(seed: int, allowed: int) -> list[tuple]:
    """So many configurations that are allowed on this device, and twice as many that are not."""
    dice, arch = random.Random(seed), op.arch_of(torch.device("cuda"))
    wanted, found = {True: allowed, False: 2 * allowed}, []
    while any(wanted.values()):
        dtype, precision, layout, c = drawn = draw(dice)
        out = BF16 if dtype in FP8 else dtype
        p = tiles.Problem(dtype, out, precision, layout[0] == "t", layout[1] == "t")
        fits = tiles.violation(c, p, arch) is None
        if wanted[fits]:
            wanted[fits] -= 1
            found.append((*drawn, p, fits))
    dice.shuffle(found)
    return found


def judge(case: tuple) -> tuple[str, float]:
    """ran, refused or what is wrong, and the error."""
    dtype, precision, layout, c, p, fits = case
    a, b = factors(M, N, K, dtype, layout)
    call = partial(matmul, a, b, precision=precision, config=c)
    if not fits:
        with mock.patch.object(op, "_launch", side_effect=AssertionError("it was launched")):
            try:
                call()
            except ValueError as refusal:
                arch = op.arch_of(a.device)
                near = tiles.closest_legal(c, p, arch)
                good = near is not None and tiles.violation(near, p, arch) is None
                if good and str(near) in str(refusal):
                    return "refused", 0.0
                return f"refused badly: {refusal}", 0.0
            except Exception as fault:
                return f"{type(fault).__name__}: {fault}"[:200], 0.0
        return "it was not refused", 0.0
    try:
        e = error(call(), a.double() @ b.double())
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"[:200], 0.0
    return ("ran" if e <= limit(dtype, precision) else f"wrong by {e:.1e}"), e


def some(seed: int, allowed: int, number: Any, found: Any) -> None:
    """Puts case, verdict and error of the cases that this process takes; after them None.

    number: of the next case, of all processes.
    """
    cases = plan(seed, allowed)
    torch.manual_seed(seed)
    while True:
        with number.get_lock():
            i, number.value = number.value, number.value + 1
        if i >= len(cases):
            break
        verdict, e = judge(cases[i])
        found.put((cases[i], verdict, e))
        if "CUDA error" in verdict:
            break  # nothing runs in this process any more
    found.put(None)


def judged(allowed: int, seed: int, seconds: float, workers: int) -> Iterator[tuple]:
    """Case, verdict and error, of those that end in time; processes that do not are ended."""
    until = time.monotonic() + seconds
    # nothing here has touched the device, so that processes may be forked, which takes no time
    context = multiprocessing.get_context("fork")
    number, found = context.Value("q", 0), context.Queue()
    args = seed, allowed, number, found
    at_work = [context.Process(target=some, args=args, daemon=True) for _ in range(workers)]
    for process in at_work:
        process.start()
    left = workers
    with contextlib.suppress(queue.Empty):
        while left:
            each = found.get(timeout=max(0.0, until - time.monotonic()))
            if each is None:
                left -= 1
            else:
                yield each
    for process in at_work:
        process.terminate()


def every(allowed: int, seed: int, seconds: float, workers: int) -> bool:
    counts: dict[tuple, Counter] = {}
    worst: dict[tuple, float] = {}
    for (dtype, precision, layout, c, *_), verdict, e in judged(allowed, seed, seconds, workers):
        kind = str(dtype)[6:], precision, c.kernel
        known = verdict in ("ran", "refused")
        if not known:
            print(f"FAULT {kind} {layout} {c}: {verdict}", flush=True)
        counts.setdefault(kind, Counter())[verdict if known else "fault"] += 1
        worst[kind] = max(worst.get(kind, 0.0), e)
    rows = []
    for kind, count in sorted(counts.items()):
        row: dict[str, Any] = dict(zip(("dtype", "precision", "kernel"), kind))
        row |= {"seed": seed, **{name: count[name] for name in ("ran", "refused", "fault")}}
        rows.append({**row, "error": f"{worst[kind]:.1e}"})
    record("matmul_configs", rows)
    total = sum(counts.values(), Counter())
    print(f"seed {seed}, configurations: {dict(total)} of {3 * allowed}", flush=True)
    return not total["fault"]


ROWS: list[tuple[int, int, int, str]] = [
    (4096, 4096, 4096, "nt"),
    (4096, 4096, 4096, "nn"),
    (8192, 8192, 8192, "nn"),
    (4096, 4096, 4096, "tn"),
]
# columns of a tile, stages, group_m
ROW_TILES = [(256, 4, 8), (256, 4, 4), (256, 4, 16), (256, 3, 8), (128, 6, 8)]


def by_rows() -> None:
    """The sm_90 kernel's tiles, all in turns with the library."""
    rows = []
    for m, n, k, layout in ROWS:
        a, b = factors(m, n, k, BF16, layout)
        want = a[:256].double() @ b.double()
        found: list[tuple[Any, Callable[[], Tensor]]] = [("library", partial(torch.matmul, a, b))]
        for bn, stages, group in ROW_TILES:
            c = MatmulConfig(128, bn, 64, 8, stages, group, "tma")
            call = partial(matmul, a, b, config=c)
            e = error(call()[:256], want)
            assert e <= LIMITS[BF16], (c, e)
            found.append((f"128x{bn} stages {stages} group {group}", call))
        times = in_turns([call for _, call in found], 41 if m == 4096 else 11)
        for (name, _), ms in zip(found, times, strict=True):
            row = {"shape": f"{m}x{n}x{k}", "dtype": "bfloat16", "layout": layout, "tile": name}
            row |= {"ms": f"{ms:.4f}", "tflops": f"{2e-9 * m * n * k / ms:.0f}"}
            rows.append({**row, "ratio": f"{times[0] / ms:.3f}"})
            print("  ".join(map(str, rows[-1].values())), flush=True)
    record("matmul_rows", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rows", action="store_true")
    options = parser.parse_args()
    if options.rows:
        torch.manual_seed(0)
        by_rows()
    if options.every:
        given = options.every, options.seed, options.seconds, options.workers
        raise SystemExit(0 if every(*given) else "a configuration neither ran nor was refused")


if __name__ == "__main__":
    main()
