"""Gated slot attention in 16 bits as one operator: two passes of the scalar-decay family.

    scores = Sk^T q      Sk_t = Sk_{t-1} diag(exp(g_t)) + k_t s_t^T      p = softmax(scale * scores)
    o = Sv^T p           Sv_t = diag(exp(g_t)) Sv_{t-1} + s_t v_t^T

The softmax multiplies errors of the scores. So these are float32, of products whose factors are in
two parts (triton/vector_decay/chunk.py). They are made for one slice of tokens at a time
(workspace.py), where o will be if that memory suffices. Backward gets p and the states between the
slices. M slots; Sk [N, H, K, M], Sv [N, H, M, V]; `first` and `second` name the implementations of
the passes.

Memory beyond results, in tensors of the size of s in 16 bits, M = 64: forward 4, of a slice, which
are what the first pass leaves for its scan, or p and what the second does; backward p, and of one
slice dp, 8 to 10 in all.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import op, workspace
from slipstream.kernels.linear.inputs import BackwardCall, ForwardCall, LinearInputs
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.backends import is_plain_call
from slipstream.runtime.custom_op import DirectCall, KernelOp, schema_of
from slipstream.runtime.dispatch import TRITON_OR_EAGER
from slipstream.runtime.guarded_launch import Guard

# Elements of o up to which a row of tokens is not cut; its slices else, and where backward follows.
SMALL_OUTPUT, FWD_SLICES, TRAINING_SLICES = 1 << 24, 2, 3


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

    def first(self) -> LinearInputs:
        q, k, _, s, g, keys, _, cu = self
        return LinearInputs(q, k, s, gv=g, initial_state=keys, cu_seqlens=cu)

    def second(self, p: Tensor) -> LinearInputs:
        _, _, v, s, g, _, values, cu = self
        return LinearInputs(p, s, v, g=g, initial_state=values, cu_seqlens=cu)


_NAMES = GSAInputs._fields
_TENSORS = schema_of(GSAInputs)
_OPTIONS = "float scale, int chunk, str first, str second"


def num_slices(given: GSAInputs, keep: bool) -> int:
    alone = given.q.shape[0] == 1 and given.cu_seqlens is None
    if not alone or given.v.numel() <= SMALL_OUTPUT:
        return 1
    return TRAINING_SLICES if keep else FWD_SLICES


def _slice(
    given: GSAInputs, tokens: slice, keys: Tensor | None, values: Tensor | None
) -> GSAInputs:
    cut = (x[:, tokens] for x in given[:5])
    return given._replace(**dict(zip(_NAMES, cut)), keys=keys, values=values)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    """o, both final states, p, and the states between slices, of keys and of values; p is empty
    unless it is to be kept."""
    *tensors, scale, chunk, first, second, count, keep = args
    given = GSAInputs(*tensors)
    o, p, *states = _like(given, count, keep)
    final, checkpoints = states[:2], states[2:]
    before = [given.keys, given.values]
    if count > 1:
        before = [y.zero_() if x is None else x for x, y in zip(before, final)]
    cuts = workspace.time_slices(given.q.shape[1], count)
    for i, tokens in enumerate(cuts):
        after = final if i == len(cuts) - 1 else [x[i] for x in checkpoints]
        inputs = _slice(given, tokens, *before)
        o_slice = o[:, tokens]
        out = _workspace_bytes(o_slice, inputs.s), after[0]
        call = ForwardCall(scale, chunk, first, True, 1)
        scores, _, _ = op.forward_impl(*inputs.first(), *call, out=out)
        one = p[:, tokens] if keep else inputs.s.new_empty(inputs.s.shape)
        _softmax(scores, one, second)
        del scores, out
        two = inputs.second(one)
        call = ForwardCall(1.0, chunk, second, False, 1)
        op.forward_impl(*two, *call, out=(o_slice, after[1]))
        del one, two  # before the next slice's
        before = after
    return o, *final, p, *checkpoints


def _workspace_bytes(o: Tensor, s: Tensor) -> Tensor | None:
    """Memory for scores, one for each of s: that of o, which is written later."""
    if not o.is_contiguous() or o.numel() < 2 * s.numel() or o.element_size() != 2:
        return None
    return o.flatten()[: 2 * s.numel()].view(torch.float32).view(s.shape)


def _like(given: GSAInputs, count: int, keep: bool) -> list[Tensor]:
    """The results of _forward, except for p in second place."""
    (N, H, K, M), V = given.first().state_shape, given.v.shape[-1]
    wide: dict[str, Any] = {"dtype": torch.float32}
    states = [(N, H, K, M), (N, H, M, V)]
    return [
        given.v.new_empty(given.v.shape),
        given.s.new_empty(given.s.shape if keep else 0),
        *(given.v.new_empty(x, **wide) for x in states),
        *(given.v.new_empty(count - 1, *x, **wide) for x in states),
    ]


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    o, p, *states = _like(GSAInputs(*args[: len(_NAMES)]), *args[-2:])
    return o, *states[:2], p, *states[2:]


def _backward(*args: Any) -> list[Tensor]:
    """Gradients of q, k, v, s, g and the states before the first token, in float32."""
    *tensors, p, first_checkpoints, second_checkpoints, do, dkeys, dvalues = args[: len(_NAMES) + 6]
    scale, chunk, first, second = args[len(_NAMES) + 6 :]
    given = GSAInputs(*tensors)
    count = first_checkpoints.shape[0] + 1
    grads = _fake_backward(*args)
    dstates = grads[5:]
    after, before = [dkeys, dvalues], [given.keys, given.values]
    if count > 1 and any(x is None for x in (*after, *before)):
        flat = dstates[0].new_zeros(max(x.numel() for x in dstates))
        zeros = [flat[: x.numel()].view(x.shape) for x in dstates]
        after = [y if x is None else x for x, y in zip(after, zeros)]
        before = [y if x is None else x for x, y in zip(before, zeros)]
    cuts = workspace.time_slices(given.q.shape[1], count)
    for i, tokens in reversed(list(enumerate(cuts))):
        entry = [first_checkpoints[i - 1], second_checkpoints[i - 1]] if i else before
        inputs = _slice(given, tokens, *entry)
        one, two = inputs.first(), inputs.second(p[:, tokens])
        grads_slice = {name: x[:, tokens] for name, x in zip(_NAMES, grads[:5])}
        d = None if do is None else do[:, tokens]
        out = {
            "k": grads_slice["s"],
            "v": grads_slice["v"],
            "g": grads_slice["g"],
            "initial_state": dstates[1],
        }
        call = BackwardCall(d, after[1], 1.0, chunk, second)
        dp = op.by_name(two, True, op.backward_impl(*two, *call, out=out))["q"]
        _softmax_backward(two.q, dp, second)
        out = {"q": grads_slice["q"], "k": grads_slice["k"], "initial_state": dstates[0]}
        call = BackwardCall(dp, after[0], scale, chunk, first)
        more = op.by_name(one, True, op.backward_impl(*one, *call, out=out))
        grads_slice["s"].add_(more["v"])
        grads_slice["g"].add_(more["gv"])
        after = dstates
    return grads


def _fake_backward(*args: Any) -> list[Tensor]:
    given = GSAInputs(*args[: len(_NAMES)])
    return [
        *(x.new_empty(x.shape) for x in given[:5]),
        *(x.new_empty(x.shape[1:]) for x in _like(given, 2, False)[4:]),
    ]


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


def _guard(impl: str, p: Tensor) -> Guard:
    """The guard of the softmax's kernels, beside recurrences chosen by impl: plain torch takes
    over."""
    kernels = p.numel() > 0 and not impl.startswith("eager")
    return Guard(
        TRITON_OR_EAGER if kernels else "eager",
        p.device,
        lambda: ("linear.slots", p.dtype, p.shape[-1]),
        lambda: _mismatch(p),
    )


def _mismatch(like: Tensor) -> str | None:
    """The probe: there and back on a few rows as wide."""
    scores = torch.randn(1, 19, 1, like.shape[-1], device=like.device)
    fresh, results = numeric_probe.random_like(like, *scores.shape), []
    ways = (_kernel_softmax, _kernel_backward), (_eager_softmax, _eager_backward)
    for softmax, backward in ways:
        p, dp = torch.empty_like(fresh), fresh.clone()
        softmax(scores, p)
        backward(p, dp)
        results.append((p, dp))
    bar = numeric_probe.BARS[like.dtype][1]
    for name, x, y in zip(("p", "the gradient of the scores"), *results):
        if not (error := numeric_probe.relative_error(x, y)) <= bar:
            return f"{name} is off by {error:.1e} of its size, at most {bar:.0e} is rounding"
    return None


_call_forward = KernelOp(
    "slots_forward",
    f"({_TENSORS}, {_OPTIONS}, int spans, bool keep) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    replay=True,
)
_call_backward = KernelOp(
    "slots_backward",
    f"({_TENSORS}, Tensor p, Tensor first_marks, Tensor second_marks, Tensor? dout, "
    f"Tensor? dkeys, Tensor? dvalues, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    replay=True,
)
_call_alone = DirectCall(lambda *args: _forward(*args)[:3])


class _Slots(Function):
    operator = "slipstream::gsa"

    @staticmethod
    def forward(ctx: Any, options: tuple, *tensors: Any) -> Any:
        o, keys, values, *rest = _call_forward(
            *tensors, *options, spans=num_slices(GSAInputs(*tensors), True), keep=True
        )
        save(ctx, *tensors, *rest)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, *grads: Tensor | None) -> Any:
        if all(x is None for x in grads):
            return (None,) * (1 + len(_NAMES))
        results = _call_backward(*saved, *grads, *ctx.options)
        given = [x if y is not None else None for x, y in zip(results, saved)]
        return (None, *given, None)


def _of_operator(*args: Any) -> Any:
    """As slipstream::_slots_forward is called."""
    return _Slots.apply(args[len(_NAMES) : -2], *args[: len(_NAMES)])


_call_forward.set_gradient(_of_operator)


def attend(given: GSAInputs, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, H, V] in v's dtype and both final states, float32, with gradients.

    Args:
        options: scale, tokens a chunk (0: token by token), implementations of both passes.
    """
    if needs_autograd(*given):
        return _Slots.apply(options, *given)
    args = *given, *options, num_slices(given, False), False
    if given.q.is_cuda and is_plain_call(given.q):
        return _call_alone(*args)
    return _call_forward(*args)[:3]
