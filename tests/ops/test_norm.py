"""The norms beside torch's own, and what they refuse."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from slipstream.ops.norm import group_norm, l2_norm, layer_norm, rms_norm, rms_norm_gated


@pytest.mark.parametrize("size", [1, 30, 257, 65537])
def test_norms_match_torch(size: int) -> None:
    x, weight, bias = torch.randn(3, 4, size), torch.randn(size), torch.randn(size)
    torch.testing.assert_close(rms_norm(x, weight), F.rms_norm(x, (size,), weight, 1e-5))
    torch.testing.assert_close(layer_norm(x, weight, bias), F.layer_norm(x, (size,), weight, bias))
    torch.testing.assert_close(l2_norm(x, eps=0.0), F.normalize(x, dim=-1))


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_norms_of_groups_and_layers_match_torch(has_weight: bool, has_bias: bool) -> None:
    x, *parameters = torch.randn(5, 12), torch.randn(12), torch.randn(12)
    given = [x if has else None for x, has in zip(parameters, (has_weight, has_bias))]
    torch.testing.assert_close(group_norm(x, 3, *given), F.group_norm(x, 3, *given))
    torch.testing.assert_close(layer_norm(x, *given), F.layer_norm(x, (12,), *given))
    by_rms = F.rms_norm(x, (12,), given[0], 1e-5) + (parameters[1] if has_bias else 0)
    torch.testing.assert_close(rms_norm(x, *given), by_rms)


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


def test_norms_reject_faults_by_name() -> None:
    x = torch.randn(2, 6)
    for call, error, word in [
        (lambda: rms_norm(x.long()), TypeError, "x: want a floating dtype"),
        (lambda: rms_norm(torch.tensor(1.0)), ValueError, "scalar"),
        (lambda: group_norm(x, 4), ValueError, "num_groups = 4"),
        (lambda: rms_norm_gated(x, x, group_size=4), ValueError, "group_size"),
    ]:
        with pytest.raises(error, match=word):
            call()
