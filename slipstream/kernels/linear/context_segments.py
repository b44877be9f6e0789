"""The linear family over several ranks with equal bits for any number of them.

Sequences are cut into segments of the plan's `segment_tokens`, counted from each sequence's first
token, whoever has them. Each is computed by calls of its own, of the same shapes everywhere; M and
E of all segments go to all ranks, and every rank combines them in the order of the tokens. So a
number's way through the arithmetic does not depend on where ranks begin. Backward is the same from
the last segment to the first. This takes two or three calls where context.py takes one, and the
bytes exchanged grow with the number of segments.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.context_terms import (
    Call,
    states_per_sequence,
    terms_of,
    transition_factors,
    transition_matrix,
)
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, LinearInputs
from slipstream.kernels.linear.op import call_forward, gradients
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.context_share import Share

NUM_TERMS = len(LinearInputs._fields)


def linear_in_segments(
    terms: LinearInputs, initial_state: Tensor | None, share: Share, call: Call
) -> tuple[Tensor, Tensor | None]:
    """As linear_across_ranks."""
    given = *terms._replace(initial_state=initial_state), share, call
    if needs_autograd(*terms, initial_state):
        o, final = _InSegments.apply(*given)
    else:
        o, final, _, _ = _forward(terms, initial_state, share, call)
    return o, final if call.wants_final else None


class _InSegments(Function):
    operator = "slipstream::linear"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        given, (share, call) = LinearInputs(*args[:NUM_TERMS]), args[NUM_TERMS:]
        terms = given._replace(initial_state=None)
        o, final, states, transitions = _forward(terms, given.initial_state, share, call)
        ctx.share, ctx.call, ctx.has_initial = share, call, given.initial_state is not None
        ctx.num_states = len(states)
        save(ctx, *terms, *states, *transitions)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dout: Tensor, dfinal: Tensor) -> Any:
        terms, rest = LinearInputs(*saved[:NUM_TERMS]), saved[NUM_TERMS:]
        states, transitions = rest[: ctx.num_states], rest[ctx.num_states :]
        gate_gradient = ctx.needs_input_grad[LinearInputs._fields.index("g")]
        share, call = ctx.share, ctx.call
        pieces = [x for x in share.segments if x.rank == share.rank]
        named = _backward(terms, share, call, states, transitions, dout, dfinal, gate_gradient)
        grads, dinitial = named
        if ctx.has_initial:
            # of the sequences that begin here, as context.py has it
            width, first = states_per_sequence(terms), {x.sequence for x in pieces if x.number == 0}
            mine = torch.zeros_like(dinitial)
            for n in range(share.sequences):
                if n in first or (share.rank == 0 and n in share.without_tokens):
                    mine[n * width : (n + 1) * width] = dinitial[n * width : (n + 1) * width]
            grads["initial_state"] = mine
        return (*(grads.get(name) for name in DIFFERENTIABLE), None, None, None)


def _forward(
    terms: LinearInputs, initial_state: Tensor | None, share: Share, call: Call
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """o; final states of all sequences; the states before this rank's segments; M of all."""
    width = states_per_sequence(terms)
    mine = [x for x in share.segments if x.rank == share.rank]
    calls = [terms_of(terms, x.begin, x.end) for x in mine]
    added = [call_forward(*x, *call[:3], False)[1] for x in calls]
    matrix = terms.transition != "none"
    decays = matrix or terms.decay != "none" or terms.gv is not None
    changes = []
    if decays:
        for x in calls:
            M = transition_matrix(x, width, call) if matrix else transition_factors(x)
            changes.append(M.expand(width, *_transition_shape(terms, matrix)))
    every = _gathered(added, terms.state_shape[1:], share, terms, width)
    transitions = []
    if decays:
        transitions = _gathered(changes, _transition_shape(terms, matrix), share, terms, width)
    blank = terms.v.new_zeros(width, *terms.state_shape[1:], dtype=terms.dtype)
    state = dict.fromkeys(range(share.sequences), blank)
    if initial_state is not None:
        wide = initial_state.to(terms.dtype)
        state = {n: wide[n * width : (n + 1) * width] for n in state}
    before = []
    for i, x in enumerate(share.segments):
        if x.rank == share.rank:
            before.append(state[x.sequence].contiguous())
        state[x.sequence] = _advanced(state[x.sequence], i, every, transitions, matrix)
    final = torch.cat([state[n] for n in sorted(state)]) if state else blank[:0]
    o = [
        call_forward(*x._replace(initial_state=s), *call[:3], False)[0]
        for x, s in zip(calls, before)
    ]
    return torch.cat(o, 1) if o else torch.zeros_like(terms.v), final, before, transitions


