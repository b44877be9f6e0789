"""Per-channel decay on sm_90: the gradients of dqkg.py by levels, in chunks with a quarter that
decays too far for it.

Since a token is a reader or a writer at a level (subchunk_decay.py, whose e are these, for a
without t's own gate), each score takes one product: with D its gradient, D + D^T where halves are
siblings, times

    x_t = q_t exp(e_t) or s_t exp(e_t) in a later half, w_t exp(e_t) or u_t exp(e_t) in an earlier

is what comes to q and s there and to w and u here. dg is what each exponent gives to its gates:
at a level x dx, at the edges of the chunk that of the states. No sum is a difference of larger.

Where no 16 tokens decay by more than 2^-2 LIMIT, pairs within them come at once, in place of four
levels: with G the sum of gates from the first of them on,

    r_t = q_t exp(G_t) or s_t exp(G_t)    dr = D n      n_t = w_t exp(-G_t) or u_t exp(-G_t)
                                          dn = D^T r    dg_t = sum over i >= t of (r dr - n dn)_i

whose differences are of the same products, as in dqkg.py. G is shifted by log2: half of what bf16
can hold is above 1.
"""

from collections import namedtuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.dplr import dqkg
from slipstream.kernels.linear.sm90.dplr import intra_safe_bwd_device as device
from slipstream.kernels.linear.sm90.dplr import subchunk_decay as subchunk
from slipstream.kernels.linear.sm90.dplr.intra_safe import FLAGS_PER_LOAD
from slipstream.kernels.linear.triton.common.gate_ones import BASE
from slipstream.kernels.linear.triton.dplr.gate_sums import LOWEST_GATE
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.device import LOG2E
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# what the kernel passes on: pointers and descriptors, numbers and constants
Refs = namedtuple(
    "Refs",
    "q k a b g v do x y states dstates dqb dab dqk dak beta diag dq dk da db dg dbeta cu",
)
Sizes = namedtuple("Sizes", "T N HV H tokens")
Constants = namedtuple("Constants", "K V BK C DELTA PACKED LIMIT SHIFT")
# a chunk in shared memory: what TMA loads, and what is made of it
Tiles = namedtuple("Tiles", "ss ds os ys xs vs")
Buffers = namedtuple("Buffers", "scores ops ins sums gates")


@gluon.jit
def load_chunk(refs, tiles, scores, full, n, row, i_h, i_k, c):
    """Barriers: 0 of S, do and y, 1 of the rest."""
    ss, ds, os, ys, xs, vs = tiles
    after_bytes: gl.constexpr = (
        refs.dstates.block_type.nbytes
        + refs.x.block_type.nbytes
        + (0 if c.DELTA else refs.do.block_type.nbytes)
        + (2 if c.DELTA else 4) * refs.dqb.block_type.nbytes
    )
    v_col = i_h * c.V
    dqkg.load_before(refs.states, refs.do, refs.y, ss, os, ys, full.index(0), n, row, i_h, i_k, c.V)
    mbarrier.expect(full.index(1), after_bytes)
    sm90.copy_in(refs.dstates, [n * c.V, i_k], full.index(1), ds.index(0))
    sm90.copy_in(refs.x, [n * c.V, 0], full.index(1), xs.index(0))
    sm90.copy_in(refs.dqb, [n * c.C, 0], full.index(1), scores.index(0))
    sm90.copy_in(refs.dab, [n * c.C, 0], full.index(1), scores.index(1))
    if not c.DELTA:
        sm90.copy_in(refs.v, [row, v_col], full.index(1), vs.index(0))
        sm90.copy_in(refs.dqk, [n * c.C, 0], full.index(1), scores.index(2))
        sm90.copy_in(refs.dak, [n * c.C, 0], full.index(1), scores.index(3))


