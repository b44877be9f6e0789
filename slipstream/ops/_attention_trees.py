"""Softmax attention over prefix trees (runtime/prefix_tree.py): a token sees its node's tokens up
to its own, and those of all ancestors.

Two calls of the kernels, whose sums are joined: of each node's queries on its own tokens, causal;
and of each inner node's descendants on its tokens, all of them. In the second a query comes once
for each ancestor, depth by depth:

    lse = log(exp(lse_own) + sum_j exp(lse_j))      o = exp(lse_own - lse) o_own + ...

Their gradients are those of the kernels for the joined o and lse. Where nodes are short the keys of
each one's path are copied instead, in forward and in backward, and there is one call. So it is with
a window, a gate, ALiBi, dropout, or the bits of a row by itself (consistent).
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention import dispatch, inputs, op
from slipstream.kernels.attention.inputs import Asked, AttentionInputs, AttentionOptions
from slipstream.kernels.attention.run import _checked_of_rank, run
from slipstream.runtime import autograd
from slipstream.runtime.consistent import consistent_scope
from slipstream.runtime.prefix_tree import PrefixTree
from slipstream.runtime.rows import Rows, flat
from slipstream.runtime.tree_keys import Above, above, copies_paths, paths


def run_in_tree(
    terms: AttentionInputs, options: AttentionOptions, asked: Asked, tree: PrefixTree
) -> inputs.Results:
    """As kernels/attention/run.py has it.

    Raises:
        ValueError: other offsets or lengths. NotImplementedError: not causal.
    """
    if torch.compiler.is_compiling():
        return tree.eagerly(run_in_tree, terms, options, asked, tree)
    terms = _checked_of_rank(terms, tree)
    tree.share(terms.q.shape[1])
    if _joins(terms, options, asked):
        return _joined(terms, options, asked, tree)
    return run(_with_paths(terms, options, asked, tree), options, asked)


def _joins(terms: AttentionInputs, options: AttentionOptions, asked: Asked) -> bool:
    """Whether a call is two, whose sums are joined."""
    if options.right != 0:
        raise NotImplementedError("parents: want causal attention")
    same_bits = asked.consistent or consistent_scope.on or asked.impl == "reference"
    extras = terms.g is not None or terms.slopes is not None or terms.seed is not None
    empty = 0 in terms.q.shape or 0 in terms.v.shape
    return not (same_bits or extras or empty or asked.nothing or options.left >= 0)


def _joined(
    terms: AttentionInputs, options: AttentionOptions, asked: Asked, tree: PrefixTree
) -> inputs.Results:
    """o and lse of a call that `_joins`; terms.cu_q: the tree's offsets."""
    inputs.check(terms, options)
    terms = inputs.with_autocast(terms)
    call = options, asked.impl, tree
    if autograd.needs_autograd(*terms[:3], terms.sinks):
        o, lse = _Joined.apply(call, *terms)
    else:
        o, lse = _forward(call, terms)
    return o, lse if asked.lse else None


_Call = tuple[AttentionOptions, str | None, PrefixTree]


def _forward(call: _Call, terms: AttentionInputs) -> tuple[Tensor, Tensor]:
    options, impl, tree = call
    if copies_paths(tree):
        terms, _ = _of_paths(terms, tree)
    forward, _ = dispatch.plan_across_ranks(terms, options, impl)
    o, lse = op.call_forward(*terms, *options, forward)
    more = None if copies_paths(tree) else above(tree, terms.q.device)
    if more is None:
        return o, lse
    second, options = _second(terms, options, more)
    forward, _ = dispatch.plan_across_ranks(second, options, impl)
    o_above, lse_above = op.call_forward(*second, *options, forward)
    wide, begin = o.to(lse.dtype), 0
    for count in more.counts:
        rows, begin = slice(begin, begin + count), begin + count
        at = more.q.index_on(o.device)[rows]
        sums = torch.logaddexp(before := lse[:, :, at], lse_above[:, :, rows])
        lower = (before - sums).exp().mT[..., None] * wide[:, at]
        upper = (lse_above[:, :, rows] - sums).exp().mT[..., None] * o_above[:, rows]
        wide[:, at], lse[:, :, at] = lower + upper, sums
    return wide.to(o.dtype), lse


