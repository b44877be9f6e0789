"""Launches of the walks of per-channel decay, and of free a and b, whole or in segments.

Few heads of long sequences are walked in segments (common/state_passing.py). Forward: where each
ends and what it makes of a state, E and M, then the state that each meets, then all at once.
Backward the same with M^T, for the gradients of states. Memory beyond results: two states a segment
and head.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton.common.state_passing_launch import state_passing
from slipstream.kernels.linear.triton.delta.plan import (
    num_segments_and_sequences,
    segments_for_programs,
)
from slipstream.kernels.linear.triton.delta.tiles import KernelTile
from slipstream.kernels.linear.triton.dplr.chunk import (
    dplr_chunk_dstate_kernel,
    dplr_chunk_fwd_kernel,
)
from slipstream.kernels.linear.triton.dplr.tiles import DplrTile, choose
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.launch import Segments, family_of
from slipstream.runtime.backends import fp32_dot_precision
from slipstream.runtime.launch_cache import cached


class IntraChunk(NamedTuple):
    """By the names of wy.py."""

    q: Tensor
    w: Tensor
    b: Tensor
    k: Tensor | None
    u: Tensor
    total: Tensor | None
    qb: Tensor
    qk: Tensor | None
    ak: Tensor | None
    r: Tensor | None
    strong: Tensor | None


class EntryStates(NamedTuple):
    """What both walks of backward begin with, and where the gradient of the initial state goes."""

    split: Segments | None
    state: Tensor | None
    dstate: Tensor | None
    dstate_out: Tensor | None


@cache
def _tile(
    device: torch.device, K: int, V: int, bytes_each: int, free: bool
) -> tuple[DplrTile, int]:
    return choose("interpreter" if INTERPRETED else family_of(device), K, V, bytes_each, free)


def tile_of(terms: LinearInputs) -> tuple[DplrTile, int]:
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return _tile(terms.q.device, K, V, terms.q.element_size(), terms.transition == "dplr")


def launch_options(terms: LinearInputs, part: KernelTile, walk: bool = False) -> dict[str, Any]:
    # three products for one over 256 channels at once leave the compiler not a register
    simple = walk and terms.q.shape[-1] > 128
    return {
        "C": tile_of(terms)[0].C,
        "PACKED": terms.cu_seqlens is not None,
        "PRECISION": "ieee" if simple else fp32_dot_precision(),
        "num_warps": part.warps,
        "num_stages": part.stages,
    }


def choose_segments(terms: LinearInputs, own: Any = None) -> Segments | None:
    """Decided by shapes and device. A program counts as one for 64 columns of V."""
    if own is not None:
        return own.choose_segments(terms)
    HV, V = terms.v.shape[2:]
    return segments_for_programs(terms, -(-V // 64) * HV * terms.sequences, tile_of(terms)[0].C)


def run_segment_ends(
    terms: LinearInputs, prepared: IntraChunk, o: Tensor, final: Tensor, own: Any = None
) -> None:
    """o and the final state are written."""
    split, state = choose_segments(terms, own), terms.initial_state
    if split is None:
        chunk_fwd(terms, prepared, own, o=o, s_in=state, s_out=final)
        return
    met, M = _segment_transition(terms, prepared, split, own)
    state_passing(terms, split, met, M, state, final)
    chunk_fwd(terms, prepared, own, o=o, s_in=met, split=split)


def entry_states(
    terms: LinearInputs,
    do: Tensor,
    prepared: IntraChunk,
    dfinal: Tensor | None,
    dstate: Tensor | None,
    own: Any = None,
) -> EntryStates:
    """dstate, where the gradient of the initial state goes, is written if there are segments."""
    split, state = choose_segments(terms, own), terms.initial_state
    if split is None:
        return EntryStates(None, state, dfinal, dstate)
    met, M = _segment_transition(terms, prepared, split, own)
    state_passing(terms, split, met, M, state, None)
    back = torch.empty_like(met)
    chunk_dstate(terms, do, prepared, own, s_out=back, split=split)
    state_passing(terms, split, back, M, dfinal, dstate, reverse=True)
    return EntryStates(split, met, back, None)


def _segment_transition(
    terms: LinearInputs, prepared: IntraChunk, split: Segments, own: Any = None
) -> tuple[Tensor, Tensor]:
    """What segments add to the state [slots, HV, K, V], and their factors [slots, HV, K, K]."""
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    E = prepared.u.new_empty(split.slots, HV, K, V)
    M = prepared.u.new_empty(split.slots, HV, K, K)
    chunk_fwd(terms, prepared, own, s_out=E, m=M, split=split)
    return E, M


def chunk_fwd(
    terms: LinearInputs,
    prepared: IntraChunk,
    own: Any = None,
    *,
    o: Tensor | None = None,
    x: Tensor | None = None,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    m: Tensor | None = None,
    split: Segments | None = None,
) -> None:
    """o; or x and states; or m."""
    ends = {"s_in": s_in, "s_out": s_out, "m": m, "split": split}
    if own is not None:
        own.chunk_fwd(terms, prepared, o=o, x=x, states=states, **ends)
        return
    HV, V = terms.v.shape[2:]
    tile, WIDE = tile_of(terms)
    make = "ends" if m is not None else "o" if states is None else "states"
    part = tile.walk if make == "o" else tile.keep
    tiles = -(-V // part.B) + (-(-terms.q.shape[-1] // part.B) if make == "ends" else 0)
    launch: Any = cached(dplr_chunk_fwd_kernel)[
        (tiles * HV * num_segments_and_sequences(terms, split),)
    ]
    launch(
        None if prepared.k is None else terms.v,
        prepared.q if make == "o" else None,
        prepared.w,
        prepared.b,
        prepared.k,
        prepared.u,
        x,
        prepared.total,
        prepared.qb if make == "o" else None,
        prepared.qk if make == "o" else None,
        o,
        states,
        s_in,
        s_out,
        m,
        *_scalar_args(terms, split),
        K=terms.q.shape[-1],
        V=V,
        WIDE=WIDE,
        BV=part.B,
        MAKE=make,
        DELTA=terms.beta is not None,
        HAS_GATE=terms.g is not None,
        HAS_S_IN=s_in is not None,
        HAS_S_OUT=s_out is not None,
        SPLIT=split is not None,
        **launch_options(terms, part, walk=make == "o"),
    )


def chunk_dstate(
    terms: LinearInputs,
    do: Tensor,
    prepared: IntraChunk,
    own: Any = None,
    *,
    y: Tensor | None = None,
    dstates: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    split: Segments | None = None,
) -> None:
    """y and dstates, or s_out alone."""
    if own is not None:
        own.chunk_dstate(terms, do, prepared, y, dstates, s_in=s_in, s_out=s_out, split=split)
        return
    HV, V = terms.v.shape[2:]
    tile, WIDE = tile_of(terms)
    part = tile.back
    launch: Any = cached(dplr_chunk_dstate_kernel)[
        (-(-V // part.B) * HV * num_segments_and_sequences(terms, split),)
    ]
    launch(
        do,
        prepared.q,
        prepared.w,
        prepared.b,
        prepared.total,
        prepared.qb,
        None if y is None else prepared.r,
        y,
        dstates,
        s_in,
        s_out,
        *_scalar_args(terms, split),
        K=terms.q.shape[-1],
        V=V,
        WIDE=WIDE,
        BV=part.B,
        MAKE="ends" if y is None else "states",
        HAS_GATE=terms.g is not None,
        HAS_S_IN=s_in is not None,
        HAS_S_OUT=s_out is not None,
        SPLIT=split is not None,
        **launch_options(terms, part, walk=True),
    )


def _scalar_args(terms: LinearInputs, split: Segments | None) -> tuple[Any, ...]:
    """cu to segment."""
    T, HV = terms.v.shape[1:3]
    segment = T if split is None else split.tokens
    return terms.cu_seqlens, T, terms.sequences, HV, segment
