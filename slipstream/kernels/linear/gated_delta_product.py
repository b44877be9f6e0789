"""Several Householder steps a token, each as a token of the gated delta rule.

The first of a token's n steps decays and its last reads: q and g are zero at the others, and o is
thrown away there. To the steps and back:

    y[t n + i] = x[t] if i = at else 0            x[t] = y[t n + at]
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import op
from slipstream.kernels.linear.inputs import BackwardCall, ForwardCall, LinearInputs
from slipstream.kernels.linear.modes.memory import STATE_DIMS, Groups, groups_of, in_groups
from slipstream.runtime import autograd, custom_op, dispatch, guarded_launch, kernel_pair
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.compile_ahead import AtSizes, resized


def at_step(x: Tensor, n: int, *, last: bool) -> Tensor:
    """x of each token at the first or the last of its n steps, zeros at the others."""
    zeros = x.new_zeros(x.shape[0], x.shape[1], n - 1, *x.shape[2:])
    x = x.unsqueeze(2)
    return torch.cat([zeros, x] if last else [x, zeros], dim=2).flatten(1, 2)


def interleave(
    q: Tensor, g: Tensor | None, do: Tensor | None, n: int, impl: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q [B, T, H, K] and do [B, T, HV, V] at the last steps, g [B, T, HV] at the first."""
    with _guard(impl, q) as usable:
        if usable:
            return _launch_interleave(q, g, do, n)
    return eager_interleave(q, g, do, n)


def deinterleave(
    q: Tensor, g: Tensor | None, n: int, to: Tensor, g_to: Tensor | None, impl: str
) -> None:
    """`to` and g_to, contiguous, are written: q at the last step of each token, g at the first."""
    with _guard(impl, q) as usable:
        if usable:
            _launch_deinterleave(q, g, n, to, g_to)
            return
    eager_deinterleave(q, g, n, to, g_to)


