"""fla.modules.l2norm: vectors of length one."""

import torch
from torch import Tensor, nn

from slipstream.ops import norm as ops


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    y = ops.l2_norm(x, eps)
    return y if output_dtype is None else y.to(output_dtype)


l2_norm = l2norm


class L2Norm(nn.Module):
    """l2norm as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)
