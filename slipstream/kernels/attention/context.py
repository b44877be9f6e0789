"""Softmax attention over several ranks, each with a part of the tokens: every rank computes some of
the heads, over all tokens.

Queries, keys and values go from parts of the tokens to parts of the heads, and o back. That is the
same work on every rank wherever sequences begin and end, the kernels are those of one rank, and so
are the bits. Heads go in groups, one after the other: beside what a rank has of its own there is
one group's share at a time and, where gradients are wanted, the exchanges of the next one's tensors
and of the outputs of the one before, which run meanwhile. Backward exchanges all that it reads once
more instead of keeping it.
"""

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention import op
from slipstream.kernels.attention.dispatch import plan_across_ranks
from slipstream.kernels.attention.inputs import DIFFERENTIABLE, AttentionInputs, AttentionOptions
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.context_exchange import wait
from slipstream.runtime.context_share import Share

# Rows of q a group has on a rank, at least: programs of 128 rows fill a GPU several times.
MIN_GROUP_ROWS = 1 << 16


def key_copies(q: Tensor, k: Tensor, share: Share) -> int:
    """How often each head of k and v goes out, so that every rank gets as many heads, each with the
    queries that see it; 0 where that cannot be. With fixed segments once: gradients of copies are
    added up, which one rank has no need of."""
    queries, keys, ranks = q.shape[2], k.shape[2], len(share.lengths)
    copies = ranks // gcd(keys, ranks)
    if keys == 0 or queries % (keys * copies):
        return 0
    return copies if copies == 1 or share.segment_tokens is None else 0


class _Call(NamedTuple):
    options: AttentionOptions
    impl: str | None
    share: Share
    wants_lse: bool


