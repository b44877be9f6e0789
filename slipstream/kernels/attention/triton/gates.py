"""Sums of the forgetting gates before attention, and of their gradient after it.

    G_t = g_1 + ... + g_t          a query at t sees key s with G_t - G_s beside its score
    dg_s = sum over t >= s of (sum_s' dx_ts' - sum_t' dx_t't)

Both sums run in float64. G is split in two float32, so that the difference of two of them is as
good as the sum of the gates between them. In dg what is before s is left of the difference: dx
of a query and a key both behind s are in both sums.
"""

import triton
import triton.language as tl

from slipstream.kernels.attention.inputs import MIN_GATE
from slipstream.kernels.attention.triton.scores import LOG2E, rows_of_sequence

LOWEST = tl.constexpr(MIN_GATE)


@triton.jit(do_not_specialize=["S", "H", "stride_b", "stride_t", "stride_h"])
def softmax_gate_sums_kernel(
    g_ptr,  # [KB, S, H] by strides
    high_ptr,  # [KB, H, S]: G in base 2
    low_ptr,  # [KB, H, S]
    cu_ptr,  # [N + 1]
    S,
    H,
    stride_b,
    stride_t,
    stride_h,
    C: tl.constexpr,
    PACKED: tl.constexpr,
):
    """grid (H * N,)"""
    pid = tl.program_id(0)
    i_h = pid % H
    i_b, begin, rows, _ = rows_of_sequence(pid // H, cu_ptr, cu_ptr, S, PACKED, False)
    g_ptr += i_b * stride_b + begin * stride_t + i_h.to(tl.int64) * stride_h
    o_c = tl.arange(0, C)
    to = (i_b * H + i_h) * S + begin
    carry = tl.zeros((1,), tl.float64)
    for i in range(tl.cdiv(rows, C)):
        at = begin * 0 + i * C + o_c  # int64
        mask = at < rows
        p_g = g_ptr + at * stride_t
        b_g = tl.load(p_g, mask=mask, other=0.0).to(tl.float32)
        b_g = tl.where(b_g < LOWEST, LOWEST, b_g).to(tl.float64) * LOG2E
        b_G = tl.cumsum(b_g, 0) + carry
        carry += tl.sum(b_g, 0)
        # G as two float32: differences of two of them keep the precision of float64 sums
        b_high = b_G.to(tl.float32)
        b_low = (b_G - b_high.to(tl.float64)).to(tl.float32)
        tl.store(high_ptr + to + at, b_high, mask=mask)
        tl.store(low_ptr + to + at, b_low, mask=mask)


@triton.jit(do_not_specialize=["T", "S", "H"])
def softmax_gate_grad_kernel(
    rows_ptr,  # [B, H, T]
    columns_ptr,  # [KB, H, S]
    dg_ptr,  # [KB, S, H]
    cu_q_ptr,  # [N + 1]
    cu_k_ptr,  # [N + 1]
    lengths_ptr,  # [N]
    T,
    S,
    H,
    C: tl.constexpr,
    PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """grid (H * N,)"""
    pid = tl.program_id(0)
    i_n, i_h = pid // H, pid % H
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, lengths_ptr, T, PACKED_Q, False)
    i_kb, begin_k, capacity, keys = rows_of_sequence(
        i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS
    )
    o_c = tl.arange(0, C)
    i_row = (i_b * H + i_h) * T + begin
    i_column = (i_kb * H + i_h) * S + begin_k
    dg_ptr += (i_kb * S + begin_k) * H + i_h
    carry = tl.zeros((1,), tl.float64)
    chunks = tl.cdiv(capacity, C)
    for i in range(chunks):
        at = (chunks - 1 - i) * C + o_c
        # the query that stands on each key
        query = at - (keys - queries)
        m_row = (query >= 0) & (at < keys)
        b_x = tl.load(rows_ptr + i_row + query, mask=m_row, other=0.0).to(tl.float64)
        b_x -= tl.load(columns_ptr + i_column + at, mask=at < keys, other=0.0).to(tl.float64)
        b_dg = tl.where(at < keys, tl.cumsum(b_x, 0, reverse=True) + carry, 0.0)
        carry += tl.sum(b_x, 0)
        p_dg = dg_ptr + at.to(tl.int64) * H
        tl.store(p_dg, b_dg.to(dg_ptr.dtype.element_ty), mask=at < capacity)
