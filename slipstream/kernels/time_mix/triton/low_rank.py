"""The second matrices of low-rank layers in one launch; ../low_rank.py has the formulas.

A program has the rows of up to 16 sequences, BD channels and one of the matrices, so that a single
sequence reads them by as many programs as there are tiles of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.time_mix.inputs import LowRankInputs
from slipstream.runtime import backends, launch_cache

# of rows always as many as the smallest product has, so that a row's bits are those of any batch
BN, BR = 16, 128
# channels of a program, by bytes of a number
BD = {2: 64, 4: 32}


@triton.jit
def _product(
    x_ptr, up_ptr, y_ptr, rank, N, D, BN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """f(x) up of the program's rows and channels."""
    o_n = tl.program_id(2) * BN + tl.arange(0, BN)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    # sums in float32, which stay so: the decays behind them are of the order of 1e-3
    acc = tl.zeros([BN, BD], tl.float32)
    for i in range(0, rank, BR):
        o_r = i + tl.arange(0, BR)
        m_x = (o_n < N)[:, None] & (o_r < rank)[None, :]
        b_x = tl.load(x_ptr + o_n[:, None] * rank + o_r[None, :], mask=m_x, other=0.0)
        m_up = (o_r < rank)[:, None] & (o_d < D)[None, :]
        b_up = tl.load(up_ptr + o_r[:, None] * D + o_d[None, :], mask=m_up, other=0.0)
        if F == "tanh":
            b_x = 2 * tl.sigmoid(2 * b_x.to(tl.float32)) - 1
        if F == "sigmoid":
            b_x = tl.sigmoid(b_x.to(tl.float32))
        # rows past the rank are 0 in the matrix, whatever f makes of them
        acc = tl.dot(b_x.to(b_up.dtype), b_up, acc, input_precision="ieee")
    o = o_n.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(y_ptr + o, acc, mask=(o_n < N)[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=["N"])
def low_rank_step_kernel(
    w_ptr, a_ptr, g_ptr, v_ptr, w_up_ptr, a_up_ptr, g_up_ptr, v_up_ptr, y_ptr,
    w_rank, a_rank, g_rank, v_rank, N, D,
    BN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (D / BD, 3 or 4, N / BN). w [N, rank], w_up [rank, D], y [3 or 4, N, D]."""
    # which of the matrices; each has a branch, since they are tensors apart
    i = tl.program_id(1)
    y_ptr += i.to(tl.int64) * N * D
    if i == 0:
        _product(w_ptr, w_up_ptr, y_ptr, w_rank, N, D, BN, BR, BD, "tanh")
    elif i == 1:
        _product(a_ptr, a_up_ptr, y_ptr, a_rank, N, D, BN, BR, BD, "")
    elif i == 2:
        _product(g_ptr, g_up_ptr, y_ptr, g_rank, N, D, BN, BR, BD, "sigmoid")
    elif v_ptr is not None:
        _product(v_ptr, v_up_ptr, y_ptr, v_rank, N, D, BN, BR, BD, "")


def low_rank(t: LowRankInputs) -> Tensor:
    """As ../low_rank.py's."""
    N, D, count = t.w.shape[0], t.w_up.shape[1], 3 if t.v is None else 4
    if N > backends.GRID_ROWS * BN:
        batches = backends.row_parts(N, t.w, t.a, t.g, t.v)
        return torch.cat([low_rank(t._replace(w=w, a=a, g=g, v=v)) for w, a, g, v in batches], 1)
    y = torch.empty(count, N, D, dtype=torch.float32, device=t.w.device)
    tile = BD[t.w.element_size()]
    with backends.device_of(t.w.device):
        launch_cache.cached(low_rank_step_kernel)[triton.cdiv(D, tile), count, triton.cdiv(N, BN)](
            **{f"{n}_ptr": x if x is None else x.contiguous() for n, x in t._asdict().items()},
            y_ptr=y,
            w_rank=t.w.shape[1],
            a_rank=t.a.shape[1],
            g_rank=t.g.shape[1],
            v_rank=0 if t.v is None else t.v.shape[1],
            N=N,
            D=D,
            BN=BN,
            BR=BR,
            BD=tile,
            num_warps=4,
        )
    return y
