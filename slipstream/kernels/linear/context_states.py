"""Messages between ranks about states, forward and backward (context.py).

Back ends that cut sequences into segments (segments.py) have M and E of these anyway, and exchange
between these and the state passing, so that a call takes about as long as one of the same tokens
alone. Where sequences are not cut, and in plain torch, E comes from one more call over the tail's
tokens, and so does M where it is a matrix, from the identity. E goes to all ranks after this one
(back, before it) that have tokens of the sequence, and from those that it goes through M, too: one
number, one number a row or column, or a matrix [K, K] where tokens erase. The states exchanged are
float32 (float64 for float64).

With equal bits for any number of ranks sequences are cut into segments of the plan's
`segment_tokens`, counted from each sequence's first token, on whichever rank that is. Kernels
compute for all segments at once what each does to a state. State passing then goes from segment to
segment in the order of tokens: a rank begins with exactly the state that the rank before ends with.
So the order of the arithmetic does not depend on where ranks begin. Backward is the same from the
last segment to the first.

A state goes from rank to rank in rounds, one after the other, in which all ranks take part; what
segments do to states is there by then. Where kernels do not cut, and in plain torch, a rank
computes its tokens once it has the state before them, plain torch by segments (eager/segments.py).
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, context_terms, inputs
from slipstream.kernels.linear.context_terms import (
    Call,
    head_gradient,
    states_per_sequence,
    tail_state,
)
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import Segments, split_into_segments
from slipstream.runtime.context_parallel import Share


def decays(terms: inputs.LinearInputs) -> bool:
    """Whether M is not 1."""
    return terms.transition != "none" or terms.decay != "none" or terms.gv is not None


class _StateExchange(backend.Exchange):
    """The exchange of states in both directions. It happens once, also where a back end fails after
    it and another takes over."""

    def __init__(self, terms: inputs.LinearInputs, share: Share, call: Call) -> None:
        self.terms, self.share, self.call = terms, share, call
        self.width, self.matrix = states_per_sequence(terms), terms.transition != "none"
        # what other ranks have sent, once this one has, too
        self.received: dict[int, Tensor] | None = None

    def segments(
        self,
        terms: inputs.LinearInputs,
        chosen: Segments | None,
        chunk: int,
        unit: int | None = None,
        can_pass: bool = True,
    ) -> Segments | None:
        if chosen is not None:
            return chosen
        begin, end = self.piece()
        unit = unit or chunk
        if can_pass and 2 * (end - begin) >= terms.q.shape[1]:
            return split_into_segments(terms, -(-terms.q.shape[1] // unit) * unit)
        self.by_calls()
        return None

    def piece(self) -> tuple[int, int]:
        """The tokens of the sequence that others are told of."""
        raise NotImplementedError

    @property
    def passes(self) -> bool:
        """Whether others are told of M: those that are first and last do without theirs."""
        return self.share.passes_through and decays(self.terms)

    def _shapes(self, with_transition: bool) -> list[tuple[int, ...]]:
        """The shapes of a message's tensors."""
        (HV, K, V), terms = self.terms.state_shape[1:], self.terms
        state, changed = (self.width, HV, K, V), (self.width, HV, K, K)
        if not self.matrix:
            rows, columns = K if terms.decay == "channel" else 1, 1 if terms.gv is None else V
            changed = self.width, HV, rows, columns
        return [state, changed] if with_transition else [state]

    def _exchange(
        self, E: Tensor | None, M: Tensor | None, to: list[int], ranks: list[int]
    ) -> None:
        """E, and M if there is one, to some ranks, and those of others, the first of which is the
        one that the sequence begins with."""
        tensors, dtype = [], self.terms.dtype
        for x, shape in zip((E, M), self._shapes(True)):
            if x is not None:
                tensors.append(x.to(dtype).expand(shape).flatten())
        message = torch.cat(tensors) if len(tensors) > 1 else tensors[0] if tensors else None
        if message is None:
            message = self.terms.v.new_empty(0, dtype=dtype)
        sizes = {
            r: sum(map(prod, self._shapes(decays(self.terms) and r != ranks[0]))) for r in ranks
        }
        self.received = self.share.send(message, to if tensors else [], sizes)

    def _combined(self, ranks: list[int], transpose: bool) -> Tensor:
        """A state after the tokens of these ranks, one after the other."""
        found, total = self.received, None
        assert found is not None
        for r in ranks:
            shapes = self._shapes(decays(self.terms) and r != ranks[0])
            added, *M = (
                x.view(shape) for x, shape in zip(found[r].split([*map(prod, shapes)]), shapes)
            )
            if total is None:
                total = added
            elif not M:
                total = total + added
            elif self.matrix:
                back = M[0].mT if transpose else M[0]
                each = (x.flatten(0, 1) for x in (added, back, total))
                total = torch.baddbmm(*each).view_as(added)
            else:
                total = torch.addcmul(added, M[0], total)
        assert total is not None
        return total


