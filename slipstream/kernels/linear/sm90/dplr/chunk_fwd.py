"""Decays per channel, or free a and b, on sm_90: the scan over chunks, forward.

From wy.py come q~, W, U, b^, k^, total, qb and qk of all chunks. With S [K, V] the state
before a chunk,

    x = U + W S        o = q~ S + qb x + qk v        S <- total S + b^T x + k^T v

(delta has no qk v and no k^T v). V as the rows: a part of 4 warps carries S^T [64, K] of 64 columns
of V in registers, and S^T and x^T go from product to product as left operands. A program has all V
of a head: its parts read the same tiles. U comes straight into the registers that x is summed in, a
chunk ahead. What limits the pace is memory.

    load_partition, 1 warp                     state_partition, 4 warps for each 64 columns of V
      W, b^, q~, k^, qb, qk, v, total            x, o and S; o, x and S go to memory by TMA from
                            -- full -->          buffers of this partition alone
      <-- empty

    buffers                            stages  arrivals a phase: full / empty
    tiles [C, K] and [C, C], total     ST      1 (TMA), 2 with gates: the warp stores total / V / 64

For backward x and S are written instead of o. Of sequences in segments (SPLIT) E and M are wanted
first, as in triton/dplr/chunk.py: nothing else is written then, and a program has as many
columns of M as another has of V, for which U and v are zeros.

Where a state decays a segment needs not be scanned whole for these. A chunk's transition is
total + b^T W, which makes no state longer than by

    max total + sum over tokens of |b^_t| |W_t|

Once the product of these over a segment's last chunks is below 2^-NEGLIGIBLE_LOG2, M is taken as
zero, of which `m_is_zero` is told, and E from those chunks alone. Sums of gates would not do: a key
that erases across channels moves what a weak one holds to a strong one and back.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.delta.delta_device import NEGLIGIBLE_LOG2, OOB_ROW
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# descriptors of what is loaded; what is stored; the states' ends, and M
Descs = namedtuple("Descs", "q w b k qb qk v")
Outs = namedtuple("Outs", "o x states p_o p_u")
Ends = namedtuple("Ends", "s_in s_out m")
# a program's place, as a state_partition takes it; constants of a launch
Place = namedtuple("Place", "chunk HV token_heads row v_col i_s m_col length n")
Constants = namedtuple("Constants", "K V C ST NV DELTA HAS_GATE HAS_S_IN HAS_S_OUT OUTPUT")


class Tiles(NamedTuple):
    """Buffers of chunks, ST stages, by the names of wy.py; another's where a call has no such."""

    q: Any
    w: Any
    b: Any
    k: Any
    qb: Any
    qk: Any
    v: Any  # NV a stage
    total: Any


class Copies(NamedTuple):
    """Tiles that TMA stores, one for each 64 columns of V."""

    x: Any  # or o
    state: Any


