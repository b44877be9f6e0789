"""Delta rule, no decay or one a token, on sm_90: the scan over chunks, forward.

With S [K, V] the state before a chunk, R from triton/delta/solve_tril.py and G the sum of the
chunk's gates, what Triton's chunk kernel computes is written with one product fewer on the
chain from chunk to chunk, since W does not depend on S:

    W = R diag(exp(G)) k          w = R v - W S          S <- exp(G_C) S + (k exp(G_C - G))^T beta w
    o = scale (diag(exp(G)) q S + tril(q k^T decay) beta w)

V as the rows: a program carries S^T [BV, K] of one value head in registers; S^T and w^T go from
product to product as left operands. Four partitions of a program:

    load_partition, 1 warp       wy_partition, 4         state_partition, 4    output_partition, 4
      k, v, R, beta, G -- full -->  R diag(exp(G)) k       R v - W S             q k^T
                                    -W -- w_full ----->    S, w -- x_full --->   o
                                    <-- x_full             <-- x_empty
      <-- empty                                            arrives at empty      arrives at empty
      q ---------------------------------------- q_full ---------------------->  reads q
      <-- q_empty

    buffers               stages  arrivals a phase: full / empty
    k, v, R, beta, G      ST      2 (TMA, and the warp that stores beta and G) / 2, or 1 without o
    W [C, K]              2       1 / x_full: W has been read once w is there
    S [BV, K], w          2       1 / 1
    q [C, K]              2       1 (TMA) / 1

wy_partition is a chunk ahead of the chain, and zeroes what is past the end of a short chunk:
output_partition waits for its W there. With SAVE_STATES save_partition, which writes S and w for
backward, is in the place of output_partition, and there is no q. output_partition can store S at
regular intervals of chunks, where the backward starts its own scans (bwd_fused.py). Shared memory
moves 232 KB a chunk.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.delta import delta_device
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# constants of a launch, for device functions
Constants = namedtuple(
    "Constants",
    "K V BV C ST HAS_GATE HAS_S_IN HAS_S_OUT SAVE_STATES SAVE_CHECKPOINTS TRANSITION_ONLY",
)


class Tiles(NamedTuple):
    """Buffers of chunks: ST stages of what load_partition reads, two of W."""

    k: Any
    v: Any
    r: Any
    beta_gate: Any
    w: Any


class Copies(NamedTuple):
    """S before a chunk and w, two stages, for the partition that writes."""

    state: Any
    w: Any


class Barriers(NamedTuple):
    """full, empty: of k, v, r and beta_gate. x: of the copies."""

    full: Any
    empty: Any
    w_full: Any
    x_full: Any  # w_empty too: state_partition has read W then
    x_empty: Any


@gluon.jit
def load_partition(
    descs, tiles, barriers, queries, p_beta_gate, stride, row, v_row, n, k_col, v_col, r_col, c,
    HAS_Q: gl.constexpr,
):  # fmt: skip
    """v_row: row, or one past all of v's where v is to be zero. queries: of HAS_Q alone."""
    q_desc, k_desc, v_desc, r_desc = descs
    nbytes: gl.constexpr = (
        k_desc.block_type.nbytes + v_desc.block_type.nbytes + r_desc.block_type.nbytes
    )
    b_beta_gate = common.load_beta_gate(p_beta_gate, c.C, c.HAS_GATE)
    for i in range(n):
        s = i % c.ST
        mbarrier.wait(barriers.empty.index(s), ((i // c.ST) & 1) ^ 1)
        mbarrier.expect(barriers.full.index(s), nbytes)
        sm90.copy_in(k_desc, [row + i * c.C, k_col], barriers.full.index(s), tiles.k.index(s))
        sm90.copy_in(r_desc, [row + i * c.C, r_col], barriers.full.index(s), tiles.r.index(s))
        sm90.copy_in(v_desc, [v_row + i * c.C, v_col], barriers.full.index(s), tiles.v.index(s))
        tiles.beta_gate.index(s).store(b_beta_gate)
        mbarrier.arrive(barriers.full.index(s), count=1)
        b_beta_gate = common.load_beta_gate(
            p_beta_gate + gl.minimum(i + 1, n - 1) * stride, c.C, c.HAS_GATE
        )
        if HAS_Q:
            t = i % 2
            mbarrier.wait(queries.empty.index(t), ((i // 2) & 1) ^ 1)
            mbarrier.expect(queries.full.index(t), q_desc.block_type.nbytes)
            sm90.copy_in(q_desc, [row + i * c.C, k_col], queries.full.index(t), queries.q.index(t))


@gluon.jit
def wy_partition(tiles, barriers, length, n, c):
    """-W = -(R diag(exp(G))) k into shared memory."""
    wl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.K, 16])
    ra: gl.constexpr = gl.DotOperandLayout(0, wl, 2)
    zero = gl.zeros([c.C, c.K], gl.float32, wl)
    for i in range(n):
        s = i % c.ST
        w = i % 2
        mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)
        if length - i * c.C < c.C:
            common.zero_tail_rows(tiles.k.index(s), length - i * c.C, c.C, c.K)
            common.zero_tail_rows(tiles.v.index(s), length - i * c.C, c.C, c.BV)
            common.zero_tail_rows(tiles.r.index(s), length - i * c.C, c.C, c.C)
            sm90.fence_async_shared()
            gl.thread_barrier()
        b_r = tiles.r.index(s).load(ra)
        if c.HAS_GATE:
            b_G = tiles.beta_gate.index(s).slice(c.C, c.C).load(gl.SliceLayout(0, ra))
            b_r = (b_r.to(gl.float32) * gl.exp2(b_G)[None, :]).to(tiles.k.dtype)
        b_w = warpgroup_mma(b_r, tiles.k.index(s), zero, use_acc=False, is_async=True)
        b_w = sm90.warpgroup_mma_wait(0, deps=(b_w,))
        # the scan has left what it makes of the W that was there
        mbarrier.wait(barriers.x_full.index(w), ((i // 2) & 1) ^ 1)
        tiles.w.index(w).store((-b_w).to(tiles.k.dtype))
        sm90.fence_async_shared()
        mbarrier.arrive(barriers.w_full.index(w), count=1)


@gluon.jit
def state_partition(tiles, copies, barriers, state_refs, pool, width, reads, writes, unit, n, c):
    """reads, writes: whether s_in and s_out have the state at this program's ends.

    width: columns of s_out. TRANSITION_ONLY: the state after the segment alone, and those on the
    way that `pool` asks for; that of a unit matrix from column `unit` on where v is zero, and unit
    is below K.
    """
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.K, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_v = gl.arange(0, c.BV, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, c.K, gl.SliceLayout(0, sl))
    o_in = state_refs.in_offset + o_k[None, :] * c.V + o_v[:, None]
    if c.HAS_S_IN:
        b_s = gl.load(state_refs.in_ptr + o_in, mask=(o_k >= 0)[None, :] & reads, other=0.0).to(
            gl.float32
        )
    else:
        b_s = gl.zeros([c.BV, c.K], gl.float32, sl)
    if c.TRANSITION_ONLY:
        b_s = gl.where((o_v + unit)[:, None] == o_k[None, :], 1.0, b_s)
    zero = gl.zeros([c.BV, c.C], gl.float32, xl)
    if c.TRANSITION_ONLY and pool.ptr is not None:  # segment_launch.py
        p_start = pool.ptr
        start = 0
    for i in range(n):
        s = i % c.ST
        w = i % 2
        if c.TRANSITION_ONLY and pool.ptr is not None:  # noqa: SIM102
            if i == start:
                gl.store(p_start + (o_k[None, :] * c.V + o_v[:, None]), b_s)
                p_start += pool.size
                start += pool.every
        if pool.rows is not None:
            to = gl.load(pool.rows + i)
        # wy_partition has seen the stage full, and may have cleared its tail
        mbarrier.wait(barriers.w_full.index(w), (i // 2) & 1)
        mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)
        b_w = warpgroup_mma(
            tiles.v.index(s).permute((1, 0)), tiles.r.index(s).permute((1, 0)), zero,
            use_acc=False, is_async=True,
        )  # fmt: skip
        # rounded for the products and the copy alone: the state goes on in float32
        b_sb = b_s.to(tiles.k.dtype)
        b_w = warpgroup_mma(
            gl.convert_layout(b_sb, sa), tiles.w.index(w).permute((1, 0)), b_w, is_async=True
        )
        b_share = tiles.beta_gate.index(s).slice(0, c.C).load(gl.SliceLayout(0, xl))
        if c.HAS_GATE:
            last = tiles.beta_gate.index(s).slice(2 * c.C - 1, 1)
            b_s *= gl.exp2(last.load(gl.SliceLayout(0, sl)))[None, :]
            b_G = tiles.beta_gate.index(s).slice(c.C, c.C).load(gl.SliceLayout(0, xl))
            b_share *= gl.exp2(last.load(gl.SliceLayout(0, xl)) - b_G)
        # output_partition has read the copies of two chunks ago
        if not c.TRANSITION_ONLY:
            mbarrier.wait(barriers.x_empty.index(w), ((i // 2) & 1) ^ 1)
            copies.state.index(w).store(b_sb)
        b_w = sm90.warpgroup_mma_wait(0, deps=(b_w,))
        b_lhs = (b_w * b_share[None, :]).to(tiles.k.dtype)
        b_s = warpgroup_mma(gl.convert_layout(b_lhs, xa), tiles.k.index(s), b_s, is_async=True)
        if not c.TRANSITION_ONLY:
            if c.SAVE_STATES:
                copies.w.index(w).permute((1, 0)).store(b_w.to(tiles.k.dtype))
            else:
                copies.w.index(w).store(b_w.to(tiles.k.dtype))
            sm90.fence_async_shared()
        mbarrier.arrive(barriers.x_full.index(w), count=1)
        b_s = sm90.warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(barriers.empty.index(s), count=1)
        if pool.rows is not None:
            common.store_to_pool(pool, to, b_s, o_v[:, None] * c.K + o_k[None, :])
    if c.HAS_S_OUT:
        o_out = state_refs.out_offset + o_k[None, :] * width + o_v[:, None]
        gl.store(state_refs.out_ptr + o_out, b_s, mask=(o_k >= 0)[None, :] & writes)


@gluon.jit
def output_partition(
    output, tiles, copies, barriers, queries, os, checkpoints, row, o_row, v_col, length, n, scale,
    c,
):  # fmt: skip
    """o [C, BV] of each chunk, off the chain. o_row: elements of o from token to token."""
    o_desc, o_ptr = output
    if c.SAVE_CHECKPOINTS:
        next_chunk, next_row = checkpoints.chunk, checkpoints.row
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    ol: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BV, 16])
    aa: gl.constexpr = gl.DotOperandLayout(0, ol, 2)
    o_i = gl.arange(0, c.C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, c.C, gl.SliceLayout(0, al))
    zero = gl.zeros([c.C, c.C], gl.float32, al)
    zero_o = gl.zeros([c.C, c.BV], gl.float32, ol)
    whole = length // c.C
    for i in range(n):
        s = i % c.ST
        b = i % 2
        # without SAVE_CHECKPOINTS there are registers for what it is made of, but not for that and
        # itself
        seen = (o_i + (0 if c.SAVE_CHECKPOINTS else i >> 30))[:, None] >= o_j[None, :]
        mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)
        if i == whole:  # a short one, whose rest wy_partition zeroes
            mbarrier.wait(barriers.w_full.index(b), (i // 2) & 1)
        mbarrier.wait(queries.full.index(b), (i // 2) & 1)
        # q once from shared memory for two products, whose operands are what limits its pace
        b_q = queries.q.index(b).load(gl.DotOperandLayout(0, al, 2))
        keys = tiles.k.index(s).permute((1, 0))
        b_a = warpgroup_mma(b_q, keys, zero, use_acc=False, is_async=True)
        b_beta = tiles.beta_gate.index(s).slice(0, c.C).load(gl.SliceLayout(0, al))
        if c.HAS_GATE:
            sums = tiles.beta_gate.index(s).slice(c.C, c.C)
            G_i = sums.load(gl.SliceLayout(1, al))
            G_j = sums.load(gl.SliceLayout(0, al))
            b_start = gl.exp2(sums.load(gl.SliceLayout(1, ol)))
        # the exponentials above need no product: they ran beside it
        b_a = sm90.warpgroup_mma_wait(0, deps=(b_a,))
        mbarrier.arrive(queries.empty.index(b), count=1)
        mbarrier.arrive(barriers.empty.index(s), count=1)
        if c.HAS_GATE:
            # masked before exp2: above the diagonal the difference is positive and may overflow
            between = G_i[:, None] - G_j[None, :]
            b_a = b_a * gl.exp2(gl.where(seen, between, float("-inf")))
        b_a = gl.where(seen, b_a * b_beta[None, :], 0.0)
        b_a = gl.convert_layout(b_a.to(tiles.k.dtype), aa)
        mbarrier.wait(barriers.x_full.index(b), (i // 2) & 1)
        if c.SAVE_CHECKPOINTS:  # noqa: SIM102
            if i == next_chunk:
                sm90.copy_out(checkpoints.desc, [next_row, 0], copies.state.index(b))
                next_chunk += checkpoints.interval
                next_row += checkpoints.row_step
        b_q = gl.convert_layout(b_q, aa)
        b_o = warpgroup_mma(
            b_q, copies.state.index(b).permute((1, 0)), zero_o, use_acc=False, is_async=True
        )
        b_o = sm90.warpgroup_mma_wait(0, deps=(b_o,))
        if c.HAS_GATE:
            b_o = b_o * b_start[:, None]
        b_o = warpgroup_mma(b_a, copies.w.index(b).permute((1, 0)), b_o, is_async=True)
        b_o = sm90.warpgroup_mma_wait(0, deps=(b_o,))
        if c.SAVE_CHECKPOINTS:
            sm90.store_wait(0)
        mbarrier.arrive(barriers.x_empty.index(b), count=1)
        b_o = (b_o * scale).to(tiles.k.dtype)
        t = i * c.C
        sm90.store_wait(0)
        os.store(b_o)
        sm90.fence_async_shared()
        gl.thread_barrier()
        common.store_tile(o_desc, o_ptr, os, row + t, v_col, o_row, length - t, c.C, c.BV)
    sm90.store_wait(0)


@gluon.jit
def save_partition(
    states_desc, w_desc, w_ptr, copies, barriers, row, chunk, HV, o_row, v_col, i_v, length, n, c
):
    """S before each chunk, and w."""
    for i in range(n):
        b = i % 2
        t = i * c.C
        mbarrier.wait(barriers.x_full.index(b), (i // 2) & 1)
        sm90.copy_out(states_desc, [(chunk + i * HV) * c.V + i_v, 0], copies.state.index(b))
        w = copies.w.index(b)
        common.store_tile(w_desc, w_ptr, w, row + t, v_col, o_row, length - t, c.C, c.BV)
        sm90.store_wait(0)
        mbarrier.arrive(barriers.x_empty.index(b), count=1)


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "segment", "every"])
def delta_chunk_fwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    v_desc,  # [tokens, HV * V] by [C, BV]
    r_desc,  # [tokens, HV * C] by [C, C]
    o_desc,  # [tokens, HV * V] by [C, BV]: o, or w if SAVE_STATES
    states_desc,  # [chunks * HV * V, K] by [BV, K]: S before each chunk, if SAVE_STATES
    # [checkpoints * HV * V, K] by [BV, K]: S before every so many chunks, if SAVE_CHECKPOINTS
    checkpoints_desc, o_ptr,
    beta_gates_ptr,  # [chunks, HV, ROWS, C]: beta and G
    s_in_ptr,  # [segments, HV, K, V]
    s_out_ptr,  # [N, HV, K, V]
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H, segment, every,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    SAVE_STATES: gl.constexpr, HAS_GATE: gl.constexpr, HAS_S_IN: gl.constexpr,
    HAS_S_OUT: gl.constexpr, SPLIT: gl.constexpr, PACKED: gl.constexpr,
    SAVE_CHECKPOINTS: gl.constexpr = False,
    pool_ptr=None,  # [rows, HV, V, K], a pool
    to_ptr=None,  # [N, T / C, rounded up]: rows of it for S after chunks; none below 0
):  # fmt: skip
    """grid (V / BV * HV * segments,), 4 warps: one program scans BV columns of V of one head.

    Over one of the N sequences, or if SPLIT a segment of it, of `segment` tokens. SAVE_CHECKPOINTS:
    S is left before `every` chunks of a sequence.
    """
    c: gl.constexpr = Constants(
        K, V, BV, C, ST, HAS_GATE, HAS_S_IN, HAS_S_OUT, SAVE_STATES, SAVE_CHECKPOINTS, False
    )
    dtype: gl.constexpr = k_desc.dtype
    ks, vs, rs, gs = delta_device.alloc_stages(k_desc, v_desc, r_desc, HAS_GATE, K, BV, C, ST)
    ws = gl.allocate_shared_memory(dtype, [2, C, K], k_desc.layout)
    ss = gl.allocate_shared_memory(dtype, [2, BV, K], k_desc.layout)
    full = common.alloc_mbarriers(2, ST)
    w_full = common.alloc_mbarriers(1, 2)
    x_full = common.alloc_mbarriers(1, 2)
    x_empty = common.alloc_mbarriers(1, 2)
    i_v, i_h, i_seg, row, length, n, chunk, i_n, i_s, last = delta_device.program_coords(
        cu_ptr, T, N, HV, segment, V // BV, BV, C, PACKED, SPLIT
    )
    k_col = i_h // (HV // (H + (n >> 31))) * K  # 0, or HV // H would be made at once, and kept
    v_col = i_h * V + i_v
    r_col = i_h * C
    p_beta_gate, stride = delta_device.beta_gate_ptr(beta_gates_ptr, chunk, HV, C, HAS_GATE)
    o_in = delta_device.state_offset(i_seg, i_h, HV, K, V) + i_v
    o_out = delta_device.state_offset(i_n, i_h, HV, K, V) + i_v
    tiles = Tiles(ks, vs, rs, gs, ws)
    state_refs = delta_device.StateRefs(s_in_ptr, s_out_ptr, o_in, o_out)
    pool = common.PoolRefs(None, None, None)
    if to_ptr is not None:
        at = (i_h * V + i_v) * K
        pool = common.pool_refs_of(pool_ptr, to_ptr, i_n, i_s, at, HV, T, segment, K * V, C)
    if SAVE_STATES:
        xs = gl.allocate_shared_memory(dtype, [2, C, BV], v_desc.layout)
        empty = common.alloc_mbarriers(1, ST)
        copies = Copies(ss, xs)
        barriers = Barriers(full, empty, w_full, x_full, x_empty)
        gl.warp_specialize(
            [
                (state_partition, (
                    tiles, copies, barriers, state_refs, pool, V, True, last, K, n, c)),
                (save_partition, (
                    states_desc, o_desc, o_ptr, copies, barriers, row, chunk, HV, HV * V, v_col,
                    i_v, length, n, c)),
                (wy_partition, (tiles, barriers, length, n, c)),
                (load_partition, (
                    (k_desc, k_desc, v_desc, r_desc), tiles, barriers, barriers, p_beta_gate,
                    stride, row, row, n, k_col, v_col, r_col, c, False)),
            ],
            [4, 4, 1],
            [80, 152, 24],
        )  # fmt: skip
    else:
        qs = gl.allocate_shared_memory(dtype, [2, C, K], q_desc.layout)
        xs = gl.allocate_shared_memory(dtype, [2, BV, C], r_desc.layout)
        os = gl.allocate_shared_memory(dtype, [C, BV], o_desc.layout)
        empty = common.alloc_mbarriers(2, ST)
        q_full = common.alloc_mbarriers(1, 2)
        q_empty = common.alloc_mbarriers(1, 2)
        copies = Copies(ss, xs)
        barriers = Barriers(full, empty, w_full, x_full, x_empty)
        queries = delta_device.Queries(qs, q_full, q_empty)
        checkpoints = queries
        if SAVE_CHECKPOINTS:
            checkpoints = delta_device.checkpoints_of(
                checkpoints_desc, i_n, i_s, i_h, i_v, row, T, segment, every, HV,
                V, C, PACKED, SPLIT,
            )  # fmt: skip
        gl.warp_specialize(
            [
                (state_partition, (
                    tiles, copies, barriers, state_refs, pool, V, True, last, K, n, c)),
                (output_partition, (
                    (o_desc, o_ptr), tiles, copies, barriers, queries, os, checkpoints, row,
                    HV * V, v_col, length, n, scale, c)),
                (wy_partition, (tiles, barriers, length, n, c)),
                (load_partition, (
                    (q_desc, k_desc, v_desc, r_desc), tiles, barriers, queries, p_beta_gate,
                    stride, row, row, n, k_col, v_col, r_col, c, True)),
            ],
            [4, 4, 1],
            [160, 120, 24],
        )  # fmt: skip