def _second(
    terms: AttentionInputs, options: AttentionOptions, more: Above
) -> tuple[AttentionInputs, AttentionOptions]:
    pairs = (more.q, terms.q), (more.k, terms.k), (more.k, terms.v)
    q, k, v = (rows.taken(x.flatten(0, 1))[None] for rows, x in pairs)
    return AttentionInputs(q, k, v, cu_q=more.cu_q, cu_k=more.cu_k), options._replace(right=-1)


def _of_paths(terms: AttentionInputs, tree: PrefixTree) -> tuple[AttentionInputs, Rows]:
    """With the keys of each node's path, and their rows."""
    rows, offsets = paths(tree, None, terms.q.device)
    k, v = (rows.taken(x.flatten(0, 1))[None] for x in (terms.k, terms.v))
    return terms._replace(k=k, v=v, cu_k=offsets), rows


class _Joined(autograd.Function):
    operator = "slipstream::tree_softmax"

    @staticmethod
    def forward(ctx: Any, call: _Call, *args: Any) -> Any:
        o, lse = _forward(call, AttentionInputs(*args))
        autograd.save(ctx, *args, o, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, do: Tensor | None, dlse: Tensor | None) -> Any:
        *args, o, lse = saved
        terms, (options, impl, tree) = AttentionInputs(*args), ctx.call
        if do is None and dlse is None:
            return (None,) * (1 + len(args))
        more = rows = None
        if copies_paths(tree):
            terms, rows = _of_paths(terms, tree)
        else:
            more = above(tree, o.device)
        _, backward = dispatch.plan_across_ranks(terms, options, impl)
        dq, dk, dv, *dsinks = op.call_backward(*terms, o, lse, do, dlse, *options, backward)
        if rows is not None:
            dk, dv = (rows.returned(x[0], tree.tokens)[None] for x in (dk, dv))
        if more is not None:
            second, options = _second(terms, options, more)
            _, backward = dispatch.plan_across_ranks(second, options, impl)
            rows_o = [None if x is None else more.q.taken(x[0])[None] for x in (o, do)]
            heads = (None if x is None else more.q.taken(x[0].mT) for x in (lse, dlse))
            sums = [None if x is None else x.mT[None].contiguous() for x in heads]
            results = rows_o[0], sums[0], rows_o[1], sums[1]
            grads = op.call_backward(*second, *results, *options, backward)
            # in one order: of the row's own tokens, then depth by depth
            rows = more.q, more.k, more.k
            given = zip(rows, (dq, dk, dv), grads)
            dq, dk, dv = (to.added(x[0], flat(dx[0]))[None] for to, x, dx in given)
        rest = dsinks[0] if dsinks else None
        return None, dq, dk, dv, None, rest, *(None,) * (len(args) - 5)


def _with_paths(
    terms: AttentionInputs, options: AttentionOptions, asked: Asked, tree: PrefixTree
) -> AttentionInputs:
    """Each node's queries, and as keys those of its path, or of what a window leaves of it."""
    # with the bits of a row by itself keys are in the tiles that they have there
    whole = options.left < 0 or asked.consistent or consistent_scope.on
    rows, offsets = paths(tree, None if whole else options.left, terms.q.device)

    def of_paths(x: Tensor | None) -> Tensor | None:
        return None if x is None else rows.copy(x.flatten(0, 1))[None]

    k, v = of_paths(terms.k), of_paths(terms.v)
    assert k is not None and v is not None
    return terms._replace(k=k, v=v, g=of_paths(terms.g), cu_k=offsets)
