"""The loss that trains an indexer: how far its softmax is from the attention that it selects for.

MATH.md has the formulas. A tile of queries at a time, whose gradients are made beside its value: no
more is kept than they are.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks, varlen
from slipstream.kernels.indexer import op
from slipstream.kernels.indexer.inputs import Indexing, flat, in_tiles
from slipstream.runtime import autograd, custom_op, token_ids


def index_loss(
    x: Indexing,
    attention: tuple[Tensor, Tensor],
    selected: Tensor | None,
    scales: tuple[float, float],
) -> Tensor:
    """A number. attention: queries [B, T, H, DK] and keys [B, T, HKV, DK]; selected: int32 [B, T,
    groups, N] or None for all; scales: of the indexer's scores and of the attention's."""
    if x.cu_seqlens is not None:
        token_ids.expect_offsets("cu_seqlens", x.cu_seqlens, x.q.shape[1])
    call = *x, *(y.detach() for y in attention), selected, *scales
    if autograd.needs_autograd(x.q, x.k, x.weights):
        return _Loss.apply(*call)
    return _loss_of(call, grads=False)[0]


def _loss_of(call: tuple[Any, ...], grads: bool) -> tuple[Tensor, ...]:
    tensors = [None if y is None else y.contiguous() for y in call[:5]]
    return _call(*tensors, **dict(zip(_call._names[5:], call[5:])), grads=grads)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    """The loss, and where asked for its gradients to q, k and weights, else empty ones."""
    x, (queries, keys, selected, scale, attention_scale, grads) = Indexing(*args[:10]), args[10:]
    leaves = q, k, weights = flat(x)
    found = [torch.zeros_like(y) for y in leaves if grads and y is not None]
    main_q, main_k = (y.flatten(0, 1).to(q.dtype) for y in (queries, keys))
    near, total = (main_q * attention_scale, main_k), q.new_zeros(())
    tiles = _all(x, near) if selected is None else _listed(x, near, selected.flatten(0, 1))
    for rows, at, target, none in tiles if len(k) else ():  # no entries: no block is complete
        own = q[rows], k[at], None if weights is None else weights[rows]
        products = _products(x, *own[:2])
        loss, dscores = _divergence(op.by_list(x, products, own[2]) * scale, target, none)
        total += loss
        # by hand: what torch records is not wanted below autograd, where an operator is called
        made = _gradients(x, dscores * scale, products, *own) if grads else ()
        for y, n, dy in zip(found, (rows, at, rows), made):
            if isinstance(n, slice):
                y[n] += dy
            else:  # rows of k in several lists
                y.index_put_((n,), dy, accumulate=True)
    count = max(len(q) * x.groups, 1)
    found = [(dy / count).view(y.shape).to(y.dtype) for dy, y in zip(found, _given(*x[:3]))]
    return (total / count, *found, *[total.new_empty(0)] * (3 - len(found)))


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [y for y in tensors if y is not None]


# Rows of q, the rows of k that are entries (a slice, or [rows, groups, N]), and the attention's
# share of each entry and which of these are none, both [groups, rows, N].
_Tile = tuple[slice, slice | Tensor, Tensor, Tensor]


def _all(x: Indexing, near: tuple[Tensor, Tensor]) -> Iterator[_Tile]:
    """Tiles of queries [B T, H, DK] that see all keys [B T, HKV, DK] up to theirs."""
    (queries, keys), block = near, x.block
    HKV = keys.shape[1]
    for t, at, seen in in_tiles(x, (queries.shape[1] + x.q.shape[2]) * x.q.shape[1]):
        rows = slice(t.row, t.row + t.rows)
        begin, last = t.row - t.position, t.position + t.rows if x.causal else t.keys
        entries = max(min(last // block, t.entries), 0) if x.pooled else last
        k, heads = keys[begin : begin + last], queries[rows].unflatten(1, (HKV, -1))
        place = torch.arange(last, device=k.device)
        scores = heads.permute(1, 2, 0, 3) @ k.permute(1, 2, 0)[:, None]
        p = scores.masked_fill(place > at[:, None], -torch.inf).softmax(-1)
        p = p.flatten(0, 1).unflatten(0, (x.groups, -1)).mean(1)
        if x.pooled:
            p = p[..., : entries * block].unflatten(-1, (-1, block)).sum(-1)
        none = place[:entries] >= (seen if x.pooled else at + 1)[:, None]
        yield rows, slice(t.key, t.key + entries), p, none.expand_as(p)


def _listed(x: Indexing, near: tuple[Tensor, Tensor], selected: Tensor) -> Iterator[_Tile]:
    """Tiles of queries that see the blocks of their lists [B T, groups, N]. What is at a list's
    entries alone is computed, so that nothing waits for packed sequences' lengths."""
    (queries, keys), block, groups = near, x.block, x.groups
    HKV, N = keys.shape[1], (selected.shape[-1] + x.pooled) * block
    within, heads = torch.arange(block, device=keys.device), torch.arange(HKV, device=keys.device)
    wide = N * (queries.shape[1] + HKV * keys.shape[2] + x.q.shape[2] + groups * x.q.shape[3])
    places = _places(x)
    for rows in _slices(len(queries), wide):
        first, at, begin, seen = (y[rows, None, None] for y in places)
        lists = selected[rows].long()
        lists = lists.masked_fill(lists >= seen, -1).clamp(min=-1).sort(-1).values
        lists[..., 1:].masked_fill_(lists[..., 1:] == lists[..., :-1], -1)  # counts once
        token = torch.where(lists[..., None] < 0, -1, lists[..., None] * block + within).flatten(2)
        if x.pooled:  # a query's open block is seen, and no entry
            tail = (at + 1) // block * block + within
            token = torch.cat([token, tail.expand(-1, groups, -1)], -1)
        token = token.masked_fill(token > at, -1)
        entry = lists if x.pooled else token
        token = token.repeat_interleave(HKV // groups, 1)  # [rows, HKV, N]
        k = keys[first + token.clamp(min=0), heads[:, None]]
        scores = queries[rows].unflatten(1, (HKV, -1)) @ k.mT
        p = scores.masked_fill((token < 0)[:, :, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        p = p.mean(2).unflatten(1, (groups, -1)).mean(2)
        if x.pooled:
            p = p[..., :-block].unflatten(-1, (-1, block)).sum(-1)
        yield rows, begin + entry.clamp(min=0), p.transpose(0, 1), (entry < 0).transpose(0, 1)


def _slices(rows: int, wide: int, most: int = 1 << 24) -> Iterator[slice]:
    step = max(min(most // max(checks.plain_int(wide), 1), 1024), 1)
    return (slice(n, n + step) for n in range(0, checks.plain_int(rows), step))


def _places(x: Indexing) -> tuple[Tensor, ...]:
    """Of each query [B T]: its sequence's first key, the last position that it sees, its sequence's
    first row of k, or any row if it has none, and how many blocks it sees."""
    B, T, S = map(checks.plain_int, (*x.q.shape[:2], x.k.shape[1]))
    row = torch.arange(B * T, device=x.q.device)
    if x.cu_seqlens is None:
        n = row.div(max(T, 1), rounding_mode="floor")
        first, length, begin = n * T, torch.full_like(row, T), n * S
    else:
        offsets = varlen.bounded_offsets(x.cu_seqlens, T)
        n = torch.searchsorted(offsets[1:], row, right=True).clamp(max=max(len(offsets) - 2, 0))
        first, length = offsets[n], offsets.diff()[n]
        blocks = offsets.diff().div(x.block, rounding_mode="floor")
        begin = (blocks.cumsum(0) - blocks)[n] if x.pooled else first
    at = row - first if x.causal else length - 1
    seen = (at + 1 if x.pooled else at + x.block).div(x.block, rounding_mode="floor")
    return first, at, begin.clamp(max=B * S - 1), seen.minimum(B * S - begin)


def _divergence(scores: Tensor, target: Tensor, none: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target's share of its sum || softmax of the scores), each [groups, rows, N], the sum over
    rows, and its gradient to the scores."""
    if not scores.shape[-1]:
        return target.new_zeros(()), scores
    target = target.masked_fill(none, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
    # finite where a row has no entry at all
    logs = scores.masked_fill(none, torch.finfo(target.dtype).min).log_softmax(-1)
    loss = (torch.special.xlogy(target, target) - target * logs.masked_fill(none, 0.0)).sum()
    return loss, (logs.exp() - target).masked_fill(none, 0.0)


def _products(x: Indexing, q: Tensor, k: Tensor) -> Tensor:
    """[HI, rows, N] of a tile's q [rows, HI, D] and k [N, D] or [rows, groups, N, D]."""
    if k.dim() == 2:
        return q.transpose(0, 1) @ k.mT
    return (q.unflatten(1, (x.groups, -1)) @ k.mT).flatten(1, 2).transpose(0, 1)


def _gradients(
    x: Indexing, dscores: Tensor, products: Tensor, q: Tensor, k: Tensor, weights: Tensor | None
) -> list[Tensor]:
    """Of op.by_list of _products of a tile, to q, k and, if there are any, weights."""
    d = dscores.repeat_interleave(len(products) // x.groups, 0)
    dweights = []
    if weights is not None:
        dweights = [(d * (products.relu() if x.relu else products)).sum(-1).mT]
        d = d * weights.mT[..., None]
    if x.relu:
        d = d * (products > 0)
    if k.dim() == 2:
        dk = d.flatten(0, 1).mT @ q.transpose(0, 1).flatten(0, 1)
        return [(d @ k).transpose(0, 1), dk, *dweights]
    d, q = (y.unflatten(1, (x.groups, -1)) for y in (d.transpose(0, 1), q))
    return [(d @ k).flatten(1, 2), d.mT @ q, *dweights]


def _fake(q: Tensor, k: Tensor, weights: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    grads = [y.new_empty(y.shape) for y in _given(q, k, weights) if args[-1]]
    loss = q.new_empty((), dtype=checks.wide_dtype(q))
    return (loss, *grads, *[loss.new_empty(0)] * (3 - len(grads)))


_call = custom_op.KernelOp(
    "index_loss",
    f"({custom_op.schema_of(Indexing)}, Tensor queries, Tensor keys, Tensor? selected, "
    "float scale, float attention_scale, bool grads) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)


class _Loss(autograd.Function):
    operator = "slipstream::index_loss"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        loss, *grads = _loss_of(args, grads=True)
        autograd.save(ctx, *grads)
        ctx.weighted, ctx.count = args[2] is not None, len(args)
        return loss

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dw = ((dy * dloss).to(dy.dtype) for dy in saved)
        return dq, dk, dw if ctx.weighted else None, *[None] * (ctx.count - 3)


_call.set_gradient(lambda *args: _Loss.apply(*args[:-1]))
