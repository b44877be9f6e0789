"""Time and memory of the operators against the length: what docs/performance.md plots.

    python bench/lengths.py [OPERATOR ...]      rows go to bench/results/lengths.csv
    python bench/lengths.py --peer --tuned DIR  fla or cuDNN beside it: fla tuned among what
                                                linear_tuned.py put there, "" as it does itself
    python bench/lengths.py --dry --short       what they compile

One sequence of T tokens, 16 heads, K = V = 128 (64 for rwkv7), bf16, forward and backward. The
floor of the linear family reads every input and writes every output and gradient once, at the
copy's bandwidth; attention's is its products at cuBLAS's pace.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.record import record
from slipstream import ops

COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
FLOPS_PER_MS = 7e11  # cuBLAS there, bf16
LENGTHS = (1024, 4096, 16384, 65536)
HEADS, WIDTH = 16, 128

Inputs = dict[str, Tensor]


def wide(T: int, D: int = WIDTH) -> Tensor:
    return torch.randn(1, T, HEADS, D, device="cuda", dtype=torch.bfloat16)


def unit(T: int, D: int = WIDTH) -> Tensor:
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
    "gla": lambda T: qkv(T) | {"g": gate(T, WIDTH)},
    "delta_rule": lambda T: qkv(T) | {"beta": beta(T)},
    "gated_delta_rule": lambda T: qkv(T) | {"g": gate(T), "beta": beta(T)},
    "kda": lambda T: qkv(T) | {"g": gate(T, WIDTH), "beta": beta(T)},
    "rwkv7": rwkv7,
    "attention": qkv,
}


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def providers(name: str, peer: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    if name == "attention":
        yield "slipstream", lambda **given: ops.attention(**given, causal=True)
    else:
        yield "slipstream", getattr(ops, f"chunk_{name}")
    if peer and name == "attention":
        yield "cuDNN", cudnn
    elif peer and name != "simple_gla":  # fla refuses: its backward is miscompiled on sm_90
        yield "fla", getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")


def both(run: Callable[..., Any], given: Inputs, do: Tensor) -> None:
    o = run(**given)
    torch.autograd.grad(o[0] if isinstance(o, tuple) else o, list(given.values()), do)


def milliseconds(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=5, rep=25, return_mode="median")


def floors(name: str, given: Inputs, do: Tensor) -> tuple[float, float]:
    if name == "attention":
        products = 2 * do.shape[1] ** 2 * HEADS * WIDTH  # of both, half masked
        return products / FLOPS_PER_MS, 3.5 * products / FLOPS_PER_MS
    read = sum(x.nbytes for x in given.values())
    forward = read + do.nbytes
    return forward / COPY_BYTES_PER_MS, (2 * read + do.nbytes + forward) / COPY_BYTES_PER_MS


def measure(name: str, run: Callable[..., Any], given: Inputs) -> dict[str, float]:
    given = {n: x.detach().requires_grad_() for n, x in given.items()}
    do = torch.randn_like(given["v"])
    both(run, given, do)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both(run, given, do)
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        forward = milliseconds(lambda: run(**given))
    floor = floors(name, given, do)
    return {
        "fwd_ms": forward,
        "both_ms": milliseconds(lambda: both(run, given, do)),
        "floor_fwd_ms": floor[0],
        "floor_both_ms": floor[1],
        "peak_mib": peak / 2**20,
        "results_mib": (sum(x.nbytes for x in given.values()) + do.nbytes) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR")
    for name in ("peer", "dry", "short"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--tuned", default="")
    args = parser.parse_args()
    if args.tuned:
        from bench.linear_tuned import choose

        choose(Path(args.tuned))
    for name in args.operators or OPERATORS:
        for who, run in providers(name, args.peer):
            rows = []
            for T in LENGTHS[:2] if args.short else LENGTHS:
                row = measure(name, run, OPERATORS[name](T))
                row = {column: float(f"{x:.4g}") for column, x in row.items()}
                rows.append({"operator": name, "who": who, "T": T} | row)
                print(name, who, T, *(f"{n} {x:.4g}" for n, x in row.items()), flush=True)
            if not args.dry:
                record("lengths", rows)


if __name__ == "__main__":
    main()
