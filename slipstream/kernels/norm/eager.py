"""The norms in fast plain torch.

torch has a native layer norm on the CPU, forward and backward, but its rms_norm is a chain of
pointwise operators. The backward of the layer norm takes mean and rstd as arguments, so with
mean = 0 and the rms it gives the gradient of the rms norm but for one term, added here:

    xhat = x rstd,  d = dy weight
    layer   dx = rstd (d - mean(d) - xhat mean(d xhat))
    rms     dx = rstd (d           - xhat mean(d xhat)) = layer + rstd mean(d)

At [8, 256, 256] on one core of the demo's machine: 0.6 ms forward and backward, F.rms_norm 1.7.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.kernels.norm.reference import rms_reference


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D], weight [D] of x's dtype, float32 or float64."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.numel() == 0:
        return rms_reference(x, weight, eps)
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    return _Rms.apply(x, weight, eps)


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., D], weight and bias [D] of x's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


class _Rms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, x.shape[-1:], torch.zeros_like(rstd), rstd, weight, None,
            [needs_x, needs_weight, False],
        )  # fmt: skip
        if needs_x:
            dx.add_((dy @ weight).div_(x.shape[-1])[..., None].mul_(rstd))
        return dx, dweight, None
