"""Per-channel decay, and free a and b, on sm_90 in 16 bits: kernels in the place of Triton's.

Triton's stay for the gradients where supports_dqkg refuses a call, and between segments.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import CHUNK, Segments, dplr_sm90, num_sequences
from slipstream.kernels.linear.sm90.common.tma import align16, align_for_tma, tma_descriptor
from slipstream.kernels.linear.sm90.dplr.chunk_dstate import dplr_chunk_dstate_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.chunk_fwd import dplr_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.dqkg import dplr_dqkg_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.intra_safe import dplr_intra_safe_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.intra_safe_bwd import dplr_intra_safe_bwd_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.scores import dplr_scores_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.wy import dplr_wy_sm90_kernel
from slipstream.kernels.linear.triton.dplr.backend import (
    ChunkStates,
    ScoreGrads,
    TritonDplr,
)
from slipstream.kernels.linear.triton.dplr.launch import IntraChunk
from slipstream.kernels.linear.triton.dplr.tiles import ANCHORED_TILES, SHIFT
from slipstream.runtime.backends import sm_count
from slipstream.runtime.launch_cache import cached

CAPABILITIES = BackendCapabilities(writes_out=True, checkpoints=True, exchanges=True)
WY_OPTIONS = {"num_warps": 4, "maxnreg": 168}  # three programs fit a multiprocessor
# by V: of 8 and 12 warps, what all partitions share
CHUNK_OPTIONS = {64: {"num_warps": 4, "maxnreg": 128}, 128: {"num_warps": 4, "maxnreg": 168}}
STAGES = 3
SAFE_OPTIONS = {"num_warps": 4}
SAFE_PROGRAMS = 2  # a multiprocessor
# Of the gradients: channels of K at a time, warps beside each other, each four rows of them, and
# what a gate may be.
TILE_K, WIDE = 64, 2
_GATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def intra_chunk(terms: LinearInputs, scale: float, intra: IntraChunk, for_backward: bool) -> None:
    """As TritonDplr.intra_chunk."""
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    rows = (terms.q, terms.k, terms.a, terms.b)
    tiles = [
        None if x is None else tma_descriptor(x, x.shape[2] * x.shape[3], CHUNK, 64) for x in rows
    ]
    rest = (terms.v, terms.g, terms.beta)
    sizes = (terms.cu_seqlens, scale, int(for_backward))
    counts = (T, terms.sequences, HV, H)
    programs = intra.u.shape[0] * HV
    common = {
        "K": K,
        "V": V,
        "DELTA": terms.beta is not None,
        "CHANNEL": terms.decay == "channel",
        "PACKED": terms.cu_seqlens is not None,
        "LIMIT": ANCHORED_TILES[terms.v.dtype],
        "SHIFT": SHIFT[terms.v.dtype],
    }
    options = {"C": CHUNK, "HAS_GATE": terms.g is not None}
    run: Any = cached(dplr_wy_sm90_kernel)[(programs,)]
    run(*tiles, *rest, *intra, *sizes, *counts, **common, **options, **WY_OPTIONS)
    if terms.g is not None:
        most = SAFE_PROGRAMS * sm_count(terms.v.device.index)
        run = cached(dplr_intra_safe_sm90_kernel)[(min(most, programs),)]
        run(*rows, *rest, *intra, *sizes, programs, *counts, **common, **SAFE_OPTIONS)


def chunk_fwd(
    terms: LinearInputs,
    intra: IntraChunk,
    *,
    o: Tensor | None = None,
    x: Tensor | None = None,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    m: Tensor | None = None,
    segments: Segments | None = None,
) -> None:
    """As the Triton kernel's launch."""
    make = "ends" if m is not None else "o" if states is None else "states"
    if make != "o":
        intra = intra._replace(q=None, qb=None, qk=None)  # o alone wants these
    q, w, b, k, u, total, qb, qk, *_ = intra
    HV, V, K = *terms.v.shape[2:], terms.q.shape[-1]
    v = None if k is None else (terms.v, HV * V, 64)
    tiles = (q, w, b, k, qb, qk, v, None if o is None else (o, HV * V, 64), x, states)
    two_stages = k is not None and (K == 128 or make != "o")
    columns = 1 + -(-K // V) if make == "ends" else 1
    run: Any = cached(dplr_chunk_fwd_sm90_kernel)[(columns * HV * num_sequences(terms, segments),)]
    run(
        *map(_described, tiles),
        o,
        u,
        total,
        s_in,
        s_out,
        m,
        *_tokens(terms, segments),
        MAKE=make,
        ST=2 if two_stages else STAGES,
        DELTA=terms.beta is not None,
        **_flags(terms, s_in, s_out, segments),
    )


def chunk_dstate(
    terms: LinearInputs,
    do: Tensor,
    intra: IntraChunk,
    *,
    y: Tensor | None = None,
    dstates: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    segments: Segments | None = None,
) -> None:
    """As the Triton kernel's launch."""
    HV, V = terms.v.shape[2:]
    r = None if y is None else intra.r
    run: Any = cached(dplr_chunk_dstate_sm90_kernel)[(HV * num_sequences(terms, segments),)]
    run(
        *map(_described, ((do, HV * V, 64), intra.q, intra.w, intra.b, intra.qb, r, y, dstates)),
        intra.total,
        s_in,
        s_out,
        *_tokens(terms, segments),
        TRANSITION_ONLY=y is None,
        ST=2,
        **_flags(terms, s_in, s_out, segments),
    )


class Sm90Dplr(TritonDplr):
    intra_chunk = staticmethod(intra_chunk)
    chunk_fwd = staticmethod(chunk_fwd)
    chunk_dstate = staticmethod(chunk_dstate)
    choose_segments = staticmethod(dplr_sm90)

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        return super().to_kernel_layout(align_for_tma(terms))

    def contiguous(self, x: Tensor) -> Tensor:
        return align16(x).contiguous()

    def launch_scores(
        self,
        terms: LinearInputs,
        do: Tensor,
        intra: IntraChunk,
        states: ChunkStates,
        scores: ScoreGrads,
        dv: Tensor,
        dbeta: Tensor | None,
        scale: float,
    ) -> None:
        if not supports_dqkg(terms, do):
            super().launch_scores(terms, do, intra, states, scores, dv, dbeta, scale)
            return
        T, HV, V = terms.v.shape[1:]
        K, delta = terms.q.shape[-1], terms.a is None
        x, y, _, dstates = states
        launch: Any = cached(dplr_scores_sm90_kernel)[(x.shape[0] * HV,)]
        launch(
            *(tma_descriptor(t, HV * V, CHUNK, V) for t in (terms.v, do)),
            *(tma_descriptor(t, CHUNK, V, CHUNK) for t in (x, y)),
            tma_descriptor(intra.k, K, CHUNK, K),
            *(tma_descriptor(t, CHUNK, CHUNK, CHUNK) for t in (intra.qk, intra.ak)),
            None if delta else tma_descriptor(dstates, K, V, K),
            tma_descriptor(dv, HV * V, CHUNK, V),
            dv,
            terms.beta,
            dbeta,
            *scores,
            terms.cu_seqlens,
            scale,
            T,
            terms.sequences,
            HV,
            K=K,
            V=V,
            C=CHUNK,
            DELTA=delta,
            PACKED=terms.cu_seqlens is not None,
            num_warps=4,
            maxnreg=168 if delta else 255,  # three or two programs a multiprocessor
        )

    def launch_dqkg(
        self,
        terms: LinearInputs,
        do: Tensor,
        states: ChunkStates,
        scores: ScoreGrads,
        strong: Tensor | None,
        grads: dict[str, Tensor],
        dbeta: Tensor | None,
        scale: float,
    ) -> None:
        if not supports_dqkg(terms, do):
            super().launch_dqkg(terms, do, states, scores, strong, grads, dbeta, scale)
            return
        assert strong is not None
        B, T, HV, V = terms.v.shape
        H, K = terms.q.shape[2:]
        chunks, rows = states.x.shape[0], (terms.q, terms.k, terms.a, terms.b)
        read = (
            None if terms.a is None else tma_descriptor(terms.v, HV * V, CHUNK, V),
            tma_descriptor(do, HV * V, CHUNK, V),
            *(tma_descriptor(t, CHUNK, V, CHUNK) for t in (states.x, states.y)),
            *(tma_descriptor(t, K, V, TILE_K) for t in (states.states, states.dstates)),
            *(tma_descriptor(t, CHUNK, CHUNK, CHUNK) for t in scores[:-1]),
        )
        others = (terms.beta, scores.diagonal, *(grads.get(name) for name in "qkabg"), dbeta)
        others += (terms.cu_seqlens, scale)
        sizes = (T, terms.sequences, HV, H, B * T)
        flags = {"K": K, "V": V, "BK": TILE_K, "C": CHUNK, "DELTA": terms.a is None}
        flags["PACKED"] = terms.cu_seqlens is not None
        # all chunks, as if none were strong; then the strong ones again
        launch: Any = cached(dplr_dqkg_sm90_kernel)[(min(sm_count(do.device.index), chunks * HV),)]
        launch(
            *(tma_descriptor(t, H * K, CHUNK, TILE_K) for t in rows),
            tma_descriptor(terms.g, HV * K, CHUNK, TILE_K),
            *read,
            *others,
            chunks * HV,
            *sizes,
            NK=1 if dbeta is None else dbeta.shape[0] - 1,
            WIDE=WIDE,
            **flags,
            num_warps=4 * WIDE,
            maxnreg=168,  # of 12 warps: what all partitions share
        )
        launch = cached(dplr_intra_safe_bwd_sm90_kernel)[(K // TILE_K * chunks * HV,)]
        launch(*rows, terms.g, *read, strong, *others, *sizes, **flags, num_warps=8)


def supports_dqkg(terms: LinearInputs, do: Tensor) -> bool:
    """Of a call on sm_90: one gate a channel, K and V of 64 or 128, and what TMA reads."""
    q, v, g = terms.q, terms.v, terms.g
    if g is None or terms.decay != "channel" or g.dtype not in _GATE_DTYPES:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or v.numel() * 2 // v.shape[-1] >= 2**31:
        return False
    read = (q, terms.k, v, g, terms.a, terms.b, do)
    return {q.shape[-1], v.shape[-1]} <= {64, 128} and not any(
        x is not None and x.data_ptr() % 16 for x in read
    )


def _tokens(terms: LinearInputs, segments: Segments | None) -> tuple[Any, ...]:
    """cu to segment."""
    T, HV = terms.v.shape[1:3]
    return terms.cu_seqlens, T, terms.sequences, HV, T if segments is None else segments.tokens


def _flags(
    terms: LinearInputs, s_in: Tensor | None, s_out: Tensor | None, segments: Segments | None
) -> dict[str, Any]:
    """What both kernels are compiled for."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return {
        "K": K,
        "V": V,
        "C": CHUNK,
        "HAS_GATE": terms.g is not None,
        "HAS_S_IN": s_in is not None,
        "HAS_S_OUT": s_out is not None,
        "SPLIT": segments is not None,
        "PACKED": terms.cu_seqlens is not None,
        **CHUNK_OPTIONS[V],
    }


def _described(x: Any) -> Any:
    """A descriptor of a tensor as its rows, or of (tensor, width of rows, columns of a tile)."""
    if x is None:
        return None
    x, width, columns = x if isinstance(x, tuple) else (x, x.shape[-1], x.shape[-1])
    return tma_descriptor(x, width, CHUNK, columns)


_BACKEND = Sm90Dplr()
forward, backward = _BACKEND.forward, _BACKEND.backward