def softmax_by_heads(
    inputs: AttentionInputs,
    options: AttentionOptions,
    impl: str | None,
    share: Share,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """o of this rank's tokens in q's dtype and, if wanted, lse [B, H, T].

    Args:
        inputs: this rank's tokens, with the offsets of all ranks' sequences.
    """
    call = _Call(options, impl, share, wants_lse)
    if needs_autograd(*inputs):
        return _ByHeads.apply(call, *inputs)
    return _forward(inputs, call, False)[:2]


class _ByHeads(Function):
    operator = "slipstream::softmax"

    @staticmethod
    def forward(ctx: Any, call: _Call, *args: Any) -> tuple[Tensor, Tensor]:
        inputs = AttentionInputs(*args)
        o, lse, lse_groups = _forward(inputs, call, True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        save(ctx, *args, o, *lse_groups)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Any:
        count = len(AttentionInputs._fields)
        inputs, (o, *lse_groups) = AttentionInputs(*saved[:count]), saved[count:]
        # a rank whose loss does not depend on it takes part all the same
        do = torch.zeros_like(o) if do is None else do
        if not ctx.call.wants_lse:
            dlse = None
        elif dlse is None:
            B, T, H, _ = o.shape
            dlse = o.new_zeros(B, H, T, dtype=inputs.dtype)
        grads = _backward(inputs, ctx.call, o, lse_groups, do, dlse)
        return None, *(grads.get(name) for name in AttentionInputs._fields)


class _Heads:
    """What is on its way from parts of the tokens to this rank's heads."""

    def __init__(self, share: Share, *tensors: Tensor | None) -> None:
        """tensors: [B, tokens here, heads, width] of a group."""
        self._share = share
        self._received = [None if x is None else _start_to_heads(x, share) for x in tensors]

    def wait(self) -> list[Any]:
        """Each [B, all tokens, heads / ranks, width]."""
        return [None if x is None else _finish_to_heads(*x, self._share) for x in self._received]


def _start_to_heads(x: Tensor, share: Share) -> tuple[Tensor, tuple[int, ...]]:
    (B, T, H, D), ranks = x.shape, len(share.lengths)
    sent = x.reshape(B, T, ranks, H // ranks, D).permute(2, 0, 1, 3, 4).contiguous()
    each = B * (H // ranks) * D
    sizes = [n * each for n in share.lengths]
    received = share.start_exchange(sent.flatten(), sizes, [T * each] * ranks)
    return received, (B, H // ranks, D)


def _finish_to_heads(received: Tensor, size: tuple[int, ...], share: Share) -> Tensor:
    wait(received)
    B, H, D = size
    if B == 1:
        return received.view(1, -1, H, D)
    chunks = received.split([n * B * H * D for n in share.lengths])
    return torch.cat([x.view(B, n, H, D) for x, n in zip(chunks, share.lengths)], dim=1)


class _Tokens:
    """What is on its way back, from this rank's heads to parts of the tokens."""

    def __init__(self, x: Tensor, share: Share) -> None:
        """x: [B, all tokens, heads, width]"""
        (B, _, H, D), ranks = x.shape, len(share.lengths)
        sent = x.contiguous()
        if B > 1:
            sent = torch.cat([y.flatten() for y in x.split(share.lengths, dim=1)])
        T = share.lengths[share.rank]
        sizes = [n * B * H * D for n in share.lengths]
        self._received = share.start_exchange(sent.flatten(), [B * T * H * D] * ranks, sizes)
        self._size = ranks, B, T, H, D

    def wait(self) -> Tensor:
        """[B, tokens here, heads * ranks, width]"""
        ranks, B, T, H, D = self._size
        x = wait(self._received).view(self._size)
        return x.permute(1, 2, 0, 3, 4).reshape(B, T, ranks * H, D)


class _Group(NamedTuple):
    """Heads of k and v, and of q, whose exchange is one; `mine` are those that this rank computes.
    Slices of heads."""

    keys: slice
    queries: slice
    mine: slice


def _groups(inputs: AttentionInputs, share: Share) -> list[_Group]:
    """As few heads as fill a GPU; one of keys for equal bits whatever the number of ranks."""
    ranks, HKV = len(share.lengths), inputs.k.shape[2]
    share_of = inputs.q.shape[2] // HKV
    rows, of_rank = inputs.q.shape[0] * sum(share.lengths) * share_of, HKV // ranks
    min_rows = 1 if share.segment_tokens is not None else MIN_GROUP_ROWS
    each = next(
        n
        for n in range(1, of_rank + 1)
        if of_rank % n == 0 and (n * rows >= min_rows or n == of_rank)
    )
    groups = []
    for begin in range(0, HKV, each * ranks):
        keys, first = slice(begin, begin + each * ranks), begin + share.rank * each
        queries = slice(keys.start * share_of, keys.stop * share_of)
        groups.append(_Group(keys, queries, slice(first * share_of, (first + each) * share_of)))
    return groups


def _each(
    groups: list[_Group], send: Callable[[_Group], _Heads], ahead: bool
) -> Iterator[tuple[_Group, list[Any]]]:
    """Each group and its tensors; ahead: while those of the next are on their way."""
    if not ahead:
        for group in groups:
            yield group, send(group).wait()
        return
    heads = send(groups[0])
    for group, after in zip(groups, [*groups[1:], None]):
        following = None if after is None else send(after)
        yield group, heads.wait()
        if following is not None:
            heads = following


def _of_heads(inputs: AttentionInputs, group: _Group, received: list[Any]) -> AttentionInputs:
    """The call of one group's heads over all tokens."""
    q, k, v, g = received
    sinks, slopes = inputs.sinks, inputs.slopes
    return inputs._replace(
        q=q,
        k=k,
        v=v,
        g=None if g is None else g[..., 0].contiguous(),
        sinks=None if sinks is None else sinks[group.mine].contiguous(),
        slopes=None if slopes is None else slopes[..., group.mine].contiguous(),
    )


def _to_send(inputs: AttentionInputs, group: _Group) -> list[Tensor | None]:
    q, k, v, g = inputs[:4]
    queries = [q[:, :, group.queries], k[:, :, group.keys], v[:, :, group.keys]]
    return [*queries, None if g is None else g[:, :, group.queries, None]]


def _forward(
    inputs: AttentionInputs, call: _Call, ahead: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, lse or nothing, and lse of the heads that this rank has computed, by group.

    ahead: exchanges run beside the heads before and after. Without gradients they do not: it would
    be most of the memory beyond inputs and outputs.
    """
    share, groups = call.share, _groups(inputs, call.share)
    B, T, H, _ = inputs.q.shape
    o = inputs.q.new_empty(B, T, H, inputs.v.shape[-1])
    lse = o.new_empty((B, H, T) if call.wants_lse else 0, dtype=inputs.dtype)
    lse_groups = []

    def finish(group: _Group, o_tokens: _Tokens, lse_tokens: _Tokens | None) -> None:
        o[:, :, group.queries] = o_tokens.wait()
        if lse_tokens is not None:
            lse[:, group.queries] = lse_tokens.wait()[..., 0].mT

    waiting: list[tuple[_Group, _Tokens, _Tokens | None]] = []
    for group, received in _each(groups, lambda x: _Heads(share, *_to_send(inputs, x)), ahead):
        o_heads, lse_heads = _of_group(inputs, call, group, received)
        of_lse = _Tokens(lse_heads.mT[..., None], share) if call.wants_lse else None
        waiting.append((group, _Tokens(o_heads, share), of_lse))
        lse_groups.append(lse_heads)
        del received, o_heads  # before the next heads come
        if len(waiting) > ahead:
            finish(*waiting.pop(0))
    for each in waiting:
        finish(*each)
    return o, lse, lse_groups


def _of_group(
    inputs: AttentionInputs, call: _Call, group: _Group, received: list[Any]
) -> tuple[Tensor, Tensor]:
    """o and lse of this rank's heads, over all tokens."""
    inputs_of_heads = _of_heads(inputs, group, received)
    impls, _ = plan_across_ranks(inputs_of_heads, call.options, call.impl)
    return op.call_forward(*inputs_of_heads, *call.options, impls)


def _backward(
    inputs: AttentionInputs,
    call: _Call,
    o: Tensor,
    lse_groups: list[Tensor],
    do: Tensor,
    dlse: Tensor | None,
) -> dict[str, Tensor]:
    """By name; that of sinks is of this rank's heads."""
    share, groups = call.share, _groups(inputs, call.share)
    names = [n for n in ("q", "k", "v", "g") if getattr(inputs, n) is not None]
    grads = {n: torch.empty_like(getattr(inputs, n)) for n in names}
    if inputs.sinks is not None:
        grads["sinks"] = torch.zeros_like(inputs.sinks)

    def send(group: _Group) -> _Heads:
        of_lse = None if dlse is None else dlse[:, group.queries].mT[..., None]
        more = (o[:, :, group.queries], do[:, :, group.queries], of_lse)
        return _Heads(share, *_to_send(inputs, group), *more)

    for lse, (group, (*received, o_heads, do_heads, of_lse)) in zip(
        lse_groups, _each(groups, send, True)
    ):
        inputs_of_heads = _of_heads(inputs, group, received)
        _, impls = plan_across_ranks(inputs_of_heads, call.options, call.impl)
        dlse_heads = None if of_lse is None else of_lse[..., 0].mT.contiguous()
        args = *inputs_of_heads, o_heads, lse, do_heads, dlse_heads, *call.options, impls
        of_terms = iter(op.call_backward(*args))
        mine = {
            n: next(of_terms) for n in DIFFERENTIABLE if getattr(inputs_of_heads, n) is not None
        }
        mine |= {"g": mine["g"][..., None]} if "g" in mine else {}
        # each before the next, and all before the next heads: else these are more in memory
        for name in names:
            heads = group.keys if name in "kv" else group.queries
            x = _Tokens(mine[name], share).wait()
            grads[name][:, :, heads] = x if name != "g" else x[..., 0]
        if inputs.sinks is not None:
            grads["sinks"][group.mine] = mine["sinks"]
    return grads
