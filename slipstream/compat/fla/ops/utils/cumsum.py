"""fla.ops.utils.cumsum: cumulative sums over tokens, of chunks or of whole sequences."""

import itertools
from typing import Any

import torch
from torch import Tensor

from slipstream.compat.fla.ops.utils.index import prepare_chunk_indices
from slipstream.ops._fp32 import widen


def chunk_global_cumsum(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
    **kwargs: Any,
) -> Tensor:
    """Cumulative sums over each sequence of s [B, T, H] or [B, T, H, D], times scale."""
    _check(s, cu_seqlens, kwargs)
    begin = None if cu_seqlens is None else cu_seqlens[:-1].long()
    return _cumsum(s, begin, reverse, scale, output_dtype)


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    use_graph: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Cumulative sums over each chunk of g [B, T, H] or [B, T, H, D], times scale."""
    _check(g, cu_seqlens, kwargs)
    if cu_seqlens is None:
        begin = torch.arange(0, g.shape[1], chunk_size, device=g.device)
    else:
        sequence, number = prepare_chunk_indices(cu_seqlens, chunk_size).long().unbind(1)
        begin = cu_seqlens[sequence] + number * chunk_size
    return _cumsum(g, begin, reverse, scale, output_dtype)


# fla has functions of their own for [B, T, H] and [B, T, H, D]
chunk_global_cumsum_scalar = chunk_global_cumsum_vector = chunk_global_cumsum
chunk_local_cumsum_scalar = chunk_local_cumsum_vector = chunk_local_cumsum


def _check(x: Tensor, cu_seqlens: Tensor | None, rest: dict[str, Any]) -> None:
    if rest.pop("head_first", False):
        raise NotImplementedError("head_first: transpose the inputs to [B, T, H, ...]")
    if rest:
        raise TypeError(f"unexpected keyword arguments: {', '.join(rest)}")
    if x.dim() not in (3, 4):
        raise ValueError(f"want [B, T, H] or [B, T, H, D], got shape {tuple(x.shape)}")
    if cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(f"cu_seqlens: packed sequences want batch size 1, got {x.shape[0]}")


def _cumsum(
    x: Tensor, begin: Tensor | None, reverse: bool, scale: float | None, dtype: torch.dtype | None
) -> Tensor:
    """Sums that start again at each of `begin`."""
    wide = widen(x)
    if begin is None:
        parts = [wide]
    else:
        # a difference of two sums over everything would lose the digits of the small ones
        ends = [*begin.tolist(), x.shape[1]]
        parts = list(wide.split([b - a for a, b in itertools.pairwise(ends)], dim=1))
    if reverse:
        sums = [part.flip(1).cumsum(1).flip(1) for part in parts]
    else:
        sums = [part.cumsum(1) for part in parts]
    y = torch.cat(sums, dim=1) if len(sums) != 1 else sums[0]
    return (y if scale is None else y * scale).to(dtype or x.dtype)
