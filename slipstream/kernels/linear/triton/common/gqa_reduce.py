"""Sums over the value heads that share one head of q and k.

The gradients of q and k are made for each value head by programs of their own; added up, in float32
and in one order, they are those of the head that was shared. Memory is read once: torch's own sum
over so few elements takes twice the time.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.linear.workspace import reuse_or_empty
from slipstream.runtime.launch_cache import cached

ROWS = 16  # of the sum, a program


@triton.jit(do_not_specialize=["R", "group"])
def reduce_grouped_heads_kernel(
    x_ptr,  # [R, group, K]
    y_ptr,  # [R, K]
    R,
    group,
    K: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """grid (ceil(R / BR),)."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    m = (o_r < R)[:, None] & (o_k < K)[None, :]
    b_y = tl.zeros((BR, BK), tl.float32)
    p = x_ptr + o_r[:, None] * (group * K) + o_k[None, :]
    for i in range(group):
        b_y += tl.load(p + i * K, mask=m, other=0.0).to(tl.float32)
    tl.store(y_ptr + o_r[:, None] * K + o_k[None, :], b_y.to(y_ptr.dtype.element_ty), mask=m)


def reduce_grouped_heads(x: Tensor, H: int, out: Tensor | None = None) -> Tensor:
    """x [B, T, HV, K], contiguous, to [B, T, H, K]; on the current device.

    Args:
        out: memory for it, which is taken if it fits.
    """
    B, T, HV, K = x.shape
    if HV == H:
        return x
    y = reuse_or_empty(out, (B, T, H, K), x.dtype, x.device)
    rows = B * T * H
    launch: Any = cached(reduce_grouped_heads_kernel)[(-(-rows // ROWS),)]
    launch(x, y, rows, HV // H, K=K, BR=ROWS, BK=triton.next_power_of_2(K), num_warps=4)
    return y
