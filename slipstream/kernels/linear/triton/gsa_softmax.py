"""Rows of scores to probabilities and back, from float32 to 16 bits at once.

    p = exp(x - max x) / sum exp(x - max x)          dx = p * (dp - p . dp)

The backward divides p . dp by the sum of p, which rounding has changed.
"""

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import backends, launch_cache


@triton.jit(do_not_specialize=["R"])
def gsa_softmax_kernel(
    x_ptr,  # [R, M], or None, and then p is read
    p_ptr,  # [R, M]
    dp_ptr,  # [R, M]
    dx_ptr,  # [R, M], which may be dp
    R,
    M: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
):
    """grid (ceil(R / BR),)."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_m = tl.arange(0, BM)
    m = (o_r < R)[:, None] & (o_m < M)[None, :]
    at = o_r[:, None] * M + o_m[None, :]
    if x_ptr is not None:
        b_x = tl.load(x_ptr + at, mask=m, other=float("-inf"))
        b_x = tl.where((o_r < R)[:, None], b_x, 0.0)
        b_p = tl.exp(b_x - tl.max(b_x, 1)[:, None])
        b_p /= tl.sum(b_p, 1)[:, None]
        tl.store(p_ptr + at, b_p.to(p_ptr.dtype.element_ty), mask=m)
    else:
        b_p = tl.load(p_ptr + at, mask=m, other=0.0).to(tl.float32)
        b_dp = tl.load(dp_ptr + at, mask=m, other=0.0).to(tl.float32)
        b_all = tl.where(o_r < R, tl.sum(b_p, 1), 1.0)
        b_mean = tl.sum(b_p * b_dp, 1) / b_all
        b_dx = b_p * (b_dp - b_mean[:, None])
        tl.store(dx_ptr + at, b_dx.to(dx_ptr.dtype.element_ty), mask=m)


def softmax(x: Tensor, p: Tensor) -> None:
    """Both contiguous, of one shape; p is written."""
    _run(x, p, None)


def softmax_backward(p: Tensor, dp: Tensor) -> None:
    """dp becomes the gradient of the scores."""
    _run(None, p, dp)


def _run(x: Tensor | None, p: Tensor, dp: Tensor | None) -> None:
    M = p.shape[-1]
    BM = triton.next_power_of_2(M)
    BR = max(1, 4096 // BM)  # elements of a program, at least a row
    rows = p.numel() // M
    with backends.device_of(p.device):
        launch_cache.cached(gsa_softmax_kernel)[(-(-rows // BR),)](
            x_ptr=x, p_ptr=p, dp_ptr=dp, dx_ptr=dp, R=rows, M=M, BM=BM, BR=BR, num_warps=4
        )
