"""Operators on prefix trees (prefix_tree.py): `parents` beside offsets, as their decorators.

by_levels is for recurrences, which go level by level; as_context for functions that ask a
PrefixTree what is before a node's tokens.
"""

import inspect
import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from slipstream.common import checks
from slipstream.runtime.context_exchange import tie
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.prefix_tree import PrefixTree, eagerly
from slipstream.runtime.tree_blocks import each, in_blocks

P = ParamSpec("P")
R = TypeVar("R")

# The last trees made of tensors: layers share them.
_made: list[tuple[tuple[weakref.ref, ...], tuple[int, ...], PrefixTree]] = []


def _remembered(make: Callable[..., PrefixTree], *given: Tensor) -> PrefixTree:
    """make(*given), which is remembered as long as they are as they were."""
    if any(x.is_inference() for x in given):  # which count no changes
        return make(*given)
    versions = tuple(x._version for x in given)
    for refs, before, tree in _made:
        same = before == versions and len(refs) == len(given)
        if same and all(ref() is x for ref, x in zip(refs, given)):
            return tree
    tree = make(*given)
    _made.insert(0, (tuple(map(weakref.ref, given)), versions, tree))
    del _made[4:]
    return tree


def tree_of_paths(cu_seqlens: Tensor, index: Tensor, cu_paths: Tensor) -> PrefixTree:
    """The plan of nodes and, packed by cu_paths [N+1], the tokens of each one's path from the
    root's first to its own last: TRL's tree_cu_seqlens_q, tree_kv_index and tree_cu_seqlens_k.

    Raises:
        ValueError: a path is not that of a node and its ancestors.
    """
    return _remembered(_tree_of_paths, cu_seqlens, index, cu_paths)


def _tree_of_paths(cu_seqlens: Tensor, index: Tensor, cu_paths: Tensor) -> PrefixTree:
    offsets, cuts, tokens = cu_seqlens.tolist(), cu_paths.tolist(), index.tolist()
    parents, paths = [], [tokens[x:y] for x, y in itertools.pairwise(cuts)]
    for n, path in enumerate(paths):
        before = path[: len(path) - (offsets[n + 1] - offsets[n])]
        parents.append(bisect_right(offsets, before[-1]) - 1 if before else -1)
    tree = PrefixTree(cu_seqlens, parents)
    for n, path in enumerate(paths):
        if path != [t for x in [*tree.path(n), tree.own(n)] for t in x]:
            raise ValueError(f"tree_kv_index: want the tokens of the path of node {n}, got {path}")
    return tree


def tree_of(cu_seqlens: Tensor | None, parents: Tensor) -> PrefixTree:
    """The plan of these, which is remembered as long as they are as they were.

    Raises:
        ValueError: no offsets beside parents; as PrefixTree.
    """
    if cu_seqlens is None:
        raise ValueError("parents: want cu_seqlens beside them, got None")
    return _remembered(PrefixTree, cu_seqlens, parents)


def context_of(
    cu_seqlens: Tensor | None, parents: Tensor | None, context: ContextParallel | None
) -> tuple[Tensor | None, ContextParallel | None]:
    """Offsets and context of a call: with parents a PrefixTree, which has the offsets.

    Raises:
        NotImplementedError: parents beside a context of several ranks.
    """
    if parents is None:
        return cu_seqlens, context
    if context is not None:
        raise NotImplementedError("parents: not with a context, whose ranks would share a tree")
    return None, eagerly(tree_of, cu_seqlens, parents)


def expect_forward(reverse: bool, prefix_states: object) -> None:
    """
    Raises:
        NotImplementedError: for options that do not go with trees.
    """
    for name, asked in (("reverse", reverse), ("prefix_states", prefix_states)):
        if asked:
            raise NotImplementedError(f"{name}: not with parents")


def as_context(fn: Callable[P, R]) -> Callable[P, R]:
    """A function of tokens that takes a PrefixTree as its context, or offsets and `parents`. One
    that has another for consistent=True goes level by level there."""
    levels = vars(by_levels(fn))[checks.IN_TREE] if hasattr(fn, checks.CONSISTENT) else None

    def call(*args: Any, **kwargs: Any) -> Any:
        if levels is not None and kwargs.get("consistent"):
            return levels(*args, **kwargs)
        return eagerly(_in_context, fn, args, kwargs)

    vars(fn)[checks.IN_TREE] = call
    return fn


