"""From an attention call's arguments to its results: checks, choice, modes, call.

ops.attention ends here. A mode is an option that only transforms inputs and results.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from slipstream.common import checks
from slipstream.kernels.attention import context, dispatch, eager, reference
from slipstream.kernels.attention.inputs import (
    Asked,
    AttentionInputs,
    AttentionOptions,
    Results,
    check,
    each_sequence,
    in_compute_dtype,
    with_autocast,
)
from slipstream.kernels.attention.op import has_gradients, softmax
from slipstream.runtime import autograd, backends, consistent, token_ids
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.dispatch import ValidationCache, signature

# Pairs that exclude each other, and what the error says of the call's AttentionOptions.
FORBIDDEN = (
    ("consistent", "context", "consistent: is not implemented with a context"),
    ("consistent", "acausal", "consistent: want causal attention"),
    ("consistent", "dropout", "consistent: want dropout_p=0"),
    ("consistent", "reference", "consistent: is not implemented with impl='reference'"),
    ("consistent", "compiling", "consistent: is not implemented with torch.compile"),
    ("context", "dropout", "dropout_p: want 0 with a context, got {0.dropout}"),
    ("context", "later", "window_size: want no later keys with a context, got {0.right}"),
)
_PLANS = ValidationCache()


class Call(NamedTuple):
    """A call on its way through its modes; run: what is called with terms, options and impls."""

    terms: AttentionInputs
    options: AttentionOptions
    impls: str
    run: Callable[..., Results]
    asked: Asked
    context: ContextParallel | None


class Mode:
    def into(self, call: Call) -> Call:
        """The call as modes inside have it."""
        raise NotImplementedError

    def out(self, call: Call, o: Tensor, lse: Tensor | None) -> Results:
        """The results for the call that `into` got."""
        return o, lse


class Context(Mode):
    """Each rank has a part of the tokens: one or several calls of `run` without a context."""

    def into(self, call: Call) -> Call:
        how = {"asked": call.asked, "context": call.context, "run": run}
        return call._replace(run=partial(context.across_ranks, **how))


class Autocast(Mode):
    """q, k and v in autocast's dtype."""

    def into(self, call: Call) -> Call:
        return call._replace(terms=with_autocast(call.terms))


class PackedRows(Mode):
    """Queries [B, T] as B packed sequences, keys as they are: rows of few queries have kernels that
    cut the keys into shares (triton/decode_launch.py), whose sums depend on sizes."""

    def into(self, call: Call) -> Call:
        terms = call.terms
        (B, T), S, device = terms.q.shape[:2], terms.k.shape[1], terms.q.device
        lengths = terms.lengths
        if lengths is None:
            lengths = torch.full((B,), S, dtype=torch.int32, device=device)
        offsets = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)
        q = terms.q.reshape(1, B * T, *terms.q.shape[2:])
        return call._replace(terms=terms._replace(q=q, cu_q=offsets, lengths=lengths))

    def out(self, call: Call, o: Tensor, lse: Tensor | None) -> Results:
        assert lse is not None
        B, T = call.terms.q.shape[:2]
        return o.view(B, T, *o.shape[2:]), lse.view(o.shape[2], B, T).transpose(0, 1)


class OtherGradients(Mode):
    """The implementation has no gradient of such heads: others make it, where one is asked for."""

    def into(self, call: Call) -> Call:
        if not autograd.needs_autograd(*call.terms):
            return call
        impls = dispatch.gradient_impls(call.terms, call.options, call.asked.impl)
        return call._replace(run=partial(softmax, backward_impls=impls))


# From outside in.
MODES: tuple[Mode, ...] = (Context(), Autocast(), PackedRows(), OtherGradients())
CONTEXT, AUTOCAST, PACKED_ROWS, OTHER_GRADIENTS = MODES


class Plan(NamedTuple):
    """The back ends to try, what is called with them, and the modes, outside in."""

    impls: str
    run: Callable[..., Results]
    modes: tuple[Mode, ...] = ()


def run(
    terms: AttentionInputs,
    options: AttentionOptions,
    asked: Asked,
    context: ContextParallel | None = None,
) -> Results:
    """o [B, T, H, DV] in q's dtype and, if asked for, lse [B, H, T], float32 or float64."""
    if context is not None and is_compiling():
        # its exchanges are not traced
        return context.eagerly(run, terms, options, asked, context)
    plan = plan_of(terms, options, asked, context)
    if plan.modes:
        o, lse = _through_modes(Call(terms, options, plan.impls, plan.run, asked, context), plan)
    else:
        o, lse = plan.run(terms, options, plan.impls)
    return o, lse if asked.lse else None


