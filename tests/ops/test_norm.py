"""The norms beside torch's own, and what they refuse."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from slipstream.ops.norm import l2_norm, rms_norm


def test_l2_norm_of_zero() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    y = l2_norm(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4))
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("way", ["grad of vmap", "make_fx", "jit.trace"])
def test_l2_norm_recorded_without_gradients_has_them(way: str) -> None:
    x, given = torch.randn(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    want = torch.func.grad(lambda x: (l2_norm(x) ** 3).sum())(x)
    if way == "grad of vmap":
        got = torch.func.grad(lambda x: (torch.func.vmap(l2_norm)(x) ** 3).sum())(x)
    else:
        trace = torch.jit.trace if way == "jit.trace" else lambda fn, x: make_fx(fn)(x)
        graph: Any = trace(lambda x: l2_norm(x), given)
        x.requires_grad_()
        (got,) = torch.autograd.grad((graph(x) ** 3).sum(), x)
    torch.testing.assert_close(got, want)


def test_rms_norm_residual_in_fp32() -> None:
    x = torch.full((1, 8), 2.0**-9, dtype=torch.bfloat16)
    residual = torch.ones(1, 8, dtype=torch.bfloat16)
    y, h = rms_norm(x, residual=residual, prenorm=True, residual_in_fp32=True)
    assert y.dtype == torch.bfloat16
    assert torch.equal(h, torch.full((1, 8), 1 + 2.0**-9))


def test_rms_norm_takes_weights_of_another_dtype() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.rand(8)
    y = rms_norm(x, weight)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, rms_norm(x.float(), weight).bfloat16())
