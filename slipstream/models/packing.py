"""Padded batches and packed ones: where the tokens lie.

Layers know one kind of raggedness: sequences packed one after another in a batch of one, with
offsets cu_seqlens [N+1]. A padded batch is turned into it and back.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Unpadded(NamedTuple):
    """index [total]: places of the real tokens in the flattened [B * T]; cu_seqlens [B+1]."""

    index: Tensor
    cu_seqlens: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [1, total, D]"""
        return x.flatten(0, 1)[self.index][None]

    def unpack(self, x: Tensor, batch: int, tokens: int) -> Tensor:
        """[1, total, D] -> [B, T, D], zeros at the padding"""
        y = x.new_zeros(batch * tokens, x.shape[-1])
        return y.index_copy(0, self.index, x[0]).view(batch, tokens, -1)


def unpadded(attention_mask: Tensor, batch: int, tokens: int) -> Unpadded | None:
    """Places of the last `tokens` columns' real tokens; None if all of them are."""
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch:
        raise ValueError(
            f"attention_mask: want shape ({batch}, tokens), got {tuple(attention_mask.shape)}"
        )
    if attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask: want at least the {tokens} columns of input_ids, "
            f"got {attention_mask.shape[1]}"
        )
    real = attention_mask[:, -tokens:].ne(0)
    if bool(real.all()):
        return None
    lengths = real.sum(1, dtype=torch.int32)
    return Unpadded(real.flatten().nonzero()[:, 0], offsets(lengths))


def packed_by_positions(position_ids: Tensor, batch: int, tokens: int) -> Tensor | None:
    """cu_seqlens of a batch of one whose position_ids fall back to 0; None if they do not."""
    if batch != 1 or position_ids.shape[-1] != tokens:
        return None
    start = position_ids.reshape(-1).eq(0)
    start[0] = True
    begin = start.nonzero()[:, 0].to(torch.int32)
    if begin.shape[0] == 1:
        return None
    return F.pad(begin, (0, 1), value=tokens)


def offsets(lengths: Tensor) -> Tensor:
    """Lengths [N] -> cu_seqlens [N+1]"""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
