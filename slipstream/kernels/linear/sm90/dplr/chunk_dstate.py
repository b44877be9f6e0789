"""Decays per channel, or free a and b, on sm_90: the scan back over chunks.

By the names of chunk_fwd.py, with dS' the gradient of the state after a chunk,

    dx = qb^T do + b^ dS'        y = R^T dx        dS = total dS' + q~^T do + W^T dx

V as the rows, a part of 4 warps for 64 columns of V, as in chunk_fwd.py. dS' and y are written, or,
of sequences in segments (SPLIT), first where the scan of each ends, alone.

    load_partition, 1 warp                     state_partition, 4 warps for each 64 columns of V
      do, q~, W, b^, qb, R, total                dx, y and dS; y and dS' go to memory by TMA from
                            -- full -->          buffers of this partition alone
      <-- empty

    buffers                            stages  arrivals a phase: full / empty
    tiles [C, K] and [C, C], total     ST      1 (TMA), 2 with gates: the warp stores total / V / 64
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.dplr.chunk_fwd import store_output
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# descriptors of what is loaded, the states' ends, and constants of a launch
Descs = namedtuple("Descs", "do q w b qb r")
Ends = namedtuple("Ends", "s_in s_out")
Constants = namedtuple("Constants", "K V C ST NV HAS_GATE HAS_S_IN HAS_S_OUT TRANSITION_ONLY")


class Tiles(NamedTuple):
    """Buffers of chunks, ST stages, by the names of wy.py; another's where a call has no such."""

    do: Any  # NV a stage
    q: Any
    w: Any
    b: Any
    qb: Any
    r: Any
    total: Any


class Copies(NamedTuple):
    """Tiles that TMA stores, one for each 64 columns of V."""

    dstate: Any
    y: Any


