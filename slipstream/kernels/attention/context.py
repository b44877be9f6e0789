"""Softmax attention over several ranks, each with a part of the tokens: every rank computes some of
the heads, over all tokens.

Queries, keys and values go from parts of the tokens to parts of the heads, and o back. That is the
same work on every rank wherever sequences begin and end, the kernels are those of one rank, and so
are the bits. Heads go in groups, one after the other: beside what a rank has of its own there is
one group's share at a time. Its results go back as the next one's inputs come. Backward exchanges
all that it reads once more instead of keeping it.

Nothing is on its way while heads are computed. NCCL's kernels hold multiprocessors while they
wait for those of other ranks, and the backward, whose blocks of keys add in a fixed order, is as
slow as the slowest of its programs: two H100s take 229 ms so for 242 with messages beside heads.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention import dispatch, op
from slipstream.kernels.attention import inputs as arguments
from slipstream.runtime import autograd, context_exchange, context_parallel
from slipstream.runtime.context_parallel import ContextParallel, copied

# Rows of q a group has on a rank, at least: programs of 128 rows fill a GPU several times.
MIN_GROUP_ROWS = 1 << 16
# What a thread copies at once: 16 bytes.
WORD = torch.complex128


def across_ranks(
    inputs: arguments.AttentionInputs,
    options: arguments.AttentionOptions,
    impls: str,
    *,
    asked: arguments.Asked,
    context: ContextParallel,
    run: Callable[..., arguments.Results],
) -> arguments.Results:
    """This rank's queries and the keys of all ranks up to what the last query sees.

    Args:
        run: a call on one rank, of terms, options and asked.
    """
    q, k, slopes = inputs.q, inputs.k, inputs.slopes
    share, offsets = context.share(q.shape[1]), context.offsets_on(q.device)
    local = inputs._replace(cu_q=offsets, cu_k=offsets)
    if share.packed and slopes is not None and slopes.dim() == 2:
        mine = [slopes[n] for n in share.pieces]
        local = local._replace(slopes=torch.stack(mine) if mine else slopes[:0])
    if share.segment_tokens is None and not share.crossings.any:  # all sequences are whole
        return run(local, options, asked)
    copies = key_copies(q, k, share)
    if share.segment_tokens is not None and not copies:
        raise NotImplementedError(
            f"context: with segment_tokens ranks exchange heads; want heads of k that "
            f"{len(share.lengths)} ranks can share equally, got {k.shape[2]}"
        )
    if copies:
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 2) for x in (k, inputs.v))
            inputs = inputs._replace(k=k, v=v)
        offsets = context.whole_offsets_on(q.device)
        inputs = arguments.with_autocast(inputs._replace(cu_q=offsets, cu_k=offsets))
        return softmax_by_heads(inputs, options, asked.impl, share, asked.lse)
    begin, end = share.keys_of_pieces(to_the_end=options.right < 0)
    names = [name for name in "kvg" if getattr(inputs, name) is not None]
    whole = {name: share.gather_tokens(getattr(inputs, name)) for name in names}
    local = local._replace(**{name: x[:, begin:end] for name, x in whole.items()})
    if share.packed:
        last = [min(share.offsets[n + 1], end) - begin for n in share.pieces]
        cu_k = copied(torch.tensor([0, *last], dtype=torch.int32, device="cpu"), q.device)
        local = local._replace(cu_k=cu_k)
    o, lse = run(local, options, asked)
    return context_exchange.tie(o, *whole.values()), lse


def key_copies(q: Tensor, k: Tensor, share: context_parallel.Share) -> int:
    """How often each head of k and v goes out, so that every rank gets as many heads, each with the
    queries that see it; 0 where that cannot be. With fixed segments once: gradients of copies are
    added up, which one rank has no need of."""
    queries, keys, ranks = q.shape[2], k.shape[2], len(share.lengths)
    copies = ranks // gcd(keys, ranks)
    if keys == 0 or queries % (keys * copies):
        return 0
    return copies if copies == 1 or share.segment_tokens is None else 0


class _Call(NamedTuple):
    options: arguments.AttentionOptions
    impl: str | None
    share: context_parallel.Share
    wants_lse: bool


def softmax_by_heads(
    inputs: arguments.AttentionInputs,
    options: arguments.AttentionOptions,
    impl: str | None,
    share: context_parallel.Share,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """o of this rank's tokens in q's dtype and, if wanted, lse [B, H, T].

    Args:
        inputs: this rank's tokens, with the offsets of all ranks' sequences.
    """
    call = _Call(options, impl, share, wants_lse)
    if autograd.needs_autograd(*inputs):
        return _ByHeads.apply(call, *inputs)
    return _forward(inputs, call)[:2]


class _ByHeads(autograd.Function):
    operator = "slipstream::softmax"

    @staticmethod
    def forward(ctx: Any, call: _Call, *args: Any) -> tuple[Tensor, Tensor]:
        inputs = arguments.AttentionInputs(*args)
        o, lse, lse_groups = _forward(inputs, call)
        ctx.call = call
        ctx.set_materialize_grads(False)
        autograd.save(ctx, *args, o, *lse_groups)
        return o, lse

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, do: Tensor | None, dlse: Tensor | None) -> Any:
        count = len(arguments.AttentionInputs._fields)
        inputs, (o, *lse_groups) = arguments.AttentionInputs(*saved[:count]), saved[count:]
        # a rank whose loss does not depend on it takes part all the same
        do = torch.zeros_like(o) if do is None else do
        if not ctx.call.wants_lse:
            dlse = None
        elif dlse is None:
            B, T, H, _ = o.shape
            dlse = o.new_zeros(B, H, T, dtype=inputs.dtype)
        grads = _backward(inputs, ctx.call, o, lse_groups, do, dlse)
        return None, *(grads.get(name) for name in arguments.AttentionInputs._fields)


def _copy(target: Tensor, x: Tensor) -> None:
    """By words: torch copies rows of a strided tensor element by element, at half the speed."""
    if _has_words(target) and _has_words(x):
        target, x = target.view(WORD), x.view(WORD)
    target.copy_(x)


def _has_words(x: Tensor) -> bool:
    each = WORD.itemsize // x.element_size()
    sizes = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    aligned = x.data_ptr() % WORD.itemsize == 0 and all(n % each == 0 for n in sizes)
    return aligned and x.stride(-1) == 1 and not x.is_neg()


def _packed(x: Tensor) -> Tensor:
    if x.is_contiguous() and not x.is_neg():
        return x
    packed = x.new_empty(x.shape)
    _copy(packed, x)
    return packed


class _Exchange:
    """A message between parts of the tokens and this rank's heads, in one operation."""

    def __init__(
        self,
        share: context_parallel.Share,
        to_heads: list[Tensor | None],
        to_tokens: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """
        Args:
            to_heads: [B, tokens here, heads, width] of a group.
            to_tokens: x [B, all tokens, heads, width] and where it goes, a view [B, tokens here,
                heads * ranks, width].
        """
        self._whole: list[Tensor | None] = []
        self._strided: list[tuple[Tensor, Tensor]] = []
        sent, received, local, ranks = [], [], [], len(share.lengths)
        for x in to_heads:
            if x is None:
                self._whole.append(None)
                continue
            B, _, H, D = x.shape
            whole = x.new_empty(B, sum(share.lengths), H // ranks, D)
            by_rank, shares = x.unflatten(2, (ranks, H // ranks)), whole.split(share.lengths, 1)
            local.append((shares[share.rank], by_rank[:, :, share.rank]))
            for rank in share.others:
                sent.append((rank, _packed(by_rank[:, :, rank])))
                received.append((rank, self._dense(shares[rank])))
            self._whole.append(whole)
        for x, target in to_tokens:
            by_rank, shares = target.unflatten(2, (ranks, x.shape[2])), x.split(share.lengths, 1)
            local.append((by_rank[:, :, share.rank], shares[share.rank]))
            for rank in share.others:
                sent.append((rank, _packed(shares[rank])))
                received.append((rank, self._dense(by_rank[:, :, rank])))
        self._messages = share.start_messages(sent, received)
        for target, x in local:  # beside the messages
            _copy(target, x)

    def _dense(self, target: Tensor) -> Tensor:
        """Memory that a message is written to, and goes from to its target."""
        if target.is_contiguous():
            return target
        self._strided.append((target, target.new_empty(target.shape)))
        return self._strided[-1][1]

    def wait(self) -> list[Any]:
        """The result of each to_heads [B, all tokens, heads / ranks, width]; none is kept here."""
        self._messages.wait()
        for target, x in self._strided:
            _copy(target, x)
        whole, self._whole, self._strided = self._whole, [], []
        return whole


class _Group(NamedTuple):
    """Heads of k and v, and of q, whose exchange is one; `mine` are those that this rank computes.
    Slices of heads."""

    keys: slice
    queries: slice
    mine: slice


def _groups(inputs: arguments.AttentionInputs, share: context_parallel.Share) -> list[_Group]:
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


def _compute_groups(
    share: context_parallel.Share,
    groups: list[_Group],
    inputs_of: Callable[[_Group], list[Tensor | None]],
    compute: Callable[[_Group, list[Any]], list[tuple[Tensor, Tensor]]],
) -> None:
    """compute(group, received) of each group, whose results go back to parts of the tokens."""
    exchange = _Exchange(share, inputs_of(groups[0]))
    for group, after in zip(groups, [*groups[1:], None]):
        results = compute(group, exchange.wait())
        exchange = _Exchange(share, [] if after is None else inputs_of(after), results)
        del results  # before the next heads come
    exchange.wait()


def _of_heads(
    inputs: arguments.AttentionInputs, group: _Group, received: list[Any]
) -> arguments.AttentionInputs:
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


def _to_send(inputs: arguments.AttentionInputs, group: _Group) -> list[Tensor | None]:
    q, k, v, g = inputs[:4]
    queries = [q[:, :, group.queries], k[:, :, group.keys], v[:, :, group.keys]]
    return [*queries, None if g is None else g[:, :, group.queries, None]]


def _forward(inputs: arguments.AttentionInputs, call: _Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, lse or nothing, and lse of the heads that this rank has computed, by group."""
    share, groups = call.share, _groups(inputs, call.share)
    B, T, H, _ = inputs.q.shape
    o = inputs.q.new_empty(B, T, H, inputs.v.shape[-1])
    lse = o.new_empty((B, H, T) if call.wants_lse else 0, dtype=inputs.dtype)
    lse_groups = []

    def compute(group: _Group, received: list[Any]) -> list[tuple[Tensor, Tensor]]:
        inputs_of_heads = _of_heads(inputs, group, received)
        impls, _ = dispatch.plan_across_ranks(inputs_of_heads, call.options, call.impl)
        o_heads, lse_heads = op.call_forward(*inputs_of_heads, *call.options, impl=impls)
        lse_groups.append(lse_heads)
        results = [(o_heads, o[:, :, group.queries])]
        if call.wants_lse:
            results.append((lse_heads.mT[..., None], lse[:, group.queries].mT[..., None]))
        return results

    _compute_groups(share, groups, lambda x: _to_send(inputs, x), compute)
    return o, lse, lse_groups


def _backward(
    inputs: arguments.AttentionInputs,
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

    def inputs_of(group: _Group) -> list[Tensor | None]:
        of_lse = None if dlse is None else dlse[:, group.queries].mT[..., None]
        return [*_to_send(inputs, group), o[:, :, group.queries], do[:, :, group.queries], of_lse]

    every_lse = iter(lse_groups)

    def compute(group: _Group, received: list[Any]) -> list[tuple[Tensor, Tensor]]:
        mine = _gradients_of_group(inputs, call, group, next(every_lse), received)
        if inputs.sinks is not None:
            grads["sinks"][group.mine] = mine["sinks"]
        results = []
        for name in names:
            target = grads[name][:, :, group.keys if name in "kv" else group.queries]
            results.append((mine[name], target if name != "g" else target[..., None]))
        return results

    _compute_groups(share, groups, inputs_of, compute)
    return grads


def _gradients_of_group(
    inputs: arguments.AttentionInputs, call: _Call, group: _Group, lse: Tensor, received: list[Any]
) -> dict[str, Tensor]:
    """The gradients of this rank's heads, over all tokens; that of g as [B, T, H, 1]."""
    *sent, o, do, dlse = received
    inputs_of_heads = _of_heads(inputs, group, sent)
    _, impls = dispatch.plan_across_ranks(inputs_of_heads, call.options, call.impl)
    dlse = None if dlse is None else dlse[..., 0].mT.contiguous()
    args = *inputs_of_heads, o, lse, do, dlse, *call.options, impls
    results = iter(op.call_backward(*args))
    terms = [n for n in arguments.DIFFERENTIABLE if getattr(inputs_of_heads, n) is not None]
    grads = {n: next(results) for n in terms}
    if "g" in grads:
        grads["g"] = grads["g"][..., None]
    return grads
