"""Where a few calls of torch are quicker than an operator, whose checks take the host longer."""

from functools import cache

import torch
from torch import Tensor


def on_host(x: Tensor) -> bool:
    """Whether x [N, 1, ...] is one token of each sequence, on a CPU in float32 or float64, without
    gradients, autocast or a tracer."""
    return (
        type(x) is Tensor
        and x.dim() > 2
        and x.shape[1] == 1
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # it outlives the caller's
        return torch.full((), value, dtype=dtype, device="cpu")


def inverse_norm(x: Tensor, eps: float, mean: bool = False) -> Tensor:
    """x [..., D] -> 1 / sqrt(sum of x^2 + eps) [..., 1], or of their mean: two calls of torch."""
    D = x.shape[-1]
    rows = x.flatten(0, -2).unsqueeze(1)
    squares = torch.baddbmm(_constant(eps, x.dtype), rows, rows.mT, alpha=1 / D if mean else 1)
    return squares.rsqrt_().view(*x.shape[:-1], 1)


def host_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As torch.rms_norm over the last dimension, in four calls of torch instead of six."""
    y = x * inverse_norm(x, eps, mean=True)
    return y if weight is None else y * weight
