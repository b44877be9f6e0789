"""slipstream::linear_log_probs and its gradient: the Triton kernel, or plain torch."""

from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.log_probs import eager
from slipstream.kernels.log_probs.eager import Given
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable, save
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.dispatch import TRITON_OR_EAGER, is_triton
from slipstream.runtime.guarded_launch import Guard
from slipstream.runtime.token_ids import expect_ids


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: float,
    ignore_index: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """hidden [N, D], weight [V, D], bias [V], target [N] -> log_prob and entropy [N]."""
    if impl == "reference":
        return reference(Given(hidden, weight, bias, target), scale, ignore_index)
    if needs_autograd(hidden, weight, bias):
        return _LogProbs.apply(hidden, weight, bias, target, scale, ignore_index, impl)
    return _call(hidden, weight, bias, target, scale, ignore_index, impl)


def reference(given: Given, scale: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Plain differentiable torch, which holds the logits."""
    z = torch.nn.functional.linear(given.hidden, given.weight, given.bias)
    log_p = (z.to(given.compute_dtype) * scale).log_softmax(-1)
    live = given.target != ignore_index
    chosen = log_p.gather(1, torch.where(live, given.target, 0)[:, None])[:, 0]
    return torch.where(live, chosen, 0), torch.where(live, eager.entropy_of(log_p), 0)


def kind(dtype: torch.dtype, classes: int) -> KernelKey:
    """What a verdict on the kernel holds for."""
    return ("log_probs.triton", dtype, classes)


class _LogProbs(Function):
    operator = "slipstream::linear_log_probs"

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        ignore_index: int,
        impl: str,
    ) -> tuple[Tensor, Tensor]:
        save(ctx, hidden, weight, bias, target)
        ctx.set_materialize_grads(False)
        ctx.options = scale, ignore_index, impl
        return _call(hidden, weight, bias, target, *ctx.options)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, saved: Saved, dlog_prob: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        like = dentropy if dlog_prob is None else dlog_prob
        if like is None:
            return (None,) * 7
        weight, bias = saved[1:3]
        given = (torch.zeros_like(like) if x is None else x for x in (dlog_prob, dentropy))
        grads = (x.contiguous() for x in given)
        dhidden, dweight, dbias = _call_backward(*saved, *grads, *ctx.options)
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dhidden, dweight.to(weight.dtype), dbias, None, None, None, None


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    given, (scale, ignore_index, impl) = Given(*args[:4]), args[4:]
    expect_ids("target", given.target, given.weight.shape[0], ignore_index)
    with _guard(impl, given) as usable:
        if usable:
            return _kernels().forward(given, scale, ignore_index)
    return eager.forward(given, scale, ignore_index)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, grads, (*options, impl) = Given(*args[:4]), args[4:6], args[6:]
    with _guard(impl, given) as usable:
        if usable:
            return _kernels().backward(given, *grads, *options)
    dhidden, dweight, dbias = eager.backward(given, *grads, *options)
    if is_triton(impl):
        dweight, dbias = dweight.to(given.weight.dtype), dbias.to(given.weight.dtype)
    return dhidden, dweight, dbias


def _kernels() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.log_probs.triton import log_probs

    return log_probs


def _guard(impl: str, given: Given) -> Guard:
    dtype, classes, device = given.hidden.dtype, given.weight.shape[0], given.hidden.device
    return Guard(
        impl, device, lambda: kind(dtype, classes), lambda: _mismatch(given.hidden, classes)
    )


def _mismatch(like: Tensor, classes: int) -> str | None:
    """The probe: a few rows of as many classes, one of them ignored."""
    target = torch.randint(0, classes, (9,), device=like.device)
    target[4] = -100
    made = {"hidden": numeric_probe.random_like(like, 9, 16)}
    made["weight"] = numeric_probe.random_like(like, classes, 16) / 4

    def run(impl: str) -> Any:
        def call(x: numeric_probe.Given) -> Tensor:
            args = x["hidden"], x["weight"], None, target, 0.9, -100, impl
            return torch.stack(log_probs(*args))

        return call

    return numeric_probe.mismatch(run(TRITON_OR_EAGER), run("eager"), made)


def _forward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return hidden.new_empty(target.shape, dtype=dtype), hidden.new_empty(target.shape, dtype=dtype)


def _backward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, d: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = weight.dtype if is_triton(rest[-1]) else d.dtype
    dbias = weight.new_empty(0 if bias is None else weight.shape[0], dtype=dtype)
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=dtype), dbias


_TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target"
_call = KernelOp(
    "linear_log_probs",
    f"({_TENSORS}, float scale, int ignore_index, str impl) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_call_backward = KernelOp(
    "linear_log_probs_backward",
    f"({_TENSORS}, Tensor dlog_prob, Tensor dentropy, float scale, int ignore_index, str impl) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_call.set_gradient(lambda *args: _LogProbs.apply(*args))
