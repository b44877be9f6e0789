"""From an operator's arguments to the recurrence: checks, choice, modes, call.

Every public function of the family ends here, so what is common to all of them is here once. What
an option does to inputs and results is in modes/, a file each.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.compiler import is_compiling

from slipstream.common import checks
from slipstream.kernels.linear import inputs, plan, reference
from slipstream.kernels.linear.inputs import MAX_HEAD_DIM, TERMS, ForwardCall, LinearInputs
from slipstream.kernels.linear.modes import context, transforms, wide_heads
from slipstream.kernels.linear.modes.call import Call, LinearOptions, Mode, Results, Road
from slipstream.kernels.linear.modes.memory import Memory
from slipstream.kernels.linear.modes.memory import groups_of as memory_groups_of
from slipstream.kernels.linear.modes.prefix_states import Prefix
from slipstream.kernels.linear.modes.wide_heads import HeadGroups, WideHeads, shapes_of_split
from slipstream.kernels.linear.op import CONSISTENT, DEFAULT_CHUNK, Linear, call_forward, linear
from slipstream.runtime import autograd, dispatch, token_ids
from slipstream.runtime.consistent import consistent, consistent_scope, prefix_scope
from slipstream.runtime.dispatch import PLAIN, Candidate, Selection, ValidationCache, signature
from slipstream.runtime.tree_calls import PrefixTree, Ways, run_in_tree

CANDIDATES = (
    Candidate("sm90", "kernels for sm_90 and, around them, Triton's", plan.sm90_unsupported_reason),
    Candidate("triton", "Triton kernels, on CUDA", plan.triton_unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
    Candidate("reference", "token by token, the oracle of the tests", by_name_only=True),
)
# The modes from outside in. Arguments are checked as those after ConsistentStep have them.
MODES = (
    transforms.VFirst,
    context.Context,
    Prefix,
    transforms.ConsistentStep,
    transforms.Autocast,
    transforms.Reverse,
    WideHeads,
    Memory,
)
# Pairs that exclude each other, and what the error says.
FORBIDDEN = (
    ("consistent", "reverse", "consistent: is not implemented with reverse"),
    ("consistent", "context", "consistent: is not implemented with context"),
    ("consistent", "reference", "consistent: is not implemented with impl='reference'"),
    (
        "consistent",
        "compiling",
        "consistent: want a call outside of torch.compile, which may change the order of sums",
    ),
    ("prefix_states", "reverse", "prefix_states: not with reverse"),
    ("prefix_states", "context", "prefix_states: not with context"),
)
NO_NAMES: Mapping[str, str] = MappingProxyType({})
_PLANS = ValidationCache()


class Asked(NamedTuple):
    """Modes that a call asks for by options and scopes, as far as its plan depends on them; a tuple
    of these is in a plan's key.

    Attributes:
        context: of context.key_of.
        consistent: whether bits may depend neither on the batch nor on cuts.
        step: whether that is asked for in a step of one token a row.
    """

    v_first: bool = False
    context: tuple[bool, int | None] | None = None
    prefix_states: bool = False
    consistent: bool = False
    step: bool = False
    reverse: bool = False


class Plan(NamedTuple):
    """The back end of a call: the chosen one and all to try; tokens of a chunk; the modes, outside
    in; and what takes the place of op.linear."""

    impl: str
    impls: str
    chunk: int
    modes: tuple[Mode, ...] = ()
    run: Any = None


def run(
    terms: LinearInputs,
    options: LinearOptions,
    *,
    recurrent: bool,
    names: Mapping[str, str] | None = NO_NAMES,
) -> Results:
    """Runs one operator.

    Args:
        terms: as the user gave them, except for initial_state, which may be V-first.
        names: how the user calls a term where that is not its name here.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V] (or V-first) if asked for.
    """
    if options.context is not None and is_compiling():
        # its exchanges are not traced
        return options.context.eagerly(run, terms, options, recurrent=recurrent, names=names)
    if isinstance(options.context, PrefixTree):
        ways = Ways(Linear, call_forward, _planned, run, {"recurrent": recurrent, "names": names})
        return run_in_tree(terms, options, inputs.TOKEN_TERMS, ways)
    plan, how = _planned(terms, options, recurrent, names)
    if terms.cu_seqlens is not None and terms.cu_seqlens.is_cuda:  # plain torch looks on the CPU
        token_ids.expect_offsets("cu_seqlens", terms.cu_seqlens, terms.q.shape[1])
    if plan.modes or plan.run is not None:
        o, state = _through_modes(terms, options, names or NO_NAMES, how, plan)
    elif autograd.needs_autograd(*terms):
        o, state = Linear.apply(how, *terms)
    else:
        o, state = call_forward(*terms, *how)
    return o, state if options.output_final_state else None


def _planned(terms: LinearInputs, options: LinearOptions, recurrent: bool, names: Any) -> Any:
    """The plan of a call, which is checked first, and what the call is without modes."""
    asked = _asked(terms, options, recurrent)
    key = signature(terms, options.chunk_size, options.impl, recurrent, asked)
    if key is not None and terms.q is not None:
        key = (*key, checks.autocast_dtype(terms.q))

    def make() -> Plan:
        return make_plan(terms, names or NO_NAMES, options, recurrent, Asked(*asked))

    plan = _PLANS.get(key, make, terms)
    return plan, ForwardCall(options.scale_of(terms.q), plan.chunk, plan.impls)


def _asked(terms: LinearInputs, options: LinearOptions, recurrent: bool) -> tuple[Any, ...]:
    """The fields of Asked."""
    same_bits = not recurrent and (options.consistent or consistent_scope.on)
    leaves = options.prefix_states is not None
    if prefix_scope.prefixes is not None and options.output_final_state:
        forward = not options.reverse and options.context is None
        leaves = leaves or (forward and prefix_scope.prefixes.are_of(terms.q))
    return (
        options.state_v_first,
        None if options.context is None else context.key_of(options.context),
        leaves,
        same_bits,
        same_bits and consistent_scope.step is not None,
        options.reverse,
    )


def _through_modes(
    terms: LinearInputs,
    options: LinearOptions,
    names: Mapping[str, str],
    how: ForwardCall,
    plan: Plan,
) -> Results:
    """The results of a call that has modes, or what takes the place of op.linear."""
    call = Call(terms, options, names, how, _ROAD, plan.run)
    outside = []
    for mode in plan.modes:
        outside.append((mode, call))
        call = mode.into(call)
    if call.run is not None:
        o, state = call.run(call)
    else:
        o, state = linear(call.terms, call.how)
    while outside:
        mode, call = outside.pop()
        o, state = mode.out(call, o, state)
    return o, state


def expect_allowed(asked: Asked, options: LinearOptions) -> None:
    """
    Raises:
        NotImplementedError: for a pair of FORBIDDEN.
    """
    wanted = {name for name, on in asked._asdict().items() if on}
    wanted |= {"reference"} if options.impl == "reference" else set()
    wanted |= {"compiling"} if is_compiling() else set()
    for one, other, text in FORBIDDEN:
        if {one, other} <= wanted:
            raise NotImplementedError(text)


class _Choice(NamedTuple):
    """Chooses back ends for terms other than a call's own; equal where `impl` is equal, for a
    replay's key."""

    impl: str | None

    def __call__(self, terms: LinearInputs) -> str:
        return plan_for(terms, self.impl).impls


