"""Rows that do not count have no loss and a gradient of 0, whatever gradient comes from above."""

import pytest
import torch

from tests.support.ignored_rows import faults, of_modules, of_operators
from tests.support.interpreted import interpreted


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_rows_without_a_loss_have_no_gradient(impl: str) -> None:
    assert faults(of_operators(impl)) == []


def test_modules_give_rows_without_a_loss_no_gradient() -> None:
    assert faults(of_modules()) == []


def test_compiled_rows_without_a_loss_have_no_gradient() -> None:
    for loss in of_operators(None):
        torch.compiler.reset()
        call = torch.compile(loss.call, fullgraph=True, dynamic=False, backend="aot_eager")
        assert faults([loss._replace(call=call)]) == []


@interpreted
def test_triton_rows_without_a_loss_have_no_gradient() -> None:
    assert faults(of_operators("triton")) == []
