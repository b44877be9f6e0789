"""The losses behind autograd; linear_cross_entropy is one opaque operator, so that a compiled
graph holds neither the logits nor the loop over chunks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.core.ids import expect_ids
from slipstream.core.library import define
from slipstream.kernels.loss import eager
from slipstream.kernels.loss.reference import Terms, rows_reference


def cross_entropy_rows(logits: Tensor, target: Tensor, terms: Terms) -> Tensor:
    """logits [N, V] float32 or float64, target [N] -> loss [N]."""
    if torch.compiler.is_compiling():
        return rows_reference(logits, target, terms)
    expect_ids("target", target, logits.shape[1], terms.ignore_index)
    return _CrossEntropy.apply(logits, target, terms)


def linear_cross_entropy_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, terms: Terms
) -> Tensor:
    """hidden [N, D], weight [V, D], bias [V], target [N] -> loss [N]; logits are made twice."""
    return _LinearRows.apply(hidden, weight, bias, target, terms)


def linear_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, terms: Terms
) -> Tensor:
    """The sum of the rows' losses, whose gradient is made in the forward if it is wanted."""
    given = (hidden, weight) if bias is None else (hidden, weight, bias)
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return _LinearSum.apply(hidden, weight, bias, target, terms, grads)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, terms: Terms) -> Tensor:
        touched = terms.softcap or terms.logit_scale != 1.0
        r = eager.rows(logits.clone() if touched else logits, target, terms)
        ctx.save_for_backward(r.logp, r.lse, r.live, r.target)
        ctx.terms = terms
        return r.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        logp, lse, live, target = ctx.saved_tensors
        r = eager.Rows(dloss, logp.clone(), lse, live, target)
        return eager.dlogits(r, dloss, ctx.terms), None, None


class _LinearSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        terms: Terms,
        grads: bool,
    ) -> Tensor:
        loss, *gradients = _LINEAR(hidden, weight, bias, target, None, *terms, grads)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight, dbias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        dhidden = dhidden * dloss.to(dhidden.dtype)
        dweight = (dweight * dloss).to(weight_dtype)
        dbias = None if bias_dtype is None else (dbias * dloss).to(bias_dtype)
        return dhidden, dweight, dbias, None, None, None


class _LinearRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        terms: Terms,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.terms = terms
        return _LINEAR(hidden, weight, bias, target, None, *terms, False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        _, dhidden, dweight, dbias = _LINEAR(hidden, weight, bias, target, dloss, *ctx.terms, True)
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dhidden, dweight.to(weight.dtype), dbias, None, None


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    expect_ids("target", target, weight.shape[0], ignore_index)
    terms = Terms(ignore_index, label_smoothing, softcap, z_loss, logit_scale)
    return eager.linear_rows(hidden, weight, bias, target, dloss, terms, grads)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss = hidden.new_empty(hidden.shape[0], dtype=wide)
    if not grads:
        return loss, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
    dbias = weight.new_empty(0 if bias is None else weight.shape[0], dtype=wide)
    return loss, torch.empty_like(hidden), torch.empty_like(weight, dtype=wide), dbias


_LINEAR = define(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? dloss, int ignore_index, "
    "float label_smoothing, float softcap, float z_loss, float logit_scale, bool grads) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _linear,
    _linear_fake,
)
