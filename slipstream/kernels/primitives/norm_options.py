"""The options of a norm: one value, which callers hand on as it is to what makes the norm."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common.checks import cast

# Widest row of the l2 norm whose backward makes rstd again: its sum is within a warp, and costs
# less than to write and read it.
RECOMPUTED = 256


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
        """Those of all of the norms' kernels."""
        return {
            "CENTRE": self.centre,
            **self.row_constants(),
            "SILU": self.activation == "silu",
            "GATE_FIRST": self.gate_first,
        }

    def row_constants(self) -> dict[str, bool]:
        """Those of a kernel with a row's norm beside something else."""
        return {"ZERO_CENTERED": self.zero_centered}

    @property
    def is_row_norm(self) -> bool:
        """Whether row_constants say all: it is an rms norm of a row, whose factor is any."""
        return self == NormOptions(self.eps, zero_centered=self.zero_centered)

    def kind(self, gated: bool) -> tuple[str | int, ...]:
        """What kernels are compiled or compute differently for."""
        flags = self.centre and "layer", self.l2 and "l2", self.groups
        flags += (self.zero_centered and "zero-centered",)
        return (*flags, self.activation, self.gate_first and "gate-first") if gated else flags

    @property
    def neutral_weight(self) -> float:
        """The weight whose factor is 1, with which training begins."""
        return 0.0 if self.zero_centered else 1.0

    def factor(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What normalised features are multiplied with."""
        if weight is None:
            return None
        weight = cast(weight, dtype)
        return weight + 1 if self.zero_centered else weight

    def h_dtype(self, x: Tensor, residual: Tensor | None) -> torch.dtype:
        """The dtype of the sum with the residual."""
        other = x if residual is None else residual
        if self.wide_h and x.dtype != torch.float64:
            return torch.promote_types(torch.float32, other.dtype)
        return x.dtype if residual is None else torch.promote_types(x.dtype, other.dtype)

    def stores_h(self, x: Tensor, residual: Tensor | None, save: bool) -> bool:
        """Whether a kernel writes h: it is a result or wanted for backward, and is not x itself."""
        if residual is None:
            return self.keep_h and self.h_dtype(x, None) != x.dtype
        return save or self.keep_h

    def stats_shape(self, x: Tensor, save: bool) -> tuple[int, int] | None:
        """Of the statistics kept for backward, [1 or 2, rows]: rstd, mean; None: nothing."""
        width, groups = x.shape[-1], self.groups or 1
        if not save or (self.l2 and width <= RECOMPUTED):
            return None
        return 1 + self.centre, x.numel() // width * groups
