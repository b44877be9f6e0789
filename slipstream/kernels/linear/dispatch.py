"""From an operator's arguments to the recurrence: checks, conventions, choice, call.

Every public function of the family ends here, so what is common to all of them is here once:
argument checks under the user's names, default scale, autocast, reversed time, V-first states.
"""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.common.checks import autocast_dtype
from slipstream.kernels.linear import prefix_states
from slipstream.kernels.linear.context import Call, linear_across_ranks
from slipstream.kernels.linear.inputs import MAX_HEAD_DIM, TERMS, LinearInputs
from slipstream.kernels.linear.modes.memory import Groups, in_groups
from slipstream.kernels.linear.modes.memory import groups_of as memory_groups_of
from slipstream.kernels.linear.op import (
    CONSISTENT,
    DEFAULT_CHUNK,
    Extras,
    Linear,
    call_forward,
    forward_impl,
    linear,
)
from slipstream.kernels.linear.prefix_states import NoKernel, PrefixStates
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.sm90.plan import SCALAR_DECAY_WIDTHS, is_vector_decay
from slipstream.kernels.linear.sm90.plan import unsupported_reason as sm90_unsupported
from slipstream.kernels.linear.triton.plan import unsupported_reason
from slipstream.kernels.linear.wide_heads import (
    HeadGroups,
    groups_of,
    join_heads,
    shapes_of_split,
    split_heads,
)
from slipstream.runtime.autograd import needs_autograd, wants_gradient
from slipstream.runtime.consistent import consistent, consistent_scope
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.custom_op import DirectCall
from slipstream.runtime.dispatch import (
    PLAIN,
    Candidate,
    Selection,
    ValidationCache,
    choose,
    signature,
)
from slipstream.runtime.prefix_scope import Prefixes, prefix_scope
from slipstream.runtime.token_ids import expect_offsets

