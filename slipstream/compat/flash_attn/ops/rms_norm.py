"""flash_attn.ops.rms_norm: the norm alone, and behind dropout and a residual sum."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.common import checks
from slipstream.compat.fixed import fixed
from slipstream.compat.flash_attn.ops.layer_norm import DropoutAddLayerNorm, dropout_add_norm
from slipstream.compat.flash_attn.ops.triton.layer_norm import rms_norm_fn
from slipstream.compat.missing import missing_names

__getattr__ = missing_names(
    __name__,
    (
        "dropout_add_rms_norm_subset",
        "dropout_add_rms_norm_parallel_residual",
    ),
)


@checks.operator
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The norm of x [..., D]."""
    checks.expect_not_negative("epsilon", epsilon)
    return rms_norm_fn(x, weight, None, eps=epsilon)


dropout_add_rms_norm = checks.operator(
    fixed(dropout_add_norm, "dropout_add_rms_norm", norm=rms_norm_fn)
)


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """dropout_add_rms_norm with a weight [hidden_size]."""

    _norm = staticmethod(dropout_add_rms_norm)
    _has_bias = False


class RMSNorm(nn.Module):
    """rms_norm with a weight [hidden_size]."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
