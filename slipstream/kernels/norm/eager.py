"""The norms as formulas, over the last dimension of size D, and in fast plain torch.

torch has a native layer norm on the CPU, forward and backward, but its rms_norm is a chain of
pointwise operators. The backward of the layer norm takes mean and rstd as arguments, so with
mean = 0 and the rms it gives the gradient of the rms norm except for one term, added here:

    xhat = x rstd,  d = dy weight
    layer   dx = rstd (d - mean(d) - xhat mean(d xhat))
    rms     dx = rstd (d           - xhat mean(d xhat)) = layer + rstd mean(d)

At [8, 256, 256] on one core of the demo's machine: 0.6 ms forward and backward, F.rms_norm 1.7.

    rms    y = x / sqrt(mean(x^2) + eps) * weight
    layer  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias

The formulas are plain differentiable torch in the dtype given: the oracle of the tests in float64,
and what torch.compile sees, since Inductor makes one kernel of it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common.checks import cast, widen
from slipstream.kernels.norm.inputs import BackwardInputs, NormInputs
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.runtime import autograd, backends, guarded_launch


def rms_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def layer_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = rms_reference(centred, weight, eps)
    return y if bias is None else y + bias


ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


def compose(
    t: NormInputs, n: NormOptions, rms: Callable[..., Tensor], layer: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """y and h of any norm, out of the two given, which take a row."""
    x, weight, bias, gate, residual = t
    h = _residual_sum(x, residual, n.wide_h)
    z = widen(h)
    gate_value = None if gate is None else ACTIVATIONS[n.activation](cast(gate, z.dtype))
    if gate_value is not None and n.gate_first:
        z = z * gate_value
    factor = n.factor(weight, z.dtype)
    offset = None if bias is None else cast(bias, z.dtype)
    if n.l2:
        y = _l2(z, n.eps, x.requires_grad, rms)
    elif n.groups:
        groups = z.unflatten(-1, (n.groups, x.shape[-1] // n.groups))
        y = layer(groups, None, None, n.eps) if n.centre else rms(groups, None, n.eps)
        y = _affine(y.flatten(-2), factor, offset)
    elif n.centre:
        y = layer(z, factor, offset, n.eps)
    else:
        y = _affine(rms(z, factor, n.eps), None, offset)
    if gate_value is not None and not n.gate_first:
        y = y * gate_value
    return cast(y, x.dtype), h


def forward(
    t: NormInputs, n: NormOptions, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As the launch; the statistics are left 0: `backward` makes them again."""
    y, h = compose(t, n, rms, layer)
    stats = None
    if (shape := n.stats_shape(t.x, save)) is not None:
        stats = torch.zeros(shape, dtype=torch.float32, device=t.x.device)
    return y.contiguous(), h if n.stores_h(t.x, t.residual, save) else None, stats


def backward(
    t: BackwardInputs, n: NormOptions, needs_weight: bool, needs_bias: bool
) -> tuple[Any, ...]:
    """dx, dresidual if it is not dx, dweight, dbias, dgate."""
    dy, dh, h, weight, bias, gate, _, residual_dtype = t

    def plain(*leaves: Any) -> Tensor:
        return compose(NormInputs(*leaves), n, rms, layer)[0]

    dsum, *others = guarded_launch.plain_gradients(plain, (h, weight, bias, gate), [dy])
    remaining = iter(others)
    dweight, dbias, dgate = (None if x is None else next(remaining) for x in (weight, bias, gate))
    if dh is not None:
        dsum = dsum + dh
    dx = dsum.to(dy.dtype)
    dresidual = None if residual_dtype in (None, dx.dtype) else dsum.to(residual_dtype)
    return dx, dresidual, dweight if needs_weight else None, dbias if needs_bias else None, dgate


def _l2(x: Tensor, eps: float, grads: bool, rms: Callable[..., Tensor]) -> Tensor:
    if not (torch.is_grad_enabled() and grads):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if backends.is_plain_call(x) and not autograd.is_tracing():
            return x * norm.square_().add_(eps).rsqrt_()
        # a graph or a transform of inputs without gradients may be differentiated: not in place
        return x * (norm.square() + eps).rsqrt()
    size = max(x.shape[-1], 1)
    # sum = D mean: an rms norm with eps / D, times 1 / sqrt(D)
    return rms(x, x.new_full((x.shape[-1],), size**-0.5), eps / size)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None and bias is not None:
        return torch.addcmul(bias, y, weight)
    if weight is not None:
        return y * weight
    return y if bias is None else y + bias


def _residual_sum(x: Tensor, residual: Tensor | None, in_fp32: bool) -> Tensor:
    h = x.float() if in_fp32 and x.dtype != torch.float64 else x
    return h if residual is None else h + residual


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D], weight [D] of x's dtype, float32 or float64."""
    if not x.is_cpu or autograd.by_operation() or x.numel() == 0:
        return rms_reference(x, weight, eps)
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    return (
        _Rms.apply(x, weight, eps)
        if autograd.wants_gradient(x, weight)
        else _rms(x, weight, eps)[0]
    )


def _rms(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y and the reciprocal root of the mean square of each row."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
    return (x * rstd).mul_(weight), rstd


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., D], weight and bias [D] of x's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


class _Rms(autograd.Function):
    operator = "slipstream::norm"

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _rms(x, weight, eps)
        autograd.save(ctx, x, weight, rstd)
        return y

    @staticmethod
    @autograd.once_differentiable
    def backward(
        ctx: Any, saved: autograd.Saved, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = saved
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, x.shape[-1:], torch.zeros_like(rstd), rstd, weight, None,
            [needs_x, needs_weight, False],
        )  # fmt: skip
        if needs_x:
            dx.add_((dy @ weight).div_(x.shape[-1])[..., None].mul_(rstd))
        return dx, dweight, None
