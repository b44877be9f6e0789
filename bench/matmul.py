"""The matmul beside cuBLAS: chosen kernels, and of few rows each kernel.

    python bench/matmul.py
    python bench/matmul.py --only '8192x.*bfloat16 nt'

Layouts: a as [M, K] by rows (n) or by columns (t), then b as [K, N]. ms and TFLOP/s are of the
device, in turns with cuBLAS; called: cuBLAS's time over ours where the host's time counts too. The
error is against float64, of 256 rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from harness import BF16, DEVICE, Call, Measurement, Report, error, first, in_turns, parser
from torch import Tensor

from slipstream.kernels.matmul.config import FP8
from slipstream.ops.matmul import matmul

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


def rows(case: tuple, report: Report) -> Iterator[Mapping[str, object]]:
    M, N, K, dtype, layout, precision = case
    name = f"{M}x{N}x{K}"
    if report.options.small:
        M, N, K = (min(x, 64) for x in (M, N, K))
    a, b = factors(M, N, K, dtype, layout)
    peer = library(a, b, precision)
    precision = precision or "tf32x3"
    given: dict[str, Any] = {"precision": precision}
    calls: dict[str, Call] = {"chosen": partial(matmul, a, b, **given)}
    if M < FEW_ROWS and DEVICE.type == "cuda":
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
    report, works = Report(parser(__doc__).parse_args(argv)), list[Measurement]()
    for case in CASES:
        M, N, K, dtype, layout, _ = case
        if DEVICE.type != "cpu" or dtype not in FP8:
            name = f"{M}x{N}x{K} {str(dtype)[6:]} {layout}"
            works.append((name, "matmul_gpu", partial(rows, case, report)))
    report.measure(works)


if __name__ == "__main__":
    main()
