"""A row of prefix trees."""

from random import Random

import torch
from torch import Tensor

# two roots, empty nodes (one with children, one a leaf), one-token nodes, a chain, several children
PARENTS = [-1, 0, 0, 1, 1, 3, -1, 6, 6, 2, 9, 0]
LENGTHS = (5, 3, 0, 1, 1, 2, 2, 0, 6, 3, 2, 1)


def offsets() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


def path_of(n: int) -> list[int]:
    """The tokens from the root's first to node n's last."""
    begin = offsets().tolist()
    own = [*range(begin[n], begin[n + 1])]
    return own if PARENTS[n] < 0 else path_of(PARENTS[n]) + own


def root_of(n: int) -> int:
    return n if PARENTS[n] < 0 else root_of(PARENTS[n])


def leaves() -> list[int]:
    return [n for n in range(len(PARENTS)) if n not in PARENTS]


def random_tree(random: Random) -> tuple[tuple[int, ...], list[int]]:
    """Up to 40 nodes, 6 deep, in no order of their depths."""
    parents, depths = [-1], [0]
    for _ in range(random.randrange(39)):
        parent = random.randrange(-1, len(parents))
        if parent < 0 or depths[parent] < 5:
            parents.append(parent)
            depths.append(0 if parent < 0 else depths[parent] + 1)
    return tuple(random.choice((1, 30, 300)) for _ in parents), parents
