"""flash_attn.ops.triton.layer_norm: norms with what comes before them in a block."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.common import checks
from slipstream.compat.fixed import fixed
from slipstream.ops.norm import layer_norm, rms_norm

# what mamba_ssm's norms, which came before, do not say of the weight
WEIGHT_OPTIONS: dict[str, Any] = {"zero_centered_weight": False}


@checks.operator
def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """norm(h) of h = dropout(x rowscale) + dropout(x1) + residual.

    Args:
        x, x1: [..., D]. rowscale: [...]. weight, bias: [D].
        residual: [..., D]; h has its dtype, or x's without it, float32 with residual_in_fp32.
        weight1, bias1: [D], of a second norm of the same h.
        prenorm: also return h.
        zero_centered_weight: the factors are 1 + weight.
        return_dropout_mask: also return which of x and x1 were kept, None where nothing drops.
        out_dtype: of the result; x's if None. out, residual_out: where the result and h go.

    Returns:
        y; y and y1 with weight1; and h behind them with prenorm; and two masks behind those.
    """
    for name, given, shape in (
        ("x1", x1, x.shape),
        ("weight", weight, x.shape[-1:]),
        ("weight1", weight1, x.shape[-1:]),
        ("rowscale", rowscale, x.shape[:-1]),
        ("out", out, x.shape),
        ("residual_out", residual_out, x.shape),
    ):
        if given is not None:
            checks.expect_shape(name, given, shape)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: want a number from 0 to 1, got {dropout_p}")
    dtype, h_dtype = x.dtype, torch.float32 if residual_in_fp32 else x.dtype
    h_dtype = h_dtype if residual is None else residual.dtype
    if rowscale is not None:
        x = x * rowscale[..., None]
    x, mask = _dropped(x, dropout_p)
    mask1 = None
    if x1 is not None:
        x1, mask1 = _dropped(x1, dropout_p)
        residual = x1 if residual is None else x1.float() + residual
    norm = rms_norm if is_rms_norm else layer_norm
    y, h = norm(
        x,
        weight,
        bias,
        eps,
        residual=residual,
        prenorm=True,
        residual_in_fp32=h_dtype == torch.float32,
        zero_centered=zero_centered_weight,
    )
    results = [y]
    if weight1 is not None:
        results.append(norm(h, weight1, bias1, eps, zero_centered=zero_centered_weight))
    results, h = [y.to(out_dtype or dtype) for y in results], h.to(h_dtype)
    if out is not None:
        results[0] = out.copy_(results[0])
    if prenorm:
        results.append(h if residual_out is None else residual_out.copy_(h))
    if return_dropout_mask:
        return (*results, mask, mask1)
    return results[0] if len(results) == 1 else tuple(results)


def _dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """x after dropout, and what of it was kept."""
    if not p:
        return x, None
    mask = torch.rand(x.shape, device=x.device) >= p
    return torch.where(mask, x / (1 - p) if p < 1 else x, 0), mask


rms_norm_fn = fixed(
    layer_norm_fn, "rms_norm_fn", "layer_norm_fn without the mean.", is_rms_norm=True
)


@checks.operator
def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """layer_norm_fn, then a linear layer; and h with prenorm."""
    checks.expect_shape("norm_weight", norm_weight, x.shape[-1:])
    checks.expect_layouts(
        linear_weight=(linear_weight, "O I"),
        linear_bias=(linear_bias, "O"),
        norm_weight=(norm_weight, "I"),
        norm_bias=(norm_bias, "I"),
    )
    y, h = layer_norm_fn(
        x,
        norm_weight,
        norm_bias,
        residual,
        eps=eps,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )
    y = F.linear(y, linear_weight.to(y.dtype), None if linear_bias is None else linear_bias.to(y))
    return (y, h) if prenorm else y


class RMSNorm(nn.Module):
    """rms_norm_fn with a weight [hidden_size]."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )
