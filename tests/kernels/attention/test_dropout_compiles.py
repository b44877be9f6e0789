"""Attention's kernels with dropout compile for a GPU that is not here, and once for all
probabilities."""

from functools import partial

import pytest
import torch

from slipstream import ops
from slipstream.kernels.attention.triton.plan import HAVE_TRITON, INTERPRETED

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)
KERNELS = {"softmax_queries_kernel", "softmax_dkv_kernel"}


def _attention(device: torch.device, D: int, dropout_p: float) -> torch.Tensor:
    q, k, v = (torch.empty(2, 200, 4, D, device=device, dtype=torch.bfloat16) for _ in range(3))
    return ops.attention(q, k, v, dropout_p=dropout_p)


@pytest.mark.parametrize("D", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_kernels_with_dropout_compile(D: int) -> None:
    from slipstream.compiler.trace import trace

    jobs = trace(partial(_attention, D=D, dropout_p=0.1), "sm_90")
    drop = [job for job in jobs if job.name in KERNELS]
    assert {job.name for job in drop} == KERNELS and len(drop) > 2
    for job in drop:
        assert job.compile().text


def test_probability_is_nothing_that_kernels_are_compiled_for() -> None:
    from slipstream.compiler.trace import trace

    keys = [
        {job.key for job in trace(partial(_attention, D=64, dropout_p=p), "sm_80")}
        for p in (0.1, 0.5, 0.9)
    ]
    assert keys[0] == keys[1] == keys[2]
