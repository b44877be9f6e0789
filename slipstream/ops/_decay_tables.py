"""Decays that a formula gives for each head: made once, not in every call."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.runtime.backends import is_plain_call


def per_head(v: Tensor, make: Callable[..., Tensor], *more: Any) -> Tensor:
    """make(h, *more) of the heads h = 0 .. HV - 1 of v, float64, in float32 unless v is wider.

    Kept, but where a graph or a tracer would own it.
    """
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    if not is_plain_call(v) or (v.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _made(v.shape[2], v.device, dtype, make, more)
    return _cached_table(v.shape[2], v.device, dtype, make, more)


def _made(
    HV: int, device: torch.device, dtype: torch.dtype, make: Callable[..., Tensor], more: tuple
) -> Tensor:
    return make(torch.arange(HV, dtype=torch.float64, device=device), *more).to(dtype)


@lru_cache(1024)
def _cached_table(
    HV: int, device: torch.device, dtype: torch.dtype, make: Callable[..., Tensor], more: tuple
) -> Tensor:
    # the copy waits for itself, so that any stream may read it
    with torch.inference_mode(False):
        return _made(HV, torch.device("cpu"), dtype, make, more).to(device)
