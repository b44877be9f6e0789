"""The running mean and its launches: one forward, one backward.

Forward a program goes through all tokens of BD channels, BT at a time.

Scans of a tile are of maxima, and then of sums relative to the running maximum m, which need no
exponential but those of each element:

    m_t = max(m_{t-1} + w, k_t)        S_t = exp(w + m_{t-1} - m_t) S_{t-1} + exp(k_t - m_t)

z = m + log S, where S is at least 1. What is before a token is a scan of the tokens before each,
which are loaded one row lower, with what came before the tile in the first row. Symbols: op.py.

The gradients: a program goes through its channels' tokens from the last one. What the later tokens
give is an associative scan again, of the tokens after each, which are loaded one row higher, with
what came from beyond the tile in the first row. op.py has the formulas.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.primitives.device import tokens_of
from slipstream.kernels.running_mean.inputs import MeanInputs
from slipstream.runtime import backends, launch_cache

NONE = tl.constexpr(float("-inf"))


@triton.jit
def load(p, m, other=0.0):
    return tl.load(p, mask=m, other=other).to(tl.float32)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger_decayed(d_a, m_a, n_a, d_b, m_b, n_b):
    """Two runs of tokens, one after the other: sum of log decays, and two maxima."""
    return d_a + d_b, _maximum(m_a + d_b, m_b), _maximum(n_a + d_b, n_b)


@triton.jit
def _add_both(a_a, x_a, y_a, a_b, x_b, y_b):
    return a_a * a_b, a_b * x_a + x_b, a_b * y_a + y_b


@triton.jit
def _before(k_ptr, v_ptr, p, m, o_r, b_z, b_mean, b_w, D):
    """z and M before each token of a tile; b_z, b_mean: before the first."""
    # of the token before and the one before that
    b_k1 = load(k_ptr + p - D, m & (o_r > 0), NONE)
    b_k2 = load(k_ptr + p - 2 * D, m & (o_r > 1), NONE)
    b_m1 = tl.where(o_r > 0, b_k1, b_z[None, :])
    b_m2 = tl.where(o_r > 1, b_k2, tl.where(o_r > 0, b_z[None, :], NONE))
    b_d = tl.where(o_r > 0, b_w[None, :], 0.0)
    _, b_m1, b_m2 = tl.associative_scan((b_d, b_m1, b_m2), 0, _larger_decayed)
    # the first row's sum is 1 beside its z, or 0
    b_x = tl.where(o_r > 0, tl.exp(b_k1 - b_m1), tl.where(b_z == NONE, 0.0, 1.0)[None, :])
    b_a = tl.where(o_r > 0, tl.exp(b_m2 + b_w[None, :] - b_m1), 0.0)
    b_v1 = load(v_ptr + p - D, m & (o_r > 0))
    b_y = b_x * tl.where(o_r > 0, b_v1, b_mean[None, :])
    _, b_x, b_y = tl.associative_scan((b_a, b_x, b_y), 0, _add_both)
    b_m = tl.where(b_x > 0.0, b_y / b_x, b_y)  # 0 of nothing, and NaN stays
    return b_m1 + tl.log(b_x), b_m


@triton.jit
def _after(b_before, b_k):
    """z after a token, from that before it, decayed."""
    b_m = _maximum(b_before, b_k)
    return b_m + tl.log(tl.exp(b_before - b_m) + tl.exp(b_k - b_m))


@triton.jit(do_not_specialize=["T"])
def running_mean_fwd_kernel(
    k_ptr,  # [tokens, D]; so are v, o
    v_ptr,
    w_ptr,  # [D]; so is u
    u_ptr,
    s_in_ptr,  # [N, 2 D]: M and z before the first token
    s_out_ptr,  # after the last
    o_ptr,
    r_ptr,  # [tokens, D]: r + w, for backward, or none
    mean_ptr,  # and M before the token
    cu_ptr,  # [N + 1]
    T,
    D,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """grid (N, ceil(D / BD))"""
    i_n = tl.program_id(0)
    begin, count = tokens_of(cu_ptr, i_n, T)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    row = i_n.to(tl.int64) * D
    p_s = row + o_d + row
    b_mean = tl.zeros((BD,), tl.float32)
    b_mean += load(s_in_ptr + p_s, m_d)
    p_s += D
    b_w, b_u = load(w_ptr + o_d, m_d), load(u_ptr + o_d, m_d)
    b_z = load(s_in_ptr + p_s, m_d)
    o_r = tl.arange(0, BT)[:, None]
    for start in range(0, count, BT):
        o_t = start + o_r
        m = (o_t < count) & m_d[None, :]
        p = (begin + o_t) * D + o_d[None, :]
        b_before, b_m = _before(k_ptr, v_ptr, p, m, o_r, b_z, b_mean, b_w, D)
        nothing = b_before == NONE
        b_r = tl.where(nothing, float("inf"), load(k_ptr + p, m) - b_before)
        b_o = b_m + sigmoid(b_r + b_u[None, :]) * (load(v_ptr + p, m) - b_m)
        if r_ptr is not None:
            tl.store(mean_ptr + p, b_m, mask=m)
        tl.store(o_ptr + p, b_o.to(o_ptr.dtype.element_ty), mask=m)
        if r_ptr is not None:
            tl.store(r_ptr + p, b_r, mask=m)
        # after the last token there is
        end = tl.minimum(count - start, BT) - 1
        p = (begin + start + end) * D + o_d
        b_k = load(k_ptr + p, m_d)
        b_z = _after(tl.sum(tl.where(o_r == end, b_before, 0.0), 0) + b_w, b_k)
        b_mean = tl.sum(tl.where(o_r == end, b_m, 0.0), 0)
        b_mean += tl.exp(b_k - b_z) * (load(v_ptr + p, m_d) - b_mean)
    tl.store(s_out_ptr + p_s, b_z, mask=m_d)
    tl.store(s_out_ptr + p_s - D, b_mean, mask=m_d)


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


# tokens and channels at a time
TILE = (8, 16) if backends.INTERPRETED else (64, 16)


def means(inputs: MeanInputs, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o in v's dtype, the state after the last token, and r and M before each token if kept."""
    k, v, w, u, start, cu_seqlens = inputs
    o, after = torch.empty_like(v), torch.empty_like(start)
    shape = k.shape if keep else (0,)
    r, mean = (k.new_empty(shape, dtype=torch.float32) for _ in range(2))
    _run(
        running_mean_fwd_kernel, k, start, cu_seqlens, k_ptr=k, v_ptr=v, w_ptr=w, u_ptr=u,
        s_in_ptr=start, s_out_ptr=after, o_ptr=o, r_ptr=r if keep else None,
        mean_ptr=mean if keep else None,
    )  # fmt: skip
    return o, after, r, mean


