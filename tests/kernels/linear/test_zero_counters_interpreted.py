"""Counts at zero (triton/counts.py), and nothing behind them written.

As test_triton_scalar_decay_interpreted.py: the kernel runs in a process of its own, this file as a
script.
"""

from typing import Any

import pytest
import torch

from slipstream.kernels.linear.triton.plan import HAVE_TRITON
from tests.support.interpreted import run


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_counts_are_zero_and_nothing_else_when_interpreted() -> None:
    run(script="tests.kernels.linear.test_zero_counters_interpreted")


if __name__ == "__main__":
    from slipstream.kernels.linear.triton.common import zero_counters

    kernel: Any = zero_counters.zeros_kernel
    for count in (1, 1023, 1024, 5000):
        x = torch.full((count + 2000,), 7, dtype=torch.int32)
        kernel[(-(-count // zero_counters.BLOCK),)](x, count, BLOCK=zero_counters.BLOCK)
        assert not x[:count].any()
        assert (x[count:] == 7).all()
