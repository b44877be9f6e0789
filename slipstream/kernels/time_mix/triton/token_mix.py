"""Mixes of each token with the one before, in one pass; ../token_mix.py has the formula.

    dx = sum_m dy_m (1 - mu_m)        dbefore = sum_m dy_m mu_m
    dmu_m = sum over tokens of dy_m (before - x)

R tokens of D channels. A program takes BD channels of every P-th token, so that mu and its gradient
stay in registers; another kernel adds up the programs' sums, in an order that does not change.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime.backends import device_of, sm_count
from slipstream.runtime.launch_cache import cached

# Channels of a program at most, and programs at a time on each multiprocessor.
CHANNELS = 1024
PER_PROCESSOR = 8


@triton.jit
def _mu(mu_ptr, o_d, m_d, D: tl.constexpr, M: tl.constexpr):
    mus = ()
    for m in tl.static_range(M):
        mus = mus + (tl.load(mu_ptr + m * D + o_d, mask=m_d, other=0.0).to(tl.float32),)
    return mus


@triton.jit(do_not_specialize=["R"])
def token_mix_fwd_kernel(
    x_ptr, before_ptr, mu_ptr, y_ptr, R,
    D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (P, D / BD). x, before [R, D], mu [M, D], y [M, R, D]"""
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    mus = _mu(mu_ptr, o_d, m_d, D, M)
    for row in range(tl.program_id(0), R, tl.num_programs(0)):
        o = tl.cast(row, tl.int64) * D + o_d
        b_x = tl.load(x_ptr + o, mask=m_d, other=0.0).to(tl.float32)
        b_delta = tl.load(before_ptr + o, mask=m_d, other=0.0).to(tl.float32) - b_x
        for m in tl.static_range(M):
            p_y = y_ptr + tl.cast(R, tl.int64) * (m * D) + o
            tl.store(p_y, (b_x + b_delta * mus[m]).to(y_ptr.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["R"])
def token_mix_bwd_kernel(
    dy_ptr, x_ptr, before_ptr, mu_ptr, dx_ptr, dbefore_ptr, partial_ptr, R,
    D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (P, D / BD). dy [M, R, D]; x, before, dx, dbefore [R, D]; partial [P, M, D]"""
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    mus = _mu(mu_ptr, o_d, m_d, D, M)
    sums = (tl.zeros([BD], tl.float32),) * M
    for row in range(tl.program_id(0), R, tl.num_programs(0)):
        o = tl.cast(row, tl.int64) * D + o_d
        b_x = tl.load(x_ptr + o, mask=m_d, other=0.0).to(tl.float32)
        b_delta = tl.load(before_ptr + o, mask=m_d, other=0.0).to(tl.float32) - b_x
        dys = ()
        for m in tl.static_range(M):
            p_dy = dy_ptr + tl.cast(R, tl.int64) * (m * D) + o
            dys = dys + (tl.load(p_dy, mask=m_d, other=0.0),)
        b_dx, b_dbefore = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
        new = ()
        for m in tl.static_range(M):
            b_dy = dys[m].to(tl.float32)  # pyright: ignore[reportAttributeAccessIssue]
            b_dbefore += b_dy * mus[m]
            b_dx += b_dy * (1 - mus[m])
            new = new + (sums[m] + b_dy * b_delta,)
        sums = new
        tl.store(dx_ptr + o, b_dx.to(dx_ptr.dtype.element_ty), mask=m_d)
        tl.store(dbefore_ptr + o, b_dbefore.to(dbefore_ptr.dtype.element_ty), mask=m_d)
    for m in tl.static_range(M):
        p_partial = partial_ptr + (tl.program_id(0) * M + m) * D + o_d
        tl.store(p_partial, sums[m], mask=m_d)


@triton.jit(do_not_specialize=["P"])
def token_mix_sums_kernel(partial_ptr, dmu_ptr, P, C: tl.constexpr, BP: tl.constexpr):
    """Grid (C / 32). partial [P, C], dmu [C]"""
    o_c = tl.program_id(0) * 32 + tl.arange(0, 32)
    b_sum = tl.zeros([32], tl.float32)
    for p in range(0, P, BP):
        o_p = p + tl.arange(0, BP)
        m = (o_p < P)[:, None] & (o_c < C)[None, :]
        p_partial = partial_ptr + o_p[:, None] * C + o_c[None, :]
        b_sum += tl.sum(tl.load(p_partial, mask=m, other=0.0), 0)
    tl.store(dmu_ptr + o_c, b_sum.to(dmu_ptr.dtype.element_ty), mask=o_c < C)


def forward(x: Tensor, before: Tensor, mu: Tensor) -> Tensor:
    """[M, B, T, D]"""
    y = torch.empty(mu.shape[0], *x.shape, dtype=x.dtype, device=x.device)
    P, sizes = _sizes(x, mu)
    with device_of(x.device):
        cached(token_mix_fwd_kernel)[(P, -(-sizes["D"] // sizes["BD"]))](
            x_ptr=x.contiguous(),
            before_ptr=before.contiguous(),
            mu_ptr=mu.contiguous(),
            y_ptr=y,
            **sizes,
            num_warps=4,
        )
    return y


def backward(dy: Tensor, x: Tensor, before: Tensor, mu: Tensor) -> list[Tensor]:
    """dx, dbefore, dmu."""
    dx, dbefore = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    P, sizes = _sizes(x, mu)
    partial = torch.empty(P, *mu.shape, dtype=torch.float32, device=x.device)
    dmu = torch.empty(mu.shape, dtype=mu.dtype, device=x.device)
    with device_of(x.device):
        cached(token_mix_bwd_kernel)[(P, -(-sizes["D"] // sizes["BD"]))](
            dy_ptr=dy.contiguous(),
            x_ptr=x.contiguous(),
            before_ptr=before.contiguous(),
            mu_ptr=mu.contiguous(),
            dx_ptr=dx,
            dbefore_ptr=dbefore,
            partial_ptr=partial,
            **sizes,
            num_warps=4,
        )
        cached(token_mix_sums_kernel)[(-(-mu.numel() // 32),)](
            partial_ptr=partial, dmu_ptr=dmu, P=P, C=mu.numel(), BP=128, num_warps=4
        )
    return [dx, dbefore, dmu]


def _sizes(x: Tensor, mu: Tensor) -> tuple[int, dict[str, int]]:
    """Programs of a block of channels, and what both kernels are told."""
    M, D = mu.shape
    BD = min(max(1 << (D - 1).bit_length(), 128), CHANNELS)
    R = x.numel() // D
    P = max(sm_count(x.get_device()) * PER_PROCESSOR // -(-D // BD), 1)
    return min(P, R), {"R": R, "D": D, "M": M, "BD": BD}
