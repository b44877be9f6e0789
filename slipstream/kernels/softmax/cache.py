"""Caches of keys and values, in rows or in pages: where a sequence's keys lie, in plain torch.

Key j of sequence n is at k[rows[n], leftpad[n] + j], or in pages at
k[table[n, j // P], j % P] with pages of P keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.softmax.terms import Terms


class Cache(NamedTuple):
    """Queries [B, T] of B sequences, the last on its sequence's last key."""

    q: Tensor  # [B, T, H, D]
    k: Tensor  # [N, S, HKV, D], or pages [M, P, HKV, D]
    v: Tensor  # [N, S, HKV, DV], or pages [M, P, HKV, DV]
    lengths: Tensor | None = None  # [B], keys in use, leftpad counted
    rows: Tensor | None = None  # [B], the row of k; None is 0 .. B - 1
    leftpad: Tensor | None = None  # [B]
    table: Tensor | None = None  # [B, pages]
    sinks: Tensor | None = None  # [H]
    slopes: Tensor | None = None  # [H] or [B, H]

    @property
    def room(self) -> int:
        """How many keys a sequence may have."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])


def gathered(call: Cache) -> Terms:
    """The same as terms: a copy of the keys if they are not in order."""
    k, v, lengths = call.k, call.v, call.lengths
    B = call.q.shape[0]
    if call.table is not None:
        pages = call.table.long().clamp(0, k.shape[0] - 1)
        k, v = (x[pages].flatten(1, 2) for x in (k, v))
    elif call.rows is not None:
        k, v = (x[call.rows.long()] for x in (k, v))
    else:
        k, v = k[:B], v[:B]
    if call.leftpad is not None:
        pad = call.leftpad.long()
        at = (torch.arange(k.shape[1], device=k.device) + pad[:, None]).clamp(max=k.shape[1] - 1)
        row = torch.arange(B, device=k.device)[:, None]
        k, v = k[row, at], v[row, at]
        lengths = (torch.full_like(pad, call.room) if lengths is None else lengths) - pad
    return Terms(call.q, k, v, sinks=call.sinks, slopes=call.slopes, lengths=lengths)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
) -> None:
    """Writes k, v [B, T, HKV, ...] behind the `lengths` keys that there are."""
    B, T = k.shape[:2]
    row = torch.arange(B, device=k.device) if rows is None else rows.long()
    at = lengths.long()[:, None] + torch.arange(T, device=k.device)  # [B, T]
    size = k_cache.shape[1]
    room = size if table is None else size * table.shape[1]
    if k.device.type == "cpu" and int(at.max()) >= room:
        raise ValueError(
            f"cache_seqlens: {T} new keys want room, got {int(at.max()) + 1} of {room}"
        )
    if table is not None:
        row, at = table.long().gather(1, at // size), at % size
    else:
        row = row[:, None].expand_as(at)
    k_cache[row, at], v_cache[row, at] = k.to(k_cache.dtype), v.to(v_cache.dtype)
