"""matmul: a product with scales, bias, activation and residual in one pass."""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.matmul import op
from slipstream.kernels.matmul.config import ACTIVATIONS, FP8, PRECISIONS, MatmulInputs
from slipstream.kernels.matmul.config import MatmulConfig as MatmulConfig


@checks.operator
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    precision: str = "tf32x3",
    out_dtype: torch.dtype | None = None,
    config: MatmulConfig | None = None,
    impl: str | None = None,
) -> Tensor:
    """Matrix product and what follows it.

        z = (a b) * scale_a * scale_b + bias        out = f(z) + residual

    Args:
        a: [..., M, K], floating, or float8_e4m3fn or float8_e5m2; any strides.
        b: [K, N], a's dtype (float8: either); any strides, so a linear layer's weight.t().
        bias: [N].
        activation: f, "relu", "squared_relu", "sigmoid", "silu", "gelu" or "gelu_tanh"; None is z.
        residual: [..., M, N].
        scale_a: of the whole of a, one number, or of its rows, [..., M]. It has no gradient.
        scale_b: of the whole of b, one number, or of its columns, [N]. It has no gradient.
        precision: of float32 products: "tf32" (10 bits of each factor), "tf32x3" (float32's, in
            three such products) or "ieee" (without tensor cores). float16 and bfloat16 are exact
            products with float32 sums; float8 sums as the tensor cores do, with about 14 bits.
        out_dtype: None is a's dtype, or bfloat16 for float8.
        config: a tile instead of the table's, for CUDA; it is refused, before anything is
            compiled, if the device forbids it.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.

    Returns:
        [..., M, N] in out_dtype.

    Raises:
        ValueError: shapes do not fit, or an option or config is not possible. TypeError: dtypes.
        NotImplementedError: a gradient of float8 or of a scale; impl can't take the call.

    Cost: 2 M N K flops, three times that for float32 by "tf32x3"; every factor is read once and
        the result written once if the L2 cache holds a group of tiles. Gradients: 4 M N K more.
    """
    if a.dim() < 2:
        raise ValueError(f"a: want at least two dimensions [..., M, K], got {tuple(a.shape)}")
    checks.expect_rank("b", b, 2, "[K, N]")
    K, N = b.shape
    if a.shape[-1] != K:
        raise ValueError(f"b: want {a.shape[-1]} rows like a's columns, got {K}")
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    checks.expect_one_device({**given, "scale_a": scale_a, "scale_b": scale_b})
    checks.expect_floating(given)
    _check_options(activation, precision, config)
    if (dtype := checks.autocast_dtype(a)) is not None and a.dtype not in FP8:
        a, b = a.to(dtype), b.to(dtype)
    _check_dtypes(a, b)
    if bias is not None:
        checks.expect_shape("bias", bias, (N,))
    shape = (*a.shape[:-1], N)
    if residual is not None:
        checks.expect_shape("residual", residual, shape)
        residual = residual.flatten(0, -2)
    scales = (_scale("scale_a", scale_a, tuple(a.shape[:-1])), _scale("scale_b", scale_b, (N,)))
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a.dtype in FP8 else a.dtype
    elif out_dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"out_dtype: want float16, bfloat16, float32 or float64, got {out_dtype}")
    rows = a if a.dim() == 2 else a.flatten(0, -2)
    t = MatmulInputs(rows, b, bias, residual, *scales, activation or "", precision, out_dtype)
    return op.matmul(t, config, impl).view(shape)


def _check_options(activation: str | None, precision: str, config: MatmulConfig | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation: want None or one of {ACTIVATIONS}, got {activation!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: want one of {PRECISIONS}, got {precision!r}")
    if config is not None and not isinstance(config, MatmulConfig):
        raise TypeError(f"config: want a MatmulConfig, got {type(config).__name__}")


def _check_dtypes(a: Tensor, b: Tensor) -> None:
    if a.dtype not in FP8:
        checks.expect_one_dtype({"a": a, "b": b})
    elif b.dtype not in FP8:
        raise TypeError(f"b: want float8_e4m3fn or float8_e5m2 like a, got {b.dtype}")
    elif torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        raise NotImplementedError(
            "a, b: float8 has no gradients; quantise inside your own autograd.Function"
        )


def _scale(name: str, x: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """[] or one for each row."""
    if x is None:
        return None
    checks.expect_floating({name: x})
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(f"{name}: it has no gradient; detach it, or multiply outside")
    if x.numel() == 1 and tuple(x.shape) != shape:
        return x.reshape(())
    checks.expect_shape(name, x, shape)
    return x.reshape(-1)
