"""The rotation forward and backward: a program has ROWS tokens of a head, with all their channels.

op.py has the formulas. Pairs of channels are read as two tiles, which the cache makes one of.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime.backends import device_of
from slipstream.runtime.launch_cache import cached

ROWS, WARPS = 16, 4


@triton.jit
def _load(p, m):
    return tl.load(p, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _pair(p, m, m_2):
    """Both channels of pairs."""
    return _load(p, m), _load(p + 1, m_2)


@triton.jit
def _store(p, m, m_2, b_1, b_2):
    tl.store(p, b_1.to(p.dtype.element_ty), mask=m)
    tl.store(p + 1, b_2.to(p.dtype.element_ty), mask=m_2)


@triton.jit
def _tile(
    theta_ptr, rows, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr
):
    """Rows, offsets within a vector, masks of first and second channels, cos and sin."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_p = tl.arange(0, PAIRS)
    m_r = (o_r < rows)[:, None]
    b_theta = _load(theta_ptr + o_r[:, None] * P + o_p[None, :], m_r & (o_p < P)[None, :])
    m, m_2 = m_r & (2 * o_p < K)[None, :], m_r & (2 * o_p + 1 < K)[None, :]
    return o_r, 2 * o_p[None, :], m, m_2, tl.cos(b_theta), tl.sin(b_theta)


@triton.jit
def _rotate(x_ptr, y_ptr, p, m, m_2, b_cos, b_sin):
    b_1, b_2 = _pair(x_ptr + p, m, m_2)
    _store(y_ptr + p, m, m_2, b_1 * b_cos - b_2 * b_sin, b_1 * b_sin + b_2 * b_cos)


@triton.jit(do_not_specialize=["rows"])
def rotation_fwd_kernel(
    q_ptr,  # [rows, R, K]; so are k, q_out, k_out
    k_ptr,
    theta_ptr,  # [rows, P]
    q_out_ptr,
    k_out_ptr,
    dots_ptr,  # [rows, R, R]
    rows,
    R: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """grid (ceil(rows / ROWS),)"""
    o_r, o_k, m, m_2, b_cos, b_sin = _tile(theta_ptr, rows, K, P, ROWS, PAIRS)
    for r in range(R):
        p = (o_r[:, None] * R + r) * K + o_k
        _rotate(q_ptr, q_out_ptr, p, m, m_2, b_cos, b_sin)
        _rotate(k_ptr, k_out_ptr, p, m, m_2, b_cos, b_sin)
        b_q1, b_q2 = _pair(q_ptr + p, m, m_2)
        for s in range(R):
            b_k1, b_k2 = _pair(k_ptr + (o_r[:, None] * R + s) * K + o_k, m, m_2)
            b_dot = tl.sum(b_q1 * b_k1 + b_q2 * b_k2, 1)
            tl.store(dots_ptr + (o_r * R + r) * R + s, b_dot, mask=o_r < rows)


@triton.jit
def _back(
    x_ptr, other_ptr, dy_ptr, dx_ptr, p, p_other, p_dots, across, m, m_2, m_r, b_cos, b_sin,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dx, and what theta gets from it. p_dots: of this vector with the first other one, which are
    `across` from each other."""
    b_1, b_2 = _pair(x_ptr + p, m, m_2)
    b_d1, b_d2 = _pair(dy_ptr + p, m, m_2)
    # rounded as they were read: sums of dtheta over tokens cancel, if what is added up is the
    # gradient of these
    b_y1 = (b_1 * b_cos - b_2 * b_sin).to(x_ptr.dtype.element_ty).to(tl.float32)
    b_y2 = (b_1 * b_sin + b_2 * b_cos).to(x_ptr.dtype.element_ty).to(tl.float32)
    b_dx1, b_dx2 = b_d1 * b_cos + b_d2 * b_sin, b_d2 * b_cos - b_d1 * b_sin
    for s in range(R):
        b_o1, b_o2 = _pair(other_ptr + p_other + s * K, m, m_2)
        b_dot = _load(p_dots + s * across, m_r)[:, None]
        b_dx1 += b_dot * b_o1
        b_dx2 += b_dot * b_o2
    _store(dx_ptr + p, m, m_2, b_dx1, b_dx2)
    return b_y1 * b_d2 - b_y2 * b_d1


@triton.jit(do_not_specialize=["rows"])
def rotation_bwd_kernel(
    q_ptr,  # [rows, R, K]; so are k, dq_out, dk_out, dq, dk
    k_ptr,
    theta_ptr,  # [rows, P]; so is dtheta
    dq_out_ptr,
    dk_out_ptr,
    ddots_ptr,  # [rows, R, R]
    dq_ptr,
    dk_ptr,
    dtheta_ptr,
    rows,
    R: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """grid (ceil(rows / ROWS),)"""
    o_r, o_k, m, m_2, b_cos, b_sin = _tile(theta_ptr, rows, K, P, ROWS, PAIRS)
    m_r = o_r < rows
    b_dtheta = tl.zeros((ROWS, PAIRS), tl.float32)
    p_first = o_r[:, None] * (R * K) + o_k
    for r in range(R):
        p = p_first + r * K
        p_dots = ddots_ptr + o_r * (R * R)
        b_dtheta += _back(
            q_ptr, k_ptr, dq_out_ptr, dq_ptr, p, p_first, p_dots + r * R, 1, m, m_2, m_r,
            b_cos, b_sin, R, K,
        )  # fmt: skip
        b_dtheta += _back(
            k_ptr, q_ptr, dk_out_ptr, dk_ptr, p, p_first, p_dots + r, R, m, m_2, m_r,
            b_cos, b_sin, R, K,
        )  # fmt: skip
    o_p = tl.arange(0, PAIRS)[None, :]
    p = dtheta_ptr + o_r[:, None] * P + o_p
    tl.store(p, b_dtheta.to(p.dtype.element_ty), mask=m_r[:, None] & (o_p < P))


def forward(q: Tensor, k: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k rotated, and dots, float32."""
    out = torch.empty_like(q), torch.empty_like(k)
    dots = q.new_empty(*q.shape[:-1], q.shape[-2], dtype=torch.float32)
    _run(rotation_fwd_kernel, q, theta, q_ptr=q, k_ptr=k, theta_ptr=theta, q_out_ptr=out[0],
         k_out_ptr=out[1], dots_ptr=dots)  # fmt: skip
    return *out, dots


def backward(
    q: Tensor, k: Tensor, theta: Tensor, dq_out: Tensor, dk_out: Tensor, ddots: Tensor
) -> list[Tensor]:
    """dq, dk and dtheta."""
    dq, dk, dtheta = (torch.empty_like(x) for x in (q, k, theta))
    _run(rotation_bwd_kernel, q, theta, q_ptr=q, k_ptr=k, theta_ptr=theta, dq_out_ptr=dq_out,
         dk_out_ptr=dk_out, ddots_ptr=ddots, dq_ptr=dq, dk_ptr=dk, dtheta_ptr=dtheta)  # fmt: skip
    return [dq, dk, dtheta]


def _run(kernel: Any, q: Tensor, theta: Tensor, **tensors: Tensor) -> None:
    """q [..., R, K] and theta [..., P], all contiguous."""
    R, K = q.shape[-2:]
    rows = q.numel() // (R * K)
    with device_of(q.device):
        cached(kernel)[triton.cdiv(rows, ROWS),](
            **tensors, rows=rows, R=R, K=K, P=theta.shape[-1], ROWS=ROWS,
            PAIRS=triton.next_power_of_2(triton.cdiv(K, 2)), num_warps=WARPS,
        )  # fmt: skip
