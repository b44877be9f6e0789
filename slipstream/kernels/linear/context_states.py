"""What ranks tell each other of states, forward and backward (context.py).

Back ends that cut sequences into segments (segments.py) have M and E of these anyway, and exchange
between these and the state passing, so that a call takes about as long as one of the same tokens
alone. Where sequences are not cut, and in plain torch, E comes from one more call over the tail's
tokens, and so does M where it is a matrix, from the identity. M is sent only if a sequence goes
through a whole rank. It is one number, one number a row or column, or a matrix [K, K] where tokens
erase. The states exchanged are float32 (float64 for float64).
"""

from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import Exchange
from slipstream.kernels.linear.context_terms import (
    Call,
    states_per_sequence,
    terms_of,
    transition_factors,
    transition_matrix,
)
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.op import call_forward, gradients
from slipstream.kernels.linear.segments import Segments, split_into_segments
from slipstream.runtime.context_exchange import Gathered
from slipstream.runtime.context_share import Share


def sends_transition(terms: LinearInputs, share: Share) -> bool:
    changes = terms.transition != "none" or terms.decay != "none" or terms.gv is not None
    return share.crossings.through and changes


def saves_transitions(terms: LinearInputs, share: Share) -> bool:
    """Whether backward wants M of later ranks."""
    return sends_transition(terms, share) and len(share.later) > 1


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


class ForwardStates(_StateExchange):
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

    def finish(self, save: bool) -> list[Tensor]:
        """With save M of later ranks, but for the last, [ranks, width, ...] in one tensor, if
        backward wants it."""
        assert self.sent is not None
        self.sent.wait()
        if not save or not saves_transitions(self.terms, self.share):
            return []
        transitions = self._parts()[1]
        return [torch.stack([transitions[r] for r in self.share.later[:-1]])]

    @property
    def _sends_transition(self) -> bool:
        return sends_transition(self.terms, self.share)

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
        added, transitions = self._parts()
        each = dict(enumerate(transitions))
        before = _combine(self.share.earlier, added, each, self.matrix)
        self.terms.initial_state[: self.width].copy_(before)

    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        assert self.sent is not None
        found, shape = self.sent.wait(), (self.width, *self.terms.state_shape[1:])
        n = self._blank().numel()
        added = [x[:n].view(shape) for x in found]
        if not self._sends_transition:
            return added, []
        return added, [x[n:].view(self._transition_shape) for x in found]


class BackwardStates(_StateExchange):
    """Writes what later ranks' outputs say about the tail's last state into dfinal's last rows."""

    def __init__(
        self,
        terms: LinearInputs,
        share: Share,
        call: Call,
        dfinal: Tensor | None,
        transitions: Tensor | None,
        dout: Tensor,
    ) -> None:
        """transitions: of ForwardStates.finish."""
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
        back = {}
        if self.transitions is not None:
            each = self.transitions.mT if self.matrix else self.transitions
            back = dict(zip(self.share.later, each.unbind(0)))
        found = _combine(self.share.later[::-1], self.sent.wait(), back, self.matrix)
        self.dfinal[-self.width :].copy_(found)


def _combine(
    ranks: list[int],
    added: list[Tensor],
    transitions: Mapping[int, Tensor],
    matrix: bool,
) -> Tensor:
    """The last rank's `added` plus its transition of what the ranks before it come to.

    transitions: by rank; none where nothing decays.
    """
    total = added[ranks[0]]
    for r in ranks[1:]:
        if transitions:
            total = transitions[r] @ total if matrix else transitions[r] * total
        total = total + added[r]
    return total
