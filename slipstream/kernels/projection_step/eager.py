"""The linear layers of a step in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step.inputs import ProjectionInputs


def projection_step(t: ProjectionInputs) -> Tensor:
    x = t.x
    if t.norm is not None and not t.normed:
        x = normed(x, t.norm_weight, t.norm)
    return _projection_step(t, x)


def reference(t: ProjectionInputs) -> Tensor:
    """In float64, rounded once."""
    wide = t._replace(
        x=t.x.double(),
        weights=[w.double() for w in t.weights],
        biases=[None if b is None else b.double() for b in t.biases],
        norm_weight=None if t.norm_weight is None else t.norm_weight.double(),
        residual=None if t.residual is None else t.residual.double(),
    )
    return projection_step(wide).to(t.out_dtype)


def normed(x: Tensor, weight: Tensor | None, n: NormOptions) -> Tensor:
    """In float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    x = x * (x.square().mean(-1, keepdim=True) + n.eps).rsqrt()
    factor = n.factor(weight, wide)
    return x if factor is None else x * factor


def _projection_step(t: ProjectionInputs, x: Tensor) -> Tensor:
    x = x.to(t.weights[0].dtype)
    ys = [F.linear(x, w, None if b is None else b.to(w.dtype)) for w, b in zip(t.weights, t.biases)]
    if t.glu:
        y = F.silu(ys[0]) * ys[1]
    else:
        y = ys[0] if len(ys) == 1 else torch.cat(ys, 1)
    return y if t.residual is None else t.residual + y.to(t.residual.dtype)
