"""Converts the sums of dq that bwd_fused.py has made to q's dtype, in its tiles of queries.

dq_t = scale sum_s dx_ts k_s
"""

import triton
import triton.language as tl

from slipstream.kernels.attention.triton.delta import locate_tile


@triton.jit(do_not_specialize=["scale", "T", "H", "N", "tiles", "search_steps", "table_rows"])
def softmax_dq_of_sums_kernel(
    sums_ptr,  # [B * H * tiles * BM, D], float32
    semaphores_ptr,  # [B * H * tiles], how many tiles of keys have added
    dq_ptr,  # [B, T, H, D]
    cu_q_ptr,  # [N + 1]
    scale,
    T,
    H,
    N,
    tiles,
    search_steps,
    D: tl.constexpr,
    BM: tl.constexpr,
    PACKED: tl.constexpr,
    cos_ptr=None,  # [B or 1, T, D / 2], float32: queries were turned, and dq is of those before
    sin_ptr=None,
    table_rows=None,  # T, or 0 for tables of one batch row
    PITCH: tl.constexpr = None,  # with tables dq is the first heads of [B, T, PITCH, D]
):
    """grid (tiles * H * B,)."""
    i_h, i_b, begin, queries, row = locate_tile(cu_q_ptr, T, H, N, tiles, search_steps, BM, PACKED)
    pid = tl.program_id(0).to(tl.int64)
    o_m = tl.arange(0, BM)
    if cos_ptr is None:
        o_d = tl.arange(0, D)
        m_m = (row + o_m < queries)[:, None] & (o_d >= 0)[None, :]
        # a tile of queries that sees no key was never written
        some = tl.load(semaphores_ptr + pid) > 0
        p_sums = sums_ptr + pid * BM * D + o_m[:, None] * D + o_d[None, :]
        b_dq = tl.load(p_sums, mask=m_m & some, other=0.0) * scale
        p_dq = dq_ptr + ((i_b * T + begin + row + o_m[:, None]) * H + i_h) * D + o_d[None, :]
        tl.store(p_dq, b_dq.to(dq_ptr.dtype.element_ty), mask=m_m)
    else:
        o_d = tl.arange(0, D // 2)
        m_m = (row + o_m < queries)[:, None] & (o_d >= 0)[None, :]
        some = tl.load(semaphores_ptr + pid) > 0
        p_sums = sums_ptr + pid * BM * D + o_m[:, None] * D + o_d[None, :]
        b_1 = tl.load(p_sums, mask=m_m & some, other=0.0) * scale
        b_2 = tl.load(p_sums + D // 2, mask=m_m & some, other=0.0) * scale
        token = begin + row + o_m[:, None]
        at = (i_b * table_rows + token) * (D // 2) + o_d[None, :]
        b_cos = tl.load(cos_ptr + at, mask=m_m, other=0.0)
        b_sin = tl.load(sin_ptr + at, mask=m_m, other=0.0)
        p_dq = dq_ptr + ((i_b * T + token) * PITCH + i_h) * D + o_d[None, :]
        element = dq_ptr.dtype.element_ty
        tl.store(p_dq, (b_1 * b_cos + b_2 * b_sin).to(element), mask=m_m)
        tl.store(p_dq + D // 2, (b_2 * b_cos - b_1 * b_sin).to(element), mask=m_m)
