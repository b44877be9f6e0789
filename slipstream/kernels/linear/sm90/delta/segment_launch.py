"""Launches on sm_90 of what segments of the delta rule need besides its stages: what each makes of
the state, and the state that each begins with. Nothing depends on device values.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, delta, inputs
from slipstream.kernels.linear.segments import CHUNK, TILE_V, Segments, delta_grid, sequence_args
from slipstream.kernels.linear.sm90.common.tma import token_tiles
from slipstream.kernels.linear.sm90.delta.chunk_dstate import delta_chunk_dstate_sm90_kernel
from slipstream.kernels.linear.sm90.delta.segment_transition import (
    delta_segment_transition_sm90_kernel,
)
from slipstream.kernels.linear.sm90.delta.state_passing import delta_state_passing_sm90_kernel
from slipstream.runtime.launch_cache import cached

BASE = 16  # rows of the blocks that the inverse begins with
STAGES = 3
_OPTIONS: dict[str, Any] = {
    "BV": TILE_V,
    "C": CHUNK,
    "ST": STAGES,
    "BLOCKS": CHUNK // BASE,
    "num_warps": 4,
    "maxnreg": 168,  # of 12 warps
}


def segment_transition(
    terms: inputs.LinearInputs,
    wy: delta.WYFactors,
    s_in: Tensor | None,
    segments: Segments,
    alone: bool = False,
    every: bool = False,
) -> tuple[Tensor, Tensor]:
    """E and M of segments [count, HV, K, V + K], or M alone [count, HV, K, K], and where M counts
    as zero [count, HV]; with every, of a sequence's first and last segment too."""
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    wide = K if alone else V + K
    transition = wy.beta_gate.new_empty(segments.count, HV, K, wide)
    m_is_zero = transition.new_empty(segments.count, HV, dtype=torch.int32)
    launch: Any = cached(delta_segment_transition_sm90_kernel)[
        (wide // TILE_V * HV * segments.count,)
    ]
    launch(
        lognorm_ptr=wy.transition_lognorm,
        transition_ptr=transition,
        m_is_zero_ptr=m_is_zero,
        **_transition_args(terms, wy, segments, s_in, None) | {"V": wide - K, "EVERY": every},
    )
    return transition, m_is_zero


def states_before(
    terms: inputs.LinearInputs, wy: delta.WYFactors, segments: Segments, s_out: Tensor | None
) -> Tensor:
    """The state before each segment [count, HV, K, V], of one scan; s_out gets the last ones."""
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    states = wy.beta_gate.new_empty(segments.count, HV, K, V)
    launch: Any = cached(delta_segment_transition_sm90_kernel)[delta_grid(terms, None)]
    launch(
        lognorm_ptr=None,
        transition_ptr=None,
        m_is_zero_ptr=None,
        states_ptr=states,
        **_transition_args(terms, wy, segments, terms.initial_state, s_out),
    )
    return states


def _transition_args(
    terms: inputs.LinearInputs,
    wy: delta.WYFactors,
    segments: Segments,
    s_in: Tensor | None,
    s_out: Tensor | None,
) -> dict[str, Any]:
    args = delta.delta_args(terms, segments, s_in, s_out) | _OPTIONS
    del args["SPLIT"]
    return args | {
        "k_desc": token_tiles(terms.k, terms.k.shape[-1]),
        "v_desc": token_tiles(terms.v, TILE_V),
        "r_desc": token_tiles(wy.r, CHUNK),
        "beta_gates_ptr": wy.beta_gate,
    }


def segment_transition_bwd(
    terms: inputs.LinearInputs,
    do: Tensor,
    wy: delta.WYFactors,
    scale: float,
    s_in: Tensor | None,
    segments: Segments,
    every: bool = False,
) -> Tensor:
    """dE of segments [count, HV, K, V]; with every, of a sequence's first segment too."""
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    dE = wy.beta_gate.new_empty(segments.count, HV, K, V)
    launch: Any = cached(delta_chunk_dstate_sm90_kernel)[delta_grid(terms, segments)]
    launch(
        q_desc=token_tiles(terms.q, K),
        k_desc=token_tiles(terms.k, K),
        do_desc=token_tiles(do, TILE_V),
        r_desc=token_tiles(wy.r, CHUNK),
        beta_gates_ptr=wy.beta_gate,
        dv_desc=None,
        states_desc=None,
        dv_ptr=None,
        lognorm_ptr=wy.transition_lognorm,
        scale=scale,
        EVERY=every,
        **delta.delta_args(terms, segments, s_in, dE),
        **_OPTIONS,
    )
    return dE


def entry_dstates(
    terms: inputs.LinearInputs,
    do: Tensor,
    wy: delta.WYFactors,
    scale: float,
    dfinal: Tensor | None,
    segments: Segments,
    exchange: backend.Exchange,
) -> Tensor:
    """The gradient of the state after each segment [count, HV, K, V], once the exchange has said
    what dfinal has from other ranks."""
    M, m_is_zero = segment_transition(terms, wy, None, segments, alone=True, every=True)
    dE = segment_transition_bwd(terms, do, wy, scale, None, segments, every=True)
    return state_passing(terms, dE, M, m_is_zero, dfinal, segments, exchange, reverse=True)


def state_passing(
    terms: inputs.LinearInputs,
    E: Tensor,
    M: Tensor,
    m_is_zero: Tensor,
    s_in: Tensor | None,
    segments: Segments,
    exchange: backend.Exchange | None = None,
    reverse: bool = False,
    s_out: Tensor | None = None,
) -> Tensor:
    """The state before each segment [count, HV, K, V]; reverse: the gradient of that after it.

    Args:
        E, M: [count, HV, K, V] and [count, HV, K, K]; there may be others beside their rows.
        s_in, s_out: before and after all, or the other way round; s_out is written.
        exchange: says what other ranks have of s_in. E and M are then of every segment.
    """
    HV, V = terms.v.shape[2:]
    K = terms.q.shape[-1]
    entry = E.new_empty(segments.count, HV, K, V)

    def run(states: Tensor, s_out: Tensor | None) -> None:
        ends = 0 if s_out is None else terms.sequences
        programs = V // TILE_V * HV * (segments.count + ends)
        launch: Any = cached(delta_state_passing_sm90_kernel)[(programs,)]
        launch(
            e_ptr=E,
            m_ptr=M,
            m_is_zero_ptr=m_is_zero,
            s_in_ptr=s_in,
            entry_ptr=states,
            s_out_ptr=s_out,
            segment=segments.tokens,
            **sequence_args(terms),
            K=K,
            V=V,
            BV=TILE_V,
            E_WIDTH=E.stride(2),
            M_WIDTH=M.stride(2),
            BACK=reverse,
            HAS_S_IN=s_in is not None,
            HAS_S_OUT=s_out is not None,
            num_warps=4,
            num_stages=1,
        )

    def transition() -> Tensor:
        return torch.where(m_is_zero[..., None, None] == 0, M, 0.0)

    backend.pass_states(run, entry, s_out, terms, segments, transition, exchange, reads_others=True)
    return entry
