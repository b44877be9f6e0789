"""The inputs of a convolution, and its options."""

from typing import NamedTuple

from torch import Tensor


class ConvInputs(NamedTuple):
    x: Tensor  # [B, T, D]
    weight: Tensor  # [D, W]
    bias: Tensor | None  # [D]
    residual: Tensor | None  # [B, T, D]
    state: Tensor | None  # [N, D, W]
    cu_seqlens: Tensor | None  # [N + 1]


class GradInputs(NamedTuple):
    """dy, dy1, dy2: gradients of y, or of each of up to three tensors with its channels."""

    dy: Tensor
    dy1: Tensor | None
    dy2: Tensor | None
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor | None
    cu_seqlens: Tensor | None

    def dys(self) -> list[Tensor]:
        return [x for x in self[:3] if x is not None]


class UpdateInputs(NamedTuple):
    """A token of each of N sequences."""

    x: Tensor  # [N, D]
    state: Tensor  # [S, D, W], moved on in place
    weight: Tensor  # [D, W]
    bias: Tensor | None  # [D]
    residual: Tensor | None  # [N, D]
    indices: Tensor | None  # [N], into the states


# Of three tensors how many are normalised: queries and keys.
UNIT_TENSORS = 2
# Inside the root of their norms: that of ops.l2_norm.
UNIT_EPS = 1e-6
# Channels of a run that a warp has: with fewer it has too little of each row, with more it spills.
UNIT_WIDTHS = (64, 128)
