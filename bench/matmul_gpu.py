"""The matmul on a GPU: right, then how fast beside the library's, then which tile is best.

python bench/matmul_gpu.py            # --check and --times
python bench/matmul_gpu.py --sweep    # tiles of both kernels, their numbers checked, to a CSV
python bench/matmul_gpu.py --few      # of few rows
    --only REGEX                      # of what is checked, of the shapes that are timed
"""

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ahead import ahead, in_turns
from record import record
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipstream.kernels.matmul import config as tiles
from slipstream.kernels.matmul import op
from slipstream.kernels.matmul.inputs import FP8
from slipstream.ops.matmul import MatmulConfig, matmul

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# relative RMS error by dtype, and of tf32
LIMITS = {BF16: 0.004, FP16: 6e-4, FP32: 3e-6, E4M3: 0.005, torch.float8_e5m2: 0.005}
TF32 = 1.5e-3


def rand(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def error(got: Tensor, want: Tensor) -> float:
    size = want.double().square().mean().sqrt().item()
    return (got.double() - want.double()).square().mean().sqrt().item() / max(size, 1e-300)


def limit(dtype: torch.dtype, precision: str) -> float:
    return TF32 if dtype == FP32 and precision == "tf32" else LIMITS[dtype]


def factors(M: int, N: int, K: int, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    """layout: a as [M, K] rows (n) or columns (t), then b as [K, N] rows (n) or columns (t)."""
    a, b = rand(M, K), rand(K, N)
    a = a.to(dtype) if layout[0] == "n" else a.t().contiguous().to(dtype).t()
    return a, b.to(dtype) if layout[1] == "n" else b.t().contiguous().to(dtype).t()


SHAPES = [(256, 512, 256), (1000, 776, 328), (129, 264, 4096), (37, 48, 64), (515, 200, 104)]
ODD = [(1000, 776, 328), (257, 33, 79), (100, 100, 100)]


def checks(only: re.Pattern[str]) -> Iterator[tuple[str, float]]:
    """What, and its error as a part of what is allowed."""
    for dtype, precision in (
        (BF16, "tf32x3"), (FP16, "tf32x3"), (FP32, "tf32"), (FP32, "tf32x3"), (FP32, "ieee"),
        (E4M3, "tf32x3"), (torch.float8_e5m2, "tf32x3"),
    ):  # fmt: skip
        for impl in ("sm90", "triton"):
            if impl == "sm90" and dtype == FP32 and precision != "tf32":
                continue
            if not only.search(f"{impl} {str(dtype)[6:]} {precision}"):
                continue
            worst, where = 0.0, ""
            # each layout is a kernel to compile; 16-bit ones of both kernels in all of them
            layouts = ("nn", "nt", "tn", "tt") if dtype in (BF16, FP32) else ("nt", "nn")
            if dtype == FP32 and impl == "triton":
                layouts = ("nn", "tt")
            for M, N, K in SHAPES if impl == "sm90" else ODD:
                K += -K % 16 if dtype in FP8 else 0
                for layout in layouts:
                    a, b = factors(M, N, K, dtype, layout)
                    text = ""
                    try:
                        got = matmul(a, b, precision=precision, impl=impl)
                        e = error(got, a.double() @ b.double()) / limit(dtype, precision)
                        # a call like the second is made of what it left
                        again = [matmul(a, b, precision=precision, impl=impl) for _ in range(2)]
                        same = all(torch.equal(got, x) for x in again)
                        e = e if e == e and same else float("inf")
                    except Exception as fault:
                        e, text = float("inf"), f"{type(fault).__name__} {str(fault)[:90]}"
                    if not e <= worst:
                        worst, where = e, f"{M, N, K} {layout} {text}"
            yield f"{impl} {str(dtype)[6:]} {precision} worst at {where}", worst
    for what, part in {
        "hopper bias, scales, silu, residual": lambda: epilogue("sm90"),
        "hopper tf32, b by rows, bias, scales, silu, residual": lambda: epilogue("sm90", FP32),
        "triton bias, scales, silu, residual": lambda: epilogue("triton"),
        "few rows bias, scales, silu, residual": lambda: epilogue(None, BF16, 100, 2048),
        "few rows": few_rows,
        "gradients bf16": gradients,
        "float32 128x32x32": old_failure,
        "more than 2^31 elements": huge,
    }.items():
        if not only.search(what):
            continue
        try:
            yield what, part()
        except Exception as fault:  # the others go on
            yield f"{what}: {type(fault).__name__} {str(fault)[:110]}", float("inf")


def old_failure() -> float:
    a, b = rand(300, 96), rand(96, 80)
    got = matmul(a, b, config=MatmulConfig(block_m=128, block_n=32, block_k=32))
    return error(got, a.double() @ b.double()) / LIMITS[FP32]


def huge() -> float:
    a, b = rand(1 << 21, 64, dtype=BF16), rand(64, 1032, dtype=BF16)
    return error(matmul(a, b)[-300:], a[-300:].double() @ b.double()) / LIMITS[BF16]


def epilogue(impl: str | None, dtype: torch.dtype = BF16, M: int = 700, K: int = 320) -> float:
    a, b = factors(M, 264, K, dtype, "nn" if dtype == FP32 else "nt")
    bias, residual, sa, sb = rand(264), rand(M, 264, dtype=dtype), rand(M), rand(264)
    given: dict[str, Any] = {"bias": bias.to(dtype), "residual": residual}
    same: dict[str, Any] = {"scale_a": sa, "scale_b": sb, "activation": "silu"}
    got = matmul(a, b, **given, **same, precision="tf32", impl=impl)
    given = {n: x.double() for n, x in given.items()}
    want = matmul(a.double(), b.double(), **given, **same, impl="reference")
    return error(got, want) / limit(dtype, "tf32")


def few_rows() -> float:
    """By whatever is chosen; twice."""
    worst = 0.0
    for dtype, layout in ((BF16, "nt"), (BF16, "nn"), (FP32, "nt"), (FP32, "nn"), (E4M3, "nt")):
        for M, N, K in ((1, 1040, 1600), (33, 520, 4096), (100, 2064, 1056), (128, 4096, 4096)):
            a, b = factors(M, N, K, dtype, layout)
            for precision in ("tf32", "tf32x3") if dtype == FP32 else ("tf32x3",):
                got = matmul(a, b, precision=precision)
                e = error(got, a.double() @ b.double()) / limit(dtype, precision)
                again = [matmul(a, b, precision=precision) for _ in range(2)]
                same = all(torch.equal(got, x) for x in again)
                worst = max(worst, e if same and e == e else float("inf"))
    return worst


def gradients() -> float:
    a, b = (x.requires_grad_() for x in factors(520, 264, 328, BF16, "nt"))
    dy = rand(520, 264, dtype=BF16)
    da, db = torch.autograd.grad(matmul(a, b), (a, b), dy)
    want = dy.double() @ b.double().t(), a.double().t() @ dy.double()
    return max(error(da, want[0]), error(db, want[1])) / LIMITS[BF16]


def bench(fn: Callable[[], Any], rep: int = 60) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=20, rep=rep, return_mode="median")


def peer(a: Tensor, b: Tensor, precision: str) -> Callable[[], Tensor]:
    if a.dtype in FP8:
        one = torch.ones((), device="cuda")
        scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        return lambda: scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True
        )
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    return lambda: torch.matmul(a, b)


