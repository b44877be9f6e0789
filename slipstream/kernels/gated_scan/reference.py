"""The oracle of the scan: its recurrence token by token.

    h_t = exp(g_t) h_{t-1} + x_t

Plain differentiable torch in float32, or float64 for float64 inputs. Cost: T steps of O(B D).
Symbols: B batch, T tokens, D channels, N sequences.
"""

from itertools import pairwise

import torch
from torch import Tensor

from slipstream.common.varlen import check_cu_seqlens_values


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic and the state: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def scan_reference(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns h [B, T, D] in x's dtype and the final state [N, D]."""
    if cu_seqlens is None:
        h, final = _run(x, g, initial_state)
        return h.to(x.dtype), final
    check_cu_seqlens_values(cu_seqlens, x.shape[1])
    offsets = cu_seqlens.tolist()
    outputs = [
        _run(
            x[:, begin:end],
            g[:, begin:end],
            None if initial_state is None else initial_state[n : n + 1],
        )
        for n, (begin, end) in enumerate(pairwise(offsets))
    ]
    if not outputs:
        return torch.empty_like(x), x.new_zeros(0, x.shape[2], dtype=compute_dtype(x))
    h = torch.cat([h for h, _ in outputs], dim=1).to(x.dtype)
    return h, torch.cat([final for _, final in outputs])


def _run(x: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(x)
    h = x.new_zeros(x.shape[0], x.shape[2], dtype=dtype) if state is None else state.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        h = g[:, t].to(dtype).exp() * h + x[:, t].to(dtype)
        outputs.append(h)
    return (torch.stack(outputs, dim=1) if outputs else x.to(dtype)), h
