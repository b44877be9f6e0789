"""Delta rule, no decay or one a token, on sm_90: the gradients that the scans left, by chunks.

By the formulas of triton/delta/dqkg.py, with p = k. Everything comes by TMA, each of do, w
and dv once; of S and dS' 64 channels of K at a time, whose buffers the next 64 get as soon as the
products have read them. dq and dk leave through the buffers of q and k. A program takes 112 KB, so
that two share a multiprocessor and one's loads run under the other's products.

Value heads that share a head of q and k may add theirs up, one after the other, by TMA and rounded
each time, so that no memory holds them apart. Programs are numbered so that the one before, of the
same chunk, is done when one begins, and its tiles are still in the L2 cache.
"""

from slipstream.kernels.linear.segments import NUM_SMS
from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.delta.delta_device import strong_gates
from slipstream.kernels.primitives import semaphore, sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

RESIDENT_PROGRAMS = gl.constexpr(2 * NUM_SMS)  # programs that run at a time
ROWS = gl.constexpr(16)  # of S at a time
ROWS_BY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def load_states(states_desc, dstates_desc, ss, ds, bar, i_s, i_k):
    mbarrier.expect(bar, states_desc.block_type.nbytes + dstates_desc.block_type.nbytes)
    sm90.copy_in(states_desc, [i_s, i_k], bar, ss)
    sm90.copy_in(dstates_desc, [i_s, i_k], bar, ds)


