"""Cross entropy as a formula, for rows of V logits.

    z = logit_scale * logits, then softcap * tanh(z / softcap) if there is a cap
    lse = log(sum(exp(z)))
    loss = (1 - s) (lse - z[target]) + s (lse - mean(z)) + z_loss lse^2         s: label smoothing

Rows whose target is ignore_index have loss 0. Plain differentiable torch: the oracle of the tests
in float64, and what torch.compile sees of cross_entropy.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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
