"""The inputs of attention over the depth, and the tensors that its forward saves for its backward.
L residuals of R rows of D features."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The most residuals that the kernels take: pointers among their arguments.
STREAMS = 16


class AttnresInputs(NamedTuple):
    query: Tensor  # [D]
    residuals: Sequence[Tensor]  # L of [..., D]; kernels take [R, D], contiguous
    weight: Tensor  # [D]
    output_weight: Tensor | None  # [D], of the norm of the sum
    eps: float
    scale: float


class ForwardSums(NamedTuple):
    o: Tensor  # [R, D], the sum before its norm
    rest: Tensor  # [R, D], what rounding has left of it; of no elements where o is not rounded
    s: Tensor  # [L, R], scores
    rstd: Tensor  # [L, R]
    lse: Tensor  # [R]


def for_backward(first: Tensor, output_weight: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """Memory for the sum before its norm, where y is not that, and for what rounding leaves."""
    wanted = output_weight is not None, first.dtype in (torch.bfloat16, torch.float16)
    o, rest = (torch.empty_like(first) if keep and x else first.new_empty(0) for x in wanted)
    return o, rest
