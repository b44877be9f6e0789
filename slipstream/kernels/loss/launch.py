"""The loss kernels, each with the plain torch that takes over where a compiler fails at it.

`impl` is triton, triton|eager or eager. The other arguments are those of triton/launch.py.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.common.linear_rows import ClassifierInputs, scaled
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.loss import eager
from slipstream.kernels.loss.reference import LossInputs
from slipstream.runtime import numeric_probe
from slipstream.runtime.dispatch import TRITON_OR_EAGER
from slipstream.runtime.guarded_launch import Guard
from slipstream.runtime.token_ids import expect_ids


def kind(logits_dtype: torch.dtype, classes: int) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    return ("cross_entropy.triton", logits_dtype, classes)


def cross_entropy(
    impl: str,
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
    outputs = {"loss": loss, "lse": lse, "grad": grad}
    with _guard(impl, logits.dtype, logits) as usable:
        if usable:
            _launch().cross_entropy(
                logits, target, options, **outputs, weight=weight, has_lse=has_lse
            )
            return
    compute_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    r = eager.rows(logits.to(compute_dtype, copy=True), target, options)
    if not has_lse:
        for out, x in ((loss, r.loss), (lse, r.lse.masked_fill(~r.live, 0))):
            if out is not None:
                out.copy_(x)
    if grad is not None:
        grad.copy_(eager.dlogits(r, weight, options))


def inverse_count(impl: str, target: Tensor, ignore_index: int, classes: int) -> Tensor:
    """1 / the number of targets that are not ignored. Wrong ids raise, as token_ids.expect_ids has
    it: on a GPU the kernel that counts finds them too, which it does if it is given `classes`."""
    args = target, ignore_index
    if target.is_cuda:
        args = target, ignore_index, classes
    else:
        expect_ids("target", target, classes, ignore_index)

    def probe_args() -> tuple[Any, ...]:
        return torch.randint(0, 3, (5000,), device=target.device), 1, *[3 for _ in args[2:]]

    return _guarded(impl, "inverse_count", args, _inverse_count, probe_args)


def _inverse_count(target: Tensor, ignore_index: int, classes: int | None = None) -> Tensor:
    if classes is not None:
        expect_ids("target", target, classes, ignore_index)
    return 1 / (target != ignore_index).sum().clamp(min=1).float()


def scale_(impl: str, x: Tensor, s: Tensor) -> Tensor:
    """x times s, in place; what is 0 stays 0."""

    def probe_args() -> tuple[Tensor, Tensor]:
        return numeric_probe.random_like(x, 5000), torch.full((), 1.5, device=x.device)

    return _guarded(impl, "scale_", (x, s), _scale_, probe_args)


def _scale_(x: Tensor, s: Tensor) -> Tensor:
    return x.copy_(scaled(x, s))


def _guarded(impl: str, name: str, args: tuple, plain: Any, probe_args: Any) -> Any:
    """The launch of that name of args, or plain torch; both are compared on probe_args() once."""
    x = args[0]

    def mismatch() -> str | None:
        x, *others = probe_args()
        got, want = (f(x.clone(), *others) for f in (getattr(_launch(), name), plain))
        error = numeric_probe.relative_error(got, want)
        return None if error < 1e-2 else f"off by {error:.1e} of its size"

    with Guard(impl, x.device, lambda: (f"cross_entropy.{name}", x.dtype), mismatch) as usable:
        if usable:
            return getattr(_launch(), name)(*args)
    return plain(*args)


def linear_rows(
    impl: str, inputs: ClassifierInputs, dloss: Tensor | None, options: LossInputs, grads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = inputs.weight.dtype
    with _guard(impl, inputs.hidden.dtype, inputs.weight.t()) as usable:
        if usable:
            return _launch().linear_rows(inputs, dloss, options, grads)
    row_weight = None if dloss is None else dloss.expand(inputs.target.shape)
    loss, dhidden, dweight, dbias = eager.linear_rows(inputs, row_weight, options, grads)
    return loss, dhidden, dweight.to(dtype), dbias.to(dtype)


def _guard(impl: str, dtype: torch.dtype, like: Tensor) -> Guard:
    """like: [..., V]."""
    return Guard(
        impl,
        like.device,
        lambda: kind(dtype, like.shape[-1]),
        lambda: _mismatch(dtype, like.shape[-1], like.device),
    )


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
        lambda t: run(TRITON_OR_EAGER, t["logits"]),
        lambda t: run("eager", t["logits"]),
        probe_inputs,
        gradients=False,
    )


@cache
def _launch() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.loss.triton import launch

    return launch
