"""The linear family over several ranks, each with a part of the tokens.

What a rank's tokens do to a state is S -> M S + E. Each rank sends M and E of the sequence that
goes on at the next rank, and combines those of the ranks before it into the state that its own
tokens start from. Backward is the same from the last rank to the first: gradients of states go back
through M^T. Who has which tokens: runtime/context_parallel.py.

Back ends that cut sequences into segments (segments.py) have M and E of these anyway, and exchange
between these and the state passing, so that a call takes about as long as one of the same tokens
alone. Where sequences are not cut, and in plain torch, E comes from one more call over the tail's
tokens, and so does M where it is a matrix, from the identity. M is sent only if a sequence goes
through a whole rank. It is one number, one number a row or column, or a matrix [K, K] where tokens
erase. The states exchanged are float32 (float64 for float64).
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import Exchange
from slipstream.kernels.linear.context_segments import linear_in_segments
from slipstream.kernels.linear.context_terms import (
    Call,
    states_per_sequence,
    terms_of,
    transition_factors,
    transition_matrix,
)
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, LinearInputs
from slipstream.kernels.linear.op import (
    call_forward,
    forward_across_ranks,
    gradients,
    gradients_across_ranks,
)
from slipstream.kernels.linear.segments import Segments, split_into_segments
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.context_parallel import Gathered, Share

NUM_TERMS = len(LinearInputs._fields)


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
        return linear_in_segments(terms, initial_state, share, call)
    given = *terms._replace(initial_state=initial_state), share, call
    if needs_autograd(*terms, initial_state):
        o, final = _AcrossRanks.apply(*given)
    else:
        o, final, *_ = _forward(terms, initial_state, share, call, False)
    return o, final if call.wants_final else None


class _AcrossRanks(Function):
    operator = "slipstream::linear"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        given, (share, call) = LinearInputs(*args[:NUM_TERMS]), args[NUM_TERMS:]
        terms = given._replace(initial_state=None)
        o, final, states, transitions, saved = _forward(
            terms, given.initial_state, share, call, True
        )
        ctx.share, ctx.call = share, call
        ctx.has_initial = given.initial_state is not None
        ctx.num_transitions = len(transitions)
        save(ctx, *terms._replace(initial_state=states), *transitions, *saved)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dout: Tensor, dfinal: Tensor) -> Any:
        terms, rest = LinearInputs(*saved[:NUM_TERMS]), list(saved[NUM_TERMS:])
        transitions, of_forward = rest[: ctx.num_transitions], rest[ctx.num_transitions :]
        share, call = ctx.share, ctx.call
        width = states_per_sequence(terms)
        local = None
        if call.wants_final:
            dfinal = dfinal.to(terms.dtype).clone(memory_format=torch.contiguous_format)
            dfinal = share.add_up(dfinal)
            local = share.local_states(dfinal, None, width)
            if share.later and local is not None:  # the exchange says what comes there
                local[-width:] = 0
        elif share.later:
            local = terms.v.new_zeros(terms.state_shape, dtype=terms.dtype)
        # without a state its gradient would not come back
        start = terms.initial_state
        if start is None and ctx.has_initial:
            start = terms.v.new_zeros(terms.state_shape, dtype=terms.dtype)
        whole = terms._replace(initial_state=start)
        gate_gradient = ctx.needs_input_grad[LinearInputs._fields.index("g")]
        options = call.scale, call.chunk, call.impl, gate_gradient
        if share.crossings.any:
            exchange = _Backward(whole, share, call, local, transitions, dout)
            more = *options, of_forward, exchange
            grads = gradients_across_ranks(whole, dout, local, *more)
            exchange.finish()
        else:
            grads = gradients(whole, dout, local, *options)
        if ctx.has_initial:
            grads["initial_state"] = _whole_gradient(
                grads["initial_state"], dfinal if call.wants_final else None, share, width
            )
        else:
            grads.pop("initial_state", None)
        return (*(grads.get(name) for name in DIFFERENTIABLE), None, None, None)


def _forward(
    terms: LinearInputs, initial_state: Tensor | None, share: Share, call: Call, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor], list[Tensor]]:
    """o; final states of all sequences, or nothing; states before this rank's pieces; M of every
    rank; with save what backward takes of forward."""
    width = states_per_sequence(terms)
    if initial_state is not None:
        initial_state = initial_state.to(terms.dtype)
    before = None
    if share.earlier:  # which the exchange writes
        before = terms.v.new_zeros(width, *terms.state_shape[1:], dtype=terms.dtype)
    states = share.local_states(initial_state, before, width)
    whole = terms._replace(initial_state=states)
    options, transitions, saved = call[:3], [], []
    if share.crossings.any:
        exchange = _Forward(whole, share, call)
        o, after, saved = forward_across_ranks(whole, *options, save, exchange)
        transitions = exchange.finish()
    else:
        o, after = call_forward(*whole, *options, False)
    final = after.new_empty(0)
    if call.wants_final:
        final = share.whole_states(after, initial_state, width)
    return o, final, states, transitions, saved


class _StateExchange(Exchange):
    """What both directions have in common. It happens once, also where a back end fails after it
    and another takes over."""

    def __init__(self, terms: LinearInputs, share: Share, call: Call) -> None:
        self.terms, self.share, self.call = terms, share, call
        self.width, self.matrix = states_per_sequence(terms), terms.transition != "none"
        self.sent: Gathered | None = None

    def whole_segments(
        self, terms: LinearInputs, unit: int, can_pass: bool = True
    ) -> Segments | None:
        begin, end = self.piece()
        if can_pass and 2 * (end - begin) >= terms.q.shape[1]:
            return split_into_segments(terms, -(-terms.q.shape[1] // unit) * unit)
        self.by_calls()
        return None

    def piece(self) -> tuple[int, int]:
        """The tokens of the sequence that others are told of."""
        raise NotImplementedError

    def _blank(self) -> Tensor:
        like = self.terms
        return like.v.new_zeros(self.width, *like.state_shape[1:], dtype=like.dtype)


class _Forward(_StateExchange):
    """Writes what the ranks before come to into the first rows of the initial states."""

    def piece(self) -> tuple[int, int]:
        share = self.share
        return (share.tail_begin, share.local_offsets[-1]) if share.later else (0, 0)

    @property
    def sends(self) -> bool:
        return bool(self.share.later)

    @property
    def receives(self) -> bool:
        return bool(self.share.earlier)

    def __call__(
        self,
        sums: Tensor | None,
        segments: Segments,
        transition: Callable[[], Tensor | None],
    ) -> None:
        if self.sent is not None:
            return
        M = None
        if self._sends_transition and self.share.passes_through:
            M = self._of_tail(transition(), segments)
        self._send(None if sums is None else sums[-self.width :], M)

    def by_calls(self) -> None:
        if self.sent is not None:
            return
        share, call, terms = self.share, self.call, self.terms
        E = M = None
        if share.later:
            tail = terms_of(terms, share.tail_begin, None)
            begins = share.begins_here(len(share.pieces) - 1)
            states = terms.initial_state
            start = states[-self.width :] if begins and states is not None else None
            E = call_forward(*tail._replace(initial_state=start), *call[:3], False)[1]
            if self._sends_transition and share.passes_through:
                M = (
                    transition_matrix(tail, self.width, call)
                    if self.matrix
                    else transition_factors(tail)
                )
        self._send(E, M)

    def finish(self) -> list[Tensor]:
        """M of every rank, if any sequence goes through a whole one."""
        assert self.sent is not None
        if not self._sends_transition:
            self.sent.wait()
            return []
        return self._parts()[1]

    @property
    def _sends_transition(self) -> bool:
        terms = self.terms
        changes = self.matrix or terms.decay != "none" or terms.gv is not None
        return self.share.crossings.through and changes

    @property
    def _transition_shape(self) -> tuple[int, ...]:
        (HV, K, V), terms = self.terms.state_shape[1:], self.terms
        if self.matrix:
            return self.width, HV, K, K
        return self.width, HV, K if terms.decay == "channel" else 1, 1 if terms.gv is None else V

    def _of_tail(self, transition: Tensor | None, segments: Segments) -> Tensor | None:
        """The product of M of the tail's segments."""
        if transition is None:
            return None
        if self.share.packed:
            begin, end = self.piece()
            first = begin // segments.tokens + len(self.share.pieces) - 1
            count = -(-(end - begin) // segments.tokens)
            rows = transition[None, first : first + count]
        else:
            rows = transition.unflatten(0, (self.width, -1))
        if self.matrix:
            return reduce(lambda before, M: M @ before, rows.unbind(1))
        return rows.prod(1)

    def _send(self, E: Tensor | None, M: Tensor | None) -> None:
        """Both in one message."""
        message = (self._blank() if E is None else E.to(self.terms.dtype)).flatten()
        if self._sends_transition:
            if M is None:  # no rank uses it
                M = message.new_zeros(self._transition_shape)
            M = M.to(message.dtype).expand(self._transition_shape)
            message = torch.cat([message, M.flatten()])
        self.sent = self.share.start_gather(message)
        if not self.share.earlier:
            return
        assert self.terms.initial_state is not None
        before = _combine(self.share.earlier, *self._parts(), self.matrix)
        self.terms.initial_state[: self.width].copy_(before)

    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        assert self.sent is not None
        found, shape = self.sent.wait(), (self.width, *self.terms.state_shape[1:])
        n = self._blank().numel()
        added = [x[:n].view(shape) for x in found]
        if not self._sends_transition:
            return added, []
        return added, [x[n:].view(self._transition_shape) for x in found]


class _Backward(_StateExchange):
    """Writes what later ranks' outputs say about the tail's last state into dfinal's last rows."""

    def __init__(
        self,
        terms: LinearInputs,
        share: Share,
        call: Call,
        dfinal: Tensor | None,
        transitions: list[Tensor],
        dout: Tensor,
    ) -> None:
        super().__init__(terms, share, call)
        self.dfinal, self.transitions, self.dout = dfinal, transitions, dout

    def piece(self) -> tuple[int, int]:
        return (0, self.share.head_end) if self.share.earlier else (0, 0)

    @property
    def sends(self) -> bool:
        return bool(self.share.earlier)

    @property
    def receives(self) -> bool:
        return bool(self.share.later)

    def __call__(
        self,
        sums: Tensor | None,
        segments: Segments,
        transition: Callable[[], Tensor | None],
    ) -> None:
        if self.sent is None:
            self._send(None if sums is None else sums[: self.width])

    def by_calls(self) -> None:
        if self.sent is not None:
            return
        share, ds = self.share, None
        if share.earlier:
            assert self.terms.initial_state is not None
            head = terms_of(self.terms, 0, share.head_end)
            head = head._replace(initial_state=self.terms.initial_state[: self.width])
            end = None
            if self.dfinal is not None and share.ends_here(0):
                end = self.dfinal[: self.width]
            do = self.dout[:, : share.head_end]
            ds = gradients(head, do, end, *self.call[:3], False)["initial_state"]
        self._send(ds)

    def finish(self) -> None:
        assert self.sent is not None
        self.sent.wait()

    def _send(self, ds: Tensor | None) -> None:
        message = self._blank() if ds is None else ds.to(self.terms.dtype)
        self.sent = self.share.start_gather(message)
        if not self.share.later:
            return
        assert self.dfinal is not None
        back = [M.mT for M in self.transitions] if self.matrix else self.transitions
        found = _combine(self.share.later[::-1], self.sent.wait(), back, self.matrix)
        self.dfinal[-self.width :].copy_(found)


def _combine(
    ranks: list[int], added: list[Tensor], transitions: list[Tensor], matrix: bool
) -> Tensor:
    """The last rank's `added` plus its transition of what the ranks before it come to."""
    total = added[ranks[0]]
    for r in ranks[1:]:
        if transitions:
            total = transitions[r] @ total if matrix else transitions[r] * total
        total = total + added[r]
    return total


def _whole_gradient(local: Tensor, dfinal: Tensor | None, share: Share, width: int) -> Tensor:
    """Of the initial states of all sequences: of those that begin here, and on the first rank of
    those without tokens, whose final states they are."""
    rows = width * share.sequences
    whole = local.new_zeros(rows, *local.shape[1:])
    for i, n in enumerate(share.pieces):
        if share.begins_here(i):
            whole[n * width : (n + 1) * width] = local[i * width : (i + 1) * width]
    if share.rank == 0 and dfinal is not None:
        for n in share.without_tokens:
            whole[n * width : (n + 1) * width] = dfinal[n * width : (n + 1) * width]
    return whole
