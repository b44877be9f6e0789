"""Copies of states by their indices: plain torch, and the kernel under the interpreter."""

from itertools import product

import torch

from slipstream.kernels.elementwise.copy_states import _mismatch
from tests.support.interpreted import interpreted
from tests.support.state_copies import DTYPES, check_copies


def test_states_are_copied_by_index() -> None:
    check_copies("eager")


@interpreted
def test_states_are_copied_by_the_kernel() -> None:
    check_copies("triton")
    for dtypes in product(DTYPES, DTYPES):
        assert _mismatch(*(torch.empty(0, dtype=x) for x in dtypes)) is None, dtypes
