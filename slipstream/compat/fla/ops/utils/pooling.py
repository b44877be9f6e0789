"""fla.ops.utils.pooling: means of chunks."""

import torch
from torch import Tensor

from slipstream.compat.fla.ops.utils.index import prepare_chunk_indices
from slipstream.ops._fp32 import widen


def mean_pooling(
    x: Tensor, chunk_size: int, cu_seqlens: Tensor | None = None, *, head_first: bool = False
) -> Tensor:
    """Means of every chunk_size tokens: [B, T, H, D] -> [B, chunks, H, D]; no chunk crosses from
    one packed sequence into the next."""
    if head_first:
        raise NotImplementedError("head_first: transpose the inputs to [B, T, H, ...]")
    T = x.shape[1]
    if cu_seqlens is None:
        owner = torch.arange(T, device=x.device) // chunk_size
        chunks = -(-T // chunk_size)
    else:
        if x.shape[0] != 1:
            raise ValueError(f"x: packed sequences want batch size 1, got {x.shape[0]}")
        sequence, number = prepare_chunk_indices(cu_seqlens, chunk_size).long().unbind(1)
        begin = cu_seqlens[sequence] + number * chunk_size
        owner = torch.searchsorted(begin, torch.arange(T, device=x.device), right=True) - 1
        chunks = len(begin)
    wide = widen(x)
    total = wide.new_zeros(x.shape[0], chunks, *x.shape[2:]).index_add(1, owner, wide)
    count = owner.bincount(minlength=chunks).to(wide.dtype)
    return (total / count.view(-1, *[1] * (x.dim() - 2))).to(x.dtype)
