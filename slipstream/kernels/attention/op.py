"""Softmax attention as torch.library operators, and its gradient.

slipstream::softmax_forward and slipstream::softmax_backward take the terms in their order, then the
options; `impl` names the implementation, or several to try in order. The backward returns the
gradients of the differentiable terms given, in their order. slipstream::softmax_decode reads a
cache and has no gradient; slipstream::softmax_append writes into one.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention import cache, cache_probe, eager, probe
from slipstream.kernels.attention.inputs import DIFFERENTIABLE, AttentionInputs, AttentionOptions
from slipstream.kernels.attention.triton.plan import kind, kind_of_cache
from slipstream.runtime import guarded_launch
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable
from slipstream.runtime.custom_op import KernelOp

_TERMS = ", ".join(
    f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in AttentionInputs._fields
)
_OPTIONS = "float scale, int left, int right, float softcap, float dropout, str impl"
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
    terms, options, impl = _split(args)
    if 0 in (terms.v.numel(), terms.q.numel(), terms.sequences):
        return _blind(terms)
    first, _, rest = impl.partition("|")
    if first == "eager":
        return eager.forward(terms, options)
    return guarded_launch.run_guarded(
        lambda: kind(terms, options, first),
        terms.q.device,
        _run_forward,
        (lambda *_: _forward(*args[:-1], rest)) if rest else None,
        (first, terms, options),
        lambda: _mismatch(terms, options, first),
    )


def _run_forward(
    impl: str, terms: AttentionInputs, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    backend = _backend_for(impl)
    if not guarded_launch.needs_fp32_operands(terms.q):
        return backend.forward(terms, options)
    o, lse = backend.forward(_in_float32(terms), options)
    return o.to(terms.q.dtype), lse


def _mismatch(terms: AttentionInputs, options: AttentionOptions, impl: str) -> str | None:
    """The probe."""
    of_gradients = impl if has_gradients(impl, terms) else "eager"
    return probe.mismatch(terms, options, impl, softmax, of_gradients)


def has_gradients(impl: str, terms: AttentionInputs) -> bool:
    """The kernels for sm_90 have none of heads of q and v of two widths."""
    return impl != "sm90" or terms.q.shape[-1] == terms.v.shape[-1]


def _in_float32(terms: AttentionInputs) -> AttentionInputs:
    """For compilers that can do no other products."""
    q, k, v = (x.float() for x in terms[:3])
    return terms._replace(q=q, k=k, v=v)


def _blind(terms: AttentionInputs) -> tuple[Tensor, Tensor]:
    """No keys, no queries or no width: at most the sinks are seen."""
    o, lse = _fake_forward(*terms)
    o.zero_()
    if terms.sinks is None or terms.q.shape[-1] == 0:
        return o, lse.fill_(-torch.inf)
    return o, lse.copy_(terms.sinks[:, None].expand_as(lse))


def _backward(*args: Any) -> list[Tensor]:
    terms, options, impl = _split(args)
    o, lse, do, dlse = args[_COUNT:-_TAIL]
    if 0 in (terms.v.numel(), terms.q.numel(), terms.sequences):
        grads = {n: x.new_zeros(x.shape) for n, x in terms._asdict().items() if x is not None}
        if terms.sinks is not None and dlse is not None:
            grads["sinks"] = dlse.sum((0, 2)).to(terms.sinks.dtype)
    else:
        grads = _gradients(terms, options, o, lse, do, dlse, impl)
    return [grads[name] for name in DIFFERENTIABLE if getattr(terms, name) is not None]


def _gradients(
    terms: AttentionInputs,
    options: AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
    impl: str,
) -> dict[str, Tensor]:
    args = (terms, options, o, lse, do, dlse)
    first, _, rest = impl.partition("|")
    if first == "eager":
        return eager.backward(*args)
    return guarded_launch.run_guarded(
        lambda: kind(terms, options, first),
        terms.q.device,
        _run_backward,
        (lambda *_: _gradients(*args, rest)) if rest else None,
        (first, *args),
        lambda: _mismatch(terms, options, first),
    )


def _run_backward(
    impl: str,
    terms: AttentionInputs,
    options: AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
) -> dict[str, Tensor]:
    backend = _backend_for(impl)
    if not guarded_launch.needs_fp32_operands(terms.q):
        return backend.backward(terms, options, o, lse, do, dlse)
    do = None if do is None else do.float()
    grads = backend.backward(_in_float32(terms), options, o.float(), lse, do, dlse)
    return {name: x.to(getattr(terms, name).dtype) for name, x in grads.items()}


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    terms = AttentionInputs(*args[:_COUNT])
    B, T, H, _ = terms.q.shape
    o = terms.q.new_empty(B, T, H, terms.v.shape[-1])
    return o, terms.q.new_empty(B, H, T, dtype=terms.dtype)


def _fake_backward(*args: Any) -> list[Tensor]:
    terms = AttentionInputs(*args[:_COUNT])
    given = (getattr(terms, name) for name in DIFFERENTIABLE)
    return [x.new_empty(x.shape) for x in given if x is not None]


_call_forward = KernelOp(
    "softmax_forward",
    f"({_TERMS}, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    replay=True,
)
_call_backward = KernelOp(
    "softmax_backward",
    f"({_TERMS}, Tensor o, Tensor lse, Tensor? do, Tensor? dlse, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    replay=True,
)


class _Softmax(Function):
    operator = "slipstream::softmax"

    @staticmethod
    def forward(ctx: Any, options: tuple, of_gradients: str, *given: Any) -> Any:
        o, lse = _call_forward(*given, *options)
        ctx.save_for_backward(*given, o, lse)
        ctx.options = (*options[:-1], of_gradients)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Any:
        *given, o, lse = saved
        if do is None and dlse is None:
            return (None,) * (2 + len(given))
        grads = iter(_call_backward(*given, o, lse, do, dlse, *ctx.options))
        terms = AttentionInputs(*given)
        by_term = [
            next(grads) if name in DIFFERENTIABLE and x is not None else None
            for name, x in terms._asdict().items()
        ]
        return None, None, *by_term


def _of_operator(*args: Any) -> tuple[Tensor, Tensor]:
    """As slipstream::softmax_forward is called."""
    terms, options, impl = _split(args)
    with_gradients = [one for one in impl.split("|") if has_gradients(one, terms)]
    return _Softmax.apply((*options, impl), "|".join(with_gradients) or "eager", *terms)


_call_forward.set_gradient(_of_operator)


def softmax(
    terms: AttentionInputs, options: AttentionOptions, impl: str, of_gradients: str | None = None
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32 or float64, with gradients, by impl
    too unless of_gradients is given."""
    if torch.compiler.is_compiling():
        terms = _distinct(terms)
    if needs_autograd(*terms):
        return _Softmax.apply((*options, impl), of_gradients or impl, *terms)
    return _call_forward(*terms, *options, impl)


