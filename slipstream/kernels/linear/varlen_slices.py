"""Packed sequences in spans of tokens, in plain torch: triton/varlen_slices.py, which says what it
is."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class VarlenSlices(NamedTuple):
    """As the kernels' Borders."""

    local: list[Tensor]
    crossing: Tensor

    def save_carry(self, states: Tensor, mark: Tensor, i: int) -> None:
        mark.copy_(states.index_select(0, self.crossing[i : i + 1]))

    def load_carry(self, met: Tensor, begins: Tensor | None, checkpoints: Tensor, i: int) -> None:
        if i + 1 < len(self.local):
            n = self.crossing[i + 1 : i + 2]
            state = torch.zeros_like(met[:1]) if begins is None else begins.index_select(0, n)
            met.index_copy_(0, n, state.to(met.dtype))
        if i > 0:
            met.index_copy_(0, self.crossing[i : i + 1], checkpoints[i - 1])


def make_varlen_slices(cu_seqlens: Tensor, spans: Sequence[slice]) -> VarlenSlices:
    each, N = spans[0].stop - spans[0].start, cu_seqlens.shape[0] - 1
    lows = torch.arange(len(spans), device=cu_seqlens.device)[:, None] * each
    local = (cu_seqlens - lows).clamp(0, each).to(cu_seqlens.dtype)
    crossing = ((cu_seqlens <= lows).sum(1) - 1).clamp(0, N - 1)
    return VarlenSlices([*local], crossing)
