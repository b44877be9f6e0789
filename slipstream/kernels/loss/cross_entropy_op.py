"""The Triton cross entropy as torch.library operators, and its gradient.

slipstream::_cross_entropy gives loss and lse of each row, slipstream::_cross_entropy_backward the
gradient of the logits. In plain calls for one number, loss and gradient come from one launch in the
forward; a compiled graph has both operators instead, which read the logits twice and write their
gradient once: a gradient made early would be read and written again to be scaled.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.loss import launch
from slipstream.kernels.loss.reference import LossInputs
from slipstream.runtime import autograd, custom_op, gradient, token_ids


def rows(logits: Tensor, target: Tensor, options: LossInputs, impl: str) -> Tensor:
    """logits [N, V], target [N] -> loss [N]."""
    if autograd.needs_autograd(logits):
        return _Rows.apply(logits, target, *options, impl)
    return _call(logits, target, *options, impl=impl)[0]


def reduced(logits: Tensor, target: Tensor, options: LossInputs, mean: bool, impl: str) -> Tensor:
    """logits [N, V], target [N] -> loss []."""
    grads = autograd.needs_autograd(logits)
    args = _rows_adjacent(logits), target.contiguous(), options, mean, grads, impl
    loss = _Reduced.apply(*args) if grads else _replayed_forward(*args)
    token_ids.launched()
    return loss


def _rows_adjacent(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


class _Reduced(autograd.Function):
    """The gradient is made in the forward, beside the loss, and scaled in place by what comes in,
    which is nearly always 1. It is given away then: a second backward makes it from the logits."""

    operator = "slipstream::cross_entropy"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        logits, target, options, mean, grads, impl = args
        total, lse, factor, grad = _replayed_forward(logits, target, options, mean, grads, impl)
        autograd.save(ctx, logits, target, lse, factor if mean else None)
        ctx.options, ctx.impl, ctx.grad = options, impl, grad
        return total

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        grad, ctx.grad = ctx.grad, None
        logits, target, lse, factor = saved
        if factor is not None and (grad is None or _scales_late(logits)):
            dloss = dloss * factor
        if grad is not None:
            return launch.scale_(ctx.impl, grad, dloss), *[None] * 5
        return _recompute_grad(logits, target, lse, dloss, ctx.options, ctx.impl), *[None] * 5


def _scales_late(logits: Tensor) -> bool:
    """A float16 gradient of one row's share of the mean would underflow."""
    return logits.dtype == torch.float16


def _fused_forward(
    logits: Tensor, target: Tensor, options: LossInputs, mean: bool, grads: bool, impl: str
) -> Any:
    """The loss; with `grads` also each row's lse, 1 / how many targets count, and the gradient."""
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    outputs: dict[str, Any] = {}
    if grads:
        outputs = {"lse": torch.empty_like(loss), "grad": logits.new_empty(logits.shape)}
    factor = launch.inverse_count(impl, target, options.ignore_index, logits.shape[1])
    weight = factor if mean else None
    row_weight = None if _scales_late(logits) else weight
    launch.cross_entropy(impl, logits, target, options, loss=loss, **outputs, weight=row_weight)
    total = loss.sum()
    total = total if weight is None else total * weight
    return (total, outputs["lse"], factor, outputs["grad"]) if grads else total


# a later call of its kind is played from its record
_replayed_forward = custom_op.DirectCall(_fused_forward)


def _recompute_grad(
    logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, options: LossInputs, impl: str
) -> Tensor:
    grad = logits.new_empty(logits.shape)
    outputs = {"lse": lse, "grad": grad}
    launch.cross_entropy(impl, logits, target, options, **outputs, weight=dloss, has_lse=True)
    return grad


def _forward(logits: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *options, impl = args
    options = LossInputs(*options)
    token_ids.expect_ids("target", target, logits.shape[1], options.ignore_index)
    loss, lse = _forward_fake(logits, target)
    outputs: dict[str, Any] = {"loss": loss, "lse": lse}
    launch.cross_entropy(impl, _rows_adjacent(logits), target.contiguous(), options, **outputs)
    return loss, lse


def _backward(logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, *args: Any) -> Tensor:
    *options, impl = args
    tensors = (_rows_adjacent(logits), target.contiguous(), lse, dloss)
    return _recompute_grad(*tensors, LossInputs(*options), impl)


def _forward_fake(logits: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    compute_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=compute_dtype), logits.new_empty(rows, dtype=compute_dtype)


def _backward_fake(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


_TERMS = f"{custom_op.schema_of(LossInputs)}, str impl"
_call = custom_op.KernelOp(
    "cross_entropy",
    f"(Tensor logits, Tensor target, {_TERMS}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_call_backward = custom_op.KernelOp(
    "cross_entropy_backward",
    f"(Tensor logits, Tensor target, Tensor lse, Tensor dloss, {_TERMS}) -> Tensor",
    _backward,
    _backward_fake,
)
_Rows = gradient.autograd_function(_call, _call_backward, results="loss lse", wrt="logits")