CASES: list[tuple[int, int, int, torch.dtype, str, str]] = [
    (4096, 4096, 4096, BF16, "nt", ""),
    (4096, 4096, 4096, BF16, "nn", ""),
    (8192, 8192, 8192, BF16, "nt", ""),
    (8192, 8192, 8192, BF16, "nn", ""),
    (8192, 8192, 8192, BF16, "tn", ""),
    (8192, 8192, 8192, FP32, "nt", "tf32"),
    (8192, 8192, 8192, FP32, "nn", "tf32"),
    (8192, 8192, 8192, E4M3, "nt", ""),
    (4096, 4096, 4096, FP32, "nt", "tf32x3"),
    (8192, 2048, 2048, BF16, "nt", ""),
    (8192, 8192, 8192, FP32, "tt", "tf32"),
    *((M, 4096, 4096, BF16, "nt", "") for M in (1, 16, 64, 128, 256, 512)),
    (128, 4096, 4096, BF16, "nn", ""),
    (128, 4096, 4096, FP32, "nt", "tf32"),
    (128, 4096, 4096, E4M3, "nt", ""),
]


def times(only: re.Pattern[str]) -> None:
    """Of the device alone, and as called, where a slow host counts."""
    rows = []
    for M, N, K, dtype, layout, precision in CASES:
        if not only.search(f"{M}x{N}x{K} {str(dtype)[6:]} {layout}"):
            continue
        a, b = factors(M, N, K, dtype, layout)
        library = peer(a, b, precision)
        precision = precision or "tf32x3"
        row: dict[str, Any] = {"shape": f"{M}x{N}x{K}", "dtype": str(dtype)[6:], "layout": layout}
        impls = ("chosen", "sm90", "triton") if M < 1024 else ("chosen",)
        for impl in impls:
            row |= {"impl": impl, "precision": precision}
            named = None if impl == "chosen" else impl
            call = partial(matmul, a, b, precision=precision, impl=named)
            try:
                start = time.perf_counter()
                got = call()
                torch.cuda.synchronize()
                first = time.perf_counter() - start
                e = error(got[:256], a[:256].double() @ b.double())
                ms, base = in_turns([call, library])
                called = bench(call) / bench(library)
            except Exception as fault:
                print(f"{row['shape']} {impl}: {type(fault).__name__} {str(fault)[:110]}")
                continue
            tflops = 2e-9 * M * N * K
            row |= {"ms": f"{ms:.4f}", "tflops": f"{tflops / ms:.0f}"}
            row |= {"library": f"{tflops / base:.0f}", "ratio": f"{base / ms:.3f}"}
            row |= {"first_s": f"{first:.2f}", "error": f"{e:.1e}", "called": f"{1 / called:.3f}"}
            print("  ".join(str(x) for x in row.values()), flush=True)
            rows.append(dict(row))
    record("matmul_gpu", rows)
    a, b = factors(64, 64, 64, BF16, "nt")
    line = []
    for name, call in (
        ("matmul", lambda: matmul(a, b)),
        ("triton", lambda: matmul(a, b, impl="triton")),
        ("torch", lambda: torch.matmul(a, b)),
    ):
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        line.append(f"{name} {(time.perf_counter() - start) * 5e3:.0f}")
        torch.cuda.synchronize()
    print("host us a call:", ", ".join(line), flush=True)


