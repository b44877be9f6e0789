"""Tests under Triton's interpreter, which is chosen when a kernel is defined: they run in a process
of their own. With TRITON_INTERPRET=1 in the environment pytest's own process is one."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from slipstream.runtime.backends import INTERPRETED
from tests.support import wants
from tests.support.forked import run_test

# Checks of more than a minute are in two parts: every form once or more, and further crossings.
PARTS = ("sample", pytest.param("further", marks=pytest.mark.slow))


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Has a test run under the interpreter, in a process of its own, where torch.empty holds NaN.
    Its parameters are what JSON has; SEED in the environment is that of its random numbers."""

    @functools.wraps(test)
    def in_a_process(**given: Any) -> None:
        if INTERPRETED:
            test(**given)
            return
        status, text = run_test(test.__module__, test.__name__, given)
        assert status == 0, text[-8000:]

    return wants.triton(in_a_process)


def error(got: Tensor, want: Tensor) -> float:
    """The largest one, of the largest value or of one."""
    if got.shape != want.shape:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    off = (got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1)
    return float(off.nan_to_num(float("inf")))
