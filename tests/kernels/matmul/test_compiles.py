"""The matmul kernels compiled for GPUs that need not be there: matrix instructions, spills, shared
memory no more than what a configuration is checked against."""

from typing import Any

import pytest
import torch

from slipstream.compiler import arch as arches
from slipstream.compiler.aot import Compiled, compile_kernel
from slipstream.kernels.matmul.config import MatmulConfig, Problem, check, choose, shared_bytes
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}
BF16 = Problem(torch.bfloat16, torch.bfloat16, "tf32x3", b_t=True)
FP32 = Problem(torch.float32, torch.float32, "tf32", b_t=True)
ROWS = Problem(torch.float32, torch.float32, "tf32")
COLUMNS = Problem(torch.float32, torch.float32, "tf32", a_t=True, b_t=True)
FP8 = Problem(torch.float8_e4m3fn, torch.bfloat16, "tf32x3", b_t=True)
FP16 = Problem(torch.float16, torch.float16, "tf32x3", a_t=True)
X3 = Problem(torch.float32, torch.float32, "tf32x3")
ALL = {"bias_ptr": "*bf16", "r_ptr": "*bf16", "sa_ptr": "*fp32", "sb_ptr": "*fp32"}


def pointers(
    p: Problem, c: MatmulConfig, arch: str, extra: dict[str, str], f: str = ""
) -> Compiled:
    name, out = NAMES[p.dtype], NAMES[p.out_dtype]
    even: dict[str, Any] = dict.fromkeys(("EVEN_M", "EVEN_N", "EVEN_K"), True)
    sizes = {"BM": c.block_m, "BN": c.block_n, "BK": c.block_k, "GROUP": c.group_m}
    return compile_kernel(
        "slipstream.kernels.matmul.triton_kernels:matmul_kernel",
        {
            "a_ptr": f"*{name}",
            "b_ptr": f"*{name}",
            "out_ptr": "*fp32" if c.split_k > 1 else f"*{out}",
            **extra,
        },
        {
            **sizes,
            **even,
            "A_T": p.a_t,
            "B_T": p.b_t,
            "SPLIT": c.split_k > 1,
            "PDL": c.split_k > 1 and arch == "sm_90",
            "ACTIVATION": f,
            "PRECISION": p.precision,
        },
        scalars=dict.fromkeys(("a_stride", "b_stride", "r_stride"), "i32:16"),
        target=arch,
        warps=c.num_warps,
        stages=c.num_stages,
    )


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
        got = pointers(p, c, arch, {})
        assert got.stack == 0 and got.shared <= shared_bytes(c, p, here)
        assert got.instructions[p.instruction(c, here) or "fma"] > 0


@pytest.mark.parametrize(
    ("arch", "p"),
    [("sm_86", BF16), *((arch, p) for arch in ("sm_80", "sm_90") for p in (BF16, FP16, FP32, X3))],
)
def test_default_pointer_tiles_compile(arch: str, p: Problem) -> None:
    here = arches.named(arch)
    c = choose(p, here, 1 << 14, 1 << 14, 1 << 14, False)
    got = pointers(p, c, arch, ALL, "silu")
    assert got.instructions[p.instruction(c, here) or "fma"] > 0
    assert got.shared <= here.shared


@pytest.mark.parametrize(("M", "N"), [(64, 4096), (128, 2048)])
@pytest.mark.parametrize("p", [BF16, FP8])
def test_shared_tiles_compile(p: Problem, M: int, N: int) -> None:
    here = arches.named("sm_90")
    c = choose(p, here, M, N, 4096, False)
    got = pointers(p, c, "sm_90", {})
    assert c.split_k > 1 and got.stack == 0 and got.shared <= shared_bytes(c, p, here)
    assert got.instructions["wgmma"] > 0
    summed = compile_kernel(
        "slipstream.kernels.matmul.triton_kernels:matmul_sum_kernel",
        {"partial_ptr": "*fp32", "out_ptr": "*bf16", **ALL},
        {"BM": 1, "BN": 512, "MAX_SPLITS": 8, "EVEN_N": True, "PDL": True, "ACTIVATION": "silu"},
        scalars={"r_stride": "i32:16"},
        options={"launch_pdl": True},
    )
    assert summed.stack == 0 and "griddepcontrol.wait" in summed.ptx


def tma(p: Problem, c: MatmulConfig, extra: dict[str, str], f: str = "") -> Compiled:
    from slipstream.kernels.matmul import sm90_kernels as launch

    levels = max((c.block_n * p.out_dtype.itemsize // 128).bit_length() - 1, 0)
    part = c.block_n >> levels
    swapped = p.dtype == torch.float32 and not p.b_t
    a_t, b_t = (True, True) if swapped else (p.a_t, p.b_t)

    def descriptor(dtype: torch.dtype, *block: int) -> str:
        layout = launch._layout(dtype, block)
        return f"tensordesc<{NAMES[dtype]}{list(block)},{layout!r}>"

    a = (c.block_k, 64) if a_t else (64, c.block_k)
    b = (c.block_n, c.block_k) if b_t else (c.block_k, c.block_n)
    tensors = {"a_desc": descriptor(p.dtype, *a), "b_desc": descriptor(p.dtype, *b)}
    tensors["out_desc"] = descriptor(p.out_dtype, *((part, 64) if swapped else (64, part)))
    sizes = {"BN": c.block_n, "BK": c.block_k, "GROUP": c.group_m, "STAGES": c.num_stages}
    return compile_kernel(
        "slipstream.kernels.matmul.sm90_kernels:matmul_sm90_kernel",
        {**tensors, **extra},
        {**sizes, "A_T": a_t, "B_T": b_t, "OUT_T": swapped, "ACTIVATION": f, "LEVELS": levels},
        options={"maxnreg": launch.REGISTERS},
    )


@pytest.mark.parametrize("N", [64, 200, 1 << 14])
@pytest.mark.parametrize(
    "p", [BF16, Problem(torch.bfloat16, torch.float32, "", a_t=True), FP32, ROWS, COLUMNS, FP8]
)
@pytest.mark.sample(which=lambda p, N: N == 200 or p in (BF16, ROWS))
def test_tma_kernel_compiles(p: Problem, N: int) -> None:
    here = arches.named("sm_90")
    c = choose(p, here, 1 << 14 if N > 200 else 100, N, 1 << 14, True)
    got = tma(p, c, ALL if p is BF16 else {}, "silu" if p is BF16 else "")
    assert got.stack == 0 and got.instructions["wgmma"] == 8 and got.instructions["tma"] > 0
    assert got.shared <= shared_bytes(c, p, here) + 128 <= here.shared
