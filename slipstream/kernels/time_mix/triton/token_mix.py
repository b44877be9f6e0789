"""Mixes of each token with the one before, in one pass; ../token_mix.py has the formula.

    dx = sum_m dy_m (1 - mu_m)        dbefore = sum_m dy_m mu_m
    dmu_m = sum over tokens of dy_m (before - x)

R tokens of D channels. A program takes BD channels of so many tokens in a row, so that mu and its
gradient stay in registers; another kernel adds up the programs' sums, in an order that does not
change.

Without `before` it is the token before in a row of T, 0 at its start and where `starts` is not 0:
forward the last one read, and backward gives x's whole gradient, dx_t + dbefore_{t+1}, of which the
second part comes with the next token.

A decoding step mixes one token with the one before in a pool.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.primitives.device import add_partial_sums
from slipstream.runtime import backends, launch_cache, token_ids

# Channels of a program at most, and programs at a time on each multiprocessor.
CHANNELS = 1024
PER_PROCESSOR = 4


@triton.jit
def _mu(mu_ptr, o_d, m_d, D: tl.constexpr, M: tl.constexpr):
    mus = ()
    for m in tl.static_range(M):
        mus = mus + (tl.load(mu_ptr + m * D + o_d, mask=m_d, other=0.0).to(tl.float32),)
    return mus


@triton.jit
def _row(p, row, o_d, m, D: tl.constexpr):
    return tl.load(p + tl.cast(row, tl.int64) * D + o_d, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _begins(starts_ptr, row, R, T):
    """Whether nothing comes before a row; also behind the last."""
    t = row % T
    found = (t == 0) | (row >= R)
    if starts_ptr is not None:
        found = found | (tl.load(starts_ptr + t) != 0)
    return found


@triton.jit
def _rows_of_mixes(p, row, R, o_d, m_d, D: tl.constexpr, M: tl.constexpr):
    rows = ()
    for m in tl.static_range(M):
        rows = rows + (
            tl.load(p + (tl.cast(R, tl.int64) * m + row) * D + o_d, mask=m_d, other=0.0),
        )
    return rows


@triton.jit
def _of_before(dys, mus, BD: tl.constexpr, M: tl.constexpr):
    b_dbefore = tl.zeros([BD], tl.float32)
    for m in tl.static_range(M):
        b_dbefore += dys[m].to(tl.float32) * mus[m]
    return b_dbefore


@triton.jit(do_not_specialize=["R", "T", "rows_each"])
def token_mix_kernel(
    dy_ptr, x_ptr, before_ptr, starts_ptr, mu_ptr, y_ptr, dx_ptr, dbefore_ptr, partial_ptr,
    R, T, rows_each, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (P, D / BD). x, before [R, D], starts [T], mu [M, D]. y [M, R, D]; or of dy [M, R, D]
    dx, dbefore [R, D] and partial [P, M, D]."""
    BACK: tl.constexpr = dy_ptr is not None
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    mus = _mu(mu_ptr, o_d, m_d, D, M)
    sums = (tl.zeros([BD], tl.float32),) * M
    first = tl.program_id(0) * rows_each
    last = tl.minimum(first + rows_each, R)
    # of the token before: itself, and its gradient except for what this one adds
    b_last, b_waiting = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if before_ptr is None:
        # the row before is another program's: it is read again, for none waits for another
        b_last = _row(x_ptr, first - 1, o_d, m_d & ~_begins(starts_ptr, first, R, T), D)
    for row in range(first, last):
        b_x = _row(x_ptr, row, o_d, m_d, D)
        if BACK:
            dys = _rows_of_mixes(dy_ptr, row, R, o_d, m_d, D, M)
        if before_ptr is None:
            begins = _begins(starts_ptr, row, R, T)
            b_before = tl.where(begins, 0.0, b_last)
            b_last = b_x
        else:
            b_before = _row(before_ptr, row, o_d, m_d, D)
        b_delta = b_before - b_x
        if BACK:
            b_dbefore = _of_before(dys, mus, BD, M)
            b_dx = tl.zeros([BD], tl.float32)
            new = ()
            for m in tl.static_range(M):
                b_dy = dys[m].to(tl.float32)
                b_dx += b_dy * (1 - mus[m])
                # in registers over all rows of the program: dmu costs no reads
                new = new + (sums[m] + b_dy * b_delta,)
            sums = new
            o = tl.cast(row, tl.int64) * D + o_d
            # the gradient of the token before is complete; the first row's is another program's
            if before_ptr is None:
                b_done = b_waiting + tl.where(begins, 0.0, b_dbefore)
                p_dx = dx_ptr + o - D
                tl.store(p_dx, b_done.to(dx_ptr.dtype.element_ty), mask=m_d & (row > first))
                b_waiting = b_dx
            else:
                tl.store(dx_ptr + o, b_dx.to(dx_ptr.dtype.element_ty), mask=m_d)
                tl.store(dbefore_ptr + o, b_dbefore.to(dbefore_ptr.dtype.element_ty), mask=m_d)
        else:
            for m in tl.static_range(M):
                p_y = y_ptr + (tl.cast(R, tl.int64) * m + row) * D + o_d
                tl.store(p_y, (b_x + b_delta * mus[m]).to(y_ptr.dtype.element_ty), mask=m_d)
    if BACK:
        if before_ptr is None:
            # the token after the last is another program's, which does not give its part here
            m_after = m_d & ~_begins(starts_ptr, last, R, T)
            dys = _rows_of_mixes(dy_ptr, last, R, o_d, m_after, D, M)
            b_done = b_waiting + _of_before(dys, mus, BD, M)
            p_dx = dx_ptr + (tl.cast(last, tl.int64) - 1) * D + o_d
            tl.store(p_dx, b_done.to(dx_ptr.dtype.element_ty), mask=m_d & (last > first))
        for m in tl.static_range(M):
            p_partial = partial_ptr + (tl.program_id(0) * M + m) * D + o_d
            tl.store(p_partial, sums[m], mask=m_d)