def _product(M: Tensor) -> Tensor:
    """The last of M [width, n, HV, K, K] times all before it, in as many products as n has bits."""
    while (n := M.shape[1]) > 1:
        pairs = M[:, 1::2] @ M[:, : n - 1 : 2]
        M = torch.cat([pairs, M[:, -1:]], 1) if n % 2 else pairs
    return M[:, 0]


class ForwardStates(_StateExchange):
    """Writes what the ranks before come to into the first rows of the initial states.

    transition: M of this rank's tokens, if others are told of it.
    """

    transition: Tensor | None = None

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
        self, sums: Tensor | None, segments: Segments, transition: Callable[[], Tensor | None]
    ) -> None:
        if self.received is not None:
            return
        M = self._of_tail(transition(), segments) if self.passes else None
        self._send(None if sums is None else sums[-self.width :], M)

    def by_calls(self) -> None:
        if self.received is not None:
            return
        share, call, terms = self.share, self.call, self.terms
        E = M = None
        if share.later:
            begins = share.begins_here(len(share.pieces) - 1)
            states = terms.initial_state
            start = states[-self.width :] if begins and states is not None else None
            E = context_terms.tail_state(terms, share, call, start)
            if self.passes:
                tail = context_terms.terms_of(terms, share.tail_begin, None)
                M = (
                    context_terms.transition_matrix(tail, self.width, call)
                    if self.matrix
                    else context_terms.transition_factors(tail)
                )
        self._send(E, M)

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
        return _product(rows) if self.matrix else rows.prod(1)

    def _send(self, E: Tensor | None, M: Tensor | None) -> None:
        """Both in one message."""
        share = self.share
        self.transition = M
        self._exchange(E, M, share.later, share.earlier)
        if share.earlier:
            assert self.terms.initial_state is not None
            self.terms.initial_state[: self.width].copy_(self._combined(share.earlier, False))


class BackwardStates(_StateExchange):
    """Writes what later ranks' outputs say about the tail's last state into dfinal's last rows."""

    def __init__(
        self,
        terms: inputs.LinearInputs,
        share: Share,
        call: Call,
        dfinal: Tensor | None,
        transition: Tensor | None,
        dout: Tensor,
    ) -> None:
        """transition: of ForwardStates."""
        super().__init__(terms, share, call)
        self.dfinal, self.transition, self.dout = dfinal, transition, dout

    def piece(self) -> tuple[int, int]:
        return (0, self.share.head_end) if self.share.earlier else (0, 0)

    @property
    def sends(self) -> bool:
        return bool(self.share.earlier)

    @property
    def receives(self) -> bool:
        return bool(self.share.later)

    def __call__(
        self, sums: Tensor | None, segments: Segments, transition: Callable[[], Tensor | None]
    ) -> None:
        if self.received is None:
            self._send(None if sums is None else sums[: self.width])

    def by_calls(self) -> None:
        if self.received is not None:
            return
        share, ds = self.share, None
        if share.earlier:
            dfinal = None
            if self.dfinal is not None and share.ends_here(0):
                dfinal = self.dfinal[: self.width]
            ds = head_gradient(self.terms, share, self.call, self.dout, dfinal)
        self._send(ds)

    def _send(self, ds: Tensor | None) -> None:
        share = self.share
        M = None if ds is None else self.transition
        self._exchange(ds, M, share.earlier, share.later[::-1])
        if share.later:
            assert self.dfinal is not None
            self.dfinal[-self.width :].copy_(self._combined(share.later[::-1], True))


