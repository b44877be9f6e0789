"""The Triton cross entropy as torch.library operators, and its gradient.

slipstream::_cross_entropy gives loss and lse of each row, slipstream::_cross_entropy_backward the
gradient of the logits. In plain calls for one number, loss and gradient come from one launch in the
forward; a compiled graph has both operators instead, which read the logits twice and write their
gradient once: a gradient made early would be read and written again to be scaled.

Each kernel stands beside the plain torch that takes over where a compiler fails at it. `impl` is
triton, triton|eager or eager. The other arguments are those of triton/cross_entropy.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.common.checks import wide_dtype
from slipstream.common.linear_rows import ClassifierInputs, scaled
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.loss import eager
from slipstream.kernels.loss.eager import LossInputs
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair, token_ids

_LAUNCH = "slipstream.kernels.loss.triton.cross_entropy"


def kind(logits_dtype: torch.dtype, classes: int) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    return ("cross_entropy.triton", logits_dtype, classes)


def cross_entropy(
    impl: str, logits: Tensor, target: Tensor, options: LossInputs, **outputs: Any
) -> None:
    _guarded(impl, "cross_entropy", _cross_entropy, (logits, target, options), logits, **outputs)


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    options: LossInputs,
    *,
    loss: Tensor | None = None,
    lse: Tensor | None = None,
    grad: Tensor | None = None,
    weight: Tensor | None = None,
    has_lse: bool = False,
) -> None:
    r = eager.rows(logits.to(wide_dtype(logits), copy=True), target, options)
    if not has_lse:
        for out, x in ((loss, r.loss), (lse, r.lse.masked_fill(~r.live, 0))):
            if out is not None:
                out.copy_(x)
    if grad is not None:
        grad.copy_(eager.dlogits(r, weight, options))


def linear_rows(
    impl: str, inputs: ClassifierInputs, dloss: Tensor | None, options: LossInputs, grads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args, like = (inputs, dloss, options, grads), inputs.weight.t()
    return _guarded(impl, "linear_rows", _linear_rows, args, like, inputs.hidden.dtype)


def _linear_rows(
    inputs: ClassifierInputs, dloss: Tensor | None, options: LossInputs, grads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row_weight = None if dloss is None else dloss.expand(inputs.target.shape)
    loss, dhidden, dweight, dbias = eager.linear_rows(inputs, row_weight, options, grads)
    dtype = inputs.weight.dtype
    return loss, dhidden, dweight.to(dtype), dbias.to(dtype)


def _guarded(
    impl: str,
    name: str,
    plain: Callable,
    args: tuple,
    like: Tensor,
    dtype: torch.dtype | None = None,
    **named: Any,
) -> Any:
    """like: [..., V], of logits' dtype unless that is given."""
    call = dtype or like.dtype, like.shape[-1]
    mismatch = partial(_mismatch, *call, like.device)
    kernel, kind_of = f"{_LAUNCH}:{name}", partial(kind, *call)
    return kernel_pair.guarded(impl, like.device, kernel, plain, args, kind_of, mismatch, **named)


def _mismatch(dtype: torch.dtype, classes: int, device: torch.device) -> str | None:
    """The probe: a few rows, one of them ignored, every option on; the gradient at once, and again
    by the lse."""
    target = torch.randint(0, classes, (9,), device=device)
    target[4] = -100
    options, weight = LossInputs(-100, 0.1, 20.0, 1e-3, 0.9), torch.rand(9, device=device)
    probe_inputs = {"logits": torch.randn(9, classes, device=device).to(dtype)}

    def run(impl: str, logits: Tensor) -> tuple[Tensor, ...]:
        loss, lse = torch.empty(2, 9, device=device)
        grad, by_lse = torch.empty_like(logits), torch.empty_like(logits)
        args = impl, logits, target, options
        cross_entropy(*args, loss=loss, lse=lse, grad=grad, weight=weight)
        cross_entropy(*args, lse=lse, grad=by_lse, weight=weight, has_lse=True)
        return loss, lse[target >= 0], grad, by_lse

    return kernel_pair.mismatch(
        lambda t: run(dispatch.TRITON_OR_EAGER, t["logits"]),
        lambda t: run("eager", t["logits"]),
        probe_inputs,
        gradients=False,
    )


