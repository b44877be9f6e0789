"""Several linear layers of one input: as called one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.nn.linear import Linear, _Linears, linears


def layers(dtype: torch.dtype = torch.float32, bias: bool = False) -> Any:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(5, n, bias=bias) for n in (7, 3, 1)]).to(dtype)


def gradients(ys: list[Tensor], leaves: list[Any]) -> list[Tensor]:
    loss = torch.stack([y.sin().sum() for y in ys]).sum()
    return [*torch.autograd.grad(loss, leaves)]


def is_one_node(ys: list[Tensor]) -> bool:
    return {type(y.grad_fn) for y in ys} == {_Linears._backward_cls}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4), (), (0,)])
def test_linears_are_the_layers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made, x = layers(dtype), torch.randn(*shape, 5, dtype=dtype, requires_grad=True)
    leaves = [x, *made.parameters()]
    found = linears(x, [*made, None])
    assert found.pop() is None and is_one_node(found)
    want = [layer(x) for layer in made]
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
        a.mul_(1)  # no view that refuses to be changed
    rtol, atol = (0.05, 0.01) if dtype == torch.bfloat16 else (0.0, 1e-12)
    ours, theirs = gradients(found, leaves), gradients(want, leaves)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def test_frozen_parts_and_unused_results_have_no_gradient() -> None:
    made, x = layers(), torch.randn(4, 5)
    made[0].weight.requires_grad_(False)
    linears(x, made)[1].sum().backward()
    assert [p.grad is None for p in made.parameters()] == [True, False, True]
    x.requires_grad_()
    made.requires_grad_(False)
    (dx,) = torch.autograd.grad(linears(x, made)[2].sum(), x)
    torch.testing.assert_close(dx, made[2].weight.expand(4, 5))


@pytest.mark.parametrize("kind", ["hook", "autocast", "bias", "other", "no_grad"])
def test_other_modules_are_called(kind: str) -> None:
    made, x = layers(bias=kind == "bias"), torch.randn(4, 5, requires_grad=True)
    calls: list[Any] = []
    if kind == "hook":
        made[1].register_forward_hook(lambda module, args, y: calls.append(module))
    elif kind == "other":
        made[1] = Linear(5, 7, activation="silu")
    with (
        torch.autocast("cpu", enabled=kind == "autocast"),
        torch.set_grad_enabled(kind != "no_grad"),
    ):
        ys = linears(x, made)
        want = [layer(x) for layer in made]
    assert not is_one_node(ys)
    torch.testing.assert_close(ys, want, rtol=0, atol=0)
    assert len(calls) == (2 if kind == "hook" else 0)


def test_backward_alone_under_autocast() -> None:
    made, x = layers(), torch.randn(4, 5, requires_grad=True)
    leaves = [x, *made.parameters()]
    ys, want = linears(x, made), [layer(x) for layer in made]
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(ys, leaves)
    torch.testing.assert_close(found, gradients(want, leaves))


def test_unsaved_operands_may_change() -> None:
    made, x = layers(), torch.randn(4, 5, requires_grad=True)
    made.requires_grad_(False)
    inner = x * 1
    ys = linears(inner, made)
    inner.zero_()  # only the weights are read
    (dx,) = torch.autograd.grad(ys[2].sum(), x)
    torch.testing.assert_close(dx, made[2].weight.expand(4, 5))
    made.requires_grad_(True)
    ys = linears(torch.ones(4, 5), made)
    last: Any = made[2].weight
    with torch.no_grad():
        last.zero_()  # only the input is read
    (dw,) = torch.autograd.grad(ys[2].sum(), last)
    assert torch.equal(dw, torch.full((1, 5), 4.0))
