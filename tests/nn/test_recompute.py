"""Tensors that the backward makes again: the same gradients, and nothing of them kept."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.layers import RWKV7, GatedDeltaNet, KimiDeltaAttention, Mamba2
from slipstream.nn import recompute
from slipstream.nn.recompute import Recompute

LAYERS = [
    (GatedDeltaNet, {"num_v_heads": 4}),
    (GatedDeltaNet, {"conv_size": None}),
    (Mamba2, {}),
    (KimiDeltaAttention, {}),
    (KimiDeltaAttention, {"lower_bound": -4.0}),
    (RWKV7, {}),
]


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "MIN_ELEMENTS", 1)


def gradients(layer: Any, x: Tensor, **options: Any) -> list[Tensor]:
    x = x.clone().requires_grad_()
    leaves = [x, *layer.parameters()]
    y = layer(x, **options)[0]
    return [y, *torch.autograd.grad(y.sin().sum(), leaves)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("layer", "options"), LAYERS)
def test_recomputed_layers_have_the_same_gradients(
    layer: Any, options: dict[str, Any], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = layer(hidden_size=32, num_heads=2, **options)
    x = torch.randn(1, 40, 32)
    given = {"cu_seqlens": torch.tensor([0, 7, 40])} if packed else {}
    got = gradients(m, x, **given)
    monkeypatch.setattr(recompute, "MIN_ELEMENTS", 1 << 40)
    torch.testing.assert_close(got, gradients(m, x, **given), rtol=0, atol=0)


@pytest.mark.parametrize("layer", [GatedDeltaNet, Mamba2, KimiDeltaAttention])
def test_layers_leave_nothing_where_no_backward_runs(
    layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[weakref.ref] = []

    class Saved(recompute._Saved):
        __slots__ = ("__weakref__",)

        def __init__(self, x: Tensor) -> None:
            super().__init__(x)
            saved.append(weakref.ref(self))

    monkeypatch.setattr(recompute, "_Saved", Saved)
    m = layer(hidden_size=32, num_heads=2, layer_idx=1)
    y = m(torch.randn(1, 40, 32, requires_grad=True))[0]
    assert any(x() is not None for x in saved)
    del y
    gc.collect()
    assert not any(x() is not None for x in saved)


class Chain:
    """y = sin(cos(exp(x)))), whose exp and cos are made again."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        def make() -> list[Tensor]:
            self.calls += 1
            e = x.exp()
            return [e, e.cos()]

        with Recompute(make, x.numel()) as (_, c):
            return c[1:].sin() + x[1:]


def test_backward_makes_it_once_each_time() -> None:
    chain, x = Chain(), torch.randn(9, requires_grad=True)
    y = chain(x)
    assert chain.calls == 1
    (want,) = torch.autograd.grad(x.exp().cos()[1:].sin().sum() + x[1:].sum(), x)
    for calls in (2, 3):
        (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        torch.testing.assert_close(got, want)
        assert chain.calls == calls


def test_nothing_of_it_is_kept() -> None:
    alive = []
    for elements in (1, 0):
        x = torch.randn(1 << 16, requires_grad=True)
        chain = [lambda x=x: [e := x.exp(), e.cos()]]
        with Recompute(chain[0], elements) as made:
            y = made[1].sin()
        storages = [t.untyped_storage()._weak_ref() for t in made]
        made.clear()
        alive.append([torch.UntypedStorage._expired(ref) for ref in storages])
        y.sum().backward()
    assert alive == [[True, True], [False, False]]


def test_checkpointing_and_no_gradients_leave_it_alone() -> None:
    chain, x = Chain(), torch.randn(9, requires_grad=True)
    checkpoint(chain, x, use_reentrant=False).sum().backward()
    assert chain.calls == 2  # as checkpoint makes everything again
    with torch.no_grad():
        chain(x)
    assert chain.calls == 3
    with torch.autocast("cpu"):
        chain(x).sum().backward()
    assert chain.calls == 4


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(9, requires_grad=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(Chain()(x).sum(), x, create_graph=True)


@pytest.fixture(params=[GatedDeltaNet, KimiDeltaAttention, Mamba2], ids=lambda x: x.__name__)
def layer(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param(hidden_size=32, num_heads=2)


def test_parameters_are_those_of_the_forward(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """functional_call gives them back before the backward."""
    x, found = torch.randn(1, 9, 32), []
    for least in (1, 1 << 40):
        monkeypatch.setattr(recompute, "MIN_ELEMENTS", least)
        others = {n: (1.5 * p.detach()).requires_grad_() for n, p in layer.named_parameters()}
        y = torch.func.functional_call(layer, others, (x,))[0]
        found.append(torch.autograd.grad(y.sin().sum(), list(others.values())))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_changes_in_place_before_the_backward_are_errors(layer: Any) -> None:
    y = layer(torch.randn(1, 9, 32))[0]
    with torch.no_grad():
        layer.conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_lives_beyond_the_backward(layer: Any) -> None:
    """Without the collector of cycles, which may be long in coming."""
    found: list[Any] = []
    project = layer.in_proj if isinstance(layer, Mamba2) else layer.qkv_proj
    project.register_forward_hook(lambda m, a, out: found.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    try:
        layer(torch.randn(1, 9, 32))[0].sum().backward()
        assert [ref() for ref in found] == [None]
    finally:
        gc.enable()


def test_hooks_that_are_forbidden_are_not_set(layer: Any) -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        layer(torch.randn(1, 9, 32))[0].sum().backward()
    assert layer.A_log.grad is not None
