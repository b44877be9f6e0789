"""Shared by the scripts of bench/: options, timing, errors, memory and rows of CSV.

Every script takes these options, besides its own:

    --only REGEX   what has this in its name
    --small        tiny sizes, on a CPU too; records nothing: a test of the script itself
    --once         every call once: fills the caches of compilers, times nothing
    --dry          prints, records nothing
    --seconds S    begins nothing after S seconds

Implementations that are compared take turns in one run, so that all of them meet the same clocks.
"""

import argparse
import csv
import datetime
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

# threads that spin while they wait stall each other where cores are shared
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.tools.catalog import Shape, flat

RESULTS = Path(__file__).parent / "results"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
# more than the L2 cache of any GPU holds; written before each run, so that a run finds it cold
FLUSHED_BYTES = 256 << 20
CYCLES_A_SECOND = 2_000_000_000
Call = Callable[[], Any]
Row = Mapping[str, object]
# the name that --only is looked for in, the file of its rows, and what finds them: one, or many
Measurement = tuple[str, str, Callable[[], Any]]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With the options that all scripts have."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", metavar="REGEX", default=re.compile(""), type=re.compile)
    made.add_argument("--small", action="store_true", help="tiny sizes, on a CPU too")
    made.add_argument("--once", action="store_true", help="compile everything, time nothing")
    made.add_argument("--dry", action="store_true", help="record nothing")
    made.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after")
    return made


class Report:
    """Prints rows as they are found, and appends them to bench/results unless told otherwise."""

    def __init__(self, options: argparse.Namespace, needs_gpu: bool = True) -> None:
        if needs_gpu and DEVICE.type != "cuda" and not options.small:
            raise SystemExit("needs a CUDA device; --small tries the script on a CPU")
        torch.manual_seed(0)
        self.options = options
        self.start = time.perf_counter()
        self.keeps = not (options.dry or options.small or options.once)
        self.failures: list[str] = []

    def wants(self, name: str) -> bool:
        """Whether this is to be measured: it was asked for, and there is time left."""
        return self.left() > 0 and self.options.only.search(name) is not None

    def left(self) -> float:
        """Seconds."""
        return self.options.seconds - (time.perf_counter() - self.start)

    def row(self, file: str, cells: Mapping[str, object]) -> None:
        spent = f"after {time.perf_counter() - self.start:.0f} s"
        print(", ".join(f"{k} {v}" for k, v in cells.items() if v != ""), spent, flush=True)
        if self.keeps:
            record(file, [cells])

    @contextmanager
    def going_on(self, what: str) -> Any:
        """An error inside is printed, and what comes afterwards still runs."""
        try:
            yield
        except Exception as e:
            first = (str(e).splitlines() or [""])[0]
            self.failures.append(f"{what}: {type(e).__name__}: {first[:150]}")
            print(self.failures[-1], flush=True)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()

    def end(self) -> None:
        """Fails where something failed on the way."""
        if self.failures:
            raise SystemExit(f"{len(self.failures)} failed: {'; '.join(self.failures)}")

    def measure(self, all_of_them: Iterable[Measurement]) -> None:
        """Those that are wanted, their rows recorded; fails at last where one failed."""
        for name, file, measured in all_of_them:
            if self.wants(name):
                with self.going_on(name):
                    found = measured()
                    for cells in (found,) if isinstance(found, Mapping) else found:
                        self.row(file, cells)
        self.end()

    def times(self, calls: Mapping[str, Call], runs: int = 20) -> dict[str, float]:
        """in_turns of them; with --once each is called, and there are no times."""
        if not self.options.once:
            return in_turns(calls, self.runs(runs))
        for call in calls.values():
            first(call)
        return {}

    def runs(self, count: int) -> int:
        """How often a call is timed."""
        return min(count, 2) if self.options.small else count

    def shape(self, shape: Shape) -> Shape:
        """The shape, or for --small a tiny one of the same kind."""
        if not self.options.small:
            return shape
        few = shape.lengths and tuple(min(x, 20 + i) for i, x in enumerate(shape.lengths))
        heads = min(shape.H, 2)
        grouped = shape.HV and heads * (shape.HV // shape.H)
        small = replace(
            shape, B=min(shape.B, 2), T=min(shape.T, 40), H=heads, HV=grouped, lengths=few, M=8
        )
        narrow = {n: min(getattr(shape, n), 16) for n in ("K", "V")}
        narrow |= {n: getattr(shape, n) and min(getattr(shape, n), 64) for n in ("D", "C", "Z")}
        return replace(
            small, **narrow, dtype=torch.float32 if DEVICE.type == "cpu" else shape.dtype
        )


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def record(name: str, rows: Sequence[Mapping[str, object]]) -> Path:
    """Appends rows, with date, device and versions, to results/NAME.csv; new columns go last."""
    path = RESULTS / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    common = {
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "torch": torch.__version__,
    }
    full = [{**common, **row} for row in rows]
    names = list(dict.fromkeys(name for row in full for name in row))
    old = read(name)
    known = list(old[0]) if old else []
    names = [*known, *(name for name in names if name not in known)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*old, *full])
    return path


