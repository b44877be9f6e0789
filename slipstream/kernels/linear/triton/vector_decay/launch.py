"""Launches of the chunk kernel with a decay per channel (chunk.py), for backend.py."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import Exchange, pass_states
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import NO_POINTERS, PrefixStates
from slipstream.kernels.linear.segments import (
    ANCHOR_INTERVAL,
    FORWARD_UNIT,
    Segments,
    num_sequences,
    scalar_decay_tokens,
    split_into_segments,
)
from slipstream.kernels.linear.triton.common.decay_state_passing import decay_state_passing
from slipstream.kernels.linear.triton.common.tma import tma_descriptors
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.tiles import Tile, family_of
from slipstream.kernels.linear.triton.vector_decay.chunk import vector_decay_chunk_kernel
from slipstream.kernels.linear.triton.vector_decay.tiles import VectorDecayTile, choose_chunk_tile
from slipstream.runtime.backends import fp32_dot_precision
from slipstream.runtime.launch_cache import cache, cached


class VectorDecayProblem(NamedTuple):
    """A call by the names of the kernels, where K is the side that decays."""

    q: Tensor | None  # [B, T, HK, K]; not needed for forward with gv
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HX, V]
    do: Tensor | None  # [B, T, HX, V]
    g: Tensor  # [B, T, HV, K]
    terms: LinearInputs
    tile: VectorDecayTile
    segments: Segments | None

    @property
    def chunks(self) -> int:
        """An upper bound, which needs no lengths (delta/solve_tril.py, locate_chunk)."""
        B, T = self.k.shape[:2]
        packed = self.terms.cu_seqlens is not None
        return T // self.tile.C + self.terms.sequences if packed else B * -(-T // self.tile.C)


class IntraChunk(NamedTuple):
    """By the names of intra_fwd.py."""

    qs: Tensor | None
    ke: Tensor
    a: Tensor | None
    decay: Tensor
    rest: Tensor | None = None
    strong: Tensor | None = None


class ChunkLaunch(NamedTuple):
    """One launch: tensors by the names of chunk.py; y None where only states are wanted."""

    r: Tensor
    w: Tensor
    x: Tensor
    rest: Tensor | None = None
    y: Tensor | None = None
    a: Tensor | None = None
    s_in: Tensor | None = None
    s_out: Tensor | None = None
    total: Tensor | None = None
    other: Tensor | None = None
    scale: float = 1.0
    scale_in: float = 1.0
    scale_out: float = 1.0
    reverse: bool = False
    rows: bool = False
    prefix: PrefixStates | None = None


class GateSums(NamedTuple):
    """Results of the dq and the dk scan for dg, by the names of chunk.py."""

    sums: Tensor
    z: Tensor
    anchors: Tensor


@cache
def _chunk_tile(device: torch.device, D: int, X: int, bytes_each: int, C: int) -> tuple[Tile, int]:
    return choose_chunk_tile(
        "interpreter" if INTERPRETED else family_of(device), D, X, bytes_each, C
    )


def choose_segments(
    problem: VectorDecayProblem, exchange: Exchange | None, backward: bool
) -> Segments | None:
    """Decided by shapes alone."""
    unit = ANCHOR_INTERVAL if backward else FORWARD_UNIT
    HV, K = problem.g.shape[2:]
    V = problem.v.shape[-1]
    tile, _ = _chunk_tile(problem.k.device, K, V, problem.k.element_size(), problem.tile.C)
    C, terms = problem.tile.C, problem.terms
    tokens = scalar_decay_tokens(terms, -(-V // tile.BX) * HV, C, unit)
    segments = split_into_segments(terms, tokens)
    if exchange is None:
        return segments
    return exchange.segments(terms, segments, C, ANCHOR_INTERVAL * C)


def size_args(problem: VectorDecayProblem) -> dict[str, Any]:
    """cu_ptr to HV, as every kernel takes them."""
    terms = problem.terms
    T, HV = problem.k.shape[1], problem.g.shape[2]
    return {"cu_ptr": terms.cu_seqlens, "T": T, "N": terms.sequences, "HV": HV}


def entry_states(
    chunks: ChunkLaunch,
    problem: VectorDecayProblem,
    intra: IntraChunk,
    exchange: Exchange | None = None,
) -> ChunkLaunch:
    """The launch with the states before segments as s_in; writes s_out where there is one."""
    segments, terms = problem.segments, problem.terms
    assert segments is not None
    HV, K = problem.g.shape[2:]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": problem.k.device}
    states = torch.empty(segments.count, *terms.state_shape[1:], **wide)
    total = torch.empty(segments.count, HV, K, **wide)
    r, w, x, rest = chunks[:4]
    transition = ChunkLaunch(r, w, x, rest, s_out=states, total=total, reverse=chunks.reverse)
    launch(transition, problem, intra)

    def run(states: Tensor, s_out: Tensor | None) -> None:
        given = chunks._replace(s_out=s_out, total=total)
        decay_state_passing(given, terms, segments, states)

    def factors() -> Tensor:
        return total[..., None] if terms.gv is None else total[..., None, :]

    pass_states(run, states, chunks.s_out, terms, segments, factors, exchange)
    return chunks._replace(s_in=states, scale_in=1.0)


def gate_sums(problem: VectorDecayProblem) -> GateSums:
    B, T, HV, K = problem.g.shape
    V, interval, segments = problem.v.shape[-1], ANCHOR_INTERVAL * problem.tile.C, problem.segments
    if segments is not None:
        anchors = segments.count * -(-segments.tokens // interval)
    else:
        packed = problem.terms.cu_seqlens is not None
        anchors = T // interval + problem.terms.sequences if packed else B * -(-T // interval)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": problem.k.device}
    sums, z = (torch.empty(problem.chunks, HV, K, **wide) for _ in range(2))
    return GateSums(sums, z, torch.empty(anchors, HV, K, V, **wide))


def launch(
    chunks: ChunkLaunch,
    problem: VectorDecayProblem,
    intra: IntraChunk,
    sums: GateSums | None = None,
) -> None:
    r, w, x, y, terms, segments = (
        chunks.r,
        chunks.w,
        chunks.x,
        chunks.y,
        problem.terms,
        problem.segments,
    )
    HV = problem.g.shape[2]
    HR, HX, D, X, C = r.shape[2], x.shape[2], r.shape[-1], x.shape[-1], problem.tile.C
    tile, BD = _chunk_tile(x.device, D, X, x.element_size(), C)
    rows: list[Any] = [r, w, x, chunks.rest, y, chunks.other]
    a, tiles = chunks.a, None
    if tile.tma and terms.cu_seqlens is None:
        ke = tile.BX if chunks.rows else BD
        tiles = tma_descriptors(rows, [BD, BD, tile.BX, ke, tile.BX, tile.BX], C)
        if tiles is not None and a is not None:
            a = _squares(a)
    r, w, x, rest, y, other = tiles or rows
    cached(vector_decay_chunk_kernel)[-(-X // tile.BX) * HV * num_sequences(terms, segments),](
        r_ptr=r,
        w_ptr=w,
        x_ptr=x,
        rest_ptr=rest,
        y_ptr=y,
        a_ptr=a,
        decay_ptr=intra.decay,
        s_in_ptr=chunks.s_in,
        s_out_ptr=chunks.s_out,
        total_ptr=chunks.total,
        other_ptr=other,
        sums_ptr=sums.sums if sums else None,
        z_ptr=sums.z if sums and chunks.reverse else None,
        anchor_ptr=sums.anchors if sums else None,
        **(chunks.prefix.pointers() if chunks.prefix else NO_POINTERS),
        scale=chunks.scale,
        scale_in=chunks.scale_in,
        scale_out=chunks.scale_out,
        **size_args(problem),
        HR=HR,
        HX=HX,
        segment=problem.k.shape[1] if segments is None else segments.tokens,
        D=D,
        X=X,
        BD=BD,
        BX=tile.BX,
        C=C,
        ANCHOR_INTERVAL=ANCHOR_INTERVAL,
        REVERSE=chunks.reverse,
        ROWS=chunks.rows,
        TRANSPOSED=chunks.rows != (terms.gv is not None),
        SPLIT=segments is not None,
        PACKED=terms.cu_seqlens is not None,
        GROUPED=HR != HV or HX != HV,
        TMA=tiles is not None,
        PRECISION=fp32_dot_precision(),
        num_warps=tile.warps,
        # pointers take more shared memory: two programs then still fit a multiprocessor
        num_stages=min(tile.stages, 2) if tile.tma and tiles is None else tile.stages,
    )


def _squares(a: Tensor) -> Any:
    """A descriptor of [chunks * HV, C, C] by single squares."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    a = a.view(-1, *a.shape[2:])
    return TensorDescriptor(a, list(a.shape), list(a.stride()), [1, *map(int, a.shape[1:])])
