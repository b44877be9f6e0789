"""Attention over the depth: each residual is read once forward, and once backward.

    s_l = scale (q w) . v_l rstd_l        rstd_l = 1 / sqrt(mean(v_l^2) + eps)
    p = softmax(s)        o = sum_l p_l v_l        y = o, or o rstd_o w_o

over L residuals of R rows of D features; L is at most STREAMS, an argument of the kernel each.
Backward, with do the gradient of o, after that of its norm, and a = scale q w,

    ds_l = p_l (do . v_l - do . o)
    dv_l = p_l do + ds_l rstd_l (a - s_l rstd_l / D v_l)
    da = sum over rows and l of ds_l rstd_l v_l        dw_o = sum over rows of dy o rstd_o

A program takes a tile of rows, and has the next residuals on their way to shared memory while it
works on one. Backward takes o from forward, as a rounded number and the rest, so that no residual
is read twice: where one has nearly all of p, do . v_l - do . o cancels.
Its programs go on to other rows and keep da and dw_o, each over a fixed share of them: the same
inputs, the same bits.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attnres.inputs import STREAMS, AttnresInputs, ForwardSums, for_backward
from slipstream.runtime import backends, launch_cache


def named(letter: str, tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Arguments of kernels."""
    given = [*tensors, *[None] * (STREAMS - len(tensors))]
    return {f"{letter}{i}_ptr": x for i, x in enumerate(given)}


@triton.jit
def stream(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, n, L: tl.constexpr
):  # fmt: skip
    """Pointer n of L: a number of the loop, as unrolled loads would all be kept."""
    # choices one after the other: L is known when compiled, and n is not
    p = p0
    if L > 1:
        p = tl.where(n == 1, p1, p)
    if L > 2:
        p = tl.where(n == 2, p2, p)
    if L > 3:
        p = tl.where(n == 3, p3, p)
    if L > 4:
        p = tl.where(n == 4, p4, p)
    if L > 5:
        p = tl.where(n == 5, p5, p)
    if L > 6:
        p = tl.where(n == 6, p6, p)
    if L > 7:
        p = tl.where(n == 7, p7, p)
    if L > 8:
        p = tl.where(n == 8, p8, p)
    if L > 9:
        p = tl.where(n == 9, p9, p)
    if L > 10:
        p = tl.where(n == 10, p10, p)
    if L > 11:
        p = tl.where(n == 11, p11, p)
    if L > 12:
        p = tl.where(n == 12, p12, p)
    if L > 13:
        p = tl.where(n == 13, p13, p)
    if L > 14:
        p = tl.where(n == 14, p14, p)
    if L > 15:
        p = tl.where(n == 15, p15, p)
    return p


# Of a program: elements of its rows, at least one row; of these a thread has A_THREAD, or half as
# many backward, which holds three such tiles of float32; residuals on their way, with the one that
# is worked on, in 48 KiB of shared memory. On an H200 rows of 7168 take 0.522 ms forward
# with four stages in four warps, 0.753 with two stages, 0.563 in eight warps.
ELEMENTS, A_THREAD = 4096, 64
STAGES = 4


@triton.jit
def _row(ptr, o_d, m_d):
    return tl.load(ptr + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["R"])
