"""Softmax attention as torch.library operators, and its gradient.

slipstream::softmax_forward and slipstream::softmax_backward take the terms in their order, then the
options; `impl` names the implementation. The backward returns the gradients of the differentiable
terms given, in their order. slipstream::softmax_decode reads a cache and has no gradient;
slipstream::softmax_append writes into one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.core.library import define
from slipstream.kernels.softmax import cache, eager
from slipstream.kernels.softmax.terms import DIFFERENTIABLE, Options, Terms

_TERMS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Terms._fields)
_OPTIONS = "float scale, int left, int right, float softcap, str impl"
_COUNT = len(Terms._fields)


def _split(args: tuple) -> tuple[Terms, Options, str]:
    return Terms(*args[:_COUNT]), Options(*args[-5:-1]), args[-1]


def _kernels(impl: str) -> Any:
    """Triton is imported only here, once it is wanted."""
    if impl == "eager":
        return eager
    assert impl == "triton", impl
    from slipstream.kernels.softmax.triton import launch

    return launch


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    terms, options, impl = _split(args)
    if 0 in (terms.v.numel(), terms.q.numel(), terms.sequences):
        return _blind(terms)
    return _kernels(impl).forward(terms, options)


def _blind(terms: Terms) -> tuple[Tensor, Tensor]:
    """No keys, no queries or no width: at most the sinks are seen."""
    o, lse = _fake_forward(*terms)
    o.zero_()
    if terms.sinks is None or terms.q.shape[-1] == 0:
        return o, lse.fill_(-torch.inf)
    return o, lse.copy_(terms.sinks[:, None].expand_as(lse))


def _backward(*args: Any) -> list[Tensor]:
    terms, options, impl = _split(args)
    o, lse, do, dlse = args[_COUNT:-5]
    if 0 in (terms.v.numel(), terms.q.numel(), terms.sequences):
        grads = {n: x.new_zeros(x.shape) for n, x in terms._asdict().items() if x is not None}
        if terms.sinks is not None and dlse is not None:
            grads["sinks"] = dlse.sum((0, 2)).to(terms.sinks.dtype)
    else:
        grads = _kernels(impl).backward(terms, options, o, lse, do, dlse)
    return [grads[name] for name in DIFFERENTIABLE if getattr(terms, name) is not None]


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    terms = Terms(*args[:_COUNT])
    B, T, H, _ = terms.q.shape
    o = terms.q.new_empty(B, T, H, terms.v.shape[-1])
    return o, terms.q.new_empty(B, H, T, dtype=terms.dtype)


def _fake_backward(*args: Any) -> list[Tensor]:
    terms = Terms(*args[:_COUNT])
    given = (getattr(terms, name) for name in DIFFERENTIABLE)
    return [x.new_empty(x.shape) for x in given if x is not None]


_forward_op: Callable = define(
    "softmax_forward", f"({_TERMS}, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _fake_forward
)
_backward_op: Callable = define(
    "softmax_backward",
    f"({_TERMS}, Tensor o, Tensor lse, Tensor? do, Tensor? dlse, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple, *given: Any) -> Any:
        o, lse = _forward_op(*given, *options)
        ctx.save_for_backward(*given, o, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        *given, o, lse = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * (1 + len(given))
        grads = iter(_backward_op(*given, o, lse, do, dlse, *ctx.options))
        terms = Terms(*given)
        by_term = [
            next(grads) if name in DIFFERENTIABLE and x is not None else None
            for name, x in terms._asdict().items()
        ]
        return None, *by_term


def softmax(terms: Terms, options: Options, impl: str) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32 or float64, with gradients."""
    if torch.compiler.is_compiling():
        terms = _distinct(terms)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in terms):
        return _Softmax.apply((*options, impl), *terms)
    return _forward_op(*terms, *options, impl)


def _distinct(terms: Terms) -> Terms:
    """Dynamo does not trace an autograd.Function that is given one tensor twice."""
    found: list[Any] = []
    for x in terms:
        found.append(x.view_as(x) if x is not None and any(x is y for y in found) else x)
    return Terms(*found)


_CACHE = ", ".join(
    f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in cache.Cache._fields
)


def _decode(*args: Any) -> tuple[Tensor, Tensor]:
    call, options, impl = cache.Cache(*args[:-5]), Options(*args[-5:-1]), args[-1]
    if 0 in (call.v.numel(), call.q.numel()):
        return _blind(Terms(call.q, call.k, call.v, sinks=call.sinks))
    if impl == "triton":
        from slipstream.kernels.softmax.triton import decode_launch

        return decode_launch.decode(call, options)
    return eager.forward(cache.gathered(call), options)


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
    impl: str,
) -> None:
    if 0 in (k.numel() + v.numel(), k_cache.numel() + v_cache.numel()):
        return
    if impl == "triton":
        from slipstream.kernels.softmax.triton import decode_launch

        decode_launch.append(k_cache, v_cache, k, v, lengths, rows, table)
    else:
        cache.append(k_cache, v_cache, k, v, lengths, rows, table)


decode: Callable = define(
    "softmax_decode",
    f"({_CACHE}, {_OPTIONS}) -> (Tensor, Tensor)",
    _decode,
    lambda *args: _fake_forward(*args[:3], *[None] * (_COUNT - 3)),
)
append: Callable = define(
    "softmax_append",
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor lengths, Tensor? rows, "
    "Tensor? table, str impl) -> ()",
    _append,
    lambda *args: None,
)
