"""Activations of a gate beside what it lets through: in plain torch, and the Triton ones.

y = f(gate) up        dgate = dy up f'(gate)        dup = dy f(gate)        up may be missing: 1

slipstream::_glu and slipstream::_glu_backward are the operators, for tracers; plain calls launch
without them. With the linear layer after it, one tensor less is kept for the backward:

h = f(gate) up        y = h weight^T + bias

    dh = dy weight        dweight = dy^T h        dgate = dh up f'(gate)        dup = dh f(gate)

Two operators one after the other keep h, and in plain torch f(gate) too; here the backward makes
them again from gate and up: [T, F] elements less in memory (two times that in plain torch).
slipstream::_glu_again gives the gradients, and h in the place of dh.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, dispatch


def _squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# by their names in the operators' schemas
FUNCTIONS = {"silu": F.silu, "gelu": _gelu, "sigmoid": torch.sigmoid, "relu2": _squared_relu}


def glu(gate: Tensor, up: Tensor | None, f: str, impl: str | None) -> Tensor:
    """f(gate) up, of one shape and dtype; no up is 1."""
    return run(gate, up, f, impl_for(gate, f, impl))


def impl_for(gate: Tensor, f: str, impl: str | None) -> str:
    """Those to try, as Selection.impls says."""
    # torch.compile makes one kernel of it and of what is around it
    if impl is None and (not gate.is_cuda or torch.compiler.is_compiling()):
        return "eager"
    return dispatch.choose(_CANDIDATES, (gate, f), impl, "glu", gate).impls


def run(gate: Tensor, up: Tensor | None, f: str, impl: str) -> Tensor:
    """By one of the implementations that impl_for names."""
    if impl in dispatch.PLAIN:
        return _eager(gate, up, f)
    if autograd.needs_autograd(gate, up):
        return _Glu.apply(gate, up, f, impl)
    return forward(gate, up, f=f, impl=impl)


def _eager(gate: Tensor, up: Tensor | None, f: str) -> Tensor:
    y = FUNCTIONS[f](gate)
    return y if up is None else y * up


def _kind(gate: Tensor, f: str) -> KernelKey:
    return ("glu.triton", f, gate.dtype, gate.shape[-1])


def _unsupported_reason(gate: Tensor, f: str) -> str | None:
    if gate.dim() == 0 or gate.shape[-1] == 0:
        return "there are no features"
    return None


_LAUNCH = "slipstream.kernels.elementwise.triton.glu"
_OPTIONS = "str f, str impl"
forward = custom_op.KernelOp(
    "glu",
    f"(Tensor gate, Tensor? up, {_OPTIONS}) -> Tensor",
    kernel=f"{_LAUNCH}:glu",
    plain=_eager,
    kind=_kind,
    # rows of the same width
    probe={"gate": (37, 0), "up": (37, 0)},
    replay=True,
)
_Glu = forward.with_gradient(
    f"(Tensor dy, Tensor gate, Tensor? up, {_OPTIONS}) -> Tensor[]",
    f"{_LAUNCH}:glu_backward",
    results="y",
    wrt="gate up",
)
_CANDIDATES = forward.candidates(_unsupported_reason)


def glu_linear(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, f: str, impl: str | None
) -> Tensor:
    """gate, up [..., F], weight [D, F], bias [D] -> [..., D]."""
    impl = impl_for(gate, f, impl)
    tensors = (gate, up, weight, bias)
    if not autograd.by_operation() and autograd.needs_autograd(*tensors):
        return _GluLinear.apply(*tensors, f, impl)
    return F.linear(run(gate, up, f, impl), weight, bias)


class _GluLinear(autograd.Function):
    operator = "slipstream::glu_linear"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        gate, up, weight, bias, f, impl = args
        autograd.save(ctx, gate, up, weight)
        ctx.f, ctx.impl = f, impl
        return autograd.as_base(F.linear(_product(gate, up, f, impl), weight, bias))

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = saved
        needs_gate, needs_up, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        rows = _flat(dy)
        dbias = rows.sum(0) if needs_bias else None
        if not (needs_gate or needs_up):
            h = _product(gate, up, ctx.f, ctx.impl)
            return None, None, rows.t() @ _flat(h), dbias, None, None
        if dispatch.is_triton(ctx.impl):
            h = (rows @ weight).view(gate.shape)
            dgate, dup = _call(h, gate, up, f=ctx.f, impl=ctx.impl)
            dup = None if up is None else dup
            dweight = rows.t() @ _flat(h) if needs_weight else None
        else:
            dgate, dup, dweight = _eager_grads(rows, gate, up, weight, ctx.f, needs_weight)
        return dgate, dup, dweight, dbias, None, None


def _product(gate: Tensor, up: Tensor | None, f: str, impl: str) -> Tensor:
    """h, contiguous."""
    if dispatch.is_triton(impl):
        return forward(gate, up, f=f, impl=impl)
    y = FUNCTIONS[f](gate)
    return (y if up is None else y.mul_(up)).contiguous()


def _flat(x: Tensor) -> Tensor:
    return torch.atleast_2d(x).flatten(0, -2)


def _eager_grads(
    dy: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor, f: str, needs_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dgate, dup, dweight. In memory that is there: fresh pages cost as much as the arithmetic."""
    y = FUNCTIONS[f](gate)
    h = (y if up is None else y * up).contiguous()
    dweight = dy.t() @ _flat(h) if needs_weight else None
    torch.mm(dy, weight, out=_flat(h))
    if up is None:
        return _derivative(h, gate, y, f), None, dweight
    dup = h * y if f == "sigmoid" else y.mul_(h)
    return _derivative(h.mul_(up), gate, y, f), dup, dweight


def _derivative(d: Tensor, gate: Tensor, y: Tensor, f: str) -> Tensor:
    """d f'(gate); for the logistic function, of y = f(gate)."""
    aten = torch.ops.aten
    if f == "silu":
        return aten.silu_backward(d, gate)
    if f == "gelu":
        return aten.gelu_backward(d, gate, approximate="tanh")
    return aten.sigmoid_backward(d, y) if f == "sigmoid" else d.mul_(F.relu(gate)).mul_(2)


def _plain_again(
    dh: Tensor, gate: Tensor, up: Tensor | None, f: str
) -> tuple[Tensor, Tensor | None]:
    """dgate and dup; dh becomes h."""
    y = FUNCTIONS[f](gate)
    dup = None if up is None else dh * y
    dgate = _derivative(dh.clone() if up is None else dh * up, gate, y, f)
    dh.copy_(y if up is None else y * up)
    return dgate, dup


def _fake(dh: Tensor, gate: Tensor, up: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(0 if up is None else up.shape)


_call = custom_op.KernelOp(
    "glu_again",
    "(Tensor(a!) dh, Tensor gate, Tensor? up, str f, str impl) -> (Tensor, Tensor)",
    fake=_fake,
    kernel="slipstream.kernels.elementwise.triton.glu:glu_bwd_recompute",
    plain=_plain_again,
    kind=lambda gate, f: ("glu_bwd_recompute.triton", f, gate.dtype, gate.shape[-1]),
    # rows of the same width
    probe={"dh": (37, 0), "gate": (37, 0), "up": (37, 0)},
    replay=True,
)
