"""Packed sequences in slices of tokens: where they lie in a slice, and the states at its borders.

A slice of `each` tokens from lo on is a packed call of its own: sequence n has the tokens from
clamp(cu[n] - lo, 0, each) on, and most have none. The sequence that crosses lo, the last one with
cu[n] <= lo, begins with the state that the slice before has left; all others begin with their own.
Only the device knows which one crosses, so that the state at a border is copied by its number.

In plain torch on any device: kernels for it gained 0.5% of a sliced call on an H100.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 4  # int32 of 16 bytes, where each slice's offsets begin: kernels are compiled for that


class VarlenSlices(NamedTuple):
    """
    Attributes:
        local: of each slice its offsets [N + 1].
        crossing: the sequence that crosses the border before each slice [slices].
    """

    local: list[Tensor]
    crossing: Tensor

    def save_carry(self, states: Tensor, checkpoint: Tensor, i: int) -> None:
        """checkpoint [1, HV, K, V] is written: what crosses into slice i, of states [N, ...]."""
        checkpoint.copy_(states.index_select(0, self.crossing[i : i + 1]))

    def load_carry(self, entry: Tensor, begins: Tensor | None, checkpoints: Tensor, i: int) -> None:
        """entry [N, HV, K, V], what slice i + 1 begins with, becomes what slice i does.

        The sequence that crosses into slice i + 1 begins again as all others do, unless it crosses
        into slice i too.

        Args:
            begins: what the sequences begin with, zeros if None.
            checkpoints: of save_carry, of all borders.
        """
        if i + 1 < len(self.local):
            n = self.crossing[i + 1 : i + 2]
            state = torch.zeros_like(entry[:1]) if begins is None else begins.index_select(0, n)
            entry.index_copy_(0, n, state.to(entry.dtype))
        if i > 0:
            entry.index_copy_(0, self.crossing[i : i + 1], checkpoints[i - 1])


def make_varlen_slices(cu_seqlens: Tensor, slices: Sequence[slice]) -> VarlenSlices:
    """slices: of as many tokens each, except for the last."""
    each, N = slices[0].stop - slices[0].start, cu_seqlens.shape[0] - 1
    lows = torch.arange(len(slices), device=cu_seqlens.device)[:, None] * each
    crossing = ((cu_seqlens <= lows).sum(1) - 1).clamp(0, N - 1)
    padded = F.pad(cu_seqlens, (0, -len(cu_seqlens) % ALIGNED))
    local = (padded - lows).clamp(0, each).to(torch.int32)
    return VarlenSlices([*local[:, : N + 1]], crossing)