CANDIDATES = (
    Candidate("sm90", "kernels for sm_90 and, around them, Triton's", sm90_unsupported),
    Candidate("triton", "Triton kernels, on CUDA", unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
    Candidate("reference", "token by token, the oracle of the tests", by_name_only=True),
)
# Of a rank, where what it runs must not depend on how many it has.
MANY_TOKENS = 1 << 16
_PLANS = ValidationCache()


class LinearOptions(NamedTuple):
    """The options of every operator of the family, besides its tensors."""

    scale: float | None = None
    output_final_state: bool = False
    state_v_first: bool = False
    reverse: bool = False
    chunk_size: int | None = None
    impl: str | None = None
    context: ContextParallel | None = None
    consistent: bool = False
    prefix_states: PrefixStates | None = None

    def scale_of(self, q: Tensor) -> float:
        """The factor on the output: K^-0.5 if none is given."""
        return float(max(q.shape[-1], 1) ** -0.5 if self.scale is None else self.scale)


def run(
    terms: LinearInputs,
    options: LinearOptions,
    *,
    recurrent: bool,
    names: Mapping[str, str] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs one operator.

    Args:
        terms: as the user gave them, except for initial_state, which may be V-first.
        names: how the user calls a term where that is not its name here.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] (or V-first) if asked for.
    """
    if options.state_v_first and terms.initial_state is not None:
        checks.expect_rank("initial_state", terms.initial_state, 4, "[N, HV, V, K]")
        terms = terms._replace(initial_state=terms.initial_state.transpose(-1, -2))
    same_bits = not recurrent and (options.consistent or consistent_scope.on)
    step = None
    if same_bits:
        _expect_consistent(options)
        step = consistent_scope.step
    if step is not None:
        terms = terms.with_tokens(step.blocks)
    if options.prefix_states is not None:
        _expect_prefix_states(options)
    if options.context is not None:
        given = terms, options, options.context, recurrent, names or {}
        return options.context.eagerly(_run_across_ranks, *given)
    key = signature(terms, options.chunk_size, options.impl, recurrent, same_bits)
    dtype = None
    if key is not None and terms.q is not None:
        dtype = autocast_dtype(terms.q)
        key = (*key, dtype)
    plan = _PLANS.get(key, lambda: _checked(terms, names or {}, options, recurrent, same_bits))
    if key is None or dtype is not None:
        terms = as_autocast(terms)
    if terms.cu_seqlens is not None and terms.cu_seqlens.is_cuda:  # plain torch looks on the CPU
        expect_offsets("cu_seqlens", terms.cu_seqlens, terms.q.shape[1])
    if options.reverse:
        terms = _reversed(terms)
    scale = options.scale_of(terms.q)
    chunk = 0 if recurrent else options.chunk_size or DEFAULT_CHUNK
    chunk = CONSISTENT if same_bits else chunk
    if prefix_scope.prefixes is not None and options.output_final_state:
        options = _leaving(prefix_scope.prefixes, terms, options)
    if options.prefix_states is not None:
        o, state = _with_prefix_states(terms, options, plan, scale, chunk)
    elif plan.impl == "reference":
        o, state = linear_reference(terms, scale)
    else:
        groups = None if plan.impl in PLAIN else plan.groups
        given = terms if groups is None else split_heads(terms, groups)
        arguments = scale, chunk, plan.impls, groups is not None and groups.rows > 1
        cut = None if plan.cuts is None else plan.cuts[wants_gradient(*given)]
        if cut is not None:
            o, state = in_groups(lambda group: linear(group, *arguments), given, given.dims, cut)
        elif needs_autograd(*given):
            o, state = Linear.apply(*arguments, *given)
        else:
            o, state = call_forward(*given, *arguments)
        if groups is not None:
            o, state = join_heads(o, state, terms, groups)
    if options.reverse:
        o, state = o.flip(1), state if terms.cu_seqlens is None else state.flip(0)
    if step is not None:
        o = step.token(o)
    if not options.output_final_state:
        return o, None
    return o, state.transpose(-1, -2) if options.state_v_first else state


def _forward_with_prefix_states(*args: Any) -> tuple[Any, ...]:
    """As call_forward, and pool and rows behind its arguments."""
    return forward_impl(*args[:-2], extras=Extras(prefix=PrefixStates(*args[-2:])))[:2]


_call_with_prefix_states = DirectCall(
    _forward_with_prefix_states, written={-2: "prefix_states.pool"}
)


def _with_prefix_states(
    terms: LinearInputs, options: LinearOptions, plan: "_Plan", scale: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """o and the final state, of a call that leaves states on its way."""
    assert options.prefix_states is not None
    prefix = prefix_states.check(options.prefix_states, terms)
    if plan.impl not in PLAIN and plan.groups is None and terms.gv is None:
        with suppress(NoKernel):
            o, state = _call_with_prefix_states(*terms, scale, chunk, plan.impls, *prefix)
            return o, state
    ends = {"output_final_state": True, "state_v_first": False, "prefix_states": None}
    call = partial(run, options=options._replace(**ends), recurrent=False)
    return prefix_states.by_calls(call, terms, prefix)


def _leaving(prefixes: Prefixes, terms: LinearInputs, options: LinearOptions) -> LinearOptions:
    """Options that leave a layer's states with the others of its model's call."""
    if not prefixes.are_of(terms.q):
        return options
    _, HV, K, V = terms.state_shape
    dtype = torch.float64 if terms.q.dtype == torch.float64 else torch.float32
    pool = terms.q.new_empty(prefixes.count, HV, V, K, dtype=dtype)
    prefixes.add("recurrent", pool if options.state_v_first else pool.mT)
    return options._replace(prefix_states=PrefixStates(pool, prefixes.rows))


def _expect_prefix_states(options: LinearOptions) -> None:
    """
    Raises:
        NotImplementedError: beside an option with which the states are others.
    """
    if options.reverse or options.context is not None:
        name = "reverse" if options.reverse else "context"
        raise NotImplementedError(f"prefix_states: not with {name}")


def _expect_consistent(options: LinearOptions) -> None:
    """
    Raises:
        NotImplementedError: beside an option with which no kernel keeps the promise.
    """
    if options.reverse or options.context is not None:
        name = "reverse" if options.reverse else "context"
        raise NotImplementedError(f"consistent: is not implemented with {name}")
    if options.impl == "reference":
        raise NotImplementedError("consistent: is not implemented with impl='reference'")
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "consistent: want a call outside of torch.compile, which may change the order of sums"
        )


class _Choice(NamedTuple):
    """Chooses back ends for terms other than a call's own; equal where `impl` is equal, for a
    replay's key."""

    impl: str | None

    def __call__(self, terms: LinearInputs) -> str:
        return plan_for(terms, self.impl).impls


def _run_across_ranks(
    terms: LinearInputs,
    options: LinearOptions,
    context: ContextParallel,
    recurrent: bool,
    names: Mapping[str, str],
) -> tuple[Tensor, Tensor | None]:
    """As run does; the terms are this rank's, initial_state is that of all sequences."""
    context.expect_no_offsets(terms.cu_seqlens, options.impl)
    initial_state = terms.initial_state
    terms = terms._replace(initial_state=None, cu_seqlens=context.offsets_on(terms.q.device))
    fixed = context.segment_tokens is not None
    key = signature(terms, options.chunk_size, options.impl, recurrent, "context", fixed)
    if key is not None:
        key = (*key, autocast_dtype(terms.q))
    plan = _PLANS.get(key, lambda: _checked(terms, names, options, recurrent, fixed=fixed))
    if terms.max_head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"context: heads of more than {MAX_HEAD_DIM} channels run on one rank, got "
            f"{terms.max_head_dim}"
        )
    if terms.beta is not None and terms.beta.dim() == 4:
        name = names.get("beta", "beta")
        raise NotImplementedError(
            f"{name}: want one value for each token and head with a context, got one per channel"
        )
    share = context.share(terms.q.shape[1])
    if initial_state is not None:
        name = names.get("initial_state", "initial_state")
        rows = share.sequences if share.packed else terms.q.shape[0]
        checks.expect_shape(name, initial_state, (rows, *terms.state_shape[1:]))
        checks.expect_floating({name: initial_state})
        checks.expect_one_device({"q": terms.q, name: initial_state})
    terms = as_autocast(terms)
    if options.reverse:
        terms, share = _reversed(terms), share.reversed()
        if terms.cu_seqlens is not None and initial_state is not None:
            initial_state = initial_state.flip(0)
    call = Call(
        options.scale_of(terms.q),
        0 if recurrent else options.chunk_size or DEFAULT_CHUNK,
        plan.impls,
        _Choice(options.impl),
        options.output_final_state,
    )
    o, state = linear_across_ranks(terms, initial_state, share, call)
    if options.reverse:
        o = o.flip(1)
    if state is None:
        return o, None
    if options.reverse and terms.cu_seqlens is not None:
        state = state.flip(0)
    return o, state.transpose(-1, -2) if options.state_v_first else state


