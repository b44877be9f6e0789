"""The running mean forward: a program goes through all tokens of BD channels, BT at a time.

z_{t-1} and M_{t-1} of a tile's tokens come from one associative scan of the tokens before each,
which are loaded one row lower, with what came before the tile in the first row. Symbols: op.py.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(float("-inf"))


@triton.jit
def tokens_of(cu_ptr, i_n, T):
    """First token of sequence n, and how many it has."""
    if cu_ptr is not None:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
        count = tl.maximum(end - begin, 0).to(tl.int32)
    else:
        count = T
        begin = i_n.to(tl.int64) * T
    return begin, count


@triton.jit
def load(p, m, other=0.0):
    return tl.load(p, mask=m, other=other).to(tl.float32)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) without the digits that 1 + a small number loses."""
    y = tl.exp(-tl.abs(x))
    s = 1.0 + y
    return tl.maximum(x, 0.0) + tl.where(s == 1.0, y, tl.log(s) * y / (s - 1.0))


@triton.jit
def _add_logs(d_a, z_a, d_b, z_b):
    """Two runs of tokens, one after the other: sum of log decays, z."""
    z_a += d_b
    high = tl.maximum(z_a, z_b)
    z = high + tl.log(1.0 + tl.exp(-tl.abs(z_b - z_a)))
    return d_a + d_b, tl.where(z_b == NONE, z_a, z)


@triton.jit
def _add_means(d_a, z_a, m_a, d_b, z_b, m_b):
    """The same, and M."""
    z_a += d_b
    high = tl.maximum(z_a, z_b)
    z = high + tl.log(1.0 + tl.exp(-tl.abs(z_b - z_a)))
    weight = sigmoid(z_b - z_a)
    nothing = z_b == NONE
    return (
        d_a + d_b,
        tl.where(nothing, z_a, z),
        tl.where(nothing, m_a, m_a + weight * (m_b - m_a)),
    )


@triton.jit(do_not_specialize=["T"])
def running_mean_fwd_kernel(
    k_ptr,  # [tokens, D]; so is v
    v_ptr,  # none: the weights alone
    w_ptr,  # [D], none is 0
    u_ptr,  # [D], with v
    s_in_ptr,  # [N, D]: z before the first token; with v [N, 2 D]: M, then z
    s_out_ptr,  # after the last
    o_ptr,  # [tokens, D]: o, or without v c
    g_ptr,  # [tokens, D]: without v log a, 0 where nothing is before
    r_ptr,  # [tokens, D]: with v r, for backward
    mean_ptr,  # and M before the token
    cu_ptr,  # [N + 1]
    T,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """grid (N, ceil(D / BD))"""
    i_n = tl.program_id(0)
    begin, count = tokens_of(cu_ptr, i_n, T)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    W: tl.constexpr = D if v_ptr is None else 2 * D
    p_s = i_n.to(tl.int64) * W + o_d
    b_z = load(s_in_ptr + p_s + (W - D), m_d)
    if v_ptr is not None:
        b_m = load(s_in_ptr + p_s, m_d)
        b_u = load(u_ptr + o_d, m_d)
    b_w = tl.zeros((BD,), tl.float32)
    if w_ptr is not None:
        b_w += load(w_ptr + o_d, m_d)
    o_r = tl.arange(0, BT)[:, None]
    for start in range(0, count, BT):
        o_t = start + o_r
        m = (o_t < count) & m_d[None, :]
        p = (begin + o_t) * D + o_d[None, :]
        b_k = load(k_ptr + p, m)
        earlier = m & (o_r > 0)
        b_x = tl.where(o_r > 0, load(k_ptr + p - D, earlier, NONE), b_z[None, :])
        b_decay = tl.where(o_r > 0, b_w[None, :], 0.0)
        if v_ptr is not None:
            b_y = tl.where(o_r > 0, load(v_ptr + p - D, earlier), b_m[None, :])
            _, b_before, b_mean = tl.associative_scan((b_decay, b_x, b_y), 0, _add_means)
        else:
            _, b_before = tl.associative_scan((b_decay, b_x), 0, _add_logs)
        nothing = b_before == NONE
        b_r = tl.where(nothing, float("inf"), b_k - (b_before + b_w[None, :]))
        b_c, b_rise = sigmoid(b_r), softplus(b_r)
        b_after = tl.where(nothing, b_k, b_before + b_w[None, :] + b_rise)
        # of the last token there is
        last = o_r == tl.minimum(count - start, BT) - 1
        b_z = tl.sum(tl.where(last, b_after, 0.0), 0)
        if v_ptr is not None:
            b_v = load(v_ptr + p, m)
            b_share = sigmoid(b_r + (b_w + b_u)[None, :])
            b_o = b_mean + b_share * (b_v - b_mean)
            b_m = tl.sum(tl.where(last, b_mean + b_c * (b_v - b_mean), 0.0), 0)
            if r_ptr is not None:
                tl.store(r_ptr + p, b_r, mask=m)
                tl.store(mean_ptr + p, b_mean, mask=m)
        else:
            b_o = b_c
            # a state of nothing need not decay
            tl.store(g_ptr + p, tl.where(nothing, 0.0, -b_rise), mask=m)
        tl.store(o_ptr + p, b_o.to(o_ptr.dtype.element_ty), mask=m)
    tl.store(s_out_ptr + p_s + (W - D), b_z, mask=m_d)
    if v_ptr is not None:
        tl.store(s_out_ptr + p_s, b_m, mask=m_d)
