"""fla.modules.layernorm: norms with a residual sum before and a linear layer behind them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compat.fixed import fixed
from slipstream.nn.norm import _Norm
from slipstream.ops import norm as ops


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    """The norm of h = x + residual, of each of num_groups equal parts of the last dimension.

    y is in x's dtype; with prenorm (y, h), where h has the residual's dtype.
    """
    wide = residual_in_fp32 if residual is None else residual.dtype == torch.float32
    if num_groups == 1:
        norm = ops.rms_norm if is_rms_norm else ops.layer_norm
        options: dict[str, Any] = {"prenorm": prenorm, "residual_in_fp32": wide}
        return norm(x, weight, bias, eps, residual=residual, **options)
    h = x.float() if wide else x
    h = h if residual is None else h + residual
    y = ops.group_norm(h, num_groups, weight, bias, eps, rms=is_rms_norm).to(x.dtype)
    return (y, h) if prenorm else y


layer_norm = fixed(
    group_norm, "layer_norm",
    "layer_norm(x + residual), or rms_norm; with prenorm the sum too.", num_groups=1,
)  # fmt: skip
rms_norm = fixed(
    layer_norm, "rms_norm", "rms_norm(x + residual); with prenorm the sum too.", is_rms_norm=True
)


def group_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    """A norm as the functions above, and a linear layer."""
    norm = x, norm_weight, norm_bias, residual, eps, True, residual_in_fp32, is_rms_norm
    y, h = group_norm(*norm, num_groups)
    y = linear(y, linear_weight, linear_bias)
    return (y, h) if prenorm else y


layer_norm_linear = fixed(group_norm_linear, "layer_norm_linear", "group_norm_linear by its name.")
rms_norm_linear = fixed(
    group_norm_linear, "rms_norm_linear", "rms_norm and a linear layer.",
    is_rms_norm=True, num_groups=1,
)  # fmt: skip


def linear(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer whose parameters take the dtype of what it reads."""
    return F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))


class Norm(_Norm):
    """weight and bias [hidden_size], parameters or None, and the options of a norm."""

    is_rms_norm = False
    num_groups = 1

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        both = elementwise_affine, elementwise_affine and bias
        super().__init__(hidden_size, *both, device, dtype)
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}"


class LayerNorm(Norm):
    """layer_norm with parameters."""

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        given = x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32
        return group_norm(*given, self.is_rms_norm, self.num_groups)


class RMSNorm(LayerNorm):
    """rms_norm with parameters."""

    is_rms_norm = True


class LayerNormLinear(Norm):
    """layer_norm with parameters, and a linear layer whose weight and bias are given."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        norm = x, self.weight, self.bias, weight, bias, residual, self.eps, prenorm
        return group_norm_linear(*norm, residual_in_fp32, self.is_rms_norm, self.num_groups)


class RMSNormLinear(LayerNormLinear):
    """rms_norm with parameters, and a linear layer whose weight and bias are given."""

    is_rms_norm = True


class _Groups(Norm):
    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if hidden_size % num_groups:
            raise ValueError(f"num_groups: want a divisor of {hidden_size}, got {num_groups}")
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.num_groups, self.is_rms_norm = num_groups, is_rms_norm


class GroupNorm(_Groups):
    """group_norm with parameters."""

    forward = LayerNorm.forward


class GroupNormLinear(_Groups):
    """group_norm with parameters, and a linear layer whose weight and bias are given."""

    forward = LayerNormLinear.forward
