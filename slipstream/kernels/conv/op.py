"""The Triton short convolution behind autograd."""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.core import guard, probe
from slipstream.core.machine import Kind
from slipstream.kernels.conv import plain

WIDEST = 8


def refuses(x: Tensor, weight: Tensor, *given: Tensor | None, what: str = "triton") -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    if torch.compiler.is_compiling():
        return "torch.compile makes its own kernels of it"
    if weight.shape[1] > WIDEST:
        return f"it takes at most {WIDEST} taps"
    if x.shape[-1] == 0 or (given and given[-1] is not None and given[-1].numel() < 2):
        return "there are no channels or sequences"
    if any(t is not None and t.dtype == torch.float64 for t in (weight, *given)):
        return "it computes in float32, and an input is float64"
    return guard.objection(lambda: kind(what, x, weight), x.device)


def refuses_update(x: Tensor, *given: Tensor | None) -> str | None:
    tensors = [t for t in (x, *given) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "it makes no gradients"
    weight = given[0]
    assert weight is not None
    return refuses(x, weight, *given[1:], what="update")


def kind(what: str, x: Tensor, weight: Tensor) -> Kind:
    """What a verdict on the kernels holds for."""
    return (f"conv.{what}", x.dtype, weight.dtype, weight.shape[1])


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    impl: str,
) -> Tensor:
    """impl: triton, or triton|eager."""
    return _Convolution.apply(x, weight, bias, residual, state, cu_seqlens, silu, impl)


def update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    indices: Tensor | None,
    silu: bool,
    impl: str,
) -> Tensor:
    """x, y [N, D]; the state moves on in place."""
    x, weight, bias, residual, indices = _contiguous(x, weight, bias, residual, indices)
    return guard.attempt(
        lambda: kind("update", x, weight),
        x.device,
        _launch().update,
        None if impl == "triton" else plain.update,
        (x, state, weight, bias, residual, indices, silu),
        lambda: _mismatch_of_update(x, state, weight, bias, silu),
    )


def _attempt(impl: str, name: str, x: Tensor, weight: Tensor, args: tuple) -> Any:
    return guard.attempt(
        lambda: kind("triton", x, weight),
        x.device,
        getattr(_launch(), name),
        None if impl == "triton" else getattr(plain, name),
        args,
        lambda: _mismatch(x, weight),
    )


def _mismatch(x: Tensor, weight: Tensor) -> str | None:
    """The probe: two packed sequences, with everything."""
    D, W = 70, weight.shape[1]
    made = {"x": probe.fresh(x, 1, 150, D), "weight": probe.fresh(weight, D, W)}
    made |= {"bias": probe.fresh(weight, D), "residual": probe.fresh(x, 1, 150, D)}
    made |= {"state": probe.fresh(x, 2, D, W)}
    made["cu_seqlens"] = torch.tensor([0, 50, 150], device=x.device)
    return probe.mismatch(
        lambda t: convolution(**t, silu=True, impl="triton|eager"),
        lambda t: plain.convolution(**t, silu=True),
        made,
    )


def _mismatch_of_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> str | None:
    D, W = 70, weight.shape[1]
    made = {"x": probe.fresh(x, 5, D), "state": probe.fresh(state, 5, D, W)}
    made |= {"weight": probe.fresh(weight, D, W)}
    made |= {"bias": None if bias is None else probe.fresh(bias, D)}

    def run(update: Callable) -> Callable[[probe.Given], Any]:
        def call(t: probe.Given) -> tuple[Tensor, Tensor]:
            y = update(*t.values(), None, None, silu)
            return y, cast(Tensor, t["state"])

        return call

    kernels = run(lambda *args: update(*args, impl="triton|eager"))
    return probe.mismatch(kernels, run(plain.update), made, gradients=False)


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
        impl: str,
    ) -> Tensor:
        x, weight, bias, residual, state, cu_seqlens = _contiguous(
            x, weight, bias, residual, state, cu_seqlens
        )
        args = (x, weight, bias, residual, state, cu_seqlens, silu)
        y, where = _attempt(impl, "forward", x, weight, args)
        ctx.save_for_backward(x, weight, bias, state, cu_seqlens, where)
        ctx.silu, ctx.residual_dtype = silu, None if residual is None else residual.dtype
        ctx.impl = impl
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors[:2]
        args = (dy.contiguous(), *ctx.saved_tensors, ctx.silu)
        dx, dweight, dbias, dstate = _attempt(ctx.impl, "backward", x, weight, args)
        dresidual = None if ctx.residual_dtype is None else dy.to(ctx.residual_dtype)
        return dx, dweight, dbias, dresidual, dstate, None, None, None


def _contiguous(*tensors: Any) -> Any:
    return tuple(None if t is None else t.contiguous() for t in tensors)


@cache
def _launch() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.conv.triton import launch

    return launch
