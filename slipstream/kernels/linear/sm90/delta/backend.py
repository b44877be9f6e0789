"""The delta rule and free a and b on sm_90: all but a few small kernels are here.

Portable are the gradients of the scores, where gates are per channel or a and b free; and those of
q, k, a and b without a gate per channel.

The portable walk that keeps states fits a multiprocessor twice without gates, this one once: that
one is taken where there are more programs than multiprocessors.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isqrt
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90.delta import bwd_fused_launch
from slipstream.kernels.linear.sm90.delta import launch as sm90
from slipstream.kernels.linear.sm90.delta.bwd_schedule import (
    BackwardSchedule,
    choose_schedule,
    empty_checkpoints,
)
from slipstream.kernels.linear.sm90.dplr import backend
from slipstream.kernels.linear.sm90.plan import CHUNK, TILE_V, per_channel
from slipstream.kernels.linear.triton.delta import backend as portable
from slipstream.kernels.linear.triton.delta.plan import (
    is_oversubscribed,
    num_segments_and_sequences,
)
from slipstream.kernels.linear.triton.dplr import backend as dplr_portable
from slipstream.kernels.linear.triton.scalar_decay.launch import Segments, split_into_segments

CAPABILITIES = BackendCapabilities(
    writes_out=True, checkpoints=True, skips_empty=True, overwrites_q=True, saves_wy=True
)
NUM_SMS = 132  # multiprocessors: a walk's program takes one
MIN_SEGMENT_CHUNKS = 8  # chunks of a segment
MIN_CHUNKS_SAVED = 18  # chunks that a split has to take off a walk: about 30 us
# Value heads whose gradients of q and k are added up at once, at most: each sum is rounded.
HEADS_PER_SEMAPHORE = 4


def forward(
    terms: LinearInputs,
    scale: float,
    out: tuple[Tensor, Tensor] | None = None,
    marks: Tensor | None = None,
    active: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As the portable one.

    Args:
        active: how many packed sequences have tokens, about; the others' states stay where they
            are. None: all.
    """
    if per_channel(terms):
        return dplr_portable.forward(align_for_tma(terms), scale, backend, out, marks)
    return portable.forward(align_for_tma(terms), scale, _backend(active), out, marks)