def plan_of(
    terms: AttentionInputs,
    options: AttentionOptions,
    asked: Asked,
    context: ContextParallel | None = None,
) -> Plan:
    """The plan of a call, which is checked first."""
    # calls that several ranks are divided into see the scope for themselves
    same_bits = asked.consistent or (consistent.consistent_scope.on and context is None)
    alike, narrow = terms.cu_q is terms.cu_k, checks.autocast_dtype(terms.q)
    offsets = None if context is None else context.whole_offsets_on(terms.q.device)
    sequences = None if offsets is None else offsets.shape[0]
    key = signature(terms, options, asked, same_bits, alike, narrow, context is None, sequences)
    make = partial(make_plan, terms, options, asked, same_bits, context)
    plan = _PLANS.get(key, make, terms)
    if terms.cu_q is not None and not is_compiling():
        token_ids.expect_offsets("cu_seqlens", terms.cu_q, terms.q.shape[1])
        if terms.cu_k is not None and not alike:
            token_ids.expect_offsets("cu_seqlens_k", terms.cu_k, terms.k.shape[1])
    return plan


def _through_modes(call: Call, plan: Plan) -> Results:
    outside = []
    for mode in plan.modes:
        outside.append((mode, call))
        call = mode.into(call)
    o, lse = call.run(call.terms, call.options, call.impls)
    while outside:
        mode, call = outside.pop()
        o, lse = mode.out(call, o, lse)
    return o, lse


def make_plan(
    terms: AttentionInputs,
    options: AttentionOptions,
    asked: Asked,
    same_bits: bool,
    context: ContextParallel | None,
) -> Plan:
    """Checks and chooses, by shapes, dtypes and devices alone."""
    _expect_allowed(options, asked, same_bits, context is not None)
    if context is not None:
        terms = _checked_of_rank(terms, context)
    check(terms, options)
    narrow = with_autocast(terms)
    modes: set[Mode] = {AUTOCAST} if any(x is not y for x, y in zip(terms, narrow)) else set()
    terms = narrow
    if asked.nothing:
        return Plan("", _sees_nothing, (*modes,))
    if context is not None:
        return Plan("", softmax, (CONTEXT,))
    chosen = dispatch.plan_for(terms, options, asked.impl)
    call = _call_of(chosen.impl, terms, options, asked, same_bits)
    # softmax in kernels, or in plain torch with an operator's gradient
    if call is softmax:
        one_block = 0 < terms.q.shape[1] <= consistent.BLOCK
        if same_bits and one_block and terms.cu_q is None and terms.g is None:
            modes.add(PACKED_ROWS)
        if not has_gradients(chosen.impl, terms):
            modes.add(OTHER_GRADIENTS)
    return Plan(chosen.impls, call, tuple(x for x in MODES if x in modes))


def _call_of(
    impl: str, terms: AttentionInputs, options: AttentionOptions, asked: Asked, same_bits: bool
) -> Callable[..., Results]:
    """What computes a call."""
    if impl == "reference":
        return _by_reference
    if impl != "eager":
        return softmax
    if same_bits:
        return _by_blocks
    return _with_torch if not asked.lse and eager.torch_takes(terms, options) else softmax


def plan_of_rotated(terms: AttentionInputs, options: AttentionOptions) -> str | None:
    """Back ends to try, in order, for a call that applies a rotary embedding itself (rotary.py).

    None where no kernel takes the call, and for consistent calls.
    """
    if backends.is_fake(terms.q):
        return None
    plan = plan_of(terms, options, Asked())
    kernels = plan.run is softmax and not plan.modes and plan.impls != "eager"
    return plan.impls if kernels and not consistent.consistent_scope.on else None


def _expect_allowed(
    options: AttentionOptions, asked: Asked, same_bits: bool, on_ranks: bool
) -> None:
    """
    Raises:
        NotImplementedError: for a pair of FORBIDDEN.
    """
    states = {
        "consistent": same_bits,
        "context": on_ranks,
        "dropout": options.dropout,
        "acausal": options.right != 0,
        "later": options.right > 0,
        "reference": asked.impl == "reference",
        "compiling": is_compiling(),
    }
    for one, other, text in FORBIDDEN:
        if states[one] and states[other]:
            raise NotImplementedError(text.format(options))


