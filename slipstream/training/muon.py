"""Muon: steps of matrices made orthogonal; AdamW for everything else.

    M <- m M + (1 - m) G;  U = orthogonal((1 - m) G + m M);  W <- (1 - lr wd) W - lr s U

G [R, C] the gradient, s = sqrt(max(1, R / C)). A few Newton-Schulz steps bring the singular
values of U near 1. Source: Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon/
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# of Newton and Schulz
STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315  # of the source: steepest at 0, so that five steps are enough


class Muon(torch.optim.AdamW):
    """torch.optim.Muon takes matrices alone and works in bfloat16, slow on most CPUs.

    Args:
        matrices: parameters [R, C] that get orthogonal steps, of size `matrix_lr`.
        others: parameters that get AdamW's, without weight decay.
        momentum: m above.
        options: AdamW's.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        *,
        lr: float,
        matrix_lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        groups = [
            {"params": list(others), "lr": lr, "weight_decay": 0.0, "orthogonal": False},
            {"params": list(matrices), "lr": matrix_lr, "weight_decay": weight_decay,
             "orthogonal": True, "momentum": momentum},
        ]  # fmt: skip
        super().__init__(groups, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        every = self.param_groups
        self.param_groups = [group for group in every if not group["orthogonal"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = every
        for group in every:
            if group["orthogonal"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for (rows, columns), matrices in by_shape.items():
            steps = orthogonal(torch.stack([self._momentum(p, group) for p in matrices]))
            size = group["lr"] * max(1.0, rows / columns) ** 0.5
            for p, step in zip(matrices, steps, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-size)

    def _momentum(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
            state["step"] = torch.zeros(
                (), device="cpu"
            )  # AdamW looks for it when it loads a state
        assert p.grad is not None
        state["momentum"].lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(state["momentum"], group["momentum"])


def orthogonal(x: Tensor) -> Tensor:
    """[N, R, C] -> the same, with singular values from about 0.7 to 1.2."""
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x if wide else x.mT


def of_model(model: nn.Module, momentum: float, **options: Any) -> Muon:
    """For the weights of the linear maps inside a model's blocks, not its embedding and head."""
    blocks: Any = model.get_submodule("model.layers")
    linear = (m.weight for m in blocks.modules() if isinstance(m, nn.Linear))
    matrices = {id(w): w for w in linear if w.requires_grad}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in matrices]
    return Muon(matrices.values(), others, momentum=momentum, **options)
