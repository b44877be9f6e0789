"""fla.modules.fused_norm_gate: norms whose result a gate lets through."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from slipstream.compat.fixed import fixed
from slipstream.compat.fla.modules.layernorm import Norm, layer_norm, linear
from slipstream.ops import norm as ops
from slipstream.ops._fp32 import widen

ACTIVATIONS = {"swish": F.silu, "silu": F.silu, "sigmoid": F.sigmoid}


def _gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    is_rms_norm: bool,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    """norm(x + residual) f(g) in x's dtype, or with prenorm that and the sum."""
    g = g.reshape(x.shape)
    if is_rms_norm and residual is None and not residual_in_fp32:
        y = ops.rms_norm_gated(x, g, weight, bias, eps, activation=activation)
        return (y, x) if prenorm else y
    wide = widen(x)
    normed, h = layer_norm(wide, weight, bias, residual, eps, True, residual_in_fp32, is_rms_norm)
    y = (normed * ACTIVATIONS[activation](g.to(normed.dtype))).to(x.dtype)
    if not prenorm:
        return y
    return y, h if residual is None else h.to(residual.dtype)


_F = 'norm(x + residual) f(g), where f is "swish" ("silu") or "sigmoid".'
layer_norm_gated = fixed(_gated, "layer_norm_gated", f"layer_{_F}", is_rms_norm=False)
rms_norm_gated = fixed(_gated, "rms_norm_gated", f"rms_{_F}", is_rms_norm=True)


def _gated_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    is_rms_norm: bool,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    norm = norm_weight, norm_bias, is_rms_norm, "swish", residual, True, residual_in_fp32, eps
    y, h = _gated(x, g, *norm)
    y = linear(y, linear_weight, linear_bias)
    return (y, h) if prenorm else y


layer_norm_swish_gate_linear = fixed(
    _gated_linear, "layer_norm_swish_gate_linear", "layer_norm_gated and a linear layer.",
    is_rms_norm=False,
)  # fmt: skip
rms_norm_swish_gate_linear = fixed(
    _gated_linear, "rms_norm_swish_gate_linear", "rms_norm_gated and a linear layer.",
    is_rms_norm=True,
)  # fmt: skip


class FusedLayerNormGated(Norm):
    """layer_norm_gated with parameters."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        activation: str = "swish",
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: want one of {list(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        given = self.weight, self.bias, self.is_rms_norm, self.activation, residual, prenorm
        return _gated(x, g, *given, residual_in_fp32, self.eps)


class FusedRMSNormGated(FusedLayerNormGated):
    """rms_norm_gated with parameters."""

    is_rms_norm = True

    __init__ = fixed(
        FusedLayerNormGated.__init__, "__init__",
        order="self hidden_size elementwise_affine eps activation device dtype",
    )  # fmt: skip


class FusedLayerNormSwishGate(FusedLayerNormGated):
    """FusedLayerNormGated with "swish"."""

    __init__ = fixed(FusedLayerNormGated.__init__, "__init__", activation="swish")


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """FusedRMSNormGated with "swish"."""

    __init__ = fixed(FusedRMSNormGated.__init__, "__init__", activation="swish")


class FusedLayerNormGatedLinear(Norm):
    """layer_norm_swish_gate_linear with the norm's parameters."""

    __init__ = fixed(Norm.__init__, "__init__", bias=False)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        if weight is None:
            raise ValueError("weight: want that of the linear layer, got None")
        parameters = self.weight, self.bias, weight, bias
        given = self.is_rms_norm, residual, prenorm, residual_in_fp32, self.eps
        return _gated_linear(x, g, *parameters, *given)


class FusedRMSNormGatedLinear(FusedLayerNormGatedLinear):
    """rms_norm_swish_gate_linear with the norm's parameters."""

    is_rms_norm = True


class FusedLayerNormSwishGateLinear(FusedLayerNormGatedLinear):
    """The same as FusedLayerNormGatedLinear."""


class FusedRMSNormSwishGateLinear(FusedRMSNormGatedLinear):
    """The same as FusedRMSNormGatedLinear."""
