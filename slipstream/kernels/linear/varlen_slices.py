"""Packed sequences in slices of tokens, in plain torch: triton/varlen_slices.py, which says what it
is."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class VarlenSlices(NamedTuple):
    """As the kernels' Borders."""

    local: list[Tensor]
    crossing: Tensor

    def save_carry(self, states: Tensor, checkpoint: Tensor, i: int) -> None:
        checkpoint.copy_(states.index_select(0, self.crossing[i : i + 1]))

    def load_carry(self, entry: Tensor, begins: Tensor | None, checkpoints: Tensor, i: int) -> None:
        if i + 1 < len(self.local):
            n = self.crossing[i + 1 : i + 2]
            state = torch.zeros_like(entry[:1]) if begins is None else begins.index_select(0, n)
            entry.index_copy_(0, n, state.to(entry.dtype))
        if i > 0:
            entry.index_copy_(0, self.crossing[i : i + 1], checkpoints[i - 1])


def make_varlen_slices(cu_seqlens: Tensor, slices: Sequence[slice]) -> VarlenSlices:
    each, N = slices[0].stop - slices[0].start, cu_seqlens.shape[0] - 1
    lows = torch.arange(len(slices), device=cu_seqlens.device)[:, None] * each
    local = (cu_seqlens - lows).clamp(0, each).to(cu_seqlens.dtype)
    crossing = ((cu_seqlens <= lows).sum(1) - 1).clamp(0, N - 1)
    return VarlenSlices([*local], crossing)
