"""Losses of a vocabulary that ranks share, against those of the whole one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.ops.loss import cross_entropy, linear_cross_entropy
from tests.support.interpreted import error

RANKS, V = 2, 37 * 2

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2, "z_loss": 0.01},
    {"softcap": 2.0, "logit_scale": -0.5, "label_smoothing": 0.1, "z_loss": 0.1},
]


def found(given: list[Tensor], target: Tensor, **options: Any) -> list[Tensor]:
    """The loss and the gradients of logits, or of hidden, weight and bias."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    if len(leaves) == 1:
        loss = cross_entropy(leaves[0], target, **options)
    else:
        hidden, weight, bias = leaves
        loss = linear_cross_entropy(hidden, weight, target, bias, **options)
    total = loss.double().square().sum()
    return [loss.detach(), *torch.autograd.grad(total, leaves)]


def check(rank: int, options: dict[str, Any], reduction: str, impl: str) -> None:
    """The same numbers on both ranks, for they have the same seed."""
    logits, target = 4 * torch.randn(2, 9, V), torch.randint(0, V, (2, 9))
    target[0, 1] = target[1, 4] = -100
    if not options:
        logits[0, 0, : V // 2] = -torch.inf
        target[0, 0] = V - 1
    hidden, weight, bias = torch.randn(2, 9, 6), torch.randn(V, 6), torch.randn(V)
    mine = slice(rank * V // RANKS, (rank + 1) * V // RANKS)
    options = {**options, "reduction": reduction}
    ours = {**options, "group": dist.group.WORLD, "impl": impl}

    got = found([logits[..., mine]], target, **ours)
    # no kernel computes in float64
    options["impl"] = "eager"
    want = found([logits.double()], target, **options)
    pairs = [(got[0], want[0]), (got[1], want[1][..., mine])]
    got = found([hidden, weight[mine], bias[mine]], target, **ours)
    want = found([x.double() for x in (hidden, weight, bias)], target, **options)
    pairs += [*zip(got[:2], want[:2]), (got[2], want[2][mine]), (got[3], want[3][mine])]
    for i, (x, y) in enumerate(pairs):
        assert error(x, y) < 2e-5, (options, impl, i, error(x, y))
