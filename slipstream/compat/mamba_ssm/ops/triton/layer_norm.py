"""mamba_ssm.ops.triton.layer_norm: norms with what comes before them in a block."""

from typing import Any

from torch import Tensor

from slipstream.common import checks
from slipstream.compat.flash_attn.ops.triton import layer_norm as flash_attn
from slipstream.compat.flash_attn.ops.triton.layer_norm import layer_norm_linear_fn

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "rms_norm_fn"]


@checks.operator
def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """flash_attn.ops.triton.layer_norm.layer_norm_fn, without what came later there."""
    return flash_attn.layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        residual_in_fp32, False, is_rms_norm, return_dropout_mask,
    )  # fmt: skip


@checks.operator
def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """layer_norm_fn without the mean."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        residual_in_fp32, True, return_dropout_mask,
    )  # fmt: skip


class RMSNorm(flash_attn.RMSNorm):
    """rms_norm_fn with a weight [hidden_size]."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, eps, dropout_p, False, device, dtype)
