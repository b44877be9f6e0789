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
from slipstream.runtime.consistent import consistent_scope
from slipstream.runtime.prefix_tree import PrefixTree
from slipstream.runtime.tree_blocks import in_blocks
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
    like = next((x for x in terms if isinstance(x, Tensor)), tree.cu_seqlens)
    plan(terms := terms._replace(cu_seqlens=tree.offsets_on(like.device)), options)
    given = {name: x for name in names if (x := getattr(terms, name)) is not None}
    tree.share(next(iter(given.values())).shape[1])
    if not tree.levels:
        return run(terms, options)
    consistent = options.consistent or consistent_scope.on
    blocks = in_blocks(tree) if consistent and not ways.given["recurrent"] else None
    if blocks is not None:

        def in_order(tokens: dict[str, Tensor], states: Tensor | None) -> Any:
            inner = terms._replace(**tokens, initial_state=states, cu_seqlens=None)
            return run_in_tree(inner, options._replace(context=blocks.tree), names, ways)

        return blocks.run(in_order, given, terms.initial_state)

    places = [*map(terms._fields.index, names)]
    state, offsets = map(terms._fields.index, ("initial_state", "cu_seqlens"))
    with torch.no_grad():
        hows, blank = _hows(plan, terms, options, tree, places)
    plain = lambda how, *own: ways.forward(*own, *how)  # noqa: E731
    final = options.output_final_state
    if hows is not None:
        call = TreeCall(tree, ways.function, hows, plain, places, state, blank, offsets, final)
        return call.run(*terms)

    def through_modes(output_final_state: bool, **level: Any) -> Any:
        asked = options._replace(output_final_state=output_final_state)
        return run(terms._replace(**level), asked)

    return level_by_level(through_modes, given, terms.initial_state, tree, final)


def _hows(
    plan: Callable[..., tuple[Any, Any]],
    terms: Any,
    options: Any,
    tree: PrefixTree,
    places: Sequence[int],
) -> tuple[list[Any] | None, Tensor]:
    """The `how` of each depth, by shapes and dtypes alone, None where one goes through modes; and a
    tensor like the states of the roots."""
    hows, state, first = [], terms.initial_state, None
    for depth, level in enumerate(tree.levels):
        own = [*terms]
        for i in places:
            own[i] = None if own[i] is None else own[i][:, : level.tokens]
        like = terms._replace(**dict(zip(terms._fields, own)))
        like = like._replace(cu_seqlens=tree.offsets_of_level(depth, like.q.device))
        shape, dtype = like.state_shape, terms.dtype
        if not depth and state is not None:
            shape, dtype = (shape[0], *state.shape[1:]), state.dtype
        blank = like.q.new_empty((), dtype=dtype).expand(shape)
        first = blank if first is None else first
        found, how = plan(like._replace(initial_state=blank), options)
        if found.modes or found.run is not None:
            return None, first
        hows.append(how)
    assert first is not None
    return hows, first


