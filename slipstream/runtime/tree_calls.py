"""The calls of a recurrence for each depth of prefix trees, as one node of autograd's graph.

Their Function, such as that of the linear family, does the work: each depth has a ctx of its own
(_Depth). So forward and backward cost what those of packed sequences do, and the states between.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.runtime import autograd
from slipstream.runtime.prefix_tree import PrefixTree
from slipstream.runtime.trees import expect_forward, level_by_level, split_levels


class Ways(NamedTuple):
    """How a family runs calls of its terms, a NamedTuple with initial_state and cu_seqlens.

    Attributes:
        function: the Function of a call without modes, by what `plan` says first and the terms.
        forward: the same without gradients, of the terms first.
        plan: of terms and options, which it checks: a plan with `modes` and `run`, and `how`.
        run: of terms and options, through all modes.
        given: further arguments of `plan` and `run`.
    """

    function: Any
    forward: Callable[..., tuple[Tensor, Tensor]]
    plan: Callable[..., tuple[Any, Any]]
    run: Callable[..., tuple[Tensor, Tensor | None]]
    given: dict[str, Any]


def run_in_tree(
    terms: Any, options: Any, names: Sequence[str], ways: Ways
) -> tuple[Tensor, Tensor | None]:
    """A call whose options have a PrefixTree as their context. names: of the terms of tokens.

    Raises:
        NotImplementedError: for options that do not go with trees.
    """
    tree, options = options.context, options._replace(context=None)
    expect_forward(options.reverse, options.prefix_states)
    tree.expect_no_offsets(terms.cu_seqlens, None)
    plan, run = partial(ways.plan, **ways.given), partial(ways.run, **ways.given)
    plan(terms := terms._replace(cu_seqlens=tree.cu_seqlens), options)
    given = {name: x for name in names if (x := getattr(terms, name)) is not None}
    first = next(iter(given.values()))
    tree.share(first.shape[1])
    terms = terms._replace(cu_seqlens=tree.offsets_on(first.device))
    if len(tree.levels) < 2:
        return run(terms, options)

    def how_of(*level: Any) -> Any:
        found, how = plan(type(terms)(*level), options)
        return None if found.modes or found.run is not None else how

    places = [*map(terms._fields.index, names)]
    state, offsets = map(terms._fields.index, ("initial_state", "cu_seqlens"))
    plain = lambda how, *own: ways.forward(*own, *how)  # noqa: E731
    final = options.output_final_state
    call = TreeCall(tree, ways.function, how_of, plain, places, state, offsets, final)
    if all(how_of(*level) is not None for level in call.depths(terms)):
        return call.run(*terms)

    def through_modes(output_final_state: bool, **level: Any) -> Any:
        asked = options._replace(output_final_state=output_final_state)
        return run(terms._replace(**level), asked)

    return level_by_level(through_modes, given, terms.initial_state, tree, final)


class TreeCall(NamedTuple):
    """A call of function.apply(how, *args), which returns outputs of tokens and final states.

    Attributes:
        function: its forward and its once differentiable backward are called depth by depth.
        how_of: from the args of a depth to `how`.
        plain: the same without gradients, of how and args.
        tokens, state, offsets: places among args.
        final: whether final states are asked for.
    """

    tree: PrefixTree
    function: Any
    how_of: Callable[..., Any]
    plain: Callable[..., tuple[Tensor, Tensor]]
    tokens: Sequence[int]
    state: int
    offsets: int
    final: bool

    def run(self, *args: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """o, and the final states of all nodes if they are asked for."""
        if autograd.needs_autograd(*args):
            return _InTree.apply(self, *args)
        return self.forward(args, self.plain)

    def depths(self, args: Sequence[Any]) -> Iterator[list[Any]]:
        """The args of each depth, without states."""
        given = [i for i in self.tokens if args[i] is not None]
        columns = [split_levels(args[i], self.tree) for i in given]
        for depth, row in enumerate(zip(*columns)):
            found = [*args]
            found[self.state] = None
            found[self.offsets] = self.tree.offsets_of_level(depth, row[0].device)
            for i, x in zip(given, row):
                found[i] = x
            yield found

    def forward(
        self, args: Sequence[Any], run: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor | None]:
        tree, state, outputs, finals = self.tree, args[self.state], [], []
        for level, own in zip(tree.levels, self.depths(args)):
            own[self.state] = None if state is None else level.before.taken(state)
            o, state = run(self.how_of(*own), *own)
            outputs.append(o)
            finals.append(state)
        o, rows = torch.cat(outputs, 1), tree.from_levels
        o = o if rows is None else rows.taken(o[0])[None]
        if not self.final:
            return o, None
        whole, rows = torch.cat(finals), tree.states_from_levels
        return o, whole if rows is None else rows.taken(whole)


class _Depth:
    """What a Function has as its ctx for the call of a depth."""

    def __init__(self, how: Any, needs_input_grad: tuple[bool, ...] = ()) -> None:
        self.how, self.needs_input_grad = how, needs_input_grad
        self.saved: tuple[Tensor | None, ...] = ()

    def set_materialize_grads(self, value: bool) -> None: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved = tensors


class _InTree(autograd.Function):
    operator = "slipstream::tree"

    @staticmethod
    def forward(ctx: Any, call: TreeCall, *args: Any) -> Any:
        depths: list[_Depth] = []

        def forward(how: Any, *own: Any) -> Any:
            depths.append(_Depth(how))
            return call.function.forward(depths[-1], how, *own)

        results = call.forward(args, forward)
        autograd.save(ctx, *(x for depth in depths for x in depth.saved))
        ctx.depths = [(depth.how, len(depth.saved)) for depth in depths]
        ctx.call = call
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, do: Tensor | None, dfinal: Tensor | None) -> Any:
        call, tree = ctx.call, ctx.call.tree
        douts: Any = [None] * len(tree.levels) if do is None else split_levels(do, tree)
        if dfinal is not None and tree.states_to_levels is not None:
            dfinal = tree.states_to_levels.taken(dfinal)
        dstate, by_depth = None, []
        end, last = len(saved), len(tree.parents)
        for depth in reversed(range(len(tree.levels))):
            (how, size), nodes = ctx.depths[depth], len(tree.by_level[depth])
            dafter = None if dfinal is None else dfinal[last - nodes : last]
            if dstate is not None:
                below = tree.levels[depth + 1].before.returned(dstate, nodes)
                dafter = below if dafter is None else dafter + below
            stub, tensors = _Depth(how, ctx.needs_input_grad), saved[end - size : end]
            backward = call.function.backward.__wrapped__
            _, *grads = backward(stub, tensors, douts[depth], dafter)
            by_depth.append(grads)
            dstate, last, end = grads[call.state], last - nodes, end - size
        return None, *_whole_gradients(call, by_depth[::-1])


def _whole_gradients(call: TreeCall, by_depth: list[list[Any]]) -> list[Tensor | None]:
    """Of the args. A depth that no gradient has come to has none."""
    tree, results = call.tree, []
    for i, grads in enumerate(zip(*by_depth)):
        known = [x for x in grads if x is not None]
        if not known:
            results.append(None)
        elif i == call.state:
            first = grads[0]
            rows = tree.levels[0].before
            results.append(None if first is None else rows.returned(first, len(tree.parents)))
        elif i in call.tokens:
            like, zeros = known[0], known[0].new_zeros
            given = zip(grads, tree.levels)
            made = [zeros(1, y.tokens, *like.shape[2:]) if x is None else x for x, y in given]
            whole = torch.cat(made, 1)
            rows = tree.from_levels
            results.append(whole if rows is None else rows.taken(whole[0])[None])
        else:
            results.append(torch.stack(known).sum(0))
    return results
