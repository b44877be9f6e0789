"""Seconds of each operator's first call, forward and backward, in processes of their own.

    python bench/first_calls.py               # the linear family, attention, norms, losses
    python bench/first_calls.py kda gla       # these
    python bench/first_calls.py --compile     # besides, under torch.compile(fullgraph=True)
    python bench/first_calls.py --part 0/2    # the first half of them
    python bench/first_calls.py --cold        # only with an empty cache

cold: Triton's cache is empty; warm: it is as the cold call left it. Of the seconds neither is the
import of torch and slipstream nor CUDA's start. Compiled: cold, with warm kernels, and the largest
relative difference of its results from those without torch.compile. Four processes at a time, so
that each has the cores that it would have alone. A few lines go to results/first_calls.csv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from record import record, table

from slipstream.cli.samples import SAMPLES, Sample, Shape, chosen, flat

AT_ONCE, SECONDS = 4, 150
PLAIN = ("attention", "rms_norm", "short_convolution", "linear_cross_entropy")
WANTED = {"cold": 10.0, "warm": 1.0}


def measure(name: str, compiled: bool) -> dict[str, Any]:
    """In a process of its own."""
    sample = chosen([name])[0]
    start = time.perf_counter()
    args = sample.inputs(Shape(B=1, T=2048, H=4), torch.device("cuda"))
    given = [x.requires_grad_() for x in args.values() if x.is_floating_point()]
    fn, options = sample.fn, dict(sample.options)
    if "output_final_state" in sample.takes:
        options["output_final_state"] = True
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found = {"start_s": begin - start, "call_s": 0.0}

    def call() -> list[torch.Tensor]:
        return flat(fn(**args, **options))

    def results(call: Any) -> list[torch.Tensor]:
        out = call()
        total = torch.stack([x.float().square().sum() for x in out]).sum()
        grads = torch.autograd.grad(total, given, allow_unused=True)
        torch.cuda.synchronize()
        return [x.detach() for x in (*out, *grads) if x is not None]

    want = results(call)
    found["call_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    results(call)
    found["again_ms"] = 1e3 * (time.perf_counter() - begin)
    if compiled:
        begin = time.perf_counter()
        got = results(torch.compile(call, fullgraph=True, dynamic=True))
        found["compiled_s"] = time.perf_counter() - begin
        found["differs"] = max(_difference(x, y) for x, y in zip(got, want, strict=True))
    return found


def _difference(x: torch.Tensor, y: torch.Tensor) -> float:
    size = y.double().abs().max().item()
    return (x.double() - y.double()).abs().max().item() / (size or 1.0)


def child(name: str, cache: str, compiled: bool) -> dict[str, Any]:
    run = [sys.executable, __file__, "--child", name, *(["--compile"] if compiled else [])]
    env = {**os.environ, "TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    try:
        done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"over {SECONDS} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"rc {done.returncode}"])[-1][:100]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(name: str, compiled: bool, warmly: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as cache:
        cold = child(name, cache, False)
        warm = child(name, cache, compiled) if warmly and "error" not in cold else {}
    found: dict[str, object] = {"operator": name}
    for label, each in (("cold", cold), ("warm", warm)):
        found[f"{label}_s"] = round(each["call_s"], 2) if "call_s" in each else ""
    found["again_ms"] = round(warm["again_ms"], 2) if "again_ms" in warm else ""
    if compiled:
        found["compiled_s"] = round(warm["compiled_s"], 1) if "compiled_s" in warm else ""
        found["differs"] = f"{warm['differs']:.1e}" if "differs" in warm else ""
    slow = [x for x, most in WANTED.items() if float(str(found[f"{x}_s"] or 0)) > most]
    notes = [f"{x} is slow" for x in slow] + [x["error"] for x in (cold, warm) if "error" in x]
    return {**found, "note": "; ".join(notes)}


def _names(given: list[str]) -> list[str]:
    if given:
        return [sample.op for sample in chosen(given)]

    def counts(sample: Sample) -> bool:
        return sample.op.startswith("chunk_") or sample.op in PLAIN

    return [sample.op for sample in SAMPLES if counts(sample)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.names[0], options.compile)))
        return
    part, parts = map(int, options.part.split("/"))
    names = _names(options.names)[part::parts]
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for found in pool.map(lambda name: row(name, options.compile, not options.cold), names):
            rows.append(found)
            print(*(f"{name} {x}" for name, x in found.items()), flush=True)
    print(table(rows))
    print("recorded in", record("first_calls", rows))


if __name__ == "__main__":
    main()
