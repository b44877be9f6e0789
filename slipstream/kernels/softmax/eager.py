"""Softmax attention through torch's scaled_dot_product_attention.

Packed sequences: on the CPU one call a sequence, which wastes nothing; under torch.compile and on
other devices, where the offsets cannot be read, one call with a mask of who sees whom.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.softmax.reference import visibility

Window = tuple[int, int]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: Window,
    cu_seqlens: Tensor | None,
    key_lengths: Tensor | None,
) -> Tensor:
    """q [B, T, H, D]; k, v [B, S, HKV, ...], or packed as q, or [N, S, HKV, ...] for packed q."""
    if cu_seqlens is None:
        return dense(q, k, v, scale, window, key_lengths)
    if torch.compiler.is_compiling() or q.device.type != "cpu":
        return _packed_masked(q, k, v, scale, window, cu_seqlens, key_lengths)
    offsets = cu_seqlens.tolist()
    lengths = None if key_lengths is None else key_lengths.tolist()
    parts = []
    for n, (begin, end) in enumerate(pairwise(offsets)):
        if lengths is None:
            kn, vn = k[:, begin:end], v[:, begin:end]
        else:
            kn, vn = (x[n : n + 1, : lengths[n]] for x in (k, v))
        parts.append(dense(q[:, begin:end], kn, vn, scale, window, None))
    return torch.cat(parts, dim=1) if parts else q.new_zeros(*q.shape[:-1], v.shape[-1])


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: Window,
    key_lengths: Tensor | None,
) -> Tensor:
    tokens, keys = q.shape[1], k.shape[1]
    left, right = window
    if key_lengths is not None:
        length = key_lengths.long()[:, None]
        at = length - tokens + torch.arange(tokens, device=q.device)  # [B, T]
        seen = visibility(at, torch.arange(keys, device=q.device), window, length[..., None])
        return _sdpa(q, k, v, scale, seen[:, None], False)
    if left >= keys - 1:
        left = -1
    # the only query, standing on the last key, sees all that is left to it
    if left < 0 and (right < 0 or tokens == 1):
        return _sdpa(q, k, v, scale, None, False)
    if left < 0 and right == 0 and tokens == keys:
        return _sdpa(q, k, v, scale, None, True)
    at = torch.arange(keys - tokens, keys, device=q.device)
    seen = visibility(at, torch.arange(keys, device=q.device), (left, right), None)
    return _sdpa(q, k, v, scale, seen, False)


def _packed_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: Window,
    cu_seqlens: Tensor,
    key_lengths: Tensor | None,
) -> Tensor:
    begin = cu_seqlens.long()
    token = torch.arange(q.shape[1], device=q.device)
    sequence = torch.searchsorted(begin[1:], token, right=True)  # [T]
    if key_lengths is None:
        seen = visibility(token, token, window, None)
        return _sdpa(q, k, v, scale, seen & (sequence[:, None] == sequence), False)
    sequences, keys = k.shape[:2]
    length = key_lengths.long()[sequence]
    at = token - begin[1:][sequence] + length  # the last query stands on the last key
    slot = torch.arange(keys, device=q.device)
    own = torch.arange(sequences, device=q.device) == sequence[:, None]  # [T, N]
    seen = visibility(at, slot, window, length[:, None])  # [T, S]
    seen = (own[:, :, None] & seen[:, None]).flatten(1)
    return _sdpa(q, k.flatten(0, 1)[None], v.flatten(0, 1)[None], scale, seen, False)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # branched on, not passed on: under torch.compile torch refuses the symbolic comparison
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, **grouped
    )
    return o.transpose(1, 2)
