"""Seconds of each operator's first call, forward and backward, in processes of their own.

    python bench/first_calls.py               # the linear family, attention, norms, losses
    python bench/first_calls.py kda gla       # these
    python bench/first_calls.py --compile     # besides, under torch.compile(fullgraph=True)
    python bench/first_calls.py --part 0/2    # the first half of them
    python bench/first_calls.py --cold        # only with an empty cache
    python bench/first_calls.py --kernels     # and what was compiled when, in seconds of the call

cold: Triton's cache is empty; warm: it is as the cold call left it. Of the seconds neither is the
import of torch and slipstream nor CUDA's start. Compiled: cold, with warm kernels, and the largest
relative difference of its results from those without torch.compile. The processes start together
and call one after the other, alone, or --at-once so many. The rows go to results/first_calls.csv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from record import record, table

from slipstream.cli.samples import SAMPLES, Sample, Shape, chosen, flat

SECONDS = 150
PLAIN = ("attention", "rms_norm", "short_convolution", "linear_cross_entropy")
WANTED = {"cold": 10.0, "warm": 1.0}


class Compiled:
    """What Triton and the host's compiler made, with its seconds: when it was done, how long."""

    def __init__(self) -> None:
        from triton import knobs
        from triton.runtime import build

        knobs.compilation.listener = self._kernel
        self.start, self.lines = time.perf_counter(), []
        inner: Any = build._build

        def built(name: str, *args: Any) -> str:
            begin = time.perf_counter()
            out = inner(name, *args)
            self.note(name, f"{time.perf_counter() - begin:.2f}")
            return out

        build._build = built

    def note(self, name: str, text: str) -> None:
        self.lines.append(f"{time.perf_counter() - self.start:6.2f} {name[:36]:36} {text}")

    def _kernel(self, *, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        stages = [("ir", times.ir_initialization), *times.lowering_stages]
        text = "hit" if cache_hit else " ".join(f"{x} {1e-6 * s:.2f}" for x, s in stages)
        self.note(metadata.get("name", "?"), text)


def measure(name: str, compiled: bool, kernels: bool) -> dict[str, Any]:
    """In a process of its own."""
    sample = chosen([name])[0]
    start = time.perf_counter()
    args = sample.inputs(Shape(B=1, T=2048, H=4), torch.device("cuda"))
    given = [x.requires_grad_() for x in args.values() if x.is_floating_point()]
    fn, options = sample.fn, dict(sample.options)
    if "output_final_state" in sample.takes:
        options["output_final_state"] = True
    torch.cuda.synchronize()
    started = time.perf_counter() - start
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    found: dict[str, Any] = {"start_s": started, "call_s": 0.0}
    noted = Compiled() if kernels else None

    def call() -> list[torch.Tensor]:
        return flat(fn(**args, **options))

    def results(call: Any) -> list[torch.Tensor]:
        out = call()
        if noted is not None:
            noted.note("(forward is done)", "")
        total = torch.stack([x.float().square().sum() for x in out]).sum()
        grads = torch.autograd.grad(total, given, allow_unused=True)
        torch.cuda.synchronize()
        return [x.detach() for x in (*out, *grads) if x is not None]

    want = results(call)
    found["call_s"] = time.perf_counter() - begin
    if noted is not None:
        found["lines"], noted = noted.lines, None
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


class Child:
    """A process that has imported what it needs and waits to be told to call."""

    def __init__(self, name: str, cache: str, flags: list[str]) -> None:
        run = [sys.executable, __file__, "--child", name, *flags]
        inductor = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        env = {**os.environ, "TRITON_CACHE_DIR": cache, **inductor}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            run, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def call(self) -> dict[str, Any]:
        try:
            out, err = self.process.communicate("go\n", timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return {"error": f"over {SECONDS} s"}
        if self.process.returncode:
            failed = err.strip().splitlines() or [f"rc {self.process.returncode}"]
            return {"error": failed[-1][:100]}
        return json.loads(out.strip().splitlines()[-1])


def calls(names: list[str], caches: list[str], flags: list[str], at_once: int) -> Iterator[dict]:
    """In order; the processes start together, and so many call at a time."""
    children = [Child(*given, flags) for given in zip(names, caches)]
    for each in children:
        each.ready()
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(Child.call, children)


def row(name: str, cold: dict[str, Any], warm: dict[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {"operator": name}
    for label, each in (("cold", cold), ("warm", warm)):
        found[f"{label}_s"] = round(each["call_s"], 2) if "call_s" in each else ""
    for column, digits in (("again_ms", 2), ("compiled_s", 1)):
        found[column] = round(warm[column], digits) if column in warm else ""
    found["differs"] = f"{warm['differs']:.1e}" if "differs" in warm else ""
    slow = [x for x, most in WANTED.items() if float(str(found[f"{x}_s"] or 0)) > most]
    notes = [f"{x} is slow" for x in slow] + [x["error"] for x in (cold, warm) if "error" in x]
    return {**found, "note": "; ".join(notes)}


def said(names: list[str], label: str, found: Iterator[dict]) -> list[dict]:
    """Each printed as it comes."""
    made = []
    for name, each in zip(names, found):
        for line in each.get("lines", ()):
            print(name, label, line)
        print(name, label, each.get("call_s", each.get("error")), flush=True)
        made.append(each)
    return made


def _names(given: list[str]) -> list[str]:
    if given:
        return [sample.op for sample in chosen(given)]

    def counts(sample: Sample) -> bool:
        return sample.op.startswith("chunk_") or sample.op in PLAIN

    return list(dict.fromkeys(x.op for x in SAMPLES if counts(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--compile", action="store_true")
    for name in ("cold", "kernels"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.names[0], options.compile, options.kernels)))
        return
    part, parts = map(int, options.part.split("/"))
    names = _names(options.names)[part::parts]
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    noted = ["--kernels"] if options.kernels else []
    flags = [*noted, *(["--compile"] if options.compile else [])]
    with tempfile.TemporaryDirectory() as folder:
        caches = [f"{folder}/{i}" for i in range(len(names))]
        cold = said(names, "cold", calls(names, caches, noted, options.at_once))
        warm = [{} for _ in names]
        if not options.cold:
            warm = said(names, "warm", calls(names, caches, flags, options.at_once))
    rows = [row(*each) for each in zip(names, cold, warm)]
    print(table(rows))
    print("recorded in", record("first_calls", rows))


if __name__ == "__main__":
    main()
