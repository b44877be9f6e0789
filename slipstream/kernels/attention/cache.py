"""Caches of keys and values, in rows or in pages: where a sequence's keys lie, in plain torch.

Key j of sequence n is at k[rows[n], leftpad[n] + j], or in pages at
k[table[n, j // P], j % P] with pages of P keys. A negative row or page is none: it has no keys, and
nothing is written into it; so is one past the cache, where the host cannot look.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import rounded_keys
from slipstream.kernels.attention.inputs import AttentionInputs
from slipstream.runtime.token_ids import expect_below


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
    k_scale: Tensor | None = None  # as k without D, of keys in 8 bits (common/rounded_keys.py)
    v_scale: Tensor | None = None

    @property
    def capacity(self) -> int:
        """How many keys a sequence may have."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])


def check_values(call: Cache, new: int = 0) -> None:
    """No index is past what there is, also after `new` keys have been written; on CUDA the next
    call raises. A negative one is no error: it says that there is none.

    Raises:
        ValueError: names the argument of flash_attn_with_kvcache.
    """
    k, capacity, rows = call.k, call.capacity, call.rows
    fits = f"lengths with room for {new} new keys"
    expect_below("cache_seqlens", call.lengths, capacity - new + 1, fits, rows=rows)
    expect_below("cache_leftpad", call.leftpad, capacity + 1, "keys of a row, and 1")
    expect_below("cache_batch_idx", rows, k.shape[0], "rows of k_cache")
    pages: dict[str, Any] = {"lengths": call.lengths, "more": new, "step": k.shape[1]}
    expect_below("block_table", call.table, k.shape[0], "pages of k_cache", **pages)


def _in_use(table: Tensor, lengths: Tensor, page: int) -> Tensor:
    first = torch.arange(table.shape[1], device=table.device) * page
    return first < lengths[:, None]


def missing_pages(table: Tensor, pages: int) -> Tensor:
    """Which entries are no page of the cache."""
    return (table < 0) | (table >= pages)


def hidden_keys(call: Cache) -> Tensor | None:
    """bool [B, S]: the keys of gathered(call) whose pages are missing."""
    if call.table is None:
        return None
    return missing_pages(call.table, call.k.shape[0]).repeat_interleave(call.k.shape[1], 1)


def present(call: Cache) -> Tensor:
    """The lengths, 0 for sequences that have keys in a page that is missing."""
    assert call.table is not None and call.lengths is not None
    missing = missing_pages(call.table, call.k.shape[0])
    lost = missing & _in_use(call.table, call.lengths, call.k.shape[1])
    return call.lengths.masked_fill(lost.any(1), 0)


def gather(call: Cache) -> AttentionInputs:
    """The same as terms: a copy of the keys if they are not in order, or in 8 bits."""
    lengths, size = call.lengths, call.k.shape[0]
    B = call.q.shape[0]
    keys = [x for x in (call.k, call.v, call.k_scale, call.v_scale) if x is not None]
    if call.table is not None:
        pages = call.table.long().masked_fill(missing_pages(call.table, size), 0)
        keys = [x[pages].flatten(1, 2) for x in keys]
    elif call.rows is not None:
        missing = (call.rows < 0) | (call.rows >= size)
        lengths = torch.full_like(call.rows, call.capacity) if lengths is None else lengths
        lengths = lengths.masked_fill(missing, 0)
        keys = [x[call.rows.long().masked_fill(missing, 0)] for x in keys]
    else:
        keys = [x[:B] for x in keys]
    if call.leftpad is not None:
        pad = call.leftpad.long().clamp(min=0)
        capacity, device = keys[0].shape[1], pad.device
        at = (torch.arange(capacity, device=device) + pad[:, None]).clamp(max=capacity - 1)
        row = torch.arange(B, device=device)[:, None]
        keys = [x[row, at] for x in keys]
        lengths = (torch.full_like(pad, call.capacity) if lengths is None else lengths) - pad
    k, v, *scales = keys
    if scales:
        k, v = (rounded_keys.decode(x, s, call.q.dtype) for x, s in zip((k, v), scales))
    return AttentionInputs(call.q, k, v, sinks=call.sinks, slopes=call.slopes, lengths=lengths)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    """Writes k, v [B, T, HKV, ...] behind the `lengths` keys that there are, and returns the
    lengths after that; a negative one stays, and nothing is written for it."""
    B, T = k.shape[:2]
    row = torch.arange(B, device=k.device) if rows is None else rows.long()
    row = row[:, None].expand(B, T)
    at = lengths.long()[:, None] + torch.arange(T, device=k.device)  # [B, T]
    if k.is_cpu and rows is None and table is None and int(lengths.min()) >= 0:
        # the usual case, where looking costs no wait; k and v may be parts of the caches
        k_cache[row, at], v_cache[row, at] = k.clone(), v.clone()
        return lengths + T
    size = k_cache.shape[1]
    capacity = size if table is None else size * table.shape[1]
    fits = (lengths >= 0)[:, None] & (at < capacity)
    if table is not None:
        row, at = table.long().gather(1, (at // size).clamp(0, table.shape[1] - 1)), at % size
    fits &= (row >= 0) & (row < k_cache.shape[0])
    row, at, k, v = row[fits], at[fits], k[fits], v[fits]
    k_cache[row, at], v_cache[row, at] = k, v
    return lengths_after(lengths, T)


def lengths_after(lengths: Tensor, tokens: int) -> Tensor:
    return torch.where(lengths < 0, lengths, lengths + tokens)
