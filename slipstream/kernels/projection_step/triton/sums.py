"""The sum of a product's shares of K, with the residual and the next norm."""

import triton
import triton.language as tl

from slipstream.kernels.primitives.begin_ahead import wait_for_earlier


@triton.jit(do_not_specialize=["M"])
def projection_sums_kernel(
    partial_ptr,  # [S, M, N]
    residual_ptr,  # [M, N]
    norm_weight_ptr,  # [N]
    h_ptr,  # [M, N]
    y_ptr,  # [M, N]
    eps,
    M: tl.int32,
    row_residual,
    N: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """grid (M)"""
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    o = tl.arange(0, BN)
    m = o < N
    b_r = tl.load(residual_ptr + row * row_residual + o, mask=m, other=0.0).to(tl.float32)
    b_g = tl.load(norm_weight_ptr + o, mask=m, other=0.0).to(tl.float32)
    # all on their way at once, and added up in one order: no bit depends on which was first
    o_s = tl.arange(0, BS)
    p = partial_ptr + (o_s[:, None] * M + row) * N + o[None, :]
    acc = tl.sum(tl.load(p, mask=(o_s < S)[:, None] & m[None, :], other=0.0), 0)
    # rounded as a linear layer's result is, and its sum with the residual as the norm reads it
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    b_h = (acc.to(dtype).to(tl.float32) + b_r).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + row * N + o, b_h, mask=m)
    b_z = b_h.to(dtype).to(tl.float32)
    b_z *= tl.rsqrt(tl.sum(b_z * b_z, 0) / N + eps)
    b_y = b_z * (1.0 + b_g if ZERO_CENTERED else b_g)
    tl.store(y_ptr + row * N + o, b_y.to(dtype), mask=m)
