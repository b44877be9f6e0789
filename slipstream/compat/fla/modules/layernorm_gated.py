"""fla.modules.layernorm_gated: Mamba-2's norms, of groups, gated by silu(z) before or behind."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from slipstream.compat.fixed import fixed
from slipstream.compat.fla.modules.layernorm import Norm, group_norm
from slipstream.ops import norm as ops
from slipstream.ops._fp32 import widen


def layernorm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """norm(x) silu(z) with norm_before_gate, else norm(x silu(z)); without z the norm alone.

    Args:
        group_size: features that are normalised together; all if None.
    """
    if is_rms_norm and z is not None:
        return ops.rms_norm_gated(
            x, z, weight, bias, eps, norm_before_gate=norm_before_gate, group_size=group_size
        )
    groups = 1 if group_size is None else x.shape[-1] // group_size
    wide = widen(x)
    if z is not None and not norm_before_gate:
        wide = wide * F.silu(z.to(wide.dtype))
    y = group_norm(wide, weight, bias, eps=eps, is_rms_norm=is_rms_norm, num_groups=groups)
    if z is not None and norm_before_gate:
        y = y * F.silu(z.to(wide.dtype))
    return y.to(x.dtype)


rmsnorm_fn = fixed(layernorm_fn, "rmsnorm_fn", "layernorm_fn without the mean.", is_rms_norm=True)


class LayerNormGated(Norm):
    """layernorm_fn with a weight and a bias."""

    is_rms_norm = False

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, True, not self.is_rms_norm, eps, device, dtype)
        self.group_size, self.norm_before_gate = group_size, norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        options = self.eps, self.group_size, self.norm_before_gate, self.is_rms_norm
        return layernorm_fn(x, self.weight, self.bias, z, *options)


class RMSNormGated(LayerNormGated):
    """rmsnorm_fn with a weight."""

    is_rms_norm = True

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