def read(name: str) -> list[dict[str, str]]:
    """The rows of results/NAME.csv."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def first(call: Call) -> float:
    """Seconds of one call, until the device is done."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def _flushed() -> Tensor:
    """Given back by whoever takes it: it would count as memory of what is measured next."""
    return torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device=DEVICE)


def in_turns(calls: Mapping[str, Call], runs: int = 20, flushes: int = 1) -> dict[str, float]:
    """Median milliseconds of each call on the device, with a cold L2 cache.

    The calls take turns. The device is kept busy until the host has queued all of them, so that no
    time of the host is in them, unlike in triton.testing.do_bench. Where the queue may be too short
    for all, more flushes before each let the host get ahead of it. On a CPU: of the clock.
    """
    for call in calls.values():
        call()
    if DEVICE.type == "cpu":
        seconds = [[first(call) for call in calls.values()] for _ in range(runs)]
        return {n: 1e3 * statistics.median(x) for n, x in zip(calls, zip(*seconds), strict=True)}
    host = sum(first(call) for call in calls.values()) + 5e-5 * len(calls)
    flushed = _flushed()
    sleep: Any = torch.cuda._sleep
    sleep(int(2 * runs * host * CYCLES_A_SECOND))
    found: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(runs):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(flushes):
                flushed.zero_()
            begin.record()
            call()
            end.record()
            found[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: statistics.median(b.elapsed_time(e) for b, e in x) for n, x in found.items()}


def in_graph(call: Call) -> Call:
    """The call as a CUDA graph, which takes the host no time; on a CPU the call itself."""
    call()
    if DEVICE.type == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def graph_ms(call: Call, runs: int = 20) -> float:
    """Milliseconds of a call that is replayed many times in a row, with a warm L2 cache."""
    many = 1 if DEVICE.type == "cpu" else 10
    return in_turns({"": in_graph(lambda: [call() for _ in range(many)])}, runs)[""] / many


def host_us(call: Call, rounds: int = 20, each: int = 20) -> float:
    """Microseconds until a call returns, the mean of `each` calls in the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(each):
            call()
        best = min(best, (time.perf_counter() - start) / each * 1e6)
    synchronize()
    return best


def kernels(call: Call) -> list[tuple[str, float]]:
    """Name and milliseconds of each kernel that a call launches, in order; none on a CPU."""
    if DEVICE.type == "cpu":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [x for x in profile.events() or () if x.device_type.name == "CUDA"]
    found.sort(key=lambda x: x.time_range.start)
    return [(x.name, x.device_time / 1e3) for x in found]


def kernels_ms(call: Call, runs: int = 5) -> float:
    """Milliseconds of its kernels alone, without the gaps between them."""
    call()
    return statistics.median(sum(ms for _, ms in kernels(call)) for _ in range(runs))


def peak_bytes(call: Call) -> int:
    """The peak memory of a call, its results included; 0 on a CPU."""
    if DEVICE.type == "cpu":
        call()
        return 0
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


@cache
def copy_bytes_per_ms() -> float:
    """The bandwidth of a copy on this device, read and write: what a fused kernel is held to."""
    source = torch.empty(
        1 << (28 if DEVICE.type == "cuda" else 20), dtype=torch.int32, device=DEVICE
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / in_turns({"": lambda: target.copy_(source)}, 5)[""]


def error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference, relative to that of want; infinite for NaN."""
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    size, off = (x.square().mean().sqrt().item() for x in (want, got - want))
    found = off / size if size else off
    return found if found == found else float("inf")


