"""Softmax attention as torch.library operators, and its gradient.

slipstream::_softmax_forward and _softmax_backward take the terms in their order, then the options;
`impl` names the implementation, or several to try in order. The backward returns the gradients of
the differentiable terms given, in their order. slipstream::_softmax_decode reads a cache and has no
gradient; slipstream::_softmax_append writes into one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention import cache, eager, probe
from slipstream.kernels.attention.inputs import DIFFERENTIABLE, AttentionInputs, AttentionOptions
from slipstream.kernels.attention.plan import FORWARD, kind, kind_of_cache
from slipstream.runtime import autograd, custom_op, guarded_launch
from slipstream.runtime.compile_ahead import KEYS, AtSizes, resized

_TERMS = custom_op.schema_of(AttentionInputs)
_OPTIONS = f"{custom_op.schema_of(AttentionOptions)}, str impl"
_COUNT = len(AttentionInputs._fields)
# the options and impl, at the end of the arguments
_TAIL = len(AttentionOptions._fields) + 1


def _split(args: tuple) -> tuple[AttentionInputs, AttentionOptions, str]:
    return AttentionInputs(*args[:_COUNT]), AttentionOptions(*args[-_TAIL:-1]), args[-1]


def _backend_for(impl: str) -> Any:
    """Triton is imported only here, once it is wanted."""
    if impl == "sm90":
        from slipstream.kernels.attention.sm90 import launch as sm90_backend

        return sm90_backend
    assert impl == "triton", impl
    from slipstream.kernels.attention.triton import launch

    return launch


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options, impl = _split(args)
    if 0 in (inputs.v.numel(), inputs.q.numel(), inputs.sequences):
        return _without_keys(inputs)
    first, _, others = impl.partition("|")
    with _guard(impl, inputs, options) as usable:
        if usable:
            return _backend_for(first).forward(inputs, options)
    return _forward(*args[:-1], others) if others else eager.forward(inputs, options)


def _guard(impl: str, inputs: AttentionInputs, options: AttentionOptions) -> guarded_launch.Guard:
    first = impl.partition("|")[0]
    return guarded_launch.Guard(
        impl,
        inputs.q.device,
        lambda: kind(inputs, options, first),
        lambda: _mismatch(inputs, options, first),
    )


def _mismatch(inputs: AttentionInputs, options: AttentionOptions, impl: str) -> str | None:
    """The probe."""
    backward_impls = impl if has_gradients(impl, inputs) else "eager"
    return probe.mismatch(inputs, options, impl, softmax, backward_impls)


def has_gradients(impl: str, inputs: AttentionInputs) -> bool:
    """The kernels for sm_90 have none of heads of two widths, or wider than 256."""
    return impl != "sm90" or (inputs.q.shape[-1], inputs.v.shape[-1]) not in FORWARD


def _without_keys(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """No keys, no queries or no width: at most the sinks are seen."""
    o, lse = _fake_forward(*inputs)
    o.zero_()
    if inputs.sinks is None or inputs.q.shape[-1] == 0:
        return o, lse.fill_(-torch.inf)
    return o, lse.copy_(inputs.sinks[:, None].expand_as(lse))


def _backward(*args: Any) -> list[Tensor]:
    inputs, options, impl = _split(args)
    o, lse, do, dlse = args[_COUNT:-_TAIL]
    if 0 in (inputs.v.numel(), inputs.q.numel(), inputs.sequences):
        grads = {n: x.new_zeros(x.shape) for n, x in inputs._asdict().items() if x is not None}
        if inputs.sinks is not None and dlse is not None:
            grads["sinks"] = dlse.sum((0, 2)).to(inputs.sinks.dtype)
    else:
        grads = _gradients(inputs, options, o, lse, do, dlse, impl)
    return [grads[name] for name in DIFFERENTIABLE if getattr(inputs, name) is not None]


def _gradients(
    inputs: AttentionInputs,
    options: AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
    impl: str,
) -> dict[str, Tensor]:
    args = (inputs, options, o, lse, do, dlse)
    first, _, others = impl.partition("|")
    with _guard(impl, inputs, options) as usable:
        if usable:
            return _backend_for(first).backward(*args)
    return _gradients(*args, others) if others else eager.backward(*args)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = AttentionInputs(*args[:_COUNT])
    B, T, H, _ = inputs.q.shape
    o = inputs.q.new_empty(B, T, H, inputs.v.shape[-1])
    return o, inputs.q.new_empty(B, H, T, dtype=inputs.dtype)


def _fake_backward(*args: Any) -> list[Tensor]:
    inputs = AttentionInputs(*args[:_COUNT])
    tensors = (getattr(inputs, name) for name in DIFFERENTIABLE)
    return [x.new_empty(x.shape) for x in tensors if x is not None]


# q, k, v, g; lengths; cu_q, cu_k: kernels of other sizes, compiled after a first call
_AT_SIZES = AtSizes(tokens=(0, 1, 2, 3), states=(8,), offsets=(6, 7), heads=0)


def _forward_at_sizes(args: tuple) -> Iterator[tuple]:
    """Also of one token and many keys, which programs share (triton/decode_launch.py)."""
    yield from _AT_SIZES(args)
    inputs = AttentionInputs(*args[:_COUNT])
    for keys in KEYS if inputs.g is None and inputs.cu_q is None else ():
        k, v = (resized(x, 1, keys) for x in (inputs.k, inputs.v))
        one = {"q": resized(inputs.q, 1, 1), "k": k, "v": v, "lengths": resized(inputs.lengths, 1)}
        yield (*inputs._replace(**one), *args[_COUNT:])


call_forward = custom_op.KernelOp(
    "softmax_forward",
    f"({_TERMS}, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    replay=True,
    at_sizes=_forward_at_sizes,
)
call_backward = custom_op.KernelOp(
    "softmax_backward",
    f"({_TERMS}, Tensor o, Tensor lse, Tensor? do, Tensor? dlse, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    replay=True,
    # o and its gradient; lse and its gradient
    at_sizes=_AT_SIZES._replace(tokens=(0, 1, 2, 3, 10, 12), by_heads=(11, 13)),
)


class _Softmax(autograd.Function):
    operator = "slipstream::softmax"

    @staticmethod
    def forward(ctx: Any, options: tuple, backward_impls: str, *args: Any) -> Any:
        o, lse = call_forward(*args, *options)
        autograd.save(ctx, *args, o, lse)
        ctx.options = (*options[:-1], backward_impls)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, do: Tensor | None, dlse: Tensor | None) -> Any:
        *args, o, lse = saved
        if do is None and dlse is None:
            return (None,) * (2 + len(args))
        grads = iter(call_backward(*args, o, lse, do, dlse, *ctx.options))
        inputs = AttentionInputs(*args)
        by_term = [
            next(grads) if name in DIFFERENTIABLE and x is not None else None
            for name, x in inputs._asdict().items()
        ]
        return None, None, *by_term


def _of_operator(*args: Any) -> tuple[Tensor, Tensor]:
    """As slipstream::_softmax_forward is called."""
    inputs, options, impl = _split(args)
    with_gradients = [one for one in impl.split("|") if has_gradients(one, inputs)]
    return _Softmax.apply((*options, impl), "|".join(with_gradients) or "eager", *inputs)


call_forward.set_gradient(_of_operator)


def softmax(
    inputs: AttentionInputs, options: AttentionOptions, impl: str, backward_impls: str | None = None
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32 or float64, with gradients.

    Args:
        backward_impls: implementations of the gradients; None: those of `impl`.
    """
    if torch.compiler.is_compiling():
        inputs = _distinct(inputs)
    if autograd.needs_autograd(*inputs):
        return _Softmax.apply((*options, impl), backward_impls or impl, *inputs)
    return call_forward(*inputs, *options, impl=impl)


