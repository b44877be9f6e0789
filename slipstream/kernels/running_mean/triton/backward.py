"""The gradients of the running mean: a program goes through its channels' tokens from the last one.

What the later tokens give is an associative scan again, of the tokens after each, which are loaded
one row higher, with what came from beyond the tile in the first row. op.py has the formulas.
"""

import triton
import triton.language as tl

from slipstream.kernels.primitives.sequences import tokens_of
from slipstream.kernels.running_mean.triton.forward import load, sigmoid


@triton.jit
def _then_both(a_1, b_1, x_1, y_1, a_2, b_2, x_2, y_2):
    """(P, G) -> (a P + x, a G + b P + y), one after the other."""
    return a_1 * a_2, a_2 * b_1 + b_2 * a_1, a_2 * x_1 + x_2, a_2 * y_1 + b_2 * x_1 + y_2


@triton.jit
def _of_means(r_ptr, mean_ptr, v_ptr, do_ptr, p, m, b_w, b_u):
    """a, c, s, v - M and do of tokens."""
    b_rw = load(r_ptr + p, m)
    b_r = b_rw - b_w[None, :]
    b_v = load(v_ptr + p, m) - load(mean_ptr + p, m)
    return sigmoid(-b_r), sigmoid(b_r), sigmoid(b_rw + b_u[None, :]), b_v, load(do_ptr + p, m)


@triton.jit(do_not_specialize=["T"])
def running_mean_bwd_kernel(
    r_ptr,  # [tokens, D]: k - z before; so are mean (M before), v, do, dk, dv
    mean_ptr,
    v_ptr,
    w_ptr,  # [D]; so is u
    u_ptr,
    do_ptr,
    ds_out_ptr,  # [N, 2 D], or none
    dk_ptr, dv_ptr,
    dw_ptr,  # [N, D]; so is du
    du_ptr,
    ds_in_ptr,  # as ds_out
    cu_ptr, T, D,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """grid (N, ceil(D / BD))"""
    i_n = tl.program_id(0)
    begin, count = tokens_of(cu_ptr, i_n, T)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    p_s = i_n.to(tl.int64) * (2 * D) + o_d
    b_w, b_u = load(w_ptr + o_d, m_d), load(u_ptr + o_d, m_d)
    b_p, b_g = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    b_dw, b_du = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    if ds_out_ptr is not None:
        b_p += load(ds_out_ptr + p_s, m_d)
        b_g += load(ds_out_ptr + (p_s + D), m_d)
    o_r = tl.arange(0, BT)[:, None]
    for start in range(0, count, BT):
        o_t = count - 1 - start - o_r
        m = (o_t >= 0) & m_d[None, :]
        later = m & (o_r > 0)
        p = (begin + o_t) * D + o_d[None, :]
        last = o_r == tl.minimum(count - start, BT) - 1
        b_a, b_c, b_s, b_v, b_do = _of_means(r_ptr, mean_ptr, v_ptr, do_ptr, p + D, later, b_w, b_u)
        b_x = tl.where(o_r > 0, (1.0 - b_s) * b_do, b_p[None, :])
        b_y = tl.where(o_r > 0, -b_do * b_v * b_s * (1.0 - b_s), b_g[None, :])
        b_b = tl.where(o_r > 0, -b_v * b_c * b_a, 0.0)
        b_a = tl.where(o_r > 0, b_a, 0.0)
        _, _, b_n, b_gn = tl.associative_scan((b_a, b_b, b_x, b_y), 0, _then_both)
        b_a, b_c, b_s, b_v, b_do = _of_means(r_ptr, mean_ptr, v_ptr, do_ptr, p, m, b_w, b_u)
        b_dr = b_n * b_v * b_c * b_a
        b_ds = b_do * b_v * b_s * (1.0 - b_s)
        tl.store(dk_ptr + p, (b_c * b_gn + b_dr + b_ds).to(dk_ptr.dtype.element_ty), mask=m)
        tl.store(dv_ptr + p, (b_s * b_do + b_c * b_n).to(dv_ptr.dtype.element_ty), mask=m)
        b_dw += tl.sum(tl.where(m, b_a * b_gn - b_dr, 0.0), 0)
        b_du += tl.sum(tl.where(m, b_ds, 0.0), 0)
        b_p = tl.sum(tl.where(last, b_a * b_n + (1.0 - b_s) * b_do, 0.0), 0)
        b_g = tl.sum(tl.where(last, b_a * b_gn - b_dr - b_ds, 0.0), 0)
    tl.store(dw_ptr + i_n.to(tl.int64) * D + o_d, b_dw, mask=m_d)
    tl.store(du_ptr + i_n.to(tl.int64) * D + o_d, b_du, mask=m_d)
    tl.store(ds_in_ptr + p_s, b_p, mask=m_d)
    tl.store(ds_in_ptr + (p_s + D), b_g, mask=m_d)
