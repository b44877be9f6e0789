"""Launches of the delta rule's kernels on sm_90, in the place of the portable delta_launch's.

They leave and take the same R and rows, and the same segments, so that either can be used with the
other's. Nothing depends on device values.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
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
from slipstream.kernels.linear.sm90.plan import CHUNK, TILE_V
from slipstream.kernels.linear.triton.common.zero_counters import zero_counters
from slipstream.kernels.linear.triton.delta.backend import WYFactors
from slipstream.kernels.primitives.gluon_compat import TensorDescriptor, gl
from slipstream.runtime.launch_cache import cached

BASE = 16  # rows of the blocks that the inverse begins with
STAGES = 3
TILE_K = 64  # channels of K that the gradients' kernel takes at a time
GRADS = {"num_warps": 4, "maxnreg": 255}
SOLVE = {"num_warps": 4, "maxnreg": 80}  # six programs fit a multiprocessor
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def solve_tril(terms: LinearInputs, r: Tensor, rows: Tensor) -> WYFactors:
    """r [B, T, HV, C] and rows [chunks, HV, 1 or 2, C] are written."""
    growth = None if terms.g is None else rows.new_empty(*rows.shape[:2], CHUNK // BASE)
    T, HV = terms.v.shape[1:3]
    H, K = terms.q.shape[2:]
    launch: Any = cached(delta_solve_tril_sm90_kernel)[(rows.shape[0] * HV,)]
    launch(
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(r, HV * CHUNK, CHUNK, CHUNK),
        r,
        terms.g,
        terms.beta,
        rows,
        growth,
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
    return WYFactors(r, rows, growth)


def chunk_fwd(
    terms: LinearInputs,
    r: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
    *,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    segment: tuple[int, int] | None = None,
    skip: bool = False,
    parts: tuple[int, Tensor] | None = None,
) -> None:
    """out: o, or w where states are wanted. segment: tokens of one, and how many there are.

    skip: s_out is s_in, or there is none, and most sequences have no tokens. parts: chunks of those
    that backward takes, and where S before each of them goes.
    """
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    launch: Any = cached(delta_chunk_fwd_sm90_kernel)[_grid(terms, segment)]
    launch(
        tma_descriptor(terms.q, H * K, CHUNK, K) if states is None else None,
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(terms.v, HV * V, CHUNK, TILE_V),
        tma_descriptor(r, HV * CHUNK, CHUNK, CHUNK),
        tma_descriptor(out, HV * V, CHUNK, TILE_V),
        None if states is None else tma_descriptor(states, K, TILE_V, K),
        None if parts is None else tma_descriptor(parts[1], K, TILE_V, K),
        out,
        rows,
        s_in,
        s_out,
        terms.cu_seqlens,
        scale,
        *scalar_args(terms, segment),
        0 if parts is None else parts[0],
        KEEP=states is not None,
        **_flags(terms, s_in, s_out),
        SPLIT=segment is not None,
        SKIP=skip,
        PARTS=parts is not None,
    )


def chunk_fwd_2tile(
    terms: LinearInputs,
    r: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
    *,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    skip: bool = False,
    parts: tuple[int, Tensor] | None = None,
) -> None:
    """As walk, of whole sequences, two tiles of V a program."""
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    launch: Any = cached(delta_chunk_fwd_2tile_sm90_kernel)[_grid(terms, None, 2 * TILE_V)]
    launch(
        tma_descriptor(terms.q, H * K, CHUNK, K) if states is None else None,
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(terms.v, HV * V, CHUNK, TILE_V),
        tma_descriptor(r, HV * CHUNK, CHUNK, CHUNK),
        tma_descriptor(out, HV * V, CHUNK, TILE_V),
        None if states is None else tma_descriptor(states, K, TILE_V, K),
        None if parts is None else tma_descriptor(parts[1], K, TILE_V, K),
        out,
        rows,
        s_in,
        s_out,
        terms.cu_seqlens,
        scale,
        *scalar_args(terms, None)[:4],
        0 if parts is None else parts[0],
        KEEP=states is not None,
        **_flags(terms, s_in, s_out),
        SKIP=skip,
        PARTS=parts is not None,
    )


def chunk_dstate(
    terms: LinearInputs,
    do: Tensor,
    r: Tensor,
    rows: Tensor,
    scale: float,
    dv: Tensor,
    dstates: Tensor,
    *,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    segment: tuple[int, int] | None = None,
    skip: bool = False,
) -> None:
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    launch: Any = cached(delta_chunk_dstate_sm90_kernel)[_grid(terms, segment)]
    launch(
        tma_descriptor(terms.q, H * K, CHUNK, K),
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(do, HV * V, CHUNK, TILE_V),
        tma_descriptor(r, HV * CHUNK, CHUNK, CHUNK),
        tma_descriptor(dv, HV * V, CHUNK, TILE_V),
        tma_descriptor(dstates, K, TILE_V, K),
        dv,
        rows,
        s_in,
        s_out,
        terms.cu_seqlens,
        scale,
        *scalar_args(terms, segment),
        **_flags(terms, s_in, s_out),
        SPLIT=segment is not None,
        SKIP=skip,
    )


def segment_transition(
    terms: LinearInputs,
    solved: WYFactors,
    s_in: Tensor | None,
    segment: tuple[int, int],
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """E and M of segments [slots, HV, K, V + K], or M alone [slots, HV, K, K], and where M counts
    as zero [slots, HV]."""
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    wide = K if alone else V + K
    made = solved.rows.new_empty(segment[1], HV, K, wide)
    far = made.new_empty(segment[1], HV, dtype=torch.int32)
    launch: Any = cached(delta_segment_transition_sm90_kernel)[(wide // TILE_V * HV * segment[1],)]
    launch(
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(terms.v, HV * V, CHUNK, TILE_V),
        tma_descriptor(solved.r, HV * CHUNK, CHUNK, CHUNK),
        solved.rows,
        solved.growth,
        s_in,
        made,
        far,
        terms.cu_seqlens,
        *scalar_args(terms, segment),
        **{**_segment_transition_flags(terms, s_in), "V": wide - K},
    )
    return made, far


def segment_transition_bwd(
    terms: LinearInputs,
    do: Tensor,
    solved: WYFactors,
    scale: float,
    s_in: Tensor | None,
    segment: tuple[int, int],
) -> Tensor:
    """dE of segments [slots, HV, K, V]."""
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    made = solved.rows.new_empty(segment[1], HV, K, V)
    launch: Any = cached(delta_segment_transition_bwd_sm90_kernel)[_grid(terms, segment)]
    launch(
        tma_descriptor(terms.q, H * K, CHUNK, K),
        tma_descriptor(terms.k, H * K, CHUNK, K),
        tma_descriptor(do, HV * V, CHUNK, TILE_V),
        tma_descriptor(solved.r, HV * CHUNK, CHUNK, CHUNK),
        solved.rows,
        solved.growth,
        s_in,
        made,
        terms.cu_seqlens,
        scale,
        *scalar_args(terms, segment),
        **_segment_transition_flags(terms, s_in),
    )
    return made


def state_passing(
    terms: LinearInputs,
    made: Tensor,
    m: Tensor,
    far: Tensor,
    s_in: Tensor | None,
    segment: tuple[int, int],
    back: bool = False,
) -> Tensor:
    """The state that each segment meets [slots, HV, K, V], of what ends, or ends_back, made."""
    HV, V = terms.v.shape[2:]
    K = terms.q.shape[-1]
    met = made.new_empty(segment[1], HV, K, V)
    T, N, *_ = scalar_args(terms, segment)
    launch: Any = cached(delta_state_passing_sm90_kernel)[_grid(terms, segment)]
    launch(
        made,
        m,
        far,
        s_in,
        met,
        terms.cu_seqlens,
        T,
        N,
        HV,
        segment[0],
        K=K,
        V=V,
        BV=TILE_V,
        BESIDE=m.shape[-1] - K,
        BACK=back,
        HAS_S_IN=s_in is not None,
        PACKED=terms.cu_seqlens is not None,
        num_warps=8,
        num_stages=1,
    )
    return met


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
    rows: Tensor,
    w: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
    scale: float,
    made: dict[str, Tensor],
) -> None:
    """Into made: those of q and k [B, T, HV / G, K], of G heads together (plan.together); of beta
    and, with gates, of g [B, T, HV]."""
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    heads = made["q"].shape[2]
    launch: Any = cached(delta_dqkg_sm90_kernel)[(states.shape[0] * HV,)]
    launch(
        *(tma_descriptor(x, H * K, CHUNK, TILE_K) for x in (terms.q, terms.k)),
        *(tma_descriptor(x, HV * V, CHUNK, V) for x in (do, w, dv)),
        *(tma_descriptor(x, K, V, TILE_K) for x in (states, dstates)),
        *(tma_descriptor(made[name], heads * K, CHUNK, TILE_K) for name in "qk"),
        made["q"],
        made["k"],
        rows,
        made["beta"],
        made.get("g"),
        terms.cu_seqlens,
        dq_semaphores(rows, heads, HV),
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


def dq_semaphores(rows: Tensor, heads: int, HV: int) -> Tensor | None:
    """How many value heads have added up a chunk's gradients of q and k: none yet."""
    if heads == HV:
        return None
    return zero_counters(rows.shape[0] * heads, rows)


def _grid(terms: LinearInputs, segment: tuple[int, int] | None, tile: int = TILE_V) -> tuple[int]:
    HV, V = terms.v.shape[2:]
    return (V // tile * HV * (terms.sequences if segment is None else segment[1]),)


def scalar_args(terms: LinearInputs, segment: tuple[int, int] | None) -> tuple[int, ...]:
    """T, N, HV, H, tokens of a segment."""
    T, HV = terms.v.shape[1:3]
    return T, terms.sequences, HV, terms.q.shape[2], T if segment is None else segment[0]


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