def _checked_of_rank(terms: AttentionInputs, context: ContextParallel) -> AttentionInputs:
    """This rank's tokens with the offsets of all, for the checks."""
    tensors = {"cu_seqlens": terms.cu_q, "cu_seqlens_k": terms.cu_k, "key_lengths": terms.lengths}
    for name, x in tensors.items():
        if x is not None:
            raise ValueError(f"{name}: want None with a context, which has the offsets")
    for name, x in (("q", terms.q), ("k", terms.k), ("v", terms.v)):
        checks.expect_rank(name, x, 4, "[B, T, H, D]")
        checks.expect_shape(name, x, (*terms.q.shape[:2], *x.shape[2:]))
    offsets = context.whole_offsets_on(terms.q.device)
    return terms._replace(cu_q=offsets, cu_k=offsets)


def _by_reference(terms: AttentionInputs, options: AttentionOptions, impls: str) -> Results:
    o, lse = reference.softmax_reference(in_compute_dtype(terms), options)
    return o.to(terms.q.dtype), lse


def _with_torch(terms: AttentionInputs, options: AttentionOptions, impls: str) -> Results:
    return eager.with_torch(terms, options), None


def _sees_nothing(terms: AttentionInputs, options: AttentionOptions, impls: str) -> Results:
    """o and lse where no query sees a key; gradients are zeros."""
    q, v, sinks, wide = terms.q, terms.v, terms.sinks, terms.dtype
    B, T, H, _ = q.shape
    tensors = [x for x in terms[:4] if x is not None]
    zero: Any = sum(x.flatten()[:0].sum(dtype=wide) for x in tensors)
    o = (q.new_zeros(B, T, H, v.shape[-1], dtype=wide) + zero).to(q.dtype)
    if sinks is None:
        return o, q.new_full((B, H, T), -torch.inf, dtype=wide) + zero
    return o, sinks.to(wide)[:, None].expand(B, H, T) + zero


def _by_blocks(
    inputs: AttentionInputs, options: AttentionOptions, impls: str
) -> tuple[Tensor, Tensor]:
    """Causal attention in plain torch, 64 queries of one sequence at a time. Reads offsets and
    lengths.

    Block j has the queries at positions 64 j to 64 j + 63, and all keys up to there. What is
    missing of either is zeros, which no query sees. So the shapes of a call, and its bits, follow
    from where a query stands alone.

    Raises:
        NotImplementedError: a sequence has more queries than keys.
    """
    if 0 in inputs.q.shape or 0 in inputs.k.shape:
        return softmax(inputs, options, impls)
    results = [_of_sequence(sequence, options) for sequence, _ in each_sequence(inputs)]
    dims = (0, 0) if inputs.cu_q is None else (1, 2)
    o, lse = (torch.cat(x, dim) for x, dim in zip(zip(*results), dims))
    return o, lse


def _of_sequence(inputs: AttentionInputs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    T, S = inputs.q.shape[1], inputs.k.shape[1]
    if T > S:
        raise NotImplementedError(f"consistent: want as many keys as queries, got {S} for {T}")
    outputs, sums, begin = [], [], S - T
    while begin < S:
        first = begin // consistent.BLOCK * consistent.BLOCK
        end, after = min(first + consistent.BLOCK, S), first + consistent.BLOCK
        rows = slice(begin - first, end - first)
        block = inputs._replace(
            q=_padded(inputs.q[:, begin - (S - T) : end - (S - T)], begin - first, after - end),
            k=_padded(inputs.k[:, :end], 0, after - end),
            v=_padded(inputs.v[:, :end], 0, after - end),
            g=None if inputs.g is None else _padded(inputs.g[:, :end], 0, after - end),
        )
        o, lse = softmax(block, options, "eager")
        outputs.append(o[:, rows])
        sums.append(lse[:, :, rows])
        begin = end
    if not outputs:
        H, DV = inputs.q.shape[2], inputs.v.shape[-1]
        return inputs.q.new_empty(1, 0, H, DV), inputs.q.new_empty(1, H, 0, dtype=inputs.dtype)
    return torch.cat(outputs, 1), torch.cat(sums, 2)


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """A copy, so that it begins where any memory does."""
    if before == after == 0:
        return x.clone(memory_format=torch.contiguous_format)
    return F.pad(x, (0, 0) * (x.dim() - 2) + (before, after))
