"""The kernels of matmul: the portable one under Triton's interpreter, at odd sizes and strides,
with what follows it; that of sm_90 in the emulator, and what orders the parts of a program; both
compiled for GPUs that need not be there: matrix instructions, spills, shared memory no more than
what a configuration is checked against."""

import importlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.compiler import arch as arches
from slipstream.compiler.aot import Compiled
from slipstream.compiler.trace import trace
from slipstream.kernels.matmul.config import (
    ACTIVATIONS,
    MatmulConfig,
    Problem,
    activated,
    check,
    choose,
    column_levels,
    shared_bytes,
)
from slipstream.ops.matmul import matmul
from tests.gluon_emulator import linear, threads, values
from tests.support import wants
from tests.support.interpreted import PARTS, error, interpreted

SMALL = MatmulConfig(16, 16, 16, 4, 2, group_m=2)
SHARED = MatmulConfig(16, 16, 16, 4, 2, group_m=2, split_k=3)
LAYOUTS = ("rows", "columns", "every other", "expanded")
# of a, of b
PAIRS = {
    "sample": [pair for pair in itertools.product(LAYOUTS, LAYOUTS) if "rows" in pair],
    "further": list(itertools.product(LAYOUTS, LAYOUTS)),
}


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "every other":
        return x.repeat_interleave(2, 1)[:, ::2]
    return x[:1].expand_as(x) if layout == "expanded" else x


def check_layouts(part: str, M: int, K: int, N: int, dtype: torch.dtype, limit: float) -> None:
    for of_a, of_b in PAIRS[part]:
        a = laid_out(torch.randn(M, K, dtype=dtype), of_a)
        b = laid_out(torch.randn(K, N, dtype=dtype), of_b)
        want = matmul(a.double(), b.double(), impl="reference")
        for config in (SMALL, SHARED):
            e = error(matmul(a, b, config=config, impl="triton"), want)
            assert e < limit, (M, K, N, dtype, of_a, of_b, config, e)


def check_epilogue() -> None:
    a, b, bias = torch.randn(2, 19, 21), torch.randn(21, 35), torch.randn(35)
    residual = torch.randn(2, 35, 19).mT
    for activation in (None, *ACTIVATIONS):
        for sa, sb in ((torch.tensor([0.3]), torch.rand(35)), (torch.rand(2, 19), None)):
            given: dict[str, Any] = {
                "bias": bias,
                "residual": residual,
                "scale_a": sa,
                "scale_b": sb,
            }
            wide: dict[str, Any] = {
                name: None if x is None else x.double() for name, x in given.items()
            }
            want = matmul(a.double(), b.double(), **wide, activation=activation, impl="reference")
            for config in (SMALL, SHARED):
                got = matmul(a, b, **given, activation=activation, config=config)
                assert got.dtype == torch.float32 and error(got, want) < 1e-5, activation


def check_gradients() -> None:
    leaves = [torch.randn(s) for s in ((19, 21), (21, 35), (35,), (19, 35))]
    scale = torch.rand(19)
    found = []
    for dtype, impl in ((torch.float32, "triton"), (torch.float64, "reference")):
        given = [x.to(dtype).requires_grad_() for x in leaves]
        a, b, bias, residual = given
        for activation in (None, "silu"):
            y = matmul(
                a, b, bias=bias, residual=residual, scale_a=scale.to(dtype),
                activation=activation, impl=impl,
            )  # fmt: skip
            found += torch.autograd.grad(y.square().sum(), given)
    half = len(found) // 2
    assert all(error(x, y) < 1e-5 for x, y in zip(found[:half], found[half:], strict=True))


def check_float8() -> None:
    for kinds in itertools.product((torch.float8_e4m3fn, torch.float8_e5m2), repeat=2):
        a, b = (torch.randn(s).to(k) for s, k in zip(((20, 40), (24, 40)), kinds))
        config = MatmulConfig(16, 16, 32, 4, 2)
        got = matmul(a, b.t(), scale_a=torch.rand(20), config=config, out_dtype=torch.float32)
        assert got.shape == (20, 24) and got.isfinite().all()


