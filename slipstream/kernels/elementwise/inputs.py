"""Inputs that an operator's kernels and its plain twin take as one value."""

from typing import NamedTuple

from torch import Tensor

# The preconditioner's centre of log A that stands for None, fla's.
CENTRE = -0.2


class PreconditionerInputs(NamedTuple):
    """k [B, T, H, K], all contiguous.

    Args:
        g, beta: [B, T, H]. centre: [H], None is CENTRE. state: A before [N, H, K].
    """

    k: Tensor
    g: Tensor
    beta: Tensor
    centre: Tensor | None
    state: Tensor | None
    cu_seqlens: Tensor | None
    x: float
    eps: float

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        return self[:5]

    @property
    def sequences(self) -> int:
        return self.k.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