@gluon.jit
def transition_log2norm(w_ptr, b_ptr, total_ptr, at, K: gl.constexpr, C: gl.constexpr):
    """log2 of the largest factor by which a chunk can lengthen a state; `at`: chunk and head."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    o_k = gl.arange(0, K, gl.SliceLayout(0, rows))
    o_t = gl.arange(0, C, gl.SliceLayout(1, rows))
    o = at * (C * K) + o_t[:, None] * K + o_k[None, :]
    b_w = gl.load(w_ptr + o).to(gl.float32)
    b_b = gl.load(b_ptr + o).to(gl.float32)
    b_total = gl.load(total_ptr + at * K + o_k)
    # squares that float32 has no room for add up to 2^-118 at most
    b_w = gl.sqrt(gl.sum(b_w * b_w, 1) + 2.0**-118)
    b_b = gl.sqrt(gl.sum(b_b * b_b, 1) + 2.0**-118)
    return gl.log2(gl.sum(b_w * b_b, 0) + gl.max(b_total, 0))


@gluon.jit
def effective_chunks(
    w_ptr, b_ptr, total_ptr, chunk, HV, n, K: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """The number of last chunks, of n, that E is made from, and whether M counts as zero."""
    need = n * 0
    log = 0.0
    most = gl.minimum(n, 4)
    # another one is looked at where each so far has taken off 2^-8
    while (need < most) & (log >= -NEGLIGIBLE_LOG2) & (log <= -8.0 * need):
        need += 1
        at = (chunk + (n - need) * HV).to(gl.int64)
        log += transition_log2norm(w_ptr, b_ptr, total_ptr, at, K, C)
    decayed = log < -NEGLIGIBLE_LOG2
    return gl.where(decayed, need, n), decayed


@gluon.jit
def load_partition(descs, total_ptr, tiles, full, empty, chunk, HV, row, v_col, n, c):
    """chunk: of the first. row: of v."""
    OUT: gl.constexpr = c.OUTPUT == "o"
    layout: gl.constexpr = gl.BlockedLayout([c.K // 32], [32], [1], [0])
    wide: gl.constexpr = descs.w.block_type.nbytes
    square: gl.constexpr = descs.qb.block_type.nbytes if OUT else 0
    columns: gl.constexpr = 0 if c.DELTA else c.NV * descs.v.block_type.nbytes
    # one barrier counts all tiles of a stage: the partitions wait once a chunk
    nbytes: gl.constexpr = (3 - c.DELTA + OUT) * wide + (2 - c.DELTA) * square + columns
    o_k = gl.arange(0, c.K, layout)
    if c.HAS_GATE:
        b_total = gl.load(total_ptr + gl.cast(chunk, gl.int64) * c.K + o_k)
    for i in range(n):
        s = i % c.ST
        at = (chunk + i * HV) * c.C
        mbarrier.wait(empty.index(s), ((i // c.ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), nbytes)
        sm90.copy_in(descs.w, [at, 0], full.index(s), tiles.w.index(s))
        sm90.copy_in(descs.b, [at, 0], full.index(s), tiles.b.index(s))
        if OUT:
            sm90.copy_in(descs.q, [at, 0], full.index(s), tiles.q.index(s))
            sm90.copy_in(descs.qb, [at, 0], full.index(s), tiles.qb.index(s))
        if not c.DELTA:
            sm90.copy_in(descs.k, [at, 0], full.index(s), tiles.k.index(s))
            for p in gl.static_range(c.NV):
                v = tiles.v.index(s * c.NV + p)
                sm90.copy_in(descs.v, [row + i * c.C, v_col + p * 64], full.index(s), v)
            if OUT:
                sm90.copy_in(descs.qk, [at, 0], full.index(s), tiles.qk.index(s))
        if c.HAS_GATE:
            tiles.total.index(s).store(b_total)
            mbarrier.arrive(full.index(s), count=1)
            # the next chunk's, which come from global memory while this warp waits for a stage
            after = chunk + gl.minimum(i + 1, n - 1) * HV
            b_total = gl.load(total_ptr + gl.cast(after, gl.int64) * c.K + o_k)


@gluon.jit
def store_output(desc, row, tile, b):
    """b to global memory by way of a tile in shared memory."""
    sm90.store_wait(0)
    gl.thread_barrier()
    tile.store(b)
    sm90.fence_async_shared()
    gl.thread_barrier()
    sm90.copy_out(desc, [row, 0], tile)


@gluon.jit
def state_partition(
    outs, tiles, copies, full, empty, ends, pool, place, PARTITION: gl.constexpr, c
):
    """Columns 64 PARTITION and on of V, or of those of M from m_col on if that is not negative.

    i_s: number of the segment's and head's states.
    """
    chunk, HV, token_heads, row, v_col, i_s, m_col, length, n = place
    OUT: gl.constexpr = c.OUTPUT == "o"
    SAVE_STATES: gl.constexpr = c.OUTPUT == "states"
    TRANSITION: gl.constexpr = c.OUTPUT == "ends"
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.K, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_v = gl.arange(0, 64, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, c.K, gl.SliceLayout(0, sl))
    o_u = PARTITION * 64 + gl.arange(0, 64, gl.SliceLayout(1, xl))
    o_x = o_u[:, None] * c.C + gl.arange(0, c.C, gl.SliceLayout(0, xl))[None, :]
    # columns of M have no U: they are the part that is linear in the state
    m_u = (m_col + o_u < 0)[:, None]
    o_v += PARTITION * 64
    o_s = i_s * (c.K * c.V) + o_k[None, :] * c.V + o_v[:, None]
    if c.HAS_S_IN:
        b_s = gl.load(ends.s_in + o_s).to(gl.float32)
    else:
        b_s = gl.zeros([64, c.K], gl.float32, sl)
    if TRANSITION:
        # M is what becomes of a unit matrix
        b_s = gl.where((m_col + o_v)[:, None] == o_k[None, :], 1.0, b_s)
    zero = gl.zeros([64, c.C], gl.float32, xl)
    p_u = outs.p_u + gl.cast(chunk, gl.int64) * (c.V * c.C)
    b_u = load_u(p_u + o_x, m_u, TRANSITION)
    for i in range(n):
        s = i % c.ST
        if pool.rows is not None:
            to = gl.load(pool.rows + i)
        at = (chunk + i * HV) * c.V + PARTITION * 64
        p_u += gl.where(i + 1 < n, HV, 0) * (c.V * c.C)
        # a chunk ahead, so that no product waits for global memory
        b_next = load_u(p_u + o_x, m_u, TRANSITION)
        mbarrier.wait(full.index(s), (i // c.ST) & 1)
        # rounded for the products alone: the state goes on in float32
        b_lhs = b_s.to(tiles.w.dtype)
        lhs = gl.convert_layout(b_lhs, sa)
        b_x = warpgroup_mma(lhs, tiles.w.index(s).permute((1, 0)), b_u, is_async=True)
        if SAVE_STATES:
            store_output(outs.states, at, copies.state.index(PARTITION), b_lhs)
        if OUT:
            q = tiles.q.index(s).permute((1, 0))
            b_o = warpgroup_mma(lhs, q, zero, use_acc=False, is_async=True)
        if c.HAS_GATE:
            b_s = b_s * tiles.total.index(s).load(gl.SliceLayout(0, sl))[None, :]
        if not c.DELTA:
            v = tiles.v.index(s * c.NV + PARTITION)
            if length - i * c.C < c.C:
                common.zero_tail_rows(v, length - i * c.C, c.C, 64)
                sm90.fence_async_shared()
                gl.thread_barrier()
            b_v = v.permute((1, 0))
            b_s = warpgroup_mma(b_v, tiles.k.index(s), b_s, is_async=True)
            if OUT:
                right = tiles.qk.index(s).permute((1, 0))
                b_o = warpgroup_mma(b_v, right, b_o, is_async=True)
        # x alone is waited for: o and the share of v in S, which were started after it, go on
        b_x = sm90.warpgroup_mma_wait(OUT + (1 + OUT) * (1 - c.DELTA), deps=(b_x,))
        b_lhs = b_x.to(tiles.w.dtype)
        b_s = warpgroup_mma(gl.convert_layout(b_lhs, xa), tiles.b.index(s), b_s, is_async=True)
        if not OUT:
            if SAVE_STATES:
                store_output(outs.x, at, copies.x.index(PARTITION), b_lhs)
            b_s = sm90.warpgroup_mma_wait(0, deps=(b_s,))
            mbarrier.arrive(empty.index(s), count=1)
        else:
            right = tiles.qb.index(s).permute((1, 0))
            b_o = warpgroup_mma(gl.convert_layout(b_lhs, sa), right, b_o, is_async=True)
            b_s, b_o = sm90.warpgroup_mma_wait(0, deps=(b_s, b_o))
            mbarrier.arrive(empty.index(s), count=1)
            if pool.rows is not None:
                common.store_to_pool(pool, to, b_s, o_v[:, None] * c.K + o_k[None, :])
            write_o(
                outs.o, outs.p_o, copies.x.index(PARTITION), b_o.to(tiles.w.dtype), row + i * c.C,
                v_col + PARTITION * 64,
                length - i * c.C, token_heads * c.V, c.C, rows,
            )  # fmt: skip
        b_u = b_next
    sm90.store_wait(0)
    if c.HAS_S_OUT:
        if TRANSITION:
            o_m = i_s * (c.K * c.K) + o_k[None, :] * c.K + (m_col + o_v)[:, None]
            gl.store(ends.m + o_m, b_s, mask=((m_col >= 0) & (m_col + o_v < c.K))[:, None])
            gl.store(ends.s_out + o_s, b_s, mask=(m_col + o_v < 0)[:, None])
        else:
            gl.store(ends.s_out + o_s, b_s)


@gluon.jit
def load_u(p, m, TRANSITION: gl.constexpr):
    if TRANSITION:
        b = gl.load(p, mask=m, other=0.0)
    else:
        b = gl.load(p)
    return b


@gluon.jit
def write_o(
    o_desc, o_ptr, tile, b, row, column, num_rows, width, C: gl.constexpr, rows: gl.constexpr
):
    """b [64, C] as o [C, 64], of which the first `num_rows` rows."""
    sm90.store_wait(0)
    gl.thread_barrier()
    tile.permute((1, 0)).store(b)
    sm90.fence_async_shared()
    gl.thread_barrier()
    if num_rows >= C:
        sm90.copy_out(o_desc, [row, column], tile)
    else:
        o_t = gl.arange(0, C, gl.SliceLayout(1, rows))
        o_c = gl.arange(0, 64, gl.SliceLayout(0, rows))
        p_o = o_ptr + (row + o_t).to(gl.int64)[:, None] * width + (column + o_c)[None, :]
        gl.store(p_o, tile.load(rows), mask=(o_t < num_rows)[:, None])


@gluon.jit(do_not_specialize=["T", "N", "HV", "token_heads", "segment"])
def dplr_chunk_fwd_sm90_kernel(
    q_desc,  # [slots * HV * C, K] by [C, K]
    w_desc, b_desc,
    k_desc,  # dplr
    qb_desc,  # [slots * HV * C, C] by [C, C]
    qk_desc,  # dplr
    v_desc,  # [tokens, HV * V] by [C, 64], dplr
    o_desc,  # [tokens, HV * V] by [C, 64]
    x_desc,  # [slots * HV * V, C] by [64, C], SAVE_STATES
    states_desc,  # [slots * HV * V, K] by [64, K], SAVE_STATES: S before each chunk
    o_ptr,
    u_ptr,  # [slots, HV, V, C]: U, float32
    total_ptr,  # [slots, HV, K]
    s_in_ptr,  # [segments, HV, K, V]
    s_out_ptr,  # [segments, HV, K, V]: the final state; E
    m_ptr,  # [segments, HV, K, K]: M
    m_is_zero_ptr,  # [segments, HV]: where M is taken as zero, and not written
    w_ptr,  # "ends": what w_desc and b_desc are of
    b_ptr,
    cu_ptr,  # [N + 1]
    T, N, HV,
    token_heads,  # of o from one token to the next: HV, or more
    segment,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, DELTA: gl.constexpr,
    HAS_GATE: gl.constexpr, HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr, OUTPUT: gl.constexpr,
    SPLIT: gl.constexpr, PACKED: gl.constexpr,
    pool_ptr=None,  # [rows, HV, V, K], a pool
    to_ptr=None,  # [N, T / C, rounded up]: rows of it for S after chunks; none below 0
):  # fmt: skip
    """grid (tiles * HV * segments,), 4 warps: one program scans one head of one segment.

    Without SPLIT a segment is a sequence. OUTPUT: "o", "states" or "ends". Tiles: one of V; for
    "ends" then those of M, V columns each.
    """
    ends = Ends(s_in_ptr, s_out_ptr, m_ptr)
    outs = Outs(o_desc, x_desc, states_desc, o_ptr, u_ptr)
    descs = Descs(q_desc, w_desc, b_desc, k_desc, qb_desc, qk_desc, v_desc)
    OUT: gl.constexpr = OUTPUT == "o"
    SAVE_STATES: gl.constexpr = OUTPUT == "states"
    TILES: gl.constexpr = 1 + (K + V - 1) // V if OUTPUT == "ends" else 1
    NV: gl.constexpr = V // 64
    dtype: gl.constexpr = w_desc.dtype
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ws = gl.allocate_shared_memory(dtype, [ST, C, K], w_desc.layout)
    bs = gl.allocate_shared_memory(dtype, [ST, C, K], w_desc.layout)
    os = gl.allocate_shared_memory(dtype, [NV, C, 64], square)
    totals = gl.allocate_shared_memory(gl.float32, [ST, K], plain)
    # what a call does not use has another's name: it is not read, and takes no memory
    qs = ws
    qbs = os
    ss = ws
    ks = bs
    qks = os
    vs = os
    if SAVE_STATES:
        ss = gl.allocate_shared_memory(dtype, [NV, 64, K], w_desc.layout)
    if OUT:
        qs = gl.allocate_shared_memory(dtype, [ST, C, K], w_desc.layout)
        qbs = gl.allocate_shared_memory(dtype, [ST, C, C], square)
    if not DELTA:
        ks = gl.allocate_shared_memory(dtype, [ST, C, K], w_desc.layout)
        vs = gl.allocate_shared_memory(dtype, [ST * NV, C, 64], v_desc.layout)
        if OUT:
            qks = gl.allocate_shared_memory(dtype, [ST, C, C], square)
    tiles, copies = Tiles(qs, ws, bs, ks, qbs, qks, vs, totals), Copies(os, ss)
    full = common.alloc_mbarriers(1 + HAS_GATE, ST)
    empty = common.alloc_mbarriers(NV, ST)
    pid = gl.program_id(0)
    m_col = (pid % TILES - 1) * V
    i_h = (pid // TILES) % HV
    i_seg = common.longest_first(cu_ptr, pid // TILES // HV, N, TILES * HV, PACKED and not SPLIT)
    row, length, first = common.locate_sequence(cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT)
    n = gl.cdiv(length, C)
    # a sequence of no tokens may have a first chunk past the last one
    chunk = gl.where(n > 0, first, 0) * HV + i_h
    v_col = i_h * V
    i_s = i_seg.to(gl.int64) * HV + i_h
    if OUTPUT == "ends":
        decayed = n < 0
        need = n
        if HAS_GATE:
            need, decayed = effective_chunks(w_ptr, b_ptr, total_ptr, chunk, HV, n, K, C)
        gl.store(m_is_zero_ptr + i_s, gl.where(decayed, 1, 0), mask=m_col < 0)
        # past the last column of M nothing is written
        m_col = gl.where(decayed & (m_col >= 0), K, m_col)
        skip = n - need
        n = sm90.uniform(gl.where(m_col == K, 0, need))
        chunk += skip * HV
        row += skip * C
        length -= skip * C
    pool = common.PoolRefs(None, None, None)
    if to_ptr is not None:
        _, _, _, i_n, i_split, _ = common.locate_segment(
            cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT
        )
        at = i_h * V * K
        pool = common.pool_refs_of(pool_ptr, to_ptr, i_n, i_split, at, HV, T, segment, K * V, C)
    # past all rows TMA gives zeros: M has no v
    v_row = gl.where(m_col < 0, row, OOB_ROW)
    c: gl.constexpr = Constants(K, V, C, ST, NV, DELTA, HAS_GATE, HAS_S_IN, HAS_S_OUT, OUTPUT)
    place = Place(chunk, HV, token_heads, row, v_col, i_s, m_col, length, n)
    if NV == 1:
        gl.warp_specialize(
            [
                (state_partition, (outs, tiles, copies, full, empty, ends, pool, place, 0, c)),
                (load_partition, (
                    descs, total_ptr, tiles, full, empty, chunk, HV, v_row, v_col, n, c)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (state_partition, (outs, tiles, copies, full, empty, ends, pool, place, 0, c)),
                (state_partition, (outs, tiles, copies, full, empty, ends, pool, place, 1, c)),
                (load_partition, (
                    descs, total_ptr, tiles, full, empty, chunk, HV, v_row, v_col, n, c)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