def check_old_failure() -> None:
    """float32 at 128 x 32 x 32, which took the process down elsewhere."""
    a, b = torch.randn(150, 70), torch.randn(70, 50)
    config = MatmulConfig(block_m=128, block_n=32, block_k=32)
    assert error(matmul(a, b, config=config), a.double() @ b.double()) < 1e-5


def check_empty() -> None:
    bias = torch.randn(5)
    for M, K, N in ((0, 3, 5), (4, 0, 5), (4, 3, 0)):
        got = matmul(torch.randn(M, K), torch.randn(K, N), bias=bias[:N], config=SMALL)
        assert got.shape == (M, N)
        assert K > 0 or torch.equal(got, bias.expand(4, 5))


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_triton_matmul_matches_reference(part: str) -> None:
    for shape in ((33, 47, 18), *((1, 1, 1), (48, 32, 16)) * (part == "further")):
        check_layouts(part, *shape, torch.float32, 1e-5)
    check_layouts(part, 17, 100, 20, torch.float16, 4e-3)
    if part == "sample":
        check_epilogue()
        check_gradients()
        check_old_failure()
        check_float8()
        check_empty()


MODULE = "slipstream.kernels.matmul.sm90_kernels"
BK = 16
# rows, columns and what is summed over; columns of a tile: of several tiles a program
SIZES = [(256, 512, 48, 256), (200, 288, 40, 128), (100, 64, 16, 64), (256, 320, 16, 64)]


def kernel() -> Any:
    with linear.emulated():
        return importlib.import_module(MODULE).matmul_sm90_kernel


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def run(
    a: Tensor, weight: Tensor, BN: int, activation: str = "", turned: str = "", **more: Tensor
) -> Tensor:
    """more: bias, residual and scales, of out. turned: whether memory has a or b by columns, and
    whether out is that of the transposes."""
    (M, K), N = a.shape, weight.shape[0]
    levels = column_levels(BN, 2)
    out = torch.full((N, M) if "o" in turned else (M, N), float("nan"), dtype=torch.float64)
    descriptors = []
    blocks = (64, BK), (BN, BK), (64, BN >> levels)
    for name, x, block in zip("abo", (a, weight, out), blocks):
        if name in turned:
            x, block = x if name == "o" else x.t().contiguous(), block[::-1]
        descriptors.append(linear.Descriptor(x, x.shape[1], *block))
    names = "bias", "residual", "scale_a", "scale_b"
    added = [linear.Pointer(more[x]) if x in more else None for x in names]
    threads.launch(
        kernel(),
        2,
        (*descriptors, *added, M, N, K, out.shape[1], 1, 1),
        BN=BN, BK=BK, GROUP=2, STAGES=3, A_T="a" in turned, B_T="b" not in turned,
        OUT_T="o" in turned, ACTIVATION=activation, LEVELS=levels,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("M", "N", "K", "BN"), SIZES)
def test_products_are_right(M: int, N: int, K: int, BN: int) -> None:
    a, weight = drawn(M, K), drawn(N, K)
    torch.testing.assert_close(run(a, weight, BN), a @ weight.t())


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("turned", ["a", "b", "ab"])
def test_factors_lie_either_way(turned: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 32 bits a goes through registers."""
    monkeypatch.setattr(type(values.DTYPE), "primitive_bitwidth", bits)
    a, weight = drawn(200, 40), drawn(144, 40)
    torch.testing.assert_close(run(a, weight, 128, turned=turned), a @ weight.t())


@pytest.mark.parametrize("turned", ["", "o"])
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_epilogue_is_right(activation: str, turned: str) -> None:
    a, weight = drawn(200, 40), drawn(144, 40)
    product = a @ weight.t()
    product = product.t() if turned else product
    R, C = product.shape
    more = {"scale_a": drawn(R), "scale_b": drawn(C), "bias": drawn(C), "residual": drawn(R, C)}
    z = product * more["scale_a"][:, None] * more["scale_b"] + more["bias"]
    want = activated(z, activation) + more["residual"]
    torch.testing.assert_close(run(a, weight, 128, activation, turned, **more), want)


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


@wants.triton
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


@wants.triton
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


@wants.triton
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


@wants.triton
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
