"""Norms over the last dimension: rms_norm, layer_norm, l2_norm, group_norm, rms_norm_gated."""

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core import checks
from slipstream.kernels.norm import eager

ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    prenorm: Literal[False] = False,
    residual_in_fp32: bool = False,
    zero_centered: bool = False,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    prenorm: Literal[True],
    residual_in_fp32: bool = False,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square norm, with the residual sum before it if one is given.

        h = x + residual
        y = h / sqrt(mean(h^2) + eps) * weight + bias

    Args:
        x: [..., D], any floating dtype; 16-bit inputs are normalised in float32.
        weight: [D], any floating dtype; None is 1.
        bias: [D], any floating dtype; None is 0.
        eps: inside the root.
        residual: shape of x, added first; None is 0.
        prenorm: also return h, the residual stream for the next sum.
        residual_in_fp32: keep h in float32 whatever x's dtype.
        zero_centered: the factor is 1 + weight, so that a weight of 0 does nothing.

    Returns:
        y in x's shape and dtype; with prenorm (y, h).

    Raises:
        ValueError: weight, bias or residual does not fit x. TypeError: not floating.

    Cost: 3 reads or writes of x's size forward; x and one number a row are kept for backward.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, eq. 4.
    """
    _check(x, weight, bias, residual)
    h = _residual_sum(x, residual, residual_in_fp32)
    wide = _wide(h)
    y = eager.rms(wide, _factor(weight, wide, zero_centered), eps)
    if bias is not None:
        y = y + bias.to(y.dtype)
    y = y.to(x.dtype)
    return (y, h) if prenorm else y


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    prenorm: Literal[False] = False,
    residual_in_fp32: bool = False,
    zero_centered: bool = False,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    prenorm: Literal[True],
    residual_in_fp32: bool = False,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm, with the residual sum before it if one is given.

        h = x + residual
        y = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * weight + bias

    Args, returns and raises: as rms_norm.

    Cost: as rms_norm, with two numbers a row kept.
    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, eq. 4.
    """
    _check(x, weight, bias, residual)
    h = _residual_sum(x, residual, residual_in_fp32)
    wide = _wide(h)
    factor = _factor(weight, wide, zero_centered)
    y = eager.layer(wide, factor, None if bias is None else bias.to(wide.dtype), eps).to(x.dtype)
    return (y, h) if prenorm else y


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scales the last dimension to length one.

        y = x / sqrt(sum(x^2) + eps)

    Args:
        x: [..., D], any floating dtype; 16-bit inputs are normalised in float32.
        eps: inside the root, so that x = 0 gives 0.

    Returns:
        y in x's shape and dtype.

    Raises:
        TypeError: x is not floating.

    Cost: 3 reads or writes of x's size forward.
    """
    _check(x, None, None, None)
    # sum = D mean: an rms norm with eps / D, times 1 / sqrt(D)
    wide, size = _wide(x), max(x.shape[-1], 1)
    if not (torch.is_grad_enabled() and x.requires_grad):
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * norm.square_().add_(eps).rsqrt_()).to(x.dtype)
    weight = wide.new_full((x.shape[-1],), size**-0.5)
    return eager.rms(wide, weight, eps / size).to(x.dtype)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    rms: bool = False,
) -> Tensor:
    """Norm of each of G equal groups of features alone, such as the heads of [B, T, H V].

        y[g] = (x[g] - mean(x[g])) / sqrt(var(x[g]) + eps) * weight[g] + bias[g]

    Unlike torch.nn.GroupNorm the features are last, and nothing is averaged over tokens.

    Args:
        x: [..., D], any floating dtype; 16-bit inputs are normalised in float32.
        num_groups: G, a divisor of D.
        weight, bias: [D], any floating dtype; None is 1 and 0.
        eps: inside the root.
        rms: leave out the mean, as rms_norm.

    Returns:
        y in x's shape and dtype.

    Raises:
        ValueError: D is no multiple of G, or weight or bias does not fit. TypeError: not floating.

    Cost: as layer_norm, and a read and write of x for weight and bias.
    Source: Wu and He, Group Normalization, 2018.
    """
    _check(x, weight, bias, None)
    checks.expect_multiple("x: features", x.shape[-1], "num_groups", num_groups)
    wide = _wide(x)
    groups = wide.unflatten(-1, (num_groups, x.shape[-1] // num_groups))
    y = eager.rms(groups, None, eps) if rms else eager.layer(groups, None, None, eps)
    y = y.flatten(-2)
    if weight is not None and bias is not None:
        y = torch.addcmul(bias.to(y.dtype), y, weight.to(y.dtype))
    elif weight is not None:
        y = y * weight.to(y.dtype)
    elif bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype)


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Tensor:
    """Root mean square norm and an output gate.

        y = (norm(x) * weight + bias) * f(gate)          norm_before_gate
        y = norm(x * f(gate)) * weight + bias            otherwise, as Mamba-2

    Args:
        x: [..., D], any floating dtype; 16-bit inputs are normalised and gated in float32.
        gate: shape of x, any floating dtype.
        weight, bias: [D], any floating dtype; None is 1 and 0.
        eps: inside the root.
        activation: f, "silu" (also "swish") or "sigmoid".
        norm_before_gate: which of the two formulas.
        group_size: normalise runs of so many features alone, a divisor of D; None is D.

    Returns:
        y in x's shape and dtype.

    Raises:
        ValueError: gate, weight or bias does not fit x, group_size does not divide D, or the
            activation is unknown. TypeError: not floating.

    Cost: 3 reads or writes of x's size for the norm and 4 for the gate.
    """
    _check(x, weight, bias, None)
    checks.expect_shape("gate", gate, x.shape)
    checks.expect_floating({"gate": gate})
    if activation not in ACTIVATIONS:
        known = ", ".join(repr(name) for name in ACTIVATIONS)
        raise ValueError(f"activation: want one of {known}, got {activation!r}")
    if group_size is not None:
        checks.expect_multiple("x: features", x.shape[-1], "group_size", group_size)
    wide = _wide(x)
    opening = ACTIVATIONS[activation](gate.to(wide.dtype))
    if not norm_before_gate:
        wide = wide * opening
    factor = _factor(weight, wide, False)
    if group_size is None or group_size == x.shape[-1]:
        y = eager.rms(wide, factor, eps)
    else:
        groups = wide.unflatten(-1, (x.shape[-1] // group_size, group_size))
        y = eager.rms(groups, None, eps).flatten(-2)
        y = y if factor is None else y * factor
    if bias is not None:
        y = y + bias.to(y.dtype)
    return (y * opening if norm_before_gate else y).to(x.dtype)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    checks.expect_tensor("x", x)
    if x.dim() == 0:
        raise ValueError("x: want at least one dimension [..., D], got a scalar")
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    for name in ("weight", "bias"):
        if (parameter := given[name]) is not None:
            checks.expect_shape(name, parameter, x.shape[-1:])
    if residual is not None:
        checks.expect_shape("residual", residual, x.shape)
    checks.expect_floating(given)
    checks.expect_one_device(given)


def _wide(x: Tensor) -> Tensor:
    """In the dtype of the arithmetic: float64 stays, everything else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def _factor(weight: Tensor | None, x: Tensor, zero_centered: bool) -> Tensor | None:
    if weight is None:
        return None
    return weight.to(x.dtype) + 1 if zero_centered else weight.to(x.dtype)


def _residual_sum(x: Tensor, residual: Tensor | None, in_fp32: bool) -> Tensor:
    h = x.float() if in_fp32 and x.dtype != torch.float64 else x
    return h if residual is None else h + residual
