"""hgrn's scan on a GPU: right at odd sizes, then how fast; part of bench/step_gpu.py.

python bench/scan_gpu.py [PART PARTS]     tiles, right and how fast
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from record import record
from torch import Tensor

from slipstream.kernels.gated_scan.op import scan
from slipstream.runtime import call_replay

COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
SHAPES = [(1, 8192, 2048), (8, 2048, 1024), (1, 65536, 1024), (64, 128, 1024)]  # B, T, D
# B, T, D, lengths of packed sequences
ODD = [
    (2, 5, 6, None),
    (2, 777, 900, None),
    (1, 900, 800, (0, 129, 1, 770, 0)),
    (2, 2100, 100, None),  # split
    (1, 2900, 256, (0, 129, 1, 2770, 0)),
]
ROWS: list[dict[str, object]] = []


def error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of what was wanted."""
    size = want.double().square().mean().sqrt().item()
    off = (got.double() - want.double()).square().mean().sqrt().item()
    return off / size if size else off


def bench(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=10, rep=40, return_mode="median")


def first(fn: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def row(what: str, shape: str, ms: float, bytes_moved: float, first_s: float = 0.0) -> str:
    """Keeps a row for the results, returns what to print."""
    fraction = bytes_moved / ms / COPY_BYTES_PER_MS
    ROWS.append(
        {
            "what": what,
            "shape": shape,
            "ms": round(ms, 5),
            "TB/s": round(bytes_moved / ms / 1e9, 3),
            "of copy": round(fraction, 3),
            "first s": round(first_s, 2),
        }
    )
    tail = f", first {first_s:.2f} s" if first_s else ""
    return f"{what:28} {shape:22} {ms * 1e3:8.1f} us, {fraction:.2f} of copy{tail}"


def save() -> None:
    if ROWS:
        print("recorded in", record("step_gpu", ROWS))


def compare(size: tuple, dtype: torch.dtype) -> list[float]:
    """Errors of h, the final state and the gradients; nan if a second run gives other bits."""
    B, T, D, lengths = size
    N = B if lengths is None else len(lengths)
    cu = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    x, dh = (torch.randn(B, T, D, device="cuda").to(dtype) for _ in range(2))
    g = -torch.rand(B, T, D, device="cuda").pow(4) * 5
    s, ds = (torch.randn(N, D, device="cuda") for _ in range(2))
    results: list[list[Tensor]] = []
    for impl, wide in (("triton", False), ("triton", False), ("eager", True)):
        args: Any = [(y.double() if wide else y).detach().requires_grad_() for y in (x, g, s)]
        h, final = scan(args[0], args[1], args[2], cu, impl)
        loss = (h.double() * dh).sum() + (final.double() * ds).sum()
        results.append([h, final, *torch.autograd.grad(loss, args)])
    same = all(torch.equal(x, y) for x, y in zip(*results[:2]))
    return [error(x, y) if same else float("nan") for x, y in zip(results[0], results[2])]


def inputs(B: int, T: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    x, dh = (torch.randn(B, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    g = F.logsigmoid(torch.randn(B, T, D, device="cuda"))
    return x.requires_grad_(), g.requires_grad_(), dh


def times(label: str, fn: Callable[..., Any]) -> None:
    """fn(x, g) -> h and more; the floor reads x, g, dh, h once and writes h, dx, dg."""
    for shape in SHAPES:
        try:
            _times(label, fn, shape)
        except Exception as e:
            print(f"{label} {shape}: {type(e).__name__}: {str(e)[:100]}", flush=True)


def _times(label: str, fn: Callable[..., Any], shape: tuple[int, int, int]) -> None:
    x, g, dh = inputs(*shape)

    def forward() -> Any:
        with torch.no_grad():
            return fn(x, g)

    def both() -> None:
        torch.autograd.grad(fn(x, g)[0], (x, g), dh)

    name, cold = "B{} T{} D{}".format(*shape), (first(forward), first(both))
    print(row(f"{label} fwd", name, bench(forward), 8.0 * x.numel(), cold[0]), flush=True)
    print(row(f"{label} fwd+bwd", name, bench(both), 22.0 * x.numel(), cold[1]), flush=True)


def sweep(part: int = 0, parts: int = 1) -> None:
    """us forward + backward by tile and shape, of those that are right."""
    call_replay.ENABLED = False  # a record of a call keeps the tile that it had
    from slipstream.kernels.gated_scan.triton import launch

    kept = launch.FORWARD, launch.BACKWARD
    tiles = [(4, 32, 16, 2), (8, 16, 32, 4, 4), (8, 8, 32, 4, 2)]
    tiles += [(4, 32, 32, 4), (8, 32, 32, 8, 4), (4, 64, 16, 4)]
    for tile in tiles[part::parts]:
        launch.FORWARD = launch.BACKWARD = launch.Tile(*tile)
        try:
            errors = [max(compare(size, torch.bfloat16)) for size in (ODD[3], ODD[4])]
            line = [_sweep_one(*inputs(*shape)) for shape in SHAPES]
        except Exception as e:
            print(f"{tile} {type(e).__name__} {str(e)[:100]}")
            continue
        print(tile, " ".join(f"{e:.1e}" for e in errors), ", ".join(line), flush=True)
    launch.FORWARD, launch.BACKWARD = kept


def _graph(fn: Callable[[], Any]) -> Callable[[], Any]:
    """fn without the time that the host takes."""
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def _sweep_one(x: Tensor, g: Tensor, dh: Tensor) -> str:
    from slipstream.kernels.gated_scan.triton import launch

    x, g = x.detach(), g.detach()
    f = bench(_graph(lambda: launch.forward(x, g, None, None)))
    b = bench(_graph(lambda: launch.backward(g, x, None, None, dh, None)))
    of = 8.0 * x.numel() / f / COPY_BYTES_PER_MS, 14.0 * x.numel() / b / COPY_BYTES_PER_MS
    return f"{f * 1e3:.0f}+{b * 1e3:.0f} ({of[0]:.2f} {of[1]:.2f})"


if __name__ == "__main__":
    sweep(*map(int, sys.argv[1:]))
