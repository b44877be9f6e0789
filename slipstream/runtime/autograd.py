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

autograd_function makes one whose gradients are one call of an operator.

Derivatives are of first order and in reverse mode. Every other way to differentiate a Function
(torch.func's transforms, forward mode, a second derivative) raises NotImplementedError.

torch.export and make_fx trace what is inside of an autograd.Function, so their graphs call the
operator itself, with inputs that may require gradients. The implementation must not run there with
autograd recording it: kernels are invisible to autograd, and plain torch writes into buffers.
Each operator therefore has an autograd kernel. It calls the differentiable function that
`set_gradient` registered, or, without one, gives results whose backward raises an error.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._library.utils import fill_defaults
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_exporting

from slipstream.common.checks import autocast_dtype, caller, device_type, name_of_caller

if TYPE_CHECKING:
    from slipstream.runtime.custom_op import KernelOp


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors is recorded for a backward."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def refuse_gradients(operator: str, *tensors: Tensor | None) -> None:
    """Refuses a call that a backward is wanted of.

    Raises:
        NotImplementedError: a call on these tensors would be recorded for a backward.
    """
    if wants_gradient(*tensors):
        raise NotImplementedError(f"{operator}: it has no gradients; call it under torch.no_grad()")


def needs_autograd(*tensors: Tensor | None) -> bool:
    """Whether it is a Function that records it.

    Not in torch.export: its graphs call the operators, which bring their gradients
    (autograd_kernel), while strict ones run the forward of a Function under no_grad.

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


def with_loss(x: Tensor, loss: Tensor, weight: float) -> Tensor:
    """x, whose gradient takes that of weight times the loss along."""
    return _Beside.apply(x, loss, weight)


class _Beside(Function):
    operator = "slipstream::with_loss"

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.dtype, ctx.weight = loss.dtype, weight
        save(ctx)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, dx.new_full((), ctx.weight, dtype=ctx.dtype), None


def anchors(*tensors: Tensor | None) -> list[Tensor]:
    """For a forward that saves nothing the graph connects to its inputs: empty tensors to save,
    which are connected to them and hold none of their memory."""
    if is_compiling():
        return []
    with torch.enable_grad():
        given = [x for x in tensors if x is not None and x.requires_grad]
        return [x.narrow_copy(0, 0, 0) for x in given]


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


def autograd_function(
    op: "KernelOp",
    backward_op: "KernelOp",
    *,
    results: str,
    wrt: str,
    inverse: str = "",
    **fixed: Any,
) -> type[Function]:
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
        inverse: of an operator that is its own backward, the flag that says which of both it is; it
            takes the gradients of its results in the places of wrt.
        fixed: arguments of op that `apply` does not take, and their values.
    """
    names, differentiable = results.split(), wrt.split()
    assert len(names) == len(op.overload._schema.returns)
    taken = [x for x in op._names if x not in fixed]
    assert set(differentiable) <= set(taken)
    named = dict(zip(differentiable, [f"d{y}" for y in names])) if inverse else {}
    arguments = zip(backward_op._names, backward_op.overload._schema.arguments)
    kinds = {named.get(name, name): str(x.type) for name, x in arguments}
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
    flag = [*kinds].index(inverse) if inverse else -1
    needed_from = [n for n, x in enumerate(taken) if x in differentiable]

    def forward(ctx: Any, *args: Any) -> Any:
        all_args = args + values
        found: Any = op(*([all_args[n] for n in op_from] if values else args))
        found = (found,) if isinstance(found, torch.Tensor) else found
        known = args + found
        save(ctx, *[known[n] for n in saved_from])
        ctx.options = [known[n] for n in options_from]
        ctx.like = [(found[n].shape, found[n].dtype, found[n].device) for n in required]
        ctx.set_materialize_grads(False)
        outputs: Any = tuple([found[n] for n in returned])
        return outputs if len(outputs) > 1 else outputs[0]

    def backward(ctx: Any, saved: Saved, *grads: torch.Tensor | None) -> Any:
        if grads[0] is None and all(dy is None for dy in grads):
            return (None,) * len(taken)
        douts = [*grads]
        for n, (shape, dtype, device) in zip(required, ctx.like):
            if douts[n] is None:
                douts[n] = torch.zeros(shape, dtype=dtype, device=device)
        known = (*saved, *ctx.options, *douts)
        call = [known[n] for n in backward_from]
        if inverse:
            call[flag] = not call[flag]
        found: Any = backward_op(*call)
        found = (found,) if isinstance(found, torch.Tensor) else found
        if inverse:
            given = [x if ctx.needs_input_grad[n] else None for x, n in zip(found, needed_from)]
        else:
            left = iter(found)
            given = [next(left) if n is None or saved[n] is not None else None for n in given_from]
        return tuple([None if n is None else given[n] for n in grads_from])

    name = op.overload.name()
    body = {"operator": name, "forward": staticmethod(forward)}
    body["backward"] = staticmethod(once_differentiable(backward))
    metaclass: Any = type(Function)
    function = metaclass(name.partition("::")[2], (Function,), body)
    taken_from = [n for n, x in enumerate(op._names) if x not in fixed]
    op.set_gradient(lambda *args: function.apply(*[args[n] for n in taken_from]))
    return function
