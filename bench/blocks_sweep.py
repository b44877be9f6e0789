"""Tiles of the norms, losses and the short convolution on a GPU: the best of many at given shapes,
each with its numbers checked.

python bench/blocks_sweep.py norm|loss|conv ...   all of them if none is named; norm128 is one width
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ahead import ahead
from record import record
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipstream.kernels.conv.triton import launch as conv_launch
from slipstream.kernels.loss.triton import launch as loss_launch
from slipstream.kernels.norm.inputs import NormOptions
from slipstream.kernels.norm.triton import launch as norm_launch
from slipstream.kernels.norm.triton import tiles
from slipstream.ops.loss import cross_entropy, linear_cross_entropy

# relative RMS error of 16-bit results; of gradients through 16-bit logits
LIMIT, COARSE = 0.007, 0.05
ROWS = slice(0, None, 61)
_FOUND: list[dict[str, Any]] = []


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest of all; NaN is infinite."""

    def one(x: Tensor, y: Tensor) -> float:
        y = y.float()
        return float((x.float() - y).square().mean().sqrt() / y.square().mean().sqrt())

    worst = max(one(x, y) for x, y in zip(got, want, strict=True))
    return worst if worst == worst else float("inf")


def trials(
    label: str,
    run: Callable[[], Any],
    settings: list,
    put: Callable[[Any], None],
    check: Callable[[Any], float],
    limit: float = LIMIT,
) -> None:
    """Times of `run` under each setting, the best first; the first setting is today's."""
    found = []
    for setting in settings:
        put(setting)
        name = re.sub(r"[a-z_A-Z]+=", "", str(setting))
        try:
            off = check(run())
            ms = ahead(run) if off <= limit else float("inf")
            found.append((ms, name + ("" if off <= limit else f" WRONG {off:.1e}")))
        except Exception as fault:  # too many registers or too much shared memory is a row too
            found.append((float("inf"), f"{name} {type(fault).__name__}"))
        _FOUND.append({"work": label, "setting": found[-1][1], "ms": f"{found[-1][0]:.4f}"})
    put(settings[0])
    today, *_ = found
    found.sort(key=lambda x: x[0])
    best = ", ".join(f"{name} {ms:.4f}" for ms, name in found[:4])
    failed = [name for ms, name in found if ms == float("inf")]
    print(f"{label}: today {today[0]:.4f}; best {best}; failed {failed}", flush=True)


def norms(R: int, D: int) -> None:
    n = NormOptions(1e-5)
    x, dy, w = rand(R, D), rand(R, D), rand(D)
    stats = norm_launch.forward(x, w, None, None, None, n, True)[2]
    assert stats is not None
    args = (dy, None, x, w, None, None, stats, None, n, True, False)
    leaves = x.float().requires_grad_(), w.float().requires_grad_()
    y = F.rms_norm(leaves[0], (D,), leaves[1], 1e-5)
    dx, dw = torch.autograd.grad(y, leaves, dy.float())
    runs: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
        "FORWARD": (
            lambda: norm_launch.forward(x, w, None, None, None, n, False),
            lambda got: error(got[:1], [y.detach()]),
        ),
        "BACKWARD": (
            lambda: norm_launch.backward(*args),
            lambda got: error((got.x, got.weight), (dx, dw)),
        ),
    }

    def put(rows: dict[str, Any]) -> None:
        """Tables or rows in the place of today's."""
        for name, row in {**TODAY, **rows}.items():
            setattr(tiles, name, row)
        norm_launch._tile.cache_clear()
        norm_launch._FORWARD.clear()

    for name, (run, check) in runs.items():
        settings = [{}, *norm_settings(name, D)]
        trials(f"norm {R}x{D} {name}", run, settings, put, check)


TODAY = {name: getattr(tiles, name) for name in ("FORWARD", "BACKWARD", "LOOPED", "SPLIT")}


def norm_settings(name: str, D: int) -> Iterator[dict[str, Any]]:
    """One row for all widths, or the row of those that are too long."""
    if D > 16384:
        if name == "FORWARD":
            for BD, warps in ((8192, 16), (16384, 16), (16384, 32), (32768, 32)):
                yield {"LOOPED": tiles.Row(BD, BD, warps, 0, 1)}
            return
        for BD, elements, warps in (
            (2048, 8192, 8), (4096, 4096, 8), (4096, 8192, 8), (4096, 16384, 16), (8192, 8192, 8),
            (8192, 16384, 16), (2048, 16384, 16),
        ):  # fmt: skip
            for per in (1, 2, 4):
                yield {"SPLIT": tiles.Row(BD, elements, warps, per, 1)}
        return
    every = {"FORWARD": ((0, 1),), "BACKWARD": ((1, 1), (2, 1), (2, 3), (3, 3), (4, 3))}
    for elements, warps in (
        (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 8), (16384, 16),
        (16384, 32),
    ):  # fmt: skip
        if D // 2 <= elements <= max(64 * D, 8192):
            for per, stages in every[name] if D < 16384 else ((1, 1), (2, 1)):
                yield {name: (tiles.Row(1 << 20, elements, warps, per, stages),)}


