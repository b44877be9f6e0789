"""Activations of a gate beside what it lets through: in plain torch, and the Triton ones."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.kernels.launching import choose_impl


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


FUNCTIONS = {"silu": F.silu, "gelu": _gelu, "sigmoid": torch.sigmoid, "relu2": _squared_relu}


def glu(gate: Tensor, up: Tensor | None, f: str, impl: str | None) -> Tensor:
    """f(gate) up, of one shape and dtype; no up is 1."""
    if choose_impl(impl, gate, _refuses) == "triton":
        return _Glu.apply(gate, up, f)
    y = FUNCTIONS[f](gate)
    return y if up is None else y * up


def _refuses(x: Tensor) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile makes its own kernel of it"
    if x.dim() == 0 or x.shape[-1] == 0:
        return "there are no features"
    return None


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, f: str) -> Tensor:
        from slipstream.kernels.pointwise.triton import glu

        ctx.save_for_backward(gate, up)
        ctx.f = f
        return glu.glu(gate, up, f)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        from slipstream.kernels.pointwise.triton import glu

        gate, up = ctx.saved_tensors
        return *glu.glu_backward(gate, up, dy, ctx.f), None
