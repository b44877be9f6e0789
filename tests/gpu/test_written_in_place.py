"""Kernels that update a tensor in place, in first calls and in replayed ones: autograd and
torch.jit.trace know of it."""

import pytest
import torch

from slipstream.tools.catalog import Sample
from tests.support.writing_rows import ROWS, check_refused, check_traced, check_versions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@every_row
def test_versions_rise_of_what_is_written(row: Sample) -> None:
    check_versions(row, "triton", CUDA, calls=4)


@every_row
def test_backward_through_overwritten_values_is_refused(row: Sample) -> None:
    check_refused(row, "triton", CUDA)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@every_row
def test_traced_calls_write_other_inputs(row: Sample) -> None:
    check_traced(row, "triton", CUDA)
