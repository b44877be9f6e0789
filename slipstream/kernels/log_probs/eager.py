"""Log-probabilities and entropies in plain torch, and their gradients.

    z = scale (hidden weight^T + bias)          p = softmax(z)
    log_prob = log p[target]                    entropy = -sum p log p
    dz = dlog_prob (onehot(target) - p) - dentropy p (log p + entropy)

Rows go through in chunks, whose logits are dropped again; backward makes them a second time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common.linear_rows import ClassifierInputs, LinearRows, row_chunks


def forward(inputs: ClassifierInputs, scale: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """log_prob and entropy [N]; 0 where the target is ignored."""
    hidden, target = inputs.hidden, inputs.target
    log_prob, entropy = (
        hidden.new_zeros(len(target), dtype=inputs.compute_dtype) for _ in range(2)
    )
    for rows in row_chunks(hidden, len(inputs.weight)):
        log_p, at = _log_softmax(inputs, rows, scale), target[rows]
        live = at != ignore_index
        chosen = log_p.gather(1, torch.where(live, at, 0)[:, None])[:, 0]
        log_prob[rows] = torch.where(live, chosen, 0)
        entropy[rows] = torch.where(live, entropy_of(log_p), 0)
    return log_prob, entropy


def backward(
    inputs: ClassifierInputs, dlog_prob: Tensor, dentropy: Tensor, scale: float, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dhidden [N, D] in hidden's dtype; dweight [V, D] and dbias [V] in float32 or float64."""
    hidden, weight, bias, target = inputs
    layer = LinearRows(hidden, weight, bias, True, inputs.compute_dtype)
    for rows in row_chunks(hidden, len(weight)):
        log_p, at = _log_softmax(inputs, rows, scale), target[rows]
        live = at != ignore_index
        up, down = (torch.where(live, g[rows], 0)[:, None] for g in (dlog_prob, dentropy))
        entropy = entropy_of(log_p)[:, None]
        p = log_p.exp()
        # finite where a class cannot be, however large `down`: its p, 0, comes last
        d = log_p.masked_fill_(log_p == -torch.inf, 0).add_(entropy).mul_(-down).sub_(up)
        d.mul_(p).scatter_add_(1, torch.where(live, at, 0)[:, None], up)
        # masked, not multiplied: an ignored row may hold inf or NaN
        layer.add(rows, d.mul_(scale).masked_fill_(~live[:, None], 0))
    return layer.dhidden, layer.dweight, layer.dbias


def _log_softmax(inputs: ClassifierInputs, rows: slice, scale: float) -> Tensor:
    z = F.linear(inputs.hidden[rows], inputs.weight, inputs.bias).to(inputs.compute_dtype)
    return z.mul_(scale).log_softmax(-1)


def entropy_of(log_p: Tensor) -> Tensor:
    """A class that cannot be, whose logarithm is -inf, adds nothing."""
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