def losses(N: int, V: int) -> None:
    target = torch.randint(0, V, (N,), device="cuda")
    x = rand(N, V).requires_grad_()
    some = x[ROWS].float().detach().requires_grad_()
    loss = F.cross_entropy(some, target[ROWS], reduction="sum") / N
    (want,) = torch.autograd.grad(loss, some)
    kept = loss_launch.TILES, loss_launch.STAGES

    def put(setting: Any) -> None:
        loss_launch.TILES, loss_launch.STAGES = kept
        if setting:
            loss_launch.TILES, loss_launch.STAGES = ((1 << 62, *setting[:2]),), setting[2]

    blocks = [
        (BV, warps, stages)
        for BV in (2048, 4096, 8192, 16384)
        for warps in (2, 4, 8, 16)
        for stages in (1, 2)
        if 16 <= BV // (32 * warps) <= 64
    ]
    trials(
        f"cross_entropy {N}x{V} (BV, warps, stages)",
        lambda: torch.autograd.grad(cross_entropy(x, target), x),
        [None, *blocks],
        put,
        lambda got: error([got[0][ROWS]], [want]),
    )


def linear_losses(N: int, V: int) -> None:
    target = torch.randint(0, V, (N,), device="cuda")
    hidden, weight = rand(N, 2048).requires_grad_(), (0.02 * rand(V, 2048)).requires_grad_()
    some = hidden[ROWS].detach().requires_grad_()
    loss = F.cross_entropy(
        some.float() @ weight.detach().float().t(), target[ROWS], reduction="sum"
    )
    (want,) = torch.autograd.grad(loss / N, some)
    kept = loss_launch.CHUNK_BYTES >> 20
    trials(
        f"linear_cross_entropy {N}x{V} (MiB of logits)",
        lambda: torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight)),
        [kept, 80, 128, 192, 384, 512, 640],
        lambda mib: setattr(loss_launch, "CHUNK_BYTES", mib << 20),
        lambda got: error([got[0][ROWS]], [want]),
        COARSE,
    )


def convolutions() -> None:
    x, w = rand(4, 4096, 4096), rand(4096, 4)
    dy = torch.randn_like(x)
    leaves = x[:, :500].float().requires_grad_(), w.float()
    y = F.conv1d(F.pad(leaves[0].mT, (3, 0)), leaves[1][:, None], groups=4096)
    y = F.silu(y).mT
    (dx,) = torch.autograd.grad(y, leaves[0], dy[:, :500].float())
    runs: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
        "FORWARD": (
            lambda: conv_launch.forward(x, w, None, None, None, None, True),
            lambda got: error([got[0][:, :500]], [y.detach()]),
        ),
        "BACKWARD_ROLLING": (
            lambda: conv_launch.backward(dy, x, w, None, None, None, None, True),
            # the last rows know nothing of what follows the slice
            lambda got: error([got[0][:, :490]], [dx[:, :490]]),
        ),
    }
    shapes = ((8, 256, 2), (8, 128, 1), (8, 128, 2), (8, 256, 4), (4, 256, 2), (16, 256, 4))
    for name, (run, check) in runs.items():
        settings = [getattr(conv_launch, name)]
        settings += [conv_launch.Tile(*s, per) for s in shapes for per in (3, 4, 5, 6, 8, 12)]
        put = lambda s, name=name: setattr(conv_launch, name, s)  # noqa: E731
        trials(f"conv {name}", run, settings, put, check)


def main() -> None:
    wanted = sys.argv[1:] or ["norm", "loss", "conv"]
    print(torch.cuda.get_device_name(), torch.__version__)
    torch.manual_seed(0)
    for shape in ((32768, 2048), (8192, 16384), (2048, 65536), (262144, 128)):
        if {"norm", f"norm{shape[1]}"} & set(wanted):
            norms(*shape)
    if "loss" in wanted:
        for shape in ((16384, 32000), (8192, 151936)):
            losses(*shape)
            linear_losses(*shape)
    if "conv" in wanted:
        convolutions()
    record("blocks_sweep", _FOUND)


if __name__ == "__main__":
    main()