class LocalSegments(backend.Exchange):
    """The segments of a plan, without other ranks."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    @property
    def segment_tokens(self) -> int:
        return self.tokens

    @property
    def sends(self) -> bool:
        return False

    @property
    def receives(self) -> bool:
        return False

    @property
    def local(self) -> backend.Exchange:
        return LocalSegments(self.tokens)

    def segments(
        self,
        terms: LinearInputs,
        chosen: Segments | None,
        chunk: int,
        unit: int | None = None,
        can_pass: bool = True,
    ) -> Segments | None:
        if self.tokens % chunk:
            raise ValueError(f"segment_tokens: want a multiple of {chunk}, got {self.tokens}")
        cut = split_into_segments(terms, self.tokens) if can_pass else None
        if cut is None:
            self.by_calls()
            return None
        return cut._replace(fixed=True)

    def __call__(
        self, sums: Tensor | None, segments: Segments, transition: Callable[[], Tensor | None]
    ) -> None:
        pass

    def by_calls(self) -> None:
        pass


class _InOrder(LocalSegments):
    """The exchange of states in both directions. It happens once, also where a back end fails after
    it and another takes over.

    before, after: the ranks of the sequence that comes from others, and of that which goes on,
    in the order in which they compute.
    """

    def __init__(
        self, terms: LinearInputs, share: Share, call: Call, before: list[int], after: list[int]
    ) -> None:
        assert share.segment_tokens is not None
        super().__init__(share.segment_tokens)
        self.terms, self.share, self.call = terms, share, call
        self.before, self.after = before, after
        self.width, self.round = states_per_sequence(terms), 0

    @property
    def sends(self) -> bool:
        return bool(self.after)

    @property
    def receives(self) -> bool:
        return bool(self.before) and not self.share.passes_through

    def begin(self) -> None:
        if self.share.passes_through:
            self._rounds(None, len(self.before))

    def __call__(
        self, sums: Tensor | None, segments: Segments, transition: Callable[[], Tensor | None]
    ) -> None:
        self._finish(sums)

    def by_calls(self) -> None:
        self.begin()
        last = self.share.crossings.longest
        self._finish(self.of_one_call() if self.after and self.round < last else None)

    def of_one_call(self) -> Tensor:
        """The state at this rank's end of the sequence that continues [width, HV, K, V]."""
        raise NotImplementedError

    def entry(self) -> Tensor:
        """Where the state goes that comes from others [width, HV, K, V]."""
        raise NotImplementedError

    def goes_on(self, sums: Tensor) -> Tensor:
        """The part of the sequences' states that is sent to other ranks."""
        raise NotImplementedError

    def _finish(self, sums: Tensor | None) -> None:
        sent = None if sums is None or not self.after else self.goes_on(sums)
        self._rounds(sent, self.share.crossings.longest)

    def _rounds(self, sent: Tensor | None, end: int) -> None:
        """Up to a round; what is sent is so in the first of them."""
        while self.round < end:
            sizes = {}
            if len(self.before) == self.round + 1:
                sizes = {self.before[-1]: self.entry().numel()}
            message = self.terms.v.new_empty(0, dtype=self.terms.dtype) if sent is None else sent
            to = [] if sent is None else self.after[:1]
            found = self.share.send(message.contiguous(), to, sizes)
            for x in (found[r] for r in sizes):
                self.entry().copy_(x.view_as(self.entry()))
            self.round, sent = self.round + 1, None


class ForwardInOrder(_InOrder):
    """Writes the state of the rank before into the first rows of the initial states."""

    transition: Tensor | None = None  # which backward does without

    def __init__(self, terms: LinearInputs, share: Share, call: Call) -> None:
        super().__init__(terms, share, call, share.earlier, share.later)

    def entry(self) -> Tensor:
        assert self.terms.initial_state is not None
        return self.terms.initial_state[: self.width]

    def goes_on(self, sums: Tensor) -> Tensor:
        return sums[-self.width :]

    def of_one_call(self) -> Tensor:
        states = self.terms.initial_state
        start = None if states is None else states[-self.width :]
        return tail_state(self.terms, self.share, self.call, start, LocalSegments(self.tokens))


class BackwardInOrder(_InOrder):
    """Writes the gradient of the state that the next rank begins with into dfinal's last rows."""

    def __init__(
        self, terms: LinearInputs, share: Share, call: Call, dfinal: Tensor | None, dout: Tensor
    ) -> None:
        super().__init__(terms, share, call, share.later[::-1], share.earlier[::-1])
        self.dfinal, self.dout = dfinal, dout

    def entry(self) -> Tensor:
        assert self.dfinal is not None
        return self.dfinal[-self.width :]

    def goes_on(self, sums: Tensor) -> Tensor:
        return sums[: self.width]

    def of_one_call(self) -> Tensor:
        dfinal = None if self.dfinal is None else self.dfinal[: self.width]
        given = self.terms, self.share, self.call, self.dout, dfinal
        return head_gradient(*given, LocalSegments(self.tokens))
