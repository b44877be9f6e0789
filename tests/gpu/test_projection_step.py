"""projection_step on a GPU: every form beside the formula, alone and in a graph."""

import itertools

import pytest
import torch

from slipstream.ops import projection_step
from tests.support.operators import relative_error
from tests.support.projections import SIZES, formula, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
WIDE = [(1, 1024, (3072, 1024, 16)), (64, 1024, (3072, 1024)), (33, 2752, (1024,))]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("size", [*SIZES, *WIDE])
def test_matches_the_formula(size: tuple, dtype: torch.dtype) -> None:
    for biases, residual in itertools.product((False, True), repeat=2):
        with torch.device("cuda"):
            args = inputs(*size, dtype, norm=size[0] == 1, biases=biases, residual=residual)
        y = projection_step(**args, impl="triton")
        assert relative_error(y, formula(**args)) <= LIMITS[dtype]


@pytest.mark.parametrize("rows", [1, 20])
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
