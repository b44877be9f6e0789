"""The rotation forward and backward: a program has ROWS tokens of a head, with all their channels.

rotation.py has the formulas. Both channels of a pair are in one thread.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import launch_cache

# tokens of a program
ROWS = 16


@triton.jit
def _reduced(b_x):
    """n, and what n quarters of a turn leave of angles."""
    b_n = tl.floor(b_x * 0.6366197723675814 + 0.5)  # 2 / pi
    # pi / 2 as a sum, all but the last of 8 bits: with fused products, what is left of an angle
    # below 2^24 after each is exact
    b_r = tl.fma(b_n, -1.5703125, b_x)
    b_r = tl.fma(b_n, -0.0004825592041015625, b_r)
    b_r = tl.fma(b_n, -1.2665987014770508e-06, b_r)
    return b_n.to(tl.int32), tl.fma(b_n, -9.92093629470503e-10, b_r)


@triton.jit
def _cos_sin(b_x):
    """Cosine and sine of angles in radians, to 4e-7 below 2^24, and of any a turn: Triton's are two
    calls, which reduce each."""
    b_q, b_r = _reduced(b_x)
    # of large angles n is rounded, and two may be left
    b_rest, b_r = _reduced(b_r)
    b_q += b_rest
    # beyond 2^24, where float32 has not every whole number, n may be far from a quarter turn
    b_r = tl.where(tl.abs(b_r) > 1.0, 0.0, b_r)
    b_2 = b_r * b_r
    b_sin = b_r + b_r * b_2 * (-1.6666654611e-1 + b_2 * (8.3321608736e-3 + b_2 * -1.9515295891e-4))
    b_cos = (
        1.0
        - 0.5 * b_2
        + b_2
        * b_2
        * (4.166664568298827e-2 + b_2 * (-1.388731625493765e-3 + b_2 * 2.443315711809948e-5))
    )
    odd = (b_q & 1) != 0
    b_c, b_s = tl.where(odd, b_sin, b_cos), tl.where(odd, b_cos, b_sin)
    return tl.where((b_q + 1) & 2 != 0, -b_c, b_c), tl.where(b_q & 2 != 0, -b_s, b_s)


@triton.jit
def _pair(ptr, p_row, o_k, m, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """First and second channels of pairs, of vectors that begin at p_row."""
    b_x = tl.load(ptr + p_row[:, None] + o_k[None, :], mask=m, other=0.0)
    return tl.split(tl.reshape(b_x.to(tl.float32), (ROWS, PAIRS, 2)))


@triton.jit
def _store(ptr, p_row, o_k, m, b_1, b_2, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    b_x = tl.reshape(tl.join(b_1, b_2).to(ptr.dtype.element_ty), (ROWS, 2 * PAIRS))
    tl.store(ptr + p_row[:, None] + o_k[None, :], b_x, mask=m)


@triton.jit
def _tile(
    theta_ptr, rows, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr
):
    """Rows, channels, the mask of both, cos and sin."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_p, o_k = tl.arange(0, PAIRS), tl.arange(0, 2 * PAIRS)
    m_r = (o_r < rows)[:, None]
    m_p = m_r & (o_p < P)[None, :]
    b_theta = tl.load(theta_ptr + o_r[:, None] * P + o_p[None, :], mask=m_p, other=0.0)
    b_cos, b_sin = _cos_sin(b_theta.to(tl.float32))
    return o_r, o_k, m_r & (o_k < K)[None, :], b_cos, b_sin


