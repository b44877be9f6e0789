"""Blocks of keys, counted from the start of a sequence, in rows and in packed sequences."""

import math

import torch
from torch import Tensor

from slipstream.common import checks, varlen

SIZES = (1, 4, 16, 64, 128)
"""Of blocks, in keys."""


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
    first, _ = blocks_of(checks.plain_int(k.shape[1]), block, cu_seqlens, k.device)
    if cu_seqlens is None:
        of = k[:, : len(first) * block].unflatten(1, (-1, block))
    else:
        of = k[:, first[:, None] + torch.arange(block, device=k.device)]
    return checks.widen(of).mean(2).to(k.dtype)


def keys_of_blocks(selected: Tensor, block: int, at: Tensor | None) -> Tensor:
    """int32 [B, T, N block], the keys of lists of blocks [B, T, N], -1 for those of none; with
    positions [T] block - 1 more, those of the block that is open at each."""
    within = torch.arange(block, device=selected.device, dtype=torch.int32)
    key = torch.where(selected[..., None] < 0, -1, selected[..., None] * block + within).flatten(2)
    if at is None:
        return key.int()
    tail = ((at + 1) // block * block)[:, None] + within[:-1]
    tail = torch.where(tail <= at[:, None], tail, -1)
    return torch.cat([key, tail.expand(len(key), -1, -1)], -1).int()


def pieces_of_blocks(
    selected: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    sizes: torch.Size,
    block: int = 1,
    tail: bool = False,
) -> tuple[Tensor, Tensor, int]:
    """What each query's list [B, T, N] of blocks names in a cache, cut into pieces of P keys: int32
    [B T, pieces], first those that it sees, in order and each once, how many keys they have,
    [B T], and P.

    lengths: [B]; the last query is on key lengths - 1. table: [B, pages]; a piece of a page that is
    none is -1. sizes: of the cache [B, S], or [M, page]. tail: also the block that is open at a
    query, if it has keys.
    """
    (B, T, _), (rows, page) = selected.shape, sizes
    P = math.gcd(page, block)
    if table is None:
        table = torch.arange(B, device=selected.device)[:, None]
    at = lengths[:, None] - T + torch.arange(T, device=selected.device)  # [B, T]
    if tail:
        opened = ((at + 1).clamp(min=0) // block).to(selected.dtype)
        selected = torch.cat([selected, opened[..., None]], -1)
    N, none = selected.shape[2], torch.iinfo(torch.int32).max
    seen = (selected >= 0) & (selected <= at.div(block, rounding_mode="floor")[..., None])
    of = selected.masked_fill(~seen, none).sort(-1).values
    once = of != none
    once[..., 1:] &= of[..., 1:] != of[..., :-1]
    to, of = torch.where(once, once.cumsum(-1) - 1, N), of.masked_fill(~once, 0).long()
    # the last one may have keys behind the query's own
    last = of.amax(-1, keepdim=True) if N else of.new_zeros(B, T, 1)
    behind = (last * block + block - 1 - at[..., None]).clamp(min=0)
    count = (once.sum(-1, keepdim=True) * block - behind).clamp(min=0)
    piece = of[..., None] * (block // P) + torch.arange(block // P, device=of.device)
    column = (piece * P // page).clamp(max=table.shape[1] - 1)
    pages = table.long().gather(1, column.flatten(1)).view(piece.shape)
    row = torch.where((pages < 0) | (pages >= rows), -1, pages * (page // P) + piece % (page // P))
    into = to[..., None].expand(piece.shape)
    found = selected.new_zeros(*selected.shape[:2], N + 1, block // P)
    return found.scatter_(2, into, row.int()).flatten(2).flatten(0, 1), count.flatten(), P
