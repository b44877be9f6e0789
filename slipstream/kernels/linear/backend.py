"""Abilities of the modules that launch the linear family's kernels, beyond forward and backward.

Each has a constant CAPABILITIES, which op.py reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import Segments


@dataclass(frozen=True)
class BackendCapabilities:
    """
    Attributes:
        fp32_out: forward takes `dtype`, that of o.
        skips_gate_grad: backward takes `gate_gradient`; False leaves the gate's gradient out.
        saves_wy: forward takes `save`, and then also returns the tensors of a SavedWY, which
            backward takes as `saved`.
        exchanges: both take `exchange`, of sequences that go on at other ranks.
    """

    fp32_out: bool = False
    skips_gate_grad: bool = False
    saves_wy: bool = False
    exchanges: bool = False


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
        self,
        sums: Tensor | None,
        segments: Segments,
        transition: Callable[[], Tensor | None],
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
        terms: LinearInputs,
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
    terms: LinearInputs,
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


def unscaled(dfinal: Tensor | None, scale: float, exchange: Exchange | None) -> Tensor | None:
    """dfinal for kernels whose gradients of states lack the scale. State passing multiplies and
    divides by it, with fixed segments once for each sequence, and not where a rank ends. So dfinal
    is divided before, in place, and what leaves the rank is multiplied after (scaled)."""
    if dfinal is None or exchange is None or exchange.segment_tokens is None:
        return dfinal
    return dfinal.mul_(1 / scale)


def scaled(dstate: Tensor, scale: float, exchange: Exchange | None) -> Tensor:
    """The gradient of the state as it leaves the rank, see unscaled."""
    if exchange is None or exchange.segment_tokens is None:
        return dstate
    return dstate.mul_(scale)
