"""Per-channel decay, and free a and b, on sm_90 in 16 bits: kernels in the place of Triton's.

Triton's stay for the gradients where supports_dqkg refuses a call, and between segments.
"""

from typing import Any

from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import CHUNK, Segments, dplr_sm90, num_sequences
from slipstream.kernels.linear.sm90.common.tma import align16, align_for_tma, tma_descriptor
from slipstream.kernels.linear.sm90.dplr import dqkg_launch
from slipstream.kernels.linear.sm90.dplr.chunk_dstate import dplr_chunk_dstate_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.chunk_fwd import dplr_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.dqkg_launch import supports_dqkg
from slipstream.kernels.linear.sm90.dplr.intra_safe import dplr_intra_safe_sm90_kernel
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

CAPABILITIES = BackendCapabilities(writes_out=True, checkpoints=True)
WY_OPTIONS = {"num_warps": 4, "maxnreg": 168}  # three programs fit a multiprocessor
# by V: of 8 and 12 warps, what all partitions share
CHUNK_OPTIONS = {64: {"num_warps": 4, "maxnreg": 128}, 128: {"num_warps": 4, "maxnreg": 168}}
STAGES = 3
SAFE_OPTIONS = {"num_warps": 4}
SAFE_PROGRAMS = 2  # a multiprocessor


def launch_intra_chunk(
    terms: LinearInputs, scale: float, intra: IntraChunk, for_backward: bool
) -> None:
    """As TritonDplr.launch_intra_chunk."""
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
    launch_intra_chunk = staticmethod(launch_intra_chunk)
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
        launch = dqkg_launch.scores if supports_dqkg(terms, do) else super().launch_scores
        launch(terms, do, intra, states, scores, dv, dbeta, scale)

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
        launch = dqkg_launch.chunk_dqkg if supports_dqkg(terms, do) else super().launch_dqkg
        launch(terms, do, states, scores, strong, grads, dbeta, scale)


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