def _launch_interleave(
    q: Tensor, g: Tensor | None, do: Tensor | None, n: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    from slipstream.kernels.linear.triton import householder

    return householder.interleave(q, g, do, n)


def eager_interleave(
    q: Tensor, g: Tensor | None, do: Tensor | None, n: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    gates = None if g is None else at_step(g, n, last=False)
    return at_step(q, n, last=True), gates, None if do is None else at_step(do, n, last=True)


def _launch_deinterleave(
    q: Tensor, g: Tensor | None, n: int, to: Tensor, g_to: Tensor | None
) -> None:
    from slipstream.kernels.linear.triton import householder

    householder.deinterleave(q, g, n, to, g_to)


def eager_deinterleave(
    q: Tensor, g: Tensor | None, n: int, to: Tensor, g_to: Tensor | None
) -> None:
    for x, at, dest in ((q, n - 1, to), (g, 0, g_to)):
        if x is not None and dest is not None:
            dest.copy_(x[:, at::n])


def _guard(impl: str, x: Tensor) -> guarded_launch.Guard:
    """The guard of the kernels here: plain torch takes over, whatever runs the recurrence."""
    return guarded_launch.Guard(
        "eager" if impl.startswith("eager") else dispatch.TRITON_OR_EAGER,
        x.device,
        lambda: ("linear.steps", x.dtype, x.shape[3:]),
        lambda: _mismatch(x),
    )


def _mismatch(like: Tensor) -> str | None:
    """The probe: there and back on a few tokens as wide."""
    n = 3
    q, do = (kernel_pair.random_like(like, 2, 11, H, *like.shape[3:]) for H in (2, 4))
    g, gs = (torch.randn(2, T, 4, device=like.device) for T in (11, 11 * n))
    results = []
    for dest, back in (
        (_launch_interleave, _launch_deinterleave),
        (eager_interleave, eager_deinterleave),
    ):
        rows = dest(q, g, do, n)
        taken, gates = torch.empty_like(q), torch.empty_like(g)
        back(rows[0], gs, n, taken, gates)
        results.append((*rows, taken, gates))
    names = (*(f"{x} at its steps" for x in ("q", "g", "do")), "q taken back", "g taken back")
    for name, x, y in zip(names, *results):
        if (error := kernel_pair.relative_error(x, y)) != 0.0:
            return f"{name} is off by {error:.1e} of its size, where nothing is rounded"
    return None


class Steps(NamedTuple):
    """q [B, T, H, K]; k [B, T n, H, K], v [B, T n, HV, V], beta [B, T n, HV]; g [B, T, HV]; the
    state before the first token [N, HV, K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None = None
    state: Tensor | None = None

    @property
    def n(self) -> int:
        return self.k.shape[1] // self.q.shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.q.shape[0], self.v.shape[2], self.q.shape[3], self.v.shape[3])

    def terms(self, impl: str, do: Tensor | None = None) -> tuple[LinearInputs, Tensor | None]:
        """Its terms, each step a token, and the gradient of o by steps."""
        q, g, do = interleave(self.q, self.g, do, self.n, impl)
        given = {"g": g, "beta": self.beta, "initial_state": self.state}
        return LinearInputs(q, self.k, self.v, **given), do


_OF_KEYS, _OF_VALUES = ("B", "T", "H"), ("B", "T", "HV")
_DIMS = {"q": _OF_KEYS, "k": _OF_KEYS, "v": _OF_VALUES, "beta": _OF_VALUES, "g": _OF_VALUES}
_DIMS |= {"state": STATE_DIMS}


def _groups(given: Steps, impl: str, grads: bool) -> Groups | None:
    """How a call is cut: by what its steps leave, and q, o and do by steps."""
    k, v, beta, E = given.k, given.v, given.beta, given.v.element_size()
    H, HV = k.shape[2], v.shape[2]
    beside = (k.shape[3] * H // HV + (1 + grads) * v.shape[3]) * E
    g = None if given.g is None else beta
    terms = LinearInputs(k, k, v, g=g, beta=beta, initial_state=given.state)
    return groups_of(terms, impl, grads, beside=beside)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final state."""
    *tensors, scale, chunk, impl = args
    given = Steps(*tensors)
    terms, _ = given.terms(impl)
    wide, final = op.forward_impl(*terms, *ForwardCall(scale, chunk, impl))
    o, _ = _fake_forward(*args)
    deinterleave(wide, None, given.n, o, None, impl)
    return o, final


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    given = Steps(*args[: len(Steps._fields)])
    (B, T), v = given.q.shape[:2], given.v
    return v.new_empty(B, T, *v.shape[2:]), v.new_empty(given.state_shape, dtype=torch.float32)


def _backward(*args: Any) -> list[Tensor]:
    """The gradients of those tensors that are given."""
    *tensors, do, dfinal, scale, chunk, impl = args
    given = Steps(*tensors)
    terms, do = given.terms(impl, do)
    found = op.backward_impl(*terms, *BackwardCall(do, dfinal, scale, chunk, impl))
    by_steps = op.by_name(terms, True, found)
    q, g = given.q.new_empty(given.q.shape), None
    if given.g is not None:
        g = given.g.new_empty(given.g.shape)
    deinterleave(by_steps["q"], by_steps.get("g"), given.n, q, g, impl)
    rest = by_steps["k"], by_steps["v"], by_steps["beta"], g, by_steps.get("initial_state")
    return [q, *(x for x in rest if x is not None)]


def _fake_backward(*args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in args[: len(Steps._fields)] if x is not None]


def _at_sizes(args: tuple, sizes: AtSizes) -> Iterator[tuple]:
    """Calls of other sizes, whose kernels are compiled after a first call."""
    n = Steps(*args[: len(Steps._fields)]).n
    for other in sizes(args):
        given, (B, T) = Steps(*other[: len(Steps._fields)]), other[0].shape[:2]
        by_steps = {name: resized(getattr(given, name), B, n * T) for name in ("k", "v", "beta")}
        yield (*given._replace(**by_steps), *other[len(given) :])


_TENSORS = custom_op.schema_of(Steps)
_OPTIONS = "float scale, int chunk, str impl"
_call_forward = custom_op.KernelOp(
    "steps_forward",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    replay=True,
    at_sizes=op.with_short(
        partial(_at_sizes, sizes=AtSizes(tokens=(0, 4), states=(5,), heads=2)),
        len(Steps._fields) + 1,
    ),
)
_call_backward = custom_op.KernelOp(
    "steps_backward",
    f"({_TENSORS}, Tensor? dout, Tensor? dfinal, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    replay=True,
    at_sizes=partial(_at_sizes, sizes=AtSizes(tokens=(0, 4, 6), states=(5, 7), heads=2)),
)


class _Steps(Function):
    operator = "slipstream::gated_delta_product"

    @staticmethod
    def forward(ctx: Any, options: tuple, *tensors: Any) -> Any:
        scale, chunk, impl = options
        o, final = _call_forward(*tensors, scale=scale, chunk=chunk, impl=impl)
        save(ctx, *tensors)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dout: Tensor | None, dfinal: Tensor | None) -> Any:
        if dout is None and dfinal is None:
            return (None,) * (1 + len(saved))
        found = iter(_call_backward(*saved, dout, dfinal, *ctx.options))
        return (None, *(None if x is None else next(found) for x in saved))


def _of_operator(*args: Any) -> Any:
    """As slipstream::_steps_forward is called."""
    width = len(Steps._fields)
    return _Steps.apply(args[width:], *args[:width])


_call_forward.set_gradient(_of_operator)


def product(given: Steps, *options: Any) -> tuple[Tensor, ...]:
    """o [B, T, HV, V] and the final state, float32, with gradients.

    Args:
        options: scale, tokens a chunk (0: token by token), implementation.
    """
    groups = _groups(given, options[-1], autograd.wants_gradient(*given))
    if groups is None:
        return _product(given, *options)
    return in_groups(lambda group: _product(group, *options), given, _DIMS, groups)


def _product(given: Steps, scale: float, chunk: int, impl: str) -> tuple[Tensor, ...]:
    if needs_autograd(*given):
        return _Steps.apply((scale, chunk, impl), *given)
    return _call_forward(*given, scale=scale, chunk=chunk, impl=impl)
