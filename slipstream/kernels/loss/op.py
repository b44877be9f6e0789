"""The losses behind autograd; linear_cross_entropy is one opaque operator, so that a compiled
graph holds neither the logits nor the loop over chunks. Of logits that are there: fused.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.common.checks import cast, widen
from slipstream.common.linear_rows import ClassifierInputs, fake_rows, scaled
from slipstream.kernels.loss import eager, fused
from slipstream.kernels.loss.eager import LossInputs, reduced, rows_reference
from slipstream.runtime import autograd, dispatch, token_ids
from slipstream.runtime.custom_op import KernelOp, schema_of


def cross_entropy(
    logits: Tensor, target: Tensor, options: LossInputs, reduction: str, impl: str
) -> Tensor:
    """logits [N, V], target [N] -> loss [N] or []."""
    if not dispatch.is_triton(impl):
        rows = cross_entropy_rows(widen(logits), target, options, impl)
        return reduced(rows, target, options, reduction)
    if reduction != "none" and not autograd.by_operation():
        return fused.reduced(logits, target, options, reduction == "mean", impl)
    return reduced(fused.rows(logits, target, options, impl), target, options, reduction)


def cross_entropy_rows(logits: Tensor, target: Tensor, options: LossInputs, impl: str) -> Tensor:
    """logits [N, V] float32 or float64, target [N] -> loss [N]."""
    if autograd.by_operation() or impl == "reference":
        return rows_reference(logits, target, options)
    token_ids.expect_ids("target", target, logits.shape[1], options.ignore_index)
    if autograd.wants_gradient(logits):
        return _CrossEntropy.apply(logits, target, options)
    return autograd.as_base(_rows(logits, target, options).loss)


def _rows(logits: Tensor, target: Tensor, options: LossInputs) -> eager.Rows:
    touched = options.softcap or options.logit_scale != 1.0
    return eager.rows(logits.clone() if touched else logits, target, options)


def linear_cross_entropy(
    inputs: ClassifierInputs, options: LossInputs, reduction: str, impl: str
) -> Tensor:
    """loss [N], or [] whose gradient is made in the forward if it is wanted."""
    hidden, weight, bias, target = inputs
    if impl == "reference":
        logits = torch.nn.functional.linear(hidden, weight, bias).to(inputs.compute_dtype)
        return cross_entropy(logits, target, options, reduction, impl)
    grads = autograd.needs_autograd(hidden, weight, bias)
    if dispatch.is_triton(impl) and not autograd.by_operation() and reduction != "none":
        loss = _TritonLinear.apply(*inputs, options, reduction == "mean", grads, impl)
        token_ids.launched()
        return loss
    if grads:
        rows = _LinearRows.apply(*inputs, *options, reduction != "none", impl)
    else:
        rows = _call_linear(*inputs, None, *options, grads=False, impl=impl)[0]
    return reduced(rows, target, options, reduction)


class _CrossEntropy(autograd.Function):
    operator = "slipstream::cross_entropy"

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LossInputs) -> Tensor:
        r = _rows(logits, target, options)
        autograd.save(ctx, r.logp, r.lse, r.live, r.target, *autograd.anchors(logits))
        ctx.options = options
        return autograd.as_base(r.loss)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dloss: Tensor) -> tuple[Tensor, None, None]:
        logp, lse, live, target, *_ = saved
        r = eager.Rows(dloss, logp.clone(), lse, live, target)
        return eager.dlogits(r, dloss, ctx.options), None, None


def rows_function(
    name: str, call: Callable[..., Sequence[Any]], count: int
) -> type[autograd.Function]:
    """The Function of rows' losses behind a linear layer, called as the operator without dloss.

    Where the gradient of the rows' sum was made in the forward, what comes in is one number,
    expanded; a reduction is all that may follow.

    Args:
        call: the operator, of `count` tensors, the first three hidden, weight and bias, then dloss,
            its options, grads and impl: the loss and those three's gradients.
    """

    class Rows(autograd.Function):
        operator = name

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            tensors, (*options, grads, impl) = args[:count], args[count:]
            loss, *forward_grads = call(*tensors, None, *options, grads=grads, impl=impl)
            autograd.save(
                ctx, *([*forward_grads, *autograd.anchors(*tensors[:3])] if grads else tensors)
            )
            ctx.options, ctx.grads, ctx.impl = options, grads, impl
            ctx.dtypes = [None if x is None else x.dtype for x in tensors[:3]]
            return loss

        @staticmethod
        @autograd.once_differentiable
        def backward(ctx: Any, saved: autograd.Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
            if not ctx.grads:
                _, *grads = call(*saved, dloss, *ctx.options, grads=True, impl=ctx.impl)
            else:
                grads = [scaled(x, dloss[0]) if dloss.numel() else x for x in saved[:3]]
            pairs = zip(grads, ctx.dtypes)
            cast_grads = (None if dtype is None else cast(x, dtype) for x, dtype in pairs)
            return *cast_grads, *[None] * (count + len(ctx.options) - 1)

    return Rows


class _TritonLinear(autograd.Function):
    """As kernels.reduced, through the linear layer; a second backward makes everything again."""

    operator = "slipstream::linear_cross_entropy"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        inputs, (options, mean, grads, impl) = ClassifierInputs(*args[:4]), args[4:]
        classes = inputs.weight.shape[0]
        factor = fused.inverse_count(impl, inputs.target, options.ignore_index, classes)
        factor = factor if mean else None
        # a float16 gradient of one row's share of the mean would underflow
        scales_late = inputs.hidden.dtype == torch.float16
        row_weight = None if scales_late else factor
        loss, *grads_saved = fused.linear_rows(impl, inputs, row_weight, options, grads)
        autograd.save(ctx, *inputs, factor)
        ctx.options, ctx.impl, ctx.scales_late = options, impl, scales_late
        ctx.grads_saved = grads_saved if grads else None
        total = loss.sum()
        return total if factor is None else total * factor

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        grads_saved, ctx.grads_saved = ctx.grads_saved, None
        inputs, factor = ClassifierInputs(*saved[:4]), saved[4]
        if grads_saved is None:
            row_weight = None if ctx.scales_late else factor
            _, *grads_saved = fused.linear_rows(ctx.impl, inputs, row_weight, ctx.options, True)
        if ctx.scales_late and factor is not None:
            dloss = dloss * factor
        dhidden, dweight, dbias = (fused.scale_(ctx.impl, x, dloss) for x in grads_saved)
        return dhidden, dweight, None if inputs.bias is None else dbias, *[None] * 5


def _linear(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, dloss, options, grads, impl = _of_call(args)
    token_ids.expect_ids("target", inputs.target, inputs.weight.shape[0], options.ignore_index)
    if dispatch.is_triton(impl):
        return fused.linear_rows(impl, inputs, dloss, options, grads)
    return eager.linear_rows(inputs, dloss, options, grads)


def _linear_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, _, _, grads, impl = _of_call(args)
    return fake_rows(*inputs[:3], grads, dispatch.is_triton(impl))


def _of_call(args: Sequence[Any]) -> tuple[ClassifierInputs, Tensor | None, LossInputs, bool, str]:
    """The arguments of slipstream::_linear_cross_entropy."""
    # torch's dispatcher leaves out what is the default
    impl = args[11] if len(args) > 11 else "eager"
    return ClassifierInputs(*args[:4]), args[4], LossInputs(*args[5:10]), args[10], impl


_call_linear = KernelOp(
    "linear_cross_entropy",
    f"({schema_of(ClassifierInputs)}, Tensor? dloss, {schema_of(LossInputs)}, bool grads, "
    'str impl="eager") -> (Tensor, Tensor, Tensor, Tensor)',
    _linear,
    _linear_fake,
)
_LinearRows = rows_function("slipstream::linear_cross_entropy", _call_linear, 4)


def _of_operator(*args: Any) -> Any:
    """As slipstream::_linear_cross_entropy is called."""
    *inputs, dloss = args[:5]
    return () if dloss is not None else _LinearRows.apply(*inputs, *args[5:-2], False, args[-1])


_call_linear.set_gradient(_of_operator)
