"""The short convolution as a formula.

    y_t[d] = sum_{j=0..W-1} weight[d, j] x_{t-W+1+j}[d]        x before the start: initial_state

Symbols: B batch, T tokens, D channels, W taps, N sequences. A state holds the last W inputs of its
sequence, oldest first; the oldest is not read again, it is kept because the field's caches have W.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_reference(
    x: Tensor, weight: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, D] and the final state [N, D, W], sequence by sequence."""
    if cu_seqlens is None:
        return _run(x, weight, initial_state)
    offsets = cu_seqlens.tolist()
    outputs = [
        _run(x[:, begin:end], weight, None if initial_state is None else initial_state[n : n + 1])
        for n, (begin, end) in enumerate(pairwise(offsets))
    ]
    if not outputs:
        return torch.zeros_like(x), x.new_zeros(0, *weight.shape)
    return torch.cat([y for y, _ in outputs], dim=1), torch.cat([state for _, state in outputs])


def _run(x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    width = weight.shape[1]
    if state is None:
        past = F.pad(x, (0, 0, width, 0))  # [B, W + T, D]
    else:
        past = torch.cat([state.mT, x], dim=1)
    y = correlate_reference(past[:, 1:], weight)
    return y, past[:, past.shape[1] - width :].mT


def correlate_reference(padded: Tensor, weight: Tensor) -> Tensor:
    """padded [B, R, D] with R >= W - 1, weight [D, W] -> [B, R - W + 1, D]."""
    width = weight.shape[1]
    rows = padded.shape[1] - width + 1
    y = padded[:, :rows] * weight[:, 0]
    for j in range(1, width):
        y = y + padded[:, j : j + rows] * weight[:, j]
    return y