def means_backward(
    inputs: MeanInputs, r: Tensor, mean: Tensor, do: Tensor, dafter: Tensor | None
) -> list[Tensor]:
    """Gradients of k, v, w, u and start."""
    k, v, w, u, start, cu_seqlens = inputs
    do, dafter = do.contiguous(), None if dafter is None else dafter.contiguous()
    dk, dv, dstart = torch.empty_like(k), torch.empty_like(v), torch.empty_like(start)
    dw, du = (k.new_empty(start.shape[0], k.shape[2], dtype=torch.float32) for _ in range(2))
    _run(
        running_mean_bwd_kernel, k, start, cu_seqlens, r_ptr=r, mean_ptr=mean, v_ptr=v,
        w_ptr=w, u_ptr=u, do_ptr=do, ds_out_ptr=dafter, dk_ptr=dk, dv_ptr=dv, dw_ptr=dw, du_ptr=du,
        ds_in_ptr=dstart,
    )  # fmt: skip
    return [dk, dv, dw.sum(0).to(w.dtype), du.sum(0).to(u.dtype), dstart]


def _run(
    kernel: Any, x: Tensor, start: Tensor, cu_seqlens: Tensor | None, **tensors: Tensor | None
) -> None:
    """x [B, T, D], all contiguous."""
    D, (BT, BD) = x.shape[2], TILE
    launch_cache.cached(kernel)[start.shape[0], triton.cdiv(D, BD)](
        **tensors, cu_ptr=cu_seqlens, T=x.shape[1], D=D, BT=BT, BD=BD, num_warps=8
    )
