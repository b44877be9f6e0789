"""The linear family as torch.library operators, and its gradient.

slipstream::_linear_forward takes the fields of LinearInputs and of ForwardCall, in their order, and
returns o and the final state. slipstream::_linear_backward takes the fields of LinearInputs and of
BackwardCall, and returns the gradients of the differentiable terms given, in their order.

Below: forward_impl, backward_impl, the operators, and the autograd function around them (Linear).
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import channel_gates, inputs, plan, prefix_states, probe
from slipstream.kernels.linear.backend import Exchange, Extras
from slipstream.kernels.linear.eager import recurrent, segments
from slipstream.kernels.linear.eager.chunk import chunk_backward, chunk_forward
from slipstream.kernels.linear.eager.recurrent import recurrent_backward
from slipstream.kernels.linear.inputs import NUM_TERMS, BackwardCall, ForwardCall, LinearInputs
from slipstream.runtime import compile_ahead, guarded_launch, launch_cache
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.consistent import consistent
from slipstream.runtime.custom_op import DirectCall, KernelOp, schema_of

# Up to this many tokens, Triton's fused_recurrent takes one after the other, in registers; more go
# in chunks. On an H200 16 take 15 to 21 us, in chunks 6 (retention) to 87 (kda).
MAX_STEP_TOKENS = 16
# Tokens of a chunk in plain torch. Of 16, 32 and 64 it takes the least time, forward and backward
# together: the gated delta rule 122 ms at T 2048, for 170 and 123.
DEFAULT_CHUNK = 32
# What is chosen on a GPU that has kernels, by whether the call takes those for sm_90.
CHOSEN = "sm90|triton|eager", "triton|eager"
# In place of a chunk size: bits that depend neither on the batch nor on where a sequence is cut.
CONSISTENT = -1

_AS_USUAL = nullcontext()
# Arguments of linear_backward; what forward saved comes behind them, the tensors of a SavedWY.
NUM_BACKWARD_ARGS = NUM_TERMS + len(BackwardCall._fields)
_TERMS = schema_of(LinearInputs)

NO_EXTRAS = Extras()


def forward_impl(*args: Any, extras: Extras = NO_EXTRAS) -> tuple[Any, ...]:
    """Runs the first implementation of a call that works, and says nothing of gradients.

    Args:
        args: of LinearInputs, then of ForwardCall.

    Returns:
        o, the final state, and with `save` the tensors of a SavedWY from back ends that have one.
    """
    terms, call = LinearInputs(*args[:NUM_TERMS]), ForwardCall(*args[NUM_TERMS:])
    first, _, others = call.impl.partition("|")
    if terms.erase is not None and first != "sm90":
        terms = channel_gates.as_dplr(terms)
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        return _empty_forward(terms, call, extras.exchange)
    by_token = _goes_by_token(terms, call, extras.exchange)
    with (
        guarded_launch.Guard(
            _guarded(terms, call, extras.exchange),
            terms.q.device,
            lambda: plan.kind(terms, first, by_token),
            lambda: probe.mismatch(terms, first, by_token, linear),
        ) as usable,
        consistent() if call.chunk == CONSISTENT else _AS_USUAL,
    ):
        if usable:
            if by_token:
                return _forward_by_token(terms, call, extras.exchange)
            options = {"dtype": torch.float32} if call.wide else {}
            return _backend(first, terms).forward(terms, call.scale, **extras._asdict(), **options)
    if others:
        return forward_impl(*terms, *call._replace(impl=others), extras=extras)
    if extras.prefix is not None:
        raise prefix_states.NoKernel(call.impl)
    forward = segments.forward_after(extras.exchange, partial(_eager, chunk=call.chunk))
    return forward(inputs.as_fp32(terms) if call.wide else terms, call.scale)


def _goes_by_token(terms: LinearInputs, call: ForwardCall, exchange: Exchange | None) -> bool:
    """Whether Triton's fused_recurrent takes a call, which is faster up to MAX_STEP_TOKENS."""
    short = call.chunk == 0 and not _is_fixed(exchange) and terms.q.shape[1] <= MAX_STEP_TOKENS
    return plan.only_by_token(terms) or short


