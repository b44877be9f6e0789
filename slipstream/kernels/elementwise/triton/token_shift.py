"""The neighbour of each token in its sequence: one read and one write.

    y_t = x_{t-1}    y_first = edge    end = x_last         of an empty sequence  end = edge
    BACK, its gradient:
    y_t = x_{t+1}    y_last = edge     end = x_first

R tokens of D features in N sequences. Packed, a token's sequence is looked for among the offsets.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import launch_cache


@triton.jit
def _sequence(cu_ptr, row, N, steps):
    """The last one that begins at or before a token."""
    # of empty sequences that begin there the last, which is the one with tokens
    low = tl.zeros_like(row)
    high = low + (N - 1)
    for _ in range(steps):
        middle = (low + high + 1) // 2
        before = tl.load(cu_ptr + middle).to(tl.int64) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["T", "N", "R", "blocks", "steps"])
def token_shift_kernel(
    x_ptr, edge_ptr, cu_ptr, y_ptr, end_ptr, stride_b, stride_t, T, N, R, blocks, steps,
    D, BT: tl.constexpr, BD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks + N / BT, D / BD): blocks of BT tokens, then of BT sequences."""
    o_d = (tl.program_id(1) * BD + tl.arange(0, BD))[None, :]
    i = tl.program_id(0)
    if i < blocks:
        row = i.to(tl.int64) * BT + tl.arange(0, BT)
        b, t, begin, end = row // T, row % T, tl.zeros_like(row), tl.zeros_like(row) + T
        n = b
        if cu_ptr is not None:
            n = _sequence(cu_ptr, row, N, steps)
            begin = tl.load(cu_ptr + n).to(tl.int64)
            end = tl.load(cu_ptr + n + 1).to(tl.int64)
        # the neighbour, if it is in the same sequence; else the edge
        t_from = t + 1 if BACK else t - 1
        inside = t_from < tl.minimum(end, T) if BACK else t_from >= tl.maximum(begin, 0)
        live = (row < R)[:, None] & (o_d < D)
        p_y = y_ptr + row[:, None] * D + o_d
    else:
        # `end` of BT sequences: what their last tokens hand on
        n = (i - blocks).to(tl.int64) * BT + tl.arange(0, BT)
        begin, end = tl.zeros_like(n), tl.zeros_like(n) + T
        b = n
        if cu_ptr is not None:
            b = tl.zeros_like(n)
            begin = tl.load(cu_ptr + n, mask=n < N, other=0).to(tl.int64)
            end = tl.load(cu_ptr + n + 1, mask=n < N, other=0).to(tl.int64)
        t_from = begin if BACK else end - 1
        inside = (end > begin) & (t_from >= 0) & (t_from < T)
        live = (n < N)[:, None] & (o_d < D)
        p_y = end_ptr + n[:, None] * D + o_d
    # tokens of both kinds of block are read the same way; masked ones are not read at all, so that
    # t_from may lie outside
    p_x = x_ptr + b[:, None] * stride_b + t_from[:, None] * stride_t + o_d
    b_y = tl.load(p_x, mask=live & inside[:, None], other=0.0)
    if edge_ptr is not None:
        p_edge = edge_ptr + n[:, None] * D + o_d
        b_edge = tl.load(p_edge, mask=live & ~inside[:, None], other=0.0)
        b_y = tl.where(inside[:, None], b_y, b_edge)
    tl.store(p_y, b_y, mask=live)


def shift(
    x: Tensor, edge: Tensor | None, cu_seqlens: Tensor | None, back: bool
) -> tuple[Tensor, Tensor]:
    """x [B, T, D], edge [N, D] of x's dtype -> y [B, T, D], end [N, D]."""
    B, T, D = x.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    x = x if x.stride(-1) == 1 else x.contiguous()
    edge = None if edge is None else edge.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    end = torch.empty(N, D, dtype=x.dtype, device=x.device)
    # whatever D is: models differ in it, and layers of one model
    BT, BD = 16, 256
    blocks = -(-B * T // BT)
    launch_cache.cached(token_shift_kernel)[(blocks + -(-N // BT), -(-D // BD))](
        x_ptr=x,
        edge_ptr=edge,
        cu_ptr=cu_seqlens,
        y_ptr=y,
        end_ptr=end,
        stride_b=x.stride(0),
        stride_t=x.stride(1),
        T=T,
        N=N,
        R=B * T,
        blocks=blocks,
        steps=N.bit_length(),
        D=D,
        BT=BT,
        BD=BD,
        BACK=back,
        num_warps=4,
    )
    return y, end
