"""Drafts of a mixer in one launch on sm_90: the last call's, of which some count, and new ones.

As triton/step.py has it of one token, for 16 bits and gates of heads, but all tokens are rows of a
block. With the state S before the call, d_t the decay up to token t, and d_ts of those behind s:

    r_t = S^T (d_t k_t) + sum_{s<t} d_ts (k_t . k_s) x_s          x_t = beta (v_t - r_t)
    o_t = S^T (d_t q_t) + sum_{s<=t} d_ts (q_t . k_s) x_s
    S <- d_a S + sum_{s<=a} d_as k_s x_s^T                        a: the last accepted token

    rows r      0 .. T - 1         T .. T + N - 1                 P: the last call's of the T tokens
    of          keys               queries of the N new tokens

A program takes a head and sequence. It asks for the state, makes rows and their products with each
other while that is on its way, and reads and writes it in one layout: S^T, columns by rows, as mma
leaves a sum, which is also how it takes a left operand. So the state never passes shared memory:

    y [V, rows] = S^T rows^T -> x, o, token by token -> S^T d_a + x [V, P] keys [P, K], in place

Which rows and columns of S a thread has is free, since products sum over rows in any order: it has
2 or 4 neighbours in memory. Products are of three pairs of halves in bf16. Decays are exp of sums
of logarithms, never quotients. A draft that was not accepted has a decay of 1, and a key and an x
of 0. No token touches what belongs to one before it, so that NaN in a draft leaves no trace in S.

There is one launch, and no memory beyond the result and the counters of windows.
"""

from typing import Any

from slipstream.kernels.mixer_step.inputs import StepInputs, StepOptions
from slipstream.kernels.mixer_step.triton import block_inputs, step
from slipstream.kernels.primitives.sm90 import gl, gluon
from slipstream.kernels.primitives.sm90_device import halves
from slipstream.runtime.launch_cache import cached

mma_v2 = gl.nvidia.hopper.mma_v2
ROWS = gl.constexpr(16)
BK = gl.constexpr(32)  # rows of a state at a time


@gluon.constexpr_function
def _state_layout(V: int, V_FIRST: bool) -> gl.DistributedLinearLayout:
    """Of BK rows of a state as they are in memory, so that `_turned` is in mma's layout."""
    warps = [16, 32, 64][: (V // 16).bit_length() - 1]
    if V_FIRST:
        return gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [8, 0], [0, 16]],
            [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
            [[w, 0] for w in warps],
            [],
            [V, 32],
        )
    return gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [8, 0], [16, 0]],
        [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        [[0, w] for w in warps],
        [],
        [32, V],
    )


@gluon.jit
def _places(p_s, layout: gl.constexpr, K: gl.constexpr, V: gl.constexpr, V_FIRST: gl.constexpr):
    """Of the first BK rows of the state at p_s."""
    if V_FIRST:
        o_c = gl.arange(0, V, gl.SliceLayout(1, layout))
        p_s += o_c[:, None] * K + gl.arange(0, BK, gl.SliceLayout(0, layout))[None, :]
    else:
        o_k = gl.arange(0, BK, gl.SliceLayout(1, layout))
        p_s += o_k[:, None] * V + gl.arange(0, V, gl.SliceLayout(0, layout))[None, :]
    return p_s


@gluon.jit
def _columns(o_c, V_FIRST: gl.constexpr):
    """Which of a state's columns each row of S^T is."""
    if not V_FIRST:
        o_c = (o_c & -16) + (o_c & 7) * 2 + ((o_c & 8) >> 3)
    return o_c


