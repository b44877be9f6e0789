"""Losses of rows of which some, or all, do not count: what comes into the loss does not reach them.
A loss of N rows is called with tensors, of which those of N rows have a gradient of its rows, and
with `live` [N]: which of the rows count."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import nn
from slipstream.compat.fla import modules as fla
from slipstream.compat.fla.modules.fused_cross_entropy import cross_entropy_loss
from slipstream.compat.fla.modules.fused_linear_cross_entropy import (
    fused_linear_cross_entropy_loss as linear_loss,
)
from slipstream.compat.flash_attn.losses.cross_entropy import CrossEntropyLoss
from slipstream.compat.flash_attn.ops.triton import cross_entropy as flash
from slipstream.ops.loss import kl_div
from slipstream.tools.catalog import OPERATORS, Sample
from slipstream.tools.samples import flat
from tests.support.operators import Size

N, D, V, IGNORED = 7, 4, 11, -100
SIZE = Size(T=N, D=D, Z=V)
REDUCTIONS = ("mean", "sum", "none")
INCOMING = (1.0, torch.inf, -torch.inf, torch.nan)
Given = dict[str, Tensor]


class Loss(NamedTuple):
    """call: tensors and `live` to results [N] or []. inputs: fresh tensors, without targets."""

    name: str
    call: Callable[[Given, Tensor], list[Tensor]]
    inputs: Callable[[], Given]


def _of_operator(sample: Sample, impl: str | None) -> Loss:
    def inputs() -> Given:
        made = sample.inputs(SIZE)
        return {n: x for n, x in made.items() if n != "target"}

    def call(given: Given, live: Tensor) -> list[Tensor]:
        if "target" in sample.dims:
            return sample.call({**given, "target": _target(live)}, impl)
        return sample.call({**given, "mask": live}, impl)

    return Loss(f"{sample.name} {[*sample.options.values()]}", call, inputs)


def _target(live: Tensor) -> Tensor:
    return torch.where(live, torch.arange(N) % V, IGNORED)


def of_operators(impl: str | None) -> list[Loss]:
    """Every row of the catalog whose function reduces a loss, or ignores rows, by every reduction;
    rows that differ by that alone are one."""
    found: dict[str, Sample] = {}
    for sample in OPERATORS:
        reductions = [{"reduction": x} for x in REDUCTIONS] if "reduction" in sample.takes else []
        if reductions or "ignore_index" in sample.takes:
            for more in reductions or [{}]:
                options = {**sample.options, **more}
                key = f"{sample.op} {sample.tensors} {sorted(options.items())}"
                found.setdefault(key, replace(sample, options=options))
    return [_of_operator(x, impl) for x in found.values()]


def _of_tensors(name: str, shapes: str, call: Callable[..., Any]) -> Loss:
    """shapes: N, D and V of each tensor, which call takes in this order, and `live` after them."""
    sizes = [[{"N": N, "D": D, "V": V}[c] for c in word] for word in shapes.split()]
    inputs = lambda: {str(i): torch.randn(size) for i, size in enumerate(sizes)}  # noqa: E731
    return Loss(name, lambda given, live: flat(call(*given.values(), live)), inputs)


def of_modules() -> list[Loss]:
    """Losses that are no operators of the catalog: modules, and functions of other libraries."""
    layer, teacher = torch.nn.Linear(D, V), torch.nn.Linear(D, V)

    def of_flash(x: Tensor, live: Tensor) -> Tensor:
        return flash.cross_entropy_loss(x, _target(live))[0]

    def of_fla(x: Tensor, live: Tensor) -> Tensor:
        return cross_entropy_loss(x, _target(live))[0]

    found = [_of_tensors(f.__name__, "NV", f) for f in (of_flash, of_fla)]
    for r in REDUCTIONS:
        kl = nn.LinearKLDivLoss(1.0, r)
        logits = {
            "nn": nn.CrossEntropyLoss(reduction=r),
            "fla": fla.FusedCrossEntropyLoss(reduction=r),
            "flash_attn": CrossEntropyLoss(reduction=r, lse_square_scale=0.1, return_z_loss=True),
            "nn linear": nn.LinearCrossEntropyLoss(D, V, reduction=r),
        }
        found += [
            _of_tensors(f"{name} {r}", "ND" if "linear" in name else "NV", _first_of(loss))
            for name, loss in logits.items()
        ]
        found += [
            _of_tensors(
                f"nn kl {r}", "ND", lambda x, live, f=kl: f(x, layer, x.detach(), teacher, live)
            ),
            _of_tensors(
                f"kl_div {r}", "NV", lambda x, live, r=r: kl_div(x, x * 0, mask=live, reduction=r)
            ),
        ]
    return found + [
        _of_tensors(
            f"fla linear {r}",
            "ND VD V",
            lambda x, w, b, live, r=r: linear_loss(x, _target(live), w, b, reduction=r),
        )
        for r in ("mean", "sum")
    ]


def _first_of(loss: torch.nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, live: flat(loss(x, _target(live)))[0]


def of_a_group(group: Any) -> list[Loss]:
    """Of a vocabulary whose parts the ranks of a group have."""
    found = []
    for r in REDUCTIONS:
        one = nn.CrossEntropyLoss(reduction=r, group=group, softcap=4.0, z_loss=0.1)
        linear = nn.LinearCrossEntropyLoss(D, V, bias=True, reduction=r, group=group)
        found += [
            _of_tensors(f"group {r}", "NV", _first_of(one)),
            _of_tensors(f"group linear {r}", "ND", _first_of(linear)),
        ]
    return found


def fault(loss: Loss, live: Tensor, incoming: float) -> str | None:
    """What is wrong with the gradients, for `incoming` into each result, or into those of rows that
    do not count."""
    given = {n: x.requires_grad_() for n, x in loss.inputs().items()}
    results = loss.call(given, live)
    into = [
        torch.where(live, 1.0, incoming) if x.dim() else torch.full((), incoming) for x in results
    ]
    leaves = [x for n, x in given.items() if not n.startswith("teacher")]
    grads = torch.autograd.grad(results, leaves, [x.to(y) for x, y in zip(into, results)])
    every, none = [*results, *grads], not live.any()
    if any(x[~live].any() for x in every if x.dim() and len(x) == N):
        return "a row that does not count has a loss or a gradient"
    if none and any(x.any() for x in every):
        return "no row counts, and there is a loss or a gradient"
    finite = incoming == 1 or all(x.dim() for x in results)
    if finite and not all(x.isfinite().all() for x in every):
        return "not finite"
    if not none and not all(x.any() for x in grads):
        return "no gradient of the rows that count"
    return None


def faults(losses: list[Loss]) -> list[str]:
    torch.manual_seed(0)
    some = torch.arange(N) % 3 != 1
    cases = itertools.product(losses, (some, torch.zeros_like(some)), INCOMING)
    return [
        f"{loss.name}, {int(live.sum())} rows, {incoming}: {text}"
        for loss, live, incoming in cases
        if (text := fault(loss, live, incoming)) is not None
    ]
