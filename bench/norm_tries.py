# pyright: reportArgumentType=false
"""Other ways to compute three of the norms, each beside what is called and beside fla's kernels.

python bench/norm_tries.py           # right by float64, then times in turns, to a CSV
python bench/norm_tries.py --check   # right only, which compiles them all
python bench/norm_tries.py --aot     # compiled for sm_90 without a GPU: registers, spills
    --only REGEX                     # of the works: rms, short, gated, l2

All take turns, so that a ratio is the median over turns of the peer's time over one's own.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any
from unittest import mock

import torch
from ahead import turns
from norm_tries_list import TRIES, Try
from record import record, table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipstream.kernels.norm.inputs import NormOptions
from slipstream.kernels.norm.triton import launch as norm_launch
from slipstream.kernels.norm.triton.tiles import Tile
from slipstream.ops.norm import l2_norm, rms_norm, rms_norm_gated

BF16, WORD = torch.bfloat16, torch.int32
EPS = {"rms": 1e-5, "short": 1e-5, "gated": 1e-5, "l2": 1e-6}
# short: rms of short rows
SHAPES = {"rms": (8192, 16384), "short": (32768, 2048), "gated": (32768, 2048), "l2": (262144, 128)}
# tensors that must move
UNITS = {"rms": 2, "short": 2, "gated": 3, "l2": 3}
# relative RMS error of bf16 results; what rounding leaves is 1.7e-3, twice (Liger) 2.4e-3
LIMIT = 3e-3
RUNS = 121
# of shared memory that a program takes beside its own, and what there is
RESERVED, SHARED = 1024, 233472


@dataclass
class Data:
    """out: where a try writes. other: the gate, or what comes in for l2. r: 1 / |x|, l2's."""

    x: Tensor
    other: Tensor | None
    w: Tensor | None
    r: Tensor | None
    out: Tensor


def data(work: str, device: torch.device | str, shape: tuple[int, int]) -> Data:
    def rand(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=BF16)

    x, out = rand(*shape), torch.empty(shape, device=device, dtype=BF16)
    other = None if work in ("rms", "short") else rand(*shape)
    if work == "l2":
        r = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).square().add(EPS["l2"]).rsqrt()
        return Data(x, other, None, r, out)
    return Data(x, other, rand(shape[1]), None, out)


def wanted(work: str, d: Data) -> Tensor:
    """By the formulas, in float64."""
    x, eps = d.x.double(), EPS[work]
    if work == "l2":
        assert d.other is not None
        r = (x.square().sum(1, keepdim=True) + eps).rsqrt()
        u, dy = x * r, d.other.double()
        return (dy - u * (dy * u).sum(1, keepdim=True)) * r
    assert d.w is not None
    y = x * (x.square().mean(1, keepdim=True) + eps).rsqrt() * d.w.double()
    return y if d.other is None else y * torch.nn.functional.silu(d.other.double())


def error(got: Tensor, want: Tensor) -> float:
    e = float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
    return e if e == e else float("inf")


