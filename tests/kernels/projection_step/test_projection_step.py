"""projection_step: each implementation, Triton's by its interpreter, against the formula."""

import itertools

import pytest
import torch

from slipstream.compiler.arch import ARCHS
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import op
from slipstream.kernels.projection_step.inputs import NormedInputs, ProjectionInputs
from slipstream.ops import projection_step
from slipstream.runtime.backends import HAVE_TRITON
from slipstream.runtime.consistent import consistent
from tests.support import wants
from tests.support.interpreted import interpreted
from tests.support.operators import relative_error
from tests.support.projections import SIZES, formula, inputs, job_of, norm_jobs

if HAVE_TRITON:
    from slipstream.kernels.projection_step import triton_kernels as launch

LIMIT = {torch.float32: 2e-6, torch.float16: 2e-3}


def check(impl: str, dtype: torch.dtype, size: tuple, **on: bool) -> None:
    M, K, N = size
    args = inputs(M, K, N, dtype, **on)
    y = projection_step(**args, impl=impl)
    assert y.dtype == (torch.float32 if on.get("residual") else dtype)
    error = relative_error(y, formula(**args))
    assert error <= LIMIT[dtype], (impl, dtype, size, on, error)


def check_gated(impl: str, M: int, dtype: torch.dtype) -> None:
    args = inputs(M, 48, (20, 20), dtype, biases=True, norm=M == 1, zero_centered=M == 1)
    args |= {"activation": "swiglu", "residual": torch.randn(M, 20)}
    error = relative_error(projection_step(**args, impl=impl), formula(**args))
    assert error <= LIMIT[dtype], (impl, M, dtype, error)


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("size", SIZES)
def test_matches_the_formula(impl: str, size: tuple) -> None:
    for norm, biases, residual in itertools.product((False, True), repeat=3):
        check(impl, torch.float32, size, norm=norm, biases=biases, residual=residual)
    check_gated(impl, size[0], torch.float32)


@wants.triton
@pytest.mark.parametrize("rows", [1, 16])
def test_weights_are_read_in_wide_words(rows: int) -> None:
    """16 bytes a load of every weight, whichever of them a program takes, and no spills."""
    got = job_of(rows, 2048, 2048, 16).compile()
    assert got.stack == 0
    wide = "ld.global.v4" if rows == 1 else "cp.async.cg.shared.global"
    assert got.ptx.count(wide) >= 4
    assert got.ptx.count("ld.global.b16") <= 4


