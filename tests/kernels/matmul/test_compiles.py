"""The matmul kernels compiled for GPUs that need not be there: matrix instructions, spills, shared
memory no more than what a configuration is checked against."""

from typing import Any

import pytest
import torch

from slipstream.compiler import arch as arches
from slipstream.compiler.aot import Compiled
from slipstream.compiler.trace import trace
from slipstream.kernels.matmul.config import MatmulConfig, Problem, check, choose, shared_bytes
from slipstream.ops.matmul import matmul
from tests.support import wants

pytestmark = wants.triton
BF16 = Problem(torch.bfloat16, torch.bfloat16, "tf32x3", b_t=True)
FP32 = Problem(torch.float32, torch.float32, "tf32", b_t=True)
ROWS = Problem(torch.float32, torch.float32, "tf32")
COLUMNS = Problem(torch.float32, torch.float32, "tf32", a_t=True, b_t=True)
FP8 = Problem(torch.float8_e4m3fn, torch.bfloat16, "tf32x3", b_t=True)
FP16 = Problem(torch.float16, torch.float16, "tf32x3", a_t=True)
X3 = Problem(torch.float32, torch.float32, "tf32x3")


def compiled(
    p: Problem, arch: str, sizes: tuple[int, int, int], c: MatmulConfig | None, whole: bool = False
) -> dict[str, Compiled]:
    """The kernels of a product, by their names; whole: with everything that may go on with it."""
    M, N, K = sizes

    def call(device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype = p.out_dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        a = empty(K, M, dtype=p.dtype).t() if p.a_t else empty(M, K, dtype=p.dtype)
        b = empty(N, K, dtype=p.dtype).t() if p.b_t else empty(K, N, dtype=p.dtype)
        options: dict[str, Any] = {"precision": p.precision or "tf32x3", "out_dtype": p.out_dtype}
        if whole:
            fp32 = torch.float32
            options |= {"bias": empty(N), "residual": empty(M, N), "activation": "silu"}
            options |= {"scale_a": empty(M, dtype=fp32), "scale_b": empty(N, dtype=fp32)}
        impl = "sm90" if c is not None and c.kernel == "tma" else "triton"
        matmul(a, b, **options, config=c, impl=impl)

    return {job.name: job.compile() for job in trace(call, arch, backward=False)}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
@pytest.mark.sample(which=lambda arch, precision: arch == "sm_90" or precision == "tf32x3")
def test_float32_128x32x32_compiles(arch: str, precision: str) -> None:
    """The tile that took the process down elsewhere, its b row by row and column by column."""
    c = MatmulConfig(block_m=128, block_n=32, block_k=32)
    for b_t in (False, True):
        p = Problem(torch.float32, torch.float32, precision, b_t=b_t)
        here = arches.named(arch)
        check(c, p, here)
        (got,) = compiled(p, arch, (512, 512, 512), c).values()
        assert got.stack == 0 and got.shared <= shared_bytes(c, p, here)
        assert got.instructions[p.instruction(c, here) or "fma"] > 0


@pytest.mark.parametrize(
    ("arch", "p"),
    [("sm_86", BF16), *((arch, p) for arch in ("sm_80", "sm_90") for p in (BF16, FP16, FP32, X3))],
)
def test_default_pointer_tiles_compile(arch: str, p: Problem) -> None:
    here = arches.named(arch)
    sizes = 1 << 14, 1 << 14, 1 << 14
    c = choose(p, here, *sizes, False)
    (got,) = compiled(p, arch, sizes, c, whole=True).values()
    assert got.instructions[p.instruction(c, here) or "fma"] > 0
    assert got.shared <= here.shared


@pytest.mark.parametrize(("M", "N"), [(64, 4096), (128, 2048)])
@pytest.mark.parametrize("p", [BF16, FP8])
def test_shared_tiles_compile(p: Problem, M: int, N: int) -> None:
    here = arches.named("sm_90")
    c = choose(p, here, M, N, 4096, False)
    made = compiled(p, "sm_90", (M, N, 4096), c, whole=True)
    got, summed = made["matmul_kernel"], made["matmul_sum_kernel"]
    assert c.split_k > 1 and got.stack == 0 and got.shared <= shared_bytes(c, p, here)
    assert got.instructions["wgmma"] > 0
    assert summed.stack == 0 and "griddepcontrol.wait" in summed.ptx


@pytest.mark.parametrize("N", [64, 200, 1 << 14])
@pytest.mark.parametrize(
    "p", [BF16, Problem(torch.bfloat16, torch.float32, "", a_t=True), FP32, ROWS, COLUMNS, FP8]
)
@pytest.mark.sample(which=lambda p, N: N == 200 or p in (BF16, ROWS))
def test_tma_kernel_compiles(p: Problem, N: int) -> None:
    here = arches.named("sm_90")
    sizes = 1 << 14 if N > 200 else 100, N, 1 << 14
    c = choose(p, here, *sizes, True)
    (got,) = compiled(p, "sm_90", sizes, c, whole=p is BF16).values()
    assert got.stack == 0 and got.instructions["wgmma"] == 8 and got.instructions["tma"] > 0
    assert got.shared <= shared_bytes(c, p, here) + 128 <= here.shared
