"""The delta rule's stages on sm_90 (kernels/linear/delta.py has their order).

Triton's chunk_fwd that writes states fits a multiprocessor twice without gates, this one's once:
Triton's is taken where there are more programs than multiprocessors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities
from slipstream.kernels.linear.delta import DeltaBackend, EntryStates, WYFactors
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import (
    NUM_SMS,
    TILE_V,
    Segments,
    delta_sm90,
    num_sequences,
)
from slipstream.kernels.linear.sm90.delta import bwd_fused_launch, launch
from slipstream.kernels.linear.sm90.delta.bwd_schedule import (
    BackwardSchedule,
    choose_schedule,
    empty_checkpoints,
)
from slipstream.kernels.linear.sm90.delta.launch import Checkpoints
from slipstream.kernels.linear.triton.delta import backend as triton
from slipstream.kernels.linear.triton.delta.plan import is_oversubscribed
from slipstream.kernels.linear.workspace import NO_OUTPUTS

CAPABILITIES = BackendCapabilities(
    writes_out=True, checkpoints=True, skips_empty=True, overwrites_q=True, saves_wy=True
)
# Value heads whose gradients of q and k are added up at once, at most: each sum is rounded.
HEADS_PER_SEMAPHORE = 4


def forward(
    terms: LinearInputs,
    scale: float,
    out: tuple[Tensor, Tensor] | None = None,
    checkpoints: Tensor | None = None,
    active: int | None = None,
) -> tuple[Tensor, Tensor]:
    """o and the final state, as DeltaBackend.forward.

    Args:
        active: how many packed sequences have tokens, about; the others' states stay where they
            are. None: all.
    """
    return Sm90Delta(active).forward(align_for_tma(terms), scale, out, checkpoints)[:2]


def forward_saving(
    terms: LinearInputs,
    scale: float,
    out: tuple[Tensor, Tensor] | None = None,
    checkpoints: Tensor | None = None,
    active: int | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Those, and what backward takes as `saved`."""
    backend, saved = Sm90Delta(active), []
    if checkpoints is None and (schedule := _schedule(terms, active)):
        saved = [empty_checkpoints(terms, schedule)]
        backend = replace(backend, checkpoints=Checkpoints(schedule.every, saved[0]))
    o, final, wy = backend.forward(align_for_tma(terms), scale, out, checkpoints)
    return o, final, [x for x in (*wy, *saved) if x is not None]


def backward(
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    saved: Sequence[Tensor] = (),
    out: Mapping[str, Tensor] = NO_OUTPUTS,
    active: int | None = None,
    overwrite_q: bool = False,
) -> dict[str, Tensor]:
    """Gradients by the name of the term, as DeltaBackend.backward; active as forward has it.

    Args:
        saved: of forward_saving.
        overwrite_q: the gradient of q may take q's memory, where heads are not grouped.
    """
    dout, terms = None if dout is None else align16(dout), align_for_tma(terms)
    num_factors = 2 if terms.g is None else 3
    wy = WYFactors(*saved[:num_factors]) if saved else None
    backend = Sm90Delta(active, _schedule(terms, active), saved=tuple(saved[num_factors:]))
    if overwrite_q and terms.q.shape[2] == terms.v.shape[2]:
        out = {**out, "q": terms.q}
    return backend.backward(terms, dout, dfinal, scale, wy, out)


def align_for_tma(terms: LinearInputs) -> LinearInputs:
    """With all as TMA reads them."""
    names = ("q", "k", "v", "a", "b", "g")
    given = {name: x for name in names if (x := getattr(terms, name)) is not None}
    return terms._replace(**{name: align16(x) for name, x in given.items()})