class _Plan(NamedTuple):
    """The back end of a call; how its heads are split for it, if they are; and its groups of rows
    and heads without gradients and with, if it has any."""

    impl: str
    impls: str
    groups: HeadGroups | None
    cuts: tuple[Groups | None, Groups | None] | None


def _checked(
    terms: LinearInputs,
    names: Mapping[str, str],
    options: LinearOptions,
    recurrent: bool,
    same_bits: bool = False,
    fixed: bool = False,
) -> _Plan:
    """Looks at nothing but shapes, dtypes and devices. fixed: and not at how many tokens there
    are, which is another number on each rank."""
    check(terms, names, options, recurrent)
    whole = given = terms = as_autocast(terms)
    if same_bits:
        terms = _of_tokens(terms, 1)
    if fixed:
        given = terms = _of_tokens(terms, MANY_TOKENS)
    groups = groups_of(terms) if terms.max_head_dim > MAX_HEAD_DIM else None
    if not recurrent and options.context is None:
        groups = _groups_for_sm90(terms, options.impl) or groups
    given = given if groups is None else shapes_of_split(given, groups)
    # segments are another matter there
    with consistent() if same_bits else nullcontext():
        chosen = plan_for(terms, options.impl, groups)
        if same_bits and chosen.impl == "sm90" and (reason := sm90_unsupported(given)):
            text = f"consistent: a call of this size has no such kernel ({reason})"
            raise NotImplementedError(text)
    if groups is not None:
        whole = shapes_of_split(whole, groups)
    alone, trained = (memory_groups_of(whole, chosen.impls, grads) for grads in (False, True))
    cuts = None if alone is None and trained is None else (alone, trained)
    if options.context is not None or (recurrent and chosen.impl in PLAIN):
        cuts = None  # context.py makes its own; plain torch token by token leaves nothing
    return _Plan(chosen.impl, chosen.impls, groups, cuts)


