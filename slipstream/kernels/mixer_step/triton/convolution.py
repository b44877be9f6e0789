"""The convolution of mixer_step's tokens, whose window of earlier inputs moves on in place."""

import triton
import triton.language as tl


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
    if V_CHANNELS_FIRST:
        c_q, c_k, c_v = HV * V + c_k, HV * V + c_q, i_h * V + o_c
    return c_q, c_k, c_v


@triton.jit
def taps_of(weight_ptr, bias_ptr, channel, m, W: tl.constexpr):
    """The columns of weight, and the bias."""
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
            m = (m_v if i == 2 else m_k & is_last) & (column >= 0)
            x = token[i] if j == W - 1 else xs[i][j]
            tl.store(p_w, x.to(window_ptr.dtype.element_ty), mask=m)
