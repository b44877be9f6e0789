"""Inputs of a delta rule's chunk kernels from a token's projections, written into its block.

    x_t = silu(bias + sum_j weight_j x_{t-W+1+j})       of the channels of q, k and v
    q, k = q / |q|, k / |k|
    beta = sigmoid(beta), or twice that
    g = -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias))

The bits are those of a prompt, where each line is a kernel of its own: x_t is rounded before its
norm, whose sums have the order that norm/triton_kernels.py has for heads of K.
step.py has the convolution from here: its window of earlier inputs moves on in place.
"""

import triton
import triton.language as tl

from slipstream.kernels.mixer_step.inputs import UNIT_EPS, Blocks, TokenInputs
from slipstream.kernels.primitives.device import softplus
from slipstream.runtime import backends, launch_cache


@triton.jit
def load(p, m):
    return tl.load(p, mask=m, other=0.0).to(tl.float32)


@triton.jit
def activation(x, SILU: tl.constexpr):
    s = tl.sigmoid(x)
    return x * s if SILU else s


@triton.jit
def row_of(t, accepted, pending):
    """The row of token t: those of the last call that are not accepted are passed over."""
    return t + tl.where(t >= accepted, pending - accepted, 0)


@triton.jit
def inputs_before(
    x_ptr, row_x, window, t, accepted, pending, o, m, channel, W: tl.constexpr, ONE: tl.constexpr
):
    """x_{t-W+1} .. x_{t-1}: those before the call's first token are in the window."""
    window_ptr, stride_c, stride_l, length = window
    xs = ()
    for j in tl.static_range(W - 1):
        back = W - 1 - j
        # the window's last column is the input before the call's first token
        p_w = window_ptr + channel.to(tl.int64) * stride_c + (length + t - back) * stride_l
        b_x = load(p_w, m & (t < back))
        if not ONE:
            # one of the two loads is masked: the sum is a choice
            row = row_of(t - back, accepted, pending)
            b_x += load(x_ptr + row * row_x + o, m & (t >= back))
        xs = xs + (b_x,)
    return xs


@triton.jit
def channels_of(
    o_k, o_c, i_k, i_h, HV,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_CHANNELS_FIRST: tl.constexpr,
):  # fmt: skip
    """The convolution's channels of q, k and v."""
    c_q, c_k, c_v = i_k * K + o_k, (H + i_k) * K + o_k, 2 * H * K + i_h * V + o_c
    # Mamba-2's order: x, B, C are v, k, q
    if V_CHANNELS_FIRST:
        c_q, c_k, c_v = HV * V + c_k, HV * V + c_q, i_h * V + o_c
    return c_q, c_k, c_v


@triton.jit
def taps_of(weight_ptr, bias_ptr, channel, m, W: tl.constexpr):
    """The columns of weight, and the bias."""
    # a tuple is registers of each thread, indexed when compiled
    ws = ()
    for j in tl.static_range(W):
        ws = ws + (load(weight_ptr + channel * W + j, m),)
    b_z = 0.0
    if bias_ptr is not None:
        b_z = load(bias_ptr + channel, m)
    return ws + (b_z,)


@triton.jit
def all_taps(weight_ptr, bias_ptr, channels, m_k, m_v, W: tl.constexpr):
    """Taps of q, k and v."""
    ws_q = taps_of(weight_ptr, bias_ptr, channels[0], m_k, W)
    ws_k = taps_of(weight_ptr, bias_ptr, channels[1], m_k, W)
    return ws_q, ws_k, taps_of(weight_ptr, bias_ptr, channels[2], m_v, W)


@triton.jit
def convolution(xs, ws, W: tl.constexpr, SILU: tl.constexpr):
    b_z = xs[W - 1] * ws[W - 1] + ws[W]
    for j in tl.static_range(W - 1):
        b_z += xs[j] * ws[j]
    return activation(b_z, True) if SILU else b_z


