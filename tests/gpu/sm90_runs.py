"""Shared by tests of the linear family's kernels on sm_90: the oracle's numbers, equal bits."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MARKS = pytest.mark.skipif(not on_hopper, reason="needs sm_90")
SCALE = 0.1
LENGTHS = (5, 0, 200, 1, 64)  # of packed sequences


def offsets(lengths: tuple[int, ...] | None) -> Tensor | None:
    if lengths is None:
        return None
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def gradients_of_results(terms: LinearInputs) -> tuple[Tensor, Tensor]:
    """Some, of o and of the final state."""
    return torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")


def reference(terms: LinearInputs, do: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
    """o, the final state and the gradients of everything given, in float64."""
    wide = {
        name: x.cpu() if name == "cu_seqlens" else x.cpu().double().requires_grad_()
        for name, x in terms._asdict().items()
        if x is not None
    }
    o, final = linear_reference(LinearInputs(**wide), SCALE)
    loss = (o * do.cpu()).sum() + (final * dfinal.cpu()).sum()
    live = {name: x for name, x in wide.items() if name != "cu_seqlens"}
    grads = torch.autograd.grad(loss, list(live.values()))
    return {"o": o.detach(), "final": final.detach(), **dict(zip(live, grads, strict=True))}


def run(launch: Any, terms: LinearInputs, do: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
    """The results of a module of launches, forward and backward."""
    o, final, *_ = launch.forward(terms, SCALE)
    return {"o": o, "final": final, **launch.backward(terms, do, dfinal, SCALE)}


def expect(
    make: Callable[[], dict[str, Tensor]],
    want: Mapping[str, Tensor],
    limits: Mapping[str, float],
    limit: float,
) -> dict[str, Tensor]:
    """The results, which have the same bits twice and are as near to `want` as limits say."""
    got, again = make(), make()
    for name, x in got.items():
        assert torch.equal(x, again[name]), name
        # a gate of -inf leaves nothing of the state
        norm = max(float(want[name].norm()), 1e-30)
        error = float((x.cpu() - want[name]).norm()) / norm
        assert error <= limits.get(name, limit), (name, error)
    return got