class Provider:
    """An implementation at given arguments: forward, backward, and both.

    fn takes the arguments by name; its first output is what gets a gradient. fixed: names of
    arguments that get none.
    """

    def __init__(self, fn: Callable[..., Any], args: Mapping[str, Any], fixed: str = "") -> None:
        def learnt(name: str, x: Any) -> bool:
            return isinstance(x, Tensor) and x.is_floating_point() and name not in fixed.split()

        self.fn = fn
        self.args = {n: x.detach() if isinstance(x, Tensor) else x for n, x in args.items()}
        self.live = {n: x.requires_grad_() for n, x in self.args.items() if learnt(n, x)}
        self.dout: Tensor | None = None

    def outputs(self, **options: Any) -> list[Tensor]:
        return flat(self.fn(**self.args, **options))

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.outputs()[0]

    def gradients(self) -> tuple[Tensor | None, ...]:
        return self.back(self.outputs()[0])

    def results(self) -> list[Tensor]:
        """The outputs and the gradients."""
        with torch.no_grad():
            outs = self.outputs()
        return [*outs, *(x for x in self.gradients() if x is not None)]

    def backward(self) -> Call:
        """The backward alone, of a forward that is kept."""
        out = self.outputs()[0]
        return lambda: self.back(out, keep=True)

    def back(self, out: Tensor, keep: bool = False) -> tuple[Tensor | None, ...]:
        if self.dout is None or self.dout.shape != out.shape:
            # a loss gets 1, as loss.backward() gives it: other factors cost a pass of their own
            self.dout = torch.randn_like(out) if out.dim() else torch.ones_like(out)
        leaves = list(self.live.values())
        return torch.autograd.grad(out, leaves, self.dout, retain_graph=keep, allow_unused=True)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.args.values() if isinstance(x, Tensor))

    def floors_ms(self, out: Tensor) -> tuple[float, float]:
        """Milliseconds of a copy that reads each input and writes each output once, and the same
        with a backward, which reads them again and writes a gradient for each."""
        forward = self.nbytes + out.nbytes
        both = forward + 2 * self.nbytes + out.nbytes
        return forward / copy_bytes_per_ms(), both / copy_bytes_per_ms()


def float64_errors(
    provider: Provider, exact: Callable[..., Any], part: Callable[[Tensor], Tensor] = lambda x: x
) -> dict[str, object]:
    """Errors of the output and the largest of a gradient against `exact`, the same function, in
    float64 on the same rounded inputs.

    part: what of each tensor is compared, where the rest of the work does not depend on it.
    """
    wide = {
        n: part(x).double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in provider.args.items()
    }
    fixed = " ".join(n for n in wide if n not in provider.live)
    # some packages overwrite their inputs
    copies = {n: x.clone() if isinstance(x, Tensor) else x for n, x in provider.args.items()}
    own = Provider(provider.fn, copies, fixed)
    got = own.outputs()[0]
    grads = own.back(got)
    truth = Provider(exact, wide, fixed)
    truth.dout = None if own.dout is None else part(own.dout).double()
    want = truth.outputs()[0]
    pairs = zip(grads, truth.back(want), strict=True)
    worst = max(error(part(x), y) for x, y in pairs if x is not None and y is not None)
    return {"out error": f"{error(part(got), want):.1e}", "grad error": f"{worst:.1e}"}


def sdpa(causal: bool, backend: SDPBackend) -> Callable[..., Tensor]:
    """torch's attention of [B, T, H, D] by one of its kernels; on a CPU by plain torch."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        exact = q.dtype == torch.float64
        with sdpa_kernel(SDPBackend.MATH if exact or not q.is_cuda else backend):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return o.transpose(1, 2)

    return run


def bandwidth(ms: float, moved: float) -> dict[str, object]:
    """The cells of a row: time, and bandwidth from the bytes that the call moves."""
    fraction = moved / ms / copy_bytes_per_ms()
    return {"ms": round(ms, 5), "TB/s": round(moved / ms / 1e9, 3), "of copy": round(fraction, 3)}


def language_model(mixers: list[Any], small: bool, **sizes: Any) -> Any:
    """Ours, of 16 heads and hidden size 2048 if not told otherwise;
    narrow if small."""
    from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

    sizes = {"hidden_size": 2048, "num_heads": 16, "vocab_size": 32000, **sizes}
    if small:
        sizes |= {"hidden_size": 32, "num_heads": 2, "vocab_size": 64}
    model: Any = SlipstreamForCausalLM(SlipstreamConfig(mixers=mixers, **sizes))
    return model.to(DEVICE, BF16 if DEVICE.type == "cuda" else torch.float32)


def checkpointed(model: Any) -> Any:
    """The same model, which keeps no activations."""
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{word}_checkpointing_enable")({"use_reentrant": False})
    return model


def rounded(cells: Mapping[str, float], digits: int = 4) -> dict[str, float]:
    """Rounded to the given number of significant digits."""
    return {name: float(f"{x:.{digits}g}") for name, x in cells.items()}
