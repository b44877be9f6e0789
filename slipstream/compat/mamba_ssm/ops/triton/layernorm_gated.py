"""mamba_ssm.ops.triton.layernorm_gated: norms of groups, gated by silu(z) before or behind."""

from slipstream.compat.fla.modules import layernorm_gated as fla
from slipstream.compat.fla.modules.layernorm_gated import layernorm_fn, rmsnorm_fn

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rmsnorm_fn"]


class LayerNorm(fla.LayerNormGated):
    """layernorm_fn with a weight and a bias [hidden_size]."""


class RMSNorm(fla.RMSNormGated):
    """rmsnorm_fn with a weight [hidden_size]: Mamba-2's RMSNormGated."""

    __init__ = fla.LayerNormGated.__init__  # norm_before_gate is True by default
