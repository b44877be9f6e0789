"""The norms as formulas, over the last dimension of size D.

    rms    y = x / sqrt(mean(x^2) + eps) * weight
    layer  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias

Plain differentiable torch in the dtype given: the oracle of the tests in float64, and what
torch.compile sees, since Inductor makes one kernel of it.
"""

import torch
from torch import Tensor


def rms_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def layer_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = rms_reference(centred, weight, eps)
    return y if bias is None else y + bias
