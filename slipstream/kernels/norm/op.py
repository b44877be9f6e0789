"""The Triton norms as torch.library operators, and their gradient.

slipstream::_norm_forward gives y, h and the statistics, of which what is not there is empty;
slipstream::_norm_backward the gradients that there are.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.norm import fallback
from slipstream.kernels.norm.inputs import (
    BackwardInputs,
    NormInputs,
    NormOptions,
    h_dtype,
    stats_shape,
    stores_h,
)
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import (
    Function,
    Saved,
    anchors,
    needs_autograd,
    once_differentiable,
    save,
)
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.guarded_launch import Guard
from slipstream.runtime.size_ladder import AtSizes, Size

_OPTIONS = schema_of(NormOptions)
_COUNT = len(NormInputs._fields)


def norm(t: NormInputs, n: NormOptions, impl: str) -> tuple[Tensor, Tensor | None]:
    """y, and h if it is kept and is not x. impl: triton, or triton|eager."""
    if needs_autograd(*t):
        return _Norm.apply(*t, n, impl)
    y, h, _ = _forward(*t, *n, save=False, impl=impl)
    return y, h if stores_h(t.x, t.residual, n, False) else None


def kind(x: Tensor, weight: Tensor | None, gate: Tensor | None, n: NormOptions) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    flags = n.centre and "layer", n.l2 and "l2", n.groups, n.zero_centered and "zero-centered"
    if gate is not None:
        flags += n.activation, n.gate_first and "gate-first"
    return ("norm.triton", x.dtype, x.shape[-1], None if weight is None else weight.dtype, *flags)


def _run_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    t, (*options, save, impl) = NormInputs(*args[:_COUNT]), args[_COUNT:]
    n, results = NormOptions(*options), None
    with _guard(impl, t, n) as usable:
        if usable:
            results = _launch().forward(t, n, save)
    y, h, stats = results or fallback.forward(t, n, save)
    return y, y.new_empty(0) if h is None else h, y.new_empty(0) if stats is None else stats


def _run_backward(*args: Any) -> list[Tensor]:
    """Those that there are of dx, dresidual (if it is not dx), dweight, dbias, dgate."""
    t, (*options, needs_weight, needs_bias, impl) = BackwardInputs(*args[:8]), args[8:]
    n, results = NormOptions(*options), None
    with _guard(impl, NormInputs(t.h, t.weight, t.bias, t.gate), n) as usable:
        if usable:
            results = _launch().backward(t, n, needs_weight, needs_bias)
    dx, dr, *others = results or fallback.backward(t, n, needs_weight, needs_bias)
    return [x for x in (dx, None if dr is dx else dr, *others) if x is not None]


def _guard(impl: str, t: NormInputs, n: NormOptions) -> Guard:
    kind_of = partial(kind, t.x, t.weight, t.gate, n)
    return Guard(impl, t.x.device, kind_of, partial(_mismatch, t, n))


def _mismatch(like: NormInputs, n: NormOptions) -> str | None:
    """The probe: rows of the same width."""
    width = like.x.shape[-1]
    shapes = {"weight": (width,), "bias": (width,)}
    probe_inputs = {
        name: y if y is None else numeric_probe.random_like(y, *shapes.get(name, (37, width)))
        for name, y in like._asdict().items()
    }

    def plain(t: numeric_probe.Given) -> tuple[Tensor, Tensor | None]:
        y, h = fallback.norm(NormInputs(**t), n)
        return y, t["x"] if n.keep_h and h is None else h

    return numeric_probe.mismatch(
        lambda t: norm(NormInputs(**t), n, "triton|eager"), plain, probe_inputs
    )


@cache
def _launch() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.norm.triton import launch

    return launch


class _Norm(Function):
    operator = "slipstream::norm"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, n, impl = args
        x, weight, bias, gate, residual = tensors
        y, h, stats = _forward(*tensors, *n, save=True, impl=impl)
        h = h if stores_h(x, residual, n, True) else None
        links = [] if h is None or n.keep_h else anchors(x, residual)
        save(ctx, x if h is None else h, weight, bias, gate, stats, *links)
        ctx.norm, ctx.impl, ctx.dtype = n, impl, x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        if h is None and n.keep_h and not torch.compiler.is_compiling():
            # x goes on through here, so that its gradients are added up within the backward
            h = x.detach()
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
        dx, *grads = _backward(
            *args, *ctx.norm, needs_weight=needs_weight, needs_bias=needs_bias, impl=ctx.impl
        )
        left = iter(grads)
        dr = None if ctx.residual_dtype is None else dx
        if ctx.residual_dtype not in (None, dx.dtype):
            dr = next(left)
        dweight = next(left) if needs_weight else None
        dbias = next(left) if needs_bias else None
        return dx, dweight, dbias, None if gate is None else next(left), dr, None, None


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    (x, *_, residual), n, save = args[:_COUNT], NormOptions(*args[_COUNT:-2]), args[-2]
    h, stats = x.new_empty(0), x.new_empty(0)
    if stores_h(x, residual, n, save):
        h = x.new_empty(x.shape, dtype=h_dtype(x, residual, n))
    if (shape := stats_shape(x, n, save)) is not None:
        stats = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty(x.shape), h, stats


def _backward_fake(*args: Any) -> list[Tensor]:
    dy, _, _, weight, bias, gate, _, residual_dtype = args[:8]
    needs_weight, needs_bias = args[-3:-1]
    apart = residual_dtype is not None and residual_dtype != dy.dtype
    grads = [dy.new_empty(dy.shape)]
    grads += [dy.new_empty(dy.shape, dtype=residual_dtype)] if apart else []
    parameters = (weight if needs_weight else None, bias if needs_bias else None, gate)
    return grads + [x.new_empty(x.shape) for x in parameters if x is not None]


# x, gate, residual: few rows, whose launch begins ahead, and more (triton/launch.py: STEP_ROWS)
_AT_SIZES = AtSizes(tokens=(0, 3, 4), steps=(Size(1, 1), Size(1, 1024)))
_forward = KernelOp(
    "norm_forward",
    f"({schema_of(NormInputs)}, {_OPTIONS}, bool save, str impl) -> (Tensor, Tensor, Tensor)",
    _run_forward,
    _forward_fake,
    replay=True,
    at_sizes=_AT_SIZES,
)
_backward = KernelOp(
    "norm_backward",
    f"({schema_of(BackwardInputs)}, {_OPTIONS}, bool needs_weight, bool needs_bias, str impl) "
    "-> Tensor[]",
    _run_backward,
    _backward_fake,
    replay=True,
)


def _of_operator(*args: Any) -> tuple[Tensor, ...]:
    """As slipstream::_norm_forward is called."""
    n = NormOptions(*args[_COUNT:-2])
    y, h = _Norm.apply(*args[:_COUNT], n, args[-1])
    return (y, h) if n.keep_h and stores_h(args[0], args[4], n, True) else (y,)


_forward.set_gradient(_of_operator)
