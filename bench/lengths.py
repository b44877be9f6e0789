"""Time, memory and first call of the operators against the length: what docs/performance.md plots.

python bench/lengths.py [OPERATOR ...] [--peer]       rows go to bench/results/lengths.csv

One sequence of T tokens, 16 heads, K = V = 128 (64 for rwkv7), bf16, forward and backward. The
floor reads every input and writes every output and gradient once, at the copy's bandwidth.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.record import record
from slipstream import ops

COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
LENGTHS = (1024, 4096, 16384, 65536)
HEADS = 16

Inputs = dict[str, Tensor]


def wide(T: int, D: int = 128) -> Tensor:
    return torch.randn(1, T, HEADS, D, device="cuda", dtype=torch.bfloat16)


def unit(T: int, D: int = 128) -> Tensor:
    return F.normalize(wide(T, D).float(), dim=-1).bfloat16()


def gate(T: int, *D: int) -> Tensor:
    return F.logsigmoid(torch.randn(1, T, HEADS, *D, device="cuda") + 3)


def beta(T: int) -> Tensor:
    return torch.rand(1, T, HEADS, device="cuda", dtype=torch.bfloat16)


def qkv(T: int) -> Inputs:
    return {"q": unit(T), "k": unit(T), "v": wide(T)}


def rwkv7(T: int) -> Inputs:
    a = unit(T, 64)
    given = {"r": wide(T, 64), "k": wide(T, 64), "v": wide(T, 64), "a": -a}
    return given | {"b": a * torch.rand_like(a), "w": -0.6065 * torch.rand_like(a)}


OPERATORS: dict[str, Callable[[int], Inputs]] = {
    "retention": qkv,
    "simple_gla": lambda T: qkv(T) | {"g": gate(T)},
    "gla": lambda T: qkv(T) | {"g": gate(T, 128)},
    "delta_rule": lambda T: qkv(T) | {"beta": beta(T)},
    "gated_delta_rule": lambda T: qkv(T) | {"g": gate(T), "beta": beta(T)},
    "kda": lambda T: qkv(T) | {"g": gate(T, 128), "beta": beta(T)},
    "rwkv7": rwkv7,
}


def providers(name: str, peer: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "slipstream", getattr(ops, f"chunk_{name}")
    if peer:
        yield "fla", getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")


def both(run: Callable[..., Any], given: Inputs, do: Tensor) -> None:
    o = run(**given)
    torch.autograd.grad(o[0] if isinstance(o, tuple) else o, list(given.values()), do)


def milliseconds(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=5, rep=25, return_mode="median")


def measure(run: Callable[..., Any], given: Inputs) -> dict[str, float]:
    given = {n: x.detach().requires_grad_() for n, x in given.items()}
    do = torch.randn_like(given["v"])
    torch.cuda.synchronize()
    start = time.perf_counter()
    both(run, given, do)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both(run, given, do)
    peak = torch.cuda.max_memory_allocated() - before
    read = sum(x.nbytes for x in given.values())
    with torch.no_grad():
        forward = milliseconds(lambda: run(**given))
    return {
        "fwd_ms": forward,
        "both_ms": milliseconds(lambda: both(run, given, do)),
        "floor_fwd_ms": (read + do.nbytes) / COPY_BYTES_PER_MS,
        "floor_both_ms": (3 * read + 2 * do.nbytes) / COPY_BYTES_PER_MS,
        "first_s": first,
        "peak_mib": peak / 2**20,
        "results_mib": (read + do.nbytes) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--peer", action="store_true", help="fla beside it, which tunes first")
    args = parser.parse_args()
    for name in args.operators or OPERATORS:
        for who, run in providers(name, args.peer):
            rows = []
            for T in LENGTHS:
                row = measure(run, OPERATORS[name](T))
                rows.append({"operator": name, "who": who, "T": T} | row)
                print(name, who, T, *(f"{n} {x:.3f}" for n, x in row.items()), flush=True)
            record("lengths", rows)


if __name__ == "__main__":
    main()
