"""Prefix trees whose nodes begin at multiples of 64 tokens of their path, for consistent=True.

Where a row by itself is cut at such multiples its bits stay as they are. So the tokens of each node
are laid out in two: the whole blocks of its path that end in it, which begin in an ancestor, and
what is left behind them. Children go on where their parent's whole blocks end, and have what is
left of it as copies.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.consistent import BLOCK
from slipstream.runtime.prefix_tree import PrefixTree, planned
from slipstream.runtime.rows import Rows


class Blocks(NamedTuple):
    """The tree in blocks, rows of its tokens, and where the given nodes have their results.

    before: of each node in blocks the node whose initial state it has, or none. after: of each
    given node the one with its final state.
    """

    tree: PrefixTree
    tokens: Rows
    outputs: Rows
    before: Rows
    after: Rows

    def run(
        self, run: Callable[..., tuple[Tensor, Any]], tokens: Mapping[str, Tensor], states: Any
    ) -> tuple[Tensor, Any]:
        """run(tokens, states) on the tree in blocks, with the results of the given one.

        tokens: [1, T, ...], or a multiple of T. states: a tensor, a tuple of them, or None.
        """
        count = len(self.outputs.index)

        def laid_out(x: Tensor) -> Tensor:
            rows = x.flatten(0, 1).unflatten(0, (count, x.shape[1] // count))
            return self.tokens.copy(rows).flatten(0, 1)[None]

        given = {name: laid_out(x) for name, x in tokens.items()}
        o, finals = run(given, each(self.before.copy, states))
        return self.outputs.copy(o.flatten(0, 1))[None], each(self.after.copy, finals)


def each(change: Callable[[Tensor], Tensor], states: Any) -> Any:
    """change of a tensor, of each of a tuple, or of none."""
    if isinstance(states, tuple):
        return tuple(each(change, x) for x in states)
    return None if states is None else change(states)


@planned
def in_blocks(tree: PrefixTree) -> Blocks | None:
    """None where all nodes begin at multiples already, or there are no tokens."""
    aligned = all(start % BLOCK == 0 for start in tree.starts)
    return None if aligned or not tree.tokens else _blocks(tree)


class _Node(NamedTuple):
    """parent: of the nodes in blocks, -1 for none. root: whose initial state it has then."""

    depth: int
    parent: int
    root: int
    tokens: list[int]


def _blocks(tree: PrefixTree) -> Blocks:
    made: list[_Node] = []
    ends: list[int] = []  # of each node, where its whole blocks end; -1 at a root's beginning
    finals: list[int] = []
    outputs: dict[int, tuple[int, int]] = {}

    def add(n: int, parent: int, tokens: list[int]) -> int:
        depth = made[parent].depth + 1 if parent >= 0 else 0
        made.append(_Node(depth, parent, tree.roots[n], tokens))
        own = tree.own(n)
        outputs.update({t: (len(made) - 1, i) for i, t in enumerate(tokens) if t in own})
        return len(made) - 1

    for n, start in enumerate(tree.starts):
        before = [t for piece in tree.path(n, start % BLOCK) for t in piece]
        tokens = [*before, *tree.own(n)]
        whole = len(tokens) // BLOCK * BLOCK
        end = -1 if tree.parents[n] < 0 else ends[tree.parents[n]]
        end = add(n, end, tokens[:whole]) if whole else end
        ends.append(end)
        rest = tokens[whole:]
        finals.append(add(n, end, rest) if rest or end < 0 else end)
    # level by level, so that recurrences make no further copies
    order = sorted(range(len(made)), key=lambda i: made[i].depth)
    place = {i: at for at, i in enumerate(order)}
    offsets, index = [0], []
    for i in order:
        index += made[i].tokens
        offsets.append(len(index))
    parents = [-1 if made[i].parent < 0 else place[made[i].parent] for i in order]
    results = [outputs[t] for t in range(tree.tokens)]
    return Blocks(
        PrefixTree(offsets, parents),
        _rows(index),
        _rows([offsets[place[i]] + at for i, at in results]),
        _rows([made[i].root if made[i].parent < 0 else -1 for i in order]),
        _rows([place[i] for i in finals]),
    )


def _rows(index: list[int]) -> Rows:
    return Rows(torch.tensor(index, dtype=torch.int64, device="cpu"))
