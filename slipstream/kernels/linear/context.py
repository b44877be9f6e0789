"""The linear family over several ranks, each with a part of the tokens.

What a rank's tokens do to a state is S -> M S + E. Each rank sends M and E of the sequence that
goes on at the next rank, and combines those of the ranks before it into the state that its own
tokens start from (context_states.py). Backward is the same from the last rank to the first:
gradients of states go back through M^T. Who has which tokens: runtime/context_parallel.py.

A call on a GPU is replayed with its exchange inside (runtime/call_replay.py): what it does follows
from shapes and from the share.
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import context_states, inputs, op
from slipstream.kernels.linear.context_terms import Call, states_per_sequence
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, NUM_TERMS, LinearInputs
from slipstream.kernels.linear.modes.memory import groups_of, in_groups
from slipstream.runtime import autograd
from slipstream.runtime.context_parallel import Share
from slipstream.runtime.custom_op import DirectCall


def linear_across_ranks(
    terms: LinearInputs, initial_state: Tensor | None, share: Share, call: Call
) -> tuple[Tensor, Tensor | None]:
    """o of this rank's tokens, and if wanted the final states of all sequences, the same on every
    rank.

    Args:
        terms: this rank's tokens, with the offsets of its pieces and without a state.
        initial_state: of all sequences [N, HV, K, V], the same on every rank. Its gradient on a
            rank is that of the sequences that begin there.
    """
    if share.segment_tokens is not None:
        share.expect_begin_of_segment()
        chunk = gcd(call.how.chunk, share.segment_tokens) if call.how.chunk else 0
        call = call._replace(how=call.how._replace(chunk=chunk))
    given = terms._replace(initial_state=initial_state)
    if autograd.needs_autograd(*given):
        o, final = _AcrossRanks.apply(*given, share, call)
    else:
        o, after, *_ = _call_forward(*given, share, call, False)
        final = _final_states(after, initial_state, terms, share, call)
    return o, final if call.wants_final else None


class _AcrossRanks(autograd.Function):
    operator = "slipstream::linear"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        terms, (share, call) = LinearInputs(*args[:NUM_TERMS]), args[NUM_TERMS:]
        o, after, *rest = _call_forward(*terms, share, call, True)
        initial_state = terms.initial_state
        ctx.share, ctx.call, ctx.has_initial = share, call, initial_state is not None
        states = rest.pop(0) if ctx.has_initial or share.earlier else None
        autograd.save(ctx, *terms._replace(initial_state=states), *rest)
        return o, autograd.as_base(_final_states(after, initial_state, terms, share, call))

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dout: Tensor, dfinal: Tensor) -> Any:
        terms, rest = LinearInputs(*saved[:NUM_TERMS]), saved[NUM_TERMS:]
        share, call = ctx.share, ctx.call
        if call.wants_final:
            dfinal = dfinal.to(terms.dtype).clone(memory_format=torch.contiguous_format)
            dfinal = share.add_up(dfinal)
        gate_gradient = ctx.needs_input_grad[LinearInputs._fields.index("g")]
        end = dfinal if call.wants_final else None
        found = iter(_call_backward(*terms, dout, end, share, call, gate_gradient, *rest))
        grads = {name: next(found) for name in op.grad_names(terms, gate_gradient)}
        start = grads.pop("initial_state", None)
        if ctx.has_initial:
            assert start is not None
            width = states_per_sequence(terms)
            grads["initial_state"] = _whole_gradient(start, end, share, width)
        return (*(grads.get(name) for name in DIFFERENTIABLE), None, None, None)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    """o; the states after this rank's pieces; those before them, if any are given or come from
    other ranks; and with `save` what _backward takes: M, if a sequence goes through this rank, and
    what the back end leaves for its own."""
    terms, (share, call, save) = LinearInputs(*args[:NUM_TERMS]), args[NUM_TERMS:]
    groups = None
    if not save and share.crossings.any:  # the most tokens of a rank, so that all cut alike
        groups = groups_of(terms, call.how.impl, False, tokens=max(share.lengths))
    if groups is None:
        return _forward_heads(terms, share, call, save)
    run: Any = lambda group: _forward_heads(group, share, call, False)[:2]  # noqa: E731
    return in_groups(run, terms, terms.dims, groups)


def _forward_heads(terms: LinearInputs, share: Share, call: Call, save: bool) -> tuple[Tensor, ...]:
    """As _forward."""
    width, initial_state, before = states_per_sequence(terms), terms.initial_state, None
    if initial_state is not None:
        initial_state = initial_state.to(terms.dtype)
    if share.earlier:  # which the exchange writes
        before = terms.v.new_zeros(width, *terms.state_shape[1:], dtype=terms.dtype)
    states = share.local_states(initial_state, before, width)
    terms = terms._replace(initial_state=states)
    begins = [] if states is None else [states]
    if share.segment_tokens is not None:
        exchange = context_states.ForwardInOrder(terms, share, call)
    elif share.crossings.any:
        exchange = context_states.ForwardStates(terms, share, call)
    else:
        return *op.call_forward(*terms, *call.how), *begins
    extras = op.Extras(save=save, exchange=exchange)
    found, after, *saved = op.forward_impl(*terms, *call.how, extras=extras)
    passed = [exchange.transition] if save and exchange.transition is not None else []
    return found, after, *begins, *passed, *saved


def _backward(*args: Any) -> list[Tensor]:
    """The gradients, in the order of grad_names."""
    terms, (dout, dfinal, share, call, gate_gradient, *saved) = (
        LinearInputs(*args[:NUM_TERMS]),
        args[NUM_TERMS:],
    )
    width, end = states_per_sequence(terms), None
    if dfinal is not None:
        end = share.local_states(dfinal, None, width)
        if share.later and end is not None:  # the exchange says what comes there
            end[-width:] = 0
    elif share.later:
        end = terms.v.new_zeros(terms.state_shape, dtype=terms.dtype)
    backward = inputs.BackwardCall(dout, end, *call.how.backward, gate_gradient=gate_gradient)
    if share.segment_tokens is not None:
        exchange = context_states.BackwardInOrder(terms, share, call, end, dout)
    elif share.crossings.any:
        transition = saved.pop(0) if share.passes_through and context_states.decays(terms) else None
        exchange = context_states.BackwardStates(terms, share, call, end, transition, dout)
    else:
        return op.call_backward(*terms, *backward)
    return op.backward_impl(*terms, *backward, *saved, extras=op.Extras(exchange=exchange))


# R ranks take 2 (R - 2) operations of torch to combine what they have sent
_call_forward, _call_backward = (DirectCall(x, max_operations=None) for x in (_forward, _backward))


def _final_states(
    after: Tensor, initial_state: Tensor | None, terms: LinearInputs, share: Share, call: Call
) -> Tensor:
    """The final states of all sequences, empty if they are not wanted."""
    if not call.wants_final:
        return after.new_empty(0)
    if initial_state is not None:
        initial_state = initial_state.to(terms.dtype)
    return share.whole_states(after, initial_state, states_per_sequence(terms))


def _whole_gradient(local: Tensor, dfinal: Tensor | None, share: Share, width: int) -> Tensor:
    """The gradient of the initial states of all sequences: of those that begin here, and on the
    first rank of those without tokens, whose final states they are."""
    rows = width * share.sequences
    whole = local.new_zeros(rows, *local.shape[1:])
    for i, n in enumerate(share.pieces):
        if share.begins_here(i):
            whole[n * width : (n + 1) * width] = local[i * width : (i + 1) * width]
    if share.rank == 0 and dfinal is not None:
        for n in share.without_tokens:
            whole[n * width : (n + 1) * width] = dfinal[n * width : (n + 1) * width]
    return whole
