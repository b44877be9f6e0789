"""doctor --bench: how fast some operators are on this device, as one row to compare devices by."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from slipstream.tools import backend_query, catalog

# one size for every device of a kind, so that rows of different owners can be compared
GPU_SHAPE = catalog.Shape(B=1, T=4096, H=16, Z=32000)
CPU_SHAPE = catalog.Shape(B=1, T=512, H=4, K=64, V=64, dtype=torch.float32)
RUNS = 20
FLUSHED_BYTES = 256 << 20  # more than the L2 cache of any GPU
Call = Callable[[], Any]


def speeds(
    samples: Sequence[catalog.Sample], shown: Callable[[str, dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Milliseconds of each operator, forward alone and with backward, medians with a cold L2 cache.

    Args:
        samples: of an operator's rows the first counts.
        shown: called with each operator and what was found.

    Returns:
        {"shape", "copy_gb_per_s", "matmul_tflop_per_s", "operators"}: the bandwidth of a copy and
        torch's product of two large matrices say what the device can do; operators has, by name,
        {"backend", "forward_ms", "both_ms"} or {"error"}.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    shape = GPU_SHAPE if gpu else CPU_SHAPE
    found: dict[str, Any] = {"shape": str(shape), **_device(device), "operators": {}}
    for name, row in _rows({x.op: x for x in reversed(samples)}, shape, device):
        found["operators"][name] = row
        if shown is not None:
            shown(name, row)
    return found


def _rows(
    samples: dict[str, catalog.Sample], shape: catalog.Shape, device: torch.device
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, sample in reversed(samples.items()):
        try:
            yield name, _row(sample, shape, device)
        except Exception as error:  # the others are still of use
            yield name, {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def _row(sample: catalog.Sample, shape: catalog.Shape, device: torch.device) -> dict[str, Any]:
    args = sample.inputs(shape, device)
    leaves = [
        x.requires_grad_()
        for name, x in args.items()
        if x.is_floating_point() and name not in sample.fixed.split()
    ]

    def forward() -> Any:
        with torch.no_grad():
            return sample.call(args)

    def both() -> Any:
        out = sample.call(args)[0]
        return torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

    plans: list[Any] = []
    with backend_query.recording_selections(plans):
        out = sample.call(args)[0]
    row: dict[str, Any] = {"backend": plans[0].impl if plans else "-"}
    row["forward_ms"] = milliseconds(forward, device)
    if out.requires_grad:
        row["both_ms"] = milliseconds(both, device)
    return row


def _device(device: torch.device) -> dict[str, float]:
    size, n = (1 << 28, 8192) if device.type == "cuda" else (1 << 22, 512)
    source = torch.zeros(size, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    copied = milliseconds(lambda: target.copy_(source), device)
    product = milliseconds(lambda: a @ b, device)
    return {
        "copy_gb_per_s": round(2 * source.nbytes / copied / 1e6, 1),
        "matmul_tflop_per_s": round(2 * n**3 / product / 1e9, 3),
    }


def milliseconds(call: Call, device: torch.device) -> float:
    """The median; on a GPU of the device's time."""
    for _ in range(3):
        call()
    found = []
    flushed = torch.empty(
        FLUSHED_BYTES if device.type == "cuda" else 0, dtype=torch.int8, device=device
    )
    for _ in range(RUNS if device.type == "cuda" else 5):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.zero_()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(found), 4)
