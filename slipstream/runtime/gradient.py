"""Gradients of operators that are called without the autograd.Function around them.

torch.export and make_fx trace what is inside of an autograd.Function, so their graphs call the
operator itself, with inputs that may require gradients. The implementation must not run there with
autograd recording it: kernels are invisible to autograd, and plain torch writes into buffers.
Each operator therefore has an autograd kernel. It calls the differentiable function that
`set_gradient` registered, or, without one, gives results whose backward raises an error.

Where the gradients are one call of another operator, autograd_function makes the autograd.Function.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._library.utils import fill_defaults

from slipstream.common.checks import name_of_caller
from slipstream.runtime import autograd

if TYPE_CHECKING:
    from slipstream.runtime.custom_op import KernelOp

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
        autograd.refuse_tangents(overload.name(), args)

        def below(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

        # as autograd has it: compiler/trace.py replaces the attribute requires_grad
        needs = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if not needs or not returns:
            return below(*args)
        autograd.refuse_transforms(overload.name(), args)
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


def autograd_function(
    op: "KernelOp", backward_op: "KernelOp", *, results: str, wrt: str, **fixed: Any
) -> type[autograd.Function]:
    """The Function of an operator whose gradients are one call of another operator. It becomes the
    gradient of the operator itself as well (set_gradient).

    The names in backward_op's schema say what is saved: each is an argument of `op`, one of its
    results, or dy for the gradient of a result y. Where no gradient came, "Tensor dy" is zeros and
    "Tensor? dy" is None.

    Args:
        results: names of op's results, "y final". One without a gradient in backward_op's schema
            is saved if that names it, and not returned.
        wrt: the arguments of op whose gradients backward_op returns, without those that are None,
            which it takes too. What it returns after these is left.
        fixed: arguments of op that `apply` does not take, and their values.
    """
    names, differentiable = results.split(), wrt.split()
    assert len(names) == len(op.overload._schema.returns)
    taken = [x for x in op._names if x not in fixed]
    assert set(differentiable) <= set(taken)
    kinds = {x.name: str(x.type) for x in backward_op.overload._schema.arguments}
    returned = [n for n, y in enumerate(names) if f"d{y}" in kinds]
    dnames = [f"d{names[n]}" for n in returned]
    saved_names = [x for x in kinds if "Tensor" in kinds[x] and x not in dnames]
    options = [x for x in kinds if "Tensor" not in kinds[x]]
    # Places instead of names, a dict of which takes 5 us more of each call: where the arguments of
    # op are in what it is given, what is kept in (*args, *results), and so on.
    op_from = [[*taken, *fixed].index(x) for x in op._names]
    saved_from = [[*taken, *names].index(x) for x in saved_names]
    options_from = [[*taken, *names].index(x) for x in options]
    backward_from = [[*saved_names, *options, *dnames].index(x) for x in kinds]
    # which saved tensor says whether an argument was given; an argument that is not saved was
    given_from = [saved_names.index(x) if x in saved_names else None for x in differentiable]
    grads_from = [differentiable.index(x) if x in differentiable else None for x in taken]
    # a single gradient that did not come is that of a result which nothing depends on
    required = [n for n, x in enumerate(dnames) if kinds[x] == "Tensor"] if dnames[1:] else []
    values = (*fixed.values(),)

    def forward(ctx: Any, *args: Any) -> Any:
        all_args = args + values
        found: Any = op(*([all_args[n] for n in op_from] if values else args))
        found = (found,) if isinstance(found, torch.Tensor) else found
        known = args + found
        autograd.save(ctx, *[known[n] for n in saved_from])
        ctx.options = [known[n] for n in options_from]
        ctx.like = [(found[n].shape, found[n].dtype, found[n].device) for n in required]
        ctx.set_materialize_grads(False)
        outputs: Any = tuple([found[n] for n in returned])
        return outputs if len(outputs) > 1 else outputs[0]

    def backward(ctx: Any, saved: autograd.Saved, *grads: torch.Tensor | None) -> Any:
        if grads[0] is None and all(dy is None for dy in grads):
            return (None,) * len(taken)
        douts = [*grads]
        for n, (shape, dtype, device) in zip(required, ctx.like):
            if douts[n] is None:
                douts[n] = torch.zeros(shape, dtype=dtype, device=device)
        known = (*saved, *ctx.options, *douts)
        found: Any = backward_op(*[known[n] for n in backward_from])
        left = iter((found,) if isinstance(found, torch.Tensor) else found)
        given = [next(left) if n is None or saved[n] is not None else None for n in given_from]
        return tuple([None if n is None else given[n] for n in grads_from])

    name = op.overload.name()
    body = {"operator": name, "forward": staticmethod(forward)}
    body["backward"] = staticmethod(autograd.once_differentiable(backward))
    metaclass: Any = type(autograd.Function)
    function = metaclass(name.partition("::")[2], (autograd.Function,), body)
    taken_from = [n for n, x in enumerate(op._names) if x not in fixed]
    op.set_gradient(lambda *args: function.apply(*[args[n] for n in taken_from]))
    if names[1:]:
        op._returned = returned
    return function
