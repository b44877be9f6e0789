"""The inputs and options of a norm."""

from typing import NamedTuple

import torch
from torch import Tensor


class NormInputs(NamedTuple):
    """x, gate, residual: [..., D]. weight, bias: [D]."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None
    residual: Tensor | None = None


class BackwardInputs(NamedTuple):
    """dy, dh: gradients of y and of h. x: h, which is x, or its sum with the residual. stats: as
    forward left them. residual_dtype: None without a residual."""

    dy: Tensor
    dh: Tensor | None
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    stats: Tensor | None
    residual_dtype: torch.dtype | None


class NormOptions(NamedTuple):
    """eps: inside the root. centre: subtract the mean. l2: the sum of squares, not their mean.

    groups: equal runs of features, each normalised alone; 0 is one run.
    zero_centered: the factor is 1 + weight.
    activation: of the gate, "silu" or "sigmoid". gate_first: normalise what the gate let through.
    wide_h: the sum with the residual is float32. keep_h: it is a result.
    """

    eps: float
    centre: bool = False
    l2: bool = False
    groups: int = 0
    zero_centered: bool = False
    activation: str = "silu"
    gate_first: bool = False
    wide_h: bool = False
    keep_h: bool = False

    def constants(self) -> dict[str, bool]:
        """Those of all of the kernels."""
        return {
            "CENTRE": self.centre,
            "ZERO_CENTERED": self.zero_centered,
            "SILU": self.activation == "silu",
            "GATE_FIRST": self.gate_first,
        }

    def kind(self, gated: bool) -> tuple[str | int, ...]:
        """What kernels are compiled or compute differently for."""
        flags = self.centre and "layer", self.l2 and "l2", self.groups
        flags += (self.zero_centered and "zero-centered",)
        return (*flags, self.activation, self.gate_first and "gate-first") if gated else flags


def h_dtype(x: Tensor, residual: Tensor | None, n: NormOptions) -> torch.dtype:
    """The dtype of the sum with the residual."""
    if n.wide_h and x.dtype != torch.float64:
        return torch.promote_types(torch.float32, x.dtype if residual is None else residual.dtype)
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


# Widest row of the l2 norm whose backward makes rstd again: its sum is within a warp, and costs
# less than to write and read it.
RECOMPUTED = 256


def stats_shape(x: Tensor, n: NormOptions, save: bool) -> tuple[int, int] | None:
    """The shape of the statistics kept for backward, [1 or 2, rows]: rstd, mean; None: nothing."""
    width, groups = x.shape[-1], n.groups or 1
    if not save or (n.l2 and width <= RECOMPUTED):
        return None
    return 1 + n.centre, x.numel() // width * groups


def stores_h(x: Tensor, residual: Tensor | None, n: NormOptions, save: bool) -> bool:
    """Whether a kernel writes h: it is a result or wanted for backward, and is not x itself."""
    if residual is None:
        return n.keep_h and h_dtype(x, None, n) != x.dtype
    return save or n.keep_h
