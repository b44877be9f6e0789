"""slipstream::_linear_log_probs and its gradient: the Triton kernel, or plain torch."""

from typing import Any

import torch
from torch import Tensor

from slipstream.common.linear_rows import ClassifierInputs, empty_gradients
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.log_probs import eager
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import needs_autograd
from slipstream.runtime.custom_op import KernelOp, autograd_function, schema_of
from slipstream.runtime.dispatch import TRITON_OR_EAGER, is_triton
from slipstream.runtime.guarded_launch import Guard
from slipstream.runtime.token_ids import expect_ids


def log_probs(
    inputs: ClassifierInputs, scale: float, ignore_index: int, impl: str
) -> tuple[Tensor, Tensor]:
    """log_prob and entropy [N]."""
    if impl == "reference":
        return reference(inputs, scale, ignore_index)
    call = _LogProbs.apply if needs_autograd(*inputs) else _call
    return call(*inputs, scale, ignore_index, impl)


def reference(inputs: ClassifierInputs, scale: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Plain differentiable torch, which holds the logits."""
    z = torch.nn.functional.linear(inputs.hidden, inputs.weight, inputs.bias)
    log_p = (z.to(inputs.compute_dtype) * scale).log_softmax(-1)
    live = inputs.target != ignore_index
    chosen = log_p.gather(1, torch.where(live, inputs.target, 0)[:, None])[:, 0]
    return torch.where(live, chosen, 0), torch.where(live, eager.entropy_of(log_p), 0)


def kind(dtype: torch.dtype, classes: int) -> KernelKey:
    """The calls that share a verdict on the kernel."""
    return ("log_probs.triton", dtype, classes)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, (scale, ignore_index, impl) = ClassifierInputs(*args[:4]), args[4:]
    expect_ids("target", inputs.target, inputs.weight.shape[0], ignore_index)
    with _guard(impl, inputs) as usable:
        if usable:
            return _kernels().forward(inputs, scale, ignore_index)
    return eager.forward(inputs, scale, ignore_index)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, (*options, impl) = ClassifierInputs(*args[:4]), args[6:]
    grads = [x.contiguous() for x in args[4:6]]
    with _guard(impl, inputs) as usable:
        if usable:
            return _kernels().backward(inputs, *grads, *options)
    dhidden, dweight, dbias = eager.backward(inputs, *grads, *options)
    if is_triton(impl):
        dweight, dbias = dweight.to(inputs.weight.dtype), dbias.to(inputs.weight.dtype)
    return dhidden, dweight, dbias


def _kernels() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.log_probs.triton import log_probs

    return log_probs


def _guard(impl: str, inputs: ClassifierInputs) -> Guard:
    dtype, classes, device = inputs.hidden.dtype, inputs.weight.shape[0], inputs.hidden.device
    return Guard(
        impl, device, lambda: kind(dtype, classes), lambda: _mismatch(inputs.hidden, classes)
    )


def _mismatch(like: Tensor, classes: int) -> str | None:
    """The probe: a few rows of as many classes, one of them ignored."""
    target = torch.randint(0, classes, (9,), device=like.device)
    target[4] = -100
    made = {"hidden": numeric_probe.random_like(like, 9, 16)}
    made["weight"] = numeric_probe.random_like(like, classes, 16) / 4

    def run(impl: str) -> Any:
        def call(x: Any) -> Tensor:
            inputs = ClassifierInputs(x["hidden"], x["weight"], None, target)
            return torch.stack(log_probs(inputs, 0.9, -100, impl))

        return call

    return numeric_probe.mismatch(run(TRITON_OR_EAGER), run("eager"), made)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = ClassifierInputs(*args[:4])
    shape, dtype = inputs.target.shape, inputs.compute_dtype
    return inputs.hidden.new_empty(shape, dtype=dtype), inputs.hidden.new_empty(shape, dtype=dtype)


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias, _, dlog_prob, *_, impl = args
    return empty_gradients(
        hidden, weight, bias, weight.dtype if is_triton(impl) else dlog_prob.dtype
    )


_TENSORS = schema_of(ClassifierInputs)
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
_LogProbs = autograd_function(
    _call, _call_backward, results="log_prob entropy", wrt="hidden weight bias"
)
