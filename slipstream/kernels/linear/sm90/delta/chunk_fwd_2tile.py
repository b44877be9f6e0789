"""Delta rule, no decay or one a token, on sm_90: the scan forward, two tiles of V a program.

As chunk_fwd.py, for calls of more programs than multiprocessors: what both tiles need of q, k and
R is read once, and while one tile's chain waits the other's products run. With no warps left to
make W, the chain has the product with k instead:

    w = R v - R (diag(exp(G)) k S)        S <- exp(G_C) S + (k exp(G_C - G))^T beta w
    o = scale (diag(exp(G)) q S + tril(q k^T decay) beta w)

Four partitions of a program:

    load_partition, 1 warp         state_partition, 4 warps a tile of V        output_partition, 4
      k, v, R, beta, G -- full -->   S -- state_full ------------------------>   q k^T, q S
                                     w -- w_full ---------------------------->   o of both tiles
                                     <-- state_empty, w_empty
      <-- empty                      arrive at empty                             arrives at empty
      q ------------------------- q_full ------------------------------------>   reads q
      <-- q_empty

    buffers               stages  arrivals a phase: full / empty
    k, v, R, beta, G      ST      2 (TMA, and the warp that stores what comes of beta and G) / 3
    S [2, BV, K], w       1       2, one a tile / 1 for both
    q [C, K]              2       1 (TMA) / 1
    a short chunk         1       cleared: 2, one a tile, which zeroes half of what is past its end

With SAVE_STATES save_partition, which writes S and w for backward, is in the place of
output_partition: each tile has barriers of its own, with one arrival, empty has 2, and there is no
q.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.delta import delta_device
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# constants of a launch, for device functions
Constants = namedtuple(
    "Constants", "K V BV C ST HAS_GATE HAS_S_IN HAS_S_OUT SAVE_STATES SAVE_CHECKPOINTS"
)


class Tiles(NamedTuple):
    """Buffers of chunks: ST stages of what load_partition reads, one of S and w of both tiles."""

    k: Any
    v: Any
    r: Any
    beta_gate: Any
    state: Any
    w: Any


class Barriers(NamedTuple):
    """full, empty: of k, v, r and beta_gate."""

    full: Any
    empty: Any
    state_full: Any
    state_empty: Any
    w_full: Any
    w_empty: Any
    cleared: Any  # both state partitions have zeroed their part of a short chunk


@gluon.jit
def load_partition(
    descs, tiles, barriers, queries, p_beta_gate, stride, row, n, k_col, v_col, r_col, c,
    HAS_Q: gl.constexpr,
):  # fmt: skip
    """queries: of HAS_Q alone."""
    q_desc, k_desc, v_desc, r_desc = descs
    nbytes: gl.constexpr = (
        k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes + r_desc.block_type.nbytes
    )
    row_layout: gl.constexpr = gl.BlockedLayout([c.C // 32], [32], [1], [0])
    o_c = gl.arange(0, c.C, row_layout)
    b_beta = gl.load(p_beta_gate + o_c)
    if c.HAS_GATE:
        b_G = gl.load(p_beta_gate + c.C + o_c)
        b_end = gl.load(p_beta_gate + (2 * c.C - 1))
    for i in range(n):
        s = i % c.ST
        t = row + i * c.C
        mbarrier.wait(barriers.empty.index(s), ((i // c.ST) & 1) ^ 1)
        mbarrier.expect(barriers.full.index(s), nbytes)
        sm90.copy_in(k_desc, [t, k_col], barriers.full.index(s), tiles.k.index(s))
        sm90.copy_in(v_desc, [t, v_col], barriers.full.index(s), tiles.v.index(2 * s))
        sm90.copy_in(v_desc, [t, v_col + c.BV], barriers.full.index(s), tiles.v.index(2 * s + 1))
        sm90.copy_in(r_desc, [t, r_col], barriers.full.index(s), tiles.r.index(s))
        rows = tiles.beta_gate.index(s)
        rows.slice(0, c.C).store(b_beta)
        if c.HAS_GATE:
            rows.slice(c.C, c.C).store(b_G)
            rows.slice(2 * c.C, c.C).store(-gl.exp2(b_G))
            rows.slice(3 * c.C, c.C).store(b_beta * gl.exp2(b_end - b_G))
        mbarrier.arrive(barriers.full.index(s), count=1)
        p_next = p_beta_gate + gl.minimum(i + 1, n - 1) * stride
        b_beta = gl.load(p_next + o_c)
        if c.HAS_GATE:
            b_G = gl.load(p_next + c.C + o_c)
            b_end = gl.load(p_next + (2 * c.C - 1))
        if HAS_Q:
            b = i % 2
            mbarrier.wait(queries.empty.index(b), ((i // 2) & 1) ^ 1)
            mbarrier.expect(queries.full.index(b), q_desc.block_type.nbytes)
            sm90.copy_in(q_desc, [t, k_col], queries.full.index(b), queries.q.index(b))


@gluon.jit
def state_partition(tiles, barriers, state_refs, pool, i_seg, HV, length, n, tile: gl.constexpr, c):
    i_bar: gl.constexpr = (
        tile if c.SAVE_STATES else 0
    )  # its barriers: output_partition takes both tiles at once
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.K, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_v = gl.arange(0, c.BV, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, c.K, gl.SliceLayout(0, sl))
    b_s = gl.zeros([c.BV, c.K], gl.float32, sl)
    b_s = delta_device.load_state(state_refs, b_s, o_k, tile * c.BV + o_v, c.V, c.HAS_S_IN)
    zero = gl.zeros([c.BV, c.C], gl.float32, xl)
    for i in range(n):
        s = i % c.ST
        if pool.rows is not None:
            to = gl.load(pool.rows + i)
        mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)
        if length - i * c.C < c.C:
            # the other state partition the rest
            if tile == 0:
                common.zero_tail_rows(tiles.k.index(s), length - i * c.C, c.C, c.K)
            else:
                common.zero_tail_rows(tiles.r.index(s), length - i * c.C, c.C, c.C)
            common.zero_tail_rows(tiles.v.index(2 * s + tile), length - i * c.C, c.C, c.BV)
            sm90.fence_async_shared()
            mbarrier.arrive(barriers.cleared.index(0), count=1)
            mbarrier.wait(barriers.cleared.index(0), 0)
        b_sb = b_s.to(tiles.k.dtype)
        b_u = warpgroup_mma(
            gl.convert_layout(b_sb, sa), tiles.k.index(s).permute((1, 0)), zero,
            use_acc=False, is_async=True,
        )  # fmt: skip
        if c.HAS_GATE:
            b_s *= (
                -tiles.beta_gate.index(s).slice(3 * c.C - 1, 1).load(gl.SliceLayout(0, sl))[None, :]
            )
            b_start = tiles.beta_gate.index(s).slice(2 * c.C, c.C).load(gl.SliceLayout(0, xl))
        mbarrier.wait(barriers.state_empty.index(i_bar), (i & 1) ^ 1)
        tiles.state.index(tile).store(b_sb)
        sm90.fence_async_shared()
        mbarrier.arrive(barriers.state_full.index(i_bar), count=1)
        b_u = sm90.warpgroup_mma_wait(0, deps=(b_u,))
        if c.HAS_GATE:
            b_u = b_u * b_start[None, :]
        else:
            b_u = -b_u
        b_u = gl.convert_layout(b_u.to(tiles.k.dtype), sa)
        b_w = warpgroup_mma(
            tiles.v.index(2 * s + tile).permute((1, 0)), tiles.r.index(s).permute((1, 0)), zero,
            use_acc=False, is_async=True,
        )  # fmt: skip
        b_w = warpgroup_mma(b_u, tiles.r.index(s).permute((1, 0)), b_w, is_async=True)
        b_share = (
            tiles.beta_gate.index(s)
            .slice(3 * c.C if c.HAS_GATE else 0, c.C)
            .load(gl.SliceLayout(0, xl))
        )
        b_w = sm90.warpgroup_mma_wait(0, deps=(b_w,))
        b_lhs = (b_w * b_share[None, :]).to(tiles.k.dtype)
        b_s = warpgroup_mma(gl.convert_layout(b_lhs, xa), tiles.k.index(s), b_s, is_async=True)
        mbarrier.wait(barriers.w_empty.index(i_bar), (i & 1) ^ 1)
        place = tile + (i >> 30)
        if c.SAVE_STATES:
            tiles.w.index(place).permute((1, 0)).store(b_w.to(tiles.k.dtype))
        else:
            tiles.w.index(place).store(b_w.to(tiles.k.dtype))
        sm90.fence_async_shared()
        mbarrier.arrive(barriers.w_full.index(i_bar), count=1)
        b_s = sm90.warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(barriers.empty.index(s), count=1)
        if pool.rows is not None:
            common.store_to_pool(pool, to, b_s, (tile * c.BV + o_v)[:, None] * c.K + o_k[None, :])
    if not c.SAVE_STATES:
        if tile == 0:
            # o_state again, which the default part would keep: length >> 31 is 0, but no compiler
            # knows
            TILES: gl.constexpr = c.V // (2 * c.BV)
            pid = gl.program_id(0) + (length >> 31)
            o_state = delta_device.state_offset(i_seg, pid // TILES % HV, HV, c.K, c.V)
            o_state += pid % TILES * (2 * c.BV)
            state_refs = delta_device.StateRefs(None, state_refs.out_ptr, None, o_state)
        delta_device.store_state(
            state_refs, b_s, length >> 30, o_k, tile * c.BV + o_v, c.V, c.HAS_S_OUT
        )


@gluon.jit
def output_partition(
    o_desc, o_ptr, tiles, barriers, queries, os, checkpoints, row, o_row, v_col, length, n, scale, c
):
    """o [C, BV] of each chunk and tile, off the chain. o_row: elements of o from token to token."""
    if c.SAVE_CHECKPOINTS:
        next_chunk, next_row = checkpoints.chunk, checkpoints.row
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    ol: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BV, 16])
    aa: gl.constexpr = gl.DotOperandLayout(0, ol, 2)
    o_i = gl.arange(0, c.C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, c.C, gl.SliceLayout(0, al))
    zero_o = gl.zeros([c.C, c.BV], gl.float32, ol)
    whole = length // c.C
    for i in range(n):
        s = i % c.ST
        b = i % 2
        # 0, but no compiler knows: mask and addresses would take registers all the time
        none = length + i >> 31 << 10
        seen = (o_i + none)[:, None] >= o_j[None, :]
        mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)
        if i == whole:  # a short one
            mbarrier.wait(barriers.cleared.index(0), 0)
        mbarrier.wait(queries.full.index(b), (i // 2) & 1)
        b_a, b_q, b_start = delta_device.masked_scores(
            queries, tiles, barriers.empty, b, s, seen, al, ol, c.C, c.HAS_GATE, True
        )
        b_q = gl.convert_layout(b_q, aa)
        mbarrier.wait(barriers.state_full.index(0), i & 1)
        b_o = warpgroup_mma(
            b_q, tiles.state.index(none).permute((1, 0)), zero_o, use_acc=False, is_async=True
        )
        b_p = warpgroup_mma(
            b_q, tiles.state.index(none + 1).permute((1, 0)), zero_o, use_acc=False, is_async=True
        )
        if c.SAVE_CHECKPOINTS:  # noqa: SIM102
            if i == next_chunk:
                sm90.copy_out(checkpoints.desc, [next_row, 0], tiles.state.index(none))
                sm90.copy_out(checkpoints.desc, [next_row + c.BV, 0], tiles.state.index(none + 1))
                next_chunk += checkpoints.interval
                next_row += checkpoints.row_step
        b_o, b_p = sm90.warpgroup_mma_wait(0, deps=(b_o, b_p))
        if c.SAVE_CHECKPOINTS:
            sm90.store_wait(0)
        mbarrier.arrive(barriers.state_empty.index(0), count=1)
        if c.HAS_GATE:
            b_o = -b_o * b_start[:, None]
            b_p = -b_p * b_start[:, None]
        mbarrier.wait(barriers.w_full.index(0), i & 1)
        b_o = warpgroup_mma(b_a, tiles.w.index(none).permute((1, 0)), b_o, is_async=True)
        b_p = warpgroup_mma(b_a, tiles.w.index(none + 1).permute((1, 0)), b_p, is_async=True)
        b_o, b_p = sm90.warpgroup_mma_wait(0, deps=(b_o, b_p))
        sm90.store_wait(0)
        mbarrier.arrive(barriers.w_empty.index(0), count=1)
        b_o = (b_o * scale).to(tiles.k.dtype)
        b_p = (b_p * scale).to(tiles.k.dtype)
        os.index(none).store(b_o)
        os.index(none + 1).store(b_p)
        sm90.fence_async_shared()
        gl.thread_barrier()
        t = row + i * c.C
        num_rows = length - i * c.C
        common.store_tile(o_desc, o_ptr, os.index(none), t, v_col, o_row, num_rows, c.C, c.BV)
        common.store_tile(
            o_desc, o_ptr, os.index(none + 1), t, v_col + c.BV, o_row, num_rows, c.C, c.BV
        )
    sm90.store_wait(0)


@gluon.jit
def save_partition(
    states_desc, w_desc, w_ptr, tiles, barriers, row, chunk, HV, o_row, v_col, i_v, length, n, c
):
    """S before each chunk, and w, which is waited for once the next S is on its way."""
    for i in range(n):
        for tile in gl.static_range(2):
            mbarrier.wait(barriers.state_full.index(tile), i & 1)
            sm90.copy_out(
                states_desc,
                [(chunk + i * HV) * c.V + i_v + tile * c.BV, 0],
                tiles.state.index(tile),
            )
            if tile == 0 and i > 0:
                sm90.store_wait(1)
                mbarrier.arrive(barriers.w_empty.index(0), count=1)
                mbarrier.arrive(barriers.w_empty.index(1), count=1)
            sm90.store_wait(0)
            mbarrier.arrive(barriers.state_empty.index(tile), count=1)
        for tile in gl.static_range(2):
            mbarrier.wait(barriers.w_full.index(tile), i & 1)
            t = row + i * c.C
            at = v_col + tile * c.BV
            common.store_tile(
                w_desc, w_ptr, tiles.w.index(tile), t, at, o_row, length - i * c.C, c.C, c.BV
            )
    sm90.store_wait(0)


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "every"])
def delta_chunk_fwd_2tile_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    v_desc,  # [tokens, HV * V] by [C, BV]
    r_desc,  # [tokens, HV * C] by [C, C]
    o_desc,  # [tokens, HV * V] by [C, BV]: o, or w if SAVE_STATES
    states_desc,  # [chunks * HV * V, K] by [BV, K]: S before each chunk, if SAVE_STATES
    # [checkpoints * HV * V, K] by [BV, K]: S before every so many chunks, if SAVE_CHECKPOINTS
    checkpoints_desc, o_ptr,
    beta_gates_ptr,  # [chunks, HV, ROWS, C]: beta and G
    s_in_ptr,  # [N, HV, K, V]
    s_out_ptr,
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H, every,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    SAVE_STATES: gl.constexpr, HAS_GATE: gl.constexpr, HAS_S_IN: gl.constexpr,
    HAS_S_OUT: gl.constexpr, PACKED: gl.constexpr,
    SAVE_CHECKPOINTS: gl.constexpr = False,
    pool_ptr=None,  # [rows, HV, V, K], a pool
    to_ptr=None,  # [N, T / C, rounded up]: rows of it for S after chunks; none below 0
):  # fmt: skip
    """grid (V / (2 * BV) * HV * N,), 4 warps: one program scans two tiles of V of one head.

    SAVE_CHECKPOINTS as delta_chunk_fwd_sm90_kernel has it.
    """
    c: gl.constexpr = Constants(
        K, V, BV, C, ST, HAS_GATE, HAS_S_IN, HAS_S_OUT, SAVE_STATES, SAVE_CHECKPOINTS
    )
    dtype: gl.constexpr = k_desc.dtype
    ks, vs, rs, gs = delta_device.alloc_stages(
        k_desc, v_desc, r_desc, 2, 4 if HAS_GATE else 1, K, BV, C, ST
    )
    ss = gl.allocate_shared_memory(dtype, [2, BV, K], k_desc.layout)
    full = common.alloc_mbarriers(2, ST)
    empty = common.alloc_mbarriers(2 if SAVE_STATES else 3, ST)
    s_full = common.alloc_mbarriers(1 if SAVE_STATES else 2, 2 if SAVE_STATES else 1)
    s_empty = common.alloc_mbarriers(1, 2 if SAVE_STATES else 1)
    x_full = common.alloc_mbarriers(1 if SAVE_STATES else 2, 2 if SAVE_STATES else 1)
    x_empty = common.alloc_mbarriers(1, 2 if SAVE_STATES else 1)
    cleared = common.alloc_mbarriers(2, 1)
    i_v, i_h, i_seg, row, length, n, chunk, _, _, _ = delta_device.program_coords(
        cu_ptr, T, N, HV, T, V // (2 * BV), 2 * BV, C, PACKED, False
    )
    o_state = delta_device.state_offset(i_seg, i_h, HV, K, V) + i_v
    state_refs = delta_device.StateRefs(s_in_ptr, s_out_ptr, o_state, o_state)
    pool = common.PoolRefs(None, None, None)
    if to_ptr is not None:
        at = (i_h * V + i_v) * K
        pool = common.pool_refs_of(pool_ptr, to_ptr, i_seg, 0, at, HV, T, T, K * V, C)
    k_col = i_h // (HV // (H + (n >> 31))) * K  # 0, or HV // H would be made at once, and kept
    v_col = i_h * V + i_v
    p_beta_gate, stride = delta_device.beta_gate_ptr(beta_gates_ptr, chunk, HV, C, HAS_GATE)
    barriers = Barriers(full, empty, s_full, s_empty, x_full, x_empty, cleared)
    if SAVE_STATES:
        xs = gl.allocate_shared_memory(dtype, [2, C, BV], v_desc.layout)
        tiles = Tiles(ks, vs, rs, gs, ss, xs)
        gl.warp_specialize(
            [
                (state_partition, (tiles, barriers, state_refs, pool, i_seg, HV, length, n, 0, c)),
                (state_partition, (tiles, barriers, state_refs, pool, i_seg, HV, length, n, 1, c)),
                (save_partition, (
                    states_desc, o_desc, o_ptr, tiles, barriers, row, chunk, HV, HV * V, v_col, i_v,
                    length, n, c)),
                (load_partition, (
                    (k_desc, k_desc, v_desc, r_desc), tiles, barriers, barriers, p_beta_gate,
                    stride, row, n, k_col, v_col, i_h * C, c, False)),
            ],
            [4, 4, 1],
            [200, 80, 24],
        )  # fmt: skip
    else:
        qs = gl.allocate_shared_memory(dtype, [2, C, K], q_desc.layout)
        xs = gl.allocate_shared_memory(dtype, [2, BV, C], r_desc.layout)
        os = gl.allocate_shared_memory(dtype, [2, C, BV], o_desc.layout)
        q_full = common.alloc_mbarriers(1, 2)
        q_empty = common.alloc_mbarriers(1, 2)
        queries = delta_device.Queries(qs, q_full, q_empty)
        tiles = Tiles(ks, vs, rs, gs, ss, xs)
        checkpoints = state_refs
        if SAVE_CHECKPOINTS:
            checkpoints = delta_device.checkpoints_of(
                checkpoints_desc, i_seg, 0, i_h, i_v, row, T, T, every, HV, V, C, PACKED, False
            )
        gl.warp_specialize(
            [
                (state_partition, (tiles, barriers, state_refs, pool, i_seg, HV, length, n, 0, c)),
                (state_partition, (tiles, barriers, state_refs, pool, i_seg, HV, length, n, 1, c)),
                (output_partition, (
                    o_desc, o_ptr, tiles, barriers, queries, os, checkpoints, row, HV * V, v_col,
                    length, n, scale, c)),
                (load_partition, (
                    (q_desc, k_desc, v_desc, r_desc), tiles, barriers, queries, p_beta_gate,
                    stride, row, n, k_col, v_col, i_h * C, c, True)),
            ],
            [4, 4, 1],
            [160, 168, 24],
        )  # fmt: skip
