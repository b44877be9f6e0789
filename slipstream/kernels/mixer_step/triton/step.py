"""One token, or a few, of a whole mixer in one launch.

    x_t = silu(bias + sum_j weight_j x_{t-W+1+j})       of the channels of q, k and v
    q, k = q / |q|, k / |k|;   v = dt v;   e = exp(g)
    r, s = S^T (e k), S^T (e q)
    x = beta (v - r), or v;  with gates of channels r = S^T (e beta k), x = write v - r
    o = scale (s + (q . k) x) + D u                     u: v before dt
    S <- e S + k x^T
    y = norm(o) weight f(z), or norm(o f(z)) weight     over groups of channels

A program has BV columns of the state of one head and sequence in registers, from its one read to
its one write; both of its sums over rows are of the state as it was read, so that none waits for
the other. A term that is not given is None, and its lines are not compiled.

A state V-first is a block [BV, K / WIDTH, WIDTH], WIDTH numbers a line of memory, so that few lanes
share a sum over rows. There the state's loads are issued before the convolution is done: no load
passes a barrier, and the token, with which the convolution begins, is loaded behind one.

What programs share, and why none reads what another has written:

    The window of the convolution of q and k is read by all programs of a head of q and k, and moves
    on in place. Each of them loads it and then adds 1 to the head's counter; the last one to do so
    writes. The loads have returned by then: a sum of what they brought has passed a barrier.
    Where a head has one program, that writes once all of its threads have read.
    A norm over more channels than a program has: each writes its o to `scratch` and then adds 1 to
    the group's counter; the last one reads them all, in one order, and writes y.

Drafts are verified without a copy of a state. A call has the drafts of the last call once more,
`pending` of them, and how many of those were accepted; it takes these, writes the state and the
window as they are then, and goes on with the new tokens, which leave no trace. So a rejected draft
costs nothing, and what is accepted is taken by the same arithmetic as if there had been no drafts,
but where ../sm90_kernels.py takes all tokens at once.

The last one takes what was counted off again, so counters are 0 between launches. They belong to a
slot of the pool, as what they guard does. So results do not depend on which program is last.
"""

import triton
import triton.language as tl

from slipstream.kernels.mixer_step.triton.block_inputs import (
    activation,
    all_taps,
    channels_of,
    convolution,
    load,
    move_on,
    row_of,
    windows,
)
from slipstream.kernels.primitives.device import prefetch, softplus, wait_for_earlier


@triton.jit
def scalar(p, i):
    """0 where there is none."""
    x = 0.0
    if p is not None:
        x = tl.load(p + i).to(tl.float32)
    return x