def _is_fixed(exchange: Exchange | None) -> bool:
    """Whether the exchange says where segments begin."""
    return exchange is not None and exchange.segment_tokens is not None


def _guarded(terms: LinearInputs, call: ForwardCall, exchange: Exchange | None) -> str:
    """The implementations to try: with fixed segments as backward, which takes forward's states for
    those that plain torch would leave."""
    return "eager" if _is_fixed(exchange) and plan.only_by_token(terms) else call.impl


def _forward_by_token(
    terms: LinearInputs, call: ForwardCall, exchange: Exchange | None
) -> tuple[Tensor, Tensor]:
    from slipstream.kernels.linear.triton import decode as decode_launch

    if exchange is not None:
        exchange.by_calls()  # what it needs is there after this
    return decode_launch.forward(inputs.as_fp32(terms) if call.wide else terms, call.scale)


def _eager(terms: LinearInputs, scale: float, chunk: int) -> tuple[Tensor, Tensor]:
    if chunk == 0:
        return recurrent.recurrent_forward(terms, scale)
    if chunk == CONSISTENT:
        return segments.block_forward(terms, scale, DEFAULT_CHUNK)
    return chunk_forward(terms, scale, chunk)


def _backend(impl: str, terms: LinearInputs) -> Any:
    """The module that launches the kernels of a call in chunks; Triton is imported only here, once
    they are wanted."""
    if plan.per_channel(terms):
        return _module(impl, "dplr")
    if terms.transition == "delta":
        return _module(impl, "delta")
    return _module(impl, "vector_decay" if plan.is_vector_decay(terms) else "scalar_decay")


@functools.cache
def _module(impl: str, family: str) -> Any:
    return import_module(f"slipstream.kernels.linear.{impl}.{family}.backend")


def _empty_forward(
    terms: LinearInputs, call: ForwardCall, exchange: Exchange | None
) -> tuple[Tensor, ...]:
    """No tokens, no sequences or no width: the state stays, nothing is read."""
    if exchange is not None:
        exchange.by_calls()
    o = terms.q.new_zeros(terms.v.shape, dtype=terms.dtype if call.wide else None)
    final = terms.v.new_zeros(terms.state_shape, dtype=terms.dtype)
    if terms.initial_state is not None:
        final.copy_(terms.initial_state)
    return o, final


def backward_impl(*args: Any, extras: Extras = NO_EXTRAS) -> list[Tensor]:
    """Runs the first implementation of a call's gradients that works. Returns those of grad_names,
    in that order.

    Args:
        args: of LinearInputs, then of BackwardCall, then what forward_impl saved.
    """
    terms = LinearInputs(*args[:NUM_TERMS])
    call, saved = BackwardCall(*args[NUM_TERMS:NUM_BACKWARD_ARGS]), args[NUM_BACKWARD_ARGS:]
    first, _, others = call.impl.partition("|")
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        return _in_order(_empty_backward(terms, call.dfinal, extras.exchange), terms, call)
    if terms.erase is not None and first != "sm90":
        return _backward_as_dplr(terms, call, extras)
    grads, alone = None, plan.only_by_token(terms)
    with guarded_launch.Guard(
        "eager" if alone else call.impl,
        terms.q.device,
        lambda: plan.kind(terms, first),
        lambda: probe.mismatch(terms, first, False, linear),
    ) as usable:
        if usable:
            options: dict[str, Any] = {"gate_gradient": call.gate_gradient}
            options |= {"saved": saved or None, "exchange": extras.exchange}
            run = _backend(first, terms).backward
            grads = run(terms, call.dout, call.dfinal, call.scale, **options)
    if grads is None and others and not alone:
        return backward_impl(*terms, *call._replace(impl=others), *saved, extras=extras)
    grads = grads or _plain_gradients(terms, call, extras.exchange)
    return _in_order(grads, terms, call)


def _in_order(grads: Mapping[str, Tensor], terms: LinearInputs, call: BackwardCall) -> list[Tensor]:
    return [grads[name] for name in grad_names(terms, call.gate_gradient)]


def _backward_as_dplr(terms: LinearInputs, call: BackwardCall, extras: Extras) -> list[Tensor]:
    """The gradients of gates of channels, by kernels that do not take them."""
    inner = channel_gates.as_dplr(terms)
    found = backward_impl(*inner, *call._replace(gate_gradient=True), extras=extras)
    return _in_order(channel_gates.gradients_of(terms, by_name(inner, True, found)), terms, call)


