"""Hyper-connections of other numbers of streams than the catalogue has: the kernels under Triton's
interpreter, and plain torch, beside the formulas in float64."""

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from tests.support import formulas
from tests.support.interpreted import error, interpreted

# streams, features, tokens, parts (pre, post, comb), iterations
SIZES = [
    (1, 20, 5, 3, 20),
    (2, 64, 1, 3, 3),
    (3, 20, 65, 3, 20),
    (8, 24, 5, 3, 4),
    (4, 200, 5, 3, 1),
]
SIZES += [(3, 20, 5, 1, 20), (5, 33, 7, 2, 20)]
OPTIONS = {"eps": 0.03, "norm_eps": 0.5, "magnitude": 1.5, "post_eps": 0.1}
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 8e-3}


def _given(N: int, D: int, T: int, parts: int, dtype: torch.dtype) -> list[Tensor]:
    M = (N, 2 * N, (2 + N) * N)[parts - 1]
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    weight = torch.randn(M, N * D, dtype=wide) / (N * D) ** 0.5
    made = torch.randn(T, N, D, dtype=wide), weight, torch.randn(M), torch.randn(parts)
    return [made[0].to(dtype), made[1], *(x.to(wide) for x in made[2:])]


def _expect_formula(
    given: list[Tensor], limit: float, impl: str, taken: Any = None, **more: Any
) -> None:
    """taken: which results the gradients come from."""
    found: list[Any] = []
    run: Any
    for run, tensors in ((ops.mhc_pre, given), (formulas.mhc_pre, [x.double() for x in given])):
        leaves = [x.clone().requires_grad_() for x in tensors]
        options = {**more, "impl": impl} if run is ops.mhc_pre else more
        outputs = [x for x in run(*leaves, **options) if x is not None]
        total = torch.zeros((), dtype=torch.float64)
        for i, x in enumerate(outputs):
            if taken is None or i in taken:
                total = total + (x.double() * torch.linspace(-1, 1, x.numel()).view_as(x)).sum()
        found.append([*(x.detach() for x in outputs), *torch.autograd.grad(total, leaves)])
    for i, (got, want) in enumerate(zip(*found, strict=True)):
        assert error(got, want) < limit, (i, got.shape, error(got, want))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_plain_torch_equals_formulas(size: tuple[int, ...]) -> None:
    *sizes, iterations = size
    given = _given(*sizes, dtype=torch.float64)
    _expect_formula(given, 1e-12, "eager", iterations=iterations, **OPTIONS)
    leaves = [x.requires_grad_() for x in given]
    leaves[0] = leaves[0].detach()[:2].requires_grad_()

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for x in ops.mhc_pre(*tensors, iterations=iterations) if x is not None)

    if sizes[0] * sizes[1] < 100:
        assert torch.autograd.gradcheck(run, leaves)


@interpreted
def test_kernels_equal_formulas_interpreted() -> None:
    for dtype in (torch.float32, torch.float16):
        for *sizes, iterations in SIZES:
            given = _given(*sizes, dtype=dtype)
            _expect_formula(given, LIMITS[dtype], "triton", iterations=iterations, **OPTIONS)
    given = _given(3, 20, 5, 3, torch.float32)
    # of results that nothing depends on no gradients come
    for taken in ([0], [1], [2], [0, 2]):
        _expect_formula(given, 1e-5, "triton", taken=taken)


@interpreted
def test_numbers_in_two_halves_interpreted() -> None:
    """As beside bf16, which the interpreter has not; without either half 2^-9 is missing. Programs
    of one stream, and of all where shared memory is large."""
    from slipstream.kernels.hyper_connection import triton_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "_halves", lambda x: (2, torch.float32))
        for large in (1 << 16, 1 << 18):
            patch.setattr(triton_kernels.backends, "shared_memory_bytes", lambda _, n=large: n)
            for *sizes, iterations in SIZES if large == 1 << 16 else [(2, 64, 65, 3, 3), SIZES[4]]:
                given = _given(*sizes, dtype=torch.float32)
                _expect_formula(given, 1e-5, "triton", iterations=iterations)


@interpreted
def test_sums_of_many_tokens_interpreted() -> None:
    """Those of the last iterations lie past 2^31 numbers, in memory of which some pages are used;
    those of weights' gradients are in three shares."""
    from slipstream.kernels.hyper_connection import triton_kernels

    step, iterations, cached = 1 << 26, 20, triton_kernels.launch_cache.cached
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, 4 * step * (2 * iterations - 1), flags=private)
    spread = torch.frombuffer(memory, dtype=torch.float32).view(-1, step)

    class FarApart:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda **given: self.launch(grid, given)

        def launch(self, grid: Any, given: dict[str, Any]) -> None:
            if "sums_ptr" in given:
                given |= {"sums_ptr": spread, "step": step}
            if "dw_ptr" in given:
                grid, dw = (grid[0], 3), given["dw_ptr"]
                given["dw_ptr"] = torch.empty(3, *dw.shape)
            cached(self.kernel)[grid](**given)
            if "dw_ptr" in given:
                dw.copy_(given["dw_ptr"].sum(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels.launch_cache, "cached", FarApart)
        _expect_formula(_given(3, 20, 65, 3, torch.float32), 1e-5, "triton", iterations=iterations)


@interpreted
def test_kernels_after_a_layer_interpreted() -> None:
    for N, D, T, mixed in (
        (1, 20, 5, True),
        (3, 1100, 2, True),
        (8, 33, 3, True),
        (2, 64, 1, False),
    ):
        torch.manual_seed(0)
        made = [torch.randn(T, *n) for n in ((N, D), (D,), (N,), (N, N))[: 3 + mixed]]
        found = []
        for run, dtype in ((ops.mhc_post, torch.float32), (formulas.mhc_post, torch.float64)):
            leaves = [x.to(dtype).requires_grad_() for x in made]
            out = run(*leaves, **({"impl": "triton"} if dtype == torch.float32 else {}))
            found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
        for got, want in zip(*found, strict=True):
            assert error(got, want) < 1e-5
