"""projection_step on a GPU: every form beside the formula, alone and in a graph."""

import itertools

import pytest
import torch

from slipstream.kernels.projection_step import norm_op
from slipstream.kernels.projection_step.inputs import NormedInputs
from slipstream.ops import projection_step
from slipstream.runtime.consistent import consistent
from tests.support.operators import relative_error
from tests.support.projections import SIZES, formula, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
WIDE = [(1, 1024, (3072, 1024, 16)), (64, 1024, (3072, 1024, 16)), (33, 2752, (1024,))]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("size", [*SIZES, *WIDE])
def test_matches_the_formula(size: tuple, dtype: torch.dtype) -> None:
    for biases, residual in itertools.product((False, True), repeat=2):
        with torch.device("cuda"):
            args = inputs(*size, dtype, norm=size[0] == 1, biases=biases, residual=residual)
        y = projection_step(**args, impl="triton")
        assert relative_error(y, formula(**args)) <= LIMITS[dtype]


@pytest.mark.parametrize("rows", [33, 64])
@pytest.mark.parametrize("K", [1024, 2752])
@pytest.mark.parametrize("dtype", LIMITS)
def test_sums_of_shares_and_their_norm_match_the_formula(
    dtype: torch.dtype, K: int, rows: int
) -> None:
    """Of a residual of that dtype; called twice with equal bits."""
    with torch.device("cuda"):
        args = inputs(rows, K, (1024,), torch.bfloat16, biases=True)
        residual, weight = torch.randn(rows, 1024).to(dtype), torch.rand(1024).bfloat16()
    given = args["x"], args["weights"][0], args["biases"][0], residual, weight
    t = NormedInputs(*given, 1e-5, False)
    h, y = norm_op.run(t, "triton")
    assert relative_error(h, formula(**args, residual=residual)) <= LIMITS[torch.bfloat16]
    normed = torch.rms_norm(h.double(), (1024,), weight.double(), 1e-5)
    assert relative_error(y, normed) <= LIMITS[torch.bfloat16]
    assert all(map(torch.equal, norm_op.run(t, "triton"), (h, y)))


@pytest.mark.parametrize("rows", [33, 64])
def test_consistent_rows_have_the_bits_of_two(rows: int) -> None:
    """Also where the default mode takes another tile."""
    with torch.device("cuda"):
        args = inputs(rows, 1024, (2048, 16), torch.bfloat16)
    with consistent():
        every = projection_step(**args, impl="triton")
        args["x"] = args["x"][:2]
        assert torch.equal(projection_step(**args, impl="triton"), every[:2])


@pytest.mark.parametrize("rows", [1, 20, 40])
def test_captured_call_reads_what_is_there_then(rows: int) -> None:
    with torch.device("cuda"):
        args = inputs(rows, 256, (96, 96), torch.bfloat16, residual=False)
    args["activation"] = "swiglu"
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        projection_step(**args, impl="triton")
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = projection_step(**args, impl="triton")
    args["x"].copy_(torch.randn_like(args["x"]))
    graph.replay()
    assert relative_error(y, formula(**args)) <= LIMITS[torch.bfloat16]