def _plain_gradients(
    terms: LinearInputs, call: BackwardCall, exchange: Exchange | None
) -> dict[str, Tensor]:
    size = DEFAULT_CHUNK if call.chunk == CONSISTENT else call.chunk
    run = partial(chunk_backward, chunk=size) if call.chunk else recurrent_backward
    run = segments.backward_after(exchange, partial(_eager, chunk=call.chunk), run)
    return run(terms, call.dout, call.dfinal, call.scale)


def _empty_backward(
    terms: LinearInputs, dfinal: Tensor | None, exchange: Exchange | None
) -> dict[str, Tensor]:
    """No tokens, no sequences or no width: of the state that stays."""
    if exchange is not None:
        exchange.by_calls()
    grads = {name: torch.zeros_like(x) for name, x in terms._asdict().items() if x is not None}
    if terms.initial_state is not None and dfinal is not None:
        grads["initial_state"].copy_(dfinal)
    return grads


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    terms, call = LinearInputs(*args[:NUM_TERMS]), ForwardCall(*args[NUM_TERMS:])
    o = terms.q.new_empty(terms.v.shape, dtype=terms.dtype if call.wide else None)
    final = terms.q.new_empty(terms.state_shape, dtype=terms.dtype)
    return o, final


def _fake_backward(*args: Any) -> list[Tensor]:
    terms, call = LinearInputs(*args[:NUM_TERMS]), BackwardCall(*args[NUM_TERMS:])
    given = (getattr(terms, name) for name in grad_names(terms, call.gate_gradient))
    return [x.new_empty(x.shape) for x in given]


def grad_names(terms: LinearInputs, gate_gradient: bool) -> list[str]:
    """Names of backward's results, in order. The gradient of g may cost as much as all others."""
    return [
        name
        for name, x in zip(LinearInputs._fields, terms)
        if x is not None and name in inputs.DIFFERENTIABLE and (gate_gradient or name != "g")
    ]


def _compile_backward_also(args: tuple, results: tuple[Tensor, ...]) -> None:
    """Compiles the backward for a gradient of o alone, as most calls have it."""
    terms, call = LinearInputs(*args[:NUM_TERMS]), ForwardCall(*args[NUM_TERMS:])
    gate_gradient = terms.g is not None and terms.g.requires_grad
    o, _, *saved = results
    backward = BackwardCall(torch.empty_like(o), None, *call.backward, gate_gradient)
    backward_impl(*terms, *backward, *saved)


SIZES = compile_ahead.AtSizes(
    tokens=tuple(map(LinearInputs._fields.index, inputs.TOKEN_TERMS)),
    states=(LinearInputs._fields.index("initial_state"),),
    offsets=(LinearInputs._fields.index("cu_seqlens"),),
    heads=LinearInputs._fields.index("v"),
)
_DFINAL = NUM_TERMS + BackwardCall._fields.index("dfinal")
_SIZES_OF_GRADIENTS = SIZES._replace(
    tokens=(*SIZES.tokens, NUM_TERMS), states=(*SIZES.states, _DFINAL)
)


# kernels of other sizes, which are compiled after a first call
def _at_sizes(args: tuple) -> Iterator[tuple]:
    """By the back ends that a call of these sizes chooses."""
    for other in SIZES(args):
        terms, call = LinearInputs(*other[:NUM_TERMS]), ForwardCall(*other[NUM_TERMS:])
        yield (*terms, *call._replace(impl=impls_at(terms, call.impl)))


def with_short(
    at_sizes: compile_ahead.InOtherSizes, chunk: int, keep: int | None = None
) -> compile_ahead.InOtherSizes:
    """Other sizes, and few tokens also token by token: so layers call them without gradients.

    Args:
        chunk: the place of the tokens of a chunk.
        keep: of a flag, whether a gradient follows.
    """

    def others(args: tuple) -> Iterator[tuple]:
        for other in at_sizes(args):
            yield other
            trains = keep is not None and other[keep]
            if other[0].shape[1] <= MAX_STEP_TOKENS and other[chunk] > 0 and not trains:
                yield (*other[:chunk], 0, *other[chunk + 1 :])

    return others


