"""Norms of the last dimension: RMSNorm, LayerNorm and GroupNorm as torch.nn's, and two more."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.common.checks import expect_tensor
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.ops.norm import group_norm, l2_norm, layer_norm, rms_norm, rms_norm_gated

Shape = int | list[int] | tuple[int, ...]

# by their names in configs: options of rms_norm
RMS_NORMS: dict[str, dict[str, Any]] = {"rms": {}, "zero_centered_rms": {"zero_centered": True}}
NORMS = (*RMS_NORMS, "layer", "layer_without_bias")


class _Norm(nn.Module):
    """weight [D] and bias [D], each a parameter or None."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, size: int, weight: bool, bias: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        for name, wanted in (("weight", weight), ("bias", bias)):
            parameter = nn.Parameter(torch.empty(size, **made)) if wanted else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(_Norm):
    """h = x + residual;  y = h / sqrt(mean(h^2) + eps) * weight, as torch.nn.RMSNorm.

    Args:
        normalized_shape: D, or a sequence of it alone.
        eps: None is the machine epsilon of float32, or of float64 for such x, as torch has it.
        elementwise_affine: whether there is a weight.
        zero_centered: the factor is 1 + weight, which begins at 0.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered: bool = False,
    ) -> None:
        self.eps = eps
        self.options: dict[str, Any] = {"zero_centered": zero_centered}
        self.normalized_shape = (_last(normalized_shape),)
        super().__init__(self.normalized_shape[0], elementwise_affine, False, device, dtype)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, NormOptions(0.0, **self.options).neutral_weight)

    @property
    def row_norm(self) -> NormOptions | None:
        """For kernels that make the norm of rows beside other things; None where none can."""
        return None if self.eps is None else _row_norm(self.eps, *self.options.items())

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """y, or with prenorm (y, h)."""
        expect_tensor("x", x)
        return rms_norm(
            x,
            self.weight,
            eps=_machine_eps(x.dtype) if self.eps is None else self.eps,
            residual=residual,
            prenorm=prenorm,  # pyright: ignore[reportArgumentType]
            residual_in_fp32=residual_in_fp32,
            **self.options,
        )

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class LayerNorm(_Norm):
    """h = x + residual;  y = (h - mean) / sqrt(var + eps) * weight + bias, as torch.nn.LayerNorm.

    Args:
        normalized_shape: D, or a sequence of it alone.
        elementwise_affine, bias: whether there is a weight, and then a bias.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.eps, self.normalized_shape = eps, (_last(normalized_shape),)
        both = elementwise_affine, elementwise_affine and bias
        super().__init__(self.normalized_shape[0], *both, device, dtype)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """y, or with prenorm (y, h)."""
        return layer_norm(
            x,
            self.weight,
            self.bias,
            eps=self.eps,
            residual=residual,
            prenorm=prenorm,  # pyright: ignore[reportArgumentType]
            residual_in_fp32=residual_in_fp32,
        )

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class GroupNorm(_Norm):
    """Each of G equal runs of the last dimension alone, as torch.nn.GroupNorm of [N, C]; nothing is
    averaged over tokens.

    Args:
        num_groups: G, a divisor of num_channels.
        num_channels: C.
        affine: whether there are a weight and a bias.
        rms: leave out the mean, as RMSNorm.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        rms: bool = False,
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"num_groups: want a divisor of {num_channels}, got {num_groups}")
        self.num_groups, self.num_channels, self.eps, self.rms = num_groups, num_channels, eps, rms
        super().__init__(num_channels, affine, affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps, rms=self.rms)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, rms={self.rms}"


class GatedRMSNorm(_Norm):
    """rms_norm(x) * weight * f(gate), or rms_norm(x * f(gate)) * weight, as in Mamba-2.

    Args:
        size: D. activation, norm_before_gate, group_size: as ops.rms_norm_gated.
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        activation: str = "silu",
        norm_before_gate: bool = True,
        group_size: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.eps, self.activation = eps, activation
        self.norm_before_gate, self.group_size = norm_before_gate, group_size
        super().__init__(size, True, False, device, dtype)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms_norm_gated(
            x,
            gate,
            self.weight,
            eps=self.eps,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group_size,
        )


class L2Norm(nn.Module):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return l2_norm(x, eps=self.eps)


@functools.cache
def _row_norm(eps: float, *options: tuple[str, Any]) -> NormOptions | None:
    norm = NormOptions(eps, **dict(options))
    return norm if norm.is_row_norm else None


def named_norm(name: str, size: int, eps: float) -> RMSNorm | LayerNorm:
    """The module of a name of NORMS."""
    if name in RMS_NORMS:
        return RMSNorm(size, eps, **RMS_NORMS[name])
    return LayerNorm(size, eps, bias=name == "layer")


def _last(shape: Shape) -> int:
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if len(sizes) != 1:
        raise NotImplementedError(
            f"normalized_shape: the last dimension alone is normalised, got {tuple(sizes)}; "
            "flatten the others into it"
        )
    return sizes[0]


def _machine_eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