@gluon.jit
def through_states(tiles, buffers, full, b_total, m, T, none, scale, c):
    """Gradients of q, a, b, k and the gates by way of the states."""
    _, _, ins, sums, gates = buffers
    ss, ds, os, ys, xs, vs = tiles
    C: gl.constexpr = os.shape[0]
    BK: gl.constexpr = ss.shape[1]
    cl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BK // 2, 16])
    ca: gl.constexpr = gl.DotOperandLayout(0, cl, 2)
    zero = gl.zeros([C, BK], gl.float32, cl)
    b_e = subchunk.sum_gates(
        subchunk.gates_seen(C, ca, subchunk.SUMS.START, none, False, True),
        gates.index(none),
        gates.index(none + 1),
        zero,
    )
    b_f = gl.exp2(b_e)
    if c.DELTA:
        b_fa = b_f
    else:
        b_fa = gl.exp2(b_e - device.sum_of_halves(gates, none, cl))
    mbarrier.wait(full.index(0), 0)
    b_dq = warpgroup_mma(os, ss, zero, use_acc=False, is_async=True)
    b_da = warpgroup_mma(ys.permute((1, 0)), ss, zero, use_acc=False, is_async=True)
    b_dq, b_da = sm90.warpgroup_mma_wait(0, deps=(b_dq, b_da))
    b_dq = gl.where(m, b_dq * b_f * scale, 0.0)
    b_da = gl.where(m, b_da * b_fa, 0.0)
    b_x = device.rows_of(ins, none, cl) * b_dq
    if c.DELTA:
        b_x += device.rows_of(ins, none + 1, cl) * b_da
    b_dg = device.to_gates(
        subchunk.gates_seen(C, ca, subchunk.SUMS.START, none, True, True),
        b_x,
        sums.index(none),
        zero,
    )
    if not c.DELTA:
        seen = subchunk.gates_seen(C, ca, subchunk.SUMS.START, none, True, False)
        b_dg = device.to_gates(
            seen, device.rows_of(ins, none + 1, cl) * b_da, sums.index(none), b_dg
        )
        none = T + 1 >> 31 << 10  # another 0, or END's would keep what START's made of it
    b_f = gl.exp2(
        subchunk.sum_gates(
            subchunk.gates_seen(C, ca, subchunk.SUMS.END, none, False, True),
            gates.index(none),
            gates.index(none + 1),
            zero,
        )
    )
    mbarrier.wait(full.index(1), 0)
    b_dw = warpgroup_mma(xs.permute((1, 0)), ds, zero, use_acc=False, is_async=True)
    b_dw = gl.where(m, sm90.warpgroup_mma_wait(0, deps=(b_dw,)) * b_f, 0.0)
    b_x = device.rows_of(ins, none + 2, cl) * b_dw
    b_du = b_dw
    if not c.DELTA:
        b_du = warpgroup_mma(vs, ds, zero, use_acc=False, is_async=True)
        b_du = gl.where(m, sm90.warpgroup_mma_wait(0, deps=(b_du,)) * b_f, 0.0)
        b_x += device.rows_of(ins, none + 3, cl) * b_du
    b_dg = device.to_gates(
        subchunk.gates_seen(C, ca, subchunk.SUMS.END, none, True, True), b_x, sums.index(none), b_dg
    )
    b_z = gl.convert_layout(dqkg.products_of_states(ss, ds, c.V, BK, 2), gl.SliceLayout(0, cl))
    return b_dq, b_da, b_dw, b_du, b_dg + (b_z * b_total)[None, :]


@gluon.jit
def within_blocks(buffers, b_dq, b_da, b_dw, b_du, b_dg, T, c):
    """By way of pairs within 16 tokens."""
    scores, ops, ins, sums, gates = buffers
    C: gl.constexpr = ops.shape[1]
    act: gl.constexpr = ops.dtype
    cl: gl.constexpr = b_dg.type.layout
    ca: gl.constexpr = gl.DotOperandLayout(0, cl, 2)
    zero = gl.zeros_like(b_dg)
    # 0, another one each time, as dqkg_device.seen has it
    none = T + subchunk.LEVELS >> 31 << 10
    b_e = subchunk.sum_gates(
        subchunk.gates_seen(C, ca, subchunk.SUMS.WITHIN, none, False, True),
        gates.index(none),
        gates.index(none + 1),
        zero,
    )
    b_n = gl.exp2(-b_e - c.SHIFT)
    ops.index(none).store((device.rows_of(ins, none + 2, cl) * b_n).to(act))
    if not c.DELTA:
        ops.index(none + 1).store((device.rows_of(ins, none + 3, cl) * b_n).to(act))
    sm90.fence_async_shared()
    gl.thread_barrier()
    b_r = gl.exp2(b_e + c.SHIFT)
    if c.DELTA:
        b_p = device.one_triangle(scores, ops, none, none, zero)
    else:
        b_p = device.two_triangles(scores, ops, none, none + 2, True, none, zero)
    b_dq += b_p * b_r
    b_x = device.decayed(ins, none, b_r, act) * b_p
    if c.DELTA:
        b_p = device.one_triangle(scores, ops, none + 1, none, zero)
        b_x += device.decayed(ins, none + 1, b_r, act) * b_p
    else:
        b_r *= gl.exp2(-device.sum_of_halves(gates, none, cl))
        b_p = device.two_triangles(scores, ops, none + 1, none + 3, True, none, zero)
        seen = subchunk.gates_seen(C, ca, subchunk.SUMS.WITHIN, none, True, False)
        b_y = device.decayed(ins, none + 1, b_r, act) * b_p
        b_dg = device.in_halves_to_gates(seen, b_y, sums.index(none), b_dg)
    b_da += b_p * b_r
    gl.thread_barrier()
    none = T + subchunk.LEVELS + 2 >> 31 << 10
    ops.index(none + 1).store((device.rows_of(ins, none + 1, cl) * b_r).to(act))
    b_r = gl.exp2(b_e + c.SHIFT)
    ops.index(none).store((device.rows_of(ins, none, cl) * b_r).to(act))
    sm90.fence_async_shared()
    gl.thread_barrier()
    b_n = gl.exp2(-b_e - c.SHIFT)
    b_p = device.two_triangles(scores, ops, none, none + 1, False, none, zero)
    b_dw += b_p * b_n
    b_x -= device.decayed(ins, none + 2, b_n, act) * b_p
    if not c.DELTA:
        b_p = device.two_triangles(scores, ops, none + 2, none + 3, False, none, zero)
        b_du += b_p * b_n
        b_x -= device.decayed(ins, none + 3, b_n, act) * b_p
    seen = subchunk.gates_seen(C, ca, subchunk.SUMS.WITHIN, none, True, True)
    b_dg = device.in_halves_to_gates(seen, b_x, sums.index(none), b_dg)
    return b_dq, b_da, b_dw, b_du, b_dg


