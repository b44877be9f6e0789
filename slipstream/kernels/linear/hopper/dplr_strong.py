"""Decays per channel on sm_90: what needs no state, of strong chunks.

As dplr_prepare.py, which marks the chunks, does it for the others, but pairs (i, j) by levels: at
level s those in the two halves of a block of 2^s tokens, decayed to and from the block's middle. A
row is then either a read, in the later half, or a write, so that two tiles a level have them all:

    x = later: q, earlier: b        y = later: a, earlier: k
    qb = x x^T      ab = y x^T      qk = x y^T      ak = y y^T

for delta x = q and y = k, in both halves. At levels up to 4 sums of gates are differences of sums
of no more than 16, beyond them of one sign.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnboundVariable=false

from slipstream.kernels.gluon import gl, gluon
from slipstream.kernels.linear.hopper.dplr_prepare import LOG2E, LOWEST, add
from slipstream.kernels.linear.hopper.dplr_solve import put, ready, scores, solve
from slipstream.kernels.linear.hopper.parts import place

TURN = gl.constexpr(16)  # marks that are looked at together


@gluon.jit
def load_gates(p, m):
    return gl.maximum(gl.load(p, mask=m, other=0.0).to(gl.float32) * LOG2E, LOWEST)


@gluon.jit
def blocks(b_g):
    """Of gates [4, 16, 64], each block's sum [1, 4, 64], and the blocks' numbers."""
    four: gl.constexpr = gl.BlockedLayout([1, 4, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    b_all = gl.convert_layout(gl.sum(b_g, 1), gl.SliceLayout(0, four))[None, :, :]
    own = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, four)))[:, None, None]
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, four)))[None, :, None]
    return b_all, own, other


@gluon.jit
def summed(b_all, seen, three: gl.constexpr):
    """Sum over the other blocks that are seen, [4, 1, 64]."""
    return gl.convert_layout(gl.sum(gl.where(seen, b_all, 0.0), 1)[:, None, :], three)


@gluon.jit
def to_middle(b_g, LEVEL: gl.constexpr, three: gl.constexpr):
    """Sum of the gates [4, 16, 64] from the middle of the block of 2^LEVEL tokens; before it, -."""
    b_sum = gl.associative_scan(b_g, 1, add)
    if LEVEL <= 4:
        SIDE: gl.constexpr = 1 << LEVEL
        wide: gl.constexpr = gl.BlockedLayout(
            [1, 16 // SIDE, SIDE, 2], [1, 1, 1, 32], [4, 1, 1, 1], [3, 2, 1, 0]
        )
        o_i = gl.arange(0, SIDE, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, wide))))
        b_sum = gl.convert_layout(gl.reshape(b_sum, [4, 16 // SIDE, SIDE, 64]), wide)
        last = o_i[None, None, :, None] == SIDE // 2 - 1
        b_sum -= gl.sum(gl.where(last, b_sum, 0.0), 2)[:, :, None, :]
        b_sum = gl.convert_layout(gl.reshape(b_sum, [4, 16, 64]), three)
    else:
        b_all, own, other = blocks(b_g)
        if LEVEL == 5:
            b_sum -= summed(b_all, (other == own) & (own % 2 == 0), three)
        else:
            b_sum += summed(b_all, (other >= 2) & (other < own), three)
            b_sum -= summed(b_all, (other < 2) & (other >= own), three)
    return b_sum


@gluon.jit
def flattened(b, flat: gl.constexpr):
    return gl.convert_layout(gl.reshape(b, [64, 64]), flat)


@gluon.jit
def at_level(b_g, q, a, b, k, x, y, LEVEL: gl.constexpr, flat: gl.constexpr, DELTA: gl.constexpr):
    """The tiles x and y of 64 channels."""
    o_row = gl.arange(0, 64, gl.SliceLayout(1, flat))[:, None]
    later = (o_row >> (LEVEL - 1)) % 2 == 1
    three: gl.constexpr = b_g.type.layout
    b_e = to_middle(b_g, LEVEL, three)
    b_w = gl.exp2(-gl.abs(flattened(b_e, flat)))
    b_x = q.load(flat).to(gl.float32)
    b_y = a.load(flat).to(gl.float32)
    if DELTA:
        b_y *= b_w
    else:
        b_x = gl.where(later, b_x, b.load(flat).to(gl.float32))
        b_y *= gl.exp2(-gl.abs(flattened(b_e - b_g, flat)))
        b_y = gl.where(later, b_y, k.load(flat).to(gl.float32) * b_w)
    x.store((b_x * b_w).to(x.dtype))
    y.store(b_y.to(y.dtype))


@gluon.jit
def to_edges(b_g, p_total, flat: gl.constexpr, DELTA: gl.constexpr):
    """Decays [64, 64] from the chunk's start to the token, or before it, and on to its end.

    That of the whole chunk is written.
    """
    three: gl.constexpr = b_g.type.layout
    b_all, own, other = blocks(b_g)
    b_sum = gl.associative_scan(b_g, 1, add)
    b_last = gl.reshape(summed(b_all, other >= 0 * own, three), [4, 64])
    b_last = gl.convert_layout(gl.max(b_last, 0), gl.SliceLayout(0, flat))
    gl.store(p_total, gl.exp2(b_last))
    b_start = b_sum + summed(b_all, other < own, three)
    b_end = gl.exp2(flattened(summed(b_all, other >= own, three) - b_sum, flat))
    b_before = b_start if DELTA else b_start - b_g
    return gl.exp2(flattened(b_start, flat)), gl.exp2(flattened(b_before, flat)), b_end


@gluon.jit(do_not_specialize=["scale", "keep", "total", "T", "N", "HV", "H"])
def dplr_strong_sm90_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,
    a_ptr,  # none for delta
    b_ptr,
    v_ptr,  # [tokens, HV, V]
    g_ptr,  # [tokens, HV, K] or [tokens, HV]
    beta_ptr,  # [tokens, HV], delta
    q_out_ptr,  # [slots, HV, C, K]: scale q exp(G)
    w_out_ptr,  # W
    b_out_ptr,  # b exp(G_C - G)
    k_out_ptr,  # k exp(G_C - G), dplr
    u_out_ptr,  # [slots, HV, V, C]: U, float32
    total_ptr,  # [slots, HV, K]: exp(G_C)
    qb_ptr,  # [slots, HV, C, C], scaled
    qk_ptr,  # scaled, dplr
    ak_ptr,  # dplr, if keep
    r_ptr,  # if keep
    strong_ptr,  # [slots, HV]
    cu_ptr,  # [N + 1]
    scale,
    keep,
    total,
    T,
    N,
    HV,
    H,
    K: gl.constexpr,
    V: gl.constexpr,
    DELTA: gl.constexpr,
    CHANNEL: gl.constexpr,
    PACKED: gl.constexpr,
):
    """grid (any,), 4 warps. total: slots * HV."""
    some: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_m = gl.arange(0, TURN, some)
    for first in range(gl.program_id(0) * TURN, total, gl.num_programs(0) * TURN):
        b_strong = gl.load(strong_ptr + first + o_m, mask=first + o_m < total, other=0)
        if gl.max(b_strong, 0) > 0:
            for at in range(first, gl.minimum(first + TURN, total)):
                if gl.load(strong_ptr + at) > 0:
                    one_chunk(
                        q_ptr, k_ptr, a_ptr, b_ptr, v_ptr, g_ptr, beta_ptr, q_out_ptr, w_out_ptr,
                        b_out_ptr, k_out_ptr, u_out_ptr, total_ptr, qb_ptr, qk_ptr, ak_ptr, r_ptr,
                        cu_ptr, scale, keep, at, T, N, HV, H,
                        K, V, DELTA, CHANNEL, PACKED,
                    )  # fmt: skip


@gluon.jit
def one_chunk(
    q_ptr, k_ptr, a_ptr, b_ptr, v_ptr, g_ptr, beta_ptr, q_out_ptr, w_out_ptr, b_out_ptr, k_out_ptr,
    u_out_ptr, total_ptr, qb_ptr, qk_ptr, ak_ptr, r_ptr, cu_ptr, scale, keep, pid, T, N, HV, H,
    K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr,
    CHANNEL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 64
    NK: gl.constexpr = K // 64
    GK: gl.constexpr = K**CHANNEL
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    three: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    act: gl.constexpr = q_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], act)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    if DELTA:  # of the others two programs have no room for it
        gs = gl.allocate_shared_memory(gl.float32, [NK, 4, 16, 64], plain)
    qs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    reads = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    bs = qs
    keys = qs
    if not DELTA:
        bs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
        keys = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    i_h = pid % HV
    row, left, _ = place(cu_ptr, pid // HV, T, N, C, C, PACKED, True)
    slot = gl.cast(pid, gl.int64)
    token = row.to(gl.int64) * HV + i_h
    o_t = 16 * gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None, None]
    o_t += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, three)))[None, :, None]
    o_n = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, three)))[None, None, :]
    o_row = gl.arange(0, 64, gl.SliceLayout(1, flat))[:, None]
    o_line = gl.arange(0, 64, gl.SliceLayout(0, flat))
    o_r = gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None]
    o_c = gl.arange(0, 64, gl.SliceLayout(0, rows))[None, :]
    o_i = gl.arange(0, 64, gl.SliceLayout(1, al))[:, None]
    o_j = gl.arange(0, 64, gl.SliceLayout(0, al))[None, :]
    p_g = g_ptr + token * GK + o_t * (HV * GK) + o_n * CHANNEL
    o_q = (row.to(gl.int64) * H + i_h // (HV // H)) * K + o_r * (H * K) + o_c
    for n in gl.static_range(NK):
        if DELTA:
            gs.index(n).store(load_gates(p_g + n * (64 * CHANNEL), o_t < left))
        qs.index(n).store(gl.load(q_ptr + o_q + n * 64, mask=o_r < left, other=0.0))
        p_a = (k_ptr if DELTA else a_ptr) + o_q + n * 64
        reads.index(n).store(gl.load(p_a, mask=o_r < left, other=0.0))
        if not DELTA:
            bs.index(n).store(gl.load(b_ptr + o_q + n * 64, mask=o_r < left, other=0.0))
            keys.index(n).store(gl.load(k_ptr + o_q + n * 64, mask=o_r < left, other=0.0))
    xs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    ys = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    zero = gl.zeros([64, 64], gl.float32, al)
    ready()
    b_qb = gl.where(o_i == o_j, scores(qs, reads if DELTA else bs, NK, zero), 0.0).to(act)
    b_ab = zero
    if not DELTA:
        b_qk = gl.where(o_i == o_j, scores(qs, keys, NK, zero), 0.0).to(act)
        b_ak = zero.to(act)
    for LEVEL in gl.static_range(1, 7):
        gl.thread_barrier()
        for n in range(NK):
            if DELTA:
                b_g = gs.index(n).load(three)
            else:
                b_g = load_gates(p_g + n * (64 * CHANNEL), o_t < left)
            at_level(
                b_g, qs.index(n), reads.index(n), bs.index(n), keys.index(n), xs.index(n),
                ys.index(n), LEVEL, flat, DELTA,
            )  # fmt: skip
        ready()
        pairs = (o_i >> LEVEL) == (o_j >> LEVEL)
        pairs = pairs & ((o_i >> (LEVEL - 1)) > (o_j >> (LEVEL - 1)))
        if DELTA:
            b_qb = gl.where(pairs, scores(xs, ys, NK, zero).to(act), b_qb)
            b_ab = gl.where(pairs, scores(ys, ys, NK, zero), b_ab)
        else:
            b_qb = gl.where(pairs, scores(xs, xs, NK, zero).to(act), b_qb)
            b_qk = gl.where(pairs, scores(xs, ys, NK, zero).to(act), b_qk)
            b_ab = gl.where(pairs, scores(ys, xs, NK, zero), b_ab)
            b_ak = gl.where(pairs, scores(ys, ys, NK, zero).to(act), b_ak)
    i_a = slot * (C * C)
    put(qb_ptr + i_a, (b_qb.to(gl.float32) * scale).to(act), C, rows)
    if DELTA:
        o_b = gl.arange(0, 64, gl.SliceLayout(1, al))
        b_beta = gl.load(beta_ptr + token + o_b * HV, mask=o_b < left, other=0.0)
        b_ab = b_ab * b_beta.to(gl.float32)[:, None]
    else:
        b_ab = -b_ab
        put(qk_ptr + i_a, (b_qk.to(gl.float32) * scale).to(act), C, rows)
        aks = gl.allocate_shared_memory(act, [64, 64], tile)
        aks.store(b_ak)
        if keep != 0:
            put(ak_ptr + i_a, b_ak, C, rows)
    for n in range(NK):
        if DELTA:
            b_g = gs.index(n).load(three)
        else:
            b_g = load_gates(p_g + n * (64 * CHANNEL), o_t < left)
        p_total = total_ptr + slot * K + n * 64 + o_line
        b_start, b_before, b_end = to_edges(b_g, p_total, flat, DELTA)
        o_w = slot * (C * K) + n * 64 + o_row * K + o_line[None, :]
        gl.store(q_out_ptr + o_w, (qs.index(n).load(flat) * (b_start * scale)).to(act))
        b_a = reads.index(n).load(flat)
        reads.index(n).store((b_a * b_before).to(act))
        if DELTA:
            gl.store(b_out_ptr + o_w, (b_a * b_end).to(act))
        else:
            gl.store(b_out_ptr + o_w, (bs.index(n).load(flat) * b_end).to(act))
            gl.store(k_out_ptr + o_w, (keys.index(n).load(flat) * b_end).to(act))
    ready()
    solve(
        b_ab, None if DELTA else aks, reads, None, beta_ptr + token if DELTA else None,
        v_ptr + token * V, w_out_ptr + slot * (C * K), u_out_ptr + slot * (V * C), r_ptr + i_a,
        keep, left, HV, K, V, DELTA,
    )  # fmt: skip
    gl.thread_barrier()
