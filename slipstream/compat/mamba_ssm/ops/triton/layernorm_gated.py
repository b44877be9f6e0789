"""mamba_ssm.ops.triton.layernorm_gated: norms of groups, gated by silu(z) before or behind."""

from typing import Any

from slipstream.compat.fla.modules import layernorm_gated as fla
from slipstream.compat.fla.modules.layernorm_gated import layernorm_fn, rmsnorm_fn

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rmsnorm_fn"]


class LayerNorm(fla.LayerNormGated):
    """layernorm_fn with a weight and a bias [hidden_size]."""


class RMSNorm(fla.RMSNormGated):
    """rmsnorm_fn with a weight [hidden_size]: Mamba-2's RMSNormGated."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
