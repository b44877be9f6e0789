"""Softmax attention as a formula, dense.

    o_t = sum_s p_ts v_s        p_ts = exp(scale q_t . k_s) / sum over visible s of the same

Symbols: B batch, T queries, S keys, H heads of q, HKV of k and v, D and DV widths, N sequences.
What a query sees: keys of its own sequence, at most `left` before it and `right` after it, where
positions count from the sequence's start and the last query stands on the last key (-1 is no
bound). A query that sees nothing has o = 0.
"""

import torch
from torch import Tensor


def attention_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """visible [B or 1, T, S] -> o [B, T, H, DV]."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    score = torch.einsum("bthd,bshd->bhts", q, k) * scale
    score = score.masked_fill(~visible[:, None], float("-inf"))
    top = score.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    p = (score - top).exp()
    p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return torch.einsum("bhts,bshd->bthd", p, v)


def visibility(
    q_position: Tensor, k_position: Tensor, window: tuple[int, int], k_length: Tensor | None
) -> Tensor:
    """q_position [..., T], k_position [S], k_length [..., 1, 1] of real keys -> [..., T, S]."""
    age = q_position[..., :, None] - k_position
    left, right = window
    seen = torch.ones_like(age, dtype=torch.bool)
    if left >= 0:
        seen = seen & (age <= left)
    if right >= 0:
        seen = seen & (age >= -right)
    return seen if k_length is None else seen & (k_position < k_length)
