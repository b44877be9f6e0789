"""Gated slot attention in 16 bits as one operator: two passes of the scalar-decay family.

    scores = Sk^T q      Sk_t = Sk_{t-1} diag(exp(g_t)) + k_t s_t^T      p = softmax(scale * scores)
    o = Sv^T p           Sv_t = diag(exp(g_t)) Sv_{t-1} + s_t v_t^T

The softmax multiplies errors of the scores. So these are float32, of products whose factors are in
two parts (triton/vector_decay/chunk.py). Backward gets p. M slots; Sk [N, H, K, M], Sv
[N, H, M, V]; `first` and `second` name the implementations of the passes.

Memory beyond results, in tensors of the size of s in 16 bits, M = 64: forward 7, which are the
scores and what the first pass leaves for its scan, or p and what the second does; backward p and
dp, 8 to 10 in all.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import inputs, op
from slipstream.kernels.linear.modes.memory import O_DIMS, Groups, groups_of, in_groups
from slipstream.runtime import autograd, dispatch, guarded_launch, kernel_pair
from slipstream.runtime.compile_ahead import AtSizes
from slipstream.runtime.custom_op import KernelOp, schema_of


class GSAInputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, H, V]; s, g [B, T, H, M]; the states before the first token."""

    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor
    g: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def first(self) -> inputs.LinearInputs:
        q, k, _, s, g, keys, _, cu = self
        return inputs.LinearInputs(q, k, s, gv=g, initial_state=keys, cu_seqlens=cu)

    def second(self, p: Tensor) -> inputs.LinearInputs:
        _, _, v, s, g, _, values, cu = self
        return inputs.LinearInputs(p, s, v, g=g, initial_state=values, cu_seqlens=cu)


_NAMES = GSAInputs._fields
_TENSORS = schema_of(GSAInputs)
_OPTIONS = "float scale, int chunk, str first, str second"
_KEYS, _VALUES = ("N", "H", "K", "M"), ("N", "H", "M", "V")
_DIMS = dict.fromkeys("qkvsg", ("B", "T", "H")) | {"keys": _KEYS, "values": _VALUES}


def _groups(given: GSAInputs, first: str, second: str, grads: bool) -> Groups | None:
    """How a call is cut, by the pass that leaves more; p is as s, and the scores twice that."""
    M = given.s.shape[-1]
    beside = (2 + grads) * M * given.s.element_size()
    passes = (given.first(), first, 2 * beside), (given.second(given.s), second, beside)
    found = [groups_of(terms, impl, grads, beside=more) for terms, impl, more in passes]
    # torch.compile knows no default of max where sizes are symbolic
    return max(cut) if (cut := [x for x in found if x is not None]) else None


def _forward(*args: Any) -> tuple[Tensor, ...]:
    """o, both final states, and p, which is empty unless it is to be kept."""
    *tensors, scale, chunk, first, second, keep = args
    given = GSAInputs(*tensors)
    call = inputs.ForwardCall(scale, chunk, first, wide=True)
    scores, keys = op.forward_impl(*given.first(), *call)
    p = given.s.new_empty(given.s.shape)
    _softmax(scores, p, second)
    del scores
    o, values = op.forward_impl(*given.second(p), *inputs.ForwardCall(1.0, chunk, second))
    return o, keys, values, p if keep else p.new_empty(0)


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    given, keep = GSAInputs(*args[: len(_NAMES)]), args[-1]
    (N, H, K, M), V = given.first().state_shape, given.v.shape[-1]
    states = (given.v.new_empty(x, dtype=torch.float32) for x in ((N, H, K, M), (N, H, M, V)))
    p = given.s.new_empty(given.s.shape if keep else 0)
    return given.v.new_empty(given.v.shape), *states, p


def _backward(*args: Any) -> list[Tensor]:
    """The gradients of those tensors that are given, but cu_seqlens."""
    *tensors, p, do, dkeys, dvalues = args[: len(_NAMES) + 4]
    scale, chunk, first, second = args[len(_NAMES) + 4 :]
    given = GSAInputs(*tensors)
    two = given.second(p)
    call = inputs.BackwardCall(do, dvalues, 1.0, chunk, second)
    found = op.by_name(two, True, op.backward_impl(*two, *call))
    dp = found.pop("q")
    _softmax_backward(p, dp, second)
    one, call = given.first(), inputs.BackwardCall(dp, dkeys, scale, chunk, first)
    more = op.by_name(one, True, op.backward_impl(*one, *call))
    ds, dg = found["k"].add_(more["v"]), found["g"].add_(more["gv"])
    states = (x["initial_state"] for x in (more, found) if "initial_state" in x)
    return [more["q"], more["k"], found["v"], ds, dg, *states]


def _fake_backward(*args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in args[: len(_NAMES) - 1] if x is not None]


def _softmax(scores: Tensor, p: Tensor, impl: str) -> None:
    """p is written."""
    with _guard(impl, p) as usable:
        if usable:
            _kernel_softmax(scores, p)
            return
    _eager_softmax(scores, p)


