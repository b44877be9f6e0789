"""Gradients: the base class of every torch.autograd.Function here, and who wants a gradient.

A Function declares forward and backward, and the operator that errors name:

    class _Scan(Function):
        operator = "slipstream::scan"

        @staticmethod
        def forward(ctx, x, g):
            ...
            save(ctx, g, h)

        @staticmethod
        @once_differentiable
        def backward(ctx, saved, dh): ...

gradient.autograd_function makes one whose gradients are one call of an operator.

Derivatives are of first order and in reverse mode. Every other way to differentiate a Function
(torch.func's transforms, forward mode, a second derivative) raises NotImplementedError.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_exporting

from slipstream.common.checks import autocast_dtype, caller, device_type, name_of_caller


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors is recorded for a backward."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def needs_autograd(*tensors: Tensor | None) -> bool:
    """Whether it is a Function that records it.

    Not in torch.export: its graphs call the operators, which bring their gradients
    (runtime/gradient.py), while strict ones run the forward of a Function under no_grad.

    Raises:
        NotImplementedError: a transform of torch.func or forward mode wants a derivative. Callers
            that have torch operations for these (by_operation) ask that first.
    """
    if not wants_gradient(*tensors) or is_exporting():
        return False
    refuse_transforms("slipstream", tensors)
    return True


def transformed() -> bool:
    """Whether a transform of torch.func or a level of forward-mode differentiation is active."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def is_tracing() -> bool:
    """Whether torch.jit.trace records this thread's operations."""
    return torch._C._get_tracing_state() is not None


@contextmanager
def untraced() -> Iterator[None]:
    """Nothing is recorded by torch.jit.trace, to which sizes are tensors."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # pyright: ignore[reportAttributeAccessIssue]


def by_operation() -> bool:
    """Whether torch operations are to be preferred to a Function: torch.compile fuses them,
    torch.func and forward mode differentiate them, and torch.jit.trace records them."""
    return is_compiling() or transformed() or is_tracing()


def refuse_tangents(operator: str, args: tuple) -> None:
    """Raises where forward mode wants a derivative, which would come out as zero. operator: what
    the error calls it where no public function is on the stack."""
    if forward_ad._current_level >= 0:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            _raise(operator)


def refuse_transforms(operator: str, args: tuple) -> None:
    """Refuses the same, and torch.func's transforms. Callers of a Function ask this before, most
    by needs_autograd."""
    if is_compiling() or not transformed():
        return
    if torch._C._are_functorch_transforms_active():
        _raise(operator)
    refuse_tangents(operator, args)


def _raise(operator: str) -> NoReturn:
    raise NotImplementedError(
        f"{name_of_caller(operator)}: torch.func's transforms and forward-mode derivatives are not "
        "implemented; torch.autograd.grad and backward are"
    )


# what a Function saved
Saved = tuple[Any, ...]


class Function(torch.autograd.Function):
    """operator: what errors call it where no public function is on the stack.

    torch refuses to change a result in place that is a view of what forward has made. Results of
    operators are none (runtime/custom_op.py); what forward makes itself goes through as_base.
    """

    operator: str


def as_base(x: Tensor) -> Tensor:
    """x, or for a view a tensor over the same memory that is no view. Only for views of memory that
    the forward has allocated itself. To torch.jit.trace x.data would be a constant."""
    return x.data if not is_compiling() and x._is_view() and not is_tracing() else x


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """ctx.save_for_backward, and the name of the public function, for errors in backward."""
    ctx.save_for_backward(*tensors)
    if not is_compiling():
        ctx.called_by = caller()


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """backward(ctx, saved, *grads), which reads saved instead of ctx.saved_tensors: these may be
    read only once. What it returns refuses a second derivative.

    torch's own decorator lets autograd.grad(penalty + loss, x) drop the penalty, for its error is
    not on the way from the penalty to x. Here it is on every way through what was saved and through
    the gradients that came in.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        if is_compiling():
            return backward(ctx, saved, *grads)
        decided = _forward_decided(grads)
        if not torch.is_grad_enabled():
            if decided is None:
                return backward(ctx, saved, *grads)
            with decided:
                return backward(ctx, saved, *grads)
        with torch.no_grad(), decided or nullcontext():
            results = backward(ctx, saved, *grads)
        through = [x for x in (*saved, *grads) if x is not None and x.requires_grad]
        if not through:
            return results
        results = results if isinstance(results, tuple) else (results,)
        made = [x for x in results if x is not None]
        operator = name_of_caller(ctx._forward_cls.operator, getattr(ctx, "called_by", ""))
        refusing = iter(_Refusing.apply(operator, len(made), *made, *through))
        return tuple(None if x is None else next(refusing) for x in results)

    return run


def _forward_decided(grads: tuple) -> AbstractContextManager | None:
    """Autocast for a backward: off, because the forward has chosen the dtypes."""
    for x in grads:
        if x is not None:
            if autocast_dtype(x) is None:
                return None
            return torch.autocast(device_type(x), enabled=False)
    return None


class _Refusing(torch.autograd.Function):
    """The first `count` tensors, which depend on the others in a way that has no derivative."""

    @staticmethod
    def forward(ctx: Any, operator: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operator = operator
        # not views, which could not be changed in place
        return tuple(x.data for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(f"{ctx.operator}: a second derivative is not implemented")


def refuse_second(y: Tensor, operator: str) -> None:
    """For y of a torch operation whose backward has no derivative: has it raise as a Function's,
    instead of a RuntimeError that names a kernel of torch's."""
    called_by = name_of_caller(operator)

    def refuse(grads: tuple, _: tuple) -> tuple | None:
        if not torch.is_grad_enabled():
            return None
        made = [x for x in grads if x is not None and x.requires_grad]
        if not made:
            return None
        refusing = iter(_Refusing.apply(called_by, len(made), *made, *made))
        return tuple(x if x is None or not x.requires_grad else next(refusing) for x in grads)

    assert y.grad_fn is not None
    y.grad_fn.register_hook(refuse)


def anchors(*tensors: Tensor | None) -> list[Tensor]:
    """For a forward that saves nothing the graph connects to its inputs: empty tensors to save,
    which are connected to them and hold none of their memory."""
    if is_compiling():
        return []
    with torch.enable_grad():
        given = [x for x in tensors if x is not None and x.requires_grad]
        return [x.narrow_copy(0, 0, 0) for x in given]
