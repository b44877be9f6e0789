"""The norms' launches in plain torch, for compilers that fail at their kernels."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.norm import eager
from slipstream.kernels.norm.inputs import (
    BackwardInputs,
    NormInputs,
    NormOptions,
    stats_shape,
    stores_h,
)
from slipstream.runtime.guarded_launch import plain_gradients


def norm(t: NormInputs, n: NormOptions) -> tuple[Tensor, Tensor | None]:
    y, h = eager.compose(t, n, eager.rms, eager.layer)
    return y, h if n.keep_h and h is not t.x else None


def forward(
    t: NormInputs, n: NormOptions, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The statistics are left 0: `backward` makes them again."""
    y, h = eager.compose(t, n, eager.rms, eager.layer)
    stats = None
    if (shape := stats_shape(t.x, n, save)) is not None:
        stats = torch.zeros(shape, dtype=torch.float32, device=t.x.device)
    return y.contiguous(), h if stores_h(t.x, t.residual, n, save) else None, stats


def backward(
    t: BackwardInputs, n: NormOptions, needs_weight: bool, needs_bias: bool
) -> tuple[Any, ...]:
    """dx, dresidual, dweight, dbias, dgate."""
    dy, dh, h, weight, bias, gate, _, residual_dtype = t

    def plain(*leaves: Any) -> Tensor:
        return eager.compose(NormInputs(*leaves), n, eager.rms, eager.layer)[0]

    dsum, *others = plain_gradients(plain, (h, weight, bias, gate), [dy])
    remaining = iter(others)
    dweight, dbias, dgate = (None if x is None else next(remaining) for x in (weight, bias, gate))
    if dh is not None:
        dsum = dsum + dh
    dx = dsum.to(dy.dtype)
    dresidual = None if residual_dtype is None else dx
    if residual_dtype not in (None, dx.dtype):
        dresidual = dsum.to(residual_dtype)
    return dx, dresidual, dweight if needs_weight else None, dbias if needs_bias else None, dgate
