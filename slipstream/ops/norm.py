"""Norms over the last dimension: rms_norm, layer_norm, l2_norm, group_norm, rms_norm_gated."""

from typing import Literal, overload

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.norm.inputs import NormInputs
from slipstream.kernels.norm.op import run
from slipstream.kernels.primitives.norm_options import NormOptions

ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


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
    impl: str | None = None,
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
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@checks.operator
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
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square norm, with the residual sum before it if one is given.

        h = x + residual
        y = h / sqrt(mean(h^2) + eps) * weight + bias

    Args:
        x: [..., D], any floating dtype; 16-bit inputs are normalised in float32.
        weight: [D], any floating dtype; None is 1.
        bias: [D], any floating dtype; None is 0.
        eps: inside the root, 0 or more.
        residual: shape of x, added first; None is 0.
        prenorm: also return h, the residual stream for the next sum.
        residual_in_fp32: keep h in float32 whatever x's dtype.
        zero_centered: the factor is 1 + weight, so that a weight of 0 does nothing (as in Gemma).
        impl: None chooses; "eager", "triton" or "reference" is used or refused.

    Returns:
        y in x's shape and dtype; with prenorm (y, h).

    Raises:
        ValueError: weight, bias or residual does not fit x. TypeError: not floating.
        NotImplementedError: the named impl can't take the call.

    Cost: on CUDA one read and one write of x forward, 2 and 1 backward, and of residual and h as
        many; h and one number a row are kept for backward. On a CPU about twice that.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, eq. 4.
    """
    _check(x, weight, bias, residual, eps)
    n = NormOptions(eps, zero_centered=zero_centered, wide_h=residual_in_fp32, keep_h=prenorm)
    y, h = run(NormInputs(x, weight, bias, residual=residual), n, impl)
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
    impl: str | None = None,
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
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@checks.operator
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
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm, with the residual sum before it if one is given.

        h = x + residual
        y = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * weight + bias

    Args, returns and raises: as rms_norm.

    Cost: as rms_norm, with two numbers a row kept.
    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, eq. 4.
    """
    _check(x, weight, bias, residual, eps)
    n = NormOptions(
        eps, centre=True, zero_centered=zero_centered, wide_h=residual_in_fp32, keep_h=prenorm
    )
    y, h = run(NormInputs(x, weight, bias, residual=residual), n, impl)
    return (y, h) if prenorm else y


@checks.operator
def l2_norm(x: Tensor, eps: float = 1e-6, *, impl: str | None = None) -> Tensor:
    """Scales the last dimension to length one.

        y = x / sqrt(sum(x^2) + eps)

    Args:
        x: [..., D], any floating dtype; 16-bit inputs are normalised in float32.
        eps: inside the root, so that x = 0 gives 0.
        impl: as rms_norm.

    Returns:
        y in x's shape and dtype.

    Raises:
        TypeError: x is not floating.

    Cost: 3 reads or writes of x's size forward.
    """
    _check(x, None, None, None, eps)
    return run(NormInputs(x), NormOptions(eps, l2=True), impl)[0]


@checks.operator
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    rms: bool = False,
    impl: str | None = None,
) -> Tensor:
    """Norm of each of G equal groups of features, such as the heads of [B, T, H V].

        y[g] = (x[g] - mean(x[g])) / sqrt(var(x[g]) + eps) * weight[g] + bias[g]

    Unlike torch.nn.GroupNorm the features are last, and nothing is averaged over tokens.

    Args:
        x: [..., D], any floating dtype; 16-bit inputs are normalised in float32.
        num_groups: G, a divisor of D.
        weight, bias: [D], any floating dtype; None is 1 and 0.
        eps: inside the root, 0 or more.
        rms: leave out the mean, as rms_norm.
        impl: as rms_norm.

    Returns:
        y in x's shape and dtype.

    Raises:
        ValueError: D is no multiple of G, or weight or bias does not fit. TypeError: not floating.

    Cost: as layer_norm; on a CPU also a read and write of x for weight and bias.
    Source: Wu and He, Group Normalization, 2018.
    """
    _check(x, weight, bias, None, eps)
    checks.expect_multiple("x: features", x.shape[-1], "num_groups", num_groups)
    n = NormOptions(eps, centre=not rms, groups=num_groups)
    return run(NormInputs(x, weight, bias), n, impl)[0]


@checks.operator
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
    residual: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Root mean square norm and an output gate.

        y = (norm(x) * weight + bias) * f(gate)          norm_before_gate
        y = norm(x * f(gate)) * weight + bias            otherwise, as Mamba-2

    Args:
        x: [..., D], any floating dtype; 16-bit inputs are normalised and gated in float32.
        gate: shape of x, any floating dtype.
        weight, bias: [D], any floating dtype; None is 1 and 0.
        eps: inside the root, 0 or more.
        activation: f, "silu" (also "swish") or "sigmoid".
        norm_before_gate: which of the two formulas.
        group_size: normalise groups of this many features separately, a divisor of D; None is D.
        residual: shape of x, is added to x first; None is 0.
        impl: as rms_norm.

    Returns:
        y in x's shape and dtype.

    Raises:
        ValueError: gate, weight, bias or residual does not fit x, group_size does not divide D, or
            the activation is unknown. TypeError: not floating.

    Cost: on CUDA 3 reads or writes of x's size forward and 5 backward, elsewhere about twice that.
    """
    _check(x, weight, bias, residual, eps)
    if not _fits(gate, x, x.shape):
        checks.expect_shape("gate", gate, x.shape)
        checks.expect_floating({"gate": gate})
        checks.expect_one_device({"x": x, "gate": gate})
    if activation not in ACTIVATIONS:
        known = ", ".join(repr(name) for name in ACTIVATIONS)
        raise ValueError(f"activation: want one of {known}, got {activation!r}")
    if group_size is not None:
        checks.expect_multiple("x: features", x.shape[-1], "group_size", group_size)
    whole = group_size in (None, x.shape[-1])
    groups = 0 if whole else checks.plain_int(x.shape[-1] // group_size)
    n = NormOptions(
        eps, groups=groups, activation=ACTIVATIONS[activation], gate_first=not norm_before_gate
    )
    return run(NormInputs(x, weight, bias, gate, residual), n, impl)[0]


def _check(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float
) -> None:
    # what is fine is found out at once, what is not is then looked for by name
    if isinstance(x, Tensor) and x.dim() > 0 and x.is_floating_point() and eps >= 0:
        D = x.shape[-1:]
        if _fits(weight, x, D) and _fits(bias, x, D) and _fits(residual, x, x.shape):
            return
    checks.expect_tensor("x", x)
    checks.expect_not_negative("eps", eps)
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


def _fits(t: Tensor | None, x: Tensor, shape: torch.Size) -> bool:
    return t is None or (
        isinstance(t, Tensor)
        and t.shape == shape
        and t.is_floating_point()
        and t.device == x.device
    )
