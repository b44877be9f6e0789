"""Shared by the interpreted checks of the linear family: gates, and the float64 reference."""

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference

GATES = {
    "none": lambda x: None,
    "weak": lambda x: -0.1 * x,
    "strong": lambda x: -50 * x,
    "mixed": lambda x: -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
    "reset": lambda x: torch.where(x < 0.1, -torch.inf, -0.1 * x),
    "per head": lambda x: (-0.1 * x[:1, :1]).expand(x.shape),
}


def reference(
    terms: LinearInputs, scale: float, do: Tensor, dfinal: Tensor | None
) -> dict[str, Tensor]:
    wide = {
        name: x.detach().double().requires_grad_()
        for name, x in terms._asdict().items()
        if x is not None and name != "cu_seqlens"
    }
    o, final = linear_reference(LinearInputs(**wide, cu_seqlens=terms.cu_seqlens), scale)
    loss = (o * do.double()).sum() + (0 if dfinal is None else (final * dfinal.double()).sum())
    grads = torch.autograd.grad(loss, list(wide.values()), allow_unused=True)
    pairs = zip(wide.items(), grads)
    return {
        "o": o.detach(),
        "final": final.detach(),
        **{name: torch.zeros_like(x) if dx is None else dx for (name, x), dx in pairs},
    }


CHANNEL_GATES = {
    "zero": lambda x: 0 * x,
    "weak": lambda x: -0.1 * x,
    "strong": lambda x: -50 * x,
    "mixed": lambda x: -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
    "huge": lambda x: torch.where(x < 0.1, -1e4, -0.1 * x),
    "reset": lambda x: torch.where(x < 0.1, -torch.inf, -0.1 * x),
    "per token": lambda x: (-x[..., :1]).expand(x.shape),
    "middling": lambda x: -6 * x,
    "even": lambda x: -7.2 - 0.2 * x,
    "bfloat16": lambda x: (-x).bfloat16(),
}


FORMS = ("g", "u", "gv")