def forward_saving(
    terms: LinearInputs,
    scale: float,
    out: tuple[Tensor, Tensor] | None = None,
    marks: Tensor | None = None,
    active: int | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Those, and what backward takes as `kept`: empty where it would take nothing."""
    if per_channel(terms):
        return *forward(terms, scale, out, marks), []
    own, left = _backend(active), []
    if marks is None and (cut := _choose_segments(terms, active)):
        left = [empty_checkpoints(terms, cut)]
        own = own._replace(walk=partial(_chunk_fwd, parts=(cut.every, left[0])))
    o, final, solved = portable.forward_with_wy(align_for_tma(terms), scale, own, out, marks)
    return o, final, [x for x in (*solved, *left) if x is not None]


def backward(
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    kept: Sequence[Tensor] = (),
    out: Mapping[str, Tensor] = MappingProxyType({}),
    active: int | None = None,
    spends_q: bool = False,
) -> dict[str, Tensor]:
    """As the portable one; active as forward has it.

    Args:
        spends_q: the gradient of q may take q's memory, where heads are not grouped.
    """
    dout = None if dout is None else align16(dout)
    if per_channel(terms):
        return dplr_portable.backward(align_for_tma(terms), dout, dfinal, scale, backend, out)
    own, terms, count = _backend(active), align_for_tma(terms), 2 if terms.g is None else 3
    solved = portable.WYFactors(*kept[:count]) if kept else None
    if cut := _choose_segments(terms, active):
        own = own._replace(back=partial(_bwd_fused, cut=cut, left=kept[count:]))
    if spends_q and terms.q.shape[2] == terms.v.shape[2]:
        out = {**out, "q": terms.q}
    return portable.backward(terms, dout, dfinal, scale, own, solved, out)


def align_for_tma(terms: LinearInputs) -> LinearInputs:
    """With all as TMA reads them."""
    names = ("q", "k", "v", "a", "b", "g")
    given = {name: x for name in names if (x := getattr(terms, name)) is not None}
    return terms._replace(**{name: align16(x) for name, x in given.items()})


def align16(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x


def _chunk_fwd(
    terms: LinearInputs,
    solved: portable.WYFactors,
    scale: float,
    o: Tensor,
    *,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    split: Segments | None = None,
    active: int | None = None,
    parts: tuple[int, Tensor] | None = None,
) -> None:
    ends: dict[str, Any] = {"states": states, "s_in": s_in, "s_out": s_out}
    skip = active is not None and split is None
    slots = num_segments_and_sequences(terms, split) if active is None else active
    if states is not None and terms.g is None and is_oversubscribed(terms, slots):
        portable.launch_chunk_fwd(terms, solved, scale, o, **ends, split=split)
    elif split is None and _use_2tile(terms, active):
        sm90.chunk_fwd_2tile(terms, solved.r, solved.rows, scale, o, **ends, skip=skip, parts=parts)
    else:
        more = {"segment": _segment(split), "skip": skip, "parts": parts}
        sm90.chunk_fwd(terms, solved.r, solved.rows, scale, o, **ends, **more)


def _use_2tile(terms: LinearInputs, active: int | None = None) -> bool:
    """Whether a program takes two tiles of V: with one each they would not run all at once."""
    HV, V = terms.v.shape[2:]
    programs = V // TILE_V * HV * (terms.sequences if active is None else active)
    return V % (2 * TILE_V) == 0 and programs > NUM_SMS


def _chunk_dstate(
    terms: LinearInputs,
    do: Tensor,
    solved: portable.WYFactors,
    scale: float,
    dv: Tensor,
    dstates: Tensor,
    s_in: Tensor | None,
    s_out: Tensor | None,
    split: Segments | None,
    active: int | None = None,
) -> None:
    ends = {"s_in": s_in, "s_out": s_out, "segment": _segment(split)}
    skip = active is not None and split is None
    sm90.chunk_dstate(terms, do, solved.r, solved.rows, scale, dv, dstates, **ends, skip=skip)


def _bwd_fused(
    terms: LinearInputs,
    do: Tensor,
    dfinal: Tensor | None,
    solved: portable.WYFactors,
    scale: float,
    dstate: Tensor | None,
    out: Mapping[str, Tensor],
    cut: BackwardSchedule,
    left: Sequence[Tensor],
) -> dict[str, Tensor]:
    def forward(o: Tensor, marks: Tensor) -> None:
        own = _BACKEND._replace(walk=partial(_chunk_fwd, parts=(cut.every, marks)))
        portable.run_chunks(terms, solved, scale, o, None, own)

    return bwd_fused_launch.backward(
        terms, do, dfinal, solved, scale, dstate, out,
        cut=cut, together=_heads_per_semaphore(terms), forward=forward, left=left,
    )  # fmt: skip


def _choose_segments(terms: LinearInputs, active: int | None) -> BackwardSchedule | None:
    """What a whole call goes back through at a time, where it goes back in one walk."""
    return choose_schedule(terms) if active is None else None


def _heads_per_semaphore(terms: LinearInputs) -> int:
    """A divisor of how many share q and k."""
    share = terms.v.shape[2] // terms.q.shape[2]
    return max(n for n in range(1, HEADS_PER_SEMAPHORE + 1) if share % n == 0)


def _segment(split: Segments | None) -> tuple[int, int] | None:
    return None if split is None else (split.tokens, split.slots)


def _segments(terms: LinearInputs) -> Segments | None:
    """By shapes alone: as many segments as find a multiprocessor for each of their programs.

    Where states do not decay their ends take two walks' time at most, for two segments one.
    """
    T, HV, V = terms.v.shape[1:]
    programs = V // TILE_V * HV * terms.sequences
    packed = terms.cu_seqlens is not None
    chunks = T // CHUNK // (terms.sequences if packed else 1)  # packed ones have so many on average
    wanted = min(NUM_SMS // programs, isqrt(2 * chunks), chunks // MIN_SEGMENT_CHUNKS)
    if wanted < 2 or chunks - chunks // wanted < MIN_CHUNKS_SAVED:
        return None
    return split_into_segments(terms, -(-chunks // wanted) * CHUNK)


def _state_passing(
    terms: LinearInputs, solved: portable.WYFactors, split: Segments
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    segment = (split.tokens, split.slots)
    made = sm90.segment_transition(terms, solved, terms.initial_state, segment)
    return sm90.state_passing(terms, made[0], *made, terms.initial_state, segment), made


def _state_passing_bwd(
    terms: LinearInputs,
    do: Tensor,
    solved: portable.WYFactors,
    scale: float,
    dfinal: Tensor | None,
    made: tuple[Tensor, Tensor],
    split: Segments,
) -> Tensor:
    segment = (split.tokens, split.slots)
    ends = sm90.segment_transition_bwd(terms, do, solved, scale, dfinal, segment)
    return sm90.state_passing(terms, ends, *made, dfinal, segment, back=True)


def _backend(active: int | None) -> portable.DeltaBackend:
    if active is None:
        return _BACKEND
    walks = {"walk": _chunk_fwd, "walk_back": _chunk_dstate}
    return _BACKEND._replace(**{name: partial(x, active=active) for name, x in walks.items()})


_BACKEND = portable.DeltaBackend(
    sm90.solve_tril,
    _chunk_fwd,
    _chunk_dstate,
    sm90.chunk_dqkg,
    _heads_per_semaphore,
    _segments,
    _state_passing,
    _state_passing_bwd,
)