_ROAD = Road(run, _Choice)


def _by_reference(call: Call) -> Results:
    return reference.linear_reference(call.terms, call.how.scale)


def make_plan(
    terms: LinearInputs,
    names: Mapping[str, str],
    options: LinearOptions,
    recurrent: bool,
    asked: Asked,
) -> Plan:
    """Checks and chooses, by shapes, dtypes and devices alone."""
    expect_allowed(asked, options)
    if asked.v_first:
        terms = transforms.checked_v_first(terms)
    if asked.context is not None:
        terms = context.checked(terms, options)
    if asked.step:
        terms = transforms.checked_consistent(terms)
    check(terms, names, options, recurrent)
    dtype = checks.autocast_dtype(terms.q)
    if dtype is not None:
        terms = transforms.as_autocast(terms)
    chosen, groups = choose_plan(terms, options, recurrent, asked)
    plain = {
        transforms.VFirst: asked.v_first,
        context.Context: asked.context,
        transforms.ConsistentStep: asked.step,
    }
    plain |= {transforms.Autocast: dtype, transforms.Reverse: asked.reverse}
    modes: dict[Any, Mode] = {mode: mode() for mode, on in plain.items() if on}
    if asked.prefix_states:
        modes[Prefix] = Prefix(groups is not None)
    elif asked.context is None:  # these divide what is to be done between calls of their own
        modes |= _divided(terms, chosen, groups, recurrent)
    return Plan(
        chosen.impl,
        chosen.impls,
        _chunk(options, recurrent, asked),
        tuple(modes[x] for x in MODES if x in modes),
        _by_reference if chosen.impl == "reference" else None,
    )


