"""ops.index and ops.index_loss from their formulas, a query and a list at a time."""

import itertools
from typing import Any

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, weights: Tensor | None, groups: int, activation: str) -> Tensor:
    """[groups, T, S] of one sequence's q [T, HI, D] and k [S, D]."""
    x = torch.einsum("thd,sd->hts", q, k)
    x = x.relu() if activation == "relu" else x
    x = x if weights is None else x * weights.T[..., None]
    return x.unflatten(0, (groups, -1)).sum(1)


def _sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    key_lengths: Tensor | None,
    pool: str,
    block: int,
) -> list[tuple[int, slice, Tensor, int]]:
    """Row, tokens, keys or blocks, and how many keys there are, of each sequence."""
    found, T = [], q.shape[1]
    if cu_seqlens is None:
        for b in range(len(q)):
            keys = T if pool == "none" and block > 1 else k.shape[1]
            if key_lengths is not None:
                own = max(int(key_lengths[b]), 0)
                keys = own if pool == "none" else min(own, keys)
            rows = k[b] if pool == "none" else k[b, :keys]
            found.append((b, slice(0, T), rows, keys))
    else:
        at, offsets = 0, cu_seqlens.tolist()
        for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
            count = end - begin if key_lengths is None else max(int(key_lengths[n]), 0)
            if key_lengths is not None:
                count = count if pool == "none" and block > 1 else min(count, k.shape[1])
                rows = k[n] if pool == "none" else k[n, :count]
            else:
                rows = k[0, begin:end]
                if pool == "none":
                    rows = k[0, at : at + count // block]
            found.append((0, slice(begin, end), rows, count))
            at += count // block
    if pool == "mean":
        found = [
            (b, at, x[: n // block * block].unflatten(0, (n // block, block)).mean(1), n)
            for b, at, x, n in found
        ]
    return found


def index(
    q: Tensor, k: Tensor, weights: Tensor | None = None, *, topk: int, block: int = 1,
    groups: int = 1, local: int = 0, activation: str = "relu", pool: str = "max",
    causal: bool = True, cu_seqlens: Tensor | None = None, key_lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.full((*q.shape[:2], groups, topk), -1, dtype=torch.int32)
    for b, tokens, rows, keys in _sequences(q, k, cu_seqlens, key_lengths, pool, block):
        own = q[b, tokens]
        x = _scores(own, rows, None if weights is None else weights[b, tokens], groups, activation)
        for t in range(len(own)):
            p = keys - len(own) + t if causal else keys - 1
            blocks = max(p // block + 1 if pool == "max" else (p + 1) // block, 0)
            for g in range(groups):
                s = x[g, t, : p + 1] if pool == "max" else x[g, t, :blocks]
                each = s.split(block) if pool == "max" else s.split(1)
                best = [float(y.max()) for y in each[:blocks] if len(y)]
                order = sorted(range(blocks), key=lambda j: (j < blocks - local, -best[j], j))
                chosen = sorted(order[:topk])
                out[b, tokens.start + t, g, : len(chosen)] = torch.tensor(chosen)
    return out


def index_loss(
    q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, weights: Tensor | None = None, *,
    selected: Tensor | None = None, block: int = 1, groups: int = 1, activation: str = "relu",
    pool: str = "max", scale: float | None = None, attention_scale: float | None = None,
    causal: bool = True, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (B, T), heads = q.shape[:2], queries.shape[2] // groups
    own_scale: float = q.shape[-1] ** -0.5 if scale is None else scale
    factor = queries.shape[-1] ** -0.5 if attention_scale is None else attention_scale
    keys = keys.repeat_interleave(queries.shape[2] // keys.shape[2], 2)
    total: Any = (q.sum() + k.sum() + (0 if weights is None else weights.sum())) * 0
    for b, tokens, rows, count in _sequences(q, k, cu_seqlens, None, pool, block):
        own = q[b, tokens]
        x = _scores(own, rows, None if weights is None else weights[b, tokens], groups, activation)
        for t in range(len(own)):
            p = t if causal else count - 1
            of = torch.arange(p + 1)
            entry = of if pool == "max" else of // block
            complete = p + 1 if pool == "max" else (p + 1) // block
            for g in range(groups):
                seen, listed = torch.ones(p + 1, dtype=torch.bool), torch.arange(complete)
                if selected is not None:
                    chosen = selected[b, tokens.start + t, g]
                    seen = (of[:, None] // block == chosen).any(1)
                    seen = seen & (entry < complete) if pool != "max" else seen
                    listed = entry[seen].unique()
                    seen = seen | (entry >= complete)
                if not len(listed):
                    continue
                of_heads = slice(g * heads, (g + 1) * heads)
                a = torch.einsum(
                    "hd,shd->hs",
                    queries[b, tokens][t, of_heads],
                    keys[b, tokens][: p + 1, of_heads],
                )
                a = (a * factor).masked_fill(~seen, -torch.inf).softmax(-1).mean(0).detach()
                a = torch.zeros(p + 1, dtype=a.dtype).index_add(0, entry, a)[listed]
                a = a / a.sum()
                logs = (x[g, t, listed] * own_scale).log_softmax(-1)
                total = total + (torch.special.xlogy(a, a) - a * logs).sum()
    return total / max(B * T * groups, 1)
