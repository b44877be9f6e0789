"""fla.modules: norms, convolutions, rotary embeddings, losses and activations."""

from slipstream.compat.fla.modules.convolution import ShortConvolution
from slipstream.compat.fla.modules.fused_bitlinear import BitLinear, FusedBitLinear
from slipstream.compat.fla.modules.fused_cross_entropy import FusedCrossEntropyLoss
from slipstream.compat.fla.modules.fused_kl_div import FusedKLDivLoss
from slipstream.compat.fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from slipstream.compat.fla.modules.fused_norm_gate import (
    FusedLayerNormGated,
    FusedLayerNormGatedLinear,
    FusedLayerNormSwishGate,
    FusedLayerNormSwishGateLinear,
    FusedRMSNormGated,
    FusedRMSNormGatedLinear,
    FusedRMSNormSwishGate,
    FusedRMSNormSwishGateLinear,
)
from slipstream.compat.fla.modules.l2norm import L2Norm
from slipstream.compat.fla.modules.layernorm import (
    GroupNorm,
    GroupNormLinear,
    LayerNorm,
    LayerNormLinear,
    RMSNorm,
    RMSNormLinear,
)
from slipstream.compat.fla.modules.layernorm_gated import LayerNormGated, RMSNormGated
from slipstream.compat.fla.modules.long_conv import ImplicitLongConvolution, LongConvolution
from slipstream.compat.fla.modules.mlp import GatedMLP
from slipstream.compat.fla.modules.rotary import RotaryEmbedding
from slipstream.compat.fla.modules.token_shift import TokenShift

__all__ = [
    "BitLinear",
    "FusedBitLinear",
    "FusedCrossEntropyLoss",
    "FusedKLDivLoss",
    "FusedLayerNormGated",
    "FusedLayerNormGatedLinear",
    "FusedLayerNormSwishGate",
    "FusedLayerNormSwishGateLinear",
    "FusedLinearCrossEntropyLoss",
    "FusedRMSNormGated",
    "FusedRMSNormGatedLinear",
    "FusedRMSNormSwishGate",
    "FusedRMSNormSwishGateLinear",
    "GatedMLP",
    "GroupNorm",
    "GroupNormLinear",
    "ImplicitLongConvolution",
    "L2Norm",
    "LayerNorm",
    "LayerNormGated",
    "LayerNormLinear",
    "LongConvolution",
    "RMSNorm",
    "RMSNormGated",
    "RMSNormLinear",
    "RotaryEmbedding",
    "ShortConvolution",
    "TokenShift",
]
