"""Other ways to compute three of the norms, each beside what is called and beside fla's kernels.

python bench/norm_tries.py           # right by float64, then times in turns, to a CSV
python bench/norm_tries.py --check   # right only, which compiles them all
python bench/norm_tries.py --aot     # compiled for sm_90 without a GPU: registers, spills
    --only REGEX                     # of the works: rms, gated, l2

All take turns, so that a ratio is the median over turns of the peer's time over one's own.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from ahead import turns
from record import record, table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipstream.ops.norm import l2_norm, rms_norm, rms_norm_gated

BF16, WORD = torch.bfloat16, torch.int32
EPS = {"rms": 1e-5, "gated": 1e-5, "l2": 1e-6}
SHAPES = {"rms": (8192, 16384), "gated": (32768, 2048), "l2": (262144, 128)}
# tensors that must move
UNITS = {"rms": 2, "gated": 3, "l2": 3}
# relative RMS error of bf16 results; what rounding alone leaves is 1.7e-3
LIMIT = 2.5e-3
RUNS = 101
# of shared memory that a program takes beside its own, and what there is
RESERVED, SHARED = 1024, 233472


@dataclass(frozen=True)
class Try:
    """kernel: of norm_tries_rows, or of norm_tries_tma if it takes TMA or warps. rows: of a tile.
    per: programs a multiprocessor of a walk, 0: a program a tile. registers: at most."""

    name: str
    kernel: str
    warps: int
    rows: int = 1
    per: int = 0
    registers: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


def row(name: str, warps: int, rows: int = 1, registers: int | None = None, **options: Any) -> Try:
    options = {"EARLY": False, "LEAN": True, "APART": 1, "LOAD": "", "STORE": "", **options}
    return Try(name, "norm_rows_kernel", warps, rows, registers=registers, options=options)


def walk(
    name: str, warps: int, per: int, rows: int = 1, registers: int | None = None, **options: Any
) -> Try:
    options = {"BLOCKED": False, "LOAD": "", "STORE": "", **options}
    return Try(name, "norm_walk_kernel", warps, rows, per, registers, options)


def by_tma(
    name: str, warps: int, rows: int = 1, pieces: int = 1, registers: int | None = None
) -> Try:
    return Try(name, "norm_tma_kernel", warps, rows, 0, registers, {"PIECES": pieces})


def ring(name: str, warps: int, per: int, slots: int, rows: int = 1, lag: int = 1) -> Try:
    return Try(name, "norm_ring_kernel", warps, rows, per, options={"SLOTS": slots, "LAG": lag})


def l2_rows(name: str, warps: int, rows: int, again: bool = True, **options: Any) -> Try:
    options = {"AGAIN": again, "LOAD": "", "STORE": "", **options}
    return Try(name, "l2_rows_kernel", warps, rows, options=options)


def l2_walk(name: str, warps: int, rows: int, per: int, **options: Any) -> Try:
    options = {"LOAD": "", "STORE": "", **options}
    return Try(name, "l2_walk_kernel", warps, rows, per, options=options)


TRIES: dict[str, list[Try]] = {
    "rms": [
        row("float32, no mask, 16 warps", 16, LEAN=False),
        row("words, 16 warps, 40 registers", 16, registers=40),
        row("words, 8 warps", 8),
        row("words, 8 warps, w early", 8, registers=80, EARLY=True),
        row("words, 4 warps", 4),
        row("words, 16 warps, two rows", 16, 2, 64),
        row("words, 8 warps, x .cg", 8, LOAD="cg"),
        row("words, 8 warps, x y evict first", 8, LOAD="first", STORE="first"),
        row("words, 8 warps, y evict first", 8, STORE="first"),
        row("words, 8 warps, y .wt", 8, STORE="wt"),
        row("words, 8 warps, rows apart", 8, APART=64),
        walk("next row in registers, 16 warps", 16, 2, registers=64),
        walk("next row in registers, 8 warps", 8, 2),
        walk("next row in registers, 8 warps, blocks", 8, 2, BLOCKED=True),
        by_tma("TMA, 4 warps, 4 pieces", 4, 1, 4, 80),
        by_tma("TMA, 8 warps, 2 pieces", 8, 1, 2, 64),
        by_tma("TMA, 8 warps, 4 pieces", 8, 1, 4, 40),
        ring("TMA ring of 3, two a processor", 8, 2, 3),
        ring("TMA ring of 6", 16, 1, 6, lag=2),
    ],
    "gated": [
        row("float32, no mask, w late", 4, LEAN=False),
        row("float32, no mask, 8 warps", 8, LEAN=False),
        row("words, 4 warps", 4),
        row("words, 2 warps", 2),
        row("words, 4 warps, w early", 4, EARLY=True),
        row("words, 4 warps, two rows", 4, 2),
        row("words, 8 warps, four rows", 8, 4),
        row("words, 4 warps, all evict first", 4, LOAD="first", STORE="first"),
        row("words, 4 warps, y evict first", 4, STORE="first"),
        row("words, 4 warps, x .cg", 4, LOAD="cg"),
        row("words, 4 warps, rows apart", 4, APART=64),
        Try("a warp a row, 4 warps", "norm_warps_kernel", 4, 4),
        Try("a warp a row, 2 warps", "norm_warps_kernel", 2, 2),
        walk("next row in registers, 4 warps", 4, 8),
        walk("next two rows in registers, 8 warps", 8, 4, 2),
        by_tma("TMA, 4 warps", 4),
        by_tma("TMA, 4 warps, two rows", 4, 2),
        by_tma("TMA, 8 warps, four rows", 8, 4),
        ring("TMA ring of 4, four rows", 8, 1, 4, 4, 2),
        ring("TMA ring of 4, two rows, three a processor", 8, 3, 4, 2, 2),
    ],
    "l2": [
        l2_rows("no mask, 16 rows, 8 warps", 8, 16, again=False),
        l2_rows("r again, 16 rows, 8 warps", 8, 16),
        l2_rows("r again, 16 rows, 4 warps", 4, 16),
        l2_rows("r again, 32 rows, 8 warps", 8, 32),
        l2_rows("r again, 8 rows, 4 warps", 4, 8),
        l2_rows("r again, 64 rows, 8 warps", 8, 64),
        l2_rows("r again, all evict first", 4, 16, LOAD="first", STORE="first"),
        l2_rows("r again, dx evict first", 4, 16, STORE="first"),
        l2_rows("r again, x dy .cg", 4, 16, LOAD="cg"),
        l2_walk("next rows in registers, 32, 4 warps", 4, 32, 7),
        l2_walk("next rows in registers, 16, 4 warps", 4, 16, 12),
        Try("TMA, 32 rows, 4 warps", "l2_tma_kernel", 4, 32),
        Try("TMA, 64 rows, 4 warps", "l2_tma_kernel", 4, 64),
        Try("TMA, 64 rows, 8 warps", "l2_tma_kernel", 8, 64),
    ],
}


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
    other = None if work == "rms" else rand(*shape)
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
    from slipstream.kernels.gluon import TensorDescriptor, gl

    v = t.view(WORD).view(-1, 32)
    block = [rows * t.shape[1] // 64, 32]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.int32)
    return TensorDescriptor(v, v.shape, v.stride(), block, layout)


def launch(work: str, t: Try, d: Data, processors: int) -> Callable[[], Any]:
    """A call that computes d.out."""
    from slipstream.kernels.kept import kept

    R, D = d.x.shape
    count, eps = R // t.rows, EPS[work]
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
            args = (x, g, out, R, eps) if t.per else (x, g, d.r, out, eps)
        else:
            args = (x, g, w, out, R, eps) if t.per else (x, g, w, out, eps)
        args = (*args, D // 2, t.rows)
    kernel = kept(getattr(kernels, t.kernel))
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
    ours = {"rms": rms_norm, "gated": rms_norm_gated, "l2": l2_norm}
    yield "ours", ours[work]
    from blocks_times import providers

    name = {"rms": "rms_norm", "gated": "rms_norm_gated", "l2": "l2_norm"}[work]
    for who, known in providers(["fla", "liger"]).items():
        if name in known:
            yield who, known[name]


def ways(work: str, d: Data) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for who, norm in peers(work):
        yield who, called(work, d, norm)
    processors = torch.cuda.get_device_properties(d.x.device).multi_processor_count
    for t in TRIES[work]:

        def run(call: Callable[[], Any]) -> Tensor:
            call()
            return d.out

        yield t.name, partial(run, launch(work, t, d, processors))


def right(work: str, d: Data) -> tuple[dict[str, Callable[[], Tensor]], bool]:
    """The ways whose results are right, and whether that is all of them."""
    want, good, every = wanted(work, d), {}, True
    for name, call in ways(work, d):
        d.out.fill_(float("nan"))
        try:
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
    from slipstream.core.trace import trace

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