@triton.jit
def _back(
    dy_ptr, dx_ptr, other_ptr, p, p_first, p_dots, across, o_k, m, m_r, b_1, b_2, b_o1, b_o2,
    b_cos, b_sin, dtype: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """dx of the vector b_1, b_2 at p, and what theta gets from it. p_dots: of its product with the
    first of the other kind, which are `across` from each other; b_o1, b_o2: the only one of R = 1.
    """
    b_d1, b_d2 = _pair(dy_ptr, p, o_k, m, ROWS, PAIRS)
    # rounded as they were read: sums of dtheta over tokens cancel, if what is added up is the
    # gradient of these
    b_y1 = (b_1 * b_cos - b_2 * b_sin).to(dtype).to(tl.float32)
    b_y2 = (b_1 * b_sin + b_2 * b_cos).to(dtype).to(tl.float32)
    b_dx1, b_dx2 = b_d1 * b_cos + b_d2 * b_sin, b_d2 * b_cos - b_d1 * b_sin
    for s in range(R):
        if R > 1:
            b_o1, b_o2 = _pair(other_ptr, p_first + s * K, o_k, m, ROWS, PAIRS)
        b_dot = tl.load(p_dots + s * across, mask=m_r, other=0.0)[:, None]
        b_dx1 += b_dot * b_o1
        b_dx2 += b_dot * b_o2
    _store(dx_ptr, p, o_k, m, b_dx1, b_dx2, ROWS, PAIRS)
    return b_y1 * b_d2 - b_y2 * b_d1


@triton.jit(do_not_specialize=["rows"])
def rotation_kernel(
    q_ptr,  # [rows, R, K]; so are k, q_out, k_out, dq_out, dk_out, dq, dk
    k_ptr,
    theta_ptr,  # [rows, P]; so is dtheta
    q_out_ptr, k_out_ptr,
    dots_ptr,  # [rows, R, R]; so is ddots
    dq_out_ptr, dk_out_ptr, ddots_ptr, dq_ptr, dk_ptr, dtheta_ptr, rows,
    R: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """grid (ceil(rows / ROWS),): q_out, k_out and dots, or of ddots the gradients."""
    o_r, o_k, m, b_cos, b_sin = _tile(theta_ptr, rows, K, P, ROWS, PAIRS)
    if ddots_ptr is None:
        for r in range(R):
            p_q = (o_r * R + r) * K
            b_q1, b_q2 = _pair(q_ptr, p_q, o_k, m, ROWS, PAIRS)
            b_1, b_2 = b_q1 * b_cos - b_q2 * b_sin, b_q1 * b_sin + b_q2 * b_cos
            _store(q_out_ptr, p_q, o_k, m, b_1, b_2, ROWS, PAIRS)
            for s in range(R):
                p_k = (o_r * R + s) * K
                b_k1, b_k2 = _pair(k_ptr, p_k, o_k, m, ROWS, PAIRS)
                b_dot = tl.sum(b_q1 * b_k1 + b_q2 * b_k2, 1)
                tl.store(dots_ptr + (o_r * R + r) * R + s, b_dot, mask=o_r < rows)
                if s == r:
                    b_1, b_2 = b_k1 * b_cos - b_k2 * b_sin, b_k1 * b_sin + b_k2 * b_cos
                    _store(k_out_ptr, p_k, o_k, m, b_1, b_2, ROWS, PAIRS)
    else:
        m_r = o_r < rows
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        b_dtheta = tl.zeros((ROWS, PAIRS), tl.float32)
        p_first, p_dots = o_r * (R * K), ddots_ptr + o_r * (R * R)
        for r in range(R):
            p = p_first + r * K
            b_q1, b_q2 = _pair(q_ptr, p, o_k, m, ROWS, PAIRS)
            b_k1, b_k2 = _pair(k_ptr, p, o_k, m, ROWS, PAIRS)
            b_dtheta += _back(
                dq_out_ptr, dq_ptr, k_ptr, p, p_first, p_dots + r * R, 1, o_k, m, m_r, b_q1, b_q2,
                b_k1, b_k2, b_cos, b_sin, dtype, R, K, ROWS, PAIRS,
            )  # fmt: skip
            b_dtheta += _back(
                dk_out_ptr, dk_ptr, q_ptr, p, p_first, p_dots + r, R, o_k, m, m_r, b_k1, b_k2,
                b_q1, b_q2, b_cos, b_sin, dtype, R, K, ROWS, PAIRS,
            )  # fmt: skip
        o_p = tl.arange(0, PAIRS)[None, :]
        tl.store(
            dtheta_ptr + o_r[:, None] * P + o_p,
            b_dtheta.to(dtheta_ptr.dtype.element_ty),
            mask=m_r[:, None] & (o_p < P),
        )


def forward(q: Tensor, k: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k rotated, and dots, float32."""
    out = torch.empty_like(q), torch.empty_like(k)
    dots = q.new_empty(*q.shape[:-1], q.shape[-2], dtype=torch.float32)
    _run(q, k, theta, q_out_ptr=out[0], k_out_ptr=out[1], dots_ptr=dots)
    return *out, dots


def backward(
    q: Tensor, k: Tensor, theta: Tensor, dq_out: Tensor, dk_out: Tensor, ddots: Tensor
) -> list[Tensor]:
    """dq, dk and dtheta."""
    dq_out, dk_out, ddots = (x.contiguous() for x in (dq_out, dk_out, ddots))
    dq, dk, dtheta = (torch.empty_like(x) for x in (q, k, theta))
    _run(q, k, theta, dq_out_ptr=dq_out, dk_out_ptr=dk_out, ddots_ptr=ddots, dq_ptr=dq, dk_ptr=dk,
         dtheta_ptr=dtheta)  # fmt: skip
    return [dq, dk, dtheta]


def _run(q: Tensor, k: Tensor, theta: Tensor, **tensors: Tensor) -> None:
    """q, k [..., R, K] and theta [..., P], all contiguous; None what is not among the tensors."""
    R, K = q.shape[-2:]
    rows = q.numel() // (R * K)
    names = ("q_out_ptr", "k_out_ptr", "dots_ptr", "dq_out_ptr", "dk_out_ptr", "ddots_ptr",
             "dq_ptr", "dk_ptr", "dtheta_ptr")  # fmt: skip
    launch_cache.cached(rotation_kernel)[triton.cdiv(rows, ROWS),](
        q_ptr=q, k_ptr=k, theta_ptr=theta, **(dict.fromkeys(names) | tensors), rows=rows,
        R=R, K=K, P=theta.shape[-1], ROWS=ROWS,
        PAIRS=triton.next_power_of_2(triton.cdiv(K, 2)), num_warps=4,
    )  # fmt: skip
