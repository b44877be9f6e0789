"""The running mean forward: a program goes through all tokens of BD channels, BT at a time.

Scans of a tile are of maxima, and then of sums relative to the running maximum m, which need no
exponential but those of each element:

    m_t = max(m_{t-1} + w, k_t)        S_t = exp(w + m_{t-1} - m_t) S_{t-1} + exp(k_t - m_t)

z = m + log S, where S is at least 1. What is before a token is a scan of the tokens before each,
which are loaded one row lower, with what came before the tile in the first row. Symbols: op.py.
"""

import triton
import triton.language as tl

from slipstream.kernels.primitives.sequences import tokens_of

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
