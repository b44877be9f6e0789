"""States of recurrences in 11 bits a number: int8, and what rounding to int8 leaves over.

A column of a state [K, V], the numbers behind one value channel, has one scale:

    m = round(S / d),  d = scale / 8,  |m| <= 1023
    code = m >> 3                 int8: S is about scale * code
    residual = m & 7              what that leaves, 3 bits: S is d * (8 code + residual)

Residuals of 8 rows are a word of 24 bits, rows r, R + r, .. 7 R + r from its lowest bits on, of
which byte b is row b R + r of the residual [3 R, V]. R = rows_of(K).

So a state goes from step to step with an eighth of int8's rounding, and the memory is at most
(11 + 16 / K) / 32 of float32's. A number that is not finite makes its column NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 1023
FIELDS = 8
# of a state's size: what two roundings of it differ by at most
ROUNDING = 2e-3
# bfloat16 may be less than what it is rounded from by 2^-8, or 2^-7 where it is cut off
MARGIN = 1.008
# a column of less than this is 0: its scale would lose digits
TINY = 1e-30


class Int8State(NamedTuple):
    """codes [..., K, V] int8; scale [..., V] bfloat16; residual [..., 3 R, V] uint8."""

    codes: Tensor
    scale: Tensor
    residual: Tensor


def rows_of(K: int) -> int:
    """R, the words of a column: a power of two of at least 2."""
    # a tensor to torch.jit.trace
    return max(16, 1 << (int(K) - 1).bit_length()) // FIELDS


def encode(state: Tensor) -> Int8State:
    """state [..., K, V] of any floating dtype."""
    K, V = state.shape[-2:]
    R = rows_of(K)
    x = state if state.dtype == torch.float64 else state.float()
    largest = x.abs().amax(-2) if K else x.new_zeros(x.shape[:-2] + (V,))
    largest = torch.where(largest < TINY, 0, largest)
    d = (largest * (MARGIN / LARGEST)).to(torch.bfloat16)
    inverse = 1 / torch.where(d == 0, 1, d).to(x.dtype)
    m = (x * inverse[..., None, :]).round().nan_to_num().clamp(-LARGEST, LARGEST).to(torch.int32)
    fields = torch.zeros(*x.shape[:-2], FIELDS * R, V, dtype=torch.int32, device=x.device)
    fields[..., :K, :] = m & 7
    shifts = 3 * torch.arange(FIELDS, dtype=torch.int32, device=x.device)
    words = (fields.unflatten(-2, (FIELDS, R)) << shifts[:, None, None]).sum(-3, dtype=torch.int32)
    residual = torch.cat([(words >> shift) & 255 for shift in (0, 8, 16)], -2)
    return Int8State((m >> 3).to(torch.int8), d * FIELDS, residual.to(torch.uint8))


def decode(state: Int8State, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., K, V] in a dtype of at least 11 bits."""
    K = state.codes.shape[-2]
    low, middle, high = state.residual.to(torch.int32).chunk(3, -2)
    words = (low | (middle << 8) | (high << 16)).unsqueeze(-3)
    shifts = 3 * torch.arange(FIELDS, dtype=torch.int32, device=words.device)
    fields = ((words >> shifts[:, None, None]) & 7).flatten(-3, -2)[..., :K, :]
    m = FIELDS * state.codes.to(torch.int32) + fields
    return m.to(dtype) * (state.scale.to(dtype) / FIELDS).unsqueeze(-2)