def _backward_at_sizes(args: tuple) -> Iterator[tuple]:
    """With a gradient of the final state: those without are compiled beside the forward."""
    if args[_DFINAL] is None:
        return
    for other in _SIZES_OF_GRADIENTS(args):
        terms = LinearInputs(*other[:NUM_TERMS])
        call = BackwardCall(*other[NUM_TERMS:NUM_BACKWARD_ARGS])
        impl = impls_at(terms, call.impl)
        saved = other[NUM_BACKWARD_ARGS:]
        if saved:
            forward = ForwardCall(scale=call.scale, chunk=call.chunk, impl=impl)
            saved = forward_impl(*terms, *forward, extras=Extras(save=True))[2:]
        yield (*terms, *call._replace(impl=impl), *saved)


def impls_at(terms: LinearInputs, impl: str) -> str:
    """The implementations to try of terms of other sizes: another choice, where one was made."""
    if impl not in CHOSEN:
        return impl
    return CHOSEN[plan.sm90_unsupported_reason(terms) is not None]


call_forward = KernelOp(
    "linear_forward",
    f"({_TERMS}, {schema_of(ForwardCall)}) -> (Tensor, Tensor)",
    forward_impl,
    _fake_forward,
    replay=True,
    at_sizes=with_short(_at_sizes, NUM_TERMS + 1),
)
call_backward = KernelOp(
    "linear_backward",
    f"({_TERMS}, {schema_of(BackwardCall)}) -> Tensor[]",
    backward_impl,
    _fake_backward,
    replay=True,
    at_sizes=_backward_at_sizes,
)

# With gradients: _call_forward_saving where sm_90's delta rule hands its WY factors to backward,
# else _call_forward_training. They differ in results, not in o.
_call_forward_training = call_forward.before(_compile_backward_also, _at_sizes)
_call_forward_saving = DirectCall(
    partial(forward_impl, extras=Extras(save=True)),
    compile_also=_compile_backward_also,
    at_sizes=_at_sizes,
)
_call_backward_saved = DirectCall(backward_impl, at_sizes=_backward_at_sizes)


def by_name(terms: LinearInputs, gate_gradient: bool, grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """The gradients by the name of each differentiable term given."""
    return dict(zip(grad_names(terms, gate_gradient), grads))


class Linear(Function):
    operator = "slipstream::linear"

    @staticmethod
    def forward(ctx: Any, how: ForwardCall, *given: Any) -> Any:
        ctx.how = how
        ctx.set_materialize_grads(False)
        delta = how.impl.startswith("sm90") and LinearInputs(*given).transition == "delta"
        saves = delta and launch_cache.launches_as_plain(given[0])
        call = _call_forward_saving if saves else _call_forward_training
        o, final, *saved = call(*given, *how)
        save(ctx, *given, *saved)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dout: Tensor | None, dfinal: Tensor | None) -> Any:
        given, saved = saved[:NUM_TERMS], saved[NUM_TERMS:]
        if dout is None and dfinal is None:
            return (None,) * (1 + len(given))
        gate_gradient = ctx.needs_input_grad[1 + LinearInputs._fields.index("g")]
        args = (*given, dout, dfinal, *ctx.how.backward, gate_gradient, *saved)
        remaining = iter(_call_backward_saved(*args) if saved else call_backward(*args))
        by_term = [
            next(remaining) if x is not None and (gate_gradient or name != "g") else None
            for name, x in zip(inputs.DIFFERENTIABLE, given)
        ]
        return (None, *by_term, None)


def _of_operator(*args: Any) -> tuple[Tensor, Tensor]:
    """As slipstream::_linear_forward is called."""
    return Linear.apply(ForwardCall(*args[NUM_TERMS:]), *args[:NUM_TERMS])


call_forward.set_gradient(_of_operator)


def linear(terms: LinearInputs, how: ForwardCall) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype, or wide in float32 for q of 16 bits, and the final state
    [N, HV, K, V], with gradients."""
    if needs_autograd(*terms):
        return Linear.apply(how, *terms)
    return call_forward(*terms, *how)