@gluon.jit
def row_products(ss, ds, V: gl.constexpr, BK: gl.constexpr):
    """sum(S * dS') as numbers of ROWS rows, which are yet to be added up across warps."""
    b_z = gl.zeros([ROWS, BK], gl.float32, ROWS_BY)
    for i in gl.static_range(V // ROWS):
        b_s = ss.slice(i * ROWS, ROWS).load(ROWS_BY).to(gl.float32)
        b_z += b_s * ds.slice(i * ROWS, ROWS).load(ROWS_BY).to(gl.float32)
    return gl.sum(b_z, 1)


@gluon.jit
def locate_chunk(heads, G, GROUPED_HEADS: gl.constexpr):
    """The chunk and head of the sums that a program adds to, and as which of G it does."""
    pid = gl.program_id(0)
    rank = pid * 0
    if GROUPED_HEADS:
        begin = pid // (G * RESIDENT_PROGRAMS) * RESIDENT_PROGRAMS
        size = gl.minimum(gl.num_programs(0) // G - begin, RESIDENT_PROGRAMS)
        rank = (pid - begin * G) // size
        pid = begin + (pid - begin * G) % size
    return pid // heads, pid % heads, rank


@gluon.jit
def store_or_add(
    rank, desc, p, tile, at, cols, C: gl.constexpr, BK: gl.constexpr, GROUPED_HEADS: gl.constexpr
):
    """Writes a tile, or adds it to those of lower ranks. at: the first token, and how many there
    are; cols: the first column, and of how many."""
    row, num_rows = at
    col, stride = cols
    if GROUPED_HEADS:
        if rank == 0:
            common.store_tile(desc, p, tile, row, col, stride, num_rows, C, BK)
        elif num_rows >= C:
            semaphore.tma_reduce_add(desc, [row, col], tile)
        else:
            common.add_rows_masked(p, tile, row, col, stride, num_rows, C, BK)
    else:
        common.store_tile(desc, p, tile, row, col, stride, num_rows, C, BK)


@gluon.jit
def release_next(p_semaphore, rank, G):
    """To the head after this, if there is one: what was written and added is there."""
    if rank + 1 < G:
        semaphore.wait_bulk_stores()
        gl.thread_barrier()
        semaphore.semaphore_release(p_semaphore, rank + 1)


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x rounded. In asm two by two: what is read again as float32 ptxas rounds one by one, in units
    an eighth as fast."""
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = x.to(dtype)
    return y


@gluon.jit
def triangular_products(
    os, ws, vs, p_beta_gate, o_i, o_j, scale,
    al: gl.constexpr, C: gl.constexpr, HAS_GATE: gl.constexpr,
):  # fmt: skip
    """As operands [i, j], then [j, i]; what a token owes itself."""
    dtype: gl.constexpr = ws.dtype
    aa: gl.constexpr = gl.DotOperandLayout(0, al, 2)
    zero = gl.zeros([C, C], gl.float32, al)
    b_a = warpgroup_mma(os, ws.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_m = warpgroup_mma(vs, ws.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_at = warpgroup_mma(ws, os.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_mt = warpgroup_mma(ws, vs.permute((1, 0)), zero, use_acc=False, is_async=True)
    before = o_i[:, None] > o_j[None, :]
    between = gl.full([C, C], 1.0, gl.float32, al)
    if HAS_GATE:
        G_i = gl.load(p_beta_gate + C + o_i)
        G_j = gl.load(p_beta_gate + C + o_j)
        between = G_i[:, None] - G_j[None, :]
        between = gl.where(before, between, -between)
        between = gl.exp2(gl.where(between > 0.0, 0.0, between))
    b_a, b_m, b_at, b_mt = sm90.warpgroup_mma_wait(0, deps=(b_a, b_m, b_at, b_mt))
    diag = gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_a, 0.0), 1) * scale
    # dq and dk multiply the same rounded numbers, of which dg is a difference: beta is in kb
    b_old = gl.where(before, between, 0.0)
    c_a = gl.convert_layout((b_a * (b_old * scale)).to(dtype), aa)
    c_m = gl.convert_layout((b_m * b_old).to(dtype), aa)
    b_new = gl.where(o_i[:, None] < o_j[None, :], between, 0.0)
    c_at = gl.convert_layout((b_at * (b_new * scale)).to(dtype), aa)
    c_mt = gl.convert_layout((-b_mt * b_new).to(dtype), aa)
    return c_a, c_m, c_at, c_mt, diag


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "G"])
def delta_dqkg_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, BK]
    k_desc,
    do_desc,  # [tokens, HV * V] by [C, V]
    w_desc, dv_desc,
    states_desc,  # [chunks * HV * V, K] by [V, BK]
    dstates_desc,
    dq_desc,  # [tokens, HV / G * K] by [C, BK]
    dk_desc, dq_ptr, dk_ptr,
    beta_gates_ptr,  # [chunks, HV, 1 + HAS_GATE, C]: beta and G of base 2
    dbeta_ptr,  # [tokens, HV]
    dg_ptr,  # [tokens, HV]
    cu_ptr,  # [N + 1]
    semaphores_ptr,  # [chunks, HV / G], zeros: how many of G heads have added theirs
    scale, T, N, HV, H, G,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, HAS_GATE: gl.constexpr,
    PACKED: gl.constexpr, GROUPED_HEADS: gl.constexpr,
):  # fmt: skip
    """grid (HV * chunks,), 4 warps: one program takes one chunk of one value head.

    GROUPED_HEADS: G is more than 1.
    """
    dtype: gl.constexpr = k_desc.dtype
    NK: gl.constexpr = K // BK
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    os = gl.allocate_shared_memory(dtype, [1, C, V], do_desc.layout)
    ws = gl.allocate_shared_memory(dtype, [1, C, V], w_desc.layout)
    vs = gl.allocate_shared_memory(dtype, [1, C, V], dv_desc.layout)
    qs = gl.allocate_shared_memory(dtype, [NK, C, BK], q_desc.layout)
    ks = gl.allocate_shared_memory(dtype, [NK, C, BK], k_desc.layout)
    ss = gl.allocate_shared_memory(dtype, [1, V, BK], states_desc.layout)
    ds = gl.allocate_shared_memory(dtype, [1, V, BK], dstates_desc.layout)
    bars = common.alloc_mbarriers(1, 3)
    heads = HV // G  # of dq and dk
    i_chunk, i_sum, rank = locate_chunk(heads, G, GROUPED_HEADS)
    i_h = i_sum * G + rank
    i_chunk_head = i_chunk * HV + i_h
    row, num_rows, _ = common.locate_sequence(cu_ptr, i_chunk, T, N, C, C, PACKED, True)
    if PACKED and num_rows <= 0:
        return
    col, q_col = i_h * V, i_h // (HV // H) * K
    mbarrier.expect(bars.index(0), 3 * do_desc.block_type.nbytes)
    sm90.copy_in(do_desc, [row, col], bars.index(0), os.index(0))
    sm90.copy_in(w_desc, [row, col], bars.index(0), ws.index(0))
    sm90.copy_in(dv_desc, [row, col], bars.index(0), vs.index(0))
    load_states(
        states_desc, dstates_desc, ss.index(0), ds.index(0), bars.index(1), i_chunk_head * V, 0
    )
    mbarrier.expect(bars.index(2), 2 * NK * q_desc.block_type.nbytes)
    for i in gl.static_range(NK):
        sm90.copy_in(q_desc, [row, q_col + i * BK], bars.index(2), qs.index(i))
        sm90.copy_in(k_desc, [row, q_col + i * BK], bars.index(2), ks.index(i))

    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, C, gl.SliceLayout(0, al))
    p_beta_gate = beta_gates_ptr + i_chunk_head.to(gl.int64) * ((1 + HAS_GATE) * C)
    mbarrier.wait(bars.index(0), 0)
    if num_rows < C:
        common.zero_tail_rows(os.index(0), num_rows, C, V)
        common.zero_tail_rows(ws.index(0), num_rows, C, V)
        common.zero_tail_rows(vs.index(0), num_rows, C, V)
        mbarrier.wait(bars.index(2), 0)
        for i in gl.static_range(NK):
            common.zero_tail_rows(qs.index(i), num_rows, C, BK)
            common.zero_tail_rows(ks.index(i), num_rows, C, BK)
        sm90.fence_async_shared()
        gl.thread_barrier()
    b_a, b_m, b_at, b_mt, diag = triangular_products(
        os.index(0), ws.index(0), vs.index(0), p_beta_gate, o_i, o_j, scale, al, C, HAS_GATE
    )
    mbarrier.wait(bars.index(2), 0)
    zero = gl.zeros([C, BK], gl.float32, al)
    sums = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))  # k . dk'
    gates = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))  # q . dq + p . dp - kb . dk'
    e = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))
    z = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, ROWS_BY))
    # T >> 30 is 0, but no compiler knows: without a loop what is above would be left for later
    for i in range(NK + (T >> 30)):
        # 0, but no compiler knows: addresses would take registers all the time
        none = T + i >> 31 << 10
        mbarrier.wait(bars.index(1), i & 1)
        b_dq = warpgroup_mma(os.index(none), ss.index(none), zero, use_acc=False, is_async=True)
        b_dp = warpgroup_mma(vs.index(none), ss.index(none), zero, use_acc=False, is_async=True)
        b_dk = warpgroup_mma(ws.index(none), ds.index(none), zero, use_acc=False, is_async=True)
        if HAS_GATE:
            # again, as beta below: they would take registers all the time
            G_i = gl.load(p_beta_gate + C + (o_i + none))
            G_C = gl.load(p_beta_gate + (2 * C - 1 + none))
            z += row_products(ss.index(none), ds.index(none), V, BK)
            start = gl.exp2(G_i)
            end = gl.exp2(G_C - G_i)
        b_dq, b_dp, b_dk = sm90.warpgroup_mma_wait(0, deps=(b_dq, b_dp, b_dk))
        if i + 1 < NK:
            gl.thread_barrier()
            load_states(
                states_desc, dstates_desc, ss.index(0), ds.index(0), bars.index(1),
                i_chunk_head * V, (i + 1) * BK,
            )  # fmt: skip
        b_dq *= scale
        if HAS_GATE:
            b_dq *= start[:, None]
            b_dp *= start[:, None]
            b_dk *= end[:, None]
        beta = gl.load(p_beta_gate + (o_i + none))
        if HAS_GATE:
            e += gl.sum(b_dk * rounded(ks.index(i).load(al) * beta[:, None], dtype), 1)
        b_dk = warpgroup_mma(b_at, qs.index(i), b_dk, is_async=True)
        b_dk = warpgroup_mma(b_mt, ks.index(i), b_dk, is_async=True)
        b_dk = sm90.warpgroup_mma_wait(0, deps=(b_dk,))
        b_k = ks.index(i).load(al)
        b_kb = rounded(b_k * beta[:, None], dtype)
        gl.thread_barrier()
        ks.index(i).store(b_kb)
        sm90.fence_async_shared()
        gl.thread_barrier()
        b_dq = warpgroup_mma(b_a, ks.index(i), b_dq, is_async=True)
        b_dp = warpgroup_mma(b_m, ks.index(i), b_dp, is_async=True)
        if HAS_GATE:  # beside the products, which don't read it
            gates -= gl.sum(b_dk * b_kb, 1)
        b_dk += diag[:, None] * qs.index(i).load(al)
        sums += gl.sum(b_dk * b_k, 1)
        b_dk *= beta[:, None]
        b_dq, b_dp = sm90.warpgroup_mma_wait(0, deps=(b_dq, b_dp))
        if HAS_GATE:
            gates += gl.sum(b_dq * qs.index(i).load(al) - b_dp * b_k, 1)
        b_dq = (b_dq + diag[:, None] * ks.index(i).load(al)).to(dtype)
        b_dk -= b_dp
        gl.thread_barrier()
        qs.index(i).store(b_dq)
        ks.index(i).store(b_dk.to(dtype))
        sm90.fence_async_shared()
        gl.thread_barrier()
        if GROUPED_HEADS and (i == 0):
            while semaphore.semaphore_acquire(semaphores_ptr + i_chunk * heads + i_sum) < rank:
                pass
        at, cols = (row + none, num_rows + none), (i_sum * K + i * BK, heads * K)
        store_or_add(rank, dq_desc, dq_ptr, qs.index(i), at, cols, C, BK, GROUPED_HEADS)
        store_or_add(rank, dk_desc, dk_ptr, ks.index(i), at, cols, C, BK, GROUPED_HEADS)

    o_t = (row + o_i).to(gl.int64) * HV + i_h
    if HAS_GATE:
        G_C = gl.load(p_beta_gate + (2 * C - 1 + (num_rows >> 31)))
        z = gl.sum(e, 0) + gl.sum(z, 0) * gl.exp2(G_C)
        gates = gl.convert_layout(gates, gl.SliceLayout(0, al))
        dg = gl.sum(gl.where(o_j[None, :] >= o_i[:, None], gates[None, :], 0.0), 1)
        strong = strong_gates(p_beta_gate + C + (num_rows >> 31), o_i)
        gl.store(dg_ptr + o_t, gl.where(strong, 0.0, dg + z), mask=o_i < num_rows)
    gl.store(dbeta_ptr + o_t, sums, mask=o_i < num_rows)
    if GROUPED_HEADS:
        release_next(semaphores_ptr + i_chunk * heads + i_sum, rank, G)
    common.invalidate_mbarriers(bars)
    sm90.store_wait(0)