@gluon.jit
def _rows_turned(b, V_FIRST: gl.constexpr):
    """The last dimension, a state's rows, in the order of S^T."""
    if V_FIRST:
        M: gl.constexpr = b.shape[0]
        K: gl.constexpr = b.shape[1]
        b = gl.permute(gl.reshape(b, [M, K // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
        b = gl.reshape(b, [M, K])
    return b


@gluon.jit
def _turned(b, layout: gl.constexpr, V_FIRST: gl.constexpr):
    """BK rows of S as they are in memory -> S^T [V, BK]."""
    b = b.to(gl.float32)
    if V_FIRST:
        b = _rows_turned(b, True)
    else:
        V: gl.constexpr = b.shape[1]
        b = gl.permute(gl.reshape(b, [BK, V // 16, 8, 2]), (1, 3, 2, 0))
        b = gl.reshape(b, [V, BK])
    return gl.convert_layout(b, layout, assert_trivial=True)


@gluon.jit
def _turned_back(b, layout: gl.constexpr, V_FIRST: gl.constexpr):
    V: gl.constexpr = b.shape[0]
    if V_FIRST:
        b = gl.permute(gl.reshape(b, [V, BK // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
        b = gl.reshape(b, [V, BK])
    else:
        b = gl.permute(gl.reshape(b, [V // 16, 2, 8, BK]), (3, 0, 2, 1))
        b = gl.reshape(b, [BK, V])
    return gl.convert_layout(b, layout, assert_trivial=True)


@gluon.jit
def _lefts(b, layout: gl.constexpr):
    """Halves of b as left operands."""
    high, low = halves(b)
    return gl.convert_layout(high, layout), gl.convert_layout(low, layout)


@gluon.jit
def _product(a, b, acc):
    """acc and a b, of halves each, but for the product of both low ones: below 2^-16."""
    acc = mma_v2(a[0], b[1], acc)
    acc = mma_v2(a[1], b[0], acc)
    return mma_v2(a[0], b[0], acc)


@gluon.jit
def _in_shared_memory(b_x, V_FIRST: gl.constexpr):
    """Halves of rows."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    K: gl.constexpr = b_x.shape[1]
    high, low = halves(b_x)
    return (
        gl.allocate_shared_memory(gl.bfloat16, [ROWS, K], layout, _rows_turned(high, V_FIRST)),
        gl.allocate_shared_memory(gl.bfloat16, [ROWS, K], layout, _rows_turned(low, V_FIRST)),
    )


@gluon.jit
def _operand(x_s, j: gl.constexpr, layout: gl.constexpr, ACROSS: gl.constexpr):
    """BK columns of rows, as an operand, or these columns as rows."""
    high, low = x_s[0].slice(j * BK, BK, 1), x_s[1].slice(j * BK, BK, 1)
    if ACROSS:
        high, low = high.permute((1, 0)), low.permute((1, 0))
    return high.load(layout), low.load(layout)


@gluon.jit
def _inputs(first, second, is_first, at, o, m):
    """Rows `at` of the first or the second tensor: one of two loads is masked."""
    b_x = block_inputs.load(first[0] + at * first[1] + o, m & is_first)
    if second is not None:
        b_x += block_inputs.load(second[0] + at * second[1] + o, m & (is_first == 0))
    return b_x


@gluon.jit
def _convolved(
    first, second, is_first, tokens, o, channel, m, window, weight_ptr, bias_ptr,
    P: gl.constexpr, W: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """What comes of inputs. tokens: which each row is, its place among the tokens that count, and
    how many of the first P do."""
    token, place, accepted = tokens
    window_ptr, stride_c, stride_l, length = window
    b_x = _inputs(first, second, is_first, token, o, m)
    if window_ptr is not None:
        b_x *= block_inputs.load(weight_ptr + channel * W + (W - 1), m)
        if bias_ptr is not None:
            b_x += block_inputs.load(bias_ptr + channel, m)
        for back in gl.static_range(1, W):
            at = place - back
            source = at + gl.where(at >= accepted, P - accepted, 0)
            p_w = window_ptr + channel.to(gl.int64) * stride_c + (length + at) * stride_l
            b_y = _inputs(first, second, is_first, source, o, m & (at >= 0))
            b_x += (b_y + block_inputs.load(p_w, m & (at < 0))) * block_inputs.load(
                weight_ptr + channel * W + (W - 1 - back), m
            )
        if SILU:
            b_x = block_inputs.activation(b_x, True)
    return gl.where(m, b_x, 0.0)


@gluon.jit
def _rows(o_r, accepted, P: gl.constexpr, N: gl.constexpr):
    """Of rows: whether they are queries, their tokens, and whether these count."""
    T: gl.constexpr = P + N
    is_q = o_r >= T
    token = gl.where(is_q, o_r - N, o_r)
    return is_q, token, (o_r < T + N) & ((token >= P) | (token < accepted))


@gluon.jit
def _beta(beta_ptr, row_beta, first, i_h, rows, o_r, SIGMOID: gl.constexpr, FACTOR: gl.constexpr):
    """beta of keys, and the sign of what is subtracted: of keys x = beta (v - r), or v; of queries
    the sums themselves."""
    is_q, _, alive = rows
    beta = gl.where(is_q, 0.0, 1.0)
    sign = 1.0 - beta
    if beta_ptr is not None:
        beta = block_inputs.load(beta_ptr + (first + o_r) * row_beta + i_h, alive & (is_q == 0))
        if SIGMOID:
            beta = FACTOR / (1.0 + gl.exp(-beta))
        sign = gl.where(is_q, 1.0, -beta)
    return beta, sign


@gluon.jit
def _gate(
    gates, first, i_h, accepted, layout: gl.constexpr, P: gl.constexpr, N: gl.constexpr,
    GATE: gl.constexpr,
):  # fmt: skip
    """Logarithms of the tokens' decays, 0 of what does not count."""
    g_ptr, row_g, A_ptr, dt_bias_ptr, lower_bound, normalizer, dt_min, dt_max = gates
    gate = gl.zeros([ROWS], gl.float32, layout)
    if g_ptr is not None:
        o_r = gl.arange(0, ROWS, layout)
        is_q, _, alive = _rows(o_r, accepted, P, N)
        m_g = alive & (is_q == 0)
        gate = block_inputs.load(g_ptr + (first + o_r) * row_g + i_h, m_g) + step.scalar(
            dt_bias_ptr, i_h
        )
        rate = step.rate_of(step.scalar(A_ptr, i_h), GATE)
        gate, _ = step.log_decay(gate, rate, lower_bound, normalizer, dt_min, dt_max, GATE)
        gate = gl.where(m_g, gate, 0.0)
    return gate


@gluon.jit
def _decays(gate, accepted, ul: gl.constexpr, P: gl.constexpr, N: gl.constexpr):
    """Logarithms of the decays behind each row s up to the token of each row t, [s, t]; in shared
    memory the decays up to each row's token, and of each key to the end; that of the state."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    # all tokens in a thread, beside rows t or s
    by_t: gl.constexpr = gl.SliceLayout(0, ul)
    by_s: gl.constexpr = gl.SliceLayout(1, ul)
    # through shared memory, so that each thread has all of them
    gate_s = gl.allocate_shared_memory(gl.float32, [ROWS], flat, gate)
    e_t, e_s = gate_s.load(gl.SliceLayout(0, by_t)), gate_s.load(gl.SliceLayout(0, by_s))
    u_t = gl.arange(0, ROWS, gl.SliceLayout(0, by_t))
    u_s = gl.arange(0, ROWS, gl.SliceLayout(0, by_s))
    o_s = gl.arange(0, ROWS, gl.SliceLayout(1, by_s))
    _, token, _ = _rows(gl.arange(0, ROWS, gl.SliceLayout(1, by_t)), accepted, P, N)
    upto, behind = u_t[None, :] <= token[:, None], u_s[None, :] > o_s[:, None]
    b_t = gl.sum(gl.where(upto, e_t[None, :], 0.0), 1)
    b_s = gl.sum(gl.where(behind & (u_s < P)[None, :], e_s[None, :], 0.0), 1)
    upto_s = gl.allocate_shared_memory(gl.float32, [ROWS], flat, gl.exp(b_t))
    behind_s = gl.allocate_shared_memory(gl.float32, [ROWS], flat, gl.exp(b_s))
    both = upto[None, :, :] & behind[:, None, :]
    between = gl.sum(gl.where(both, e_t[None, :][None, :, :], 0.0), 2)
    return between, upto_s, behind_s, gl.exp(gl.sum(gl.where(u_t < P, e_t, 0.0), 0))


@gluon.jit
def _products_of_two(
    x_s, between, rows_t, sign_t, ml: gl.constexpr, tl: gl.constexpr, K: gl.constexpr
):
    """[s, t], to be indexed by s: what row t takes of x of row s."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    wa: gl.constexpr = gl.DotOperandLayout(0, ml, 2)
    wb: gl.constexpr = gl.DotOperandLayout(1, ml, 2)
    is_q, token, alive = rows_t
    b_m = gl.zeros([ROWS, ROWS], gl.float32, ml)  # the same in each warp
    for j in gl.static_range(K // BK):
        b_m = _product(_operand(x_s, j, wa, False), _operand(x_s, j, wb, True), b_m)
    b_m = gl.convert_layout(b_m, tl) * gl.exp(between) * sign_t[None, :]
    o_s = gl.arange(0, ROWS, gl.SliceLayout(1, tl))
    sees = o_s[:, None] < (token + is_q.to(gl.int32))[None, :]
    b_m = gl.where(sees & alive[None, :], b_m, 0.0)
    m_s = gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], plain, b_m)
    return m_s._reinterpret(gl.float32, [ROWS, ROWS], flat)  # the same memory


@gluon.jit
def _normed(
    b_o, z_ptr, z_row, m_o, weight_ptr, i_h, o_c, eps, NORM: gl.constexpr,
    NORM_BEFORE_GATE: gl.constexpr, WEIGHT_PER_HEAD: gl.constexpr, Z_SILU: gl.constexpr,
):  # fmt: skip
    """The gate and the norm of outputs, columns by rows."""
    V: gl.constexpr = b_o.shape[0]
    if z_ptr is not None:
        b_z = block_inputs.activation(block_inputs.load(z_ptr + z_row, m_o), Z_SILU)
        if not (NORM and NORM_BEFORE_GATE):
            b_o *= b_z
    if NORM:
        b_o *= gl.rsqrt(gl.sum(b_o * b_o, 0) / V + eps)[None, :]
        if weight_ptr is not None:
            b_o *= block_inputs.load(
                weight_ptr + (i_h * V if WEIGHT_PER_HEAD else 0) + o_c, o_c >= 0
            )[:, None]
        if z_ptr is not None and NORM_BEFORE_GATE:
            b_o *= b_z
    return b_o


@gluon.jit
def _move_on(
    pointers, strides, window, o_k, o_c, heads, counter_ptr, accepted, P: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr,
    HEADS_PER_K: gl.constexpr, V_CHANNELS_FIRST: gl.constexpr,
):  # fmt: skip
    """The window of an accepted draft; of q and k by the last program that has read it."""
    i_k, i_h, HV = heads
    places = o_k, o_c, o_k >= 0, o_c >= 0
    channels = block_inputs.channels_of(o_k, o_c, i_k, i_h, HV, H, K, V, V_CHANNELS_FIRST)
    last = accepted - 1
    ended = (
        block_inputs.load(pointers[0] + last * strides[0] + o_k, places[2]),
        block_inputs.load(pointers[1] + last * strides[1] + o_k, places[2]),
        block_inputs.load(pointers[2] + last * strides[2] + o_c, places[3]),
    )
    xs = block_inputs.windows(
        pointers, strides, window, places, channels, last, accepted, P, W, False
    )
    gl.thread_barrier()  # all threads have read
    is_last = True
    if HEADS_PER_K > 1:
        is_last = step.is_last_of_group(counter_ptr + i_k, HEADS_PER_K)
    block_inputs.move_on(window, ended, xs, channels, places, is_last, W)


@gluon.jit(do_not_specialize=["HV", "cache_slots", "length"])
def mixer_drafts_sm90_kernel(
    q_ptr,  # [B (P + N), H, K], and all the others as mixer_step_kernel has them
    k_ptr, v_ptr, g_ptr, beta_ptr, z_ptr, y_ptr, state_ptr, index_ptr,
    accepted_ptr,  # [B]: how many of the first P tokens count
    window_ptr, conv_weight_ptr, conv_bias_ptr, A_ptr, dt_bias_ptr, norm_weight_ptr, counter_ptr,
    scale, eps, lower_bound, normalizer, dt_min, dt_max, HV: gl.int32, cache_slots: gl.int64,
    length: gl.int32, row_q: gl.int64, row_k: gl.int64, row_v: gl.int64, row_g: gl.int64,
    row_beta: gl.int64, row_z: gl.int64, row_y: gl.int64,
    stride_state, stride_head, stride_window, stride_c, stride_l,
    P: gl.constexpr, N: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    W: gl.constexpr, HEADS_PER_K: gl.constexpr, V_FIRST: gl.constexpr,
    V_CHANNELS_FIRST: gl.constexpr, CONV_SILU: gl.constexpr, GATE: gl.constexpr,
    BETA_SIGMOID: gl.constexpr, BETA_FACTOR: gl.constexpr, L2_NORM: gl.constexpr,
    NORM: gl.constexpr, NORM_BEFORE_GATE: gl.constexpr, WEIGHT_PER_HEAD: gl.constexpr,
    Z_SILU: gl.constexpr,
):  # fmt: skip
    """grid (HV * B,), V / 16 warps."""
    T: gl.constexpr = P + N
    WARPS: gl.constexpr = V // 16
    ml: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    wa: gl.constexpr = gl.DotOperandLayout(0, ml, 2)
    wb: gl.constexpr = gl.DotOperandLayout(1, ml, 2)
    sl: gl.constexpr = _state_layout(V, V_FIRST)
    xl: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0])
    # products of two rows, a number a thread, and for each all tokens
    ul: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 16, 1], [WARPS, 1, 1], [2, 1, 0])
    tl: gl.constexpr = gl.SliceLayout(2, ul)
    # a channel a thread
    vl: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    pid = gl.program_id(0)
    i_h, i_n = pid % HV, (pid // HV).to(gl.int64)
    i_k = i_h // HEADS_PER_K
    cache_slot = i_n
    if index_ptr is not None:
        cache_slot = gl.load(index_ptr + i_n).to(gl.int64)
    accepted = gl.load(accepted_ptr + i_n).to(gl.int32)
    accepted = gl.minimum(gl.maximum(accepted, 0), P)
    first, first_y = i_n * T, i_n * N
    y_ptr += first_y * row_y + i_h * V
    q_ptr += first * row_q + i_k * K
    k_ptr += first * row_k + i_k * K
    v_ptr += first * row_v + i_h * V
    o_c = _columns(gl.arange(0, V, gl.SliceLayout(1, ml)), V_FIRST)
    o_r = gl.arange(0, ROWS, gl.SliceLayout(0, ml))
    rows = _rows(o_r, accepted, P, N)
    is_q, token, alive = rows
    p_y = y_ptr + (o_r - T)[None, :] * row_y + o_c[:, None]
    # no such slot: zeros, and nothing is written
    if (cache_slot < 0) | (cache_slot >= cache_slots):
        m_y = (is_q & (o_r < T + N))[None, :] & (o_c >= 0)[:, None]
        gl.store(p_y, gl.zeros([V, ROWS], y_ptr.dtype.element_ty, ml), mask=m_y)
        return

    # the state is on its way while rows are made
    p_s = state_ptr + cache_slot * stride_state + i_h.to(gl.int64) * stride_head
    p_s = _places(p_s, sl, K, V, V_FIRST)
    STEP: gl.constexpr = BK if V_FIRST else BK * V
    loaded = ()
    for j in gl.static_range(K // BK):
        loaded = loaded + (gl.load(p_s + j * STEP),)

    if window_ptr is not None:
        window_ptr += cache_slot * stride_window
    window = window_ptr, stride_c, stride_l, length
    # rows of keys and queries, by rows; and v, by columns
    o_k = gl.arange(0, K, gl.SliceLayout(0, xl))
    o_x = gl.arange(0, ROWS, gl.SliceLayout(1, xl))
    q_x, token_x, alive_x = _rows(o_x, accepted, P, N)
    # new tokens follow the accepted ones, not all that the last call was given
    place = gl.where(token_x < P, token_x, token_x - P + accepted)
    c_q, c_k, _ = block_inputs.channels_of(o_k, o_k, i_k, i_h, HV, H, K, V, V_CHANNELS_FIRST)
    channel = gl.where(q_x[:, None], c_q[None, :], c_k[None, :])
    m_x = alive_x[:, None] & (o_k >= 0)[None, :]
    b_x = _convolved(
        (q_ptr, row_q), (k_ptr, row_k), q_x[:, None], (token_x[:, None], place[:, None], accepted),
        o_k[None, :], channel, m_x, window, conv_weight_ptr, conv_bias_ptr, P, W, CONV_SILU,
    )  # fmt: skip
    place = gl.where(token < P, token, token - P + accepted)
    _, _, c_v = block_inputs.channels_of(o_c, o_c, i_k, i_h, HV, H, K, V, V_CHANNELS_FIRST)
    m_v = (alive & (is_q == 0))[None, :] & (o_c >= 0)[:, None]
    b_v = _convolved(
        (v_ptr, row_v), None, m_v, (token[None, :], place[None, :], accepted), o_c[:, None],
        c_v[:, None], m_v, window, conv_weight_ptr, conv_bias_ptr, P, W, CONV_SILU,
    )  # fmt: skip
    # asked for here, and not behind the barriers of products
    beta, sign = _beta(beta_ptr, row_beta, first, i_h, rows, o_r, BETA_SIGMOID, BETA_FACTOR)
    if L2_NORM:
        b_x *= gl.rsqrt(gl.sum(b_x * b_x, 1) + 1e-6)[:, None]
    x_s = _in_shared_memory(b_x, V_FIRST)
    # accepted keys alone: a product with others would bring their NaN
    e_s = _in_shared_memory(gl.where(((o_x < P) & alive_x)[:, None], b_x, 0.0), V_FIRST)
    gates = g_ptr, row_g, A_ptr, dt_bias_ptr, lower_bound, normalizer, dt_min, dt_max
    gate = _gate(gates, first, i_h, accepted, gl.SliceLayout(0, tl), P, N, GATE)
    between, upto_s, behind_s, end = _decays(gate, accepted, ul, P, N)
    o_t = gl.arange(0, ROWS, gl.SliceLayout(0, tl))
    rows_t = _rows(o_t, accepted, P, N)
    _, sign_t = _beta(beta_ptr, row_beta, first, i_h, rows_t, o_t, BETA_SIGMOID, BETA_FACTOR)
    m_s = _products_of_two(x_s, between, rows_t, sign_t, ml, tl, K)

    # the state's only use before its update: all rows at once
    states = ()
    b_y = gl.zeros([V, ROWS], gl.float32, ml)
    for j in gl.static_range(K // BK):
        b_s = _turned(loaded[j], ml, V_FIRST)
        b_y = _product(_lefts(b_s, wa), _operand(x_s, j, wb, True), b_y)
        states = states + (b_s,)
    b_y *= (upto_s.load(gl.SliceLayout(0, ml)) * sign)[None, :]
    b_y += gl.where(is_q[None, :], 0.0, b_v * beta[None, :])
    b_y = gl.where(alive[None, :], b_y, 0.0)
    # only x goes from token to token; nothing before a token is touched, not even by 0 times NaN
    for t in gl.static_range(T):
        b_t = gl.sum(gl.where((o_r == t)[None, :], b_y, 0.0), 1)
        m_t = m_s.index(t).load(gl.SliceLayout(0, ml))
        after = (token + is_q.to(gl.int32) > t)[None, :]
        b_y = gl.where(after, b_y + b_t[:, None] * m_t[None, :], b_y)
    # without an accepted token the state stays as it is
    if accepted > 0:
        b_e = b_y * behind_s.load(gl.SliceLayout(0, ml))[None, :]
        left = _lefts(gl.where((o_r < P)[None, :], b_e, 0.0), wa)
        for j in gl.static_range(K // BK):
            b_new = _product(left, _operand(e_s, j, wb, False), states[j] * end)
            b_new = _turned_back(b_new, sl, V_FIRST).to(state_ptr.dtype.element_ty)
            gl.store(p_s + j * STEP, b_new)

    m_o = (is_q & alive)[None, :] & (o_c >= 0)[:, None]
    z_row = (first + token)[None, :] * row_z + i_h * V + o_c[:, None]
    b_o = _normed(
        b_y * scale, z_ptr, z_row, m_o, norm_weight_ptr, i_h, o_c, eps,
        NORM, NORM_BEFORE_GATE, WEIGHT_PER_HEAD, Z_SILU,
    )  # fmt: skip
    gl.store(p_y, b_o.to(y_ptr.dtype.element_ty), mask=m_o)
    if (window_ptr is not None) and (accepted > 0):
        if counter_ptr is not None:
            counter_ptr += cache_slot * (H + HV)
        _move_on(
            (q_ptr, k_ptr, v_ptr), (row_q, row_k, row_v), window, gl.arange(0, K, vl),
            gl.arange(0, V, vl), (i_k, i_h, HV), counter_ptr, accepted, P, H, K, V, W, HEADS_PER_K,
            V_CHANNELS_FIRST,
        )  # fmt: skip


# what mixer_step_kernel is arguments beside
_ONLY_STEP = ("write_ptr", "row_write", "pending", "D_ptr", "DT_SCALES_V", "GROUP")


def drafts(arguments: dict[str, Any], inputs: StepInputs, options: StepOptions) -> None:
    """arguments: arguments of mixer_step_kernel."""
    B, T, H, HV, K, V = inputs.sizes
    cached(mixer_drafts_sm90_kernel)[HV * B,](
        **{name: x for name, x in arguments.items() if name not in _ONLY_STEP},
        P=options.pending,
        N=T - options.pending,
        HV=HV,
        H=H,
        K=K,
        V=V,
        HEADS_PER_K=HV // H,
        num_warps=V // 16,
        maxnreg=128,
    )