def _chunk(options: LinearOptions, recurrent: bool, asked: Asked) -> int:
    size = 0 if recurrent else options.chunk_size or DEFAULT_CHUNK
    return CONSISTENT if asked.consistent else size


def _divided(
    terms: LinearInputs, chosen: Selection, groups: HeadGroups | None, recurrent: bool
) -> dict[Any, Mode]:
    """The modes that divide a call."""
    modes: dict[Any, Mode] = {}
    if groups is not None and chosen.impl not in PLAIN:
        modes[WideHeads] = WideHeads(groups)
        terms = shapes_of_split(terms, groups)
    alone, trained = (memory_groups_of(terms, chosen.impls, grads) for grads in (False, True))
    # token by token plain torch leaves nothing
    leaves = chosen.impl != "reference" and not (recurrent and chosen.impl in PLAIN)
    if leaves and (alone is not None or trained is not None):
        modes[Memory] = Memory(alone, trained)
    return modes


def choose_plan(
    terms: LinearInputs, options: LinearOptions, recurrent: bool, asked: Asked
) -> tuple[Selection, HeadGroups | None]:
    """The back ends, and the groups in which they take heads. Where a context has its segments
    fixed they do not depend on how many tokens there are, which is another number on each rank."""
    given = terms
    if asked.consistent:
        given = terms = _of_tokens(terms, 1)
    if asked.context is not None and asked.context[0]:
        # many, as a rank would have: what it runs must not depend on how many
        given = terms = _of_tokens(terms, 1 << 16)
    groups = wide_heads.groups_of(terms) if terms.max_head_dim > MAX_HEAD_DIM else None
    if not recurrent and asked.context is None:
        groups = _groups_for_sm90(terms, options.impl) or groups
    given = given if groups is None else shapes_of_split(given, groups)
    # segments are another matter there
    with consistent() if asked.consistent else nullcontext():
        chosen = plan_for(terms, options.impl, groups)
        if (
            asked.consistent
            and chosen.impl == "sm90"
            and (reason := plan.sm90_unsupported_reason(given))
        ):
            raise NotImplementedError(f"consistent: this size has no such kernel ({reason})")
    return chosen, groups


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
    if impl not in (None, "sm90") or terms.transition != "none" or plan.is_vector_decay(terms):
        return None
    K = terms.q.shape[-1]
    if plan.sm90_unsupported_reason(terms) is None or K not in plan.SCALAR_DECAY_WIDTHS:
        return None
    groups = wide_heads.groups_of(terms, K)
    if groups.columns * groups.V != terms.v.shape[-1]:
        return None
    return None if plan.sm90_unsupported_reason(shapes_of_split(terms, groups)) else groups


def plan_for(terms: LinearInputs, impl: str | None, groups: HeadGroups | None = None) -> Selection:
    """The plan for heads of any width; kernels are asked about the groups that wide_heads.py
    makes."""
    if groups is None and terms.max_head_dim > MAX_HEAD_DIM:
        groups = wide_heads.groups_of(terms)
    given = terms if groups is None else shapes_of_split(terms, groups)
    return dispatch.choose(CANDIDATES, given, impl, "linear attention", terms.q)


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
    if checks.autocast_dtype(terms.q) is None:
        checks.expect_one_dtype(
            {named[n]: getattr(terms, n) for n, term in TERMS.items() if term.dtype == "q"}
        )
