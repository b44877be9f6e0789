"""The Triton norms as torch.library operators, and their gradient.

Outputs have a fixed number; what is not there is empty. Outside of torch.compile and torch.export
the launches are called without the operator around them, which would cost as much as the launch.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.core.library import define
from slipstream.kernels.norm.terms import Norm, h_dtype, stores_h

_NORM = (
    "float eps, bool centre, bool l2, int groups, bool zero_centered, str activation, "
    "bool gate_first, bool wide_h, bool keep_h"
)
_GIVEN = "Tensor? weight, Tensor? bias, Tensor? gate"


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    n: Norm,
) -> tuple[Tensor, Tensor | None]:
    """y, and h if it is kept and is not x."""
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (gate is not None and gate.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        y, h = _Norm.apply(x, weight, bias, gate, residual, n)
    else:
        y, h, _ = _forward(x, weight, bias, gate, residual, n, False)
    return y, h if n.keep_h else None


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    n: Norm,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if not torch.compiler.is_compiling():
        return _launch().forward(x, weight, bias, gate, residual, n, save)
    y, h, stats = _forward_op(x, weight, bias, gate, residual, *n, save)
    return y, h if stores_h(x, residual, n, save) else None, stats


@cache
def _launch() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.norm.triton import launch

    return launch


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        residual: Tensor | None,
        n: Norm,
    ) -> tuple[Tensor, Tensor | None]:
        y, h, stats = _forward(x, weight, bias, gate, residual, n, True)
        ctx.save_for_backward(x if h is None else h, weight, bias, gate, stats)
        ctx.norm, ctx.dtype = n, x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, h if n.keep_h else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        h, weight, bias, gate, stats = ctx.saved_tensors
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if dy is None and dh is None:
            return (None,) * 6
        if dy is None:
            dy = torch.zeros_like(h, dtype=ctx.dtype)
        args = (dy, dh, h, weight, bias, gate, stats, ctx.residual_dtype)
        if not torch.compiler.is_compiling():
            grads = _launch().backward(*args, ctx.norm, needs_weight, needs_bias)
        else:
            grads = _backward_op(*args, *ctx.norm, needs_weight, needs_bias)
        dx, dr, dweight, dbias, dgate = grads
        if ctx.residual_dtype == dx.dtype:
            dr = dx
        return (
            dx,
            dweight if needs_weight else None,
            dbias if needs_bias else None,
            None if gate is None else dgate,
            None if ctx.residual_dtype is None else dr,
            None,
        )


def _forward_impl(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *given, save = args
    given, n = given[:5], Norm(*given[5:])
    y, h, stats = _launch().forward(*given, n, save)
    return y, y.new_empty(0) if h is None else h, y.new_empty(0) if stats is None else stats


def _backward_impl(*args: Any) -> list[Tensor]:
    tensors, residual_dtype, options = args[:7], args[7], args[8:]
    n, needs = Norm(*options[:-2]), options[-2:]
    dx, dr, *rest = _launch().backward(*tensors, residual_dtype, n, *needs)
    dr = None if dr is dx else dr  # results of an operator are no aliases
    return [dx, *(dx.new_empty(0) if x is None else x for x in (dr, *rest))]


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, residual, n, save = args[0], args[4], Norm(*args[5:-1]), args[-1]
    h, stats = x.new_empty(0), x.new_empty(0)
    if stores_h(x, residual, n, save):
        h = x.new_empty(x.shape, dtype=h_dtype(x, residual, n))
    if save:
        rows = x.numel() // x.shape[-1] * (n.groups or 1)
        stats = x.new_empty(1 + n.centre, rows, dtype=torch.float32)
    return x.new_empty(x.shape), h, stats


def _backward_fake(*args: Any) -> list[Tensor]:
    dy, _, _, weight, bias, gate, _, residual_dtype = args[:8]
    needs_weight, needs_bias = args[-2:]
    none = dy.new_empty(0)
    apart = residual_dtype is not None and residual_dtype != dy.dtype
    return [
        dy.new_empty(dy.shape),
        dy.new_empty(dy.shape, dtype=residual_dtype) if apart else none,
        weight.new_empty(weight.shape) if needs_weight else none.clone(),
        bias.new_empty(bias.shape) if needs_bias else none.clone(),
        none.clone() if gate is None else gate.new_empty(gate.shape),
    ]


_forward_op: Any = define(
    "norm_forward",
    f"(Tensor x, {_GIVEN}, Tensor? residual, {_NORM}, bool save) -> (Tensor, Tensor, Tensor)",
    _forward_impl,
    _forward_fake,
)
_backward_op: Any = define(
    "norm_backward",
    f"(Tensor dy, Tensor? dh, Tensor h, {_GIVEN}, Tensor stats, ScalarType? residual_dtype, "
    f"{_NORM}, bool needs_weight, bool needs_bias) -> Tensor[]",
    _backward_impl,
    _backward_fake,
)