def _distinct(inputs: AttentionInputs) -> AttentionInputs:
    """Dynamo does not trace an autograd.Function that is given one tensor twice."""
    distinct: list[Any] = []
    for x in inputs:
        distinct.append(x.view_as(x) if x is not None and any(x is y for y in distinct) else x)
    return AttentionInputs(*distinct)


_CACHE = custom_op.schema_of(cache.Cache)


def _decode(*args: Any) -> tuple[Tensor, Tensor]:
    call, options, impl = cache.Cache(*args[:-_TAIL]), AttentionOptions(*args[-_TAIL:-1]), args[-1]
    cache.check_values(call)
    if 0 in (call.v.numel(), call.q.numel()):
        return _without_keys(AttentionInputs(call.q, call.k, call.v, sinks=call.sinks))
    with guarded_launch.Guard(
        impl,
        call.q.device,
        lambda: kind_of_cache("decode", call.q, call.v, call.table),
        lambda: probe.mismatch_of_cache(call, options, call_decode),
    ) as usable:
        if usable:
            from slipstream.kernels.attention.triton import decode_launch

            return decode_launch.decode(call, options)
    return eager.forward(cache.gather(call), options, cache.hidden_keys(call))


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
    impl: str,
) -> Tensor:
    if 0 in (k.numel() + v.numel(), k_cache.numel() + v_cache.numel()):
        return cache.lengths_after(lengths, k.shape[1])
    call = cache.Cache(k, k_cache, v_cache, lengths, rows, table=table)
    if k.is_cpu:  # on a device the reading that follows looks
        cache.check_values(call, k.shape[1])
    args = (k_cache, v_cache, k, v, lengths, rows, table)
    with guarded_launch.Guard(
        impl,
        k.device,
        lambda: kind_of_cache("append", k_cache, v_cache, table),
        lambda: probe.mismatch_of_append(args, _launch_append, cache.append),
    ) as usable:
        if usable:
            return _launch_append(*args)
    return cache.append(*args)


def _launch_append(*args: Any) -> Tensor:
    from slipstream.kernels.attention.triton import decode_launch

    return decode_launch.append(*args)


def _decode_at_sizes(args: tuple) -> Iterator[tuple]:
    """A token on other numbers of keys, in rows or in pages: of more, fewer programs share them."""
    call, options = cache.Cache(*args[:-_TAIL]), args[-_TAIL:]
    indices = {name: resized(getattr(call, name), 1) for name in ("lengths", "rows", "leftpad")}
    slopes = call.slopes
    if slopes is not None and slopes.dim() == 2:
        indices["slopes"] = resized(slopes, 1)
    one = call._replace(q=resized(call.q, 1, 1), **indices)
    for keys in KEYS:
        if call.table is not None:
            pages = call.table.new_empty(1, -(-keys // call.k.shape[1]))
            yield (*one._replace(table=pages), *options)
            continue
        of_keys = {
            name: resized(getattr(call, name), 1, keys) for name in ("k", "v", "k_scale", "v_scale")
        }
        yield (*one._replace(**of_keys), *options)


call_decode = custom_op.KernelOp(
    "softmax_decode",
    f"({_CACHE}, {_OPTIONS}) -> (Tensor, Tensor)",
    _decode,
    lambda *args: _fake_forward(*args[:3], *[None] * (_COUNT - 3)),
    at_sizes=_decode_at_sizes,
)
append = custom_op.KernelOp(
    "softmax_append",
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor lengths, Tensor? rows, "
    "Tensor? table, str impl) -> Tensor",
    _append,
    lambda *args: torch.empty_like(args[4]),
)
