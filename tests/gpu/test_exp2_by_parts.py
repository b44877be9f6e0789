"""exp2 of forward's decays on a CUDA device: a whole number more moves the exponent alone."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.dplr.intra_anchored import exp2_by_parts
from slipstream.runtime.launch_cache import cached

BLOCK = 1024


@triton.jit
def exp2_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, exp2_by_parts(tl.load(x_ptr + o), 1.0))


def exp2_of(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    cached(exp2_kernel)[(x.numel() // BLOCK,)](x, y, BLOCK=BLOCK)
    return y


def test_whole_numbers_move_exponents_alone() -> None:
    part = torch.arange(2**14, device="cuda", dtype=torch.float32) / 2**14
    want = exp2_of(part)
    torch.testing.assert_close(want, part.double().exp2().float(), rtol=3e-7, atol=0.0)
    for whole in range(-125, 126):
        got = exp2_of(part + whole)
        assert torch.equal(got, want * 2.0**whole), whole


def test_least_numbers_stay_small() -> None:
    x = torch.tensor([-127.5, -1e4, -torch.inf], device="cuda").repeat(BLOCK)
    assert exp2_of(x).max() <= 2.0**-125


def test_nan_stays() -> None:
    x = torch.full((BLOCK,), torch.nan, device="cuda")
    assert exp2_of(x).isnan().all()
