"""Tiles of the norms, losses and the short convolution on a GPU: the best of many at given shapes.

python bench/blocks_sweep.py norm|loss|conv ...      all of them if none is named
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.conv.triton import launch as conv_launch
from slipstream.kernels.loss.triton import launch as loss_launch
from slipstream.kernels.norm.terms import Norm
from slipstream.kernels.norm.triton import launch as norm_launch
from slipstream.kernels.norm.triton import tiles
from slipstream.ops.loss import cross_entropy, linear_cross_entropy


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def bench(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=10, rep=40, return_mode="median")


def trials(label: str, run: Callable[[], Any], settings: list, put: Callable[[Any], None]) -> None:
    """Times of `run` under each setting, the best first; the first setting is today's."""
    found = []
    for setting in settings:
        put(setting)
        try:
            found.append((bench(run), str(setting)))
        except Exception as fault:  # too many registers or too much shared memory is a row too
            found.append((float("inf"), f"{setting} {type(fault).__name__}"))
    put(settings[0])
    best = ", ".join(f"{name} {ms:.4f}" for ms, name in sorted(found)[:4])
    print(f"{label}: today {found[0][0]:.4f}; best {best}; worst {max(found)}", flush=True)


def norms(R: int, D: int) -> None:
    n = Norm(1e-5)
    x, dy, w = rand(R, D), rand(R, D), rand(D)
    stats = norm_launch.forward(x, w, None, None, None, n, True)[2]
    assert stats is not None
    args = (dy, None, x, w, None, None, stats, None, n, True, False)
    runs: dict[str, Callable[[], Any]] = {
        "FORWARD": lambda: norm_launch.forward(x, w, None, None, None, n, False),
        "BACKWARD": lambda: norm_launch.backward(*args),
    }
    shapes = [(D, 4), (D, 8), (D, 16)] if D > 8192 else [(2048, 4), (4096, 4), (4096, 8)]
    ways = [(0, 1), (1, 2), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2), (4, 3)]

    def put(name: str, setting: Any) -> None:
        """A table as it is, or one row for all widths."""
        setattr(
            tiles, name, setting if isinstance(setting[0], tiles.Row) else (tiles.Row(*setting),)
        )
        norm_launch._tile.cache_clear()

    for name, run in runs.items():
        settings: list = [getattr(tiles, name)]
        for elements, warps in (*shapes, (2 * max(D, 2048), 8)):
            settings += [
                (1 << 20, elements, warps, per, stages)
                for per, stages in ways
                if per or name == "FORWARD"
            ]
        trials(f"norm {R}x{D} {name}", run, settings, lambda s, name=name: put(name, s))


def losses(N: int, V: int) -> None:
    target = torch.randint(0, V, (N,), device="cuda")
    x = rand(N, V).requires_grad_()
    kept = loss_launch.TILES, loss_launch.STAGES

    def put(setting: Any) -> None:
        loss_launch.TILES, loss_launch.STAGES = kept
        if setting:
            loss_launch.TILES, loss_launch.STAGES = ((1 << 62, *setting[:2]),), setting[2]

    blocks = [
        (BV, warps, stages)
        for BV in (4096, 8192, 16384, 32768)
        for warps in (4, 8, 16, 32)
        for stages in (1, 2)
        if 8 <= BV // (32 * warps) <= 64
    ]
    trials(
        f"cross_entropy {N}x{V} (BV, warps, stages)",
        lambda: torch.autograd.grad(cross_entropy(x, target), x),
        [None, *blocks],
        put,
    )


def linear_losses(N: int, V: int) -> None:
    target = torch.randint(0, V, (N,), device="cuda")
    hidden, weight = rand(N, 2048).requires_grad_(), (0.02 * rand(V, 2048)).requires_grad_()
    kept = loss_launch.CHUNK_BYTES >> 20
    trials(
        f"linear_cross_entropy {N}x{V} (MiB of logits)",
        lambda: torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight)),
        [kept, 64, 96, 160, 192, 256, 512, 1024],
        lambda mib: setattr(loss_launch, "CHUNK_BYTES", mib << 20),
    )


def convolutions() -> None:
    x, w = rand(4, 4096, 4096), rand(4096, 4)
    dy = torch.randn_like(x)
    runs: dict[str, Callable[[], Any]] = {
        "FORWARD": lambda: conv_launch.forward(x, w, None, None, None, None, True),
        "BACKWARD": lambda: conv_launch.backward(dy, x, w, None, None, None, None, True),
    }
    for name, run in runs.items():
        settings = [getattr(conv_launch, name)]
        for BT, BD, warps in ((8, 512, 2), (16, 512, 2), (16, 256, 2), (8, 256, 1), (16, 1024, 4)):
            settings += [conv_launch.Tile(BT, BD, warps, per) for per in (2, 4, 6, 10)]
        trials(f"conv {name}", run, settings, lambda s, name=name: setattr(conv_launch, name, s))


def main() -> None:
    wanted = sys.argv[1:] or ["norm", "loss", "conv"]
    print(torch.cuda.get_device_name(), torch.__version__)
    if "norm" in wanted:
        for shape in ((32768, 2048), (8192, 16384), (262144, 128)):
            norms(*shape)
    if "loss" in wanted:
        for shape in ((16384, 32000), (8192, 151936)):
            losses(*shape)
            linear_losses(*shape)
    if "conv" in wanted:
        convolutions()


if __name__ == "__main__":
    main()
