"""The loss kernels, each beside plain torch that does the same: for compilers that fail at them.

`impl` is triton, triton|eager or eager; everything else is as in triton/launch.py.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.loss import eager
from slipstream.kernels.loss.reference import LossInputs
from slipstream.runtime import guarded_launch, numeric_probe
from slipstream.runtime.backends import is_triton
from slipstream.runtime.token_ids import expect_ids


def kind(logits_dtype: torch.dtype, classes: int) -> KernelKey:
    """What a verdict on the kernels holds for."""
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
    def run() -> None:
        _launch().cross_entropy(
            logits, target, options, loss=loss, lse=lse, grad=grad, weight=weight, has_lse=has_lse
        )

    def plain() -> None:
        compute_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        r = eager.rows(logits.to(compute_dtype, copy=True), target, options)
        if not has_lse:
            for out, x in ((loss, r.loss), (lse, r.lse.masked_fill(~r.live, 0))):
                if out is not None:
                    out.copy_(x)
        if grad is not None:
            grad.copy_(eager.dlogits(r, weight, options))

    if is_triton(impl):
        _run_guarded(impl, logits.dtype, logits, run, plain)
    else:
        plain()


def inverse_count(impl: str, target: Tensor, ignore_index: int, classes: int) -> Tensor:
    """1 / how many targets count, and as core.ids.expect_ids: on a device by the same kernel."""
    args = target, ignore_index
    if target.is_cuda:
        args = target, ignore_index, classes
    else:
        expect_ids("target", target, classes, ignore_index)

    def fresh() -> tuple[Any, ...]:
        return torch.randint(0, 3, (5000,), device=target.device), 1, *[3 for _ in args[2:]]

    return _simple(impl, "inverse_count", args, _inverse_count, fresh)


def _inverse_count(target: Tensor, ignore_index: int, classes: int | None = None) -> Tensor:
    if classes is not None:
        expect_ids("target", target, classes, ignore_index)
    return 1 / (target != ignore_index).sum().clamp(min=1).float()


def total(impl: str, x: Tensor, factor: Tensor | None) -> Tensor:
    """sum(x) * factor."""

    def fresh() -> tuple[Tensor, Tensor | None]:
        factor_of = None if factor is None else torch.full((), 1.5, device=x.device)
        return torch.rand(5000, device=x.device), factor_of

    return _simple(impl, "total", (x, factor), _total, fresh)


def _total(x: Tensor, factor: Tensor | None) -> Tensor:
    return x.sum() if factor is None else x.sum() * factor


def scale_(impl: str, x: Tensor, s: Tensor) -> Tensor:
    def fresh() -> tuple[Tensor, Tensor]:
        return numeric_probe.random_like(x, 5000), torch.full((), 1.5, device=x.device)

    return _simple(impl, "scale_", (x, s), _scale_, fresh)


def _scale_(x: Tensor, s: Tensor) -> Tensor:
    # the product in s's dtype: float16 may not hold s
    return x.copy_(x.to(s.dtype) * s)


def _simple(impl: str, name: str, args: tuple, plain: Any, fresh: Any) -> Any:
    x = args[0]

    def run(*args: Any) -> Tensor:
        return getattr(_launch(), name)(*args)

    def mismatch() -> str | None:
        x, *others = fresh()
        error = numeric_probe.relative_error(run(x.clone(), *others), plain(x.clone(), *others))
        return None if error < 1e-2 else f"off by {error:.1e} of its size"

    fallback = None if impl == "triton" else plain
    kind = f"cross_entropy.{name}", x.dtype
    return guarded_launch.run_guarded(lambda: kind, x.device, run, fallback, args, mismatch)


def linear_rows(
    impl: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dloss: Tensor | None,
    options: LossInputs,
    grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def run() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _launch().linear_rows(hidden, weight, bias, target, dloss, options, grads)

    def plain() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        row_weight = None if dloss is None else dloss.expand(target.shape)
        probe_inputs = eager.linear_rows(hidden, weight, bias, target, row_weight, options, grads)
        loss, dhidden, dweight, dbias = probe_inputs
        return loss, dhidden, dweight.to(weight.dtype), dbias.to(weight.dtype)

    return _run_guarded(impl, hidden.dtype, weight.t(), run, plain)


def _run_guarded(impl: str, dtype: torch.dtype, like: Tensor, run: Any, plain: Any) -> Any:
    """like: [..., V]."""
    return guarded_launch.run_guarded(
        lambda: kind(dtype, like.shape[-1]),
        like.device,
        run,
        None if impl == "triton" else plain,
        (),
        lambda: _mismatch(dtype, like.shape[-1], like.device),
    )


def _mismatch(dtype: torch.dtype, classes: int, device: torch.device) -> str | None:
    """The probe: a few rows, one of them ignored, every option on."""
    from slipstream.kernels.loss import op

    target = torch.randint(0, classes, (9,), device=device)
    target[4] = -100
    probe_inputs = {"logits": torch.randn(9, classes, device=device).to(dtype)}

    def run(impl: str) -> Any:
        options = LossInputs(-100, 0.1, 20.0, 1e-3, 0.9)
        return lambda t: op.cross_entropy(t["logits"], target, options, "mean", impl)

    return numeric_probe.mismatch(run("triton|eager"), run("eager"), probe_inputs)


@cache
def _launch() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.loss.triton import launch

    return launch
