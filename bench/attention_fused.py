"""The fused backward of attention on sm_90 beside the two kernels: right, then how fast.

python bench/attention_fused.py check   # compiles both and compares, in processes
python bench/attention_fused.py time    # TFLOP/s, fused True and False
"""

import os
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch

from slipstream.kernels.softmax.terms import Options, Terms

VARIANTS: dict[int, list[Any]] = {128: [True, False], 64: [True, False]}  # fused, or two kernels
SHAPES = [(4, 4096, 16, 128), (4, 4096, 32, 64), (2, 16384, 16, 128)]
CASES: list[dict[str, Any]] = [
    {},
    {"B": 2, "H": 2, "HKV": 2, "T": 1024, "S": 1024},
    {"B": 2, "H": 2, "HKV": 2, "T": 333, "S": 517},
    {"B": 2, "H": 3, "HKV": 3, "T": 1001, "S": 1001, "right": 0},
    {"B": 2, "H": 4, "HKV": 2, "T": 517, "S": 333, "right": 0},
    {"B": 2, "H": 8, "HKV": 2, "T": 1500, "S": 1500, "right": 0},
    {"H": 2, "HKV": 2, "T": 300, "S": 1, "right": 0},
]


def whole(terms: Any, options: Any, o: Any, lse: Any, do: Any, dlse: Any, fused: bool) -> dict:
    """launch.backward with the fused kernel, or with the two."""
    from slipstream.kernels.softmax.hopper import launch, launch_fused
    from slipstream.kernels.softmax.triton import launch as portable

    terms, options, _ = portable.ready(terms, options)
    B, T, H, _ = terms.q.shape
    base, delta = torch.empty(2, B, H, -(-T // 4) * 4, device=do.device)
    dq, dk, dv = (torch.empty_like(x) for x in terms[:3])
    portable.row_sums(o, do, lse, dlse, base, delta)
    if fused:
        launch_fused.fused(terms, options, do, dq, dk, dv, base, delta, launch._matrix)
    else:
        launch._dq(terms, options, do, dq, base, delta)
        launch._dkv(terms, options, do, dk, dv, base, delta)
    return {"q": dq, "k": dk, "v": dv}


def check(D: int, tile: bool) -> None:
    from attention_gpu import PLAIN, error, oracle, terms_of

    from slipstream.kernels.softmax.hopper import launch

    torch.manual_seed(0)
    line = []
    for case in CASES:
        size = {**PLAIN, "H": 1, "HKV": 1, "T": 128, "S": 128, "D": D, "DV": D, **case}
        terms, options = terms_of(size, torch.bfloat16)
        do = torch.randn_like(terms.q)
        dlse = torch.randn(terms.q.shape[0], terms.q.shape[2], terms.q.shape[1], device="cuda")
        o, lse = launch.forward(terms, options)
        got = whole(terms, options, o, lse, do, dlse, tile)
        torch.cuda.synchronize()
        want = oracle(terms, options, do, dlse)
        errors = [error(got[n], want[n]) for n in "qkv"]
        same = True
        for _ in range(3):
            again = whole(terms, options, o, lse, do, dlse, tile)
            same = same and all(torch.equal(got[n], again[n]) for n in "qkv")
        fine = all(e <= 0.008 for e in errors)
        word = " ".join(f"{e:.4f}" for e in errors)
        line.append(f"{'' if fine else 'WRONG '}{'' if same else 'DIFFERS '}{word}")
    x = [torch.randn(1, 512, 2, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    for right in (0, -1):  # what times() runs
        options = Options(D**-0.5, -1, right)
        o, lse = launch.forward(Terms(*x[:3]), options)
        whole(Terms(*x[:3]), options, o, lse, x[3], None, tile)
    torch.cuda.synchronize()
    print(f"D{D} {tile}: {'; '.join(line)}")


def median(fn: Any, times: int = 3) -> float:
    """Milliseconds, with the L2 cache emptied before."""
    trash = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    fn()
    found = []
    for _ in range(times):
        trash.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def times() -> None:
    from slipstream.kernels.softmax.hopper import launch

    torch.manual_seed(0)
    began = time.perf_counter()
    for B, T, H, D in SHAPES:
        x = [torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        terms = Terms(*x[:3])
        for causal in (False, True):
            options = Options(D**-0.5, -1, 0 if causal else -1)
            o, lse = launch.forward(terms, options)
            print(f"{B}x{T}x{H}x{D} {'causal' if causal else 'full'}:", end=" ", flush=True)
            for tile in VARIANTS[D]:
                ms = median(partial(whole, terms, options, o, lse, x[3], None, tile))
                flops = 10 * B * H * T * T * D / (2 if causal else 1)
                print(f"{tile} {flops / ms / 1e9:.0f};", end=" ", flush=True)
            print(f"{time.perf_counter() - began:.1f} s", flush=True)


def _start(*task: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, *task],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


def _end(process: subprocess.Popen, limit: float, name: str) -> None:
    try:
        out, err = process.communicate(timeout=max(limit, 1.0))
        last = err.strip().splitlines()[-1][:300] if process.returncode and err else ""
        print(out.strip() or name, f"DIED {last}" if process.returncode else "", flush=True)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        print(name, "HANGS", out.strip(), flush=True)


def main(task: str) -> None:
    start = time.perf_counter()
    if task == "check":
        jobs = [(f"{D}", f"{i}") for D, row in VARIANTS.items() for i in range(len(row))]
        running = [(job, _start("check", *job)) for job in jobs]
        for job, process in running:
            _end(process, 92 - (time.perf_counter() - start), str(job))
    else:
        _end(_start("time", "all"), 24, "time")
    print(f"{task} {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    elif sys.argv[1] == "check":
        check(int(sys.argv[2]), VARIANTS[int(sys.argv[2])][int(sys.argv[3])])
    else:
        times()
