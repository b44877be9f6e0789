"""Launches of the gradients of per-channel decay on sm_90, in the place of Triton's."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import CHUNK
from slipstream.kernels.linear.sm90.common.tma import tma_descriptor
from slipstream.kernels.linear.sm90.dplr.dqkg import dplr_dqkg_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.intra_safe_bwd import dplr_intra_safe_bwd_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.scores import dplr_scores_sm90_kernel
from slipstream.kernels.linear.triton.dplr.backend import ChunkStates, ScoreGrads
from slipstream.kernels.linear.triton.dplr.launch import IntraChunk
from slipstream.runtime.backends import sm_count
from slipstream.runtime.launch_cache import cached

TILE_K = 64
WIDE = 2  # warps beside each other, each four rows of them
_GATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def scores(
    terms: LinearInputs,
    do: Tensor,
    intra: IntraChunk,
    states: ChunkStates,
    scores: ScoreGrads,
    dv: Tensor,
    dbeta: Tensor | None,
    scale: float,
) -> None:
    """As TritonDplr.launch_scores."""
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


def chunk_dqkg(
    terms: LinearInputs,
    do: Tensor,
    states: ChunkStates,
    scores: ScoreGrads,
    strong: Tensor | None,
    grads: dict[str, Tensor],
    dbeta: Tensor | None,
    scale: float,
) -> None:
    """As TritonDplr.launch_dqkg."""
    assert strong is not None
    chunk_dqkg_anchored(terms, do, states, scores, grads, dbeta, scale)
    chunk_dqkg_safe(terms, do, states, scores, strong, grads, dbeta, scale)


def chunk_dqkg_anchored(
    terms: LinearInputs,
    do: Tensor,
    states: ChunkStates,
    scores: ScoreGrads,
    grads: dict[str, Tensor],
    dbeta: Tensor | None,
    scale: float,
) -> None:
    """All chunks, as if none were strong."""
    B, T, HV, V = terms.v.shape
    H, K = terms.q.shape[2:]
    x, y, before, dstates = states
    chunks = x.shape[0]
    heads = [tma_descriptor(t, H * K, CHUNK, TILE_K) for t in (terms.q, terms.k, terms.a, terms.b)]
    v = None if terms.a is None else tma_descriptor(terms.v, HV * V, CHUNK, V)
    programs = min(sm_count(do.device.index), chunks * HV)
    launch: Any = cached(dplr_dqkg_sm90_kernel)[(programs,)]
    launch(
        *heads,
        tma_descriptor(terms.g, HV * K, CHUNK, TILE_K),
        v,
        tma_descriptor(do, HV * V, CHUNK, V),
        *(tma_descriptor(t, CHUNK, V, CHUNK) for t in (x, y)),
        *(tma_descriptor(t, K, V, TILE_K) for t in (before, dstates)),
        *(tma_descriptor(t, CHUNK, CHUNK, CHUNK) for t in scores[:-1]),
        terms.beta,
        scores.diagonal,
        *(grads.get(name) for name in "qkabg"),
        dbeta,
        terms.cu_seqlens,
        scale,
        chunks * HV,
        T,
        terms.sequences,
        HV,
        H,
        B * T,
        K=K,
        BK=TILE_K,
        V=V,
        C=CHUNK,
        NK=1 if dbeta is None else dbeta.shape[0] - 1,
        DELTA=terms.a is None,
        PACKED=terms.cu_seqlens is not None,
        WIDE=WIDE,
        num_warps=4 * WIDE,
        maxnreg=168,  # of 12 warps: what all parts share
    )


def chunk_dqkg_safe(
    terms: LinearInputs,
    do: Tensor,
    states: ChunkStates,
    scores: ScoreGrads,
    strong: Tensor | None,
    grads: dict[str, Tensor],
    dbeta: Tensor | None,
    scale: float,
) -> None:
    """Strong chunks alone."""
    B, T, HV, V = terms.v.shape
    H, K = terms.q.shape[2:]
    x, y, before, dstates = states
    launch: Any = cached(dplr_intra_safe_bwd_sm90_kernel)[(K // TILE_K * x.shape[0] * HV,)]
    launch(
        terms.q,
        terms.k,
        terms.a,
        terms.b,
        terms.g,
        None if terms.a is None else tma_descriptor(terms.v, HV * V, CHUNK, V),
        tma_descriptor(do, HV * V, CHUNK, V),
        *(tma_descriptor(t, CHUNK, V, CHUNK) for t in (x, y)),
        *(tma_descriptor(t, K, V, TILE_K) for t in (before, dstates)),
        *(tma_descriptor(t, CHUNK, CHUNK, CHUNK) for t in scores[:-1]),
        strong,
        terms.beta,
        scores.diagonal,
        *(grads.get(name) for name in "qkabg"),
        dbeta,
        terms.cu_seqlens,
        scale,
        T,
        terms.sequences,
        HV,
        H,
        B * T,
        K=K,
        V=V,
        BK=TILE_K,
        C=CHUNK,
        DELTA=terms.a is None,
        PACKED=terms.cu_seqlens is not None,
        num_warps=8,
    )
