"""The previous token: y_t = x_{t-1}, and at a sequence's first token its state."""

from itertools import pairwise

import torch
from torch import Tensor


def shift_reference(
    x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [B, T, D], state [N, D] -> y [B, T, D] and the last token of each sequence [N, D]."""
    if cu_seqlens is None:
        first = x.new_zeros(x.shape[0], x.shape[2]) if state is None else state
        past = torch.cat([first[:, None], x], dim=1)
        return past[:, :-1], past[:, -1]
    offsets = cu_seqlens.tolist()
    parts = [
        shift_reference(x[:, begin:end], None if state is None else state[n : n + 1], None)
        for n, (begin, end) in enumerate(pairwise(offsets))
    ]
    if not parts:
        return torch.zeros_like(x), x.new_zeros(0, x.shape[2])
    return torch.cat([y for y, _ in parts], dim=1), torch.cat([last for _, last in parts])


def shift(x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same without a look at the offsets' values."""
    if cu_seqlens is None or x.shape[1] == 0:
        return _dense(x, state, cu_seqlens)
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if state is None:
        state = x.new_zeros(begin.shape[0], x.shape[2])
    live = (end > begin)[:, None]
    last = torch.where(live, x[0].index_select(0, (end - 1).clamp(min=0)), state)
    # one more row takes what empty sequences would write
    moved = torch.cat([x[0, :1], x[0]])  # row t: token t - 1
    row = torch.where(live[:, 0], begin, x.shape[1])
    return moved.index_copy(0, row, state)[None, : x.shape[1]], last


def _dense(x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is None:
        state = x.new_zeros(sequences, x.shape[2])
    if x.shape[1] == 0:
        return x, state
    # a copy: a state that were a view would keep all of x alive
    return torch.cat([state[:, None], x[:, :-1]], dim=1), x[:, -1].clone()
