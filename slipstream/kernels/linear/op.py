"""The linear family as torch.library operators, and its gradient.

slipstream::_linear_forward takes the fields of LinearInputs and of ForwardCall, in their order, and
returns o and the final state. _linear_spans is the same in `spans` slices of tokens, and also
returns the states between them, for backward. _linear_backward takes the fields of
LinearInputs and of BackwardCall, and returns the gradients of the differentiable terms given, in
their order.

Below: forward_impl, backward_impl, the operators, and the autograd function around them (Linear).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.kernels.linear import probe, workspace
from slipstream.kernels.linear.backend import BackendCapabilities, Exchange, SavedWY
from slipstream.kernels.linear.channel_gates import as_dplr, gradients_of
from slipstream.kernels.linear.eager.blocks import block_forward
from slipstream.kernels.linear.eager.chunk import chunk_forward
from slipstream.kernels.linear.eager.chunk_backward import chunk_backward
from slipstream.kernels.linear.eager.recurrent import recurrent_forward
from slipstream.kernels.linear.eager.recurrent_backward import recurrent_backward
from slipstream.kernels.linear.eager.segments import backward_after, forward_after
from slipstream.kernels.linear.inputs import (
    DIFFERENTIABLE,
    NUM_TERMS,
    BackwardCall,
    ForwardCall,
    LinearInputs,
)
from slipstream.kernels.linear.prefix_states import NoKernel, PrefixStates
from slipstream.kernels.linear.sm90.plan import is_vector_decay, per_channel
from slipstream.kernels.linear.triton.plan import kind, only_by_token
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.consistent import consistent
from slipstream.runtime.custom_op import DirectCall, KernelOp, schema_of
from slipstream.runtime.guarded_launch import Guard
from slipstream.runtime.launch_cache import launches_as_plain

# Up to this many tokens, Triton's fused_recurrent takes one after the other, in registers; more go
# in chunks. On an H200 16 take 15 to 21 us, in chunks 6 (retention) to 87 (kda).
MAX_STEP_TOKENS = 16
# Tokens of a chunk in plain torch. Of 16, 32 and 64 it takes the least time, forward and backward
# together: the gated delta rule 122 ms at T 2048, for 170 and 123.
DEFAULT_CHUNK = 32
# In place of a chunk size: bits that depend neither on the batch nor on where a sequence is cut.
CONSISTENT = -1

_AS_USUAL = nullcontext()
# Arguments of linear_backward; what forward saved comes behind them, some SavedWY.
NUM_BACKWARD_ARGS = NUM_TERMS + len(BackwardCall._fields)
Outputs = tuple[Tensor | None, Tensor | None] | None
_TERMS = schema_of(LinearInputs)


def forward_impl(
    *args: Any,
    out: Outputs = None,
    save: bool = False,
    exchange: Exchange | None = None,
    prefix: PrefixStates | None = None,
) -> tuple[Any, ...]:
    """Runs the first implementation of a call that works, and says nothing of gradients.

    Args:
        args: of LinearInputs, then of ForwardCall.
        out: memory for o and the final state.
        save: the back end leaves a SavedWY if it can.
        exchange: of a call whose sequences go on at other ranks, which is not cut into slices.
        prefix: states that kernels leave on the way, or NoKernel is raised.

    Returns:
        o, the final state; and if ForwardCall.num_slices is given the states between the slices,
        and with `save` the tensors of a SavedWY, of packed sequences one for each slice.
    """
    terms, call = LinearInputs(*args[:NUM_TERMS]), ForwardCall(*args[NUM_TERMS:])
    scale, chunk, impl, wide, _ = call
    if terms.erase is not None and not impl.startswith("sm90"):
        terms = as_dplr(terms)
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        return _empty_forward(terms, call, exchange)
    first, _, others = impl.partition("|")
    fixed = exchange is not None and exchange.segment_tokens is not None
    # up to MAX_STEP_TOKENS this takes less time than chunks
    short = chunk == 0 and not fixed and terms.q.shape[1] <= MAX_STEP_TOKENS
    by_token = only_by_token(terms) or short
    with (
        Guard(
            # as backward, which takes forward's states for those that plain torch would leave
            "eager" if fixed and only_by_token(terms) else impl,
            terms.q.device,
            lambda: kind(terms, first, by_token),
            lambda: probe.mismatch(terms, first, by_token, linear),
        ) as usable,
        consistent() if chunk == CONSISTENT else _AS_USUAL,
    ):
        if usable:
            backend = _backend_for(first, terms, by_token)
            can = backend.CAPABILITIES
            given = _as_fp32(terms) if wide and not can.fp32_out else terms
            if prefix is not None:
                return backend.forward(terms, scale, prefix=prefix)[:2]
            slices = _forward_slices(given, call, can, out, exchange)
            options, states = _forward_options(given, call, can, slices, save, exchange)
            if len(slices) == 1 and out is None:
                if wide and can.fp32_out:
                    options["dtype"] = torch.float32
                o, final, *saved = backend.forward(given, scale, **options)
                return o, final, *_with_states(given, states, saved, call.num_slices)
            run = partial(backend.forward, **options)
            run = workspace.with_active_count(run, given, slices, can)
            run = run if workspace.writes_into(out, can) else partial(_into_out, run)
            return _in_slices(run, given, call, slices, out)
    if others:
        args = *terms, *call._replace(impl=others)
        return forward_impl(*args, out=out, save=save, exchange=exchange, prefix=prefix)
    if prefix is not None:
        raise NoKernel(impl)
    forward, num_slices = (
        forward_after(exchange, partial(_eager, chunk=chunk)),
        call.num_slices or 0,
    )
    terms = _as_fp32(terms) if wide else terms
    if num_slices <= 1 and out is None:
        return *forward(terms, scale), *_with_states(terms, None, [], call.num_slices)
    slices = workspace.fwd_slices(terms, num_slices) if num_slices > 1 else [workspace.WHOLE]
    return _in_slices(partial(_into_out, forward), terms, call, slices, out)


def _forward_slices(
    terms: LinearInputs,
    call: ForwardCall,
    can: BackendCapabilities,
    out: Outputs,
    exchange: Exchange | None,
) -> list[workspace.BatchTimeSlice]:
    """How a back end's call is cut: not where it writes the states between slices by itself."""
    num_slices, packed = call.num_slices or 0, terms.cu_seqlens is not None
    if exchange is not None or (num_slices > 1 and not packed and can.checkpoints):
        return [workspace.WHOLE]
    # a slice of packed sequences begins chunks of its own, and so has other bits
    if call.chunk == CONSISTENT and packed:
        return [workspace.WHOLE]
    # with out it is a slice
    if num_slices > 1 or (can.writes_out and out is None):
        return workspace.fwd_slices(terms, num_slices)
    return [workspace.WHOLE]


