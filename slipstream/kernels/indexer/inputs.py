"""What an indexer is called with, and the tiles of queries that its scores are computed in."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks, varlen


class Indexing(NamedTuple):
    """What an indexer is; T tokens, S keys of a sequence, NB blocks.

    q: [B, T, HI, D]. k: [B, S, D], or of blocks [B, NB, D] where pooled. weights: [B, T, HI].
    cu_seqlens: [N+1]. key_lengths: [B], S of each sequence; of packed ones [N], with k [N, S, D].
    block: keys a block. groups: lists of a query, each by HI / groups heads.
    """

    q: Tensor
    k: Tensor
    weights: Tensor | None
    cu_seqlens: Tensor | None
    key_lengths: Tensor | None
    block: int
    groups: int
    relu: bool
    pooled: bool
    causal: bool


class Tile(NamedTuple):
    """Of each tile [M]: its first row of q and how many, its sequence's first row of k, its first
    query's position, the sequence's keys, and its blocks or, unless pooled, its keys in k."""

    row: Any
    rows: Any
    key: Any
    position: Any
    keys: Any
    entries: Any


def packed_tiles(x: Indexing, rows: int) -> Tensor:
    """int32 [M, 6], the fields of Tile, of tiles of `rows` queries of packed sequences, without a
    sync; where M is a bound, the last ones have no queries."""
    assert x.cu_seqlens is not None
    offsets = varlen.bounded_offsets(x.cu_seqlens, x.q.shape[1])
    at, lengths = varlen.chunk_map(x.cu_seqlens, x.q.shape[1], rows), offsets.diff()
    n, first, S = at.sequence.clamp(max=len(offsets) - 2), at.token[:, 0], x.k.shape[1]
    cached, keys = x.key_lengths is not None, lengths
    if x.key_lengths is not None:
        keys = x.key_lengths.long().clamp(0, None if x.pooled else S)
    count = keys // x.block if x.pooled else keys
    begins = count.cumsum(0) - count if x.pooled else offsets[:-1]
    if cached:
        begins = torch.arange(len(keys), device=keys.device) * S
    count = count.clamp(max=S if cached else S - begins)
    before = keys - lengths - offsets[:-1]
    found = first, at.live.sum(1), begins[n], before[n] + first, keys[n], count[n]
    return torch.stack(found, 1).int()


def in_tiles(x: Indexing, wide: int, most: int = 1 << 24) -> Iterator[tuple[Tile, Tensor, Tensor]]:
    """Tiles on the host, their queries' positions [rows], and how many blocks these see, the first
    ones, [rows]. wide: numbers that a query takes, of which `most` fit."""
    rows = max(min(most // max(checks.plain_int(wide), 1), 1024), 1)
    packed = [] if x.cu_seqlens is None else packed_tiles(x, rows).tolist()
    for t in _unpacked(x, rows) if x.cu_seqlens is None else (Tile(*values) for values in packed):
        at = t.position + torch.arange(t.rows, device=x.q.device)
        at = at if x.causal else 0 * at + t.keys - 1
        blocks = t.keys // x.block if x.pooled else (t.keys + x.block - 1) // x.block
        seen = (at + 1 if x.pooled else at + x.block).div(x.block, rounding_mode="floor")
        seen = seen.clamp(0, t.entries)
        seen = seen.minimum(blocks) if isinstance(blocks, Tensor) else seen.clamp(max=blocks)
        if t.rows:
            yield t, at, seen


def _unpacked(x: Indexing, rows: int) -> Iterator[Tile]:
    """Positions and keys are tensors where lengths are, which nothing waits for."""
    B, T, S = map(checks.plain_int, (*x.q.shape[:2], x.k.shape[1]))
    for b, begin in itertools.product(range(B), range(0, T, rows)):
        keys: Any = T if x.pooled else S
        if x.key_lengths is not None:
            keys = x.key_lengths[b].clamp(0, None if x.pooled else S)
        yield Tile(b * T + begin, min(T - begin, rows), b * S, keys - T + begin, keys, S)


def flat(x: Indexing) -> tuple[Tensor, Tensor, Tensor | None]:
    """q [B T, HI, D], k [rows, D] and weights [B T, HI], at least float32."""
    q, k = (checks.widen(y.flatten(0, 1)) for y in (x.q, x.k))
    return q, k, None if x.weights is None else x.weights.flatten(0, 1).to(q.dtype)
