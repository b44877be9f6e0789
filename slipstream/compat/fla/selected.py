"""fla's attention to selected keys, on ops.attention and ops.index: NSA by given blocks, DSA."""

from typing import Any

import torch
from torch import Tensor

from slipstream.common import key_blocks
from slipstream.ops.attention import attention
from slipstream.ops.indexer import index


def parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """g_slc * attention to the blocks of block_indices + g_swa * attention to a window, with any
    number of heads a head of keys. A block counts once. The window's scale is K^-0.5, as fla's.

    Raises:
        NotImplementedError: g_cmp, or blocks of other than 1, 4, 16, 64 or 128 keys.
        ValueError: there are no block_indices, or a window has no g_swa.
    """
    if g_cmp is not None:
        raise NotImplementedError("g_cmp: attention to means of blocks is not implemented")
    if block_size not in key_blocks.SIZES:
        raise NotImplementedError(f"block_size: want one of {key_blocks.SIZES}, got {block_size}")
    if block_indices is None:
        raise ValueError("block_indices: want lists, which without g_cmp nothing selects")
    if window_size > 0 and g_swa is None:
        raise ValueError("g_swa: want a gate beside a window, got None")
    if isinstance(block_counts, Tensor):
        place = torch.arange(block_indices.shape[-1], device=block_indices.device)
        block_indices = block_indices.masked_fill(place >= block_counts[..., None], -1)
    packed: dict[str, Any] = {"cu_seqlens": cu_seqlens}
    if isinstance(cu_seqlens, tuple):
        packed = dict(zip(("cu_seqlens", "cu_seqlens_k"), cu_seqlens))
    selected = block_indices.int()
    o = attention(q, k, v, scale=scale, selected=selected, block=block_size, **packed)
    if g_slc is not None:
        o = o * g_slc[..., None]
    if window_size > 0 and g_swa is not None:
        o = o + attention(q, k, v, window_size=window_size, **packed) * g_swa[..., None]
    return o


def naive_dsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    w_idx: Tensor | None = None,
    indices: Tensor | None = None,
    topk: int = 2048,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to single keys, those of `indices` or the indexer's. It returns these in ascending
    order, of equal scores the earlier ones."""
    if indices is None:
        indices = index(q_idx, k_idx, w_idx, topk=topk, cu_seqlens=cu_seqlens)[:, :, 0].long()
    o = attention(q, k, v, scale=scale, selected=indices.int()[:, :, None], cu_seqlens=cu_seqlens)
    return (o, indices) if return_indices else o