def _forward_options(
    terms: LinearInputs,
    call: ForwardCall,
    can: BackendCapabilities,
    slices: list[workspace.BatchTimeSlice],
    save: bool,
    exchange: Exchange | None,
) -> tuple[dict[str, Any], Tensor | None]:
    """The arguments of a back end's forward besides terms and scale, and the states between slices,
    which it writes."""
    options: dict[str, Any] = {"save": True} if save and can.saves_wy else {}
    if exchange is not None:
        return options | _exchanging(exchange, can), None
    num_slices = call.num_slices or 0
    if num_slices <= 1 or terms.cu_seqlens is not None or not can.checkpoints:
        return options, None
    shape = workspace.checkpoints_shape(terms, num_slices)
    states = terms.v.new_empty(shape, dtype=torch.float32)
    return options | {"checkpoints": states}, states


def _in_slices(
    run: Callable,
    terms: LinearInputs,
    call: ForwardCall,
    slices: list[workspace.BatchTimeSlice],
    out: Outputs,
) -> tuple[Any, ...]:
    """The results of forward_impl, by run(terms, scale, out=...) for each slice."""
    dtype, num_slices = torch.float32 if call.wide else None, call.num_slices
    more = dtype, num_slices or 0, out or (None, None)
    results = workspace.forward(run, terms, call.scale, slices, *more)
    return results[:2] if num_slices is None else results


