"""The loss that trains an indexer: how far its softmax is from the attention that it selects for.

MATH.md has the formulas. A tile of queries at a time, whose gradients are made beside its value: no
more is kept than they are.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
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
    (B, T, H), groups = queries.shape[:3], x.groups
    leaves = flat(x)
    found = [torch.zeros_like(y) for y in leaves if grads and y is not None]
    main_q, main_k = (y.flatten(0, 1).to(leaves[0].dtype) for y in (queries, keys))
    total = leaves[0].new_zeros(())
    listed = 0 if selected is None else (selected.shape[-1] + 1) * x.block
    wide = (H + x.q.shape[2]) * T + listed * (H + keys.shape[2] * keys.shape[3])
    for t, at, seen in in_tiles(x, wide):
        rows = slice(t.row, t.row + t.rows)
        begin, last = t.row - t.position, t.position + t.rows if x.causal else t.keys
        entries = max(min(last // x.block, t.entries), 0) if x.pooled else last
        lists = None if selected is None else selected.flatten(0, 1)[rows]
        near = main_q[rows] * attention_scale, main_k[begin : begin + last]
        target, entry = _target(x, near, (at, seen), lists, entries)
        places = rows, slice(t.key, t.key + entries), rows
        own: Any = [None if y is None else y[n] for y, n in zip(leaves, places)]
        scores = op.scores_of(x, *own) * scale
        loss, dscores = _divergence(scores, target, entry)
        total += loss
        # by hand: what torch records is not wanted below autograd, where an operator is called
        for y, n, dy in zip(found, places, _gradients(x, dscores * scale, *own) if grads else ()):
            y[n] += dy
    rows = max(B * T * groups, 1)
    found = [(dy / rows).view(y.shape).to(y.dtype) for dy, y in zip(found, _given(*x[:3]))]
    return (total / rows, *found, *[total.new_empty(0)] * (3 - len(found)))


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [y for y in tensors if y is not None]


def _target(
    x: Indexing, near: tuple[Tensor, ...], places: tuple[Tensor, Tensor], lists: Any, entries: int
) -> tuple[Tensor, Tensor]:
    """The attention of a tile's queries [rows, H, DK] to the keys [S, HKV, DK], the mean over each
    list's heads, [groups, rows, N], 0 where there is no entry; and which of the indexer's entries
    these are, -1 where there is none. Entries are blocks where k is pooled, else keys."""
    (q, k), (at, seen), block = near, places, x.block
    HKV = k.shape[1]
    heads = q.unflatten(1, (HKV, -1))
    keys = torch.arange(len(k), device=q.device)
    if lists is None:
        scores = heads.permute(1, 2, 0, 3) @ k.permute(1, 2, 0)[:, None]
        scores = scores.masked_fill(keys > at[:, None], -torch.inf)
        p = scores.softmax(-1).flatten(0, 1).unflatten(0, (x.groups, -1)).mean(1)
        entry = keys.expand_as(p)
        if x.pooled:
            p = p[..., : entries * block].unflatten(-1, (-1, block)).sum(-1)
            entry = entry[..., :entries]
        bound = seen if x.pooled else at + 1
        entry = entry.masked_fill(entry >= bound[:, None], -1)
    else:
        within = torch.arange(block, device=q.device)
        bound = (seen if x.pooled else at // block + 1)[:, None, None]
        lists = lists.long().masked_fill(lists >= bound, -1).clamp(min=-1).sort(-1).values
        lists[..., 1:].masked_fill_(lists[..., 1:] == lists[..., :-1], -1)  # counts once
        token = torch.where(lists[..., None] < 0, -1, lists[..., None] * block + within).flatten(2)
        entry = lists
        if x.pooled:  # a query's open block is seen, and no entry
            tail = ((at + 1) // block * block)[:, None, None] + within
            token = torch.cat([token, tail.expand(-1, x.groups, -1)], -1)
        token = token.masked_fill(token > at[:, None, None], -1)
        entry = lists if x.pooled else token
        token = token.repeat_interleave(HKV // x.groups, 1)  # [rows, HKV, N]
        of = k[token.clamp(min=0), torch.arange(HKV, device=q.device)[:, None]]
        scores = (heads @ of.mT).masked_fill((token < 0)[:, :, None], -torch.inf)
        p = scores.softmax(-1).nan_to_num(0.0).mean(2).unflatten(1, (x.groups, -1)).mean(2)
        if x.pooled:
            p = p[..., :-block].unflatten(-1, (-1, block)).sum(-1)
        p, entry = p.transpose(0, 1), entry.transpose(0, 1)
    p = p.masked_fill(entry < 0, 0.0)
    return p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny), entry


def _divergence(scores: Tensor, target: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target || softmax of the scores [groups, rows, S] at the entries), the sum over rows, and
    its gradient to the scores."""
    none, at = entry < 0, entry.clamp(min=0)
    if not scores.shape[-1]:
        return target.new_zeros(()), scores
    # finite where a row has no entry at all
    logs = scores.gather(-1, at).masked_fill(none, torch.finfo(target.dtype).min).log_softmax(-1)
    loss = (torch.special.xlogy(target, target) - target * logs.masked_fill(none, 0.0)).sum()
    of_entries = (logs.exp() - target).masked_fill(none, 0.0)
    return loss, torch.zeros_like(scores).scatter_add_(-1, at, of_entries)


def _gradients(
    x: Indexing, dscores: Tensor, q: Tensor, k: Tensor, weights: Tensor | None
) -> list[Tensor]:
    """Of op.scores_of a tile, to q, k and, if there are any, weights."""
    raw = q.transpose(0, 1) @ k.mT  # [HI, rows, S]
    d = dscores.repeat_interleave(len(raw) // x.groups, 0)
    dweights = [] if weights is None else [(d * (raw.relu() if x.relu else raw)).sum(-1).mT]
    if weights is not None:
        d = d * weights.mT[..., None]
    if x.relu:
        d = d * (raw > 0)
    dk = d.flatten(0, 1).mT @ q.transpose(0, 1).flatten(0, 1)
    return [(d @ k).transpose(0, 1), dk, *dweights]


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
