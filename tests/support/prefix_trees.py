"""A row of prefix trees."""

import torch
from torch import Tensor

# two roots, empty nodes (one with children, one a leaf), one-token nodes, a chain, several children
PARENTS = [-1, 0, 0, 1, 1, 3, -1, 6, 6, 2, 9, 0]
LENGTHS = (5, 3, 0, 1, 1, 2, 4, 0, 6, 3, 2, 1)


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