@gluon.jit
def through_scores(buffers, lowest, b_dq, b_da, b_dw, b_du, b_dg, T, c):
    """And by way of the scores: of 16 tokens at once if their gates allow, and level by level.

    lowest: the least sum of gates of 16 tokens.
    """
    scores, ops, ins, sums, gates = buffers
    C: gl.constexpr = ops.shape[1]
    BK: gl.constexpr = ops.shape[2]
    act: gl.constexpr = ops.dtype
    cl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BK // 2, 16])
    ca: gl.constexpr = gl.DotOperandLayout(0, cl, 2)
    o_c = gl.arange(0, C, gl.SliceLayout(1, cl))
    zero = gl.zeros([C, BK], gl.float32, cl)
    first = 0
    if lowest >= -2 * c.LIMIT:
        b_dq, b_da, b_dw, b_du, b_dg = within_blocks(buffers, b_dq, b_da, b_dw, b_du, b_dg, T, c)
        first = BASE
    for level in range(first, subchunk.LEVELS):
        # 0, another one each turn, as dplr_grads_parts.seen has it
        now = T + level >> 31 << 10
        later = (((o_c + now >> level) & 1) == 1)[:, None]
        if not c.DELTA:
            b_dq, b_dw, b_du, b_dg = device.by_one_read(
                buffers, b_dq, b_dw, b_du, b_dg, level, T, 0
            )
            b_da, b_dw, b_du, b_dg = device.by_one_read(
                buffers, b_da, b_dw, b_du, b_dg, level, T, 1
            )
        else:
            b_f = gl.exp2(subchunk.sum_gates(
                subchunk.gates_seen(C, ca, level, now, False, True),
                gates.index(now), gates.index(now + 1), zero,
            ))  # fmt: skip
            b_w = device.rows_of(ins, now + 2, cl)
            ops.index(now).store((gl.where(later, device.rows_of(ins, now, cl), b_w) * b_f).to(act))
            ops.index(now + 1).store(
                (gl.where(later, device.rows_of(ins, now + 1, cl), b_w) * b_f).to(act)
            )
            sm90.fence_async_shared()
            gl.thread_barrier()
            b_dr, b_ds = device.both_products(scores, ops, now, now + 1, level, now, zero)
            b_x = device.rows_of(ops, now, cl) * b_dr + device.rows_of(ops, now + 1, cl) * b_ds
            b_dr *= b_f
            b_ds *= b_f
            b_dw += gl.where(later, 0.0, b_dr + b_ds)
            b_dq += gl.where(later, b_dr, 0.0)
            b_da += gl.where(later, b_ds, 0.0)
            seen = subchunk.gates_seen(C, ca, level, now, True, True)
            b_dg = device.to_gates(seen, b_x, sums.index(now), b_dg)
    return b_dq, b_da, b_dw, b_du, b_dg


