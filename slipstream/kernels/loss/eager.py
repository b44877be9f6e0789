"""Cross entropy as a formula, and in fast plain torch: one fused log-softmax, all else in place.

    d loss / d z = (1 + 2 z_loss lse) softmax(z) - (1 - s) onehot(target) - s / V
    d z / d logits = logit_scale (1 - (z / softcap)^2)

With the linear layer before it, rows go through in chunks whose logits [rows, V] are made, turned
into their gradient in place, multiplied into dhidden and dweight, and dropped:

    dhidden = dlogits weight       dweight = dlogits^T hidden

The formula, for rows of V logits:

    z = logit_scale * logits, then softcap * tanh(z / softcap) if there is a cap
    lse = log(sum(exp(z)))
    loss = (1 - s) (lse - z[target]) + s (lse - mean(z)) + z_loss lse^2         s: label smoothing

Rows whose target is ignore_index have loss 0. Plain differentiable torch: the oracle of the tests
in float64, and what torch.compile sees of cross_entropy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common.checks import cast
from slipstream.common.linear_rows import ClassifierInputs, LinearRows, row_chunks


class LossInputs(NamedTuple):
    """Everything about a loss but its tensors; softcap 0 is none."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0


def rows_reference(logits: Tensor, target: Tensor, options: LossInputs) -> Tensor:
    """logits [N, V], target int64 [N] -> loss [N]."""
    z = logits * options.logit_scale
    if options.softcap:
        z = options.softcap * torch.tanh(z / options.softcap)
    live = target != options.ignore_index
    lse = torch.logsumexp(z, -1)
    hit = z.gather(1, torch.where(live, target, 0).clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    s = options.label_smoothing
    loss = lse - (1 - s) * hit
    if s:
        loss = loss - s * z.mean(-1)
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    return torch.where(live, loss, 0)


def reduced(rows: Tensor, target: Tensor, options: LossInputs, reduction: str) -> Tensor:
    """The loss [N] or [], of those of rows."""
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    # times 1 / count, as where loss and gradient are made together
    count = (target != options.ignore_index).sum().clamp(min=1)
    return rows.sum() * count.to(rows.dtype).reciprocal()


class Rows(NamedTuple):
    """loss [N], 0 where not live; logp [N, V]; live [N]; target [N], safe to gather with.

    lse [N], to be read only if there is a z_loss or a softcap.
    """

    loss: Tensor
    logp: Tensor
    lse: Tensor
    live: Tensor
    target: Tensor


def rows(logits: Tensor, target: Tensor, options: LossInputs) -> Rows:
    """logits [N, V] float32 or float64, which are overwritten unless no option touches them."""
    z = logits
    if options.logit_scale != 1.0:
        z = z.mul_(options.logit_scale)
    if options.softcap:
        z = z.div_(options.softcap).tanh_().mul_(options.softcap)
    live = target != options.ignore_index
    safe = torch.where(live, target, 0).clamp_(0, max(z.shape[1] - 1, 0))
    logp = torch.log_softmax(z, -1)
    # the first column's would do, were it never -inf; the cap keeps it finite
    lse = torch.logsumexp(z, -1) if options.z_loss else z[:, 0] - logp[:, 0]
    loss = logp.gather(1, safe[:, None])[:, 0].neg_()
    if options.label_smoothing:
        loss.lerp_(-logp.mean(-1), options.label_smoothing)
    if options.z_loss:
        loss.add_(lse.square(), alpha=options.z_loss)
    return Rows(loss.masked_fill_(~live, 0), logp, lse, live, safe)


def dlogits(r: Rows, dloss: Tensor | None, options: LossInputs) -> Tensor:
    """d loss / d logits [N, V], in place of r.logp; each row times its dloss [N], if given."""
    smooth = options.label_smoothing
    size = r.logp.shape[1]
    z = r.logp + r.lse[:, None] if options.softcap else None
    d = r.logp.exp_()
    if options.z_loss:
        d.mul_((r.lse * (2 * options.z_loss)).add_(1)[:, None])
    if smooth:
        d.sub_(smooth / size)
    d.scatter_add_(1, r.target[:, None], d.new_full((1, 1), smooth - 1).expand(d.shape[0], 1))
    if z is not None:
        d.mul_(z.div_(options.softcap).square_().neg_().add_(1))
    weight = r.live.to(d.dtype) * options.logit_scale
    # masked, not multiplied: an ignored row may hold inf or NaN
    return d.mul_((weight if dloss is None else weight * dloss)[:, None]).masked_fill_(
        ~r.live[:, None], 0
    )


def linear_rows(
    inputs: ClassifierInputs, dloss: Tensor | None, options: LossInputs, grads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss [N], and with `grads` dhidden [N, D], dweight [V, D], dbias [V]; else three empty ones.

    Args:
        dloss: [N], what comes into each row's loss; None is 1.
    """
    (hidden, weight, bias, target), compute_dtype = inputs, inputs.compute_dtype
    layer = LinearRows(hidden, weight, bias, grads, compute_dtype)
    loss = hidden.new_empty(hidden.shape[0], dtype=compute_dtype)
    for chunk in row_chunks(hidden, weight.shape[0]):
        r = rows(cast(layer.logits(chunk), compute_dtype), target[chunk], options)
        loss[chunk] = r.loss
        if grads:
            layer.add(chunk, dlogits(r, None if dloss is None else dloss[chunk], options))
    return loss, layer.dhidden, layer.dweight, layer.dbias
