"""The keys that tokens of prefix trees see: tables for attention (ops/_attention_trees.py)."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.context_parallel import copied
from slipstream.runtime.prefix_tree import PrefixTree, planned
from slipstream.runtime.rows import Rows, rows_of


class Above(NamedTuple):
    """Queries on the tokens of their ancestors: a packed call.

    q, k: the tokens of its queries and keys. counts: queries of each depth, of which no token comes
    twice.
    """

    q: Rows
    k: Rows
    counts: list[int]
    cu_q: Tensor
    cu_k: Tensor


@planned
def above(tree: PrefixTree, device: torch.device) -> Above | None:
    """The call; None where no token has an ancestor with tokens."""
    below: list[list[range]] = [[] for _ in tree.parents]
    for n, parent in enumerate(tree.parents):
        while parent >= 0 and tree.length(n):
            below[parent].append(tree.own(n))
            parent = tree.parents[parent]
    q: list[list[range]] = []
    k, counts = [], []
    for nodes in tree.by_level:
        inner = [n for n in nodes if below[n] and tree.length(n)]
        q += [below[n] for n in inner]
        k += [tree.own(n) for n in inner]
        counts.append(sum(len(x) for n in inner for x in below[n]))
    if not k:
        return None
    offsets = [_offsets([sum(map(len, x)) for x in q]), _offsets([len(x) for x in k])]
    queries = rows_of([x for ranges in q for x in ranges])
    return Above(queries, rows_of(k), counts, *(copied(x, device) for x in offsets))


def _offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], device="cpu").cumsum(0).int()


@planned
def paths(tree: PrefixTree, last: int | None, device: torch.device) -> tuple[Rows, Tensor]:
    """The keys of each node, its `last` ancestors' and its own, and their offsets."""
    ranges = [[*tree.path(n, last), tree.own(n)] for n in range(len(tree.parents))]
    counts = [sum(map(len, node)) for node in ranges]
    return rows_of([x for node in ranges for x in node]), copied(_offsets(counts), device)


@planned
def copies_paths(tree: PrefixTree) -> bool:
    """Whether keys of paths cost less as copies than queries of descendants: joining the sums of a
    query takes twice as long as a copy, and each depth its own launches."""
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(0 if parent < 0 else depths[parent] + (tree.length(parent) > 0))
    own = [n for n in range(len(depths)) if tree.length(n)]
    keys = sum(tree.starts[n] for n in own)
    queries = sum(depths[n] * tree.length(n) for n in own)
    return 0 < keys <= 2 * queries