@triton.jit
def _token(
    pointers, rows, places, first, t, i_h, K: tl.constexpr, V: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """A program's inputs of token t: q, k, v, the gate with its bias, beta, write."""
    q_ptr, k_ptr, v_ptr, g_ptr, dt_bias_ptr, beta_ptr, write_ptr = pointers
    row_q, row_k, row_v, row_g, row_beta, row_write = rows
    o_k, o_c, m_k, m_v = places
    b_q = load(q_ptr + t * row_q + o_k, m_k)
    b_k = load(k_ptr + t * row_k + o_k, m_k)
    b_v = load(v_ptr + t * row_v + o_c, m_v)
    gate, beta, write = 0.0, 1.0, 1.0
    row = first + t
    if g_ptr is not None:
        if PER_CHANNEL:
            gate = load(g_ptr + row * row_g + i_h * K + o_k, m_k)
            if dt_bias_ptr is not None:
                gate += load(dt_bias_ptr + i_h * K + o_k, m_k)
        else:
            gate = tl.load(g_ptr + row * row_g + i_h).to(tl.float32)
            if dt_bias_ptr is not None:
                gate += tl.load(dt_bias_ptr + i_h).to(tl.float32)
    if write_ptr is not None:
        beta = load(beta_ptr + row * row_beta + i_h * K + o_k, m_k)
        write = load(write_ptr + row * row_write + i_h * V + o_c, m_v)
    elif beta_ptr is not None:
        beta = tl.load(beta_ptr + row * row_beta + i_h).to(tl.float32)
    return b_q, b_k, b_v, gate, beta, write


@triton.jit
def _count(counter_ptr, THREADS: tl.constexpr, SEM: tl.constexpr):
    """Counts a program. Its first thread has how many were there, and does not wait for it yet."""
    o = tl.arange(0, THREADS)
    one = tl.full([THREADS], 1, tl.int32)
    return tl.atomic_add(counter_ptr + 0 * o, one, mask=o == 0, sem=SEM)


@triton.jit
def _is_last(counter_ptr, counted, programs, THREADS: tl.constexpr):
    """Whether a program was the last of so many."""
    count = tl.sum(tl.where(tl.arange(0, THREADS) == 0, counted, 0), 0)
    is_last = count % programs == programs - 1
    if is_last:
        tl.atomic_add(counter_ptr, -programs, sem="relaxed")
    return is_last


@triton.jit
def _row_numbers(BK: tl.constexpr, WIDTH: tl.constexpr, V_FIRST: tl.constexpr):
    """Rows of a state, in its block's shape."""
    o = tl.arange(0, BK)
    if V_FIRST:
        o = (tl.arange(0, BK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])[None, :, :]
    else:
        o = o[:, None]
    return o


@triton.jit
def _rows_of(x, WIDTH: tl.constexpr, V_FIRST: tl.constexpr):
    """A vector of rows, to be combined with a state."""
    if V_FIRST:
        x = tl.reshape(x, (x.shape[0] // WIDTH, WIDTH))[None, :, :]
    else:
        x = x[:, None]
    return x


@triton.jit
def _block(
    p_s, o_c, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
    V_FIRST: tl.constexpr,
):  # fmt: skip
    """Columns of the head's state at p_s: where its numbers are, and which there are."""
    o_r, o_n = _row_numbers(BK, WIDTH, V_FIRST), _columns_of(o_c, V_FIRST)
    p_s += o_n * K + o_r if V_FIRST else o_r * V + o_n
    return p_s, (o_r < K) & (o_n < V)


@triton.jit
def _columns_of(x, V_FIRST: tl.constexpr):
    return x[:, None, None] if V_FIRST else x[None, :]


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _recurrence(
    b_s, b_q, b_k, b_x, dot, beta, write, beta_ptr, write_ptr,
    WIDTH: tl.constexpr, V_FIRST: tl.constexpr, BETA_SIGMOID: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
):  # fmt: skip
    """S^T q of the state after k x^T is added, and that state. x is beta (v - S^T k), or with write
    write v - S^T (beta k), or without beta v."""
    ROWS: tl.constexpr = 1 if V_FIRST else 0
    b_e = b_k
    if BETA_SIGMOID:
        beta, write = tl.sigmoid(beta) * BETA_FACTOR, tl.sigmoid(write)
    if write_ptr is not None:
        b_e, b_x = beta * b_k, write * b_x
    b_q, b_k = _rows_of(b_q, WIDTH, V_FIRST), _rows_of(b_k, WIDTH, V_FIRST)
    if beta_ptr is not None:
        b_o, b_r = tl.reduce((b_q * b_s, _rows_of(b_e, WIDTH, V_FIRST) * b_s), ROWS, _add2)
        if V_FIRST:
            b_o, b_r = tl.reduce((b_o, b_r), 1, _add2)
        b_x -= b_r
        if write_ptr is None:
            b_x *= beta
    else:
        b_o = tl.sum(b_q * b_s, ROWS)
        if V_FIRST:
            b_o = tl.sum(b_o, 1)
    return b_o + dot * b_x, b_s + b_k * _columns_of(b_x, V_FIRST)


@triton.jit
def rate_of(a, GATE: tl.constexpr):
    """How fast a head decays: of A, or of its negation's logarithm."""
    return -a if GATE == "rate" else tl.exp(a)


@triton.jit
def log_decay(x, rate, lower_bound, normalizer, dt_min, dt_max, GATE: tl.constexpr):
    """g of the gate before its activation, and dt."""
    dt = x
    if GATE == "softplus" or GATE == "rate":
        dt = tl.clamp(softplus(x), dt_min, dt_max, propagate_nan=tl.PropagateNan.ALL)
        x = -rate * dt
    if GATE == "sigmoid":
        x = lower_bound * tl.sigmoid(rate * x)
    if GATE == "logsigmoid":
        x = -softplus(-x) / normalizer
    return x, dt


@triton.jit
def is_last_of_group(counter_ptr, programs):
    """Counts a program that has written its channels, and says whether all have."""
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") % programs == programs - 1
    if is_last:
        tl.atomic_add(counter_ptr, -programs, sem="relaxed")
    return is_last


@triton.jit
def _norm_of_group(
    scratch_ptr, z_ptr, weight_ptr, y_ptr, z_row, i_h, i_g, eps,
    GROUP: tl.constexpr, V: tl.constexpr, WEIGHT_PER_HEAD: tl.constexpr,
    NORM_BEFORE_GATE: tl.constexpr, Z_SILU: tl.constexpr,
):  # fmt: skip
    """y of a token's group of channels, which other programs have left in scratch."""
    BG: tl.constexpr = 1024
    begin = i_g * GROUP - i_h * V  # of the group, from this head's channels
    scratch_ptr += i_g * GROUP
    b_sum = tl.zeros([BG], tl.float32)
    for c in range(0, GROUP, BG):
        o = c + tl.arange(0, BG)
        # not from the L1 cache, which may have what was there before
        b_u = tl.load(scratch_ptr + o, mask=o < GROUP, other=0.0, cache_modifier=".cg")
        b_sum += b_u * b_u
    b_rstd = tl.rsqrt(tl.sum(b_sum, 0) / GROUP + eps)
    for c in range(0, GROUP, BG):
        o = c + tl.arange(0, BG)
        m = o < GROUP
        b_y = tl.load(scratch_ptr + o, mask=m, other=0.0, cache_modifier=".cg") * b_rstd
        if weight_ptr is not None:
            b_y *= load(weight_ptr + (i_g * GROUP + o if WEIGHT_PER_HEAD else o % V), m)
        if z_ptr is not None and NORM_BEFORE_GATE:
            b_y *= activation(load(z_ptr + z_row + i_g * GROUP + o, m), Z_SILU)
        tl.store(y_ptr + begin + o, b_y.to(y_ptr.dtype.element_ty), mask=m)


@triton.jit
def _prefetch_share(pointer, i, elements: tl.constexpr):
    """The i-th share of a head's state, in 32 parts."""
    each: tl.constexpr = elements // 32
    p_p = pointer + (i * 32 + tl.arange(0, 32)) * each
    prefetch(p_p, each * pointer.dtype.element_ty.primitive_bitwidth // 8)


_SIZES = ["pending", "HV", "cache_slots", "length"]
_SIZES += ["row_q", "row_k", "row_v", "row_g", "row_beta", "row_write", "row_z", "row_y"]


@triton.jit(do_not_specialize=_SIZES)
def mixer_step_kernel(
    q_ptr,  # [B T, H, K]; so is k
    k_ptr,
    v_ptr,  # [B T, HV, V]; so are z, y and scratch
    g_ptr,  # [B T, HV], or [B T, HV, K] if PER_CHANNEL
    beta_ptr,  # [B T, HV], or [B T, HV, K] with write
    write_ptr,  # [B T, HV, V]
    z_ptr, y_ptr,
    state_ptr,  # [cache slots, HV, K, V], or [cache slots, HV, V, K] if V_FIRST
    index_ptr,  # [B]: the slot of each sequence; n if None
    accepted_ptr,  # [B]: how many of the first `pending` tokens count; all of T if None
    window_ptr,  # [cache slots, channels, length]
    conv_weight_ptr,  # [channels, W]
    conv_bias_ptr,
    A_ptr,  # [HV]
    dt_bias_ptr,  # [HV], or [HV, K] if PER_CHANNEL
    D_ptr,  # [HV]
    norm_weight_ptr,  # [V], or [HV, V] if WEIGHT_PER_HEAD
    scratch_ptr,  # float32; None where a program has all that is normalised together
    counter_ptr,  # [cache slots, H + groups]
    scale, eps, lower_bound, normalizer, dt_min, dt_max, T, pending: tl.int32, HV: tl.int32,
    cache_slots: tl.int64, length: tl.int32,
    row_q: tl.int64,  # from one token to the next
    row_k: tl.int64, row_v: tl.int64, row_g: tl.int64, row_beta: tl.int64, row_write: tl.int64,
    row_z: tl.int64, row_y: tl.int64, stride_state, stride_head,
    stride_window, stride_c, stride_l,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
    WIDTH: tl.constexpr,  # of lines of a state V-first
    HEADS_PER_K: tl.constexpr,
    ONE: tl.constexpr,  # T is 1
    THREADS: tl.constexpr, GROUP: tl.constexpr, V_FIRST: tl.constexpr,
    V_CHANNELS_FIRST: tl.constexpr, CONV_SILU: tl.constexpr, GATE: tl.constexpr,
    PER_CHANNEL: tl.constexpr, DT_SCALES_V: tl.constexpr, BETA_SIGMOID: tl.constexpr,
    BETA_FACTOR: tl.constexpr, L2_NORM: tl.constexpr, NORM: tl.constexpr,
    NORM_BEFORE_GATE: tl.constexpr, WEIGHT_PER_HEAD: tl.constexpr, Z_SILU: tl.constexpr,
    PDL: tl.constexpr = False, PREFETCH: tl.constexpr = False,
):  # fmt: skip
    """grid (ceil(V / BV) * HV * B,): one program takes BV columns of one head and sequence."""
    NV: tl.constexpr = (V + BV - 1) // BV
    HINT: tl.constexpr = "evict_first" if V_FIRST else ""
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_k, i_n = i_h // HEADS_PER_K, (pid // NV // HV).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_c = (pid % NV) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_c < V
    if PREFETCH:
        p_h = state_ptr + i_n * stride_state + i_h.to(tl.int64) * stride_head
        _prefetch_share(p_h, pid % NV, K * V // NV)
    wait_for_earlier(PDL)
    cache_slot = i_n
    if index_ptr is not None:
        cache_slot = tl.load(index_ptr + i_n).to(tl.int64)
    # loads that do not depend on the slot are issued before it is awaited
    first, first_y = i_n * T, i_n * (T - pending)
    accepted, steps = 0, T
    if accepted_ptr is not None:
        accepted = tl.minimum(tl.maximum(tl.load(accepted_ptr + i_n).to(tl.int32), 0), pending)
        steps = accepted + T - pending
    y_ptr += first_y * row_y + i_h * V
    q_ptr += first * row_q + i_k * K
    k_ptr += first * row_k + i_k * K
    v_ptr += first * row_v + i_h * V
    pointers = q_ptr, k_ptr, v_ptr, g_ptr, dt_bias_ptr, beta_ptr, write_ptr
    rows = row_q, row_k, row_v, row_g, row_beta, row_write
    places = o_k, o_c, m_k, m_v
    if ONE and not V_FIRST:
        token = _token(pointers, rows, places, first, 0, i_h, K, V, PER_CHANNEL)
    channels = channels_of(o_k, o_c, i_k, i_h, HV, H, K, V, V_CHANNELS_FIRST)
    ws_q, ws_k, ws_v = (), (), ()
    if window_ptr is not None:
        ws_q, ws_k, ws_v = all_taps(conv_weight_ptr, conv_bias_ptr, channels, m_k, m_v, W)
    rate, skip, b_w, b_z = scalar(A_ptr, i_h), scalar(D_ptr, i_h), 1.0, tl.zeros([BV], tl.float32)
    if z_ptr is not None and ONE:
        b_z = load(z_ptr + first * row_z + i_h * V + o_c, m_v)
    if norm_weight_ptr is not None and scratch_ptr is None:
        b_w = load(norm_weight_ptr + (i_h * V if WEIGHT_PER_HEAD else 0) + o_c, m_v)
    if (cache_slot < 0) | (cache_slot >= cache_slots):
        for t in range(T - pending):
            tl.store(y_ptr + t * row_y + o_c, tl.zeros([BV], y_ptr.dtype.element_ty), mask=m_v)
        return
    if counter_ptr is not None:
        counter_ptr += cache_slot * (H + HV * V // GROUP)
    if window_ptr is not None:
        window_ptr += cache_slot * stride_window
    window = window_ptr, stride_c, stride_l, length
    if ONE and window_ptr is not None:
        xs = windows(pointers, rows, window, places, channels, 0, 0, 0, W, ONE)
    p_s = state_ptr + cache_slot * stride_state + i_h.to(tl.int64) * stride_head
    p_s, m_s = _block(p_s, o_c, K, V, BK, WIDTH, V_FIRST)
    b_s = tl.load(p_s, mask=m_s, other=0.0, eviction_policy=HINT)
    if ONE and V_FIRST:
        tl.debug_barrier()
        token = _token(pointers, rows, places, first, 0, i_h, K, V, PER_CHANNEL)
    b_s = b_s.to(tl.float32)
    rate, counted = rate_of(rate, GATE), tl.zeros([THREADS], tl.int32)
    SHARED: tl.constexpr = window_ptr is not None and HEADS_PER_K * NV > 1
    last = T - 1 if accepted_ptr is None else accepted - 1
    for t in range(steps):
        if not ONE:
            row = row_of(t, accepted, pending)
            if z_ptr is not None:
                b_z = load(z_ptr + (first + row) * row_z + i_h * V + o_c, m_v)
            token = _token(pointers, rows, places, first, row, i_h, K, V, PER_CHANNEL)
        b_q, b_k, b_v, gate, beta, write = token
        if window_ptr is not None:
            if not ONE:
                xs = windows(pointers, rows, window, places, channels, t, accepted, pending, W, ONE)
            b_q = convolution(xs[0] + (b_q,), ws_q, W, CONV_SILU)
            b_k = convolution(xs[1] + (b_k,), ws_k, W, CONV_SILU)
            b_v = convolution(xs[2] + (b_v,), ws_v, W, CONV_SILU)
        qq, kk, dot = tl.reduce((b_q * b_q, b_k * b_k, b_q * b_k), 0, _add3)
        if SHARED and ONE:
            counted = _count(counter_ptr + i_k, THREADS, "relaxed")
        if L2_NORM:
            rq, rk = tl.rsqrt(qq + 1e-6), tl.rsqrt(kk + 1e-6)
            b_q, b_k, dot = b_q * rq, b_k * rk, dot * rq * rk
        b_x = b_v
        if g_ptr is not None:
            g, dt = log_decay(gate, rate, lower_bound, normalizer, dt_min, dt_max, GATE)
            b_s *= _rows_of(tl.exp(g), WIDTH, V_FIRST) if PER_CHANNEL else tl.exp(g)
            if DT_SCALES_V:
                b_x *= dt
        b_o, b_s = _recurrence(
            b_s, b_q, b_k, b_x, dot, beta, write, beta_ptr, write_ptr,
            WIDTH, V_FIRST, BETA_SIGMOID, BETA_FACTOR,
        )  # fmt: skip
        b_o = b_o * scale + skip * b_v
        if t == last:
            tl.store(p_s, b_s.to(p_s.dtype.element_ty), mask=m_s, eviction_policy=HINT)
        if z_ptr is not None:
            b_z = activation(b_z, Z_SILU)
            if not NORM_BEFORE_GATE:
                b_o *= b_z
        if scratch_ptr is not None:
            p_o = scratch_ptr + ((first_y + t - accepted) * HV + i_h) * V + o_c
            tl.store(p_o, b_o, mask=m_v & (t >= accepted))
        else:
            if NORM:
                b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) / V + eps) * b_w
            if z_ptr is not None and NORM_BEFORE_GATE:
                b_o *= b_z
            p_y = y_ptr + (t - accepted) * row_y + o_c
            tl.store(p_y, b_o.to(y_ptr.dtype.element_ty), mask=m_v & (t >= accepted))
    if window_ptr is not None and last >= 0:
        if not ONE:
            token = _token(pointers, rows, places, first, last, i_h, K, V, PER_CHANNEL)
            xs = windows(pointers, rows, window, places, channels, last, accepted, pending, W, ONE)
        tl.debug_barrier()  # all threads have read
        is_last = True
        if SHARED:
            if not ONE:
                counted = _count(counter_ptr + i_k, THREADS, "acq_rel")
            is_last = _is_last(counter_ptr + i_k, counted, HEADS_PER_K * NV, THREADS)
        move_on(window, token, xs, channels, places, is_last, W)
    if scratch_ptr is not None:
        tl.debug_barrier()  # all threads have written
        i_g, programs = i_h * V // GROUP, GROUP // V * NV
        if is_last_of_group(counter_ptr + H + i_g, programs):
            for t in range(T - pending):
                _norm_of_group(
                    scratch_ptr + (first_y + t) * HV * V, z_ptr, norm_weight_ptr,
                    y_ptr + t * row_y, (first + t + pending) * row_z, i_h, i_g, eps,
                    GROUP, V, WEIGHT_PER_HEAD, NORM_BEFORE_GATE, Z_SILU,
                )  # fmt: skip
