"""The Triton norms as torch.library operators, and their gradient.

Outputs have a fixed number; what is not there is empty. Where nobody is looking the launches are
called without the operator around them, which would cost as much as the launch.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.norm import fallback
from slipstream.kernels.norm.inputs import NormOptions, h_dtype, stats_shape, stores_h
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import (
    Function,
    Saved,
    anchors,
    needs_autograd,
    once_differentiable,
    save,
)
from slipstream.runtime.backends import is_plain_call
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.guarded_launch import Guard

_NORM = (
    "float eps, bool centre, bool l2, int groups, bool zero_centered, str activation, "
    "bool gate_first, bool wide_h, bool keep_h"
)
_OPTIONAL_TENSORS = "Tensor? weight, Tensor? bias, Tensor? gate"


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    n: NormOptions,
    impl: str,
) -> tuple[Tensor, Tensor | None]:
    """y, and h if it is kept and is not x. impl: triton, or triton|eager."""
    if needs_autograd(x, weight, bias, gate, residual):
        y, h = _Norm.apply(x, weight, bias, gate, residual, n, impl)
    else:
        y, h, _ = _forward(x, weight, bias, gate, residual, n, False, impl)
    return y, h if n.keep_h else None


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    n: NormOptions,
    save: bool,
    impl: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if is_plain_call(x):
        return _run_forward(x, weight, bias, gate, residual, n, save, impl)
    y, h, stats = _forward_op(x, weight, bias, gate, residual, *n, save, impl)
    return y, h if stores_h(x, residual, n, save) else None, stats


def kind(x: Tensor, weight: Tensor | None, gate: Tensor | None, n: NormOptions) -> KernelKey:
    """What a verdict on the kernels holds for."""
    flags = n.centre and "layer", n.l2 and "l2", n.groups, gate is not None and n.activation
    return ("norm.triton", x.dtype, x.shape[-1], None if weight is None else weight.dtype, *flags)


def _run_forward(*args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As the launch, which is the same but for the last argument."""
    *tensors, impl = args
    x, weight, bias, gate, residual, n, _ = tensors
    with Guard(
        impl,
        x.device,
        lambda: kind(x, weight, gate, n),
        lambda: _mismatch(x, weight, bias, gate, residual, n),
    ) as usable:
        if usable:
            return _launch().forward(*tensors)
    return fallback.forward(*tensors)


def _run_backward(*args: Any) -> Any:
    *tensors, impl = args
    _, _, h, weight, bias, gate, _, _, n, _, _ = tensors
    with Guard(
        impl,
        h.device,
        lambda: kind(h, weight, gate, n),
        lambda: _mismatch(h, weight, bias, gate, None, n),
    ) as usable:
        if usable:
            return _launch().backward(*tensors)
    return fallback.backward(*tensors)


def _mismatch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
    n: NormOptions,
) -> str | None:
    """The probe: rows of the same width."""
    width = x.shape[-1]
    rows = {"x": x, "gate": gate, "residual": residual}
    tensors = {"weight": weight, "bias": bias}
    probe_inputs = {
        name: y if y is None else numeric_probe.random_like(y, 37, width)
        for name, y in rows.items()
    }
    probe_inputs |= {
        name: y if y is None else numeric_probe.random_like(y, width) for name, y in tensors.items()
    }
    return numeric_probe.mismatch(
        lambda t: norm(**t, n=n, impl="triton|eager"),
        lambda t: fallback.norm(**t, n=n),
        probe_inputs,
    )


@cache
def _launch() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.norm.triton import launch

    return launch


class _Norm(Function):
    operator = "slipstream::norm"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        residual: Tensor | None,
        n: NormOptions,
        impl: str,
    ) -> tuple[Tensor, Tensor | None]:
        y, h, stats = _forward(x, weight, bias, gate, residual, n, True, impl)
        links = [] if h is None or n.keep_h else anchors(x, residual)
        save(ctx, x if h is None else h, weight, bias, gate, stats, *links)
        ctx.norm, ctx.impl, ctx.dtype = n, impl, x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, h if n.keep_h else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, saved: Saved, dy: Tensor | None, dh: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        h, weight, bias, gate, stats, *_ = saved
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if dy is None and dh is None:
            return (None,) * 7
        if dy is None:
            dy = torch.zeros_like(h, dtype=ctx.dtype)
        args = (dy, dh, h, weight, bias, gate, stats, ctx.residual_dtype)
        if is_plain_call(dy):
            grads = _run_backward(*args, ctx.norm, needs_weight, needs_bias, ctx.impl)
        else:
            grads = _backward_op(*args, *ctx.norm, needs_weight, needs_bias, ctx.impl)
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
            None,
        )


def _forward_impl(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, save, impl = args
    tensors, n = tensors[:5], NormOptions(*tensors[5:])
    y, h, stats = _run_forward(*tensors, n, save, impl)
    return y, y.new_empty(0) if h is None else h, y.new_empty(0) if stats is None else stats


def _backward_impl(*args: Any) -> list[Tensor]:
    tensors, residual_dtype, options = args[:7], args[7], args[8:]
    n, needs, impl = NormOptions(*options[:-3]), options[-3:-1], options[-1]
    dx, dr, *others = _run_backward(*tensors, residual_dtype, n, *needs, impl)
    dr = None if dr is dx else dr  # results of an operator are no aliases
    return [dx, *(dx.new_empty(0) if x is None else x for x in (dr, *others))]


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, residual, n, save = args[0], args[4], NormOptions(*args[5:-2]), args[-2]
    h, stats = x.new_empty(0), x.new_empty(0)
    if stores_h(x, residual, n, save):
        h = x.new_empty(x.shape, dtype=h_dtype(x, residual, n))
    if (shape := stats_shape(x, n, save)) is not None:
        stats = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty(x.shape), h, stats


def _backward_fake(*args: Any) -> list[Tensor]:
    dy, _, _, weight, bias, gate, _, residual_dtype = args[:8]
    needs_weight, needs_bias = args[-3:-1]
    none = dy.new_empty(0)
    apart = residual_dtype is not None and residual_dtype != dy.dtype
    return [
        dy.new_empty(dy.shape),
        dy.new_empty(dy.shape, dtype=residual_dtype) if apart else none,
        weight.new_empty(weight.shape) if needs_weight else none.clone(),
        bias.new_empty(bias.shape) if needs_bias else none.clone(),
        none.clone() if gate is None else gate.new_empty(gate.shape),
    ]


_forward_op = KernelOp(
    "norm_forward",
    f"(Tensor x, {_OPTIONAL_TENSORS}, Tensor? residual, {_NORM}, bool save, str impl) -> "
    "(Tensor, Tensor, Tensor)",
    _forward_impl,
    _forward_fake,
)
_backward_op = KernelOp(
    "norm_backward",
    f"(Tensor dy, Tensor? dh, Tensor h, {_OPTIONAL_TENSORS}, Tensor? stats, "
    f"ScalarType? residual_dtype, {_NORM}, bool needs_weight, bool needs_bias, "
    "str impl) -> Tensor[]",
    _backward_impl,
    _backward_fake,
)


def _of_operator(*args: Any) -> tuple[Tensor, ...]:
    """As slipstream::norm_forward is called."""
    n = NormOptions(*args[5:-2])
    y, h = _Norm.apply(*args[:5], n, args[-1])
    return (y,) if h is None else (y, h)


_forward_op.set_gradient(_of_operator)