def _kernel_softmax(scores: Tensor, p: Tensor) -> None:
    from slipstream.kernels.linear.triton import gsa_softmax

    gsa_softmax.softmax(scores, p)


def _eager_softmax(scores: Tensor, p: Tensor) -> None:
    p.copy_(scores.softmax(-1))


def _softmax_backward(p: Tensor, dp: Tensor, impl: str) -> None:
    """dp becomes the gradient of the scores."""
    with _guard(impl, p) as usable:
        if usable:
            _kernel_backward(p, dp)
            return
    _eager_backward(p, dp)


def _kernel_backward(p: Tensor, dp: Tensor) -> None:
    from slipstream.kernels.linear.triton import gsa_softmax

    gsa_softmax.softmax_backward(p, dp)


def _eager_backward(p: Tensor, dp: Tensor) -> None:
    wide, d = p.float(), dp.float()
    dp.copy_(wide * (d - (wide * d).sum(-1, keepdim=True) / wide.sum(-1, keepdim=True)))


def _guard(impl: str, p: Tensor) -> guarded_launch.Guard:
    """The guard of the softmax's kernels, beside recurrences chosen by impl: plain torch takes
    over."""
    kernels = p.numel() > 0 and not impl.startswith("eager")
    return guarded_launch.Guard(
        dispatch.TRITON_OR_EAGER if kernels else "eager",
        p.device,
        lambda: ("linear.slots", p.dtype, p.shape[-1]),
        lambda: _mismatch(p),
    )


def _mismatch(like: Tensor) -> str | None:
    """The probe: there and back on a few rows as wide."""
    scores = torch.randn(1, 19, 1, like.shape[-1], device=like.device)
    fresh, results = kernel_pair.random_like(like, *scores.shape), []
    ways = (_kernel_softmax, _kernel_backward), (_eager_softmax, _eager_backward)
    for softmax, backward in ways:
        p, dp = torch.empty_like(fresh), fresh.clone()
        softmax(scores, p)
        backward(p, dp)
        results.append((p, dp))
    bar = kernel_pair.BARS[like.dtype][1]
    for name, x, y in zip(("p", "the gradient of the scores"), *results):
        if not (error := kernel_pair.relative_error(x, y)) <= bar:
            return f"{name} is off by {error:.1e} of its size, at most {bar:.0e} is rounding"
    return None


_call_forward = KernelOp(
    "slots_forward",
    f"({_TENSORS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    replay=True,
    at_sizes=op.with_short(
        AtSizes(tokens=(0, 1, 2, 3, 4), states=(5, 6), offsets=(7,), heads=2), len(_NAMES) + 1, -1
    ),
)
_call_backward = KernelOp(
    "slots_backward",
    f"({_TENSORS}, Tensor p, Tensor? dout, Tensor? dkeys, Tensor? dvalues, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    replay=True,
    # p and the gradient of o too, and those of both states
    at_sizes=AtSizes(tokens=(0, 1, 2, 3, 4, 8, 9), states=(5, 6, 10, 11), offsets=(7,), heads=2),
)


class _Slots(autograd.Function):
    operator = "slipstream::gsa"

    @staticmethod
    def forward(ctx: Any, options: tuple, *tensors: Any) -> Any:
        scale, chunk, first, second = options
        named: Any = {"scale": scale, "chunk": chunk, "first": first, "second": second}
        o, keys, values, p = _call_forward(*tensors, **named, keep=True)
        autograd.save(ctx, *tensors, p)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, keys, values

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, *grads: Tensor | None) -> Any:
        if all(x is None for x in grads):
            return (None,) * (1 + len(_NAMES))
        found = iter(_call_backward(*saved, *grads, *ctx.options))
        given = saved[: len(_NAMES) - 1]
        return (None, *(None if x is None else next(found) for x in given), None)


def _of_operator(*args: Any) -> Any:
    """As slipstream::_slots_forward is called."""
    return _Slots.apply(args[len(_NAMES) : -1], *args[: len(_NAMES)])


_call_forward.set_gradient(_of_operator)


def attend(given: GSAInputs, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, H, V] in v's dtype and both final states, float32, with gradients.

    Args:
        options: scale, tokens a chunk (0: token by token), implementations of both passes.
    """
    groups = _groups(given, options[2], options[3], autograd.wants_gradient(*given))
    if groups is None:
        return _attend(given, *options)
    run: Any = lambda group: _attend(group, *options)  # noqa: E731
    o, keys, values = in_groups(run, given, _DIMS, groups, (O_DIMS, _KEYS, _VALUES))
    return o, keys, values


def _attend(
    given: GSAInputs, scale: float, chunk: int, first: str, second: str
) -> tuple[Tensor, Tensor, Tensor]:
    if autograd.needs_autograd(*given):
        return _Slots.apply((scale, chunk, first, second), *given)
    named: Any = {"scale": scale, "chunk": chunk, "first": first, "second": second}
    o, keys, values, _ = _call_forward(*given, **named, keep=False)
    return o, keys, values
