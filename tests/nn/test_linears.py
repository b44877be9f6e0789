"""Several linear layers of one input: as called one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import nn as ours
from slipstream.nn.linear import _Linears, linears


def layers(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    made = nn.Linear(5, 3), nn.Linear(5, 7, bias=False), nn.Linear(5, 1)
    return nn.ModuleList(made).to(dtype)


def gradients(ys: list[Tensor], *leaves: Any) -> list[Tensor]:
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
    torch.testing.assert_close(gradients(found, *leaves), gradients(want, *leaves))


@pytest.mark.parametrize("widths", [(100, 7, 16, 3), (16, 16), (100, 5), (7, 1)])
@pytest.mark.parametrize("unused", [None, 1])
def test_narrow_layers_are_one_product(
    widths: tuple[int, ...], unused: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = nn.ModuleList([nn.Linear(64, n, bias=False) for n in widths]).double()
    made[0].weight.requires_grad_(widths[0] != 100)
    x = torch.randn(2, 9, 64, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(p for p in made.parameters() if p.requires_grad)]
    calls: list[int] = []
    linear = torch.nn.functional.linear

    def product(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        calls.append(w.shape[0])
        return linear(x, w, b)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", product)
        found = linears(x, made)
    narrow = [n for n in widths if n <= 16]
    wide = [n for n in widths if n > 16]
    joined = [-(-sum(narrow) // 8) * 8] if len(narrow) > 1 else narrow
    assert calls == [*wide, *joined]
    want = [layer(x) for layer in made]
    for ys in (found, want):
        if unused is not None:
            ys[unused] = ys[0]
    torch.testing.assert_close(found, want)
    used = [p for p in leaves if unused is None or p is not made[unused].weight]
    torch.testing.assert_close(gradients(found, *used), gradients(want, *used))


def test_frozen_parts_and_unused_results_have_no_gradient() -> None:
    made, x = layers(), torch.randn(4, 5)
    made[0].weight.requires_grad_(False)
    ys = linears(x, made)
    ys[0].sum().backward()
    assert [p.grad is None for p in made.parameters()] == [True, False, True, True, True]
    x.requires_grad_()
    made.requires_grad_(False)
    ys = linears(x, made)
    (dx,) = torch.autograd.grad(ys[2].sum(), x)
    torch.testing.assert_close(dx, made[2].weight.expand(4, 5))


@pytest.mark.parametrize("kind", ["hook", "autocast", "dtype", "other", "no_grad"])
def test_other_modules_are_called(kind: str) -> None:
    made, x = layers(), torch.randn(4, 5, requires_grad=True)
    calls: list[Any] = []
    if kind == "hook":
        made[1].register_forward_hook(lambda module, args, y: calls.append(module))
    elif kind == "dtype":
        made[1].double()
        with pytest.raises(RuntimeError):  # torch's own
            linears(x, made)
        return
    elif kind == "other":
        made[1] = ours.Linear(5, 7, activation="silu")
    with (
        torch.autocast("cpu", enabled=kind == "autocast"),
        torch.set_grad_enabled(kind != "no_grad"),
    ):
        ys = linears(x, made)
        want = [layer(x) for layer in made]
    assert not is_one_node(ys)
    for a, b in zip(ys, want, strict=True):
        assert torch.equal(a, b)
    assert len(calls) == (2 if kind == "hook" else 0)


def test_linears_on_the_meta_device_have_shapes() -> None:
    made = layers().to("meta")
    ys = linears(torch.empty(4, 5, device="meta"), made)
    assert [y.shape for y in ys] == [(4, 3), (4, 7), (4, 1)]


def test_backward_alone_under_autocast() -> None:
    made, x = layers(), torch.randn(4, 5, requires_grad=True)
    leaves = [x, *made.parameters()]
    losses = [
        torch.stack([y.square().sum() for y in ys]).sum()
        for ys in (linears(x, made), [layer(x) for layer in made])
    ]
    with torch.autocast("cpu", torch.bfloat16):
        found, want = (torch.autograd.grad(loss, leaves) for loss in losses)
    torch.testing.assert_close(found, want, rtol=0.02, atol=0.1)


def test_unsaved_operands_may_change() -> None:
    made, x = layers(), torch.randn(4, 5, requires_grad=True)
    made.requires_grad_(False)
    inner = x * 1
    ys = linears(inner, made)
    inner.zero_()  # only the weights are read
    last: Any = made[2].weight
    (dx,) = torch.autograd.grad(ys[2].sum(), x)
    torch.testing.assert_close(dx, last.expand(4, 5))
    made.requires_grad_(True)
    ys = linears(torch.ones(4, 5), made)
    with torch.no_grad():
        last.zero_()  # only the input is read
    (dw,) = torch.autograd.grad(ys[2].sum(), last)
    assert torch.equal(dw, torch.full((1, 5), 4.0))
