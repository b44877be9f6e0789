"""Exchanges of states with equal bits for any number of ranks.

Sequences are cut into segments of the plan's `segment_tokens`, counted from each sequence's first
token, on whichever rank that is. Kernels compute for all segments at once what each does to a
state. State passing then goes from segment to segment in the order of tokens: a rank begins with
exactly the state that the rank before ends with. So the order of the arithmetic does not depend on
where ranks begin. Backward is the same from the last segment to the first.

A state goes from rank to rank in rounds, one after the other, in which all ranks take part; what
segments do to states is there by then. Where kernels do not cut, and in plain torch, a rank
computes its tokens once it has the state before them, plain torch by segments (eager/segments.py).
"""

from collections.abc import Callable

from torch import Tensor

from slipstream.kernels.linear.backend import Exchange
from slipstream.kernels.linear.context_terms import (
    Call,
    head_gradient,
    states_per_sequence,
    tail_state,
)
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import Segments, split_into_segments
from slipstream.runtime.context_share import Share


class LocalSegments(Exchange):
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
    def local(self) -> Exchange:
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
