"""Operators that update a tensor in place: autograd and torch.jit.trace see it. One whose memory
holds its negative is written too."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.ops import recurrent_step, short_convolution_update
from slipstream.ops.steps import mixer_step
from slipstream.tools.catalog import OPERATORS, Sample
from tests.support.interpreted import interpreted
from tests.support.user_inputs import negated
from tests.support.writing_rows import ROWS, check_refused, check_traced, check_versions


def _recurrent(state: Tensor) -> Tensor:
    q, k, v = torch.randn(3, 2, 1, 2, 8, generator=torch.Generator().manual_seed(1))
    return recurrent_step(q, k, v, state=state)


def _mixer(state: Tensor) -> Tensor:
    q, k, v = torch.randn(3, 2, 1, 2, 8, generator=torch.Generator().manual_seed(1))
    return mixer_step(q, k, v, state=state)


def _convolution(state: Tensor) -> Tensor:
    x = torch.randn(2, 1, 6, generator=torch.Generator().manual_seed(1))
    return short_convolution_update(x, state, torch.ones(6, 4))


CASES: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    (_recurrent, (2, 2, 8, 8)),
    (_mixer, (2, 2, 8, 8)),
    (_convolution, (2, 6, 4)),
]


@pytest.mark.parametrize(("call", "shape"), CASES, ids=[call.__name__ for call, _ in CASES])
def test_negated_state_is_written(call: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    before = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    plain, view = before.clone(), negated(before)
    assert view.is_neg()
    want, y = call(plain), call(view)
    assert not torch.equal(plain, before)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(view, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.name)
def test_versions_rise_of_what_is_written(row: Sample) -> None:
    check_versions(row, "eager")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_backward_through_overwritten_values_is_refused(row: Sample) -> None:
    check_refused(row, "eager")


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_traced_calls_write_other_inputs(row: Sample) -> None:
    check_traced(row, "eager")


@interpreted
def test_kernels_write_in_sight() -> None:
    for row in ROWS:
        check_versions(row, "triton")
        if row.variant in ("", "mamba2"):  # the interpreter is slow; mamba2 has counters
            check_refused(row, "triton")
            check_traced(row, "triton")


def test_one_number_of_a_dimension_has_any_stride() -> None:
    """Of a state of one row, which expand gives the stride 0."""
    checks.expect_own_memory("state", torch.empty_strided((1, 3, 2), (0, 1, 3)))
    with pytest.raises(ValueError, match=r"^state: is written in place"):
        checks.expect_own_memory("state", torch.empty_strided((2, 3, 2), (0, 1, 3)))
