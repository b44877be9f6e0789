"""Calls that the activations refuse; their results are in test_blocks.py."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.activation import glu_linear, swiglu


def test_glu_linear_keeps_no_product_for_the_backward() -> None:
    gate, up, weight = (torch.randn(*s, requires_grad=True) for s in ((9, 6), (9, 6), (4, 6)))
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        glu_linear(gate, up, weight)
    assert {id(x) for x in kept} == {id(x) for x in (gate, up, weight)}


def test_glu_linear_under_autocast_is_its_parts() -> None:
    gate, up, weight = torch.randn(9, 6), torch.randn(9, 6), torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = glu_linear(gate, up, weight)
        want = torch.nn.functional.linear(swiglu(gate.bfloat16(), up.bfloat16()), weight)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, want)
    (grad,) = torch.autograd.grad(y.float().sum(), weight)
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 0, 3), (0,), (3,)])
def test_glu_linear_of_no_rows_or_no_features(shape: tuple[int, ...]) -> None:
    gate, up = (torch.randn(shape).requires_grad_() for _ in range(2))
    weight, bias = torch.randn(4, shape[-1]).requires_grad_(), torch.randn(4).requires_grad_()
    leaves = gate, up, weight, bias
    y, want = glu_linear(*leaves), F.linear(swiglu(gate, up), weight, bias)
    torch.testing.assert_close(y, want)
    grads = (torch.autograd.grad(x.sum(), leaves) for x in (y, want))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y)


def test_glu_linear_rejects_faults_by_name() -> None:
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    for call, error, word in [
        (lambda: glu_linear(x, None, weight), ValueError, "up: want a tensor for 'swiglu'"),
        (lambda: glu_linear(x, x, weight, activation="squared_relu"), ValueError, "up: want None"),
    ]:
        with pytest.raises(error, match=word):
            call()
