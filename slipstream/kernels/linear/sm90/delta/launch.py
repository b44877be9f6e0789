"""Launches of the delta rule's kernels on sm_90.

They leave and take the WY factors and segments that the Triton back end's do, so that either can be
used with the other's. Nothing depends on device values.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.delta import WYFactors
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import CHUNK, TILE_V, Segments, num_sequences
from slipstream.kernels.linear.sm90.delta.chunk_dstate import delta_chunk_dstate_sm90_kernel
from slipstream.kernels.linear.sm90.delta.chunk_fwd import delta_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.delta.chunk_fwd_2tile import delta_chunk_fwd_2tile_sm90_kernel
from slipstream.kernels.linear.sm90.delta.dqkg import delta_dqkg_sm90_kernel
from slipstream.kernels.linear.sm90.delta.segment_transition import (
    delta_segment_transition_bwd_sm90_kernel,
    delta_segment_transition_sm90_kernel,
)
from slipstream.kernels.linear.sm90.delta.solve_tril import delta_solve_tril_sm90_kernel
from slipstream.kernels.linear.sm90.delta.state_passing import delta_state_passing_sm90_kernel
from slipstream.kernels.linear.triton.common.zero_counters import zero_counters
from slipstream.kernels.primitives.gluon_compat import TensorDescriptor, gl
from slipstream.runtime.launch_cache import cached

BASE = 16  # rows of the blocks that the inverse begins with
STAGES = 3
TILE_K = 64  # channels of K that the gradients' kernel takes at a time
GRADS = {"num_warps": 4, "maxnreg": 255}
SOLVE = {"num_warps": 4, "maxnreg": 80}  # six programs fit a multiprocessor
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Checkpoints(NamedTuple):
    """States that chunk_fwd leaves for backward, one before every so many chunks."""

    every: int
    states: Tensor


def solve_tril(terms: LinearInputs, wy: WYFactors) -> WYFactors:
    """wy's r and beta_gate are written; with a gate, transition_lognorm is made too."""
    r, beta_gate, _ = wy
    lognorm = None
    if terms.g is not None:
        lognorm = beta_gate.new_empty(*beta_gate.shape[:2], CHUNK // BASE)
    T, HV = terms.v.shape[1:3]
    H, K = terms.q.shape[2:]
    launch: Any = cached(delta_solve_tril_sm90_kernel)[(beta_gate.shape[0] * HV,)]
    launch(
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(r, HV * CHUNK, CHUNK, CHUNK),
        r,
        terms.g,
        terms.beta,
        beta_gate,
        lognorm,
        terms.cu_seqlens,
        T,
        terms.sequences,
        HV,
        H,
        K=K,
        C=CHUNK,
        BASE=BASE,
        HAS_GATE=terms.g is not None,
        PACKED=terms.cu_seqlens is not None,
        **SOLVE,
    )
    return WYFactors(r, beta_gate, lognorm)


def chunk_fwd(
    terms: LinearInputs,
    wy: WYFactors,
    scale: float,
    out: Tensor,
    *,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    segments: Segments | None = None,
    skip_empty: bool = False,
    checkpoints: Checkpoints | None = None,
) -> None:
    """As DeltaBackend.chunk_fwd.

    skip_empty: s_out is s_in, or there is none, and most sequences have no tokens.
    """
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    launch: Any = cached(delta_chunk_fwd_sm90_kernel)[_grid(terms, segments)]
    launch(
        tma_descriptor(terms.q, H * K, CHUNK, K) if states is None else None,
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(terms.v, HV * V, CHUNK, TILE_V),
        tma_descriptor(wy.r, HV * CHUNK, CHUNK, CHUNK),
        tma_descriptor(out, HV * V, CHUNK, TILE_V),
        None if states is None else tma_descriptor(states, K, TILE_V, K),
        None if checkpoints is None else tma_descriptor(checkpoints.states, K, TILE_V, K),
        out,
        wy.beta_gate,
        s_in,
        s_out,
        terms.cu_seqlens,
        scale,
        *scalar_args(terms, segments),
        0 if checkpoints is None else checkpoints.every,
        SAVE_STATES=states is not None,
        **_flags(terms, s_in, s_out),
        SPLIT=segments is not None,
        SKIP=skip_empty,
        SAVE_CHECKPOINTS=checkpoints is not None,
    )


def chunk_fwd_2tile(
    terms: LinearInputs,
    wy: WYFactors,
    scale: float,
    out: Tensor,
    *,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    skip_empty: bool = False,
    checkpoints: Checkpoints | None = None,
) -> None:
    """As chunk_fwd, of whole sequences, two tiles of V a program."""
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    launch: Any = cached(delta_chunk_fwd_2tile_sm90_kernel)[_grid(terms, None, 2 * TILE_V)]
    launch(
        tma_descriptor(terms.q, H * K, CHUNK, K) if states is None else None,
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(terms.v, HV * V, CHUNK, TILE_V),
        tma_descriptor(wy.r, HV * CHUNK, CHUNK, CHUNK),
        tma_descriptor(out, HV * V, CHUNK, TILE_V),
        None if states is None else tma_descriptor(states, K, TILE_V, K),
        None if checkpoints is None else tma_descriptor(checkpoints.states, K, TILE_V, K),
        out,
        wy.beta_gate,
        s_in,
        s_out,
        terms.cu_seqlens,
        scale,
        *scalar_args(terms, None)[:4],
        0 if checkpoints is None else checkpoints.every,
        SAVE_STATES=states is not None,
        **_flags(terms, s_in, s_out),
        SKIP=skip_empty,
        SAVE_CHECKPOINTS=checkpoints is not None,
    )


def chunk_dstate(
    terms: LinearInputs,
    do: Tensor,
    wy: WYFactors,
    scale: float,
    dv: Tensor,
    dstates: Tensor,
    *,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    segments: Segments | None = None,
    skip_empty: bool = False,
) -> None:
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    launch: Any = cached(delta_chunk_dstate_sm90_kernel)[_grid(terms, segments)]
    launch(
        tma_descriptor(terms.q, H * K, CHUNK, K),
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(do, HV * V, CHUNK, TILE_V),
        tma_descriptor(wy.r, HV * CHUNK, CHUNK, CHUNK),
        tma_descriptor(dv, HV * V, CHUNK, TILE_V),
        tma_descriptor(dstates, K, TILE_V, K),
        dv,
        wy.beta_gate,
        s_in,
        s_out,
        terms.cu_seqlens,
        scale,
        *scalar_args(terms, segments),
        **_flags(terms, s_in, s_out),
        SPLIT=segments is not None,
        SKIP=skip_empty,
    )


def segment_transition(
    terms: LinearInputs,
    wy: WYFactors,
    s_in: Tensor | None,
    segments: Segments,
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """E and M of segments [count, HV, K, V + K], or M alone [count, HV, K, K], and where M counts
    as zero [count, HV]."""
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    wide = K if alone else V + K
    transition = wy.beta_gate.new_empty(segments.count, HV, K, wide)
    m_is_zero = transition.new_empty(segments.count, HV, dtype=torch.int32)
    launch: Any = cached(delta_segment_transition_sm90_kernel)[
        (wide // TILE_V * HV * segments.count,)
    ]
    launch(
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(terms.v, HV * V, CHUNK, TILE_V),
        tma_descriptor(wy.r, HV * CHUNK, CHUNK, CHUNK),
        wy.beta_gate,
        wy.transition_lognorm,
        s_in,
        transition,
        m_is_zero,
        terms.cu_seqlens,
        *scalar_args(terms, segments),
        **{**_segment_transition_flags(terms, s_in), "V": wide - K},
    )
    return transition, m_is_zero


def segment_transition_bwd(
    terms: LinearInputs,
    do: Tensor,
    wy: WYFactors,
    scale: float,
    s_in: Tensor | None,
    segments: Segments,
) -> Tensor:
    """dE of segments [count, HV, K, V]."""
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    dE = wy.beta_gate.new_empty(segments.count, HV, K, V)
    launch: Any = cached(delta_segment_transition_bwd_sm90_kernel)[_grid(terms, segments)]
    launch(
        tma_descriptor(terms.q, H * K, CHUNK, K),
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(do, HV * V, CHUNK, TILE_V),
        tma_descriptor(wy.r, HV * CHUNK, CHUNK, CHUNK),
        wy.beta_gate,
        wy.transition_lognorm,
        s_in,
        dE,
        terms.cu_seqlens,
        scale,
        *scalar_args(terms, segments),
        **_segment_transition_flags(terms, s_in),
    )
    return dE


def state_passing(
    terms: LinearInputs,
    E: Tensor,
    m: Tensor,
    m_is_zero: Tensor,
    s_in: Tensor | None,
    segments: Segments,
    reverse: bool = False,
) -> Tensor:
    """The state before each segment [count, HV, K, V]; reverse: the gradient of that after it.

    E: of segment_transition, beside M, or of segment_transition_bwd. s_in: before or after all.
    """
    HV, V = terms.v.shape[2:]
    K = terms.q.shape[-1]
    entry = E.new_empty(segments.count, HV, K, V)
    T, N, *_ = scalar_args(terms, segments)
    launch: Any = cached(delta_state_passing_sm90_kernel)[_grid(terms, segments)]
    launch(
        E,
        m,
        m_is_zero,
        s_in,
        entry,
        terms.cu_seqlens,
        T,
        N,
        HV,
        segments.tokens,
        K=K,
        V=V,
        BV=TILE_V,
        BESIDE=m.shape[-1] - K,
        BACK=reverse,
        HAS_S_IN=s_in is not None,
        PACKED=terms.cu_seqlens is not None,
        num_warps=8,
        num_stages=1,
    )
    return entry


def _segment_transition_flags(terms: LinearInputs, s_in: Tensor | None) -> dict[str, Any]:
    return {
        "K": terms.q.shape[-1],
        "V": terms.v.shape[-1],
        "BV": TILE_V,
        "C": CHUNK,
        "ST": STAGES,
        "BLOCKS": CHUNK // BASE,
        "HAS_GATE": terms.g is not None,
        "HAS_S_IN": s_in is not None,
        "PACKED": terms.cu_seqlens is not None,
        "num_warps": 4,
        "maxnreg": 168,  # of 12 warps
    }


def chunk_dqkg(
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
    """As DeltaBackend.chunk_dqkg."""
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    heads = grads["q"].shape[2]
    launch: Any = cached(delta_dqkg_sm90_kernel)[(states.shape[0] * HV,)]
    launch(
        *(tma_descriptor(x, H * K, CHUNK, TILE_K) for x in (terms.q, terms.k)),
        *(tma_descriptor(x, HV * V, CHUNK, V) for x in (do, w, dv)),
        *(tma_descriptor(x, K, V, TILE_K) for x in (states, dstates)),
        *(tma_descriptor(grads[name], heads * K, CHUNK, TILE_K) for name in "qk"),
        grads["q"],
        grads["k"],
        wy.beta_gate,
        grads["beta"],
        grads.get("g"),
        terms.cu_seqlens,
        dq_semaphores(wy.beta_gate, heads, HV),
        scale,
        T,
        terms.sequences,
        HV,
        H,
        HV // heads,
        K=K,
        V=V,
        BK=TILE_K,
        C=CHUNK,
        HAS_GATE=terms.g is not None,
        PACKED=terms.cu_seqlens is not None,
        SHARED=heads < HV,
        **GRADS,
    )


def dq_semaphores(beta_gate: Tensor, heads: int, HV: int) -> Tensor | None:
    """How many value heads have added up a chunk's gradients of q and k: none yet."""
    if heads == HV:
        return None
    return zero_counters(beta_gate.shape[0] * heads, beta_gate)


def _grid(terms: LinearInputs, segments: Segments | None, tile: int = TILE_V) -> tuple[int]:
    HV, V = terms.v.shape[2:]
    return (V // tile * HV * num_sequences(terms, segments),)


def scalar_args(terms: LinearInputs, segments: Segments | None) -> tuple[int, ...]:
    """T, N, HV, H, tokens of a segment."""
    T, HV = terms.v.shape[1:3]
    return T, terms.sequences, HV, terms.q.shape[2], T if segments is None else segments.tokens


def _flags(terms: LinearInputs, s_in: Tensor | None, s_out: Tensor | None) -> dict[str, Any]:
    """What all walks are compiled for."""
    return {
        "K": terms.q.shape[-1],
        "V": terms.v.shape[-1],
        "BV": TILE_V,
        "C": CHUNK,
        "ST": STAGES,
        "HAS_GATE": terms.g is not None,
        "HAS_S_IN": s_in is not None,
        "HAS_S_OUT": s_out is not None,
        "PACKED": terms.cu_seqlens is not None,
        "num_warps": 4,
        "maxnreg": 128,  # of 16 warps: what all parts share
    }


def tma_descriptor(x: Tensor, width: int, rows: int, columns: int) -> Any:
    """A descriptor of x as rows of `width`, in tiles [rows, columns]."""
    layout: Any = gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[x.dtype])
    shape, strides = [x.numel() // width, width], [width, 1]
    return TensorDescriptor(x, shape, strides, [rows, columns], layout)
