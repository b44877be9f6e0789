"""A kernel that adds up the gates of both halves of a chunk."""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.vector_decay.subchunk_decay import half_sums


@triton.jit
def half_sums_kernel(g_ptr, early_ptr, late_ptr, C: tl.constexpr, K: tl.constexpr):
    o_k = tl.arange(0, K)
    b_g = tl.load(g_ptr + tl.arange(0, C)[:, None] * K + o_k[None, :])
    b_early, b_late = half_sums(b_g, C)
    tl.store(early_ptr + o_k, b_early)
    tl.store(late_ptr + o_k, b_late)
