"""mamba_ssm.ops.triton.layer_norm: norms with what comes before them in a block."""

from slipstream.compat.fixed import fixed
from slipstream.compat.flash_attn.ops.triton import layer_norm as flash_attn
from slipstream.compat.flash_attn.ops.triton.layer_norm import layer_norm_linear_fn

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "rms_norm_fn"]

layer_norm_fn = fixed(
    flash_attn.layer_norm_fn, "layer_norm_fn",
    "flash_attn.ops.triton.layer_norm.layer_norm_fn, without what came later there.",
    **flash_attn.WEIGHT_OPTIONS, out_dtype=None, out=None, residual_out=None,
)  # fmt: skip
rms_norm_fn = fixed(
    layer_norm_fn, "rms_norm_fn", "layer_norm_fn without the mean.", is_rms_norm=True
)


class RMSNorm(flash_attn.RMSNorm):
    """rms_norm_fn with a weight [hidden_size]."""

    __init__ = fixed(flash_attn.RMSNorm.__init__, "__init__", **flash_attn.WEIGHT_OPTIONS)
