"""The loss kernels, each with the plain torch that takes over where a compiler fails at it.

`impl` is triton, triton|eager or eager. The other arguments are those of triton/cross_entropy.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.common.linear_rows import ClassifierInputs, scaled
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.loss import eager
from slipstream.kernels.loss.reference import LossInputs
from slipstream.runtime import dispatch, kernel_pair, numeric_probe, token_ids

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
    compute_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    r = eager.rows(logits.to(compute_dtype, copy=True), target, options)
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

    return numeric_probe.mismatch(
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
        return numeric_probe.random_like(x, 5000), torch.full((), 1.5, device=x.device)

    return _pass(impl, "scale_", (x, s), _scale_, probe_args)


def _scale_(x: Tensor, s: Tensor) -> Tensor:
    return x.copy_(scaled(x, s))


def _pass(impl: str, name: str, args: tuple, plain: Any, probe_args: Any) -> Any:
    """The launch of that name of args, or plain torch; both are compared on probe_args() once."""
    x, kernel = args[0], f"{_LAUNCH}:{name}"

    def mismatch() -> str | None:
        x, *others = probe_args()
        got, want = (f(x.clone(), *others) for f in (kernel_pair.launch_of(kernel), plain))
        error = numeric_probe.relative_error(got, want)
        return None if error < 1e-2 else f"off by {error:.1e} of its size"

    kind_of = (f"cross_entropy.{name}", x.dtype)
    return kernel_pair.guarded(impl, x.device, kernel, plain, args, lambda: kind_of, mismatch)
