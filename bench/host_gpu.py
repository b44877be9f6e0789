"""Host time of a call, that is until it returns, not until the device is done.

    python bench/host_gpu.py          a line an operator: all of it, and what it is without launches

    python bench/host_gpu.py kda step   those with one of these in their names
    python bench/host_gpu.py chunk_     the chunk operators, and those past their bar in a last line

Every chunk operator with its states, and some others, in inference unless it says so. Tensors are
small, so that the device never makes the host wait. "no launch": launches, of which the number is
said, replaced by nothing, so checks, plans, the operator and torch.empty are left. "first": the
first call, with compilation, the guard's child and the probe. Promised: BARS. torch's rms_norm says
how fast the host is: 9 us where the bars were set.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from record import record
from triton.runtime.jit import JITFunction

from slipstream import ops
from slipstream.runtime import guarded_launch
from slipstream.runtime.launch_cache import CachedKernel, CompiledEntry
from slipstream.runtime.launch_replay import LaunchBatch
from slipstream.tools.catalog import SAMPLES, Sample, Shape

DEVICE = torch.device("cuda", 0)
BARS = {"chunk_": 80, "recurrent_step": 40, "rms_norm": 20}
SHAPE = Shape(B=1, T=256, H=4, state=True)
Call = Callable[[], Any]


def calls() -> dict[str, Call]:
    def bf16(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=grad)

    q, k, v = (bf16(1, 256, 4, 64) for _ in range(3))
    g, beta = -torch.rand(1, 256, 4, device=DEVICE), torch.rand(1, 256, 4, device=DEVICE)
    one = [bf16(8, 1, 4, 64) for _ in range(3)]
    g1, beta1 = -torch.rand(8, 1, 4, device=DEVICE), torch.rand(8, 1, 4, device=DEVICE)
    pool, slots = torch.zeros(8, 4, 64, 64, device=DEVICE), torch.arange(8, device=DEVICE)
    x, weight, taps = bf16(256, 1024), bf16(1024), bf16(1024, 4)
    leaves = [bf16(1, 256, 4, 64, grad=True) for _ in range(3)]

    def train() -> None:
        ops.chunk_gated_delta_rule(*leaves, g=g, beta=beta)[0].sum().backward()

    return {
        **chunked(),
        "gated delta rule, sum, backward": train,
        "recurrent_step": lambda: ops.recurrent_step(
            *one, state=pool, state_indices=slots, g=g1, beta=beta1
        ),
        "attention": lambda: ops.attention(q, k, v),
        "rms_norm": lambda: ops.rms_norm(x, weight),
        "torch's rms_norm": lambda: torch.nn.functional.rms_norm(x, weight.shape, weight),
        "short_convolution": lambda: ops.short_convolution(x[None], taps, activation="silu"),
        "swiglu": lambda: ops.swiglu(x, x),
    }


def chunked() -> dict[str, Call]:
    """Of an operator's samples the first."""
    first: dict[str, Sample] = {}
    for sample in SAMPLES:
        if sample.op.startswith("chunk_"):
            first.setdefault(sample.op, sample)
    return {
        name: partial(x.fn, **x.inputs(SHAPE, DEVICE), **x.options, output_final_state=True)
        for name, x in first.items()
    }


def host(call: Call, rounds: int = 20, each: int = 20) -> float:
    """us, the least of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(each):
            call()
        best = min(best, (time.perf_counter() - start) / each * 1e6)
    return best


LAUNCHES = [0]


def nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of a launch."""
    LAUNCHES[0] += 1


def none_in_a_row(row: LaunchBatch, pointers: Any) -> None:
    LAUNCHES[0] += len(row.launches)


def none_of(kept: CachedKernel, grid: tuple[int, ...]) -> Call:
    return nothing


def without_launches(call: Call) -> tuple[float, int]:
    """us, and launches that were not made, of one call."""
    with (
        mock.patch.object(CachedKernel, "__getitem__", none_of),
        mock.patch.object(CompiledEntry, "launch", nothing),
        mock.patch.object(LaunchBatch, "__call__", none_in_a_row),
        mock.patch.object(JITFunction, "run", nothing),
    ):
        before = LAUNCHES[0]
        call()
        count = LAUNCHES[0] - before
        return host(call), count


def main() -> None:
    only = sys.argv[1:] or [""]
    here = guarded_launch.compiler_state(DEVICE)
    assert here is not None
    print(f"{here.name}: verified {here.verified} guards {here.guards} probes {here.probes}")
    past: list[str] = []
    for name, call in calls().items():
        if not any(x in name for x in only):
            continue
        try:
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            first = time.perf_counter() - start
            whole, rest, count = host(call), float("nan"), 0
            if "backward" not in name:
                rest, count = without_launches(call)
        except Exception as error:  # the others still run
            print(f"{name:24} {type(error).__name__}: {str(error)[:120]}")
            continue
        bar = next((most for x, most in BARS.items() if name.startswith(x)), None)
        past += [f"{name} {whole:.0f}"] if bar is not None and whole > bar else []
        said = "" if bar is None else f" ({'within' if whole <= bar else 'PAST'} {bar})"
        times = {"us": whole, "no_launch_us": rest, "first_s": first, "launches": count}
        print(
            f"{name:31} {whole:6.1f} us{said}, without its {count} launches {rest:.1f}, "
            f"first {first:.1f} s",
            flush=True,
        )
        record("host_gpu", [{"operator": name, **{x: round(y, 1) for x, y in times.items()}}])
    print("past their bars:", ", ".join(past) or "none")
    kept = {k: v for kind in here.remembered.values() for k, v in kind.items()}
    print(f"learnt: {len(kept)} verdicts; not used: {here.remembered.get('unusable', {})}")


if __name__ == "__main__":
    main()
