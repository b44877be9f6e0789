"""Copies of states by their indices: plain torch, and the kernel under the interpreter."""

import pytest

from slipstream.runtime.backends import HAVE_TRITON
from tests.support.interpreted import run
from tests.support.state_copies import check_copies


def test_states_are_copied_by_index() -> None:
    check_copies("eager")


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_states_are_copied_by_the_kernel() -> None:
    run(script="tests.support.state_copies")
