"""Decoding: the linear layers around a mixer, each of whose weights is read once."""

from typing import Any

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import inputs, op
from slipstream.runtime.consistent import consistent_scope


@checks.operator
def projection_step(
    x: Tensor,
    weights: Tensor | list | tuple,
    biases: list | tuple | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    norm_options: dict | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Linear layers with one input of few rows, as a decoding step has them, in one launch.

        x' = x / sqrt(mean(x^2) + norm_eps) norm_weight, or x
        y_i = x' weight_i^T + bias_i
        y = y_0, y_1, ... side by side, or silu(y_0) y_1
        out = y + residual

    Args:
        x: [M, K], any floating dtype.
        weights: [N_i, K], one or up to five, of one dtype.
        biases: [N_i], each a tensor or None; None is none at all.
        norm_weight: [K]; None is 1. norm_eps: of the RMS norm, 0 or more; None is no norm.
        norm_options: what else rms_norm takes to make the factor of norm_weight, by its names.
        activation: "swiglu": two weights of one shape, the gate's first; None is none.
        residual: [M, N], any floating dtype.
        impl: None chooses; "triton", "eager" or "reference" is used or refused.

    Returns:
        [M, N] in residual's dtype, or the weights': N the sum of all N_i, or N_0 for "swiglu".

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: a gradient is wanted; impl can't take the call.

    Cost: 2 M N K flops; every weight is read once, which is all the time there is. The kernel takes
        up to 64 rows, and a norm of one row: matrix products are as fast for more.
    """
    checks.expect_tensor("x", x)
    if activation not in (None, "swiglu"):
        raise ValueError(f"activation: want 'swiglu' or None, got {activation!r}")
    if norm_eps is not None:
        checks.expect_not_negative("norm_eps", norm_eps)
    norm = _row_norm(norm_eps, norm_options or {})
    layers: list[Any] = [weights] if isinstance(weights, Tensor) else list(weights)
    bias: list[Any] = [None] * len(layers) if biases is None else list(biases)
    if not all(isinstance(w, Tensor) for w in layers):
        raise TypeError(
            f"weights: want a tensor or several, got {type(weights).__name__} of others"
        )
    if not all(b is None or isinstance(b, Tensor) for b in bias):
        raise TypeError(f"biases: want tensors or None, got {type(biases).__name__} of others")
    glu = activation == "swiglu"
    options = norm, glu, consistent_scope.on
    t = inputs.ProjectionInputs(x, layers, bias, norm_weight, residual, *options)
    return op.run(t, impl)


def _row_norm(eps: float | None, options: dict) -> NormOptions | None:
    if eps is None and not options:
        return None
    if eps is not None and options.keys() <= {*NormOptions._fields[1:]}:
        norm = NormOptions(eps, **options)
        if norm.is_row_norm:
            return norm
    raise ValueError(
        f"norm_options: want options of rms_norm that make the factor, and norm_eps, got {options}"
    )
