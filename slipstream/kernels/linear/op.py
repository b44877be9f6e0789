"""The linear family as torch.library operators, and its gradient.

slipstream::linear_forward and slipstream::linear_backward take the terms in their order; `chunk` is
the chunk size, 0 for token by token; `impl` names the implementation, or several to try in order,
"triton|eager"; `wide` asks for o in float32. Outputs have a fixed number: o, the final state; and
the gradients of the differentiable terms given, in their order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.core import guard
from slipstream.core.library import define, shortcut
from slipstream.kernels.linear import probe
from slipstream.kernels.linear.eager.chunk import chunk_forward
from slipstream.kernels.linear.eager.chunk_backward import chunk_backward
from slipstream.kernels.linear.eager.recurrent import recurrent_forward
from slipstream.kernels.linear.eager.recurrent_backward import recurrent_backward
from slipstream.kernels.linear.terms import DIFFERENTIABLE, Terms
from slipstream.kernels.linear.triton.plan import kind, only_by_token

# Up to so many tokens fused_recurrent in Triton takes one after the other in registers instead of
# in chunks. On an H200 16 take 15 to 21 us, in chunks 6 (retention) to 87 (kda): docs/log.md.
STEP_TOKENS = 16

_TERMS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Terms._fields)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *given, scale, chunk, impl, wide = args
    terms = Terms(*given)
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        return _empty_forward(terms, wide)
    impl, _, rest = impl.partition("|")
    if impl == "eager":
        terms = _in_float32(terms) if wide else terms
        if chunk == 0:
            return recurrent_forward(terms, scale)
        return chunk_forward(terms, scale, chunk)
    by_token = only_by_token(terms) or (chunk == 0 and terms.q.shape[1] <= STEP_TOKENS)

    def run(terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
        launches = _launches(impl, terms, by_token)
        if not wide:
            return launches.forward(terms, scale)
        if getattr(launches, "WIDE", False):
            return launches.forward(terms, scale, torch.float32)
        return launches.forward(_in_float32(terms), scale)

    def instead(terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
        return _forward(*terms, scale, chunk, rest, wide)

    return guard.attempt(
        lambda: kind(terms, impl, by_token),
        terms.q.device,
        partial(_widened, run, wide) if guard.widens(terms.q) else run,
        instead if rest else None,
        (terms, scale),
        lambda: probe.mismatch(terms, impl, by_token, linear),
    )


def _launches(impl: str, terms: Terms, by_token: bool = False) -> Any:
    """The launches of a transition; Triton is imported only here, once they are wanted."""
    if by_token:
        from slipstream.kernels.linear.triton import step_launch

        return step_launch
    if impl == "hopper":
        if terms.transition == "none":
            from slipstream.kernels.linear.hopper import additive_launch

            return additive_launch
        from slipstream.kernels.linear.hopper import launch as hopper_launch

        return hopper_launch
    assert impl == "triton", impl
    channel = terms.transition == "delta" and terms.decay == "channel"
    if channel or terms.transition == "dplr":
        from slipstream.kernels.linear.triton import dplr_launch

        return dplr_launch
    if terms.transition == "delta":
        from slipstream.kernels.linear.triton import delta_launch

        return delta_launch
    if terms.decay == "channel" or terms.gv is not None or terms.u is not None:
        from slipstream.kernels.linear.triton import channel_launch

        return channel_launch
    from slipstream.kernels.linear.triton import launch

    return launch


def _widened(run: Callable, wide: bool, terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
    """With products of float32 operands, where the compiler can do no others."""
    o, final = run(_in_float32(terms), scale)
    return o if wide else o.to(terms.q.dtype), final


def _in_float32(terms: Terms) -> Terms:
    wide = (x if x is None or not x.is_floating_point() else x.float() for x in terms)
    return Terms(*cast(Any, wide))


def _empty_forward(terms: Terms, wide: bool) -> tuple[Tensor, Tensor]:
    """No tokens, no sequences or no width: the state stays, nothing is read."""
    o = terms.q.new_zeros(terms.v.shape, dtype=terms.dtype if wide else None)
    state = terms.v.new_zeros(terms.state_shape, dtype=terms.dtype)
    return o, state if terms.initial_state is None else state.copy_(terms.initial_state)


def _backward(*args: Any) -> list[Tensor]:
    *given, dout, dfinal, scale, chunk, impl, gate_gradient = args
    terms = Terms(*given)
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        grads = {name: torch.zeros_like(x) for name, x in terms._asdict().items() if x is not None}
        if terms.initial_state is not None and dfinal is not None:
            grads["initial_state"].copy_(dfinal)
    else:
        grads = _gradients(terms, dout, dfinal, scale, chunk, impl, gate_gradient)
    return [grads[name] for name in _with_gradient(terms, gate_gradient)]


def _gradients(
    terms: Terms,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    chunk: int,
    impl: str,
    gate_gradient: bool,
) -> dict[str, Tensor]:
    impl, _, rest = impl.partition("|")
    if impl == "eager" or only_by_token(terms):
        if chunk == 0:
            return recurrent_backward(terms, dout, dfinal, scale)
        return chunk_backward(terms, dout, dfinal, scale, chunk)

    def run() -> dict[str, Tensor]:
        launches = _launches(impl, terms)
        skips = {} if gate_gradient else getattr(launches, "NO_GATE_GRADIENT", {})
        if not guard.widens(terms.q):
            return launches.backward(terms, dout, dfinal, scale, **skips)
        d = None if dout is None else dout.float()
        grads = launches.backward(_in_float32(terms), d, dfinal, scale, **skips)
        return {name: x.to(getattr(terms, name).dtype) for name, x in grads.items()}

    def instead() -> dict[str, Tensor]:
        return _gradients(terms, dout, dfinal, scale, chunk, rest, gate_gradient)

    return guard.attempt(
        lambda: kind(terms, impl),
        terms.q.device,
        run,
        instead if rest else None,
        (),
        lambda: probe.mismatch(terms, impl, False, linear),
    )


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    terms, wide = Terms(*args[: len(Terms._fields)]), args[-1]
    o = terms.q.new_empty(terms.v.shape, dtype=terms.dtype if wide else None)
    return o, terms.q.new_empty(terms.state_shape, dtype=terms.dtype)


def _fake_backward(*args: Any) -> list[Tensor]:
    terms = Terms(*args[: len(Terms._fields)])
    given = (getattr(terms, name) for name in _with_gradient(terms, args[-1]))
    return [x.new_empty(x.shape) for x in given]


def _with_gradient(terms: Terms, gate_gradient: bool) -> list[str]:
    """What backward returns, in order. The gradient of g may cost as much as all others."""
    given = (name for name in DIFFERENTIABLE if getattr(terms, name) is not None)
    return [name for name in given if gate_gradient or name != "g"]


_OPTIONS = "float scale, int chunk, str impl"
_forward_op: Callable = define(
    "linear_forward",
    f"({_TERMS}, {_OPTIONS}, bool wide) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
_backward_op: Callable = define(
    "linear_backward",
    f"({_TERMS}, Tensor? dout, Tensor? dfinal, {_OPTIONS}, bool gate_gradient) -> Tensor[]",
    _backward,
    _fake_backward,
)
_call_forward = shortcut(_forward_op, replays=True)
_call_backward = shortcut(_backward_op, replays=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, chunk: int, impl: str, wide: bool, *given: Any) -> Any:
        ctx.save_for_backward(*given)
        ctx.options = (scale, chunk, impl)
        ctx.set_materialize_grads(False)
        return _call_forward(*given, scale, chunk, impl, wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> Any:
        given = ctx.saved_tensors
        if dout is None and dfinal is None:
            return (None,) * (4 + len(given))
        terms = Terms(*given)
        gate_gradient = ctx.needs_input_grad[4 + Terms._fields.index("g")]
        grads = _call_backward(*given, dout, dfinal, *ctx.options, gate_gradient)
        named = dict(zip(_with_gradient(terms, gate_gradient), grads))
        by_term = [named.get(name) for name in DIFFERENTIABLE]
        return (None, None, None, None, *by_term, None)


def linear(
    terms: Terms, scale: float, chunk: int, impl: str, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype, or wide in float32 for q of 16 bits, and the final state
    [N, HV, K, V], with gradients."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in terms):
        return _Linear.apply(scale, chunk, impl, wide, *terms)
    return _call_forward(*terms, scale, chunk, impl, wide)
