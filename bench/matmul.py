"""The matmul beside cuBLAS.

    python bench/matmul.py                        chosen kernels, and of few rows each kernel
    python bench/matmul.py --tiles                configurations beside the chosen one and cuBLAS
    python bench/matmul.py --only '8192x.*bfloat16 nt'

Layouts: a as [M, K] by rows (n) or by columns (t), then b as [K, N]. ms and TFLOP/s are of the
device, in turns with cuBLAS; called: cuBLAS's time over ours where the host's time counts too. The
error is against float64, of 256 rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from harness import (
    BF16,
    DEVICE,
    Call,
    Measurement,
    Report,
    error,
    first,
    in_turns,
    parser,
)
from torch import Tensor

from slipstream.kernels.matmul import config as tiles
from slipstream.kernels.matmul import op
from slipstream.kernels.matmul.inputs import FP8
from slipstream.ops.matmul import MatmulConfig, matmul

FP32, E4M3 = torch.float32, torch.float8_e4m3fn
# M, N, K, dtype, layout, precision of float32
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
FEW_ROWS = 1024
WRONG = 0.01


def factors(M: int, N: int, K: int, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(x, device=DEVICE) for x in ((M, K), (K, N)))
    a = a.to(dtype) if layout[0] == "n" else a.t().contiguous().to(dtype).t()
    return a, b.to(dtype) if layout[1] == "n" else b.t().contiguous().to(dtype).t()


def library(a: Tensor, b: Tensor, precision: str) -> Call:
    if a.dtype in FP8:
        one = torch.ones((), device=DEVICE)
        scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        return lambda: scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True
        )
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    return lambda: torch.matmul(a, b)


def in_a_row(call: Call, count: int) -> Call:
    return lambda: [call() for _ in range(count)]


def configurations(problem: tiles.Problem, M: int, N: int) -> Iterator[MatmulConfig]:
    if M < FEW_ROWS:
        for bm, bn, deep, warps, stages in (
            (64, 64, 256, 4, 4), (64, 64, 512, 4, 3), (64, 128, 128, 4, 4), (64, 128, 256, 4, 3),
            (128, 64, 128, 4, 5), (128, 64, 256, 4, 3), (128, 128, 128, 4, 4),
            (128, 128, 256, 8, 3), (128, 256, 128, 8, 4),
        ):  # fmt: skip
            for split in (1, 2, 4, 8):
                if 64 <= -(-M // bm) * -(-N // bn) * split <= 264 and bm <= max(M, 64):
                    deep_k = deep // problem.size
                    yield MatmulConfig(bm, bn, deep_k, warps, stages, split_k=split)
        return
    for bn, stages in ((256, 4), (256, 3), (128, 6), (128, 5), (128, 4)):
        for group in (4, 8, 16) if stages in (4, 6) else (8,):
            yield MatmulConfig(128, bn, 128 // problem.size, 8, stages, group, "tma")
    for bm, bn, warps in ((128, 256, 8), (128, 128, 4), (128, 128, 8)):
        for stages in (3, 4):
            yield MatmulConfig(bm, bn, 128 // problem.size, warps, stages)


def rows(case: tuple, report: Report, with_tiles: bool) -> Iterator[Mapping[str, object]]:
    M, N, K, dtype, layout, precision = case
    name = f"{M}x{N}x{K}"
    if report.options.small:
        M, N, K = (min(x, 64) for x in (M, N, K))
    a, b = factors(M, N, K, dtype, layout)
    peer = library(a, b, precision)
    precision = precision or "tf32x3"
    given: dict[str, Any] = {"precision": precision}
    calls: dict[str, Call] = {"chosen": partial(matmul, a, b, **given)}
    if with_tiles and DEVICE.type == "cuda":
        out = BF16 if dtype in FP8 else dtype
        problem = tiles.Problem(dtype, out, precision, layout[0] == "t", layout[1] == "t")
        arch = op.arch_of(DEVICE)
        for c in configurations(problem, M, N):
            if tiles.violation(c, problem, arch) is None:
                calls[" ".join(map(str, asdict(c).values()))] = partial(
                    matmul, a, b, config=c, **given
                )
    elif M < FEW_ROWS and DEVICE.type == "cuda":
        calls |= {x: partial(matmul, a, b, impl=x, **given) for x in ("sm90", "triton")}
    want = a[:256].double() @ b.double()
    flops = 2e-9 * M * N * K
    for impl, call in calls.items():
        row: dict[str, object] = {"shape": name, "dtype": str(dtype)[6:], "layout": layout}
        row |= {"impl": impl, "precision": precision}
        try:
            row["first_s"] = f"{first(call):.2f}"
            off = error(call()[:256], want)
        except Exception as e:
            print(f"{name} {impl}: {type(e).__name__}: {str(e)[:110]}")
            continue
        if not report.options.once:
            ms, base = in_turns({"ours": call, "library": peer}, report.runs(20)).values()
            row |= {"ms": f"{ms:.4f}", "tflops": f"{flops / ms:.0f}"}
            row |= {"library": f"{flops / base:.0f}", "ratio": f"{base / ms:.3f}"}
            called = [first(in_a_row(x, report.runs(50))) for x in (peer, call)]
            row |= {"called": f"{called[0] / called[1]:.3f}"}
        yield row | {"error": f"{off:.1e}{'' if off <= WRONG else ' WRONG'}"}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--tiles", action="store_true", help="other configurations too")
    given = options.parse_args(argv)
    report, works = Report(given), list[Measurement]()
    file = "matmul_sweep" if given.tiles else "matmul_gpu"
    for case in CASES:
        M, N, K, dtype, layout, _ = case
        if DEVICE.type != "cpu" or dtype not in FP8:
            name = f"{M}x{N}x{K} {str(dtype)[6:]} {layout}"
            works.append((name, file, partial(rows, case, report, given.tiles)))
    report.measure(works)


if __name__ == "__main__":
    main()
