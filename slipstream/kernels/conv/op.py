"""The Triton short convolution as torch.library operators, and its gradient.

slipstream::_short_convolution gives y, or its channels in up to three tensors;
_short_convolution_backward, given the gradients of these, those of x, weight and of bias and
state, if they are there; _short_convolution_update y, and moves the state on in place.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.conv import fallback
from slipstream.kernels.conv.inputs import UNIT_TENSORS, UNIT_WIDTHS, ConvInputs
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import (
    Function,
    Saved,
    needs_autograd,
    once_differentiable,
    save,
    wants_gradient,
)
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.guarded_launch import Guard, known_failure

# the kernels unroll the taps
MAX_TAPS = 8


def unsupported_reason(
    x: Tensor, weight: Tensor, *tensors: Tensor | None, what: str = "triton"
) -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    if weight.shape[1] > MAX_TAPS:
        return f"it takes at most {MAX_TAPS} taps"
    if x.shape[-1] == 0 or (tensors and tensors[-1] is not None and tensors[-1].numel() < 2):
        return "there are no channels or sequences"
    if any(t is not None and t.dtype == torch.float64 for t in (weight, *tensors)):
        return "it computes in float32, and an input is float64"
    return known_failure(lambda: kind(what, x, weight), x.device)


def update_unsupported_reason(x: Tensor, *tensors: Tensor | None) -> str | None:
    if wants_gradient(x, *tensors):
        return "it makes no gradients"
    weight = tensors[0]
    assert weight is not None
    return unsupported_reason(x, weight, *tensors[1:], what="update")


def kind(what: str, x: Tensor, weight: Tensor) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    return (f"conv.{what}", x.dtype, weight.dtype, weight.shape[1])


def convolution(
    inputs: ConvInputs, silu: bool, impl: str, sizes: tuple[int, ...] | None = None, unit: int = 0
) -> list[Tensor]:
    """y, or one of each of up to three sizes channels. impl: triton, or triton|eager.

    unit: channels of a head of the first two of three tensors; each head is divided by its norm. 0
    normalises nothing. As `normalises` allows, and without a residual.
    """
    options = sizes, unit, silu, impl
    if needs_autograd(*inputs[:5]):
        # here, so that what the Function saves are its inputs
        x, weight, bias, state = _contiguous(inputs.x, inputs.weight, inputs.bias, inputs.state)
        inputs = inputs._replace(x=x, weight=weight, bias=bias, state=state)
        return [*_Convolution.apply(*inputs, *options)]
    return _call(*inputs, *options)


def normalises(sizes: tuple[int, ...], unit: int) -> bool:
    """Whether kernels take `unit`."""
    whole_heads = not any(n % (unit or 1) for n in sizes[:UNIT_TENSORS])
    return unit in UNIT_WIDTHS and len(sizes) > UNIT_TENSORS and whole_heads


def update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    indices: Tensor | None,
    silu: bool,
    impl: str,
) -> Tensor:
    """x, y [N, D]; the state moves on in place. No gradients."""
    return _call_update(x, state, weight, bias, residual, indices, silu=silu, impl=impl)


def _forward(*args: Any) -> list[Tensor]:
    *tensors, sizes, unit, silu, impl = args
    inputs = ConvInputs(*_contiguous(*tensors))
    with _guard(impl, inputs.x, inputs.weight) as usable:
        if usable:
            return _launch().forward(inputs, silu, sizes, unit)
    return fallback.forward(inputs, silu, sizes, unit)


def _backward(*args: Any) -> list[Tensor]:
    *tensors, unit, silu, impl = args
    dys = [t.contiguous() for t in tensors[:3] if t is not None]
    kernel_args: Any = (*_contiguous(*tensors[3:]), silu, unit)
    with _guard(impl, kernel_args[0], kernel_args[1]) as usable:
        if usable:
            return _launch().backward(dys, *kernel_args)
    return fallback.backward(dys, *kernel_args)


def _update(x: Tensor, state: Tensor, *args: Any) -> Tensor:
    *tensors, silu, impl = args
    x, weight, bias, residual, indices = _contiguous(x, *tensors)
    moves = (x, state, weight, bias, residual, indices, silu)
    with Guard(
        impl,
        x.device,
        lambda: kind("update", x, weight),
        lambda: _mismatch_of_update(x, state, weight, bias, silu),
    ) as usable:
        if usable:
            return _launch().update(*moves)
    return fallback.update(*moves).contiguous()


def _guard(impl: str, x: Tensor, weight: Tensor) -> Guard:
    return Guard(impl, x.device, lambda: kind("triton", x, weight), lambda: _mismatch(x, weight))


def _mismatch(x: Tensor, weight: Tensor) -> str | None:
    """The probe: two packed sequences, with everything."""
    D, W = 70, weight.shape[1]
    probe_inputs = {
        "x": numeric_probe.random_like(x, 1, 150, D),
        "weight": numeric_probe.random_like(weight, D, W),
    }
    probe_inputs |= {
        "bias": numeric_probe.random_like(weight, D),
        "residual": numeric_probe.random_like(x, 1, 150, D),
    }
    probe_inputs |= {"state": numeric_probe.random_like(x, 2, D, W)}
    probe_inputs["cu_seqlens"] = torch.tensor([0, 50, 150], device=x.device)
    mismatch = numeric_probe.mismatch(
        lambda t: convolution(ConvInputs(**t), True, "triton|eager")[0],
        lambda t: fallback.convolution(ConvInputs(**t), True),
        probe_inputs,
    )
    return mismatch or _mismatch_of_unit(x, weight)


def _mismatch_of_unit(x: Tensor, weight: Tensor) -> str | None:
    """The probe of heads that are normalised, and of a tensor that is not."""
    unit = UNIT_WIDTHS[-1]
    sizes = (unit, 2 * unit, 72)
    probe_inputs = {
        "x": numeric_probe.random_like(x, 1, 150, sum(sizes)),
        "weight": numeric_probe.random_like(weight, sum(sizes), weight.shape[1]),
    }

    def convolve(t: numeric_probe.Given, impl: str) -> tuple[Tensor, ...]:
        inputs = ConvInputs(t["x"], t["weight"], None, None, None, None)
        if impl:
            return tuple(convolution(inputs, True, impl, sizes, unit))
        return tuple(fallback.normalised(fallback.convolution(inputs, True), sizes, unit))

    return numeric_probe.mismatch(
        lambda t: convolve(t, "triton|eager"), lambda t: convolve(t, ""), probe_inputs
    )


def _mismatch_of_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> str | None:
    D, W = 70, weight.shape[1]
    probe_inputs = {
        "x": numeric_probe.random_like(x, 5, D),
        "state": numeric_probe.random_like(state, 5, D, W),
    }
    probe_inputs |= {"weight": numeric_probe.random_like(weight, D, W)}
    probe_inputs |= {"bias": None if bias is None else numeric_probe.random_like(bias, D)}

    def run(update: Callable) -> Callable[[numeric_probe.Given], Any]:
        def call(t: numeric_probe.Given) -> tuple[Tensor, Tensor]:
            y = update(*t.values(), None, None, silu)
            return y, cast(Tensor, t["state"])

        return call

    kernels = run(lambda *args: update(*args, impl="triton|eager"))
    return numeric_probe.mismatch(kernels, run(fallback.update), probe_inputs, gradients=False)


class _Convolution(Function):
    operator = "slipstream::short_convolution"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *tensors, sizes, unit, silu, impl = args
        x, weight, bias, residual, state, cu_seqlens = tensors
        sizes = None if sizes is None else tuple(sizes)
        results = _call(*tensors, sizes=sizes, unit=unit, silu=silu, impl=impl)
        save(ctx, x, weight, bias, state, cu_seqlens)
        ctx.options = unit, silu, impl
        ctx.residual_dtype = None if residual is None else residual.dtype
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dy: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        dys = (dy, *others, None, None)[:3]
        dx, dweight, *options = _call_backward(*dys, *saved, *ctx.options)
        _, _, bias, state, _ = saved
        dresidual = None if ctx.residual_dtype is None else dy.to(ctx.residual_dtype)
        dbias = None if bias is None else options[0]
        dstate = None if state is None else options[-1]
        return dx, dweight, dbias, dresidual, dstate, *(None,) * 5


def _contiguous(*tensors: Any) -> Any:
    return tuple(None if t is None else t.contiguous() for t in tensors)


@cache
def _launch() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.conv.triton import launch

    return launch


def _fake(x: Tensor, weight: Tensor, *args: Any) -> list[Tensor]:
    return [x.new_empty(*x.shape[:2], n) for n in args[4] or x.shape[2:]]


def _fake_backward(dy: Tensor, dy1: Tensor | None, dy2: Tensor | None, *args: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in args[:4] if t is not None]


def _fake_update(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_call = KernelOp(
    "short_convolution",
    f"({schema_of(ConvInputs)}, int[]? sizes, int unit, bool silu, str impl) -> Tensor[]",
    _forward,
    _fake,
    replay=True,
)
_call_backward = KernelOp(
    "short_convolution_backward",
    "(Tensor dy, Tensor? dy1, Tensor? dy2, Tensor x, Tensor weight, Tensor? bias, Tensor? state, "
    "Tensor? cu_seqlens, int unit, bool silu, str impl) -> Tensor[]",
    _backward,
    _fake_backward,
    replay=True,
)
_call_update = KernelOp(
    "short_convolution_update",
    "(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, Tensor? residual, Tensor? indices, "
    "bool silu, str impl) -> Tensor",
    _update,
    _fake_update,
    replay=True,
)
_call.set_gradient(_Convolution.apply)
