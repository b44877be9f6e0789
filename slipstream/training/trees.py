"""Rows of prefix trees out of samples: what several samples begin with is there once.

    tree = tree_of_rows([prompt + completion for completion in completions])
    h = model.model(input_ids=tree.input_ids, cu_seqlens=..., parents=...).last_hidden_state

A model's loss of a row (tree.inputs(labels)) is the mean over its labels, of which each is there
once: tokens with a label are shared by no two samples. log_probs has those of each sample.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.ops.loss import linear_log_probs
from slipstream.runtime.prefix_tree import PrefixTree
from slipstream.runtime.rows import Rows
from slipstream.runtime.token_ids import IGNORED


class TreeRow(NamedTuple):
    """Samples in one packed row.

    input_ids: int64 [1, T]. labels: int64 [1, T], -100 where there is none. tree: the plan, which a
    model takes as `context`. paths: the nodes of each sample, from the root on.
    """

    input_ids: Tensor
    labels: Tensor
    tree: PrefixTree
    paths: tuple[tuple[int, ...], ...]

    def inputs(self) -> dict[str, Any]:
        """Arguments of a model of ours: tokens, labels and the tree, as tensors."""
        parents = torch.tensor(self.tree.parents, dtype=torch.int32, device=self.input_ids.device)
        offsets = self.tree.offsets_on(self.input_ids.device)
        ids = {"input_ids": self.input_ids, "labels": self.labels}
        return {**ids, "cu_seqlens": offsets, "parents": parents}

    def to(self, device: torch.device | str) -> "TreeRow":
        ids, labels = (x.to(device, non_blocking=True) for x in self[:2])
        return self._replace(input_ids=ids, labels=labels)

    def rows(self, x: Tensor) -> Tensor:
        """x [1, T, ...] of each sample's tokens, [samples, longest, ...], with zeros behind them;
        gradients of what samples share are added up in their order."""
        if "rows" not in self.tree.plans:
            ranges = [[self.tree.own(n) for n in path] for path in self.paths]
            longest = max((sum(map(len, row)) for row in ranges), default=0)
            index = torch.full((len(ranges), longest), -1, dtype=torch.int64, device="cpu")
            for to, row in zip(index, ranges):
                tokens = torch.tensor([t for piece in row for t in piece], device="cpu")
                to[: len(tokens)] = tokens
            self.tree.plans["rows"] = Rows(index.flatten())
        found = self.tree.plans["rows"].copy(x.flatten(0, 1))
        return found.unflatten(0, (len(self.paths), -1))

    def log_probs(
        self, h: Tensor, weight: Tensor, bias: Tensor | None = None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The log-probability of each sample's tokens [samples, longest], 0 for its first one and
        behind its last, and the entropies of their distributions.

        h: the model's last hidden states [1, T, D]. weight, bias: of its head.
        """
        target = self.tree.nodes.next_tokens(self.input_ids, IGNORED)
        given = self.tree.before(h)[0], weight, target[0], bias
        found = linear_log_probs(*given, temperature=temperature, return_entropy=True)
        log_probs, entropies = (self.rows(x[None]) for x in found)
        return log_probs, entropies


def tree_of_rows(
    rows: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]] | None = None,
    *,
    least: int = 1,
    device: torch.device | str = "cpu",
) -> TreeRow:
    """The tree of samples, level by level, as recurrences read it without copies.

    Args:
        rows: the tokens of each sample.
        labels: of each token, -100 for none; samples share no token with a label. None: of none.
        least: so many tokens at least begin several samples, or they are not shared.
        device: of the tensors.

    Raises:
        ValueError: labels are not as many as tokens; least is below 1.
    """
    if least < 1:
        raise ValueError(f"least: want at least 1 token, got {least}")
    given = [[IGNORED] * len(row) for row in rows] if labels is None else labels
    for i, (row, own) in enumerate(zip(rows, given, strict=True)):
        if len(row) != len(own):
            raise ValueError(f"labels: want {len(row)} for row {i}, got {len(own)}")
    ids: list[int] = []
    targets: list[int] = []
    offsets, parents = [0], []
    paths: list[list[int]] = [[] for _ in rows]
    level = [(-1, 0, [*range(len(rows))])]  # a parent, tokens before, samples that go on there
    while level:
        below = []
        for parent, begin, samples in level:
            for group in _groups(rows, given, begin, samples, least):
                first, node = group[0], len(parents)
                end = _shared(rows, given, begin, group)
                ids += rows[first][begin:end]
                targets += given[first][begin:end]
                offsets.append(len(ids))
                parents.append(parent)
                for i in group:
                    paths[i].append(node)
                more = [i for i in group if len(rows[i]) > end]
                if more:
                    below.append((node, end, more))
        level = below
    tokens, own = (torch.tensor([x], dtype=torch.int64, device=device) for x in (ids, targets))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    return TreeRow(tokens, own, PrefixTree(cu_seqlens, parents), tuple(map(tuple, paths)))


def _groups(
    rows: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    begin: int,
    samples: list[int],
    least: int,
) -> list[list[int]]:
    """Samples that share what comes next, in the order of the first of each."""
    found: dict[Any, list[int]] = {}
    for i in samples:
        row, own = rows[i][begin : begin + least], labels[i][begin : begin + least]
        alone = len(row) < least or any(x != IGNORED for x in own)
        found.setdefault(i if alone else tuple(row), []).append(i)
    return [*found.values()]


def _shared(
    rows: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], begin: int, group: list[int]
) -> int:
    """The end of the tokens that all of a group have."""
    first = rows[group[0]]
    if len(group) == 1:
        return len(first)
    end = min(len(rows[i]) for i in group)
    for at in range(begin, end):
        if any(rows[i][at] != first[at] or labels[i][at] != IGNORED for i in group):
            return at
    return end