def forward(x: Tensor, before: Tensor | None, starts: Tensor | None, mu: Tensor) -> Tensor:
    """[M, B, T, D]"""
    y = torch.empty(mu.shape[0], *x.shape, dtype=x.dtype, device=x.device)
    _run(x, before, starts, mu, y=y)
    return y


def backward(
    dy: Tensor, x: Tensor, before: Tensor | None, starts: Tensor | None, mu: Tensor
) -> list[Tensor]:
    """dx, dbefore if there is a `before`, dmu."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dbefore = None if before is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    P, _ = _sizes(x, mu)
    partial = torch.empty(P, *mu.shape, dtype=torch.float32, device=x.device)
    dmu = torch.empty(mu.shape, dtype=mu.dtype, device=x.device)
    _run(x, before, starts, mu, dy=dy.contiguous(), dx=dx, dbefore=dbefore, partial=partial)
    add_partial_sums(partial.view(P, 1, -1), [dmu])
    return [t for t in (dx, dbefore, dmu) if t is not None]


def _run(
    x: Tensor,
    before: Tensor | None,
    starts: Tensor | None,
    mu: Tensor,
    *,
    dy: Tensor | None = None,
    y: Tensor | None = None,
    dx: Tensor | None = None,
    dbefore: Tensor | None = None,
    partial: Tensor | None = None,
) -> None:
    P, sizes = _sizes(x, mu)
    launch_cache.cached(token_mix_kernel)[(P, -(-sizes["D"] // sizes["BD"]))](
        dy_ptr=dy,
        x_ptr=x.contiguous(),
        before_ptr=None if before is None else before.contiguous(),
        starts_ptr=starts,
        mu_ptr=mu.contiguous(),
        y_ptr=y,
        dx_ptr=dx,
        dbefore_ptr=dbefore,
        partial_ptr=partial,
        **sizes,
        num_warps=4,
    )


def _sizes(x: Tensor, mu: Tensor) -> tuple[int, dict[str, int]]:
    """Programs of a block of channels, and what the kernel is told."""
    M, D = mu.shape
    BD = min(max(1 << (D - 1).bit_length(), 128), CHANNELS)
    R = x.numel() // D
    P = max(backends.sm_count(x.get_device()) * PER_PROCESSOR // -(-D // BD), 1)
    rows_each = -(-R // min(P, R))
    sizes = {"R": R, "T": x.shape[1], "rows_each": rows_each, "D": D, "M": M, "BD": BD}
    return -(-R // rows_each), sizes


@triton.jit(do_not_specialize=["N", "slots"])
def token_mix_step_kernel(
    x_ptr, mu_ptr, state_ptr, index_ptr, y_ptr, N, slots, row_x, row_state,
    D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (N, D / BD). x [N, D], mu [M, D], state [slots, D], index [N], y [M, N, D]."""
    n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    slot = n
    if index_ptr is not None:
        slot = tl.load(index_ptr + n).to(tl.int64)
    live = (slot >= 0) & (slot < slots)
    p_s = state_ptr + slot * row_state + o_d
    # without a slot everything is 0
    x = tl.load(x_ptr + n * row_x + o_d, mask=m_d & live, other=0.0)
    b_before = tl.load(p_s, mask=m_d & live, other=0.0).to(tl.float32)
    b_x = x.to(tl.float32)
    b_delta = b_before - b_x
    # only this program has read these channels; of a pool wider than x another thread of it
    if state_ptr.dtype.element_ty.primitive_bitwidth > x_ptr.dtype.element_ty.primitive_bitwidth:
        tl.debug_barrier()
    tl.store(p_s, x.to(state_ptr.dtype.element_ty), mask=m_d & live)
    for m in tl.static_range(M):
        b_mu = tl.load(mu_ptr + m * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y = (b_x + b_delta * b_mu).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (m * N.to(tl.int64) + n) * D + o_d, b_y, mask=m_d)


def token_mix_step(x: Tensor, mu: Tensor, state: Tensor, indices: Tensor | None) -> Tensor:
    """y [M, N, D]; the pool is updated."""
    if indices is not None:
        token_ids.expect_unique("state_indices", indices, "slot")
    N, D = x.shape
    y = torch.empty(mu.shape[0], N, D, dtype=x.dtype, device=x.device)
    BD = min(512, max(16, triton.next_power_of_2(D)))
    launch_cache.cached(token_mix_step_kernel)[N, triton.cdiv(D, BD)](
        x_ptr=x,
        mu_ptr=mu.contiguous(),
        state_ptr=state,
        index_ptr=None if indices is None else indices.contiguous(),
        y_ptr=y,
        N=N,
        slots=state.shape[0],
        row_x=x.stride(0),
        row_state=state.stride(0),
        D=D,
        M=mu.shape[0],
        BD=BD,
        num_warps=2,
    )
    return y
