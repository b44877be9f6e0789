"""dq from backward_fused.py's sums: dq_t = scale sum_s dx_ts k_s, in q's dtype, row by row."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["scale", "T", "H", "tiles"])
def softmax_dq_of_sums_kernel(
    sums_ptr,  # [B, H, tiles * BM, D], float32
    dq_ptr,  # [B, T, H, D]
    scale,
    T,
    H,
    tiles,
    D: tl.constexpr,
    BM: tl.constexpr,
):
    """grid (tiles * H * B,)."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid % tiles * BM
    i_h = pid // tiles % H
    i_b = pid // tiles // H
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, D)
    b_dq = tl.load(sums_ptr + pid * BM * D + o_m[:, None] * D + o_d[None, :]) * scale
    p_dq = dq_ptr + ((i_b * T + row + o_m[:, None]) * H + i_h) * D + o_d[None, :]
    tl.store(
        p_dq, b_dq.to(dq_ptr.dtype.element_ty), mask=(row + o_m < T)[:, None] & (o_d >= 0)[None, :]
    )
