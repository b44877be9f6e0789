"""Launches of the walks with a decay per channel (chunk.py), for backend.py."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.launch import (
    Segments,
    family_of,
    split_into_segments,
    tma_descriptors,
)
from slipstream.kernels.linear.triton.scalar_decay.tiles import (
    ANCHOR_INTERVAL,
    Tile,
    segment_tokens,
)
from slipstream.kernels.linear.triton.vector_decay.chunk import (
    vector_decay_chunk_kernel,
    vector_decay_state_passing_kernel,
)
from slipstream.kernels.linear.triton.vector_decay.tiles import VectorDecayTile, choose_chunk_tile
from slipstream.runtime.backends import fp32_dot_precision
from slipstream.runtime.launch_cache import cached


class VectorDecayProblem(NamedTuple):
    """A call by the names of the kernels, where K is the side that decays."""

    q: Tensor | None  # [B, T, HK, K]; not needed for forward with gv
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HX, V]
    do: Tensor | None  # [B, T, HX, V]
    g: Tensor  # [B, T, HV, K]
    terms: LinearInputs
    tile: VectorDecayTile
    split: Segments | None

    @property
    def chunks(self) -> int:
        """At most (delta_solve.find_chunk)."""
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


class GateSums(NamedTuple):
    """What the dq and the dk walk leave for dg, by the names of chunk.py."""

    sums: Tensor
    z: Tensor
    anchors: Tensor


@cache
def _chunk_tile(device: torch.device, D: int, X: int, bytes_each: int, C: int) -> tuple[Tile, int]:
    return choose_chunk_tile(
        "interpreter" if INTERPRETED else family_of(device), D, X, bytes_each, C
    )


def choose_segments(work: VectorDecayProblem) -> Segments | None:
    """Decided by shapes alone."""
    B, T, HV, K = work.g.shape
    V = work.v.shape[-1]
    tile, _ = _chunk_tile(work.k.device, K, V, work.k.element_size(), work.tile.C)
    packed = work.terms.cu_seqlens is not None
    programs = -(-V // tile.BX) * HV * (1 if packed else B)
    return split_into_segments(work.terms, segment_tokens(programs, T, work.tile.C))


def scalar_args(work: VectorDecayProblem) -> tuple[int, int, int]:
    return work.k.shape[1], work.terms.sequences, work.g.shape[2]


def entry_states(walk: ChunkLaunch, work: VectorDecayProblem, made: IntraChunk) -> ChunkLaunch:
    """The walk with the states that segments meet as s_in; fills s_out where there is one."""
    split, terms = work.split, work.terms
    assert split is not None
    HV, K = work.g.shape[2:]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": work.k.device}
    states = torch.empty(split.slots, *terms.state_shape[1:], **wide)
    total = torch.empty(split.slots, HV, K, **wide)
    r, w, x, rest = walk[:4]
    ends = ChunkLaunch(r, w, x, rest, s_out=states, total=total, reverse=walk.reverse)
    launch(ends, work, made)
    size, block = states[0, 0].numel(), 1024
    cached(vector_decay_state_passing_kernel)[-(-size // block) * HV * terms.sequences,](
        states,
        total,
        walk.s_in,
        walk.s_out,
        terms.cu_seqlens,
        walk.scale_in,
        walk.scale_out,
        *scalar_args(work),
        split.tokens,
        D=K,
        SIZE=size,
        BLOCK=block,
        REVERSE=walk.reverse,
        TRANSPOSED=terms.gv is not None,
        PACKED=terms.cu_seqlens is not None,
        num_warps=4,
    )
    return walk._replace(s_in=states, scale_in=1.0)


def gate_sums(work: VectorDecayProblem) -> GateSums:
    B, T, HV, K = work.g.shape
    V, span, split = work.v.shape[-1], ANCHOR_INTERVAL * work.tile.C, work.split
    if split is not None:
        spans = split.slots * -(-split.tokens // span)
    else:
        packed = work.terms.cu_seqlens is not None
        spans = T // span + work.terms.sequences if packed else B * -(-T // span)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": work.k.device}
    sums, z = (torch.empty(work.chunks, HV, K, **wide) for _ in range(2))
    return GateSums(sums, z, torch.empty(spans, HV, K, V, **wide))


def launch(
    walk: ChunkLaunch, work: VectorDecayProblem, made: IntraChunk, sums: GateSums | None = None
) -> None:
    r, w, x, y, terms, split = walk.r, walk.w, walk.x, walk.y, work.terms, work.split
    T, N, HV = scalar_args(work)
    HR, HX, D, X, C = r.shape[2], x.shape[2], r.shape[-1], x.shape[-1], work.tile.C
    tile, BD = _chunk_tile(x.device, D, X, x.element_size(), C)
    rows: list[Any] = [r, w, x, walk.rest, y, walk.other]
    a, tiles = walk.a, None
    if tile.tma and terms.cu_seqlens is None:
        ke = tile.BX if walk.rows else BD
        tiles = tma_descriptors(rows, [BD, BD, tile.BX, ke, tile.BX, tile.BX], C)
        if tiles is not None and a is not None:
            a = _squares(a)
    r, w, x, rest, y, other = tiles or rows
    cached(vector_decay_chunk_kernel)[
        -(-X // tile.BX) * HV * (N if split is None else split.slots),
    ](
        r,
        w,
        x,
        rest,
        y,
        a,
        made.decay,
        walk.s_in,
        walk.s_out,
        walk.total,
        other,
        *((sums.sums, sums.z if walk.reverse else None, sums.anchors) if sums else (None,) * 3),
        terms.cu_seqlens,
        walk.scale,
        walk.scale_in,
        walk.scale_out,
        T,
        N,
        HV,
        HR,
        HX,
        T if split is None else split.tokens,
        D=D,
        X=X,
        BD=BD,
        BX=tile.BX,
        C=C,
        SPAN=ANCHOR_INTERVAL,
        REVERSE=walk.reverse,
        ROWS=walk.rows,
        TRANSPOSED=walk.rows != (terms.gv is not None),
        SPLIT=split is not None,
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
    return TensorDescriptor(a, list(a.shape), list(a.stride()), [1, *a.shape[1:]])
