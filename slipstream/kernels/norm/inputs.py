"""The inputs of a norm."""

from typing import NamedTuple

import torch
from torch import Tensor


class NormInputs(NamedTuple):
    """x, gate, residual: [..., D]. weight, bias: [D]."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None
    residual: Tensor | None = None


class BackwardInputs(NamedTuple):
    """dy, dh: gradients of y and of h. x: h, which is x, or its sum with the residual. stats: as
    forward left them. residual_dtype: None without a residual."""

    dy: Tensor
    dh: Tensor | None
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    stats: Tensor | None
    residual_dtype: torch.dtype | None