@gluon.jit
def load_partition(descs, total_ptr, tiles, full, empty, chunk, HV, row, v_col, n, c):
    """chunk: of the first."""
    layout: gl.constexpr = gl.BlockedLayout([c.K // 32], [32], [1], [0])
    nbytes: gl.constexpr = (
        3 * descs.q.block_type.nbytes
        + (2 - c.TRANSITION_ONLY) * descs.qb.block_type.nbytes
        + c.NV * descs.do.block_type.nbytes
    )
    o_k = gl.arange(0, c.K, layout)
    if c.HAS_GATE:
        last = gl.cast(chunk + gl.maximum(n - 1, 0) * HV, gl.int64)
        b_total = gl.load(total_ptr + last * c.K + o_k)
    for i in range(n):
        s = i % c.ST
        i_c = n - 1 - i
        at = (chunk + i_c * HV) * c.C
        mbarrier.wait(empty.index(s), ((i // c.ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), nbytes)
        for p in gl.static_range(c.NV):
            do = tiles.do.index(s * c.NV + p)
            sm90.copy_in(descs.do, [row + i_c * c.C, v_col + p * 64], full.index(s), do)
        sm90.copy_in(descs.qb, [at, 0], full.index(s), tiles.qb.index(s))
        sm90.copy_in(descs.b, [at, 0], full.index(s), tiles.b.index(s))
        sm90.copy_in(descs.q, [at, 0], full.index(s), tiles.q.index(s))
        sm90.copy_in(descs.w, [at, 0], full.index(s), tiles.w.index(s))
        if not c.TRANSITION_ONLY:
            sm90.copy_in(descs.r, [at, 0], full.index(s), tiles.r.index(s))
        if c.HAS_GATE:
            tiles.total.index(s).store(b_total)
            mbarrier.arrive(full.index(s), count=1)
            # the next chunk's, which come from global memory while this warp waits for a stage
            before = gl.cast(chunk + gl.maximum(i_c - 1, 0) * HV, gl.int64)
            b_total = gl.load(total_ptr + before * c.K + o_k)


@gluon.jit
def state_partition(
    states_desc, y_desc, tiles, copies, full, empty, ends, chunk, HV, i_s, length, n,
    PARTITION: gl.constexpr, c,
):  # fmt: skip
    """Columns 64 PARTITION and on of V. i_s: number of the segment's and head's states."""
    s_in_ptr, s_out_ptr = ends
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.K, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_v = gl.arange(0, 64, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, c.K, gl.SliceLayout(0, sl))
    o_s = i_s * (c.K * c.V) + o_k[None, :] * c.V + (PARTITION * 64 + o_v)[:, None]
    if c.HAS_S_IN:
        b_s = gl.load(s_in_ptr + o_s).to(gl.float32)
    else:
        b_s = gl.zeros([64, c.K], gl.float32, sl)
    zero = gl.zeros([64, c.C], gl.float32, xl)
    for i in range(n):
        s = i % c.ST
        i_c = n - 1 - i
        at = (chunk + i_c * HV) * c.V + PARTITION * 64
        mbarrier.wait(full.index(s), (i // c.ST) & 1)
        do = tiles.do.index(s * c.NV + PARTITION)
        if length - i_c * c.C < c.C:
            # these rows are the next sequence's
            common.zero_tail_rows(do, length - i_c * c.C, c.C, 64)
            sm90.fence_async_shared()
            gl.thread_barrier()
        b_do = do.permute((1, 0))
        # rounded for the products alone: the gradient goes on in float32
        b_lhs = b_s.to(tiles.q.dtype)
        b_x = warpgroup_mma(b_do, tiles.qb.index(s), zero, use_acc=False, is_async=True)
        lhs = gl.convert_layout(b_lhs, sa)
        b_x = warpgroup_mma(lhs, tiles.b.index(s).permute((1, 0)), b_x, is_async=True)
        if c.HAS_GATE:
            b_s = b_s * tiles.total.index(s).load(gl.SliceLayout(0, sl))[None, :]
        b_s = warpgroup_mma(b_do, tiles.q.index(s), b_s, is_async=True)
        if not c.TRANSITION_ONLY:
            store_output(states_desc, at, copies.dstate.index(PARTITION), b_lhs)
        # dx alone is waited for: the product with q, started after it, goes on
        b_x = sm90.warpgroup_mma_wait(1, deps=(b_x,))
        b_lhs = b_x.to(tiles.q.dtype)
        b_s = warpgroup_mma(gl.convert_layout(b_lhs, xa), tiles.w.index(s), b_s, is_async=True)
        if c.TRANSITION_ONLY:
            b_s = sm90.warpgroup_mma_wait(0, deps=(b_s,))
            mbarrier.arrive(empty.index(s), count=1)
        else:
            lhs = gl.convert_layout(b_lhs, sa)
            b_y = warpgroup_mma(lhs, tiles.r.index(s), zero, use_acc=False, is_async=True)
            b_s, b_y = sm90.warpgroup_mma_wait(0, deps=(b_s, b_y))
            mbarrier.arrive(empty.index(s), count=1)
            store_output(y_desc, at, copies.y.index(PARTITION), b_y.to(tiles.q.dtype))
    sm90.store_wait(0)
    if c.HAS_S_OUT:
        b_s = b_s.to(s_out_ptr.dtype.element_ty)
        gl.store(s_out_ptr + o_s, b_s)


@gluon.jit(do_not_specialize=["T", "N", "HV", "segment"])
def dplr_chunk_dstate_sm90_kernel(
    do_desc,  # [tokens, HV * V] by [C, 64]
    q_desc,  # [slots * HV * C, K] by [C, K]
    w_desc, b_desc,
    qb_desc,  # [slots * HV * C, C] by [C, C]
    r_desc,
    y_desc,  # [slots * HV * V, C] by [64, C]
    states_desc,  # [slots * HV * V, K] by [64, K]: dS' after each chunk
    total_ptr,  # [slots, HV, K]
    s_in_ptr,  # [segments, HV, K, V]: gradient of the state after the segment
    s_out_ptr,  # [segments, HV, K, V]: of that before it; dE
    cu_ptr,  # [N + 1]
    T, N, HV, segment,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, HAS_GATE: gl.constexpr,
    HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr, TRANSITION_ONLY: gl.constexpr,
    SPLIT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """grid (HV * segments,), 4 warps: one program scans one head of one segment.

    Without SPLIT a segment is a sequence. TRANSITION_ONLY: s_out is all that is wanted.
    """
    ends = Ends(s_in_ptr, s_out_ptr)
    descs = Descs(do_desc, q_desc, w_desc, b_desc, qb_desc, r_desc)
    NV: gl.constexpr = V // 64
    dtype: gl.constexpr = q_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    dos = gl.allocate_shared_memory(dtype, [ST * NV, C, 64], do_desc.layout)
    qs = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    ws = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    bs = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    qbs = gl.allocate_shared_memory(dtype, [ST, C, C], qb_desc.layout)
    # what a call does not use has another's name: it is not read, and takes no memory
    rs = qbs
    ys = qbs
    ss = qs
    if not TRANSITION_ONLY:
        rs = gl.allocate_shared_memory(dtype, [ST, C, C], qb_desc.layout)
        ys = gl.allocate_shared_memory(dtype, [NV, 64, C], y_desc.layout)
        ss = gl.allocate_shared_memory(dtype, [NV, 64, K], states_desc.layout)
    totals = gl.allocate_shared_memory(gl.float32, [ST, K], plain)
    tiles, copies = Tiles(dos, qs, ws, bs, qbs, rs, totals), Copies(ss, ys)
    full = common.alloc_mbarriers(1 + HAS_GATE, ST)
    empty = common.alloc_mbarriers(NV, ST)
    i_h, i_seg, row, length, first, n = common.program_coords(
        cu_ptr, T, N, HV, segment, C, PACKED, SPLIT
    )
    # a sequence of no tokens may have a first chunk past the last one
    chunk = gl.where(n > 0, first, 0) * HV + i_h
    v_col = i_h * V
    i_s = i_seg.to(gl.int64) * HV + i_h
    c: gl.constexpr = Constants(K, V, C, ST, NV, HAS_GATE, HAS_S_IN, HAS_S_OUT, TRANSITION_ONLY)
    if NV == 1:
        gl.warp_specialize(
            [
                (state_partition, (
                    states_desc, y_desc, tiles, copies, full, empty, ends, chunk, HV, i_s, length,
                    n, 0, c)),
                (load_partition, (
                    descs, total_ptr, tiles, full, empty, chunk, HV, row, v_col, n, c)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (state_partition, (
                    states_desc, y_desc, tiles, copies, full, empty, ends, chunk, HV, i_s, length,
                    n, 0, c)),
                (state_partition, (
                    states_desc, y_desc, tiles, copies, full, empty, ends, chunk, HV, i_s, length,
                    n, 1, c)),
                (load_partition, (
                    descs, total_ptr, tiles, full, empty, chunk, HV, row, v_col, n, c)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
