"""flash_attn.ops.layer_norm: the norm alone, and behind dropout and a residual sum."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compat.fixed import fixed
from slipstream.compat.fla.modules.layernorm import Norm
from slipstream.compat.flash_attn.ops.triton.layer_norm import layer_norm_fn
from slipstream.compat.missing import missing_names

__getattr__ = missing_names(
    __name__, ("dropout_add_layer_norm_subset", "dropout_add_layer_norm_parallel_residual")
)


@checks.operator
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """The norm of x [..., D]."""
    checks.expect_not_negative("epsilon", epsilon)
    return layer_norm_fn(x, weight, bias, eps=epsilon)


def dropout_add_norm(
    norm: Callable[..., Any],
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """The norm of h = dropout(x0 rowscale layerscale) + residual; and h with prenorm; and, with
    return_dropout_mask, which of x0 were kept."""
    checks.expect_not_negative("epsilon", epsilon)
    if layerscale is not None:
        checks.expect_shape("layerscale", layerscale, x0.shape[-1:])
    results = norm(
        x0 if layerscale is None else x0 * layerscale,
        weight,
        bias,
        residual,
        eps=epsilon,
        dropout_p=dropout_p,
        rowscale=rowscale,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        return_dropout_mask=return_dropout_mask,
    )
    if not return_dropout_mask:
        return results
    *results, mask, _ = results
    return (*results, torch.ones_like(x0, dtype=torch.bool) if mask is None else mask)


dropout_add_layer_norm = checks.operator(
    fixed(dropout_add_norm, "dropout_add_layer_norm", norm=layer_norm_fn)
)


class DropoutAddLayerNorm(Norm):
    """dropout_add_layer_norm with a weight and a bias [hidden_size]."""

    _norm = staticmethod(dropout_add_layer_norm)
    _has_bias = True

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, True, self._has_bias, eps, device, dtype)
        self.prenorm, self.p, self.residual_in_fp32 = prenorm, p, residual_in_fp32

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        return self._norm(
            x0,
            residual,
            self.weight,
            self.bias,
            self.p if self.training else 0.0,
            self.eps,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
        )
