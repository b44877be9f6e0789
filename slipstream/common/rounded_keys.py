"""Keys and values in 8 bits, int8 or float8 (e4m3), with a scale for each token and head."""

import torch
from torch import Tensor

# the largest number that a scale stands for
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] of any floating dtype -> codes [..., D] and scale [...], x being about their
    product. A row with a number that is not finite becomes NaN."""
    x = x if x.dtype == torch.float64 else x.float()
    scale = x.abs().amax(-1) / LARGEST[dtype]
    y = x / torch.where(scale == 0, 1, scale)[..., None]
    if dtype == torch.int8:
        y = y.round().nan_to_num(0, 0, 0)
    return y.to(dtype), scale.float()


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D] in a floating dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(wide) * scale.to(wide)[..., None]).to(dtype)