@triton.jit
def windows(
    pointers, rows, window, places, channels, t, accepted, pending,
    W: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """inputs_before of q, k and v."""
    o_k, o_c, m_k, m_v = places
    xs_q = inputs_before(
        pointers[0], rows[0], window, t, accepted, pending, o_k, m_k, channels[0], W, ONE
    )
    xs_k = inputs_before(
        pointers[1], rows[1], window, t, accepted, pending, o_k, m_k, channels[1], W, ONE
    )
    xs_v = inputs_before(
        pointers[2], rows[2], window, t, accepted, pending, o_c, m_v, channels[2], W, ONE
    )
    return xs_q, xs_k, xs_v


@triton.jit
def move_on(window, token, xs, channels, places, is_last, W: tl.constexpr):
    """The window becomes the last inputs: of q and k if this program is the last to read it."""
    window_ptr, stride_c, stride_l, length = window
    _, _, m_k, m_v = places
    for j in tl.static_range(W):
        column = length - W + j
        for i in tl.static_range(3):
            p_w = window_ptr + channels[i].to(tl.int64) * stride_c + column * stride_l
            # heads of v share the channels of q and k; a short window lacks the oldest columns
            m = (m_v if i == 2 else m_k & is_last) & (column >= 0)
            x = token[i] if j == W - 1 else xs[i][j]
            tl.store(p_w, x.to(window_ptr.dtype.element_ty), mask=m)


@triton.jit
def _convolved(
    x_ptr, window_ptr, w_ptr, b_ptr, o, m, C: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr
):
    """The convolution of channels o of a token, in its dtype; its window moves on."""
    xs = ()
    for j in tl.static_range(1, W):
        xs = xs + (tl.load(window_ptr + j * C + o, mask=m, other=0.0),)
    xs = xs + (tl.load(x_ptr + o, mask=m, other=0.0),)
    # every thread has read the window before any of them moves it
    tl.debug_barrier()
    for j in tl.static_range(W):
        tl.store(window_ptr + j * C + o, xs[j], mask=m)
    b_z = tl.zeros(o.shape, tl.float32)
    if b_ptr is not None:
        b_z += tl.load(b_ptr + o, mask=m, other=0.0).to(tl.float32)
    for j in tl.static_range(W):
        b_w = tl.load(w_ptr + o * W + j, mask=m, other=0.0).to(tl.float32)
        b_z += b_w * xs[j].to(tl.float32)
    if SILU:
        b_z *= tl.sigmoid(b_z)
    return b_z.to(x_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["row_g", "row_beta"])
def block_inputs_kernel(
    x_ptr, window_ptr, w_ptr, b_ptr, g_ptr, A_log_ptr, dt_bias_ptr, beta_ptr, counts_ptr,
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_block_ptr, row_x, row_g, row_beta, eps, lower_bound,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    DOUBLED: tl.constexpr, PER_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (H + HV, N): a head of q and of k, then one of v with its gates.

    x [N, C], C = 2 H K + HV V, window [N, W, C], g [N, HV] or [N, HV K], beta [N, HV]; blocks
    q, k [N, T, H, K], v [N, T, HV, V], decay [N, T, HV] or [N, T, HV, K], beta [N, T, HV]."""
    C: tl.constexpr = 2 * H * K + HV * V
    i, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = n * T + tl.load(counts_ptr + n).to(tl.int64)
    x_ptr += n * row_x
    window_ptr += n * (W * C)
    if i < H:
        # rows 0 and 1 of the tile are q and k of one head, so that one reduction takes both norms
        o_r, o_k = tl.arange(0, BR)[:, None], tl.arange(0, BK)[None, :]
        o_x, m_x = o_r * (H * K) + i * K + o_k, (o_k < K) & (o_r < 2)
        b_x = _convolved(x_ptr, window_ptr, w_ptr, b_ptr, o_x, m_x, C, W, SILU)
        # by way of memory: in one warp that loads a row as the norm's kernel does, as many lanes
        # share its sum, each of as many numbers
        o_y = row * (H * K) + i * K + o_k + 0 * o_r
        m_q, m_k = m_x & (o_r == 0), m_x & (o_r == 1)
        tl.store(q_ptr + o_y, b_x, mask=m_q)
        tl.store(k_ptr + o_y, b_x, mask=m_k)
        tl.debug_barrier()
        b_z = tl.load(q_ptr + o_y, mask=m_q, other=0.0).to(tl.float32)
        b_z += tl.load(k_ptr + o_y, mask=m_k, other=0.0).to(tl.float32)
        b_z *= tl.rsqrt(tl.sum(b_z * b_z, 1) + eps)[:, None]
        b_y = b_z.to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + o_y, b_y, mask=m_q)
        tl.store(k_ptr + o_y, b_y, mask=m_k)
    else:
        h = i - H
        o_v = tl.arange(0, BV)
        m_v, o_c = o_v < V, 2 * H * K + h * V + o_v
        b_v = _convolved(x_ptr, window_ptr, w_ptr, b_ptr, o_c, m_v, C, W, SILU)
        tl.store(v_ptr + row * (HV * V) + h * V + o_v, b_v, mask=m_v)
        b_beta = tl.sigmoid(tl.load(beta_ptr + n * row_beta + h).to(tl.float32))
        if DOUBLED:
            b_beta *= 2
        tl.store(beta_block_ptr + row * HV + h, b_beta.to(beta_block_ptr.dtype.element_ty))
        WIDTH: tl.constexpr = K if PER_CHANNEL else 1
        o_g = tl.arange(0, BK if PER_CHANNEL else 1)
        m_g, o_g = o_g < WIDTH, h * WIDTH + o_g
        rate = tl.exp(tl.load(A_log_ptr + h).to(tl.float32))
        b_a = tl.load(g_ptr + n * row_g + o_g, mask=m_g, other=0.0).to(tl.float32)
        if dt_bias_ptr is not None:
            b_a += tl.load(dt_bias_ptr + o_g, mask=m_g, other=0.0).to(tl.float32)
        if BOUNDED:
            b_g = lower_bound * tl.sigmoid(rate * b_a)
        else:
            b_g = -rate * softplus(b_a)
        tl.store(decay_ptr + row * (HV * WIDTH) + o_g, b_g, mask=m_g)


def block_inputs(t: TokenInputs, blocks: Blocks) -> None:
    N, T, H, K = blocks.q.shape
    if N > backends.GRID_ROWS:
        for x, g, beta, counts, *of in backends.row_parts(N, t.x, t.g, t.beta, t.counts, *blocks):
            block_inputs(t._replace(x=x, g=g, beta=beta, counts=counts), Blocks(*of))
        return
    HV, V = blocks.v.shape[2:]
    gate = t.g.flatten(1)
    rows = {"x": t.x, "g": gate, "beta": t.beta}
    rows = {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in rows.items()}
    launch_cache.cached(block_inputs_kernel)[(H + HV, N)](
        x_ptr=rows["x"],
        window_ptr=blocks.window,
        w_ptr=t.weight,
        b_ptr=t.bias,
        g_ptr=rows["g"],
        A_log_ptr=t.A_log,
        dt_bias_ptr=t.dt_bias,
        beta_ptr=rows["beta"],
        counts_ptr=t.counts,
        q_ptr=blocks.q,
        k_ptr=blocks.k,
        v_ptr=blocks.v,
        decay_ptr=blocks.g,
        beta_block_ptr=blocks.beta,
        **{f"row_{name}": x.stride(0) for name, x in rows.items()},
        eps=UNIT_EPS,
        lower_bound=0.0 if t.lower_bound is None else t.lower_bound,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BR=max(2, 256 // K),
        BK=triton.next_power_of_2(K),
        BV=triton.next_power_of_2(V),
        W=t.weight.shape[1],
        SILU=t.silu,
        DOUBLED=t.doubled,
        PER_CHANNEL=t.g.dim() == 3,
        BOUNDED=t.lower_bound is not None,
        num_warps=1,
    )
