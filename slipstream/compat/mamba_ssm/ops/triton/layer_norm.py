"""mamba_ssm.ops.triton.layer_norm: norms with what comes before them in a block."""

from typing import Any

from slipstream.compat.fixed import fixed
from slipstream.compat.flash_attn.ops.triton import layer_norm as flash_attn
from slipstream.compat.flash_attn.ops.triton.layer_norm import layer_norm_linear_fn

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "rms_norm_fn"]


layer_norm_fn = fixed(
    flash_attn.layer_norm_fn, "layer_norm_fn",
    "flash_attn.ops.triton.layer_norm.layer_norm_fn, without what came later there.",
    zero_centered_weight=False, out_dtype=None, out=None, residual_out=None,
)  # fmt: skip
rms_norm_fn = fixed(
    layer_norm_fn, "rms_norm_fn", "layer_norm_fn without the mean.", is_rms_norm=True
)


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
