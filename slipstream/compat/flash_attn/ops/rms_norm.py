"""flash_attn.ops.rms_norm: the norm alone, and behind dropout and a residual sum."""

from torch import Tensor

from slipstream.common import checks
from slipstream.compat.fixed import fixed
from slipstream.compat.flash_attn.ops.layer_norm import DropoutAddLayerNorm, dropout_add_norm
from slipstream.compat.flash_attn.ops.triton import layer_norm as triton
from slipstream.compat.missing import missing_names

__getattr__ = missing_names(
    __name__, ("dropout_add_rms_norm_subset", "dropout_add_rms_norm_parallel_residual")
)


@checks.operator
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The norm of x [..., D]."""
    checks.expect_not_negative("epsilon", epsilon)
    return triton.rms_norm_fn(x, weight, None, eps=epsilon)


dropout_add_rms_norm = checks.operator(
    fixed(dropout_add_norm, "dropout_add_rms_norm", norm=triton.rms_norm_fn)
)


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """dropout_add_rms_norm with a weight [hidden_size]."""

    _norm = staticmethod(dropout_add_rms_norm)
    _has_bias = False


class RMSNorm(triton.RMSNorm):
    """rms_norm with a weight [hidden_size]."""

    __init__ = fixed(triton.RMSNorm.__init__, "__init__", order="self hidden_size eps device dtype")

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return rms_norm(x, self.weight, self.eps)