def _transition_shape(terms: LinearInputs, matrix: bool) -> tuple[int, ...]:
    HV, K, V = terms.state_shape[1:]
    if matrix:
        return HV, K, K
    return HV, K if terms.decay == "channel" else 1, 1 if terms.gv is None else V


def _advanced(
    state: Tensor, i: int, added: list[Tensor], transitions: list[Tensor], matrix: bool
) -> Tensor:
    if transitions:
        state = transitions[i] @ state if matrix else transitions[i] * state
    return state + added[i]


def _gathered(
    tensors: list[Tensor], shape: tuple[int, ...], share: Share, terms: LinearInputs, width: int
) -> list[Tensor]:
    """Those of all ranks' segments, in order; as many of each rank in a message."""
    counts = [sum(x.rank == r for x in share.segments) for r in range(len(share.lengths))]
    message = terms.v.new_zeros(max(counts), width, *shape, dtype=terms.dtype)
    for i, x in enumerate(tensors):
        message[i] = x
    return [x for each, n in zip(share.gather(message), counts) for x in each[:n].unbind(0)]


def _backward(
    terms: LinearInputs,
    share: Share,
    call: Call,
    states: Saved,
    transitions: Saved,
    dout: Tensor,
    dfinal: Tensor,
    gate_gradient: bool,
) -> tuple[dict[str, Tensor], Tensor]:
    """By name, without that of the initial states, which is the second."""
    width, options = states_per_sequence(terms), call[:3]
    mine = [x for x in share.segments if x.rank == share.rank]
    calls = [
        terms_of(terms, x.begin, x.end)._replace(initial_state=s) for x, s in zip(mine, states)
    ]
    outs = [dout[:, x.begin : x.end].contiguous() for x in mine]
    added = [gradients(x, do, None, *options, False)["initial_state"] for x, do in zip(calls, outs)]
    every = _gathered(added, terms.state_shape[1:], share, terms, width)
    matrix = terms.transition != "none"
    back = [M.mT for M in transitions] if matrix else [*transitions]
    blank = terms.v.new_zeros(width, *terms.state_shape[1:], dtype=terms.dtype)
    state = dict.fromkeys(range(share.sequences), blank)
    if call.wants_final:
        # added up in the order of ranks
        total = sum(share.gather(dfinal.to(terms.dtype)))
        assert isinstance(total, Tensor)
        state = {n: total[n * width : (n + 1) * width] for n in state}
    after: list[Tensor] = []
    for i, x in reversed([*enumerate(share.segments)]):
        if x.rank == share.rank:
            after.insert(0, state[x.sequence].contiguous())
        state[x.sequence] = _advanced(state[x.sequence], i, every, back, matrix)
    each_call = [
        gradients(x, do, ds, *options, gate_gradient) for x, do, ds in zip(calls, outs, after)
    ]
    grads: dict[str, Tensor] = {}
    for name in DIFFERENTIABLE:
        x = getattr(terms, name)
        if x is None or (name == "g" and not gate_gradient):
            continue
        each = [grad[name] for grad in each_call]
        if not each:
            grads[name] = torch.zeros_like(x)
        else:
            grads[name] = torch.stack(each).sum(0) if name == "u" else torch.cat(each, 1)
    return grads, torch.cat([state[n] for n in sorted(state)]) if state else blank[:0]
