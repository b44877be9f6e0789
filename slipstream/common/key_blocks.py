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
