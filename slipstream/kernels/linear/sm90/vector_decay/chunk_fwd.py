"""A decay per channel on sm_90: one kernel scans over chunks of C tokens, for o.

With r, w, A and D of a chunk (intra.py) and S^T the state before it, [V, K],

    o^T  = scale * (S^T r^T + v^T A^T)           S^T  <- (S^T + v^T w) D
    in strong chunks, whose w has D already      S^T  <- S^T D + v^T w

With y_desc None a segment's E, the state after it if that before it is zero, is all that is wanted,
and total, the decay of each channel from its start to its end:

    E^T <- E^T D + v^T (k exp(G_C - G))      total <- total D      so that S <- total S + E

with exponents that are sums of gates after a token, a product of zeros and ones with the gates, in
which nothing cancels at any strength.

q, k, v and the gates are read, y is written, and nothing is prepared in memory. As in
scalar_decay/chunk_fwd.py the columns of x, v, are rows: two warpgroups carry 64 of them each.

    load_partition, 1 warp        gate_sum_partition, 1     score_partition, 4     state_partition,
                                                                                   twice: 64 rows
      q, k, x, gates -- full -->    D, and whether the
                                    chunk is strong
                                    -- summed ---------->     waits for full too
                                                              r, w, A in place
                                                              -- ready --------->    S and y
      <-- empty                                                                      arrive at empty

    buffers                          stages  arrivals a phase
    q, k, gates [C, K], x [C, X]     ST      full 1 (TMA), summed 1, ready 1, empty 2

r, w and A take the places of q, k and the gates. score_partition zeroes what is past the end of a
short chunk. For E key_partition, which makes w alone, is in its place, and q is not loaded.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.scalar_decay.chunk_fwd import HALF
from slipstream.kernels.linear.sm90.vector_decay import intra
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# buffers of a state_partition; its states' ends; factors; constants of a launch
Buffers = namedtuple("Buffers", "ys totals flags ready empty")
Refs = namedtuple("Refs", "s_in s_out pool")
Scales = namedtuple("Scales", "y s_in s_out")
Constants = namedtuple("Constants", "K X C ST LEVELS BOUND SHIFT HAS_U HAS_S_IN HAS_S_OUT")


class Tiles(NamedTuple):
    """Buffers of chunks, ST stages: what load_partition reads."""

    r: Any  # q, then r
    w: Any  # k, then w
    x: Any  # two halves a stage
    g: Any  # the gates, then A


@gluon.jit
def load_partition(
    q_desc, k_desc, x_desc, g_desc, tiles, full, empty, row, n, k_col, g_col, x_col, c
):
    nbytes: gl.constexpr = (
        (0 if q_desc is None else q_desc.block_type.nbytes)
        + k_desc.block_type.nbytes
        + 2 * x_desc.block_type.nbytes
        + g_desc.block_type.nbytes
    )
    for i in range(n):
        s = i % c.ST
        t = row + i * c.C
        mbarrier.wait(empty.index(s), ((i // c.ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), nbytes)
        sm90.copy_in(g_desc, [t, g_col], full.index(s), tiles.g.index(s))
        if q_desc is not None:
            sm90.copy_in(q_desc, [t, k_col], full.index(s), tiles.r.index(s))
        sm90.copy_in(k_desc, [t, k_col], full.index(s), tiles.w.index(s))
        sm90.copy_in(x_desc, [t, x_col], full.index(s), tiles.x.index(2 * s))
        sm90.copy_in(x_desc, [t, x_col + HALF], full.index(s), tiles.x.index(2 * s + 1))


@gluon.jit
def state_partition(
    y_desc, y_ptr, tiles, buffers, refs, o_s, row, HV, y_col, length, n, scales, I: gl.constexpr, c
):
    """Rows HALF * I and on of the state, and of y^T."""
    scale, scale_in, scale_out = scales
    ys, totals, flags, ready, empty = buffers
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.K, 16])
    yl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, yl, 2)
    columns: gl.constexpr = gl.SliceLayout(0, sl)
    o_x = HALF * I + gl.arange(0, HALF, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, c.K, columns)
    if c.HAS_S_IN:
        o_in = o_s + o_k[None, :] * c.X + o_x[:, None]
        b_s = gl.load(refs.s_in + o_in).to(gl.float32) * scale_in
    else:
        b_s = gl.zeros([HALF, c.K], gl.float32, sl)
    zero = gl.zeros([HALF, c.C], gl.float32, yl)
    y_col += HALF * I
    for i in range(n):
        s = i % c.ST
        t = i * c.C
        if refs.pool.rows is not None:
            to = gl.load(refs.pool.rows + i)
        mbarrier.wait(ready.index(s), (i // c.ST) & 1)
        strong = intra.flag_of(flags, s) > 0.0
        b_d = totals.index(s).load(columns)[None, :]
        lhs = b_s.to(tiles.r.dtype)
        b_s *= gl.where(strong, b_d, 1.0)
        lhs = gl.convert_layout(lhs, sa)
        b_a = intra.square(tiles.g.index(s), tiles.r.dtype, c.K, c.C)
        x_t = tiles.x.index(2 * s + I).permute((1, 0))
        rhs = tiles.r.index(s).permute((1, 0))
        b_y = warpgroup_mma(lhs, rhs, zero, use_acc=False, is_async=True)
        b_y = warpgroup_mma(x_t, b_a.permute((1, 0)), b_y, is_async=True)
        b_s = warpgroup_mma(x_t, tiles.w.index(s), b_s, is_async=True)
        b_y, b_s = sm90.warpgroup_mma_wait(0, deps=(b_y, b_s))
        b_s *= gl.where(strong, 1.0, totals.index(s).load(columns))[None, :]
        mbarrier.arrive(empty.index(s), count=1)
        if refs.pool.rows is not None:
            common.store_to_pool(refs.pool, to, b_s, o_x[:, None] * c.K + o_k[None, :])
        b_y *= scale
        common.store_tile_transposed(
            y_desc, y_ptr, ys.index(I), b_y, row + t, y_col, HV * c.X, length - t, c.C
        )
    sm90.store_wait(0)
    if c.HAS_S_OUT:
        # plus 0, which no compiler knows: the loop would keep what it has in common with o_in
        o_out = o_s + (length >> 30) + o_k[None, :] * c.X + o_x[:, None]
        gl.store(refs.s_out + o_out, (b_s * scale_out).to(refs.s_out.dtype.element_ty))


@gluon.jit
def end_partition(
    tiles, totals, ready, empty, e_ptr, total_ptr, n,
    I: gl.constexpr, K: gl.constexpr, X: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """Rows HALF * I and on of E^T; the first has total, too."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    columns: gl.constexpr = gl.SliceLayout(0, sl)
    o_x = HALF * I + gl.arange(0, HALF, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, K, columns)
    b_s = gl.zeros([HALF, K], gl.float32, sl)
    b_total = gl.full([K], 1.0, gl.float32, columns)
    for i in range(n):
        s = i % ST
        mbarrier.wait(ready.index(s), (i // ST) & 1)
        b_d = totals.index(s).load(columns)
        # factors from 0 to 1: one that underflows to 0 is the right decay
        b_total *= b_d
        b_s *= b_d[None, :]
        x_t = tiles.x.index(2 * s + I).permute((1, 0))
        b_s = warpgroup_mma(x_t, tiles.w.index(s), b_s, is_async=True)
        b_s = sm90.warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(empty.index(s), count=1)
    gl.store(e_ptr + o_k[None, :] * X + o_x[:, None], b_s)
    # both warpgroups have it, since total has no columns of X
    if I == 0:
        gl.store(total_ptr + o_k, b_total)


@gluon.jit(do_not_specialize=["scale", "scale_in", "scale_out", "T", "N", "HV", "H", "segment"])
def vector_decay_chunk_fwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]; None with y_desc
    k_desc,
    x_desc,  # [tokens, HV * X] by [C, HALF]: v
    g_desc,  # [tokens, HV * K] by [C, K]
    y_desc,  # [tokens, HV * X] by [C, HALF]: o; None where E and total are wanted
    y_ptr,
    u_ptr,  # [HV, K]
    s_in_ptr,  # [segments, HV, K, X]; times scale_in
    s_out_ptr,  # the same; times scale_out; or E
    cu_ptr,  # [N + 1]
    scale, scale_in, scale_out, T, N, HV, H, segment,
    K: gl.constexpr, X: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, LEVELS: gl.constexpr,
    BOUND: gl.constexpr, SHIFT: gl.constexpr, HAS_U: gl.constexpr,
    HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr, SPLIT: gl.constexpr, PACKED: gl.constexpr,
    pool_ptr=None,  # [rows, HV, V, K], a pool
    to_ptr=None,  # [N, T / C, rounded up]: rows of it for S after chunks; none below 0
    total_ptr=None,  # [segments, HV, K], with E
):  # fmt: skip
    """grid (HV * segments,), 4 warps: one program scans one head of one segment, which without
    SPLIT is a sequence; X is 128."""
    c: gl.constexpr = Constants(K, X, C, ST, LEVELS, BOUND, SHIFT, HAS_U, HAS_S_IN, HAS_S_OUT)
    scales = Scales(scale, scale_in, scale_out)
    HAS_Y: gl.constexpr = y_desc is not None
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    if HAS_Y:
        rs = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    ws = gl.allocate_shared_memory(dtype, [ST, C, K], k_desc.layout)
    if not HAS_Y:
        rs = ws  # not there
    xs = gl.allocate_shared_memory(dtype, [2 * ST, C, HALF], x_desc.layout)
    gs = gl.allocate_shared_memory(g_desc.dtype, [ST, C, K], g_desc.layout)
    gates = gl.allocate_shared_memory(g_desc.dtype, [1, C, K], g_desc.layout)
    if HAS_Y:
        ys = gl.allocate_shared_memory(dtype, [2, C, HALF], y_desc.layout)
    square_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    ones_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    until = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], ones_l)
    if HAS_Y:
        free = gl.allocate_shared_memory(dtype, [2, C, 64], square_l)
    totals = gl.allocate_shared_memory(gl.float32, [ST, K], plain)
    flags = gl.allocate_shared_memory(gl.float32, [ST, 1], plain)
    full = common.alloc_mbarriers(1, ST)
    summed = common.alloc_mbarriers(1, ST)
    ready = common.alloc_mbarriers(1, ST)
    empty = common.alloc_mbarriers(2, ST)
    i_h, i_n, row, length, _, n = common.program_coords(cu_ptr, T, N, HV, segment, C, PACKED, SPLIT)
    k_col = i_h // (HV // H) * K
    o_s = (i_n.to(gl.int64) * HV + i_h) * (K * X)
    # what is not given: something else, for only the first part takes None
    p_in = s_in_ptr if HAS_S_IN else y_ptr
    p_out = s_out_ptr if HAS_S_OUT else y_ptr
    p_u = u_ptr + i_h * K if HAS_U else y_ptr
    pool = common.PoolRefs(None, None, None)
    if to_ptr is not None:
        _, _, _, i_m, i_split, _ = common.locate_segment(
            cu_ptr, i_n, T, N, segment, C, PACKED, SPLIT
        )
        at = i_h * X * K
        pool = common.pool_refs_of(pool_ptr, to_ptr, i_m, i_split, at, HV, T, segment, X * K, C)
    tiles = Tiles(rs, ws, xs, gs)
    refs = Refs(p_in, p_out, pool)
    if HAS_Y:
        buffers = Buffers(ys, totals, flags, ready, empty)
        gl.warp_specialize(
            [
                (state_partition, (
                    y_desc, y_ptr, tiles, buffers, refs, o_s, row, HV, i_h * X, length, n, scales,
                    0, c)),
                (state_partition, (
                    y_desc, y_ptr, tiles, buffers, refs, o_s, row, HV, i_h * X, length, n, scales,
                    1, c)),
                (intra.score_partition, (
                    tiles, gates, until, free, flags, p_u, full, summed, ready, length, n, c, 2)),
                (intra.gate_sum_partition, (
                    gs, totals, flags, full, summed, length, n, K, C, ST, BOUND)),
                (load_partition, (
                    q_desc, k_desc, x_desc, g_desc, tiles, full, empty, row, n, k_col, i_h * K,
                    i_h * X, c)),
            ],
            [4, 4, 1, 1],
            [152, 168, 40, 40],
        )  # fmt: skip
    else:
        p_e, p_total = s_out_ptr + o_s, total_ptr + (i_n.to(gl.int64) * HV + i_h) * K
        gl.warp_specialize(
            [
                (end_partition, (tiles, totals, ready, empty, p_e, p_total, n, 0, K, X, ST)),
                (end_partition, (tiles, totals, ready, empty, p_e, p_total, n, 1, K, X, ST)),
                (intra.key_partition, (
                    tiles, gates, until, full, summed, ready, length, n, K, C, ST)),
                (intra.gate_sum_partition, (
                    gs, totals, flags, full, summed, length, n, K, C, ST, BOUND)),
                (load_partition, (
                    q_desc, k_desc, x_desc, g_desc, tiles, full, empty, row, n, k_col, i_h * K,
                    i_h * X, c)),
            ],
            [4, 4, 1, 1],
            [152, 136, 56, 40],
        )  # fmt: skip
