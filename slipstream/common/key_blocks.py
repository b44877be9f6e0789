"""Blocks of keys, counted from the start of a sequence, in rows and in packed sequences."""

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


def rows_of_keys(
    selected: Tensor, lengths: Tensor, table: Tensor | None, sizes: torch.Size
) -> tuple[Tensor, Tensor]:
    """int32 [B T, N + 1], the rows of a cache at which the keys of each query's list [B, T, N] are,
    first those that it sees, in order and each once, and how many, [B T].

    lengths: [B]; the last query is on key lengths - 1. table: [B, pages]; a row of a page that is
    none is -1. sizes: of the cache [B, S], or [M, page].
    """
    (B, T, N), (rows, S) = selected.shape, sizes
    at = lengths[:, None] - T + torch.arange(T, device=selected.device)  # [B, T]
    none = torch.iinfo(torch.int32).max
    seen = (selected >= 0) & (selected <= at[..., None])
    key = selected.masked_fill(~seen, none).sort(-1).values
    once = key != none
    once[..., 1:] &= key[..., 1:] != key[..., :-1]
    to = torch.where(once, once.cumsum(-1) - 1, N)
    key = key.masked_fill(~once, 0)
    if table is None:
        row = key + torch.arange(B, device=key.device)[:, None, None] * S
    else:
        page = table.long().gather(1, (key.long() // S).flatten(1)).view(key.shape)
        row = torch.where((page < 0) | (page >= rows), -1, page * S + key % S)
    found = selected.new_zeros(B, T, N + 1).scatter_(-1, to, row.int())
    return found.flatten(0, 1), once.sum(-1).flatten()