def inverse_count(impl: str, target: Tensor, ignore_index: int, classes: int) -> Tensor:
    """1 / the number of targets that are not ignored. Wrong ids raise, as token_ids.expect_ids has
    it: on a GPU the kernel that counts finds them too, which it does if it is given `classes`."""
    args = target, ignore_index
    if target.is_cuda:
        args = target, ignore_index, classes
    else:
        token_ids.expect_ids("target", target, classes, ignore_index)

    def probe_args() -> tuple[Any, ...]:
        return torch.randint(0, 3, (5000,), device=target.device), 1, *[3 for _ in args[2:]]

    return _pass(impl, "inverse_count", args, _inverse_count, probe_args)


def _inverse_count(target: Tensor, ignore_index: int, classes: int | None = None) -> Tensor:
    if classes is not None:
        token_ids.expect_ids("target", target, classes, ignore_index)
    return 1 / (target != ignore_index).sum().clamp(min=1).float()


def scale_(impl: str, x: Tensor, s: Tensor) -> Tensor:
    """x times s, in place; what is 0 stays 0."""

    def probe_args() -> tuple[Tensor, Tensor]:
        return kernel_pair.random_like(x, 5000), torch.full((), 1.5, device=x.device)

    return _pass(impl, "scale_", (x, s), _scale_, probe_args)


def _scale_(x: Tensor, s: Tensor) -> Tensor:
    return x.copy_(scaled(x, s))


def _pass(impl: str, name: str, args: tuple, plain: Any, probe_args: Any) -> Any:
    """The launch of that name of args, or plain torch; both are compared on probe_args() once."""
    x, kernel = args[0], f"{_LAUNCH}:{name}"

    def mismatch() -> str | None:
        x, *others = probe_args()
        got, want = (f(x.clone(), *others) for f in (kernel_pair.launch_of(kernel), plain))
        error = kernel_pair.relative_error(got, want)
        return None if error < 1e-2 else f"off by {error:.1e} of its size"

    kind_of = (f"cross_entropy.{name}", x.dtype)
    return kernel_pair.guarded(impl, x.device, kernel, plain, args, lambda: kind_of, mismatch)


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
            return scale_(ctx.impl, grad, dloss), *[None] * 5
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
    factor = inverse_count(impl, target, options.ignore_index, logits.shape[1])
    weight = factor if mean else None
    row_weight = None if _scales_late(logits) else weight
    cross_entropy(impl, logits, target, options, loss=loss, **outputs, weight=row_weight)
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
    cross_entropy(impl, logits, target, options, **outputs, weight=dloss, has_lse=True)
    return grad


def _forward(logits: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *options, impl = args
    options = LossInputs(*options)
    token_ids.expect_ids("target", target, logits.shape[1], options.ignore_index)
    loss, lse = _forward_fake(logits, target)
    outputs: dict[str, Any] = {"loss": loss, "lse": lse}
    cross_entropy(impl, _rows_adjacent(logits), target.contiguous(), options, **outputs)
    return loss, lse


def _backward(logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, *args: Any) -> Tensor:
    *options, impl = args
    tensors = (_rows_adjacent(logits), target.contiguous(), lse, dloss)
    return _recompute_grad(*tensors, LossInputs(*options), impl)


def _forward_fake(logits: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, dtype = logits.shape[0], wide_dtype(logits)
    return logits.new_empty(rows, dtype=dtype), logits.new_empty(rows, dtype=dtype)


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
_Rows = autograd.autograd_function(_call, _call_backward, results="loss lse", wrt="logits")
