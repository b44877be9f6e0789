"""The Triton short convolution behind autograd."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDEST = 8


def refuses(x: Tensor, weight: Tensor, *given: Tensor | None) -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    if torch.compiler.is_compiling():
        return "torch.compile makes its own kernels of it"
    if weight.shape[1] > WIDEST:
        return f"it takes at most {WIDEST} taps"
    if x.shape[-1] == 0 or (given and given[-1] is not None and given[-1].numel() < 2):
        return "there are no channels or sequences"
    if any(t is not None and t.dtype == torch.float64 for t in (weight, *given)):
        return "it computes in float32, and an input is float64"
    return None


def refuses_update(x: Tensor, *given: Tensor | None) -> str | None:
    tensors = [t for t in (x, *given) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "it makes no gradients"
    weight = given[0]
    assert weight is not None
    return refuses(x, weight, *given[1:])


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> Tensor:
    return _Convolution.apply(x, weight, bias, residual, state, cu_seqlens, silu)


def update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    indices: Tensor | None,
    silu: bool,
) -> Tensor:
    """x, y [N, D]; the state moves on in place."""
    x, weight, bias, residual, indices = _contiguous(x, weight, bias, residual, indices)
    return _launch().update(x, state, weight, bias, residual, indices, silu)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
        silu: bool,
    ) -> Tensor:
        x, weight, bias, residual, state, cu_seqlens = _contiguous(
            x, weight, bias, residual, state, cu_seqlens
        )
        y, where = _launch().forward(x, weight, bias, residual, state, cu_seqlens, silu)
        ctx.save_for_backward(x, weight, bias, state, cu_seqlens, where)
        ctx.silu, ctx.residual_dtype = silu, None if residual is None else residual.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias, dstate = _launch().backward(
            dy.contiguous(), *ctx.saved_tensors, ctx.silu
        )
        dresidual = None if ctx.residual_dtype is None else dy.to(ctx.residual_dtype)
        return dx, dweight, dbias, dresidual, dstate, None, None


def _contiguous(*tensors: Any) -> Any:
    return tuple(None if t is None else t.contiguous() for t in tensors)


@cache
def _launch() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.conv.triton import launch

    return launch
