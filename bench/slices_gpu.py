"""Long calls in slices (kernels/linear/workspace.py): the bits of the whole, and what they cost.

    python bench/slices_gpu.py --check      whether the bits are the same
    python bench/slices_gpu.py --times kda  the times, of these
    ... --narrow                            with gates in bf16
    python bench/slices_gpu.py --packed "4x8192 16/64"   packed ones, of delta_peers.py

Times: B1 T8192, 96 heads, K = V = 128, bf16, in one to five slices and in as many as memory wants,
taking turns; and peaks beyond inputs, results and gradients in percent of those.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

if "--check" in sys.argv:
    os.environ["SLIPSTREAM_REPLAY"] = "off"  # whose keys do not know of slices

import torch
from delta_peers import SHAPES, inputs
from record import record, table

from slipstream.kernels.linear import workspace
from slipstream.tools.catalog import Sample, Shape, chosen

OPERATORS = (
    "gla",
    "rwkv6",
    "delta_rule",
    "gated_delta_rule",
    "comba",
    "kda",
    "iplr_delta_rule",
    "dplr_delta_rule",
    "rwkv7",
)
TIMED = Shape(B=1, T=8192, H=96)
CHECKED = (
    Shape(B=1, T=1000, H=2),
    Shape(B=1, T=1000, H=2, state=True, dtype=torch.float16),
    Shape(B=3, T=300, H=2, state=True, grouped=True),
    Shape(B=1, T=700, H=1, K=64, V=64, state=True, dtype=torch.float32, grouped=True),
)
TURNS = 2
COUNTS = {16: 1, 32: 3, 64: 4, 128: 5, 256: None}
SPANS = {16: 1, 32: 2, 64: 4, 128: 8, 256: None}
GATES = ("g", "gk", "w")


@contextmanager
def cutting(little: int) -> Iterator[None]:
    """slices.LITTLE meanwhile, and with 0 no other reason against slices."""
    kept = workspace.LITTLE, workspace.MIN_ACTIVE_PROGRAMS, workspace.GROUPED, workspace.PACKED
    workspace.LITTLE = little
    if little == 0:
        workspace.MIN_ACTIVE_PROGRAMS = workspace.GROUPED = workspace.PACKED = 1
    try:
        yield
    finally:
        workspace.LITTLE, workspace.MIN_ACTIVE_PROGRAMS, workspace.GROUPED, workspace.PACKED = kept


def results(sample: Sample, args: dict, little: int) -> list[torch.Tensor]:
    given = [x for x in args.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    leaves = [x.requires_grad_() for x in given]
    torch.manual_seed(1)
    with cutting(little):
        with torch.no_grad():
            alone = sample.call(args)
        outs = sample.call(args)
        loss = torch.stack([(x.float() * torch.randn_like(x.float())).sum() for x in outs]).sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*alone, *(x.detach() for x in outs), *(x for x in grads if x is not None)]


def check(sample: Sample) -> None:
    for shape in CHECKED:
        args = sample.inputs(shape, torch.device("cuda"))
        whole, cut = (results(sample, args, little) for little in (1 << 40, 0))
        apart = [
            float((x.detach() - y.detach()).float().norm() / y.float().norm())
            for x, y in zip(cut, whole)
        ]
        equal = sum(torch.equal(x, y) for x, y in zip(cut, whole))
        assert max(apart) < 1e-3, (sample.op, str(shape), apart)
        print(sample.op, shape, f"{equal} of {len(cut)} the same bits, worst {max(apart):.1e}")


def bench(fn: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(fn, warmup=10, rep=30, return_mode="median"))  # pyright: ignore


def beyond(fn: Callable[[], list[torch.Tensor]], given: list[torch.Tensor]) -> float:
    """Percent of given and what fn returns that it takes besides."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = sum(x.nbytes for x in fn())
    more = torch.cuda.max_memory_allocated() - before - results
    return round(100 * more / (sum(x.nbytes for x in given) + results), 1)


def times(sample: Sample, shape: Shape, narrow: bool) -> dict[str, object]:
    args = sample.inputs(shape, torch.device("cuda"))
    if narrow:
        args |= {name: args[name].bfloat16() for name in GATES if name in args}
    row: dict[str, object] = {"operator": sample.op, "shape": str(shape), "narrow": narrow}
    return row | timed(sample, args, COUNTS)


def timed(sample: Sample, args: dict[str, Any], counts: dict[int, int | None]) -> dict[str, object]:
    """In so many slices; each count has a hint of its own, by which replayed calls differ."""
    leaves = [x for x in args.values() if x.is_floating_point()]
    do = torch.randn_like(args["v"])

    def forward(hint: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [sample.fn(**args, **sample.options, chunk_size=hint)[0]]

    def both(hint: int) -> list[torch.Tensor]:
        for x in leaves:
            x.requires_grad_()
        o = sample.fn(**args, **sample.options, chunk_size=hint)[0]
        return [o, *torch.autograd.grad(o, leaves, do)]

    found: dict[str, list[float]] = {}
    row: dict[str, object] = {}
    count_of = workspace._num_slices
    for turn in range(TURNS):
        for name, fn, given in (("fwd", forward, leaves), ("both", both, [*leaves, do])):
            for hint, count in counts.items():
                workspace._num_slices = count_of if count is None else lambda *_, n=count: n
                here = f"{name} {count or 'own'}"
                found.setdefault(here, []).append(bench(partial(fn, hint)))
                if turn == TURNS - 1:
                    row[f"beyond {here}"] = beyond(partial(fn, hint), given)
    workspace._num_slices = count_of
    return {name: round(min(x), 4) for name, x in found.items()} | row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--packed", action="store_true", help="shapes of delta_peers.py, times")
    parser.add_argument("--narrow", action="store_true", help="gates in bf16, and in float32")
    parser.add_argument("--grouped", action="store_true", help="32 heads of q and k, 64 of v")
    given = parser.parse_args()
    if given.packed:
        (sample, *_) = [x for x in chosen(["gated_delta_rule"]) if "chunk_" in x.op]
        rows = []
        for name in given.operators:
            args = {n: x for n, x in inputs(*SHAPES[name]).items() if x is not None}
            rows.append({"shape": name, **timed(sample, args, SPANS)})
            torch.cuda.empty_cache()
        print(*("  ".join(f"{n} {x}" for n, x in row.items()) for row in rows), sep="\n")
        print("recorded in", record("slices_packed", rows))
        return
    samples = [x for x in chosen(given.operators or list(OPERATORS)) if "chunk_" in x.op]
    if given.check:
        for sample in samples:
            check(sample)
    if given.times:
        shape = Shape(B=1, T=8192, H=32, grouped=True) if given.grouped else TIMED
        rows = []
        for sample in samples:
            for narrow in (False, True) if given.narrow else (False,):
                rows.append(times(sample, shape, narrow))
                print(*rows[-1].values(), flush=True)
                torch.cuda.empty_cache()
        print(table(rows))
        print("recorded in", record("slices_gpu", rows))


if __name__ == "__main__":
    main()
