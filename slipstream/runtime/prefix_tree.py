"""Prefix trees: a packed row whose sequences go on where others end.

Node n of a tree continues at the end of node parents[n], so that a prompt which many completions
share is there once. A PrefixTree is the plan of such a row, made once a batch on the host. It is a
context (context_parallel.py) of one rank: what came before a node's tokens lies at its parent's
end, not on another rank. So whatever takes a context, down to models of others, takes a tree.

Recurrences go level by level (trees.py): nodes of one depth are sequences of a packed call, whose
initial states are their parents' final ones. Convolutions and token shift read their last inputs
along the path by a table (Nodes.states_before), and so does attention its keys
(ops/_attention_trees.py). Gradients of what several nodes have read are added up in the order
of the nodes: the same bits each run.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from slipstream.common import checks
from slipstream.runtime import autograd
from slipstream.runtime.context_parallel import ContextParallel, Share, copied, integers
from slipstream.runtime.rows import Rows, Windows, rows_of

F = TypeVar("F", bound=Callable[..., Any])


def planned(make: F) -> F:
    """A function of a tree, or of its Nodes, that is called once for the other arguments."""

    def call(of: Any, *args: Any) -> Any:
        key = make.__qualname__, *args
        if key not in of.plans:
            of.plans[key] = make(of, *args)
        return of.plans[key]

    found: Any = wraps(make)(call)
    return found


class Level(NamedTuple):
    """The nodes of one depth, as sequences of a packed call.

    tokens: of all of them. offsets: theirs, ints. before: rows of the states that they start from,
    in the order of the level above; of roots, in that of the row.
    """

    tokens: int
    offsets: tuple[int, ...]
    before: Rows


class PrefixTree(ContextParallel):
    """The plan of a packed row of prefix trees.

    Args:
        cu_seqlens: offsets [N+1] of the nodes' tokens in the row; a node may have none.
        parents: [N], the node at whose end each one goes on, -1 for a root. Parents come before
            their children.

    Both are tensors or sequences of ints. A tensor on a device is read once, here, and the host
    waits for it; ints make nothing wait.

    Attributes:
        parents: ints. tokens: of the row. sequences: N.
        cu_seqlens: int32, on the device of the offsets given.

    Raises:
        ValueError: offsets that fall, or a parent that is not an earlier node: names the node.
        TypeError: they are no integers.
    """

    def __init__(self, cu_seqlens: Tensor | Sequence[int], parents: Tensor | Sequence[int]) -> None:
        self.eagerly = eagerly
        self.group: Any = None
        self.rank, self.size, self.segment_tokens = 0, 1, None
        self._lengths = None
        self._shares: dict[int, Share] = {}
        self._elsewhere: dict[torch.device, Tensor] = {}
        self._whole: dict[torch.device, Tensor] = {}
        self._set_offsets(cu_seqlens)
        assert self.cu_seqlens is not None
        # with the nodes that have no tokens
        self.cu_seqlens = self.whole_offsets_on(self.cu_seqlens.device)
        self.parents = _parents(parents)
        offsets = self.offsets
        self.tokens = offsets[-1]
        if len(self.parents) != len(offsets) - 1:
            raise ValueError(
                f"parents: want {len(offsets) - 1} numbers, one a sequence, got {len(self.parents)}"
            )
        for n, parent in enumerate(self.parents):
            if not -1 <= parent < n:
                raise ValueError(
                    f"parents: want -1 or an earlier node, 0 to {n - 1}, for node {n}, got {parent}"
                )
        # what was made of it, by names and arguments
        self.plans: dict[Any, Any] = {}

    @property
    def offsets(self) -> tuple[int, ...]:
        assert self._offsets is not None
        return self._offsets

    def share(self, tokens: int) -> "Nodes":
        if tokens != self.tokens:
            raise ValueError(
                f"cu_seqlens: want offsets from 0 to the {tokens} tokens given, "
                f"got 0 to {self.tokens}"
            )
        return self.nodes

    @cached_property
    def nodes(self) -> "Nodes":
        return Nodes(self)

    def expect_no_offsets(self, cu_seqlens: Tensor | None, impl: str | None) -> None:
        super().expect_no_offsets(cu_seqlens, None)  # of one rank it has a reference

    def sum(self, x: Tensor) -> Tensor:
        return x.detach().clone()

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The position of each node's first token on its path."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + self.length(parent))
        return tuple(found)

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """The root above each node."""
        found: list[int] = []
        for n, parent in enumerate(self.parents):
            found.append(n if parent < 0 else found[parent])
        return tuple(found)

    def length(self, n: int) -> int:
        return self.offsets[n + 1] - self.offsets[n]

    def path(self, n: int, last: int | None = None) -> list[range]:
        """The tokens before node n, of its ancestors from the root on; the `last` ones alone."""
        found, missing = [], self.starts[n] if last is None else min(last, self.starts[n])
        while missing:
            n = self.parents[n]
            begin, end = self.offsets[n : n + 2]
            found.append(range(max(begin, end - missing), end))
            missing -= len(found[-1])
        return [x for x in reversed(found) if x]

    @cached_property
    def by_level(self) -> list[list[int]]:
        """Nodes of each depth, in the order of the row: no copies where that has them so."""
        levels, depths = [], []
        for n, parent in enumerate(self.parents):
            depths.append(depth := 0 if parent < 0 else depths[parent] + 1)
            if depth == len(levels):
                levels.append([])
            levels[depth].append(n)
        return levels

    @cached_property
    def levels(self) -> list[Level]:
        found, above = [], {-1: -1}
        for depth, nodes in enumerate(self.by_level):
            before = [above[self.parents[n]] for n in nodes] if depth else nodes
            offsets = (0, *itertools.accumulate(self.length(n) for n in nodes))
            found.append(Level(offsets[-1], offsets, Rows(torch.tensor(before, device="cpu"))))
            above = {n: i for i, n in enumerate(nodes)}
        return found

    @planned
    def offsets_of_level(self, depth: int, device: torch.device) -> Tensor:
        offsets = torch.tensor(self.levels[depth].offsets, dtype=torch.int32, device="cpu")
        return copied(offsets, device)

    @cached_property
    def to_levels(self) -> Rows | None:
        """The tokens level by level; None where the row has them so."""
        return _order_of([self.own(n) for nodes in self.by_level for n in nodes])

    @cached_property
    def from_levels(self) -> Rows | None:
        """Back into the order of the row."""
        return _inverse(self.to_levels)

    @cached_property
    def states_from_levels(self) -> Rows | None:
        """States of all nodes, level by level, in the order of the nodes."""
        return _inverse(self.states_to_levels)

    @cached_property
    def states_to_levels(self) -> Rows | None:
        return _order_of([range(n, n + 1) for nodes in self.by_level for n in nodes])

    def own(self, n: int) -> range:
        return range(*self.offsets[n : n + 2])

    def before(self, x: Tensor) -> Tensor:
        """x [1, T, ...] of the token before each on its path; zeros before a root's first."""
        return self.nodes.last(1).copy(x.flatten(0, 1))[None]


