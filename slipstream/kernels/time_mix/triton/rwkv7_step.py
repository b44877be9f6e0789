"""RWKV-7's decoding step in one launch; ../rwkv7_step.py has the formulas.

A program has one head of one sequence, and BV columns of its state at a time in registers, from
their one read to their one write: all of them at once up to K = 128. With e = exp(w), both sums
over rows are of the state as it was read, so that none waits for the other:

    read, s = -S^T kk, S^T (e r)
    o = s + (r . kk a) read + (r . k) v
    S <- e S + (kk a) read^T + k v^T

Strides tell a state K-first from one V-first.

The second matrices of low-rank layers in one launch: a program has the rows of up to 16 sequences,
BD channels and one of the matrices, so that a single sequence reads them by as many programs as
there are tiles of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.time_mix.inputs import (
    EPS,
    SLOWEST_LOG_DECAY,
    TOKENS,
    LowRankInputs,
    StepInputs,
)
from slipstream.runtime import backends, launch_cache, token_ids

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
    """As ../rwkv7_step.py's."""
    N, D, count = t.w.shape[0], t.w_up.shape[1], 3 if t.v is None else 4
    if N > backends.GRID_ROWS * BN:
        batches = backends.row_parts(N, t.w, t.a, t.g, t.v)
        return torch.cat([low_rank(t._replace(w=w, a=a, g=g, v=v)) for w, a, g, v in batches], 1)
    y = torch.empty(count, N, D, dtype=torch.float32, device=t.w.device)
    tile = BD[t.w.element_size()]
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


# numbers of a state in registers, of a program and of a warp
ELEMENTS, ELEMENTS_PER_WARP = 16384, 1024


