"""The losses behind autograd; linear_cross_entropy is one opaque operator, so that a compiled
graph holds neither the logits nor the loop over chunks. Of logits that are there: launch.py."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.loss import cross_entropy_op, eager, launch
from slipstream.kernels.loss.reference import LossInputs, rows_reference
from slipstream.runtime.autograd import (
    Function,
    Saved,
    anchors,
    as_base,
    by_operation,
    needs_autograd,
    once_differentiable,
    save,
)
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.dispatch import is_triton
from slipstream.runtime.token_ids import expect_ids, launched


def cross_entropy(
    logits: Tensor, target: Tensor, options: LossInputs, reduction: str, impl: str
) -> Tensor:
    """logits [N, V], target [N] -> loss [N] or []."""
    if not is_triton(impl):
        logits = logits if logits.dtype == torch.float64 else logits.float()
        rows = cross_entropy_rows(logits, target, options, impl)
        return rows if reduction == "none" else _reduced(rows.sum(), target, options, reduction)
    if reduction != "none" and not by_operation():
        return cross_entropy_op.reduced(logits, target, options, reduction == "mean", impl)
    rows = cross_entropy_op.rows(logits, target, options, impl)
    return rows if reduction == "none" else _reduced(rows.sum(), target, options, reduction)


def cross_entropy_rows(logits: Tensor, target: Tensor, options: LossInputs, impl: str) -> Tensor:
    """logits [N, V] float32 or float64, target [N] -> loss [N]."""
    if by_operation() or impl == "reference":
        return rows_reference(logits, target, options)
    expect_ids("target", target, logits.shape[1], options.ignore_index)
    return _CrossEntropy.apply(logits, target, options)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossInputs,
    reduction: str,
    impl: str,
) -> Tensor:
    """hidden [N, D], weight [V, D], bias [V], target [N] -> loss [N], or [] whose gradient is made
    in the forward if it is wanted."""
    if impl == "reference":
        compute_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logits = torch.nn.functional.linear(hidden, weight, bias).to(compute_dtype)
        return cross_entropy(logits, target, options, reduction, impl)
    grads = needs_autograd(hidden, weight, bias)
    if is_triton(impl) and not by_operation() and reduction != "none":
        mean = reduction == "mean"
        loss = _TritonLinear.apply(hidden, weight, bias, target, options, mean, grads, impl)
        launched()
        return loss
    args = (hidden, weight, bias, target)
    if not grads:
        rows = _call_linear(*args, None, *options, False, impl)[0]
        return rows if reduction == "none" else _reduced(rows.sum(), target, options, reduction)
    if reduction == "none":
        return _LinearRows.apply(*args, options, impl)
    return _reduced(_LinearSum.apply(*args, options, impl), target, options, reduction)


def _reduced(total: Tensor, target: Tensor, options: LossInputs, reduction: str) -> Tensor:
    if reduction == "sum":
        return total
    return total / (target != options.ignore_index).sum().clamp(min=1)


class _CrossEntropy(Function):
    operator = "slipstream::cross_entropy"

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LossInputs) -> Tensor:
        touched = options.softcap or options.logit_scale != 1.0
        r = eager.rows(logits.clone() if touched else logits, target, options)
        save(ctx, r.logp, r.lse, r.live, r.target, *anchors(logits))
        ctx.options = options
        return as_base(r.loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dloss: Tensor) -> tuple[Tensor, None, None]:
        logp, lse, live, target, *_ = saved
        r = eager.Rows(dloss, logp.clone(), lse, live, target)
        return eager.dlogits(r, dloss, ctx.options), None, None


class _LinearSum(Function):
    operator = "slipstream::linear_cross_entropy"

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: LossInputs,
        impl: str,
    ) -> Tensor:
        loss, *gradients = _call_linear(hidden, weight, bias, target, None, *options, True, impl)
        save(ctx, *gradients, *anchors(hidden, weight, bias))
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight, dbias, *_ = saved
        weight_dtype, bias_dtype = ctx.dtypes
        # float16 may not hold dloss, the factor of a scaled loss
        dhidden = (dhidden.to(dloss.dtype) * dloss).to(dhidden.dtype)
        dweight = (dweight * dloss).to(weight_dtype)
        dbias = None if bias_dtype is None else (dbias * dloss).to(bias_dtype)
        return dhidden, dweight, dbias, None, None, None


class _LinearRows(Function):
    operator = "slipstream::linear_cross_entropy"

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: LossInputs,
        impl: str,
    ) -> Tensor:
        save(ctx, hidden, weight, bias, target)
        ctx.options, ctx.impl = options, impl
        return _call_linear(hidden, weight, bias, target, None, *options, False, impl)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target = saved
        _, dhidden, dweight, dbias = _call_linear(
            hidden, weight, bias, target, dloss, *ctx.options, True, ctx.impl
        )
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dhidden, dweight.to(weight.dtype), dbias, None, None, None


class _TritonLinear(Function):
    """As kernels.reduced, through the linear layer; a second backward makes everything again."""

    operator = "slipstream::linear_cross_entropy"

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: LossInputs,
        mean: bool,
        grads: bool,
        impl: str,
    ) -> Tensor:
        factor = launch.inverse_count(impl, target, options.ignore_index, weight.shape[0])
        factor = factor if mean else None
        # a float16 gradient of one row's share of the mean would underflow
        scales_late = hidden.dtype == torch.float16
        loss, *grads_saved = launch.linear_rows(
            impl, hidden, weight, bias, target, None if scales_late else factor, options, grads
        )
        save(ctx, hidden, weight, bias, target, factor)
        ctx.options, ctx.impl, ctx.scales_late, ctx.grads_saved = (
            options,
            impl,
            scales_late,
            grads_saved if grads else None,
        )
        total = loss.sum()
        return total if factor is None else total * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        grads_saved, ctx.grads_saved = ctx.grads_saved, None
        hidden, weight, bias, target, factor = saved
        if grads_saved is None:
            row_weight = None if ctx.scales_late else factor
            args = (hidden, weight, bias, target, row_weight, ctx.options, True)
            _, *grads_saved = launch.linear_rows(ctx.impl, *args)
        if ctx.scales_late and factor is not None:
            dloss = dloss * factor
        dhidden, dweight, dbias = (launch.scale_(ctx.impl, x, dloss) for x in grads_saved)
        return dhidden, dweight, None if bias is None else dbias, *[None] * 5


def _linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dloss: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    logit_scale: float,
    grads: bool,
    impl: str = "eager",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    expect_ids("target", target, weight.shape[0], ignore_index)
    options = LossInputs(ignore_index, label_smoothing, softcap, z_loss, logit_scale)
    if is_triton(impl):
        return launch.linear_rows(impl, hidden, weight, bias, target, dloss, options, grads)
    return eager.linear_rows(hidden, weight, bias, target, dloss, options, grads)


def _linear_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dloss: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    logit_scale: float,
    grads: bool,
    impl: str = "eager",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    compute_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss = hidden.new_empty(hidden.shape[0], dtype=compute_dtype)
    if not grads:
        return loss, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
    # of dweight and dbias
    grad_dtype = weight.dtype if is_triton(impl) else compute_dtype
    dbias = weight.new_empty(0 if bias is None else weight.shape[0], dtype=grad_dtype)
    dweight = weight.new_empty(weight.shape, dtype=grad_dtype)
    return loss, hidden.new_empty(hidden.shape), dweight, dbias


_call_linear = KernelOp(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? dloss, int ignore_index, "
    "float label_smoothing, float softcap, float z_loss, float logit_scale, bool grads, "
    'str impl="eager") '
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _linear,
    _linear_fake,
)


def _of_operator(*args: Any) -> Any:
    """As slipstream::linear_cross_entropy is called."""
    hidden, weight, bias, target, dloss, *options, _, impl = args
    if dloss is not None:
        return ()
    return _LinearRows.apply(hidden, weight, bias, target, LossInputs(*options), impl)


_call_linear.set_gradient(_of_operator)
