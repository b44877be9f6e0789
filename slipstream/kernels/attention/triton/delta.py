"""Two numbers of each query that the kernels of the backward read.

base_t = log2(e) lse_t      delta_t = o_t . do_t - dlse_t
"""

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention.triton.scores import LOG2E, rows_of_sequence, sequence_of_tile
from slipstream.runtime.launch_cache import cached

ROWS = 32  # queries of a program, where sequences are not packed


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
    T,
    H,
    N,
    R,
    tiles,
    search_steps,
    DV: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    PACKED: tl.constexpr,
):
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
    tiles = -(-o.shape[1] // ROWS)
    launch_delta_of_tiles(o, do, lse, dlse, base, delta, None, tiles, ROWS)


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
