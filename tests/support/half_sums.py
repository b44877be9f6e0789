"""Kernels that call parts of kernels: sums of gates, and what counts as a safe decay."""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.vector_decay import subchunk_decay
from slipstream.kernels.linear.triton.vector_decay.subchunk_decay import half_sums


@triton.jit
def half_sums_kernel(g_ptr, early_ptr, late_ptr, C: tl.constexpr, K: tl.constexpr):
    o_k = tl.arange(0, K)
    b_g = tl.load(g_ptr + tl.arange(0, C)[:, None] * K + o_k[None, :])
    b_early, b_late = half_sums(b_g, C)
    tl.store(early_ptr + o_k, b_early)
    tl.store(late_ptr + o_k, b_late)


@triton.jit
def safe_kernel(x_ptr, safe_ptr, BOUND: tl.constexpr):
    """Of values [5, 2] whether each of five decisions takes them as safe."""
    i, o = tl.program_id(0), tl.arange(0, 16)
    x = tl.load(x_ptr + i + o * 0)
    safe = subchunk_decay.is_read_safe(x, BOUND)
    tl.store(safe_ptr + i, tl.min(safe.to(tl.float32), 0))
    x = tl.load(x_ptr + 2 + i + o * 0)
    tl.store(safe_ptr + 2 + i, subchunk_decay.are_halves_safe(x, x * 0).to(tl.float32))
    x = tl.load(x_ptr + 4 + i + o * 0)
    tl.store(safe_ptr + 4 + i, subchunk_decay.are_quarters_safe(x[None, :]).to(tl.float32))
    x = tl.load(x_ptr + 6 + i + o * 0)
    safe = subchunk_decay._mild(tl.exp2(x), BOUND)
    tl.store(safe_ptr + 6 + i, tl.min(safe.to(tl.float32), 0))
    x = tl.load(x_ptr + 8 + i + o * 0)[:, None] + o[None, :] * 0.0
    tl.store(safe_ptr + 8 + i, (subchunk_decay.safe_base(x, 4, BOUND) == 4).to(tl.float32))


@triton.jit
def factors_kernel(g_ptr, ones_ptr, read_ptr, write_ptr, BOUND: tl.constexpr, SHIFT: tl.constexpr):
    """block_factors of gates [16, 16]."""
    o = tl.arange(0, 16)
    o = o[:, None] * 16 + o[None, :]
    b_g = tl.load(g_ptr + o)
    b_read, b_write, _, _ = subchunk_decay.block_factors(
        ones_ptr, (b_g, b_g, b_g), BOUND, SHIFT, False, 0, "ieee"
    )
    tl.store(read_ptr + o, b_read)
    tl.store(write_ptr + o, b_write)