@wants.triton
@pytest.mark.parametrize("arch", ["sm_75", "sm_89", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tiles_fit_shared_memory(dtype: torch.dtype, arch: str) -> None:
    """GPUs have 64, 99 and 227 KiB of it."""
    for N, activation in ((512, None), (2752, "swiglu")):
        job = job_of(64, N, N, arch=arch, dtype=dtype, activation=activation)
        assert job.compile().shared <= ARCHS[arch].shared


@wants.triton
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_products_of_many_rows_are_wgmma(activation: str | None) -> None:
    """With x on the left, loaded in words of 16 bytes; without spills, in an SM's memory."""
    got = job_of(64, 2752, 2752, activation=activation).compile()
    assert got.instructions["wgmma"] and not got.instructions["mma.sync"]
    assert got.ptx.count("cp.async.cg.shared.global") >= 4 and got.stack == 0
    assert got.shared <= 232_448


@wants.triton
@pytest.mark.parametrize("K", [1024, 2752])
def test_shares_of_k_fill_the_gpu(K: int) -> None:
    """Of a weight of 1024 rows about a program for each of 132 multiprocessors."""
    job, _ = norm_jobs(K)
    assert 64 <= 1024 // job.constants["BN"] * -(-K // job.constants["COLUMNS"]) <= 264
    got = job.compile()
    assert got.stack == 0 and got.shared <= 232_448 // 2


@wants.triton
def test_consistent_calls_keep_their_tile() -> None:
    """Of 64 rows that of 2 rows but for its height, so that the sums of a row have one order."""
    with consistent():
        same = job_of(64, 4096)
    default, few = job_of(64, 4096), job_of(2, 4096)
    assert default.constants["X_LEFT"] and not same.constants["X_LEFT"]
    assert few.constants["BK"] == same.constants["BK"] and not few.constants["X_LEFT"]


def test_refuses() -> None:
    args = inputs(2, 8, (4, 4), torch.float32)
    x, weights = args["x"], args["weights"]
    with pytest.raises(ValueError, match="weights: want 1 to 5, got 6"):
        projection_step(x, weights * 3)
    with pytest.raises(ValueError, match=r"weights\[1\]"):
        projection_step(x, [weights[0], torch.randn(4, 9)])
    with pytest.raises(ValueError, match="biases: want 2"):
        projection_step(x, weights, [None])
    with pytest.raises(ValueError, match="swiglu wants two weights of one shape"):
        projection_step(x, weights[:1], activation="swiglu")
    with pytest.raises(ValueError, match="norm_weight: wants norm_eps"):
        projection_step(x, weights, norm_weight=torch.ones(8))
    for options in ({"zero_centered": True}, {"centre": True}, {"weight": True}):
        eps = None if "zero_centered" in options else 1e-5
        with pytest.raises(ValueError, match="norm_options: want options of rms_norm"):
            projection_step(x, weights, norm_eps=eps, norm_options=options)
    with pytest.raises(ValueError, match="activation: want 'swiglu' or None"):
        projection_step(x, weights, activation="geglu")
    with pytest.raises(NotImplementedError, match="no gradients"):
        projection_step(x.requires_grad_(), weights)


def check_many_rows() -> None:
    """Tiles with x on the left, and shares of K with the sum and its norm, in float16."""
    for M, K, N, glu in ((33, 136, 40, False), (64, 72, 24, True)):
        args = inputs(M, K, (N, N) if glu else (N, 7), torch.float16, biases=True)
        given = args["x"], args["weights"], args["biases"]
        t = ProjectionInputs(*given, None, None, None, glu, False)
        y = torch.empty(M, t.size, dtype=torch.float16)
        launch._launch(t, y, launch.ProjectionTile(64, 16, 32, 4, 3, True), K)
        want = formula(**args, activation="swiglu" if glu else None)
        assert relative_error(y, want) <= LIMIT[torch.float16]
    for M, K, N, dtype in ((33, 136, 40, torch.float32), (64, 2100, 24, torch.float16)):
        args = inputs(M, K, (N,), torch.float16, biases=True)
        residual, weight = torch.randn(M, N).to(dtype), torch.rand(N).half()
        for zero_centered in (False, True):
            given = (args["x"], args["weights"][0], args["biases"][0], residual, weight)
            n = NormOptions(1e-5, zero_centered=zero_centered)
            h, y = op.run_norm(NormedInputs(*given), n, "triton")
            want = formula(**args, residual=residual)
            assert h.dtype == dtype and y.dtype == torch.float16
            assert relative_error(h, want) <= LIMIT[torch.float16]
            factor = 1 + weight.double() if zero_centered else weight.double()
            normed = torch.rms_norm(h.double(), (N,), factor, 1e-5)
            assert relative_error(y, normed) <= LIMIT[torch.float16]


@interpreted
def test_triton_matches_the_formula() -> None:
    for size, dtype in itertools.product(SIZES, LIMIT):
        norm = size[0] == 1
        check("triton", dtype, size)
        check("triton", dtype, size, norm=norm, biases=True, residual=True)
    for M, dtype in itertools.product((1, 5), LIMIT):
        check_gated("triton", M, dtype)
    check_many_rows()


@interpreted
def test_sums_of_rows_are_rounded_before_the_residual() -> None:
    """As a linear layer's result is: 2049 is none of float16."""
    x = torch.tensor([[2048.0, 1.0]] * 2).half()
    y = projection_step(x, [torch.ones(3, 2).half()], residual=torch.ones(2, 3), impl="triton")
    assert torch.equal(y, torch.full((2, 3), 2049.0))
