"""gsa and gated_delta_product on a GPU: errors of sharp scores, then times and memory.

    python bench/slots_gpu.py --check    gsa's errors by how slots forget, against the oracle
    python bench/slots_gpu.py --times    both operators; the product beside its steps laid out by
                                         torch, which packed calls still take, the two in turns
    python bench/slots_gpu.py --spans 2 4 8
                                         the product in so many spans, beside its steps by torch

Checked: B1 T300, 2 heads, K = V = 128, 64 slots, bf16, q and k not normalised, so that scores are
of 12 where nothing is forgotten. Timed: B1 T8192, gsa with 96 heads, the product with 32 and two
steps a token; milliseconds, and peaks beyond inputs, results and gradients in percent of those.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, cast
from unittest import mock

import torch
from record import record, table
from torch import Tensor
from triton.testing import do_bench

from slipstream import ops
from slipstream.kernels.linear import gated_delta_product
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.gated_delta_product import Steps
from slipstream.ops.gated_delta_product import _reads, _steps
from slipstream.tools.catalog import SAMPLES, Shape

DEVICE = torch.device("cuda", 0)
NAMES = ("o", "Sk", "Sv", "dq", "dk", "dv", "ds", "dg", "dSk", "dSv")
BARS: dict[str, float] = dict(zip(NAMES, (5e-3,) * 3 + (8e-3,) * 4 + (2e-2,) + (8e-3,) * 2))
LOWEST = {"zero": 0.0, "0.001": -0.001, "0.02": -0.02, "0.1": -0.1, "50": -50.0}
B, T, H, K, V, M = 1, 300, 2, 128, 128, 64
TURNS = 5


def given(lowest: float) -> list[Tensor]:
    q, k, v, s = (torch.randn(B, T, H, n).bfloat16() for n in (K, K, V, M))
    g = lowest * torch.rand(B, T, H, M)
    return [q, k, v, s, g, torch.rand(B, H, K, M), torch.rand(B, H, M, V)]


def both(leaves: list[Tensor], weights: list[Tensor], impl: str | None) -> list[Tensor]:
    """o, the final states, and the gradients."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    *args, keys, values = leaves
    state = {"initial_state": (keys, values), "output_final_state": True}
    fn: Any = ops.chunk_gsa
    o, ends = fn(*args, **state, impl=impl)
    outs = [o, *(ends or ())]
    loss = torch.stack([(x.double() * w.to(x.device)).sum() for x, w in zip(outs, weights)]).sum()
    return [*(x.detach() for x in outs), *torch.autograd.grad(loss, leaves)]


def check() -> None:
    rows: list[dict[str, object]] = []
    for name, lowest in LOWEST.items():
        torch.manual_seed(1)
        leaves = given(lowest)
        shapes = ((B, T, H, V), (B, H, K, M), (B, H, M, V))
        weights = [torch.randn(x, dtype=torch.float64) for x in shapes]
        want = both([x.double() for x in leaves], weights, "reference")
        got = both([x.to(DEVICE) for x in leaves], weights, None)
        errors: dict[str, float] = {
            n: _error(x.cpu(), y) for n, x, y in zip(NAMES, got, want, strict=True)
        }
        past = [n for n, x in errors.items() if not x <= BARS[n]]
        said = {n: f"{x:.1e}" for n, x in errors.items()}
        rows.append({"gates from": name, **said, "past": " ".join(past)})
    print(table(rows))
    record("slots_gpu", rows)


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).square().mean() / want.square().mean()).sqrt().item()


def by_torch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    terms = _steps(Steps(q, k, v, beta, g), 2, False, None)
    return _reads(run(terms, LinearOptions(), recurrent=False)[0], 2, False)


def arguments(op: str, heads: int) -> dict[str, Tensor]:
    sample = next(x for x in SAMPLES if x.op == op)
    args = sample.inputs(Shape(B=1, T=8192, H=heads), DEVICE)
    return {n: x.requires_grad_() for n, x in args.items()}


Calls = dict[str, tuple[Callable[[], Tensor], dict[str, Tensor]]]


def times() -> None:
    gsa, delta = cast(tuple[Any, Any], (ops.chunk_gsa, ops.chunk_gated_delta_product))
    slots, steps = arguments("chunk_gsa", 96), arguments("chunk_gated_delta_product", 32)
    measure(
        {
            "gsa": (lambda: gsa(**slots)[0], slots),
            "gated_delta_product": (lambda: delta(**steps, num_householder=2)[0], steps),
            "gated_delta_product by torch": (lambda: by_torch(**steps), steps),
        }
    )


def spans(numbers: Sequence[int]) -> None:
    steps = arguments("chunk_gated_delta_product", 32)
    delta: Any = ops.chunk_gated_delta_product

    def cut(number: int) -> Tensor:
        with mock.patch.object(gated_delta_product, "num_slices", return_value=number):
            return delta(**steps, num_householder=2)[0]

    calls: Calls = {f"gated_delta_product in {n}": (partial(cut, n), steps) for n in numbers}
    measure({**calls, "gated_delta_product by torch": (lambda: by_torch(**steps), steps)})


def measure(calls: Calls) -> None:
    rows: list[dict[str, object]] = []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, (call, args) in calls.items():
            found[name].append(_ms(call, args))
    for name, (call, args) in calls.items():
        forward, whole = (median(x) for x in zip(*found[name]))
        peaks = {f"{n} %": f"{x:.1f}" for n, x in zip(("fwd", "both"), _peaks(call, args))}
        rows.append({"timed": name, "fwd ms": f"{forward:.3f}", "both ms": f"{whole:.3f}", **peaks})
    print(table(rows))
    record("slots_gpu", rows)


def _ms(call: Callable[[], Tensor], args: dict[str, Tensor]) -> tuple[float, float]:
    bench: Any = do_bench
    with torch.no_grad():
        forward = bench(call, warmup=5, rep=40, return_mode="median")
    do = torch.randn_like(call())
    learnt = list(args.values())
    return forward, bench(
        lambda: torch.autograd.grad(call(), learnt, do), warmup=5, rep=80, return_mode="median"
    )


def _peaks(call: Callable[[], Tensor], args: dict[str, Tensor]) -> list[float]:
    found, held = [], sum(x.nbytes for x in args.values())
    for trained in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(trained):
            outs = [call()]
            if trained:
                outs += [do := torch.randn_like(outs[0])]
                outs += torch.autograd.grad(outs[0], list(args.values()), do)
        size = sum(x.nbytes for x in outs)
        beyond = torch.cuda.max_memory_allocated() - before - size
        found.append(100 * beyond / (held + size))
        del outs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--spans", type=int, nargs="+")
    wanted = parser.parse_args()
    if wanted.spans:
        spans(wanted.spans)
        return
    if wanted.check or not wanted.times:
        check()
    if wanted.times or not wanted.check:
        times()


if __name__ == "__main__":
    main()
