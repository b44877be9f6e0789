"""Where a few calls of torch are quicker than an operator, whose checks take the host longer."""

import torch
from torch import Tensor


def on_host(x: Tensor) -> bool:
    """Whether x [N, 1, ...] is one token of each sequence, on a CPU in float32 or float64, without
    gradients, autocast or a tracer."""
    return (
        type(x) is Tensor
        and x.dim() > 2
        and x.shape[1] == 1
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )
