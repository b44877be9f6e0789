"""The copies of tokens to and from their steps, under Triton's interpreter, against torch's.

As test_triton_interpreted.py: the checks run in a process of their own, this file as a script.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.householder import plain_spread, plain_take
from slipstream.kernels.linear.triton.plan import HAVE_TRITON

# B, T, H, HV, K, n, dtype
CASES = [
    (1, 1, 1, 1, 1, 1, torch.float32),
    (1, 5, 2, 4, 8, 3, torch.float32),
    (2, 700, 3, 6, 30, 2, torch.float16),
    (2, 9, 4, 4, 256, 4, torch.float32),
]


def check(q: Tensor, g: Tensor, n: int) -> None:
    from slipstream.kernels.linear.triton import steps

    for gates in (g, None):
        for x, y in zip(steps.spread(q, gates, n), plain_spread(q, gates, n), strict=True):
            assert x is y is None or (x is not None and y is not None and torch.equal(x, y))
    for x in (q, g):
        rows = torch.randn(x.shape[0], x.shape[1] * n, *x.shape[2:]).to(x.dtype)
        for at in range(n):
            got, want = torch.empty_like(x), torch.empty_like(x)
            steps.take(rows, n, at, got)
            plain_take(rows, n, at, want)
            assert torch.equal(got, want)


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_tokens_are_copied_to_and_from_their_steps() -> None:
    root = str(Path(__file__).parents[3])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root}
    run = [sys.executable, __file__]
    done = subprocess.run(run, env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


if __name__ == "__main__":
    torch.manual_seed(0)
    for B, T, H, HV, K, n, dtype in CASES:
        check(torch.randn(B, T, H, K).to(dtype), torch.randn(B, T, HV), n)