def _of_tokens(terms: LinearInputs, count: int) -> LinearInputs:
    """Terms of one row of `count` tokens without states, for questions about shapes whose answer is
    the same for any number of tokens and sequences."""
    if 0 in terms.q.shape[:2]:
        return terms
    given = terms.of_tokens(lambda x: x[:1, :1].expand(1, count, *x.shape[2:]))
    return given._replace(initial_state=None)


def _groups_for_sm90(terms: LinearInputs, impl: str | None) -> HeadGroups | None:
    """Columns of V by which the kernels for sm_90 take heads that they do not take as they are.

    Rows are not split for that: adding up their outputs costs what the kernels gain.
    """
    if impl not in (None, "sm90") or terms.transition != "none" or is_vector_decay(terms):
        return None
    if sm90_unsupported(terms) is None:
        return None
    K = terms.q.shape[-1]
    if K not in SCALAR_DECAY_WIDTHS:
        return None
    groups = groups_of(terms, K)
    if groups.columns * groups.V != terms.v.shape[-1]:
        return None
    return None if sm90_unsupported(shapes_of_split(terms, groups)) else groups


def plan_for(terms: LinearInputs, impl: str | None, groups: HeadGroups | None = None) -> Selection:
    """The plan for heads of any width; kernels are asked about the groups that wide_heads.py
    makes."""
    if groups is None and terms.max_head_dim > MAX_HEAD_DIM:
        groups = groups_of(terms)
    given = terms if groups is None else shapes_of_split(terms, groups)
    return choose(CANDIDATES, given, impl, "linear attention", terms.q)


def check(
    terms: LinearInputs, names: Mapping[str, str], options: LinearOptions, recurrent: bool
) -> None:
    """ValueError or TypeError, under the user's names, for anything that does not fit.

    Once for each signature (run's key): a check of what that lacks, such as scale, would be skipped
    in later calls. It goes in front of it.
    """
    named = {name: names.get(name, name) for name in LinearInputs._fields}
    checks.expect_rank(named["q"], terms.q, 4, "[B, T, H, K]")
    checks.expect_rank(named["v"], terms.v, 4, "[B, T, HV, V]")
    B, T, H = terms.q.shape[:3]
    HV = terms.v.shape[2]
    checks.expect_multiple(f"heads of {named['v']}", HV, f"heads of {named['q']}", H)
    if terms.cu_seqlens is not None:
        checks.expect_cu_seqlens(terms.cu_seqlens, B, T)
    sizes = terms.sizes
    for name, term in TERMS.items():
        if (x := getattr(terms, name)) is not None:
            checks.expect_tensor(named[name], x)
            dims = term.dims_of(x.dim() if recurrent or term.wide_in_chunks else 0)
            checks.expect_shape(named[name], x, [sizes[d] for d in dims])
    if options.chunk_size is not None:
        checks.expect_power_of_two("chunk_size", options.chunk_size, 16, 256)
    given = {named[name]: x for name, x in terms._asdict().items()}
    checks.expect_one_device(given)
    given.pop("cu_seqlens")
    checks.expect_floating(given)
    if autocast_dtype(terms.q) is None:
        checks.expect_one_dtype(
            {named[n]: getattr(terms, n) for n, term in TERMS.items() if term.dtype == "q"}
        )


def as_autocast(terms: LinearInputs) -> LinearInputs:
    """Under autocast the activations take its dtype; gates and states keep theirs."""
    dtype = autocast_dtype(terms.q)
    if dtype is None:
        return terms
    cast = {
        name: x.to(dtype)
        for name, term in TERMS.items()
        if term.dtype != "own" and (x := getattr(terms, name)) is not None
    }
    return terms._replace(**cast)


def _reversed(terms: LinearInputs) -> LinearInputs:
    """The same sequences from their last token to their first; packed ones also change order."""
    terms = terms.of_tokens(lambda x: x.flip(1))
    if terms.cu_seqlens is None:
        return terms
    state = None if terms.initial_state is None else terms.initial_state.flip(0)
    offsets = terms.q.shape[1] - terms.cu_seqlens.flip(0)
    return terms._replace(initial_state=state, cu_seqlens=offsets)
