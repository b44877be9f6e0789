"""A decay per channel on sm_90: the scans whose rows decay, for the gradients of q and k.

With qs, ke and D as in triton/vector_decay/chunk.py, whose scans for dqs and dke these are,

    dqs^T = S do^T        S  <- D S + ke^T v
    dke^T = dS v^T        dS <- D dS + qs^T do      reversed

and the sums over a chunk of qs * dqs, the anchors and z that its docstring has for the gradient of
the gate. q, k, v, do and the gates are read: qs and ke are made within a chunk. Two warpgroups
carry 64 rows of the state each.

    load_partition, 1 warp      gate_sum_partition, 1     boundary_partition, 4    state_partition,
                                                                                   twice: 64 rows
      q, k, v, do, gates
                  -- full -->     D, and whether the
                                  chunk is strong
                                  -- flags_ready --->       waits for full too
                                                            qs, ke in place
                                                            -- ready -------->       S and y
      <-- empty                                                                      arrive at empty

    buffers                               stages  arrivals a phase
    q, k, gates [C, K], v, do [C, V]      ST      full 1 (TMA), flags_ready 1, ready 1, empty 2

boundary_partition zeroes what is past the end of a short chunk.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.scalar_decay.chunk_fwd import first_anchor
from slipstream.kernels.linear.sm90.vector_decay import intra
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# what a state_partition reads and writes in global memory; constants of a launch
Refs = namedtuple("Refs", "s_in sums z anchor decay")
Output = namedtuple("Output", "desc ptr")
Constants = namedtuple("Constants", "K V C ST ANCHOR_INTERVAL LOST REVERSE BEFORE HAS_S_IN")


class Tiles(NamedTuple):
    """Buffers of chunks, ST stages: what load_partition reads."""

    q: Any  # qs once boundary_partition has been there
    k: Any  # then ke
    v: Any
    do: Any
    g: Any


class StateTiles(NamedTuple):
    """The same and others by what the state partitions do with them."""

    x: Any  # new rows of the state
    other: Any  # what is summed with y
    read: Any  # what reads the state
    write: Any  # what it is written with
    y: Any
    total: Any


@gluon.jit
def load_partition(
    q_desc, k_desc, v_desc, do_desc, g_desc, tiles, full, empty, row, n, k_col, g_col, v_col, c
):
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes
        + k_desc.block_type.nbytes
        + v_desc.block_type.nbytes
        + do_desc.block_type.nbytes
        + g_desc.block_type.nbytes
    )
    for i in range(n):
        s = i % c.ST
        t = row + (n - 1 - i if c.REVERSE else i) * c.C
        mbarrier.wait(empty.index(s), ((i // c.ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), nbytes)
        sm90.copy_in(g_desc, [t, g_col], full.index(s), tiles.g.index(s))
        sm90.copy_in(q_desc, [t, k_col], full.index(s), tiles.q.index(s))
        sm90.copy_in(k_desc, [t, k_col], full.index(s), tiles.k.index(s))
        sm90.copy_in(v_desc, [t, v_col], full.index(s), tiles.v.index(s))
        sm90.copy_in(do_desc, [t, v_col], full.index(s), tiles.do.index(s))


@gluon.jit
def boundary_partition(tiles, gates, until, full, flags_ready, ready, length, n, c):
    """qs and ke of each chunk; clears a short chunk's rest."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    o_i = gl.arange(0, c.C, gl.SliceLayout(1, al))
    until.store(intra.ones(o_i * 0, o_i + 1, al, c.C, gl.bfloat16))
    for i in range(n):
        s = i % c.ST
        num_rows = length - (n - 1 - i if c.REVERSE else i) * c.C
        mbarrier.wait(flags_ready.index(s), (i // c.ST) & 1)
        mbarrier.wait(full.index(s), (i // c.ST) & 1)
        q, k = tiles.q.index(s), tiles.k.index(s)
        if num_rows < c.C:
            common.zero_tail_rows(q, num_rows, c.C, c.K)
            common.zero_tail_rows(k, num_rows, c.C, c.K)
            common.zero_tail_rows(tiles.g.index(s), num_rows, c.C, c.K)
            common.zero_tail_rows(tiles.v.index(s), num_rows, c.C, c.V)
            common.zero_tail_rows(tiles.do.index(s), num_rows, c.C, c.V)
            gl.thread_barrier()
        intra.take_gates(tiles.g.index(s), gates, c.K, c.C)
        for h in gl.static_range(c.K // 64):
            # adding to 0 keeps the instructions that were checked on an H200
            b_g = gl.zeros([c.C, 64], gl.float32, al)
            b_g += intra.half(gates, h).load(al).to(gl.float32) * intra.LOG2E
            # of the gates after it
            b_sum = intra.gate_sums(until.permute((1, 0)), gates, h, c.C) - b_g
            b_k = intra.half(k, h).load(al).to(gl.float32)
            intra.half(k, h).store((b_k * gl.exp2(b_sum)).to(k.dtype))
            b_sum = intra.gate_sums(until, gates, h, c.C)
            if c.BEFORE:
                b_sum -= b_g
            b_q = intra.half(q, h).load(al).to(gl.float32)
            intra.half(q, h).store((b_q * gl.exp2(b_sum)).to(q.dtype))
        sm90.fence_async_shared()
        mbarrier.arrive(ready.index(s), count=1)


@gluon.jit
def state_partition(
    output, tiles, ready, empty, refs, o_s, row, HV, y_col, length, n, scale_in, I: gl.constexpr, c
):
    """Rows 64 I and on of the state, and of y^T."""
    y_desc, y_ptr = output
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.V, 16])
    yl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, yl, 2)
    o_x = 64 * I + gl.arange(0, 64, gl.SliceLayout(1, sl))
    o_r = 64 * I + gl.arange(0, 64, gl.SliceLayout(1, yl))
    o_a = o_x[:, None] * c.V + gl.arange(0, c.V, gl.SliceLayout(0, sl))[None, :]
    if c.HAS_S_IN:
        b_s = gl.load(refs.s_in + (o_s + o_a)).to(gl.float32) * scale_in
    else:
        b_s = gl.zeros([64, c.V], gl.float32, sl)
    zero = gl.zeros([64, c.C], gl.float32, yl)
    b_z = gl.zeros([64], gl.float32, gl.SliceLayout(1, yl))
    y_col += 64 * I
    for i in range(n):
        s = i % c.ST
        i_c = n - 1 - i if c.REVERSE else i
        t = i_c * c.C
        at = HV.to(gl.int64) * i_c * c.K
        if c.REVERSE and (i_c % c.ANCHOR_INTERVAL == c.ANCHOR_INTERVAL - 1) | (i == 0):
            p = refs.anchor + HV.to(gl.int64) * (i_c // c.ANCHOR_INTERVAL) * (c.K * c.V)
            # z afresh from the state at an anchor: as a running sum it would collect every chunk's
            # rounding
            b_z = gl.convert_layout(gl.sum(b_s * gl.load(p + o_a), 1), gl.SliceLayout(1, yl))
        mbarrier.wait(ready.index(s), (i // c.ST) & 1)
        # S before the decay is the operand; it decays in place while the product runs
        lhs = gl.convert_layout(b_s.to(tiles.x.dtype), sa)
        b_s *= tiles.total.index(s).slice(64 * I, 64).load(gl.SliceLayout(1, sl))[:, None]
        right = tiles.read.index(s).permute((1, 0))
        b_y = warpgroup_mma(lhs, right, zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma(
            intra.half(tiles.x.index(s), I).permute((1, 0)),
            tiles.write.index(s),
            b_s,
            is_async=True,
        )
        b_y, b_s = sm90.warpgroup_mma_wait(0, deps=(b_y, b_s))
        b_other = intra.half(tiles.other.index(s), I).permute((1, 0)).load(sa)
        b_sum = gl.sum(gl.convert_layout(b_other, yl).to(gl.float32) * b_y, 1)
        # read again in y's layout, before the stage is given back
        b_d = tiles.total.index(s).slice(64 * I, 64).load(gl.SliceLayout(1, yl))
        mbarrier.arrive(empty.index(s), count=1)
        if c.REVERSE:
            # where a channel has decayed to nothing the difference would be rounding alone
            b_z = gl.where(b_d < c.LOST, 0.0, b_z - b_sum)
            gl.store(refs.z + at + o_r, b_z)
            b_z += gl.load(refs.sums + at + o_r)
        else:
            gl.store(refs.sums + at + o_r, b_sum)
            gl.store(refs.decay + at + o_r, b_d)
            if (i_c % c.ANCHOR_INTERVAL == c.ANCHOR_INTERVAL - 1) | (i_c == n - 1):
                p = refs.anchor + HV.to(gl.int64) * (i_c // c.ANCHOR_INTERVAL) * (c.K * c.V)
                gl.store(p + o_a, b_s)
        common.store_tile_transposed(
            y_desc, y_ptr, tiles.y.index(I), b_y, row + t, y_col, HV * c.K, length - t, c.C
        )
    sm90.store_wait(0)


@gluon.jit(do_not_specialize=["scale_in", "T", "N", "HV", "H"])
def vector_decay_dqk_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    v_desc,  # [tokens, HV * V] by [C, V]
    do_desc,
    g_desc,  # [tokens, HV * K] by [C, K]
    y_desc,  # [tokens, HV * K] by [C, 64]: dqs, or dke if REVERSE
    y_ptr,
    s_in_ptr,  # [N, HV, K, V]; times scale_in
    sums_ptr,  # [chunks, HV, K]: of qs * dqs
    z_ptr,  # [chunks, HV, K]
    anchor_ptr,  # [anchors, HV, K, V]
    decay_ptr,  # [chunks, HV, K]
    cu_ptr,  # [N + 1]
    scale_in, T, N, HV, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    ANCHOR_INTERVAL: gl.constexpr, LOST: gl.constexpr, BOUND: gl.constexpr, REVERSE: gl.constexpr,
    BEFORE: gl.constexpr, HAS_S_IN: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """grid (HV * N,), 4 warps: one program scans one head of one sequence; K is 128."""
    c: gl.constexpr = Constants(K, V, C, ST, ANCHOR_INTERVAL, LOST, REVERSE, BEFORE, HAS_S_IN)
    output = Output(y_desc, y_ptr)
    dtype: gl.constexpr = q_desc.dtype
    ones_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    qs = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    ks = gl.allocate_shared_memory(dtype, [ST, C, K], k_desc.layout)
    vs = gl.allocate_shared_memory(dtype, [ST, C, V], v_desc.layout)
    ds = gl.allocate_shared_memory(dtype, [ST, C, V], do_desc.layout)
    gs = gl.allocate_shared_memory(g_desc.dtype, [ST, C, K], g_desc.layout)
    gates = gl.allocate_shared_memory(g_desc.dtype, [C, K], g_desc.layout)
    until = gl.allocate_shared_memory(gl.bfloat16, [C, C], ones_l)
    ys = gl.allocate_shared_memory(dtype, [2, C, 64], y_desc.layout)
    totals = gl.allocate_shared_memory(gl.float32, [ST, K], plain)
    flags = gl.allocate_shared_memory(gl.float32, [ST, 1], plain)
    full = common.alloc_mbarriers(1, ST)
    flags_ready = common.alloc_mbarriers(1, ST)
    ready = common.alloc_mbarriers(1, ST)
    empty = common.alloc_mbarriers(2, ST)
    i_h, i_n, row, length, first, n = common.program_coords(cu_ptr, T, N, HV, T, C, PACKED, False)
    k_col = i_h // (HV // H) * K
    o_s = (i_n.to(gl.int64) * HV + i_h) * (K * V)
    # what is not given: something else, for only the first part takes None
    p_in = s_in_ptr if HAS_S_IN else y_ptr
    o_chunk = (first.to(gl.int64) * HV + i_h) * K
    p_sums = sums_ptr + o_chunk
    p_z = z_ptr + o_chunk
    p_decay = decay_ptr + o_chunk
    anchor = first_anchor(i_n, row, T, T, ANCHOR_INTERVAL * C, False, PACKED)
    p_anchor = anchor_ptr + (anchor.to(gl.int64) * HV + i_h) * (K * V)
    refs = Refs(p_in, p_sums, p_z, p_anchor, p_decay)
    tiles = Tiles(qs, ks, vs, ds, gs)
    if REVERSE:
        state_tiles = StateTiles(qs, ks, vs, ds, ys, totals)
    else:
        state_tiles = StateTiles(ks, qs, ds, vs, ys, totals)
    gl.warp_specialize(
        [
            (state_partition, (
                output, state_tiles, ready, empty, refs, o_s, row, HV, i_h * K, length, n, scale_in,
                0, c)),
            (state_partition, (
                output, state_tiles, ready, empty, refs, o_s, row, HV, i_h * K, length, n, scale_in,
                1, c)),
            (boundary_partition, (tiles, gates, until, full, flags_ready, ready, length, n, c)),
            (intra.gate_sum_partition, (
                gs, totals, flags, full, flags_ready, length, n, K, C, ST, BOUND, REVERSE)),
            (load_partition, (
                q_desc, k_desc, v_desc, do_desc, g_desc, tiles, full, empty, row, n, k_col, i_h * K,
                i_h * V, c)),
        ],
        [4, 4, 1, 1],
        [176, 120, 40, 40],
    )  # fmt: skip