def _exchanging(exchange: Exchange, can: BackendCapabilities) -> dict[str, Any]:
    """The argument, for kernels that take it; else what they need is there after this."""
    if can.exchanges:
        return {"exchange": exchange}
    exchange.by_calls()
    return {}


def _with_states(
    terms: LinearInputs, states: Tensor | None, saved: list[SavedWY | None], count: int | None
) -> list[Any]:
    """The results of forward_impl after the final state."""
    if count is None:
        return []
    if states is None:
        states = terms.v.new_empty(workspace.checkpoints_shape(terms, 1), dtype=terms.dtype)
    return [states, *((saved and saved[0]) or ())]


def _eager(terms: LinearInputs, scale: float, chunk: int) -> tuple[Tensor, Tensor]:
    if chunk == 0:
        return recurrent_forward(terms, scale)
    if chunk == CONSISTENT:
        return block_forward(terms, scale, DEFAULT_CHUNK)
    return chunk_forward(terms, scale, chunk)


def _into_out(
    forward: Callable, terms: LinearInputs, scale: float, out: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    for x, y in zip(out, forward(terms, scale)):
        x.copy_(y)
    return out


def _backend_for(impl: str, terms: LinearInputs, by_token: bool = False) -> Any:
    """The module that launches the kernels of a call (backend.py); Triton is imported only here,
    once they are wanted."""
    if by_token:
        from slipstream.kernels.linear.triton import decode_launch

        return decode_launch
    if impl == "sm90":
        if terms.transition == "none" and is_vector_decay(terms):
            from slipstream.kernels.linear.sm90.vector_decay import backend as vector_decay_sm90

            return vector_decay_sm90
        if terms.transition == "none":
            from slipstream.kernels.linear.sm90.scalar_decay import backend as scalar_decay_sm90

            return scalar_decay_sm90
        if per_channel(terms):
            from slipstream.kernels.linear.sm90.dplr import backend as dplr_sm90

            return dplr_sm90
        from slipstream.kernels.linear.sm90.delta import backend as delta_sm90

        return delta_sm90
    assert impl == "triton", impl
    if per_channel(terms):
        from slipstream.kernels.linear.triton.dplr import backend

        return backend
    if terms.transition == "delta":
        from slipstream.kernels.linear.triton.delta import backend as delta_backend

        return delta_backend
    if is_vector_decay(terms):
        from slipstream.kernels.linear.triton.vector_decay import backend as vector_decay_backend

        return vector_decay_backend
    from slipstream.kernels.linear.triton.scalar_decay import backend as scalar_decay_backend

    return scalar_decay_backend


def _as_fp32(terms: LinearInputs) -> LinearInputs:
    wide = (x if x is None or not x.is_floating_point() else x.float() for x in terms)
    return LinearInputs(*cast(Any, wide))


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
    if call.num_slices is None:
        return o, final
    return o, final, final.new_zeros(workspace.checkpoints_shape(terms, call.num_slices))


def backward_impl(
    *args: Any,
    out: Mapping[str, Tensor] | None = None,
    overwrite_q: bool = False,
    exchange: Exchange | None = None,
) -> list[Tensor]:
    """Runs the first implementation of a call's gradients that works. Returns those of grad_names,
    in that order.

    Args:
        args: of LinearInputs, then of BackwardCall, then what forward_impl saved.
        out: memory for some gradients, by the name of their term.
        overwrite_q: the caller does not read q again, so that its memory may take a gradient.
        exchange: of a call whose sequences go on at other ranks, which is not cut into slices.
    """
    terms = LinearInputs(*args[:NUM_TERMS])
    call = BackwardCall(*args[NUM_TERMS:NUM_BACKWARD_ARGS])
    dout, dfinal, scale, chunk, impl, gate_gradient, checkpoints = call
    if terms.v.numel() == 0 or terms.q.shape[-1] == 0:
        if exchange is not None:
            exchange.by_calls()
        grads = _empty_backward(terms, dfinal)
        return [grads[name] for name in grad_names(terms, gate_gradient)]
    if terms.erase is not None and not impl.startswith("sm90"):
        inner = as_dplr(terms)
        found = backward_impl(*inner, *call._replace(gate_gradient=True), exchange=exchange)
        grads = gradients_of(terms, by_name(inner, True, found))
        return [workspace.copy_into(grads, out)[name] for name in grad_names(terms, gate_gradient)]
    first, _, others = impl.partition("|")
    grads = None
    with Guard(
        "eager" if only_by_token(terms) else impl,
        terms.q.device,
        lambda: kind(terms, first),
        lambda: probe.mismatch(terms, first, False, linear),
    ) as usable:
        if usable:
            backend = _backend_for(first, terms)
            can = backend.CAPABILITIES
            unsliced = not can.writes_out or (first == "sm90" and workspace.bwd_unsliced(terms))
            unsliced = unsliced or exchange is not None
            slices = [workspace.WHOLE] if unsliced else workspace.bwd_slices(terms, checkpoints)
            saved = _saved(args[NUM_BACKWARD_ARGS:]) if can.saves_wy else []
            if len(slices) == 1:
                options: dict[str, Any] = {} if exchange is None else _exchanging(exchange, can)
                if can.writes_out and out is not None:
                    options["out"] = out
                if saved:
                    options["saved"] = saved[0]
                if can.overwrites_q and overwrite_q:
                    options["overwrite_q"] = True
                if can.skips_gate_grad and not gate_gradient:
                    options["gate_gradient"] = False
                grads = backend.backward(terms, dout, dfinal, scale, **options)
            else:
                run = workspace.with_active_count(backend.backward, terms, slices, can)
                grads = workspace.backward(
                    run, terms, dout, dfinal, scale, slices, checkpoints, saved
                )
    if grads is None:
        if others and not only_by_token(terms):
            args = *terms, *call._replace(impl=others), *args[NUM_BACKWARD_ARGS:]
            return backward_impl(*args, out=out, overwrite_q=overwrite_q, exchange=exchange)
        size = DEFAULT_CHUNK if chunk == CONSISTENT else chunk
        run = partial(chunk_backward, chunk=size) if chunk else recurrent_backward
        run = backward_after(exchange, partial(_eager, chunk=chunk), run)
        grads = run(terms, dout, dfinal, scale)
    grads = workspace.copy_into(grads, out)
    return [grads[name] for name in grad_names(terms, gate_gradient)]


def _saved(tensors: Sequence[Tensor]) -> list[SavedWY]:
    width = len(SavedWY._fields)
    return [SavedWY(*tensors[i : i + width]) for i in range(0, len(tensors), width)]


def _empty_backward(terms: LinearInputs, dfinal: Tensor | None) -> dict[str, Tensor]:
    """No tokens, no sequences or no width: of the state that stays."""
    grads = {name: torch.zeros_like(x) for name, x in terms._asdict().items() if x is not None}
    if terms.initial_state is not None and dfinal is not None:
        grads["initial_state"].copy_(dfinal)
    return grads


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    terms, call = LinearInputs(*args[:NUM_TERMS]), ForwardCall(*args[NUM_TERMS:])
    o = terms.q.new_empty(terms.v.shape, dtype=terms.dtype if call.wide else None)
    final = terms.q.new_empty(terms.state_shape, dtype=terms.dtype)
    if call.num_slices is None:
        return o, final
    return o, final, final.new_empty(workspace.checkpoints_shape(terms, call.num_slices))


def _fake_backward(*args: Any) -> list[Tensor]:
    terms, call = LinearInputs(*args[:NUM_TERMS]), BackwardCall(*args[NUM_TERMS:])
    given = (getattr(terms, name) for name in grad_names(terms, call.gate_gradient))
    return [x.new_empty(x.shape) for x in given]


def grad_names(terms: LinearInputs, gate_gradient: bool) -> list[str]:
    """Names of backward's results, in order. The gradient of g may cost as much as all others."""
    return [
        name
        for name, x in zip(LinearInputs._fields, terms)
        if x is not None and name in DIFFERENTIABLE and (gate_gradient or name != "g")
    ]


def _compile_backward_also(args: tuple, results: tuple[Tensor, ...]) -> None:
    """Compiles the backward for a gradient of o alone, as most calls have it."""
    terms, call = LinearInputs(*args[:NUM_TERMS]), ForwardCall(*args[NUM_TERMS:])
    gate_gradient = terms.g is not None and terms.g.requires_grad
    o, _, checkpoints, *saved = results if len(results) > 2 else (*results, None)
    backward = BackwardCall(torch.empty_like(o), None, *call[:3], gate_gradient, checkpoints)
    backward_impl(*terms, *backward, *saved)


_OPTIONS = schema_of(ForwardCall, 4)  # all but the number of slices
call_forward = KernelOp(
    "linear_forward",
    f"({_TERMS}, {_OPTIONS}) -> (Tensor, Tensor)",
    forward_impl,
    _fake_forward,
    replay=True,
)
_call_slices = KernelOp(
    "linear_spans",
    f"({_TERMS}, {_OPTIONS}, int spans) -> (Tensor, Tensor, Tensor)",
    forward_impl,
    _fake_forward,
    replay=True,
    compile_also=_compile_backward_also,
)
call_backward = KernelOp(
    "linear_backward",
    f"({_TERMS}, {schema_of(BackwardCall, 6)}, Tensor? marks=None) -> Tensor[]",
    backward_impl,
    _fake_backward,
    replay=True,
)


# With gradients: as _call_slices where states between slices are kept for the backward, _saving
# where sm_90's delta rule hands it WY factors, else _training. They differ in results, not in o.
_call_forward_training = call_forward.before(_compile_backward_also)
_call_forward_saving = DirectCall(
    partial(forward_impl, save=True), compile_also=_compile_backward_also
)
_call_backward_saved = DirectCall(backward_impl)


def by_name(terms: LinearInputs, gate_gradient: bool, grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """The gradients by the name of each differentiable term given."""
    return dict(zip(grad_names(terms, gate_gradient), grads))


class Linear(Function):
    operator = "slipstream::linear"

    @staticmethod
    def forward(ctx: Any, scale: float, chunk: int, impl: str, wide: bool, *given: Any) -> Any:
        ctx.options = (scale, chunk, impl)
        ctx.set_materialize_grads(False)
        terms = LinearInputs(*given)
        packed = chunk == CONSISTENT and terms.cu_seqlens is not None
        num_slices, saved = 1 if packed else workspace.num_slices(terms, impl), []
        if impl.startswith("sm90") and terms.transition == "delta" and launches_as_plain(terms.q):
            o, final, *saved = _call_forward_saving(*given, scale, chunk, impl, wide, num_slices)
        elif num_slices > 1 or workspace.fwd_unsliced(terms, impl):
            o, final, *saved = _call_slices(*given, *ctx.options, wide=wide, spans=num_slices)
        else:
            o, final = _call_forward_training(*given, scale, chunk, impl, wide)
        save(ctx, *given, *saved)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dout: Tensor | None, dfinal: Tensor | None) -> Any:
        given, saved = saved[:NUM_TERMS], saved[NUM_TERMS:]
        if dout is None and dfinal is None:
            return (None,) * (4 + len(given))
        gate_gradient = ctx.needs_input_grad[4 + LinearInputs._fields.index("g")]
        args = (*given, dout, dfinal, *ctx.options, gate_gradient, *saved)
        if len(saved) <= 1:
            grads = call_backward(*args)
        else:
            grads = _call_backward_saved(*args)
        remaining = iter(grads)
        by_term = [
            next(remaining) if x is not None and (gate_gradient or name != "g") else None
            for name, x in zip(DIFFERENTIABLE, given)
        ]
        return (None, None, None, None, *by_term, None)


def _of_operator(*args: Any) -> tuple[Tensor, Tensor]:
    """As slipstream::_linear_forward is called."""
    return Linear.apply(*args[NUM_TERMS : NUM_TERMS + 4], *args[:NUM_TERMS])


call_forward.set_gradient(_of_operator)
_call_slices.set_gradient(_of_operator)


def linear(
    terms: LinearInputs, scale: float, chunk: int, impl: str, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype, or wide in float32 for q of 16 bits, and the final state
    [N, HV, K, V], with gradients."""
    if needs_autograd(*terms):
        return Linear.apply(scale, chunk, impl, wide, *terms)
    return call_forward(*terms, scale=scale, chunk=chunk, impl=impl, wide=wide)