def _distinct(terms: AttentionInputs) -> AttentionInputs:
    """Dynamo does not trace an autograd.Function that is given one tensor twice."""
    found: list[Any] = []
    for x in terms:
        found.append(x.view_as(x) if x is not None and any(x is y for y in found) else x)
    return AttentionInputs(*found)


_CACHE = ", ".join(
    f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in cache.Cache._fields
)


def _decode(*args: Any) -> tuple[Tensor, Tensor]:
    call, options, impl = cache.Cache(*args[:-_TAIL]), AttentionOptions(*args[-_TAIL:-1]), args[-1]
    cache.check_values(call)
    if 0 in (call.v.numel(), call.q.numel()):
        return _blind(AttentionInputs(call.q, call.k, call.v, sinks=call.sinks))
    if impl == "eager":
        return _decode_eager(call, options)

    def run(call: cache.Cache, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        from slipstream.kernels.attention.triton import decode_launch

        if not guarded_launch.needs_fp32_operands(call.q):
            return decode_launch.decode(call, options)
        q, k, v = (x.float() for x in call[:3])
        o, lse = decode_launch.decode(call._replace(q=q, k=k, v=v), options)
        return o.to(call.q.dtype), lse

    return guarded_launch.run_guarded(
        lambda: kind_of_cache("decode", call.q, call.v, call.table),
        call.q.device,
        run,
        None if impl == "triton" else _decode_eager,
        (call, options),
        lambda: probe.mismatch_of_cache(call, options, call_decode),
    )


def _decode_eager(call: cache.Cache, options: AttentionOptions) -> tuple[Tensor, Tensor]:
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
    if k.device.type == "cpu":  # on a device the reading that follows looks
        cache.check_values(call, k.shape[1])
    given = (k_cache, v_cache, k, v, lengths, rows, table)
    if impl == "eager":
        return cache.append(*given)

    def run(*given: Any) -> Tensor:
        from slipstream.kernels.attention.triton import decode_launch

        return decode_launch.append(*given)

    return guarded_launch.run_guarded(
        lambda: kind_of_cache("append", k_cache, v_cache, table),
        k.device,
        run,
        None if impl == "triton" else cache.append,
        given,
        lambda: cache_probe.mismatch_of_append(given, run, cache.append),
    )


call_decode = KernelOp(
    "softmax_decode",
    f"({_CACHE}, {_OPTIONS}) -> (Tensor, Tensor)",
    _decode,
    lambda *args: _fake_forward(*args[:3], *[None] * (_COUNT - 3)),
)
append = KernelOp(
    "softmax_append",
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor lengths, Tensor? rows, "
    "Tensor? table, str impl) -> Tensor",
    _append,
    lambda *args: torch.empty_like(args[4]),
).overload