def _in_context(fn: Callable[..., Any], args: tuple, given: dict[str, Any]) -> Any:
    names = "cu_seqlens", "parents", "context"
    offsets, context = context_of(*(given.pop(name, None) for name in names))
    return fn(*args, cu_seqlens=offsets, context=context, **given)


def by_levels(fn: Callable[P, R]) -> Callable[P, R]:
    """A recurrence that takes `parents`, or a PrefixTree as its context: fn is called for the nodes
    of each depth.

    fn: tensors of three dimensions and more are those of tokens, but for initial_state; it returns
        outputs of tokens, and final states, a tensor or a tuple.
    """
    parameters = inspect.signature(fn).parameters
    names, final = (*parameters,), parameters["output_final_state"].default
    consistent = getattr(fn, checks.CONSISTENT, fn)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {"output_final_state": final, **dict(zip(names, args)), **kwargs}
        return eagerly(_by_levels, consistent if given.get("consistent") else fn, given)

    vars(fn)[checks.IN_TREE] = call
    return fn


def _by_levels(run: Callable[..., Any], given: dict[str, Any]) -> Any:
    expect_forward(given.get("reverse", False), given.get("prefix_states"))
    offsets, parents = given.pop("cu_seqlens", None), given.pop("parents", None)
    _, tree = context_of(offsets, parents, given.pop("context", None))
    assert isinstance(tree, PrefixTree)
    if parents is None:
        tree.expect_no_offsets(offsets, None)
    states = given.pop("initial_state", None)
    tokens = {n: x for n, x in given.items() if isinstance(x, Tensor) and x.dim() > 2}
    first = next(iter(tokens.values()), None)
    if first is not None:
        tree.share(first.shape[1])
    odd = any(x.shape[0] != 1 or x.shape[1] % max(tree.tokens, 1) for x in tokens.values())
    each = states if isinstance(states, tuple) else () if states is None else (states,)
    odd |= any(x is not None and x.shape[:1] != (tree.sequences,) for x in each)
    if first is None or odd or not tree.levels:
        # there is nothing, or it says what does not fit
        there = tree.cu_seqlens if first is None else tree.offsets_on(first.device)
        return run(**given, initial_state=states, cu_seqlens=there)
    wanted = given.pop("output_final_state")
    run = partial(run, **given)
    blocks = in_blocks(tree) if given.get("consistent") else None
    if blocks is None:
        return level_by_level(run, tokens, states, tree, wanted)
    whole = partial(level_by_level, run, tree=blocks.tree, final=wanted)
    return blocks.run(whole, tokens, states)


def level_by_level(
    run: Callable[..., Any],
    tokens: Mapping[str, Tensor],
    states: Any,
    tree: PrefixTree,
    final: bool,
) -> Any:
    """Outputs, and the final states of all nodes if they are asked for.

    run: of tokens by name, initial_state, output_final_state and cu_seqlens. tokens: [1, T, ...],
    or a multiple of T.
    """
    pieces = {n: split_levels(x, tree) for n, x in tokens.items()}
    outputs, finals, device = [], [], next(iter(tokens.values())).device
    for depth, level in enumerate(tree.levels):
        states = each(level.before.copy, states)
        o, states = run(
            **{n: x[depth] for n, x in pieces.items()},
            initial_state=states,
            output_final_state=True,
            cu_seqlens=tree.offsets_of_level(depth, device),
        )
        outputs.append(o)
        finals.append(states)
    # all states have gradients, zeros or not, so that trees of any depth take the same kernels
    outputs[-1] = tie(outputs[-1], *tree_leaves(states))
    o = torch.cat(outputs, 1)
    if tree.from_levels is not None:
        o = tree.from_levels.copy(o.flatten(0, 1))[None]
    return o, _whole(finals, tree) if final else None


def split_levels(x: Tensor, tree: PrefixTree) -> Sequence[Tensor]:
    """x [1, T, ...] or [1, n T, ...] for each level."""
    ratio = x.shape[1] // tree.tokens if tree.tokens else 1
    if tree.to_levels is not None:
        x = tree.to_levels.copy(x.flatten(0, 1).unflatten(0, (-1, ratio))).flatten(0, 1)[None]
    return x.split([level.tokens * ratio for level in tree.levels], 1)


def _whole(finals: list[Any], tree: PrefixTree) -> Any:
    """The final states of all nodes, of those of each level."""
    if isinstance(finals[0], tuple):
        return tuple(_whole(list(x), tree) for x in zip(*finals))
    found, rows = torch.cat(finals), tree.states_from_levels
    return found if rows is None else rows.copy(found)
