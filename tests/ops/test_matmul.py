"""matmul: against its formula, gradients, strides, torch.compile, and what it refuses."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.compiler import arch as arches
from slipstream.kernels.matmul import op
from slipstream.kernels.matmul.config import (
    ACTIVATIONS,
    MatmulInputs,
    Problem,
    check,
    choose,
    closest_legal,
    violation,
)
from slipstream.ops.matmul import MatmulConfig, matmul


def inputs(dtype: torch.dtype = torch.float64, grad: bool = True) -> dict[str, Any]:
    shapes = {"a": (2, 5, 7), "b": (7, 4), "bias": (4,), "residual": (2, 5, 4)}
    return {n: torch.randn(s, dtype=dtype).requires_grad_(grad) for n, s in shapes.items()}


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul_matches_reference(activation: str | None, dtype: torch.dtype) -> None:
    given = {**inputs(dtype, grad=False), "scale_a": torch.rand(2, 5), "scale_b": torch.rand(4)}
    wide: dict[str, Any] = {n: x.double() for n, x in given.items()}
    got = matmul(**given, activation=activation)
    want = matmul(**wide, activation=activation, impl="reference")
    assert got.dtype == dtype
    tolerance = 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_matmul_has_second_gradients() -> None:
    given = inputs()
    assert torch.autograd.gradgradcheck(matmul, (given["a"], given["b"]))


def test_matmul_takes_float8() -> None:
    a, b = (torch.randn(s).to(torch.float8_e4m3fn) for s in ((5, 32), (16, 32)))
    got = matmul(a, b.t(), scale_a=torch.tensor(2.0))
    assert got.dtype == torch.bfloat16
    want = 2 * a.float() @ b.float().t()
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


def test_matmul_rejects_what_does_not_fit() -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 4)
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"b": torch.randn(6, 4)}, ValueError, "b: want 7 rows"),
        ({"b": b.double()}, TypeError, "b: want torch.float32"),
        ({"scale_a": torch.rand(4)}, ValueError, "scale_a: want shape"),
        ({"precision": "fp32"}, ValueError, "precision: want"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype: want"),
        ({"impl": "sm90"}, NotImplementedError, "sm_90"),
        ({"config": (128, 128)}, TypeError, "config: want"),
        ({"config": MatmulConfig()}, NotImplementedError, "configurations"),
        ({"scale_a": torch.rand(5).requires_grad_()}, NotImplementedError, "scale_a"),
    ]
    for change, kind, text in bad:
        with pytest.raises(kind, match=text):
            matmul(**{"a": a, "b": b, **change})


BF16 = Problem(torch.bfloat16, torch.bfloat16, "tf32x3")
FP32 = Problem(torch.float32, torch.float32, "tf32")
TMA = MatmulConfig(128, 256, 64, 8, 4, kernel="tma")


@pytest.mark.parametrize(
    ("arch", "problem", "config", "text"),
    [
        ("sm_90", BF16, MatmulConfig(128, 128, 512, 4, 3), "shared memory, sm_90 has 232448"),
        ("sm_86", BF16, MatmulConfig(128, 256, 64, 8, 4), "shared memory, sm_86 has 101376"),
        ("sm_90", BF16, MatmulConfig(128, 96, 64), "block_n: want a power of two"),
        ("sm_90", BF16, MatmulConfig(128, 128, 8), "block_k: want a power of two from 16"),
        ("sm_90", BF16, MatmulConfig(256, 256, 16, 4), "512 float32 sums a thread"),
        ("sm_90", BF16, MatmulConfig(64, 64, 64, 3), "num_warps: want a power of two"),
        ("sm_90", replace(FP32, precision="ieee"), MatmulConfig(128, 128, 128), "one by one"),
        ("sm_80", BF16, TMA, "sm_80 has no wgmma"),
        ("sm_90", BF16, replace(TMA, block_m=64), "two warpgroups of 64 rows"),
        ("sm_90", BF16, replace(TMA, block_n=32), "wgmma wants block_n"),
        ("sm_90", BF16, replace(TMA, block_k=32), "TMA brings rows of 128 bytes"),
        ("sm_90", BF16, replace(TMA, num_stages=5), "shared memory"),
        ("sm_90", replace(FP32, precision="tf32x3"), replace(TMA, block_k=32), "as tf32x3"),
        ("sm_80", Problem(torch.float8_e5m2, torch.bfloat16, ""), MatmulConfig(), "float8_e5m2"),
    ],
)
def test_config_is_refused_with_the_nearest(
    arch: str, problem: Problem, config: MatmulConfig, text: str
) -> None:
    here = arches.named(arch)
    with pytest.raises(ValueError, match=text) as caught:
        check(config, problem, here)
    near = closest_legal(config, problem, here)
    assert near is None or (violation(near, problem, here) is None and str(near) in str(caught))
    assert (near is None) == (problem.dtype == torch.float8_e5m2)


def test_nearest_config_changes_least() -> None:
    near = closest_legal(MatmulConfig(128, 128, 512, 4, 3), BF16, arches.named("sm_90"))
    assert near is not None
    assert near.block_k == 128 and (near.block_m, near.block_n, near.num_warps) == (128, 128, 4)


def test_default_config_is_allowed() -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
    for arch in arches.ARCHS.values():
        for dtype in dtypes:
            for precision in arch.precisions if dtype == torch.float32 else ("tf32x3",):
                out = torch.float32 if dtype == torch.float32 else torch.bfloat16
                p = Problem(dtype, out, precision, residual=torch.float32)
                if dtype == torch.float8_e4m3fn and "fp8e4nv" not in arch.dots:
                    continue
                takes_tma = arch.wgmma and (dtype != torch.float32 or precision == "tf32")
                wide = 1 << 14
                for M, N, tma in ((64, 64, False), (wide, wide, False), (wide, 200, True)):
                    c = choose(p, arch, M, N, wide, tma and takes_tma)
                    assert violation(c, p, arch) is None, (arch.name, p, c)


def test_few_tiles_are_shared() -> None:
    sm_90 = arches.named("sm_90")
    for M, N, K, programs in ((128, 4096, 4096, 256), (1, 8192, 8192, 128), (64, 512, 4096, 32)):
        c = choose(BF16, sm_90, M, N, K, False)
        assert violation(c, BF16, sm_90) is None
        assert -(-M // c.block_m) * -(-N // c.block_n) * c.split_k == programs
        assert c.split_k * 4 * c.block_k <= K
    for M, N, K in ((1 << 13, 1 << 13, 1 << 13), (128, 4096, 512)):
        assert choose(BF16, sm_90, M, N, K, False).split_k == 1


def test_tma_wants_rows_of_16_bytes() -> None:
    def refuses(a: Tensor, b: Tensor) -> str | None:
        t = MatmulInputs(a, b, None, None, None, None, "", "tf32", torch.bfloat16)
        return op.tma_unsupported_reason(t)

    a, b = torch.randn(32, 64).bfloat16(), torch.randn(64, 48).bfloat16()
    assert refuses(a, b) is None
    assert refuses(a, b.t().contiguous().t()) is None
    assert "multiples of 16 bytes" in str(refuses(a[:, :50], b[:50].t().contiguous().t()[:, :48]))
    # of 32 bits one of them may have its columns adjacent
    wide = torch.randn(32, 100), torch.randn(100, 48)
    assert refuses(*wide) is None and "400 long" not in str(refuses(*wide))
    narrow = torch.randn(32, 100).bfloat16(), torch.randn(48, 100).bfloat16().t()
    assert "200 long" in str(refuses(*narrow))
    assert "result" in str(refuses(a, b[:, :47]))


@pytest.mark.parametrize("by_columns", [False, True])
def test_calls_compiled_ahead_have_the_tile_asked_for(
    by_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a given tile both kernels, of sizes that 16 divides and of others; else those of each."""
    asked: list[MatmulConfig | None] = []

    def plan_for(t: MatmulInputs, config: MatmulConfig | None, impl: str | None) -> SimpleNamespace:
        asked.append(config)
        return SimpleNamespace(impls="triton")

    monkeypatch.setattr(op, "plan_for", plan_for)
    monkeypatch.setattr(op, "arch_of", lambda device: arches.ARCHS["sm_90"])
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 32).bfloat16()
    a = a.t() if by_columns else a
    given = MatmulInputs(a, b, None, None, None, None, "", "ieee", torch.bfloat16)
    tile = MatmulConfig(64, 64, 32, 4, 3)
    for config in (tile, None):
        asked.clear()
        packed = [] if config is None else [*config.pack()]
        calls = [*op._at_sizes((*given, packed, "triton"))]
        sizes = [call[0].shape[by_columns] % 16 == 0 for call in calls]
        assert {*asked} == {config} and {*sizes} == {False, True}
        assert len(calls) == 2 if config else len(calls) > 2
    # a kernel of wide calls is another one, of the same tile
    monkeypatch.setattr(
        op,
        "plan_for",
        lambda t, *_: SimpleNamespace(impls="sm90" if t.a.shape[by_columns] > 99 else "triton"),
    )
    assert len([*op._at_sizes((*given, [*tile.pack()], "triton"))]) == 4
