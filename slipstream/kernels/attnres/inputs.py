"""The inputs of attention over the depth, and the tensors that its forward saves for its backward.
L residuals of R rows of D features."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


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