def attnres_fwd_kernel(
    v0_ptr, v1_ptr, v2_ptr, v3_ptr, v4_ptr, v5_ptr, v6_ptr, v7_ptr,
    v8_ptr, v9_ptr, v10_ptr, v11_ptr, v12_ptr, v13_ptr, v14_ptr, v15_ptr,
    q_ptr, w_ptr, wo_ptr, y_ptr, o_ptr, rest_ptr, s_ptr, rstd_ptr, lse_ptr, R, eps, scale,
    L: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (R / BR). v, y [R, D]; s, rstd [L, R]; lse [R]; o, rest [R, D], if backward wants it."""
    o_r, o_d = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    m_r, m_d = o_r < R, o_d < D
    o, m = o_r[:, None] * D + o_d[None, :], m_r[:, None] & m_d[None, :]
    # the same direction for all residuals: their norms only scale the scores
    b_a = _row(q_ptr, o_d, m_d) * _row(w_ptr, o_d, m_d) * scale
    b_max = tl.full([BR], float("-inf"), tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    b_o = tl.zeros([BR, BD], tl.float32)
    for n in tl.range(0, L, num_stages=STAGES):
        v_ptr = stream(
            v0_ptr, v1_ptr, v2_ptr, v3_ptr, v4_ptr, v5_ptr, v6_ptr, v7_ptr,
            v8_ptr, v9_ptr, v10_ptr, v11_ptr, v12_ptr, v13_ptr, v14_ptr, v15_ptr, n, L,
        )  # fmt: skip
        b_v = tl.load(v_ptr + o, mask=m, other=0.0).to(tl.float32)
        b_square, b_s = tl.reduce((b_v * b_v, b_v * b_a), 1, _add2)
        b_rstd = tl.rsqrt(b_square / D + eps)
        b_s = b_s * b_rstd
        tl.store(s_ptr + o_r + n * R, b_s, mask=m_r)
        tl.store(rstd_ptr + o_r + n * R, b_rstd, mask=m_r)
        # a running softmax: what was summed is scaled again, so that no residual is read twice
        b_new = tl.maximum(b_max, b_s)
        b_keep, b_p = tl.exp(b_max - b_new), tl.exp(b_s - b_new)
        b_max, b_sum = b_new, b_sum * b_keep + b_p
        b_o = b_o * b_keep[:, None] + b_p[:, None] * b_v
    # backward makes p of s and lse again
    b_o = b_o / b_sum[:, None]
    tl.store(lse_ptr + o_r, b_max + tl.log(b_sum), mask=m_r)
    if o_ptr is not None:
        tl.store(o_ptr + o, b_o.to(o_ptr.dtype.element_ty), mask=m)
    # what rounding has taken from o: do . v - do . o cancels where one residual has most of p
    if rest_ptr is not None:
        b_rest = b_o - b_o.to(rest_ptr.dtype.element_ty).to(tl.float32)
        tl.store(rest_ptr + o, b_rest.to(rest_ptr.dtype.element_ty), mask=m)
    if wo_ptr is not None:
        b_last = tl.rsqrt(tl.sum(b_o * b_o, 1) / D + eps)
        b_o = b_o * b_last[:, None] * _row(wo_ptr, o_d, m_d)
    tl.store(y_ptr + o, b_o.to(y_ptr.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["R"])
def attnres_bwd_kernel(
    v0_ptr, v1_ptr, v2_ptr, v3_ptr, v4_ptr, v5_ptr, v6_ptr, v7_ptr,
    v8_ptr, v9_ptr, v10_ptr, v11_ptr, v12_ptr, v13_ptr, v14_ptr, v15_ptr,
    d0_ptr, d1_ptr, d2_ptr, d3_ptr, d4_ptr, d5_ptr, d6_ptr, d7_ptr,
    d8_ptr, d9_ptr, d10_ptr, d11_ptr, d12_ptr, d13_ptr, d14_ptr, d15_ptr,
    q_ptr, w_ptr, wo_ptr, dy_ptr, o_ptr, rest_ptr, s_ptr, rstd_ptr, lse_ptr, da_ptr, dwo_ptr,
    R, eps, scale,
    L: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (P). d [R, D] are the gradients of v; da, dwo [P, D] sums over a program's rows."""
    pid, o_d = tl.program_id(0), tl.arange(0, BD)
    m_d = o_d < D
    b_a = _row(q_ptr, o_d, m_d) * _row(w_ptr, o_d, m_d) * scale
    b_da, b_dwo = tl.zeros([1, BD], tl.float32), tl.zeros([1, BD], tl.float32)
    # always the same rows for a program, in order: da and dwo have the same bits each time
    for i in range(pid, tl.cdiv(R, BR), tl.num_programs(0)):
        o_r = i * BR + tl.arange(0, BR).to(tl.int64)
        m_r = o_r < R
        o, m = o_r[:, None] * D + o_d[None, :], m_r[:, None] & m_d[None, :]
        b_lse = tl.load(lse_ptr + o_r, mask=m_r, other=0.0)
        b_o = tl.load(o_ptr + o, mask=m, other=0.0).to(tl.float32)
        if rest_ptr is not None:
            b_o += tl.load(rest_ptr + o, mask=m, other=0.0).to(tl.float32)
        b_do = tl.load(dy_ptr + o, mask=m, other=0.0).to(tl.float32)
        if wo_ptr is not None:
            b_last = tl.rsqrt(tl.sum(b_o * b_o, 1) / D + eps)
            b_u = b_o * b_last[:, None]
            b_dwo += tl.sum(b_do * b_u, 0)[None, :]
            b_do = b_do * _row(wo_ptr, o_d, m_d)
            b_do = b_last[:, None] * (b_do - b_u * (tl.sum(b_do * b_u, 1) / D)[:, None])
        b_delta = tl.sum(b_do * b_o, 1)
        for n in tl.range(0, L, num_stages=STAGES):
            v_ptr = stream(
                v0_ptr, v1_ptr, v2_ptr, v3_ptr, v4_ptr, v5_ptr, v6_ptr, v7_ptr,
                v8_ptr, v9_ptr, v10_ptr, v11_ptr, v12_ptr, v13_ptr, v14_ptr, v15_ptr, n, L,
            )  # fmt: skip
            d_ptr = stream(
                d0_ptr, d1_ptr, d2_ptr, d3_ptr, d4_ptr, d5_ptr, d6_ptr, d7_ptr,
                d8_ptr, d9_ptr, d10_ptr, d11_ptr, d12_ptr, d13_ptr, d14_ptr, d15_ptr, n, L,
            )  # fmt: skip
            b_v = tl.load(v_ptr + o, mask=m, other=0.0).to(tl.float32)
            b_s = tl.load(s_ptr + o_r + n * R, mask=m_r, other=0.0)
            b_rstd = tl.load(rstd_ptr + o_r + n * R, mask=m_r, other=0.0)
            # from forward, which has kept them: else backward would read all residuals twice
            b_p = tl.exp(b_s - b_lse)
            b_ds = b_p * (tl.sum(b_do * b_v, 1) - b_delta) * b_rstd
            if L == 1:  # a softmax of one: nothing but what rounding has left of o
                b_ds = tl.zeros_like(b_ds)
            b_dv = b_ds[:, None] * (b_a - (b_s * b_rstd / D)[:, None] * b_v)
            b_dv += b_p[:, None] * b_do
            tl.store(d_ptr + o, b_dv.to(d_ptr.dtype.element_ty), mask=m)
            b_da += tl.sum(b_ds[:, None] * b_v, 0)[None, :]
    at = pid.to(tl.int64) * D + o_d[None, :]
    tl.store(da_ptr + at, b_da, mask=m_d[None, :])
    if wo_ptr is not None:
        tl.store(dwo_ptr + at, b_dwo, mask=m_d[None, :])


def _tile(D: int, a_thread: int) -> tuple[int, int, int]:
    """BR, BD and warps."""
    BD = triton.next_power_of_2(D)
    BR = max(ELEMENTS // BD, 1)
    return BR, BD, BR * BD // (32 * a_thread)


def _stages(first: Tensor, tile: int, most: int) -> int:
    return min(most, 1 + (48 << 10) // (tile * first.element_size()))


def _given(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def forward(inputs: AttnresInputs, keep: bool) -> tuple[Tensor, ...]:
    """y [R, D], then s, rstd, lse, o and rest (ForwardSums). With keep the last two have elements,
    unless y is o, and unless o is not rounded."""
    query, residuals, weight, output_weight, eps, scale = inputs
    o, rest = for_backward(residuals[0], output_weight, keep)
    first, L = residuals[0], len(residuals)
    R, D = first.shape
    y = torch.empty_like(first)
    s, rstd = (first.new_empty(L, R, dtype=torch.float32) for _ in range(2))
    lse = first.new_empty(R, dtype=torch.float32)
    BR, BD, warps = _tile(D, A_THREAD)
    if R > 0:
        launch_cache.cached(attnres_fwd_kernel)[(triton.cdiv(R, BR),)](
            **named("v", residuals), q_ptr=query, w_ptr=weight, wo_ptr=output_weight,
            y_ptr=y, o_ptr=_given(o), rest_ptr=_given(rest), s_ptr=s, rstd_ptr=rstd,
            lse_ptr=lse, R=R,
            eps=eps, scale=scale, L=L, D=D, BR=BR, BD=BD,
            STAGES=_stages(first, BR * BD, STAGES), num_warps=warps,
        )  # fmt: skip
    return y, s, rstd, lse, o, rest


def backward(inputs: AttnresInputs, dy: Tensor, sums: ForwardSums) -> list[Tensor]:
    """Gradients of scale q w [D] and of the output's weight [D] (of no elements where there is
    none), float32, and of the residuals."""
    (query, residuals, weight, output_weight, eps, scale), (o, rest, s, rstd, lse) = inputs, sums
    first, L = residuals[0], len(residuals)
    R, D = first.shape
    dy, grads = dy.contiguous(), [torch.empty_like(x) for x in residuals]
    BR, BD, warps = _tile(D, A_THREAD // 2)
    stages = _stages(first, BR * BD, STAGES if BD <= ELEMENTS else 3)
    # on a multiprocessor programs of one row at a time, or of several
    most = (2 if BR == 1 else 8) * backends.sm_count(first.get_device())
    programs = max(min(triton.cdiv(R, BR), most), 1)
    da = first.new_zeros(programs, D, dtype=torch.float32)
    # rows past the last are zeros, and their norm is to be zero too: sums over rows have it
    eps = max(eps, torch.finfo(torch.float32).tiny)
    dwo = None if output_weight is None else torch.zeros_like(da)
    if R > 0:
        launch_cache.cached(attnres_bwd_kernel)[(programs,)](
            **named("v", residuals), **named("d", grads), q_ptr=query, w_ptr=weight,
            wo_ptr=output_weight, dy_ptr=dy, o_ptr=o, rest_ptr=_given(rest), s_ptr=s,
            rstd_ptr=rstd, lse_ptr=lse, da_ptr=da, dwo_ptr=dwo, R=R, eps=eps, scale=scale,
            L=L, D=D, BR=BR, BD=BD, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return [da.sum(0), da.new_empty(0) if dwo is None else dwo.sum(0), *grads]
