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
    cu_seqlens: [N+1]. key_lengths: [B], S of each sequence.
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
    n, first, blocks = at.sequence.clamp(max=len(offsets) - 2), at.token[:, 0], lengths // x.block
    begins = (blocks.cumsum(0) - blocks if x.pooled else offsets[:-1])[n]
    count = (blocks if x.pooled else lengths)[n].minimum(x.k.shape[1] - begins)
    found = first, at.live.sum(1), begins, first - offsets[n], lengths[n], count
    return torch.stack(found, 1).int()


def in_tiles(x: Indexing, wide: int, most: int = 1 << 24) -> Iterator[tuple[Tile, Tensor, Tensor]]:
    """Tiles on the host, their queries' positions [rows], and how many blocks these see, the first
    ones, [rows]. wide: numbers that a query takes, of which `most` fit."""
    rows = max(min(most // max(wide, 1), 1024), 1)
    for t in _packed_on_host(x, rows) if x.cu_seqlens is not None else _unpacked(x, rows):
        at = t.position + torch.arange(t.rows, device=x.q.device)
        at = at if x.causal else torch.full_like(at, t.keys - 1)
        blocks = t.entries if x.pooled else -(-t.entries // x.block)
        seen = (at + 1 if x.pooled else at + x.block).div(x.block, rounding_mode="floor")
        if t.rows:
            yield t, at, seen.clamp(0, blocks)


def _packed_on_host(x: Indexing, rows: int) -> Iterator[Tile]:
    for values in packed_tiles(x, rows).tolist():
        yield Tile(*values)


def _unpacked(x: Indexing, rows: int) -> Iterator[Tile]:
    (B, T), S = x.q.shape[:2], x.k.shape[1]
    lengths = [T if x.pooled else S] * B if x.key_lengths is None else x.key_lengths.tolist()
    for b, begin in itertools.product(range(B), range(0, T, rows)):
        keys = max(lengths[b], 0) if x.pooled else min(max(lengths[b], 0), S)
        entries = min(keys // x.block, S) if x.pooled else keys
        yield Tile(b * T + begin, min(T - begin, rows), b * S, keys - T + begin, keys, entries)


def flat(x: Indexing) -> tuple[Tensor, Tensor, Tensor | None]:
    """q [B T, HI, D], k [rows, D] and weights [B T, HI], at least float32."""
    q, k = (checks.widen(y.flatten(0, 1)) for y in (x.q, x.k))
    return q, k, None if x.weights is None else x.weights.flatten(0, 1).to(q.dtype)


def blocks_of(
    tokens: int, block: int, cu_seqlens: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The first token of each complete block, [tokens // block], and its position in its sequence.
    Blocks of a sequence follow those of the one before; behind the last of all are others."""
    rows = torch.arange(tokens // block, device=device)
    if cu_seqlens is None:
        return rows * block, rows * block
    offsets = varlen.bounded_offsets(cu_seqlens, tokens)
    count = offsets.diff() // block
    ends = count.cumsum(0)
    n = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
    position = (rows - (ends - count)[n]) * block
    return (offsets[n] + position).clamp(max=tokens - block), position


def pooled_keys(k: Tensor, block: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """The means of blocks_of k [B, T, D], [B, T // block, D]: added up in float32 or wider."""
    first, _ = blocks_of(k.shape[1], block, cu_seqlens, k.device)
    if cu_seqlens is None:
        of = k[:, : len(first) * block].unflatten(1, (-1, block))
    else:
        of = k[:, first[:, None] + torch.arange(block, device=k.device)]
    return checks.widen(of).mean(2).to(k.dtype)
