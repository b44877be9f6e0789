"""Gradients of operators that are called without the autograd.Function around them.

torch.export and make_fx trace what is inside of an autograd.Function, so their graphs call the
operator itself, with inputs that may require gradients. The implementation must not run there with
autograd recording it: kernels are invisible to autograd, and plain torch writes into buffers.
Each operator therefore has an autograd kernel. It calls the differentiable function that
`set_gradient` registered, or, without one, gives results whose backward raises an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import fill_defaults

from slipstream.common.checks import name_of_caller
from slipstream.runtime.autograd import refuse_tangents, refuse_transforms

_GRADIENTS: dict[Any, Callable] = {}


def set_gradient(overload: Any, differentiable: Callable) -> None:
    """Registers a function of the operator's arguments that returns its first results with
    gradients. Further results, which only the operator's own backward reads, have none."""
    _GRADIENTS[overload] = differentiable


def autograd_kernel(overload: Any) -> Callable:
    """The operator's kernel for torch's Autograd dispatch key."""
    returns = overload._schema.returns
    is_list = len(returns) == 1 and str(returns[0].type) != "Tensor"

    def call(keyset: Any, *args: Any) -> Any:
        refuse_tangents(overload.name(), args)

        def below(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

        # as autograd has it: compiler/trace.py replaces the attribute requires_grad
        needs = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if not needs or not returns:
            return below(*args)
        refuse_transforms(overload.name(), args)
        # the dispatcher removes arguments that are equal to their defaults
        results = _with_gradients(overload, below, fill_defaults(overload._schema, args, {})[0])
        if is_list:
            return list(results)
        return results[0] if len(returns) == 1 else results

    return call


def _with_gradients(overload: Any, below: Callable, args: tuple) -> tuple[Tensor, ...]:
    first: tuple[Tensor, ...] = ()
    if overload in _GRADIENTS:
        given = _GRADIENTS[overload](*args)
        first = (given,) if isinstance(given, Tensor) else tuple(given)
        if len(first) == len(overload._schema.returns):
            return first
    return first + _WithoutGradient.apply(name_of_caller(str(overload)), below, *args)[len(first) :]


class _WithoutGradient(torch.autograd.Function):
    """Results whose gradient is an error that names the operator."""

    @staticmethod
    def forward(ctx: Any, name: str, below: Callable, *args: Any) -> tuple[Tensor, ...]:
        ctx.name = name
        results = below(*args)
        return (results,) if isinstance(results, Tensor) else tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: this result of the operator has no gradient; call the function of "
            "slipstream.ops that uses it, or call it under torch.no_grad()"
        )
