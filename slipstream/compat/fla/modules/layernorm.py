"""fla.modules.layernorm: norms with a residual sum before and a linear layer behind them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.ops import norm as ops


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    is_rms_norm: bool,
    num_groups: int = 1,
) -> Any:
    """y in x's dtype, or with prenorm (y, h), where h = x + residual has the residual's dtype."""
    wide = residual_in_fp32 if residual is None else residual.dtype == torch.float32
    if num_groups == 1:
        norm = ops.rms_norm if is_rms_norm else ops.layer_norm
        return norm(
            x,
            weight,
            bias,
            eps,
            residual=residual,
            prenorm=prenorm,  # pyright: ignore[reportArgumentType]
            residual_in_fp32=wide,
        )
    h = x.float() if wide else x
    h = h if residual is None else h + residual
    y = ops.group_norm(h, num_groups, weight, bias, eps, rms=is_rms_norm).to(x.dtype)
    return (y, h) if prenorm else y


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """layer_norm(x + residual), or rms_norm; with prenorm the sum too."""
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


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
    """As layer_norm, of each of num_groups equal parts of the last dimension."""
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """rms_norm(x + residual); with prenorm the sum too."""
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def layer_norm_linear(
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
    given = x, norm_weight, norm_bias, residual, eps, True, residual_in_fp32, is_rms_norm
    y, h = _norm(*given, num_groups)
    y = linear(y, linear_weight, linear_bias)
    return (y, h) if prenorm else y


def linear(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer whose parameters take the dtype of what it reads."""
    return F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))


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
    """group_norm and a linear layer."""
    norm = x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm
    return layer_norm_linear(*norm, residual_in_fp32, is_rms_norm, num_groups)


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """rms_norm and a linear layer."""
    norm = x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm
    return layer_norm_linear(*norm, residual_in_fp32, True)


class Norm(nn.Module):
    """weight and bias [hidden_size], parameters or None, and the options of a norm."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            made = torch.empty(hidden_size, device=device, dtype=dtype) if wanted else None
            self.register_parameter(name, None if made is None else nn.Parameter(made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}"


class LayerNorm(Norm):
    """layer_norm with parameters."""

    is_rms_norm = False

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        given = x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32
        return _norm(*given, self.is_rms_norm)


class RMSNorm(LayerNorm):
    """rms_norm with parameters."""

    is_rms_norm = True


class LayerNormLinear(Norm):
    """layer_norm with parameters, and a linear layer whose weight and bias are given."""

    is_rms_norm = False

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
        return layer_norm_linear(*norm, residual_in_fp32, self.is_rms_norm)


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

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        given = x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32
        return _norm(*given, self.is_rms_norm, self.num_groups)


class GroupNormLinear(_Groups):
    """group_norm with parameters, and a linear layer whose weight and bias are given."""

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
        return layer_norm_linear(*norm, residual_in_fp32, self.is_rms_norm, self.num_groups)