@gluon.jit
def one_chunk(refs, unit, scale, sizes, c):
    """BK channels of one chunk and value head."""
    T, N, HV, H, tokens = sizes
    NK: gl.constexpr = c.K // c.BK
    NS: gl.constexpr = 2 if c.DELTA else 4
    GATED: gl.constexpr = c.DELTA and refs.beta is None
    act: gl.constexpr = refs.do.dtype
    n = unit // NK
    i_k = unit % NK * c.BK
    ss, ds, os, ys, xs = dqkg.chunk_tiles(
        refs.states, refs.dstates, refs.do, refs.y, refs.x, c.V, c.BK, c.C
    )
    vs = xs
    if not c.DELTA:
        vs = gl.allocate_shared_memory(act, [1, c.C, c.V], refs.v.layout)
    scores = gl.allocate_shared_memory(act, [NS, c.C, c.C], refs.dqb.layout)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.C, c.BK], gl.bfloat16)
    gates = gl.allocate_shared_memory(gl.bfloat16, [2, c.C, c.BK], tile)
    sums = gl.allocate_shared_memory(gl.bfloat16, [1, c.C, c.BK], tile)
    ops = gl.allocate_shared_memory(act, [2, c.C, c.BK], tile)
    ins = gl.allocate_shared_memory(act, [3 if c.DELTA else 4, c.C, c.BK], tile)
    buffers = Buffers(scores, ops, ins, sums, gates)
    tiles = Tiles(ss, ds, os, ys, xs, vs)
    row, num_rows, _ = common.locate_sequence(refs.cu, n // HV, T, N, c.C, c.C, c.PACKED, True)
    i_h = n % HV
    full = common.alloc_mbarriers(1, 2)
    sm90.fence_async_shared()
    gl.thread_barrier()
    load_chunk(refs, tiles, scores, full, n, row, i_h, i_k, c)
    cl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, c.BK // 2, 16])
    now = T + unit  # what is made of either is not kept for the next chunk
    none = now >> 31 << 10
    o_c = gl.arange(0, c.C, gl.SliceLayout(1, cl)) + none
    o_k = i_k + gl.arange(0, c.BK, gl.SliceLayout(0, cl))
    m_c = o_c < num_rows
    m = m_c[:, None]
    first = row.to(gl.int64) * HV + i_h
    o_o = first * c.K + o_c[:, None] * (HV * c.K) + o_k[None, :]
    o_q = (row.to(gl.int64) * H + i_h // (HV // H)) * c.K + o_c[:, None] * (H * c.K) + o_k[None, :]
    b_g = gl.load(refs.g + o_o, mask=m, other=0.0).to(gl.float32) * LOG2E
    b_g = common.at_least(b_g, LOWEST_GATE)
    b_k = gl.load(refs.k + o_q, mask=m, other=0.0)
    ins.index(none).store(gl.load(refs.q + o_q, mask=m, other=0.0))
    p_diag = refs.diag + n.to(gl.int64) * (2 * c.C) + o_c
    b_qb = gl.load(p_diag)[:, None]
    if GATED:
        b_erase = gl.load(refs.b + o_o, mask=m, other=0.0).to(gl.float32)
        ins.index(none + 1).store((-b_erase * b_k.to(gl.float32)).to(act))
        ins.index(none + 2).store(b_k)
    elif c.DELTA:
        o_t = first + o_c * HV
        b_sign = -gl.load(refs.beta + o_t, mask=m_c, other=0.0).to(gl.float32)[:, None]
        ins.index(none + 1).store((b_k * b_sign).to(act))
        ins.index(none + 2).store(b_k)
    else:
        ins.index(none + 1).store(gl.load(refs.a + o_q, mask=m, other=0.0))
        ins.index(none + 2).store(gl.load(refs.b + o_q, mask=m, other=0.0))
        ins.index(none + 3).store(b_k)
        b_qk = gl.load(p_diag + c.C)[:, None]
    g_high, g_low = common.halves(b_g)
    gates.index(none).store(g_high)
    gates.index(none + 1).store(g_low)
    sm90.fence_async_shared()
    gl.thread_barrier()
    b_total = gl.exp2(gl.sum(b_g, 0))
    b_lowest = gl.sum(gl.reshape(b_g, [c.C >> BASE, 1 << BASE, c.BK]), 1)
    lowest = gl.min(gl.min(b_lowest, 1), 0)
    b_dq, b_da, b_dw, b_du, b_dg = through_states(
        Tiles(ss.index(none), ds.index(none), os.index(none), ys.index(none), xs.index(none),
        vs.index(none)), buffers, full, b_total, m, now, none, scale, c,
    )  # fmt: skip
    for s in gl.static_range(NS):
        device.make_symmetric(scores.index(s), num_rows, none, c.C)
    b_dq, b_da, b_dw, b_du, b_dg = through_scores(
        buffers, lowest, b_dq, b_da, b_dw, b_du, b_dg, now, c
    )

    # made anew: the ones above would take registers all the while
    m = (o_c + none < num_rows)[:, None]
    o_o = first * c.K + (o_c + none)[:, None] * (HV * c.K) + o_k[None, :]
    b_q = device.rows_of(ins, none, cl)
    b_w = device.rows_of(ins, none + 2, cl)
    b_dq += b_qb * b_w
    b_dw += b_qb * b_q
    if GATED:
        gl.store(refs.db + o_o, (-b_da * b_w).to(act), mask=m)
        b_da *= gl.load(refs.b + o_o, mask=m, other=0.0).to(gl.float32)
        gl.store(refs.dk + o_o, (b_dw - b_da).to(act), mask=m)
    elif c.DELTA:
        b_dbeta = -gl.sum(b_da * b_w, 1)
        o_t += (1 + unit % NK) * (tokens.to(gl.int64) * HV)
        gl.store(refs.dbeta + o_t, b_dbeta, mask=m_c)
        gl.store(refs.dk + o_o, (b_dw + b_da * b_sign).to(act), mask=m)
    else:
        b_dq += b_qk * device.rows_of(ins, none + 3, cl)
        gl.store(refs.da + o_o, b_da.to(act), mask=m)
        gl.store(refs.db + o_o, b_dw.to(act), mask=m)
        gl.store(refs.dk + o_o, (b_du + b_qk * b_q).to(act), mask=m)
    gl.store(refs.dq + o_o, b_dq.to(act), mask=m)
    gl.store(refs.dg + o_o, b_dg.to(refs.dg.dtype.element_ty), mask=m)
    common.invalidate_mbarriers(full)


@gluon.jit(do_not_specialize=["scale", "total", "T", "N", "HV", "H", "tokens"])
def dplr_intra_safe_bwd_sm90_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,
    a_ptr,  # none for delta
    b_ptr,  # [tokens, HV, K], how much each channel erases, gated delta
    g_ptr,  # [tokens, HV, K]
    v_desc,  # [tokens, HV * V] by [C, V], dplr
    do_desc,
    x_desc,  # [chunks * HV * V, C] by [V, C]
    y_desc,
    states_desc,  # [chunks * HV * V, K] by [V, BK]
    dstates_desc,
    dqb_desc,  # [chunks * HV * C, C] by [C, C]
    dab_desc,
    dqk_desc,  # dplr
    dak_desc,
    strong_ptr,  # [chunks, HV]
    beta_ptr,  # [tokens, HV], delta; none for gated delta
    diag_ptr,  # [chunks, HV, 2, C]: gradients of the scores qb and qk of pairs (i, i)
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,
    da_ptr,  # dplr
    db_ptr,  # and of what erases
    dg_ptr,  # in the gates' dtype
    dbeta_ptr,  # [1 + NK, tokens, HV], delta, except for the first
    cu_ptr,  # [N + 1]
    scale, total, T, N, HV, H, tokens,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, DELTA: gl.constexpr,
    PACKED: gl.constexpr, LIMIT: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """grid (any,), 8 warps: BK channels of one chunk and value head at a time, every
    num_programs-th, of total."""
    c: gl.constexpr = Constants(K, V, BK, C, DELTA, PACKED, LIMIT, SHIFT)
    sizes = Sizes(T, N, HV, H, tokens)
    refs = Refs(
        q_ptr, k_ptr, a_ptr, b_ptr, g_ptr, v_desc, do_desc, x_desc, y_desc, states_desc,
        dstates_desc, dqb_desc, dab_desc, dqk_desc, dak_desc, beta_ptr, diag_ptr, dq_ptr, dk_ptr,
        da_ptr, db_ptr, dg_ptr, dbeta_ptr, cu_ptr,
    )  # fmt: skip
    o_m = gl.arange(0, FLAGS_PER_LOAD, gl.BlockedLayout([1], [32], [8], [0]))
    at = gl.program_id(0)
    while at < total:  # as dplr_intra_safe_sm90_kernel
        b_at = at + o_m * gl.num_programs(0)
        b_strong = gl.load(strong_ptr + b_at // (K // BK), mask=b_at < total, other=0)
        ahead = gl.min(gl.where(b_strong == 3, o_m, FLAGS_PER_LOAD), 0)
        if ahead < FLAGS_PER_LOAD:
            one_chunk(refs, at + ahead * gl.num_programs(0), scale, sizes, c)
        at += (gl.minimum(ahead + 1, FLAGS_PER_LOAD) + (T + at >> 31)) * gl.num_programs(0)
