"""Per-channel decay on sm_90, delta rule or free a and b: gradients of q, k, a, b and the gates.

The sums of the portable dplr_grads.py. With r = q P, s = a P_prev (delta: -beta k P), w = b N and
u = k N, in 16 bits,

    dr = exp(early) scale do S^T + dqb w + dqk u        dq = P (dr + own w + own' u)
    ds = exp(early) y S^T        + dab w + dak u        da = P_prev ds
    dw = exp(late) x dS'^T + dqb^T r + dab^T s          db = N (dw + own r)
    du = exp(late) v dS'^T + dqk^T r + dak^T s          dk = N (du + own' r)

where own and own' are the gradients of the scores of pairs (i, i), whose P N is 1, and

    dg_t = z + sum over i >= t of (r dr - w dw - u du)_i + sum over i > t of (s ds)_i
    z    = exp(G_C) sum over V of S dS' + sum over i of (w exp(late) x dS'^T + u ...)_i

The differences are of the same rounded factors, so that what cancels does so to the last bits.
Every operand comes by TMA into a buffer of its own; one warp loads those of the next chunk as soon
as the others, which share the channels of K, have done with them. What goes to global memory is
stored after a fence rather than before, which would wait for it. Strong chunks are computed, too:
dplr_level_grads.py, which comes later, writes over them.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from slipstream.kernels.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.linear.hopper.delta_solve import halves
from slipstream.kernels.linear.hopper.dplr_grads_parts import (
    LOG2E,
    clear,
    load_part,
    products_of_states,
    seen,
    store_gates,
)
from slipstream.kernels.linear.hopper.parts import place, ring


@gluon.jit
def grads_part(
    ss, ds, os, ys, xs, vs, ops, gs, scores, full, empty,
    beta_ptr, own_ptr, dq_ptr, dk_ptr, da_ptr, db_ptr, dg_ptr, dbeta_ptr, cu_ptr,
    scale, total, tokens, T, N, HV,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, NK: gl.constexpr, wide: gl.constexpr,
    DELTA: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    act: gl.constexpr = ss.dtype
    cl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, wide], [16, K // wide, 16])
    ca: gl.constexpr = gl.DotOperandLayout(0, cl, 2)
    o_c = gl.arange(0, C, gl.SliceLayout(1, cl))
    o_k = gl.arange(0, K, gl.SliceLayout(0, cl))
    earlier = (o_c < C // 2)[:, None]
    zero = gl.zeros([C, K], gl.float32, cl)
    parts = gs._reinterpret(gl.bfloat16, [2, C, K], ops.layout)
    sums = ops._reinterpret(gl.bfloat16, [ops.shape[0], C, K], ops.layout)
    b_dg = zero
    was_first = total.to(gl.int64) * 0
    was_left = total * 0
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    for turn in range(gl.cdiv(total - pid, programs)):
        n = pid + turn * programs
        row, left, _ = place(cu_ptr, n // HV, T, N, C, C, PACKED, True)
        i_h = n % HV
        now = turn & 1
        m_c = o_c < left
        m = m_c[:, None]
        first = row.to(gl.int64) * HV + i_h
        p_own = own_ptr + n.to(gl.int64) * (2 * C) + o_c
        b_qb = gl.load(p_own)[:, None]
        if DELTA:
            o_t = first + o_c * HV
            b_sign = -gl.load(beta_ptr + o_t, mask=m_c, other=0.0).to(gl.float32)[:, None]
        else:
            b_qk = gl.load(p_own + C)[:, None]

        # decays
        mbarrier.wait(full.index(2), now)
        if left < C:
            clear(gs, left, C, K, wide)
        b_g = gs.load(cl).to(gl.float32) * LOG2E
        g_high, g_low = halves(b_g)
        parts.index(0).store(g_high)
        parts.index(1).store(g_low)
        fence_async_shared()
        gl.thread_barrier()
        # after a fence, which waits for what is being stored
        store_gates(dg_ptr, b_dg, was_first, was_left, o_c + (turn >> 30), o_k, HV, K)
        from_middle = seen(C, ca, turn, True)
        b_e = warpgroup_mma(from_middle, parts.index(1), zero, use_acc=False, is_async=True)
        b_e = warpgroup_mma(from_middle, parts.index(0), b_e, is_async=True)
        b_early = gl.sum(gl.where(earlier, b_g, 0.0), 0)
        b_late = gl.sum(gl.where(earlier, 0.0, b_g), 0)
        b_e = warpgroup_mma_wait(0, deps=(b_e,))
        mbarrier.arrive(empty.index(2), count=1)
        b_p = gl.exp2(b_e)
        b_n = gl.exp2(-b_e)

        # what reads and what was written, decayed
        mbarrier.wait(full.index(3), now)
        if left < C:
            for j in gl.static_range(3 if DELTA else 4):
                clear(ops.index(j), left, C, K, wide)
        b_q = ops.index(0).load(cl).to(gl.float32)
        b_k = ops.index(1).load(cl)
        if DELTA:
            W: gl.constexpr = 1
            b_f = b_p
            ops.index(2).store((b_k.to(gl.float32) * b_p * b_sign).to(act))
        else:
            W: gl.constexpr = 3
            b_f = gl.exp2(b_e - b_g)
            b_a = ops.index(2).load(cl).to(gl.float32)
            b_w = ops.index(3).load(cl).to(gl.float32)
            ops.index(2).store((b_a * b_f).to(act))
            ops.index(3).store((b_w * b_n).to(act))
        ops.index(0).store((b_q * b_p).to(act))
        ops.index(1).store((b_k.to(gl.float32) * b_n).to(act))
        fence_async_shared()
        gl.thread_barrier()

        # by way of the state before the chunk, and what was written
        mbarrier.wait(full.index(0), now)
        mbarrier.wait(full.index(1), now)
        if left < C:
            clear(os, left, C, V, wide)
            if not DELTA:
                clear(vs, left, C, V, wide)
            fence_async_shared()
            gl.thread_barrier()
        b_z = products_of_states(ss, ds, V, K, wide)
        b_z = gl.convert_layout(b_z, gl.SliceLayout(0, cl))
        b_z *= gl.exp2(b_early + b_late)
        b_dr = warpgroup_mma(os, ss, zero, use_acc=False, is_async=True)
        b_ds = warpgroup_mma(ys.permute((1, 0)), ss, zero, use_acc=False, is_async=True)
        b_dr, b_ds = warpgroup_mma_wait(0, deps=(b_dr, b_ds))
        mbarrier.arrive(empty.index(0), count=1)
        b_early = gl.exp2(b_early)[None, :]
        b_dr *= b_early * scale
        b_ds *= b_early
        mbarrier.wait(full.index(4), now)
        b_dr = warpgroup_mma(scores.index(0), ops.index(W), b_dr, is_async=True)
        b_ds = warpgroup_mma(scores.index(1), ops.index(W), b_ds, is_async=True)
        if not DELTA:
            b_dr = warpgroup_mma(scores.index(2), ops.index(1), b_dr, is_async=True)
            b_ds = warpgroup_mma(scores.index(3), ops.index(1), b_ds, is_async=True)
        b_dr, b_ds = warpgroup_mma_wait(0, deps=(b_dr, b_ds))
        o_o = (o_c + (turn >> 30))[:, None] * (HV * K) + o_k[None, :]
        b_t = ops.index(0).load(cl).to(gl.float32) * b_dr
        b_dr += b_qb * ops.index(W).load(cl).to(gl.float32)
        if not DELTA:
            b_dr += b_qk * ops.index(1).load(cl).to(gl.float32)
        gl.store(dq_ptr + first * K + o_o, (b_dr * b_p).to(act), mask=m)
        b_s = ops.index(2).load(cl).to(gl.float32) * b_ds
        b_ds *= b_f
        if DELTA:
            b_dbeta = -gl.sum(b_ds * b_k.to(gl.float32), 1)
            p_dbeta = dbeta_ptr + tokens.to(gl.int64) * HV + o_t
            gl.store(p_dbeta, b_dbeta, mask=m_c)
            for j in gl.static_range(1, NK):
                gl.store(p_dbeta + j * (tokens.to(gl.int64) * HV), 0.0 * b_dbeta, mask=m_c)
            b_ds *= b_sign
            b_t += b_s
            b_s = b_t
        else:
            gl.store(da_ptr + first * K + o_o, b_ds.to(act), mask=m)
            b_s += b_t

        # by way of the state after it, and what was read
        b_dw = warpgroup_mma(xs.permute((1, 0)), ds, zero, use_acc=False, is_async=True)
        b_dw = warpgroup_mma_wait(0, deps=(b_dw,))
        b_late = gl.exp2(b_late)[None, :]
        b_dw *= b_late
        b_w = ops.index(W).load(cl).to(gl.float32)
        b_sum = b_w * b_dw
        if not DELTA:
            b_du = warpgroup_mma(vs, ds, zero, use_acc=False, is_async=True)
            b_du = warpgroup_mma_wait(0, deps=(b_du,))
            b_du *= b_late
            b_sum += ops.index(1).load(cl).to(gl.float32) * b_du
        mbarrier.arrive(empty.index(1), count=1)
        b_dw = warpgroup_mma(scores.index(0).permute((1, 0)), ops.index(0), b_dw, is_async=True)
        b_dw = warpgroup_mma(scores.index(1).permute((1, 0)), ops.index(2), b_dw, is_async=True)
        if not DELTA:
            b_du = warpgroup_mma(scores.index(2).permute((1, 0)), ops.index(0), b_du, is_async=True)
            b_du = warpgroup_mma(scores.index(3).permute((1, 0)), ops.index(2), b_du, is_async=True)
        b_z += gl.sum(b_sum, 0)
        if DELTA:
            b_dw = warpgroup_mma_wait(0, deps=(b_dw,))
        else:
            b_dw, b_du = warpgroup_mma_wait(0, deps=(b_dw, b_du))
        mbarrier.arrive(empty.index(4), count=1)
        b_x = ops.index(W).load(cl).to(gl.float32) * b_dw
        if not DELTA:
            b_x += ops.index(1).load(cl).to(gl.float32) * b_du
        b_r = ops.index(0).load(cl)
        b_t -= b_x
        s_high, s_low = halves(b_s - b_x)
        sums.index(0).store(s_high)
        sums.index(2).store(s_low)
        fence_async_shared()
        gl.thread_barrier()
        later = seen(C, ca, turn, False)
        b_dg = warpgroup_mma(later, sums.index(2), b_t + b_z[None, :], is_async=True)
        b_dg = warpgroup_mma(later, sums.index(0), b_dg, is_async=True)
        b_n = 1.0 / b_p
        b_dw = (b_dw + b_qb * b_r) * b_n
        if DELTA:
            gl.store(dk_ptr + first * K + o_o, (b_dw + b_ds).to(act), mask=m)
        else:
            gl.store(db_ptr + first * K + o_o, b_dw.to(act), mask=m)
            gl.store(dk_ptr + first * K + o_o, ((b_du + b_qk * b_r) * b_n).to(act), mask=m)
        b_dg = warpgroup_mma_wait(0, deps=(b_dg,))
        mbarrier.arrive(empty.index(3), count=1)
        was_first = first
        was_left = left
    store_gates(dg_ptr, b_dg, was_first, was_left, o_c, o_k, HV, K)


@gluon.jit(do_not_specialize=["scale", "total", "T", "N", "HV", "H", "tokens"])
def dplr_grads_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    a_desc,  # none for delta
    b_desc,
    g_desc,  # [tokens, HV * K] by [C, K]
    v_desc,  # [tokens, HV * V] by [C, V], dplr
    do_desc,
    x_desc,  # [chunks * HV * V, C] by [V, C]
    y_desc,
    states_desc,  # [chunks * HV * V, K] by [V, K]
    dstates_desc,
    dqb_desc,  # [chunks * HV * C, C] by [C, C]
    dab_desc,
    dqk_desc,  # dplr
    dak_desc,
    beta_ptr,  # [tokens, HV], delta
    own_ptr,  # [chunks, HV, 2, C]: gradients of the scores qb and qk of pairs (i, i)
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,
    da_ptr,  # dplr
    db_ptr,
    dg_ptr,
    dbeta_ptr,  # [1 + NK, tokens, HV], delta, but for the first
    cu_ptr,  # [N + 1]
    scale,
    total,
    T,
    N,
    HV,
    H,
    tokens,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    NK: gl.constexpr,
    WIDE: gl.constexpr,
    DELTA: gl.constexpr,
    PACKED: gl.constexpr,
):
    """grid (programs,), 4 WIDE warps: each does every programs-th of the chunks and value heads."""
    SHARED: gl.constexpr = K == 128 and not DELTA  # gates and scores take turns in one buffer
    dtype: gl.constexpr = q_desc.dtype
    ss = gl.allocate_shared_memory(dtype, [V, K], states_desc.layout)
    ds = gl.allocate_shared_memory(dtype, [V, K], dstates_desc.layout)
    os = gl.allocate_shared_memory(dtype, [C, V], do_desc.layout)
    ys = gl.allocate_shared_memory(dtype, [V, C], y_desc.layout)
    xs = gl.allocate_shared_memory(dtype, [V, C], x_desc.layout)
    ops = gl.allocate_shared_memory(dtype, [3 if DELTA else 4, C, K], q_desc.layout)
    gs = gl.allocate_shared_memory(g_desc.dtype, [C, K], g_desc.layout)
    NS: gl.constexpr = 2 if DELTA else 4
    if DELTA:
        vs = xs
    else:
        vs = gl.allocate_shared_memory(dtype, [C, V], v_desc.layout)
    if SHARED:
        scores = gs._reinterpret(dtype, [NS, C, C], dqb_desc.layout)
    else:
        scores = gl.allocate_shared_memory(dtype, [NS, C, C], dqb_desc.layout)
    full = ring(1, 5)
    empty = ring(1, 5)
    gl.warp_specialize(
        [
            (grads_part, (
                ss, ds, os, ys, xs, vs, ops, gs, scores, full, empty,
                beta_ptr, own_ptr, dq_ptr, dk_ptr, da_ptr, db_ptr, dg_ptr, dbeta_ptr, cu_ptr,
                scale, total, tokens, T, N, HV, K, V, C, NK, WIDE, DELTA, PACKED)),
            (load_part, (
                q_desc, k_desc, a_desc, b_desc, g_desc, v_desc, do_desc, x_desc, y_desc,
                states_desc, dstates_desc, dqb_desc, dab_desc, dqk_desc, dak_desc,
                ss, ds, os, ys, xs, vs, ops, gs, scores, full, empty, cu_ptr, total, T, N, HV,
                H, K, V, C, DELTA, SHARED, PACKED)),
        ],
        [1],
        [24],
    )  # fmt: skip
