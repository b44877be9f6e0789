"""Rules that say which weight becomes which, in both directions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Change = Callable[[list[Tensor]], list[Tensor]]


class Rule(NamedTuple):
    """Weights of ours and theirs that hold the same numbers.

    load makes ours, in their order, of theirs; save makes theirs of ours.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    load: Change
    save: Change

    def prefixed(self, ours: str, theirs: str) -> "Rule":
        return self._replace(
            ours=tuple(ours + x for x in self.ours), theirs=tuple(theirs + x for x in self.theirs)
        )


def same(ours: str, theirs: str) -> Rule:
    return Rule((ours,), (theirs,), list, list)


def renamed(*names: str | tuple[str, str]) -> list[Rule]:
    """Rules for weights that only have another name: ours and theirs, or one name for both."""
    return [same(x, x) if isinstance(x, str) else same(*x) for x in names]


def joined(ours: str, theirs: Sequence[str], sizes: Sequence[int]) -> Rule:
    """A rule that stacks their weights, of `sizes` rows, in one of ours."""
    return Rule(
        (ours,),
        tuple(theirs),
        lambda given: [torch.cat(given)],
        lambda given: list(given[0].split(list(sizes))),
    )


def convolutions(ours: str, theirs: Sequence[str], sizes: Sequence[int]) -> Rule:
    """Weights [D, W] of one convolution, theirs of several, each as torch.nn.Conv1d's [D, 1, W]."""
    return Rule(
        (ours,),
        tuple(theirs),
        lambda given: [torch.cat(given).squeeze(1)],
        lambda given: list(given[0].unsqueeze(1).split(list(sizes))),
    )


def transposed(ours: str, theirs: str) -> Rule:
    return Rule((ours,), (theirs,), _transpose, _transpose)


def reordered(name: str, order: Tensor, dim: int) -> Rule:
    """Ours has theirs at `order`, along a dimension."""

    def changed(order: Tensor) -> Change:
        return lambda given: [given[0].index_select(dim, order)]

    return Rule((name,), (name,), changed(order), changed(order.argsort()))


def stacked(ours: str, theirs: Sequence[str], shape: Sequence[int]) -> Rule:
    """Ours is theirs, each flattened, one below the other; theirs are of this shape."""
    return Rule(
        (ours,),
        tuple(theirs),
        lambda given: [torch.stack([x.flatten() for x in given])],
        lambda given: [x.reshape(tuple(shape)) for x in given[0]],
    )


def shaped(ours: str, theirs: str, our_shape: Sequence[int], their_shape: Sequence[int]) -> Rule:
    return Rule(
        (ours,),
        (theirs,),
        lambda given: [given[0].reshape(tuple(our_shape))],
        lambda given: [given[0].reshape(tuple(their_shape))],
    )


def experts(ours: str, gate: Sequence[str], up: Sequence[str], down: Sequence[str]) -> list[Rule]:
    """Experts' matrices: ours of all together, of gate and up in one; theirs one by one."""
    n = len(gate)

    def load(given: list[Tensor]) -> list[Tensor]:
        return [torch.cat([torch.stack(given[:n]), torch.stack(given[n:])], 1)]

    def save(given: list[Tensor]) -> list[Tensor]:
        gates, ups = given[0].chunk(2, dim=1)
        return [*gates.unbind(), *ups.unbind()]

    return [
        Rule((f"{ours}.gate_up_proj",), (*gate, *up), load, save),
        Rule(
            (f"{ours}.down_proj",),
            tuple(down),
            lambda given: [torch.stack(given)],
            lambda given: list(given[0].unbind()),
        ),
    ]


def interleaved(ours: Sequence[str], theirs: str, groups: int, sizes: Sequence[int]) -> Rule:
    """Theirs has, group by group, rows of each of several matrices; `sizes` are those of a group.

    Ours has each matrix by itself.
    """

    def load(given: list[Tensor]) -> list[Tensor]:
        parts = given[0].unflatten(0, (groups, -1)).split(list(sizes), dim=1)
        return [x.flatten(0, 1) for x in parts]

    def save(given: list[Tensor]) -> list[Tensor]:
        return [torch.cat([x.unflatten(0, (groups, -1)) for x in given], 1).flatten(0, 1)]

    return Rule(tuple(ours), (theirs,), load, save)


def then(first: Rule, ours: Sequence[str], load: Change, save: Change) -> Rule:
    """`first`, and ours made of what it gives."""
    return Rule(
        tuple(ours),
        first.theirs,
        lambda given: load(first.load(given)),
        lambda given: first.save(save(given)),
    )


def _transpose(given: list[Tensor]) -> list[Tensor]:
    return [x.t() for x in given]