class TreeCall(NamedTuple):
    """A call of function.apply(how, *args), which returns outputs of tokens and final states.

    Attributes:
        function: its forward and its once differentiable backward are called depth by depth.
        hows: of the depths.
        plain: the same without gradients, of how and args.
        tokens, state, offsets: places among args.
        blank: like the states of the roots. Where none are given these are zeros: so all trees take
            the same kernels, whatever their depth.
        final: whether final states are asked for.
    """

    tree: PrefixTree
    function: Any
    hows: Sequence[Any]
    plain: Callable[..., tuple[Tensor, Tensor]]
    tokens: Sequence[int]
    state: int
    blank: Tensor
    offsets: int
    final: bool

    def run(self, *args: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """o, and the final states of all nodes if they are asked for."""
        if autograd.needs_autograd(*args):
            return _InTree.apply(self, *args)
        return self.forward(args, self.plain)

    def depths(self, args: Sequence[Any]) -> Iterator[list[Any]]:
        """The args of each depth, without states. They want gradients where args do, by which
        kernels are compiled ahead."""
        given = [i for i in self.tokens if args[i] is not None]
        columns = [split_levels(args[i], self.tree) for i in given]
        for depth, row in enumerate(zip(*columns)):
            found = [*args]
            found[self.state] = None
            found[self.offsets] = self.tree.offsets_of_level(depth, row[0].device)
            for i, x in zip(given, row):
                found[i] = x.requires_grad_() if args[i].requires_grad and x.is_leaf else x
            yield found

    def before(self, depth: int, above: Tensor | None) -> Tensor:
        """The states that a depth starts from, of those after the one above or of the given."""
        if above is None:
            return self.blank.new_zeros(self.blank.shape)
        return self.tree.levels[depth].before.taken(above)

    def forward(
        self, args: Sequence[Any], run: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor | None]:
        tree, state, outputs, finals = self.tree, args[self.state], [], []
        for depth, (how, own) in enumerate(zip(self.hows, self.depths(args))):
            own[self.state] = self.before(depth, state)
            o, state = run(how, *own)
            outputs.append(o)
            finals.append(state)
        o, rows = torch.cat(outputs, 1), tree.from_levels
        o = o if rows is None else rows.taken(o[0])[None]
        if not self.final:
            return o, None
        whole, rows = torch.cat(finals), tree.states_from_levels
        return o, whole if rows is None else rows.taken(whole)


class _Depth:
    """What a Function has as its ctx for the call of a depth.

    The states that a depth starts from are made again: the ones they are copies of are fewer.
    """

    def __init__(self, how: Any, state: Tensor | None, needs: tuple[bool, ...] = ()) -> None:
        self.how, self.state, self.needs_input_grad = how, state, needs
        self.saved: tuple[Tensor | None, ...] = ()

    def set_materialize_grads(self, value: bool) -> None: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        own, self.state = self.state, None
        self.places = [i for i, x in enumerate(tensors) if x is not None and x is own]
        # detached: a leaf that wants a gradient would stay where hooks take what is saved
        self.saved = tuple(None if x is None or x is own else x.detach() for x in tensors)


class _InTree(autograd.Function):
    operator = "slipstream::tree"

    @staticmethod
    def forward(ctx: Any, call: TreeCall, *args: Any) -> Any:
        depths: list[_Depth] = []
        states: list[Tensor | None] = [args[call.state]]

        def forward(how: Any, *own: Any) -> Any:
            depths.append(_Depth(how, own[call.state]))
            o, after = call.function.forward(depths[-1], how, *own)
            states.append(after)
            return o, after

        results = call.forward(args, forward)
        autograd.save(ctx, *states[:-1], *(x for depth in depths for x in depth.saved))
        ctx.depths = [(depth.how, depth.places, len(depth.saved)) for depth in depths]
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
            (how, places, size), nodes = ctx.depths[depth], len(tree.by_level[depth])
            dafter = None if dfinal is None else dfinal[last - nodes : last]
            if dstate is not None:
                below = tree.levels[depth + 1].before.returned(dstate, nodes)
                dafter = below if dafter is None else dafter + below
            elif dafter is None and not depth:  # so that kernels are those of deeper trees
                dafter = call.before(0, None)
            tensors = [*saved[end - size : end]]
            if places:
                state = call.before(depth, saved[depth])
                for i in places:
                    tensors[i] = state
            stub = _Depth(how, None, ctx.needs_input_grad)
            backward = call.function.backward.__wrapped__
            _, *grads = backward(stub, tuple(tensors), douts[depth], dafter)
            by_depth.append(grads)
            dstate, last, end = grads[call.state], last - nodes, end - size
        return None, *_whole_gradients(call, by_depth[::-1], saved[0] is not None)


def _whole_gradients(call: TreeCall, by_depth: list[list[Any]], given: bool) -> list[Tensor | None]:
    """Of the args, `given` a state. A depth that no gradient has come to has none."""
    tree, results = call.tree, []
    for i, grads in enumerate(zip(*by_depth)):
        known = [x for x in grads if x is not None]
        if not known:
            results.append(None)
        elif i == call.state:
            first = grads[0] if given else None
            rows = tree.levels[0].before
            results.append(None if first is None else rows.returned(first, len(tree.parents)))
        elif i in call.tokens:
            like, zeros = known[0], known[0].new_zeros
            pairs = zip(grads, tree.levels)
            made = [zeros(1, y.tokens, *like.shape[2:]) if x is None else x for x, y in pairs]
            whole = torch.cat(made, 1)
            rows = tree.from_levels
            results.append(whole if rows is None else rows.taken(whole[0])[None])
        else:
            results.append(torch.stack(known).sum(0))
    return results
