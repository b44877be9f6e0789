"""Calls that the activations refuse; their results are in test_blocks.py."""

import torch

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
