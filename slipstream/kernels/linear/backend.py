"""The results of the linear family's back ends beyond forward's, and states of other ranks."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.kernels.linear import inputs, prefix_states
from slipstream.kernels.linear.segments import Segments


class SavedWY(NamedTuple):
    """The tensors that a delta rule's forward saves for its backward: WYFactors of delta.py, and on
    sm_90 the states of its Checkpoints."""

    r: Tensor
    beta_gate: Tensor
    transition_lognorm: Tensor | None
    states: Tensor | None


class Exchange(Protocol):
    """The exchange of states with other ranks, after segments' own sums and before state passing:
    puts the other ranks' part into the initial state or, backward, into the final state's gradient
    (context.py)."""

    @property
    def sends(self) -> bool:
        """Whether other ranks are told of this rank's."""
        raise NotImplementedError

    @property
    def receives(self) -> bool:
        """Whether states here come from other ranks once these have been sent."""
        raise NotImplementedError

    @property
    def segment_tokens(self) -> int | None:
        """Tokens of every segment where bits must not depend on the number of ranks."""
        return None

    @property
    def local(self) -> "Exchange | None":
        """For what backward computes once more of forward: the same without other ranks."""
        return None

    def begin(self) -> None:
        """Before state passing: waits for states without which nothing can be sent."""

    def __call__(
        self, sums: Tensor | None, segments: Segments, transition: Callable[[], Tensor | None]
    ) -> None:
        """
        Args:
            sums: the states after sequences [N, HV, K, V], backward the gradients of those before
                them, as far as this rank's tokens say; None if it sends nothing.
            transition: M of each segment: [count, HV, K, K], or factors
                [count, HV, K or 1, V or 1], None for 1.
        """

    def segments(
        self,
        terms: inputs.LinearInputs,
        chosen: Segments | None,
        chunk: int,
        unit: int | None = None,
        can_pass: bool = True,
    ) -> Segments | None:
        """The segments of a call: `chosen` by its kernels, or, for a call that is not cut, one for
        each sequence where that takes less time than another call for the sequence that goes on;
        otherwise that call is made here.

        chunk: tokens of a chunk. unit: a segment's length is a multiple of it, None: of chunk.
        can_pass: whether kernels can pass states.
        """

    def by_calls(self) -> None:
        """The same by one more call of the sequence that goes on."""


def pass_states(
    run: Callable[[Tensor, Tensor | None], None],
    states: Tensor,
    s_out: Tensor | None,
    terms: inputs.LinearInputs,
    segments: Segments,
    transition: Callable[[], Tensor | None],
    exchange: Exchange | None,
    reads_others: bool = False,
) -> None:
    """run(states, s_out), state passing, before or after the exchange: once on a rank that only
    sends or only receives, else once for what is sent and once more. It reads what segments add
    in `states`, where it writes, or reads_others."""
    if exchange is not None:
        exchange.begin()
    if exchange is None or not exchange.sends:
        if exchange is not None:
            exchange(None, segments, transition)
        run(states, s_out)
        return
    if not exchange.receives:
        sums = states.new_empty(terms.state_shape) if s_out is None else s_out
        run(states, sums)
        exchange(sums, segments, transition)
        return
    sums = states.new_empty(terms.state_shape)
    run(states if reads_others else states.clone(), sums)
    exchange(sums, segments, transition)
    run(states, s_out)


class Extras(NamedTuple):
    """Wishes of callers that go past the operators.

    Attributes:
        save: the back end leaves what backward takes as `saved`, if it can.
        exchange: of a call whose sequences go on at other ranks.
        prefix: states that kernels leave on the way, or NoKernel is raised.
    """

    save: bool = False
    exchange: Exchange | None = None
    prefix: prefix_states.PrefixStates | None = None
