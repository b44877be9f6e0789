"""Counts that the programs of a kernel share, at zero before it.

By a launch, which a recorded call plays under autocast too (runtime/custom_op.py), unlike
operations of torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime.launch_cache import cached

BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def zeros_kernel(x_ptr, count, BLOCK: tl.constexpr):
    """grid (ceil(count / BLOCK),)."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.zeros((BLOCK,), tl.int32), mask=o < count)


def zero_counters(count: int, like: Tensor) -> Tensor:
    """int32 [count], on the current device, which is that of `like`."""
    x = like.new_empty(count, dtype=torch.int32)
    launch: Any = cached(zeros_kernel)[(-(-count // BLOCK),)]
    launch(x, count, BLOCK=BLOCK, num_warps=4)
    return x
