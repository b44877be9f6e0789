"""The portable matmul under Triton's interpreter: odd sizes, strides, what follows it."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.matmul.config import ACTIVATIONS
from slipstream.ops.matmul import MatmulConfig, matmul
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
