"""What goes before and after the kernels of attention: sums by rows, tiles and tokens.

Before the backward    base_t = log2(e) lse_t      delta_t = o_t . do_t - dlse_t
After sm90/bwd_fused   dq_t = scale sum_s dx_ts k_s, its sums converted to q's dtype
Forgetting gates       G_t = g_1 + ... + g_t       a query at t sees key s with G_t - G_s beside its
                                                   score
and their gradient     dg_s = sum over t >= s of (sum_s' dx_ts' - sum_t' dx_t't)

Both sums of gates run in float64. G is split in two float32, so that the difference of two of them
is as good as the sum of the gates between them. In dg what is before s is left of the difference:
dx of a query and a key both behind s are in both sums.
"""

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention.inputs import MIN_GATE
from slipstream.kernels.attention.triton.scores import rows_of_sequence, sequence_of_tile
from slipstream.kernels.primitives.device import LOG2E
from slipstream.runtime.launch_cache import cached


@triton.jit
def locate_tile(cu_q_ptr, T, H, N, tiles, search_steps, BM: tl.constexpr, PACKED: tl.constexpr):
    """Head, batch row, first row and length of the sequence, and the tile's row in it."""
    pid = tl.program_id(0).to(tl.int64)
    i_n, row = sequence_of_tile(
        (pid % tiles).to(tl.int32), pid // tiles // H, cu_q_ptr, N, search_steps, BM, PACKED
    )
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, cu_q_ptr, T, PACKED, False)
    return pid // tiles % H, i_b, begin, queries, row


@triton.jit(do_not_specialize=["T", "H", "N", "R", "tiles", "search_steps"])
def softmax_delta_kernel(
    o_ptr,  # [B, T, H, DV]
    do_ptr,  # [B, T, H, DV]
    lse_ptr,  # [B, H, T]
    dlse_ptr,  # [B, H, T], or None
    base_ptr,  # [B, H, R]: inf for -inf and for no query, under which every p is 0
    delta_ptr,  # [B, H, R]
    cu_q_ptr,  # [N + 1]
    T, H, N, R, tiles, search_steps,
    DV: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """grid (tiles * H * B,). PACKED: each sequence begins at a new tile, and R is tiles BM."""
    i_h, i_b, begin, queries, row = locate_tile(cu_q_ptr, T, H, N, tiles, search_steps, BM, PACKED)
    o_m = tl.arange(0, BM)
    o_v = tl.arange(0, BV)
    m_m = row + o_m < queries
    at = ((i_b * T + begin + row + o_m) * H + i_h)[:, None] * DV + o_v[None, :]
    mask = m_m[:, None] & (o_v < DV)[None, :]
    b_o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b_do = tl.load(do_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b_delta = tl.sum(b_o * b_do, 1)
    at = (i_b * H + i_h) * T + begin + row + o_m
    if dlse_ptr is not None:
        b_delta -= tl.load(dlse_ptr + at, mask=m_m, other=0.0)
    b_lse = tl.load(lse_ptr + at, mask=m_m, other=float("-inf")) * LOG2E
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
    to = (tl.program_id(0) % tiles) * BM + o_m
    o_r = (i_b * H + i_h) * R + to
    tl.store(base_ptr + o_r, b_lse, mask=to < R)
    tl.store(delta_ptr + o_r, b_delta, mask=to < R)


def launch_delta(
    o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, base: Tensor, delta: Tensor
) -> None:
    """Writes base and delta [B, H, R], float32, R >= T: the first T of each head."""
    rows = 32  # queries of a program
    launch_delta_of_tiles(o, do, lse, dlse, base, delta, None, -(-o.shape[1] // rows), rows)


def launch_delta_of_tiles(
    o: Tensor,
    do: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    base: Tensor,
    delta: Tensor,
    cu_q: Tensor | None,
    tiles: int,
    BM: int,
) -> None:
    """Writes base and delta [B, H, tiles * BM]; with cu_q each sequence begins at a new tile."""
    B, T, H, DV = o.shape
    N = B if cu_q is None else cu_q.shape[0] - 1
    cached(softmax_delta_kernel)[(tiles * H * B,)](
        o_ptr=o.contiguous(),
        do_ptr=do,
        lse_ptr=lse,
        dlse_ptr=dlse,
        base_ptr=base,
        delta_ptr=delta,
        cu_q_ptr=cu_q,
        T=T,
        H=H,
        N=N,
        R=base.shape[2],
        tiles=tiles,
        search_steps=(N - 1).bit_length(),
        DV=DV,
        BV=max(16, 1 << (DV - 1).bit_length()),
        BM=BM,
        PACKED=cu_q is not None,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["scale", "T", "H", "N", "tiles", "search_steps", "table_rows"])
def softmax_dq_of_sums_kernel(
    sums_ptr,  # [B * H * tiles * BM, D], float32
    semaphores_ptr,  # [B * H * tiles], how many tiles of keys have added
    dq_ptr,  # [B, T, H, D]
    cu_q_ptr,  # [N + 1]
    scale, T, H, N, tiles, search_steps,
    D: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr,
    cos_ptr=None,  # [B or 1, T, D / 2], float32: queries were turned, and dq is of those before
    sin_ptr=None,
    table_rows=None,  # T, or 0 for tables of one batch row
    PITCH: tl.constexpr = None,  # with tables dq is the first heads of [B, T, PITCH, D]
):  # fmt: skip
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


LOWEST = tl.constexpr(MIN_GATE)


@triton.jit(do_not_specialize=["S", "H", "stride_b", "stride_t", "stride_h"])
def softmax_gate_sums_kernel(
    g_ptr,  # [KB, S, H] by strides
    high_ptr,  # [KB, H, S]: G in base 2
    low_ptr,  # [KB, H, S]
    cu_ptr,  # [N + 1]
    S, H, stride_b, stride_t, stride_h,
    C: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
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
    T, S, H,
    C: tl.constexpr, PACKED_Q: tl.constexpr, PACKED_K: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
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