def align16(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x


@dataclass(frozen=True)
class Sm90Delta(DeltaBackend):
    """
    Attributes:
        active: of forward.
        schedule: what backward goes through at a time, where one kernel is all of it.
        checkpoints: where chunk_fwd leaves the states that backward begins with.
        saved: those, where forward left them.
    """

    active: int | None = None
    schedule: BackwardSchedule | None = None
    checkpoints: Checkpoints | None = None
    saved: tuple[Tensor, ...] = ()

    reuses_w = True

    def num_chunks(self, terms: LinearInputs) -> int:
        return triton.TritonDelta().num_chunks(terms)

    def choose_segments(self, terms: LinearInputs) -> Segments | None:
        return delta_sm90(terms)

    def heads_per_sum(self, terms: LinearInputs) -> int:
        """A divisor of how many share q and k."""
        share = terms.v.shape[2] // terms.q.shape[2]
        return max(n for n in range(1, HEADS_PER_SEMAPHORE + 1) if share % n == 0)

    def solve_tril(self, terms: LinearInputs) -> WYFactors:
        return launch.solve_tril(terms, triton.empty_factors(terms))

    def chunk_fwd(
        self,
        terms: LinearInputs,
        wy: WYFactors,
        scale: float,
        out: Tensor,
        *,
        states: Tensor | None = None,
        s_in: Tensor | None = None,
        s_out: Tensor | None = None,
        segments: Segments | None = None,
    ) -> None:
        ends: dict[str, Any] = {"states": states, "s_in": s_in, "s_out": s_out}
        sequences = num_sequences(terms, segments) if self.active is None else self.active
        if states is not None and terms.g is None and is_oversubscribed(terms, sequences):
            triton.TritonDelta().chunk_fwd(terms, wy, scale, out, **ends, segments=segments)
            return
        ends |= {"skip_empty": self.active is not None and segments is None}
        ends |= {"checkpoints": self.checkpoints}
        if segments is None and self._use_2tile(terms):
            launch.chunk_fwd_2tile(terms, wy, scale, out, **ends)
        else:
            launch.chunk_fwd(terms, wy, scale, out, **ends, segments=segments)

    def _use_2tile(self, terms: LinearInputs) -> bool:
        """Whether a program takes two tiles of V: with one each they would not all run at once."""
        HV, V = terms.v.shape[2:]
        sequences = terms.sequences if self.active is None else self.active
        return V % (2 * TILE_V) == 0 and V // TILE_V * HV * sequences > NUM_SMS

    def chunk_dstate(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: WYFactors,
        scale: float,
        dv: Tensor,
        dstates: Tensor,
        *,
        s_in: Tensor | None,
        s_out: Tensor | None,
        segments: Segments | None,
    ) -> None:
        skip = self.active is not None and segments is None
        ends: dict[str, Any] = {"s_in": s_in, "s_out": s_out, "segments": segments}
        launch.chunk_dstate(terms, do, wy, scale, dv, dstates, **ends, skip_empty=skip)

    def chunk_dqkg(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: WYFactors,
        w: Tensor,
        dv: Tensor,
        states: Tensor,
        dstates: Tensor,
        scale: float,
        grads: dict[str, Tensor],
    ) -> None:
        launch.chunk_dqkg(terms, do, wy, w, dv, states, dstates, scale, grads)

    def entry_states(
        self, terms: LinearInputs, wy: WYFactors, segments: Segments, final: Tensor | None
    ) -> EntryStates:
        state = terms.initial_state
        transition = launch.segment_transition(terms, wy, state, segments)
        E = transition[0]
        return EntryStates(
            launch.state_passing(terms, E, *transition, state, segments), transition, final
        )

    def entry_dstates(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: WYFactors,
        scale: float,
        dfinal: Tensor | None,
        transition: tuple[Tensor, Tensor],
        segments: Segments,
        dstate: Tensor | None,
    ) -> EntryStates:
        dE = launch.segment_transition_bwd(terms, do, wy, scale, dfinal, segments)
        states = launch.state_passing(terms, dE, *transition, dfinal, segments, reverse=True)
        return EntryStates(states, transition, dstate)

    def gradients(
        self,
        terms: LinearInputs,
        do: Tensor,
        dfinal: Tensor | None,
        wy: WYFactors,
        scale: float,
        dstate: Tensor | None,
        out: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        if self.schedule is None:
            return super().gradients(terms, do, dfinal, wy, scale, dstate, out)
        grads = bwd_fused_launch.empty_grads(terms, do, out, self.heads_per_sum(terms))
        if self.saved:
            checkpoints = self.saved[0]
        else:
            checkpoints = empty_checkpoints(terms, self.schedule)
            forward = Sm90Delta(checkpoints=Checkpoints(self.schedule.every, checkpoints))
            forward.run_chunks(terms, wy, scale, grads["v"], None)
        return bwd_fused_launch.backward(
            terms, do, dfinal, wy, scale, dstate, out, self.schedule, grads, checkpoints
        )


def _schedule(terms: LinearInputs, active: int | None) -> BackwardSchedule | None:
    """Slices of packed sequences, which are active in part, go back in two kernels."""
    return choose_schedule(terms) if active is None else None
