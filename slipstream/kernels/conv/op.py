"""The short convolution: which implementation takes a call, the Triton one as torch.library
operators, and its gradient.

slipstream::_short_convolution gives y, or its channels in up to three tensors;
_short_convolution_backward, given the gradients of these, those of x, weight and of bias and
state, if they are there; _short_convolution_update y, and moves the state on in place.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.conv import eager
from slipstream.kernels.conv.inputs import (
    UNIT_TENSORS,
    UNIT_WIDTHS,
    ConvInputs,
    GradInputs,
    UpdateInputs,
)
from slipstream.runtime import autograd, custom_op, kernel_pair
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save

# the kernels unroll the taps
MAX_TAPS = 8


def _unsupported_reason(x: Tensor, weight: Tensor, *tensors: Tensor | None) -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    if weight.shape[1] > MAX_TAPS:
        return f"it takes at most {MAX_TAPS} taps"
    if x.shape[-1] == 0 or (tensors and tensors[-1] is not None and tensors[-1].numel() < 2):
        return "there are no channels or sequences"
    if any(t is not None and t.dtype == torch.float64 for t in (weight, *tensors)):
        return "it computes in float32, and an input is float64"
    return None


def _update_unsupported_reason(x: Tensor, weight: Tensor, *tensors: Tensor | None) -> str | None:
    if autograd.wants_gradient(x, weight, *tensors):
        return "it makes no gradients"
    return _unsupported_reason(x, weight, *tensors)


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
        inputs = ConvInputs._make(None if t is None else t.contiguous() for t in inputs)
        return [*_Convolution.apply(*inputs, *options)]
    return _call(*inputs, *options)


def normalises(sizes: tuple[int, ...], unit: int) -> bool:
    """Whether kernels take `unit`."""
    whole_heads = not any(n % (unit or 1) for n in sizes[:UNIT_TENSORS])
    return unit in UNIT_WIDTHS and len(sizes) > UNIT_TENSORS and whole_heads


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


def _fake(x: Tensor, weight: Tensor, *args: Any) -> list[Tensor]:
    return [x.new_empty(*x.shape[:2], n) for n in args[4] or x.shape[2:]]


def _fake_backward(dy: Tensor, dy1: Tensor | None, dy2: Tensor | None, *args: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in args[:4] if t is not None]


_UNIT = UNIT_WIDTHS[-1]
_SIZES = (_UNIT, 2 * _UNIT, 72)
_PROBES = (
    # two packed sequences, with everything
    {
        "x": (1, 150, 70),
        "weight": (70, 0),
        "bias": lambda weight: kernel_pair.random_like(weight, 70),
        "residual": lambda x: kernel_pair.random_like(x, 1, 150, 70),
        "state": lambda x, weight: kernel_pair.random_like(x, 2, 70, weight.shape[1]),
        "cu_seqlens": lambda x: torch.tensor([0, 50, 150], device=x.device),
        "sizes": None,
        "unit": 0,
        "silu": True,
    },
    # heads that are normalised, and a tensor that is not
    {
        "x": (1, 150, sum(_SIZES)),
        "weight": (sum(_SIZES), 0),
        **dict.fromkeys(("bias", "residual", "state", "cu_seqlens")),
        "sizes": lambda: _SIZES,
        "unit": _UNIT,
        "silu": True,
    },
)
_LAUNCH = "slipstream.kernels.conv.triton_launch"
_call = custom_op.KernelOp(
    "short_convolution",
    f"({custom_op.schema_of(ConvInputs)}, int[]? sizes, int unit, bool silu, str impl) -> Tensor[]",
    fake=_fake,
    kernel=f"{_LAUNCH}:forward",
    plain=eager.forward,
    kind=lambda x, weight: kind("triton", x, weight),
    probe=_PROBES,
    packed={"inputs": ConvInputs},
    replay=True,
)
_call_backward = custom_op.KernelOp(
    "short_convolution_backward",
    f"({custom_op.schema_of(GradInputs)}, int unit, bool silu, str impl) -> Tensor[]",
    fake=_fake_backward,
    kernel=f"{_LAUNCH}:backward",
    plain=eager.backward,
    kind=lambda x, weight: kind("triton", x, weight),
    packed={"t": GradInputs},
    forward=_call,
    replay=True,
)
call_update = custom_op.KernelOp(
    "short_convolution_update",
    "(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, Tensor? residual, Tensor? indices, "
    "bool silu, str impl) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    kernel=f"{_LAUNCH}:update",
    plain=eager.update,
    kind=lambda x, weight: kind("update", x, weight),
    packed={"t": UpdateInputs},
    probe={
        "x": (5, 70), "state": (5, 70, 0), "weight": (70, 0), "bias": (70,), "residual": None,
        "indices": None,
    },
    replay=True,
)  # fmt: skip
_call.set_gradient(_Convolution.apply)
CANDIDATES = _call.candidates(_unsupported_reason)
UPDATE_CANDIDATES = call_update.candidates(_update_unsupported_reason)