def _words(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.view(WORD)


def lines(t: Tensor, rows: int) -> Any:
    """A descriptor of tiles of so many rows."""
    from slipstream.kernels.primitives.gluon_compat import TensorDescriptor, gl

    v = t.view(WORD).view(-1, 32)
    block = [rows * t.shape[1] // 64, 32]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.int32)
    return TensorDescriptor(v, v.shape, v.stride(), block, layout)


def with_tile(work: str, t: Try, d: Data) -> Callable[[], Tensor]:
    """What is called, but for its tile."""
    n = NormOptions(EPS[work], l2=work == "l2")
    chosen = Tile(t.rows, d.x.shape[1], t.warps, 0, 1, t.options["lean"])
    place = mock.patch.object(norm_launch, "_tile", return_value=chosen)
    if work == "l2":
        assert d.r is not None and d.other is not None
        given = d.other, None, d.x, None, None, None, d.r[None], None, n, False, False

        def back() -> Tensor:
            with place:
                return norm_launch.backward(*given).x

        return back
    with place:
        run = norm_launch._Forward(d.x, None, n, False)

    def forward() -> Tensor:
        run(d.x, None, d.w, None, d.other, d.out, None, None)
        return d.out

    return forward


def launch(work: str, t: Try, d: Data, processors: int) -> Callable[[], Any]:
    """A call that computes d.out, or its result."""
    from slipstream.runtime.launch_cache import cached

    if not t.kernel:
        return with_tile(work, t, d)

    R, D = d.x.shape
    count, eps = R // (2 * t.rows if "pairs" in t.kernel else t.rows), EPS[work]
    grid = (min(t.per * processors, count) if t.per else count,)
    last = {**t.options, "num_warps": t.warps}
    if t.registers:
        last["maxnreg"] = t.registers
    x, g, w, out = (_words(y) for y in (d.x, d.other, d.w, d.out))
    if "tma" in t.kernel or "ring" in t.kernel or "warps" in t.kernel:
        import norm_tries_tma as kernels

        last["WARPS"] = t.warps
        if "warps" in t.kernel:
            args: tuple = (x, g, w, out, eps, D // 2, t.rows)
        else:
            x, g, out = (None if y is None else lines(y, t.rows) for y in (d.x, d.other, d.out))
            args = (x, g, out, eps, t.rows) if work == "l2" else (x, g, w, out, eps, t.rows)
            if "ring" in t.kernel:
                args = (x, g, w, out, count, eps, t.rows)
    else:
        import norm_tries_rows as kernels

        if work == "l2":
            args = (x, g, out, 0, eps) if "pairs" in t.kernel else (x, g, d.r, out, eps)
        else:
            args = (x, g, w, out, R, eps) if t.per else (x, g, w, out, 0, eps)
        args = (*args, D // 2, t.rows)
    kernel = cached(getattr(kernels, t.kernel))
    return lambda: kernel[grid](*args, **last)


def called(work: str, d: Data, norm: Callable[..., Tensor]) -> Callable[[], Tensor]:
    """An operator or a peer's: forward, or l2's backward."""
    if work != "l2":
        given = [y for y in (d.x, d.other, d.w) if y is not None]

        def forward() -> Tensor:
            with torch.no_grad():
                return norm(*given)

        return forward
    x = d.x.detach().requires_grad_()
    y = norm(x)
    return lambda: torch.autograd.grad(y, x, d.other, retain_graph=True)[0]


def peers(work: str) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    from blocks_times import providers

    ours = {"gated": rms_norm_gated, "l2": l2_norm}.get(work, rms_norm)
    yield "ours", ours
    name = ours.__name__
    for who, known in providers(["fla", "liger"]).items():
        if name in known:
            yield who, known[name]


def ways(work: str, d: Data) -> Iterator[tuple[str, Callable[[], Callable[[], Tensor]]]]:
    """Names, and what makes a call."""
    for who, norm in peers(work):
        yield who, partial(called, work, d, norm)
    processors = torch.cuda.get_device_properties(d.x.device).multi_processor_count
    for t in TRIES[work]:

        def make(t: Try = t) -> Callable[[], Tensor]:
            call = launch(work, t, d, processors)

            def run() -> Tensor:
                made = call()
                return made if isinstance(made, Tensor) else d.out

            return run

        yield t.name, make


def right(work: str, d: Data) -> tuple[dict[str, Callable[[], Tensor]], bool]:
    """The ways whose results are right, and whether that is all of them."""
    want, good, every = wanted(work, d), {}, True
    for name, make in ways(work, d):
        d.out.fill_(float("nan"))
        try:
            call = make()
            e = error(call(), want)
            said = "" if e <= LIMIT else f"WRONG by {e:.1e}"
        except Exception as fault:  # too many resources is a row too
            said = f"{type(fault).__name__}: {fault}"[:100]
        if said:
            every = False
            print(f"{work} {name}: {said}", flush=True)
        else:
            good[name] = call
    return good, every


def times(work: str, d: Data) -> None:
    ways, _ = right(work, d)
    found = dict(zip(ways, turns(list(ways.values()), RUNS), strict=True))
    tb = UNITS[work] * d.x.numel() * 2 / 1e9  # by ms
    peer = found.get("fla", found["ours"])
    rows = []
    for name, ms in found.items():
        low, middle, high = quantiles(ms, n=4)
        ratio = quantiles([p / x for p, x in zip(peer, ms, strict=True)], n=4)
        rows.append({
            "work": work, "shape": "x".join(map(str, d.x.shape)), "way": name,
            "ms": f"{middle:.4f}", "tbs": f"{tb / middle:.3f}",
            "tbs_quartiles": f"{tb / high:.2f} {tb / low:.2f}", "of_fla": f"{ratio[1]:.4f}",
            "of_fla_quartiles": f"{ratio[0]:.3f} {ratio[2]:.3f}",
        })  # fmt: skip
    rows.sort(key=lambda r: -float(r["of_fla"]))
    print(table(rows), flush=True)
    record("norm_tries", rows)


def compiled_ahead(work: str) -> bool:
    """Registers, spills and how many programs a multiprocessor holds, of each try."""
    from slipstream.compiler.trace import trace

    fine = True
    for t in TRIES[work]:
        job, *others = trace(
            lambda device, t=t: launch(work, t, data(work, device, SHAPES[work]), 132)(),
            "sm_90", backward=False,
        )  # fmt: skip
        assert not others, others
        c = job.compile()
        most = min(
            65536 // (-(-c.registers // 8) * 8 * 32 * t.warps), 64 // t.warps, 32,
            SHARED // (c.shared + RESERVED),
        )  # fmt: skip
        fine &= c.stack == 0
        print(
            f"{work:5} {t.name:42} registers {c.registers:3} stack {c.stack:3} shared "
            f"{c.shared:6} programs {most:2} rows {most * t.rows}", flush=True,
        )  # fmt: skip
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--aot", action="store_true")
    parser.add_argument("--only", default="", type=re.compile)
    options = parser.parse_args()
    torch.manual_seed(0)
    fine = True
    for work, shape in SHAPES.items():
        if not options.only.search(work):
            continue
        if options.aot:
            fine &= compiled_ahead(work)
            continue
        d = data(work, "cuda", shape)
        if options.check:
            good, every = right(work, d)
            print(f"{work}: {len(good)} ways are right", flush=True)
            fine &= every
        else:
            times(work, d)
        del d
        torch.cuda.empty_cache()
    raise SystemExit(0 if fine else "a way is wrong, spills or does not run")


if __name__ == "__main__":
    main()
