"""The norms: which implementation takes a call, the Triton ones as torch.library operators, and
their gradient.

slipstream::_norm_forward gives y, h and the statistics, of which what is not there is empty;
slipstream::_norm_backward the gradients that there are.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.norm import eager, inputs
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.runtime import autograd, backends, dispatch
from slipstream.runtime.compile_ahead import AtSizes, Size
from slipstream.runtime.custom_op import KernelOp, schema_of

_COUNT = len(inputs.NormInputs._fields)


def run(t: inputs.NormInputs, n: NormOptions, impl: str | None) -> tuple[Tensor, Tensor]:
    """y in x's shape and dtype, and h = x + residual."""
    impl = dispatch.choose(_CANDIDATES, (t.x, n, t), impl, "norm", t.x).impls
    if dispatch.is_triton(impl):
        y, h = norm(t, n, impl)
        return y, t.x if h is None else h
    functions = (eager.rms, eager.layer)
    if impl == "reference":
        functions = (eager.rms_reference, eager.layer_reference)
    return eager.compose(t, n, *functions)


def norm(t: inputs.NormInputs, n: NormOptions, impl: str) -> tuple[Tensor, Tensor | None]:
    """y, and h if it is kept and is not x. impl: triton, or triton|eager."""
    if autograd.needs_autograd(*t):
        return _Norm.apply(*t, n, impl)
    y, h, _ = _forward(*t, *n, save=False, impl=impl)
    return y, h if n.stores_h(t.x, t.residual, False) else None


class _Norm(autograd.Function):
    operator = "slipstream::norm"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, n, impl = args
        x, weight, bias, gate, residual = tensors
        y, h, stats = _forward(*tensors, *n, save=True, impl=impl)
        h = h if n.stores_h(x, residual, True) else None
        links = [] if h is None or n.keep_h else autograd.anchors(x, residual)
        autograd.save(ctx, x if h is None else h, weight, bias, gate, stats, *links)
        ctx.norm, ctx.impl, ctx.dtype = n, impl, x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        if h is None and n.keep_h and not torch.compiler.is_compiling():
            # x goes on through here, so that its gradients are added up within the backward
            h = x.detach()
        return y, h if n.keep_h else None

    @staticmethod
    @autograd.once_differentiable
    def backward(
        ctx: Any, saved: autograd.Saved, dy: Tensor | None, dh: Tensor | None
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
    if n.stores_h(x, residual, save):
        h = x.new_empty(x.shape, dtype=n.h_dtype(x, residual))
    if (shape := n.stats_shape(x, save)) is not None:
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


def kind(t: inputs.NormInputs | inputs.BackwardInputs, n: NormOptions) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    weight = None if t.weight is None else t.weight.dtype
    return ("norm.triton", t.x.dtype, t.x.shape[-1], weight, *n.kind(t.gate is not None))


def _unsupported_reason(x: Tensor, n: NormOptions, t: inputs.NormInputs) -> str | None:
    if x.shape[-1] == 0:
        return "there are no features"
    for other in t[1:]:
        if other is not None and other.dtype not in backends.DTYPES:
            return f"it computes in float32, and an input is {other.dtype}"
    return None


_LAUNCH = "slipstream.kernels.norm.triton_launch"
_OPTIONS = schema_of(NormOptions)
_forward = KernelOp(
    "norm_forward",
    f"({schema_of(inputs.NormInputs)}, {_OPTIONS}, bool save, str impl) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_forward_fake,
    kernel=f"{_LAUNCH}:forward",
    plain=eager.forward,
    kind=kind,
    # rows of the same width
    probe={"x": (37, 0), "gate": (37, 0), "residual": (37, 0), "save": False},
    packed={"t": inputs.NormInputs, "n": NormOptions},
    replay=True,
    # x, gate, residual: few rows, whose launch begins ahead, and more (triton_launch.py: forward)
    at_sizes=AtSizes(tokens=(0, 3, 4), steps=(Size(1, 1), Size(1, 1024))),
)
_backward = KernelOp(
    "norm_backward",
    f"({schema_of(inputs.BackwardInputs)}, {_OPTIONS}, bool needs_weight, bool needs_bias, "
    "str impl) -> Tensor[]",
    fake=_backward_fake,
    kernel=f"{_LAUNCH}:backward",
    plain=eager.backward,
    kind=kind,
    packed={"t": inputs.BackwardInputs, "n": NormOptions},
    forward=_forward,
    replay=True,
)
_CANDIDATES = _forward.candidates(_unsupported_reason)


def _of_operator(*args: Any) -> tuple[Tensor, ...]:
    """As slipstream::_norm_forward is called."""
    n = NormOptions(*args[_COUNT:-2])
    y, h = _Norm.apply(*args[:_COUNT], n, args[-1])
    return (y, h) if n.keep_h and n.stores_h(args[0], args[4], True) else (y,)


_forward.set_gradient(_of_operator)
