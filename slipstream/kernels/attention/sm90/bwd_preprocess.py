"""Kernels before and after bwd_fused.py, in its tiles of queries.

    base_t = log2(e) lse_t      delta_t = o_t . do_t - dlse_t      dq_t = scale sum_s dx_ts k_s

Packed sequences begin at a tile of their own: TMA reads a tile's numbers at multiples of 16 bytes.
"""

import triton
import triton.language as tl

from slipstream.kernels.attention.triton.scores import LOG2E, rows_of_sequence, sequence_of_tile


@triton.jit
def _locate_tile(cu_q_ptr, T, H, N, tiles, search_steps, BM: tl.constexpr, PACKED: tl.constexpr):
    """Head, batch row, first row and length of the sequence, and the tile's row in it."""
    pid = tl.program_id(0).to(tl.int64)
    i_n, row = sequence_of_tile(
        (pid % tiles).to(tl.int32), pid // tiles // H, cu_q_ptr, N, search_steps, BM, PACKED
    )
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, cu_q_ptr, T, PACKED, False)
    return pid // tiles % H, i_b, begin, queries, row


@triton.jit(do_not_specialize=["T", "H", "N", "tiles", "search_steps"])
def softmax_rows_of_tiles_kernel(
    o_ptr,  # [B, T, H, D]
    do_ptr,  # [B, T, H, D]
    lse_ptr,  # [B, H, T]
    dlse_ptr,  # [B, H, T]
    base_ptr,  # [B * H * tiles * BM]: inf for -inf and for no query, under which every p is 0
    delta_ptr,  # [B * H * tiles * BM]
    cu_q_ptr,  # [N + 1]
    T,
    H,
    N,
    tiles,
    search_steps,
    D: tl.constexpr,
    BM: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """grid (tiles * H * B,)."""
    i_h, i_b, begin, queries, row = _locate_tile(cu_q_ptr, T, H, N, tiles, search_steps, BM, PACKED)
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, D)
    m_m = row + o_m < queries
    at = ((i_b * T + begin + row + o_m) * H + i_h)[:, None] * D + o_d[None, :]
    mask = m_m[:, None] & (o_d >= 0)[None, :]
    b_o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b_do = tl.load(do_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b_delta = tl.sum(b_o * b_do, 1)
    at = (i_b * H + i_h) * T + begin + row + o_m
    if HAS_DLSE:
        b_delta -= tl.load(dlse_ptr + at, mask=m_m, other=0.0)
    b_lse = tl.load(lse_ptr + at, mask=m_m, other=float("-inf")) * LOG2E
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
    to = tl.program_id(0).to(tl.int64) * BM + o_m
    tl.store(base_ptr + to, b_lse)
    tl.store(delta_ptr + to, b_delta)


@triton.jit(do_not_specialize=["scale", "T", "H", "N", "tiles", "search_steps"])
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
):
    """grid (tiles * H * B,)."""
    i_h, i_b, begin, queries, row = _locate_tile(cu_q_ptr, T, H, N, tiles, search_steps, BM, PACKED)
    pid = tl.program_id(0).to(tl.int64)
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, D)
    m_m = (row + o_m < queries)[:, None] & (o_d >= 0)[None, :]
    # a tile of queries that sees no key was never written
    some = tl.load(semaphores_ptr + pid) > 0
    p_sums = sums_ptr + pid * BM * D + o_m[:, None] * D + o_d[None, :]
    b_dq = tl.load(p_sums, mask=m_m & some, other=0.0) * scale
    p_dq = dq_ptr + ((i_b * T + begin + row + o_m[:, None]) * H + i_h) * D + o_d[None, :]
    tl.store(p_dq, b_dq.to(dq_ptr.dtype.element_ty), mask=m_m)