@triton.jit
def _load(p, o, m):
    """0 where there is no tensor."""
    b_x = tl.zeros(o.shape, tl.float32)
    if p is not None:
        b_x = tl.load(p + o, mask=m, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _columns(p, j, m_k, stride_v: tl.constexpr, K: tl.constexpr, BV: tl.constexpr):
    """Tile j of a state's columns, as it is in memory."""
    o_c = j * BV + tl.arange(0, BV)
    return tl.load(p + o_c[None, :] * stride_v, mask=m_k[:, None] & (o_c < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["slots"])
def rwkv7_step_kernel(
    r_ptr, w_ptr, k_ptr, v_ptr, a_ptr, g_ptr, v_gate_ptr, first_value_ptr,
    w_bias_ptr, a_bias_ptr, v_bias_ptr, k_k_ptr, k_a_ptr, r_k_ptr, norm_weight_ptr, norm_bias_ptr,
    index_ptr, state_ptr, y_ptr,
    row_r, row_w, row_k, row_v, row_a, row_g, row_v_gate, row_first_value, row_y,
    slots, stride_slot, stride_head, slowest, unit_eps, eps,
    H: tl.constexpr, K: tl.constexpr, stride_k: tl.constexpr, stride_v: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (N H,). Tokens [N, H K], parameters [H K], index [N], state [slots, H, K, K]."""
    NV: tl.constexpr = BK // BV
    h, n = tl.program_id(0) % H, (tl.program_id(0) // H).to(tl.int64)
    slot = n
    if index_ptr is not None:
        slot = tl.load(index_ptr + n).to(tl.int64)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    # channels as columns of the state, a tile of columns in a row
    o_v = tl.arange(0, NV)[:, None] * BV + tl.arange(0, BV)[None, :]
    m_v = o_v < K
    c_k, c_v = h * K + o_k, h * K + o_v
    p_y = y_ptr + n * row_y + c_v
    if (slot < 0) | (slot >= slots):
        tl.store(p_y, tl.zeros([NV, BV], y_ptr.dtype.element_ty), mask=m_v)
        return
    p_s = state_ptr + slot * stride_slot + h.to(tl.int64) * stride_head + o_k[:, None] * stride_k
    # asked for first: it is on its way while the vectors are made, whose sums pass barriers
    b_next = _columns(p_s, 0, m_k, stride_v, K, BV)
    b_r, b_k = _load(r_ptr + n * row_r, c_k, m_k), _load(k_ptr + n * row_k, c_k, m_k)
    b_w = _load(w_ptr + n * row_w, c_k, m_k) + _load(w_bias_ptr, c_k, m_k)
    b_a = tl.sigmoid(_load(a_ptr + n * row_a, c_k, m_k) + _load(a_bias_ptr, c_k, m_k))
    b_v, b_gate = _load(v_ptr + n * row_v, c_v, m_v), _load(g_ptr + n * row_g, c_v, m_v)
    if v_gate_ptr is not None:
        b_m = _load(v_gate_ptr + n * row_v_gate, c_v, m_v) + _load(v_bias_ptr, c_v, m_v)
        b_first = _load(first_value_ptr + n * row_first_value, c_v, m_v)
        b_v += (b_first - b_v) * tl.sigmoid(b_m)
    b_unit = b_k * _load(k_k_ptr, c_k, m_k)
    b_unit *= tl.rsqrt(tl.sum(b_unit * b_unit, 0) + unit_eps)
    b_k *= 1 + (b_a - 1) * _load(k_a_ptr, c_k, m_k)
    b_e, b_b = tl.exp(slowest * tl.sigmoid(b_w)), b_unit * b_a
    b_er, with_b, with_k = b_e * b_r, tl.sum(b_r * b_b, 0), tl.sum(b_r * b_k, 0)
    b_bonus = tl.sum(b_r * b_k * _load(r_k_ptr, c_k, m_k), 0)
    b_o = tl.zeros([NV, BV], tl.float32)
    for j in range(NV):
        b_s = b_next.to(tl.float32)
        if NV > 1:
            b_next = _columns(p_s, j + 1, m_k, stride_v, K, BV)
        # of the tile's columns, from among all of them
        b_x = tl.sum(tl.where(tl.arange(0, NV)[:, None] == j, b_v, 0.0), 0)
        b_read, b_c = tl.reduce((b_unit[:, None] * b_s, b_er[:, None] * b_s), 0, _add2)
        b_c += with_k * b_x - with_b * b_read
        b_s = b_e[:, None] * b_s - b_b[:, None] * b_read[None, :] + b_k[:, None] * b_x[None, :]
        o_c = j * BV + tl.arange(0, BV)
        m_s = m_k[:, None] & (o_c < K)[None, :]
        tl.store(p_s + o_c[None, :] * stride_v, b_s.to(state_ptr.dtype.element_ty), mask=m_s)
        b_o = tl.where(tl.arange(0, NV)[:, None] == j, b_c[None, :], b_o)
    # channels past K hold 0, which less the mean would count in the variance
    b_o = tl.where(m_v, b_o - tl.sum(tl.sum(b_o, 1), 0) / K, 0.0)
    b_o *= tl.rsqrt(tl.sum(tl.sum(b_o * b_o, 1), 0) / K + eps)
    b_y = b_o * _load(norm_weight_ptr, c_v, m_v) + _load(norm_bias_ptr, c_v, m_v) + b_bonus * b_v
    tl.store(p_y, (b_y * b_gate).to(y_ptr.dtype.element_ty), mask=m_v)


def tile_of(K: int) -> tuple[int, int, int]:
    """BK, BV and warps: widths alone decide, so a sequence's result is the same in every batch."""
    BK = max(16, triton.next_power_of_2(K))
    BV = min(BK, max(16, ELEMENTS // BK))
    return BK, BV, max(1, min(16, BK * BV // ELEMENTS_PER_WARP))


def step(
    out: Tensor, state: Tensor, indices: Tensor | None, t: StepInputs, eps: float, v_first: bool
) -> None:
    """As ../rwkv7_step.py's."""
    if indices is not None:
        token_ids.expect_unique("state_indices", indices, "slot")
    state = state.mT if v_first else state
    H, K = t.r_k.shape
    BK, BV, warps = tile_of(K)
    y = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    tensors = {
        name: x if x is None or (name in TOKENS and x.stride(1) == 1) else x.contiguous()
        for name, x in t._asdict().items()
    }
    rows = {f"row_{name}": 0 if (x := tensors[name]) is None else x.stride(0) for name in TOKENS}
    launch_cache.cached(rwkv7_step_kernel)[t.r.shape[0] * H,](
        **{f"{name}_ptr": x for name, x in tensors.items()},
        **rows,
        index_ptr=None if indices is None else indices.contiguous(),
        state_ptr=state,
        y_ptr=y,
        row_y=y.stride(0),
        slots=state.shape[0],
        stride_slot=state.stride(0),
        stride_head=state.stride(1),
        slowest=SLOWEST_LOG_DECAY,
        unit_eps=EPS,
        eps=eps,
        H=H,
        K=K,
        stride_k=state.stride(2),
        stride_v=state.stride(3),
        BK=BK,
        BV=BV,
        num_warps=warps,
    )
    if y is not out:
        out.copy_(y)
