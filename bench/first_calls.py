"""Seconds of each operator's first call, forward and backward, in processes of their own.

    python bench/first_calls.py               # the linear family, attention, norms, losses
    python bench/first_calls.py kda gla       # these
    python bench/first_calls.py --linear --at-once 4    # the linear family alone; 4 at a time
    python bench/first_calls.py --linear --steps        # besides, a few tokens one by one
    python bench/first_calls.py --compile     # besides, under torch.compile(fullgraph=True)
    python bench/first_calls.py --part 0/2    # the first half of them
    python bench/first_calls.py --cold        # only with an empty cache
    python bench/first_calls.py --kernels     # and what was compiled when, in seconds of the call
    python bench/first_calls.py --profile     # a further warm call, with what Python spends it on
    python bench/first_calls.py --states      # the gradient of the final state, too
    python bench/first_calls.py --width 64    # heads so wide

cold: Triton's cache and ours are empty; warm: they are as the cold call left them. Of the seconds
are neither the import of torch and slipstream nor the start of CUDA and of torch's autograd. The
gradient is that of the first output alone. Compiled: cold, with warm kernels, and the largest
relative difference of its results from those without torch.compile. The processes of a few
operators start together and call one after the other, alone, or --at-once so many operators'. The
rows go to results/first_calls.csv.
"""

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import record, table

from slipstream.tools.catalog import SAMPLES, Sample, Shape, chosen, flat

SECONDS = 150
TOGETHER = 8  # operators whose processes wait with what they have imported
LONG, STEPS = Shape(B=1, T=2048, H=4), Shape(B=8, T=8, H=4)
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


def measure(
    name: str, compiled: bool, kernels: bool, profile: bool, states: bool, width: int
) -> dict[str, Any]:
    """In a process of its own."""
    sample = chosen([name])[0]
    start = time.perf_counter()
    shape = STEPS if sample.op.startswith("fused_recurrent") else LONG
    args = sample.inputs(replace(shape, K=width, V=width), torch.device("cuda"))
    if "k_cache" in args:  # one token is decoded
        args |= {name: args[name][:, :1].contiguous() for name in "qkv"}
    learnt = [x for n, x in args.items() if n not in sample.fixed.split()]
    given = [x.requires_grad_() for x in learnt if x.is_floating_point()]
    _torch_alone()
    fn, options = sample.fn, dict(sample.options)
    if states and "output_final_state" in sample.takes:
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
        grown = [x for x in (out if states else out[:1]) if x.requires_grad]
        weights = [torch.randn_like(x) for x in grown]
        grads: tuple[torch.Tensor | None, ...] = ()
        if grown:
            grads = torch.autograd.grad(grown, given, weights, allow_unused=True)
        torch.cuda.synchronize()
        return [x.detach() for x in (*out, *grads) if x is not None]

    profiler = cProfile.Profile()
    with profiler if profile else contextlib.nullcontext():
        torch.manual_seed(0)
        want = results(call)
    found["call_s"] = time.perf_counter() - begin
    if profile:
        found["lines"] = _profiled(profiler)
    if noted is not None:
        found["lines"], noted = noted.lines, None
    begin = time.perf_counter()
    results(call)
    found["again_ms"] = 1e3 * (time.perf_counter() - begin)
    if compiled:
        begin = time.perf_counter()
        torch.manual_seed(0)
        got = results(torch.compile(call, fullgraph=True, dynamic=True))
        found["compiled_s"] = time.perf_counter() - begin
        found["differs"] = max(_difference(x, y) for x, y in zip(got, want, strict=True))
    return found


def _torch_alone() -> None:
    """A gradient: what torch imports and starts for its first one, half a second."""
    x = torch.ones(2, device="cuda", requires_grad=True)
    y = x.bfloat16() * 2
    torch.autograd.grad(y, x, torch.randn_like(y))


def _profiled(profiler: cProfile.Profile, most: int = 40) -> list[str]:
    """Seconds in all, seconds of its own, calls, and what; the longest first."""
    stats: Any = pstats.Stats(profiler)
    rows = sorted(stats.stats.items(), key=lambda x: -x[1][3])[:most]
    return [
        f"{total:6.3f} {own:6.3f} {calls:6d} {'/'.join(Path(file).parts[-3:])}:{line} {name}"
        for (file, line, name), (_, calls, own, total, _) in rows
    ]


def _difference(x: torch.Tensor, y: torch.Tensor) -> float:
    size = y.double().abs().max().item()
    return (x.double() - y.double()).abs().max().item() / (size or 1.0)


class Child:
    """A process that has imported what it needs and waits to be told to call."""

    def __init__(self, name: str, cache: str, flags: list[str]) -> None:
        run = [sys.executable, __file__, "--child", name, *flags]
        inductor = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        own = {"TRITON_CACHE_DIR": cache, "SLIPSTREAM_CACHE_DIR": f"{cache}/slipstream"}
        env = {**os.environ, **own, **inductor}
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


def one(children: dict[str, Child], name: str, notes: Sequence[str]) -> dict[str, object]:
    """Each child calls in turn, and what it found is printed as it comes."""
    found: dict[str, dict[str, Any]] = {"cold": {}, "warm": {}}
    for label, child in children.items():
        found[label] = each = child.call()
        for line in each.get("lines", ()):
            print(name, label, line)
        print(name, label, each.get("call_s", each.get("error")), flush=True)
    made = row(name, found["cold"], found["warm"])
    return {**made, "note": "; ".join(filter(None, (*notes, str(made["note"]))))}


def _names(given: list[str], linear: bool, steps: bool) -> list[str]:
    def counts(sample: Sample) -> bool:
        if sample.op.startswith("fused_recurrent_"):
            return steps
        return sample.op.startswith("chunk_") or (sample.op in PLAIN and not linear)

    samples = chosen(given) if given else [x for x in SAMPLES if counts(x)]
    return sorted({x.op: None for x in samples}, key=lambda x: x.startswith("fused_recurrent_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--compile", action="store_true")
    for name in ("cold", "kernels", "profile", "states", "linear", "steps"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--width", type=int, default=LONG.K)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        given = [getattr(options, x) for x in ("compile", "kernels", "profile", "states", "width")]
        print(json.dumps(measure(options.names[0], *given)))
        return
    part, parts = map(int, options.part.split("/"))
    names = _names(options.names, options.linear, options.steps)[part::parts]
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    shape = [f"--width={options.width}", *(["--states"] if options.states else [])]
    notes = ["final state's gradient too"] if options.states else []
    notes += [f"{options.width} wide"] if options.width != LONG.K else []
    same = [*shape, *(["--kernels"] if options.kernels else [])]
    flags = {"cold": same}
    if not options.cold:
        flags["warm"] = [*same, *(["--compile"] if options.compile else [])]
    if options.profile:
        flags["profile"] = ["--profile", *shape]
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        for i in range(0, len(names), TOGETHER):
            few = names[i : i + TOGETHER]
            children = [{x: Child(n, f"{folder}/{n}", y) for x, y in flags.items()} for n in few]
            for child in [x for each in children for x in each.values()]:
                child.ready()
            for each in pool.map(one, children, few, [notes] * len(few)):
                record("first_calls", [each])
                rows.append(each)
    print(table(rows))


if __name__ == "__main__":
    main()