class Nodes(Share):
    """A PrefixTree as the share of one rank, which has a sequence for each node."""

    def __init__(self, tree: PrefixTree) -> None:
        super().__init__(0, (tree.tokens,), tree.offsets)
        self.tree, self.plans = tree, tree.plans

    @planned
    def positions(self, device: torch.device) -> Tensor:
        starts = torch.tensor(self.tree.starts, dtype=torch.int64, device="cpu")
        begins = torch.tensor(self.tree.offsets, dtype=torch.int64, device="cpu")
        found = torch.arange(self.tree.tokens, device="cpu")
        found += (starts - begins[:-1]).repeat_interleave(begins.diff())
        return copied(found[None], device)

    def next_tokens(self, labels: Tensor, ignored: int) -> Tensor:
        """The label of each token itself: PrefixTree.before has what predicts it."""
        roots = [
            self.tree.offsets[n]
            for n, start in enumerate(self.tree.starts)
            if start == 0 and self.tree.length(n)
        ]
        return labels.index_fill(1, torch.tensor(roots, device=labels.device).long(), ignored)

    def states_before(
        self, x: Tensor, width: int, states: Tensor | None
    ) -> tuple[Tensor, Tensor, None]:
        """x [1, T, D], which a kernel is to read whose gradient is new memory, and the last `width`
        inputs on the path of each node [N, D, width], of x and of `states` before the roots; None
        is zeros."""
        tokens, before = self._rows_before(width)
        if autograd.needs_autograd(x):
            x, found = Windows.apply(x, tokens, width)
        else:
            found = tokens.windows(x[0], width)
        if states is not None:
            rows = before.copy(states.to(x.dtype).mT.flatten(0, 1))
            found = found + rows.unflatten(0, (-1, width)).mT
        return x, found, None

    @planned
    def _rows_before(self, width: int) -> tuple[Rows, Rows]:
        """Of each node's last inputs: tokens, and places in states, -1 where it is the other."""
        tree, index, states = self.tree, [], []
        for n, root in enumerate(tree.roots):
            tail = [t for piece in tree.path(n, width) for t in piece]
            index += [*[-1] * (width - len(tail)), *tail]
            state = range(root * width + len(tail), (root + 1) * width)
            states += [*state, *[-1] * len(tail)]
        tokens, before = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (index, states))
        return Rows(tokens), Rows(before)

    @planned
    def last(self, width: int) -> Rows:
        """For each token the one before it; -1 before a root's first."""
        assert width == 1
        index = torch.arange(-1, self.tree.tokens - 1, device="cpu")
        for n in range(self.sequences):
            if self.tree.length(n):
                ranges = self.tree.path(n, 1)
                index[self.tree.offsets[n]] = ranges[-1][-1] if ranges else -1
        return Rows(index)

    def local_states(self, *_: object) -> Tensor | None:
        raise AssertionError("a tree is no context of several ranks: see runtime/trees.py")

    def whole_states(self, after: Tensor, states: Tensor | None, rows: int) -> Tensor:
        return after

    @property
    def longest(self) -> int:
        tree = self.tree
        return max((x + tree.length(n) for n, x in enumerate(tree.starts)), default=0)

    def predicting(self, h: Tensor) -> Tensor:
        return self.tree.before(h)


def _order_of(ranges: Sequence[range]) -> Rows | None:
    """Rows of these; None where they are all in order."""
    rows = rows_of(ranges)
    return None if torch.equal(rows.index, torch.arange(len(rows.index), device="cpu")) else rows


def _inverse(order: Rows | None) -> Rows | None:
    return None if order is None else Rows(order.index.argsort())


def _parents(given: Tensor | Sequence[int]) -> tuple[int, ...]:
    if isinstance(given, Tensor):
        checks.expect_rank("parents", given, 1, "[N]")
        checks.expect_index("parents", given)
        given = given.tolist()
    return integers("parents", given)


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


# as torch.compiler.disable, which would import Dynamo, and Triton with it, already here
_disabled: Callable[..., Any] = _disable_dynamo(_call)


def eagerly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Under torch.compile a break of the graph, which would hold for one tree alone."""
    return (_disabled if torch.compiler.is_compiling() else _call)(function, *args, **options)