def candidates(p: tiles.Problem) -> Iterator[MatmulConfig]:
    for bn, stages in ((256, 4), (256, 3), (128, 6), (128, 5), (128, 4)):
        for group in (4, 8, 16) if stages in (4, 6) else (8,):
            yield MatmulConfig(128, bn, 128 // p.size, 8, stages, group, "tma")
    for bm, bn, warps in ((128, 256, 8), (128, 128, 4), (128, 128, 8)):
        for stages in (3, 4):
            yield MatmulConfig(bm, bn, 128 // p.size, warps, stages)


SWEEP: list[tuple[int, int, int, torch.dtype, str]] = [
    (4096, 4096, 4096, BF16, ""),
    (8192, 8192, 8192, BF16, ""),
    (8192, 8192, 8192, FP32, "tf32"),
    (8192, 8192, 8192, E4M3, ""),
    (8192, 2048, 2048, BF16, ""),
]


def sweep() -> None:
    rows = []
    arch = op.arch_of(torch.device("cuda"))
    for M, N, K, dtype, precision in SWEEP:
        a, b = factors(M, N, K, dtype, "nt")
        some = slice(0, M, 61)
        want = a[some].double() @ b.double()
        precision = precision or "tf32x3"
        out = BF16 if dtype in FP8 else dtype
        p = tiles.Problem(dtype, out, precision, b_t=True)
        found = []
        for c in candidates(p):
            if tiles.violation(c, p, arch) is not None:
                continue
            call = partial(matmul, a, b, precision=precision, config=c)
            try:
                e = error(call()[some], want)
                ms = bench(call, rep=50) if e <= limit(dtype, precision) else float("inf")
            except Exception as fault:
                print(f"{c}: {type(fault).__name__} {str(fault)[:100]}", flush=True)
                continue
            where = {"shape": f"{M}x{N}x{K}", "dtype": str(dtype)[6:], "precision": precision}
            rows.append({**where, **asdict(c), "ms": f"{ms:.4f}", "error": f"{e:.1e}"})
            found.append((ms, c, e))
        found.sort(key=lambda x: x[0])
        for ms, c, e in [*found[:3], *(x for x in found[3:] if x[0] == float("inf"))]:
            print(f"{M}x{N}x{K} {str(dtype)[6:]}: {2e-9 * M * N * K / ms:.0f} TFLOP/s {e:.0e} {c}")
        default = tiles.choose(p, arch, M, N, K, True)
        today = next((ms for ms, c, _ in found if c == default), float("nan"))
        print(f"  today {2e-9 * M * N * K / today:.0f}", flush=True)
    record("matmul_sweep", rows)


FEW: list[tuple[int, int, int, torch.dtype, str]] = [
    (64, 4096, 4096, BF16, "nt"),
    (128, 4096, 4096, BF16, "nt"),
    (128, 4096, 4096, BF16, "nn"),
    (128, 4096, 14336, BF16, "nt"),
    (128, 4096, 4096, FP32, "nt"),
    (128, 4096, 4096, E4M3, "nt"),
]
# block_m, block_n, bytes of block_k, warps, stages
FEW_TILES = [
    (64, 64, 256, 4, 4), (64, 64, 512, 4, 3), (64, 128, 128, 4, 4), (64, 128, 256, 4, 3),
    (128, 64, 128, 4, 5), (128, 64, 256, 4, 3), (128, 128, 128, 4, 4), (128, 128, 256, 8, 3),
    (128, 256, 128, 8, 4),
]  # fmt: skip


def few() -> None:
    """Tiles and parts of K; beside the library's and the other kernel's."""
    rows = []
    for M, N, K, dtype, layout in FEW:
        a, b = factors(M, N, K, dtype, layout)
        want, precision = a.double() @ b.double(), "tf32"
        found = [(ahead(peer(a, b, precision)), "library")]
        found.append((ahead(partial(matmul, a, b, precision=precision, impl="sm90")), "tma"))
        found.append((ahead(partial(matmul, a, b, precision=precision)), "chosen"))
        for tile, splits in itertools.product(FEW_TILES, (1, 2, 4, 8)):
            bm, bn, deep, warps, stages = tile
            programs = -(-M // bm) * -(-N // bn) * splits
            if bm > max(M, 64) or not 64 <= programs <= 264:
                continue
            bk = deep // a.element_size()
            c = MatmulConfig(bm, bn, bk, warps, stages, split_k=splits)
            call = partial(matmul, a, b, precision=precision, config=c)
            try:
                e = error(call(), want)
                ms = ahead(call, 10) if e <= limit(dtype, precision) else float("inf")
            except Exception as fault:
                print(f"{c}: {type(fault).__name__} {str(fault)[:100]}", flush=True)
                continue
            found.append((ms, f"{(*tile, splits)}"))
            where = {"shape": f"{M}x{N}x{K}", "dtype": str(dtype)[6:], "layout": layout}
            rows.append({**where, **asdict(c), "ms": f"{ms:.4f}", "error": f"{e:.1e}"})
        best = ", ".join(f"{name} {ms * 1e3:.1f}" for ms, name in sorted(found[3:])[:5])
        other = ", ".join(f"{name} {ms * 1e3:.1f}" for ms, name in found[:3])
        print(f"{M}x{N}x{K} {str(dtype)[6:]} {layout} us: {other}; {best}", flush=True)
    record("matmul_sweep", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "times", "sweep", "few"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--only", default="", type=re.compile)
    options = parser.parse_args()
    everything = not (options.check or options.times or options.sweep or options.few)
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    fine = True
    if options.check or everything:
        for what, part in checks(options.only):
            fine = fine and part <= 1
            print(
                f"{'ok   ' if part <= 1 else 'WRONG'} {part:.2f} of the limit: {what}", flush=True
            )
    if options.times or everything:
        times(options.only)
    if options.sweep:
        sweep()
    if options.few:
        few()
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
