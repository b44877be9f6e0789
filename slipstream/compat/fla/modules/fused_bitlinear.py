"""fla.modules.fused_bitlinear: BitNet's linear layer, of 8-bit activations and ternary weights.

Quantised values are kept in floating point, and gradients pass the rounding by.

Source: Ma and others, "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits" (2024);
Zhu and others, "Scalable MatMul-free Language Modeling" (2024), whose matmulfreellm fla follows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.compat.fla.modules.layernorm import RMSNorm, layer_norm


def activation_quant(x: Tensor) -> Tensor:
    """x rounded to 8 bits, by the largest value of the last dimension."""
    scale = 127.0 / x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


def weight_quant(w: Tensor) -> Tensor:
    """w rounded to -1, 0 and 1 times its mean absolute value."""
    scale = 1.0 / w.abs().mean().clamp(min=1e-5)
    return (w * scale).round().clamp(-1, 1) / scale


def _rounded(x: Tensor, quantised: Tensor) -> Tensor:
    return x + (quantised - x).detach()


def layer_norm_linear_quant(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """A norm, activation_quant, and a linear layer with weight_quant of its weight."""
    norm = x, norm_weight, norm_bias, residual, eps, True, residual_in_fp32, is_rms_norm
    y, h = layer_norm(*norm)
    y = _rounded(y, activation_quant(y))
    weight = _rounded(linear_weight, weight_quant(linear_weight)).to(y.dtype)
    y = F.linear(y, weight, None if linear_bias is None else linear_bias.to(y.dtype))
    return (y, h) if prenorm else y


def rms_norm_linear_quant(
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
    """layer_norm_linear_quant without the mean."""
    norm = x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm
    return layer_norm_linear_quant(*norm, residual_in_fp32, True)


def bit_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-8,
) -> Tensor:
    """layer_norm_linear_quant without the mean, the linear layer's parameters first."""
    norm = x, norm_weight, norm_bias, weight, bias
    return layer_norm_linear_quant(*norm, eps=eps, is_rms_norm=True)


class BitLinear(nn.Linear):
    """bit_linear with parameters."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, norm_eps: float = 1e-8
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.norm = RMSNorm(in_features, eps=norm_eps, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm.weight, self.norm.bias, self.norm.eps
        return bit_linear(x, self.weight, self.bias, *norm)


class FusedBitLinear(BitLinear):
    """The same as BitLinear."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
