"""Seconds of each operator's first call, forward and backward, in processes of their own.

    python bench/first_calls.py                      the linear family, attention, norms, losses
    python bench/first_calls.py --compile            and under torch.compile(fullgraph=True)
    python bench/first_calls.py --at-once 4 --steps  4 operators at a time; fused_recurrent too

cold: Triton's cache and ours are empty; warm: they are as the cold call left them. Of the seconds
are neither the import of torch and slipstream nor the start of CUDA and of torch's autograd. The
gradient is that of the first output alone. differs: largest relative difference of the results
under torch.compile. The processes of a few operators start together and call one after the other.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from harness import DEVICE, Report, parser, synchronize
from processes import Child, tell
from torch import Tensor

from slipstream.tools.catalog import SAMPLES, Shape, chosen, flat

SECONDS = 150
AT_ONCE = 8  # operators whose processes wait with what they have imported
PREFILL, STEP = Shape(B=1, T=2048, H=4), Shape(B=8, T=8, H=4)
OTHERS = ("attention", "rms_norm", "short_convolution", "linear_cross_entropy")
WANTED = {"cold": 10.0, "warm": 1.0}


def measure(name: str, report: Report) -> dict[str, Any]:
    """In a process of its own, which waits for a line on stdin before it calls."""
    options, sample = report.options, chosen([name])[0]
    shape = STEP if sample.op.startswith("fused_recurrent") else PREFILL
    args = sample.inputs(report.shape(shape), DEVICE)
    learnt = [x for n, x in args.items() if n not in sample.fixed.split()]
    given = [x.requires_grad_() for x in learnt if x.is_floating_point()]
    # what torch imports and starts for its first gradient, half a second
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    y = x.bfloat16() * 2
    torch.autograd.grad(y, x, torch.randn_like(y))
    synchronize()
    tell(ready=True)
    sys.stdin.readline()
    found: dict[str, Any] = {}

    def call() -> list[Tensor]:
        return flat(sample.fn(**args, **sample.options))

    def results(call: Any) -> list[Tensor]:
        out = call()
        torch.manual_seed(0)
        grads: tuple[Tensor | None, ...] = ()
        if out[0].requires_grad:
            weight = torch.randn_like(out[0])
            grads = torch.autograd.grad(out[0], given, weight, allow_unused=True)
        synchronize()
        return [x.detach() for x in (*out, *grads) if x is not None]

    begin = time.perf_counter()
    want = results(call)
    found["call_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    results(call)
    found["again_ms"] = 1e3 * (time.perf_counter() - begin)
    if options.compile:
        begin = time.perf_counter()
        got = results(torch.compile(call, fullgraph=True, dynamic=True))
        found["compiled_s"] = time.perf_counter() - begin
        found["differs"] = max(difference(x, y) for x, y in zip(got, want, strict=True))
    return found


def difference(x: Tensor, y: Tensor) -> float:
    size = y.double().abs().max().item()
    return (x.double() - y.double()).abs().max().item() / (size or 1.0)


def processes(name: str, folder: str, flags: Mapping[str, Sequence[str]]) -> dict[str, Child]:
    """By label, each with flags of its own on the same caches."""
    own = {"TRITON_CACHE_DIR": folder, "SLIPSTREAM_CACHE_DIR": f"{folder}/slipstream"}
    own |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    own |= {"PYTHONPATH": str(Path(__file__).parents[1])}
    return {label: Child(__file__, [name, *x], 0, **own) for label, x in flags.items()}


def result(child: Child) -> dict[str, Any]:
    """The row of a process that has imported what it needs and waits to be told to call."""
    child.say()
    try:
        return child.next(SECONDS) or {"error": child.failure()[:100]}
    except Empty:
        return {"error": f"over {SECONDS} s"}
    finally:
        child.end()


def row(name: str, children: dict[str, Child]) -> dict[str, object]:
    """Each child calls in turn."""
    found = {label: result(child) for label, child in children.items()}
    cells: dict[str, object] = {"operator": name}
    for label in ("cold", "warm"):
        each = found[label]
        cells[f"{label}_s"] = round(each["call_s"], 2) if "call_s" in each else ""
    warm = found["warm"]
    for column, digits in (("again_ms", 2), ("compiled_s", 1)):
        cells[column] = round(warm[column], digits) if column in warm else ""
    cells["differs"] = f"{warm['differs']:.1e}" if "differs" in warm else ""
    slow = [x for x, most in WANTED.items() if found[x].get("call_s", 0.0) > most]
    notes = [f"{x} is slow" for x in slow] + [x["error"] for x in found.values() if "error" in x]
    return {**cells, "note": "; ".join(notes)}


def names(steps: bool) -> list[str]:
    kinds = ("chunk_", "fused_recurrent_") if steps else ("chunk_",)
    ops = dict.fromkeys(x.op for x in SAMPLES)
    return [x for x in ops if x.startswith(kinds) or x in OTHERS]


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--compile", action="store_true")
    options.add_argument("--steps", action="store_true")
    options.add_argument("--at-once", type=int, default=1, help="operators at a time")
    options.add_argument("--child", metavar="OPERATOR", help=argparse.SUPPRESS)
    given = options.parse_args(argv)
    report = Report(given)
    if given.child:
        tell(**measure(given.child, report))
        return
    same = ["--small"] * given.small
    flags = {"cold": same, "warm": same + ["--compile"] * given.compile}
    wanted = [x for x in names(given.steps) if report.wants(x)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:
        for i in range(0, len(wanted), AT_ONCE):
            few = wanted[i : i + AT_ONCE]
            children = [processes(x, f"{folder}/{x}", flags) for x in few]
            for child in (x for each in children for x in each.values()):
                child.next()
            for cells in pool.map(row, few, children):
                report.row("first_calls", cells)


if __name__ == "__main__":
    main()
