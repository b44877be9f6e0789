"""Delta rule, no decay or one a token, on sm_90: the scan over chunks, backward.

With dS' [K, V] the gradient of the state after a chunk, R from triton/delta/solve_tril.py and
A = scale tril(q k^T decay), what Triton's chunk kernel computes is written with one product fewer
on the chain from chunk to chunk, since Z and W do not depend on dS':

    Z = A beta R          W = R^T diag(beta exp(G_C - G)) k          dv = Z^T do + W dS'
    dS = exp(G_C) dS' + (q exp(G))^T scale do - (k exp(G))^T dv

V as the rows, as in chunk_fwd.py. Four partitions of a program:

    load_partition, 1 warp       wy_partition, 4         state_partition, 4     save_partition, 4
      q, k, do, R, beta, G
                    -- full -->    Z, W -- wz_full -->     Z^T do + W dS'
                                   <-- wz_empty            dS' -- dstate_full -->  to memory
                                                           dv -- dv_full ------->  to memory
      <-- empty                                            <-- dstate_empty, dv_empty

    buffers                  stages  arrivals a phase: full / empty
    q, k, do, R, beta, G     ST      2 (TMA, and the warp that stores beta and G) / 1
    W [C, K], Z [C, C]       2       1 / 1, for both
    dS' [BV, K], dv [C, BV]  1       1 / 1 each, as soon as TMA has read it

wy_partition is a chunk ahead of the chain, and zeroes what is past the end of a short chunk.

With dv_desc None there is no save_partition: a segment's dE of segment_launch.py is all that is
wanted, the scan's end from a gradient of zero, or from the sequence's own after its last segment.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.delta import delta_device
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# constants of a launch, for device functions
Constants = namedtuple("Constants", "K V BV C ST HAS_GATE HAS_S_IN HAS_S_OUT TRANSITION_ONLY")


class Tiles(NamedTuple):
    """Buffers of chunks: ST stages of what load_partition reads, two of W and Z."""

    q: Any
    k: Any
    do: Any
    r: Any
    beta_gate: Any
    w: Any
    z: Any


class Copies(NamedTuple):
    """dS' and dv for save_partition, a stage each, and their barriers."""

    dstate: Any
    dv: Any
    dstate_full: Any
    dstate_empty: Any
    dv_full: Any
    dv_empty: Any


class Barriers(NamedTuple):
    """full, empty: of q, k, do, r and beta_gate. wz: of W and Z."""

    full: Any
    empty: Any
    wz_full: Any
    wz_empty: Any


@gluon.jit
def load_partition(
    q_desc, k_desc, d_desc, r_desc, tiles, barriers, p_beta_gate, stride, row, n, k_col, v_col,
    r_col, c,
):  # fmt: skip
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes
        + k_desc.block_type.nbytes
        + d_desc.block_type.nbytes
        + r_desc.block_type.nbytes
    )
    b_beta_gate = common.load_beta_gate(
        p_beta_gate + gl.maximum(n - 1, 0) * stride, c.C, c.HAS_GATE
    )
    for i in range(n):
        s = i % c.ST
        t = row + (n - 1 - i) * c.C
        mbarrier.wait(barriers.empty.index(s), ((i // c.ST) & 1) ^ 1)
        mbarrier.expect(barriers.full.index(s), nbytes)
        sm90.copy_in(q_desc, [t, k_col], barriers.full.index(s), tiles.q.index(s))
        sm90.copy_in(k_desc, [t, k_col], barriers.full.index(s), tiles.k.index(s))
        sm90.copy_in(r_desc, [t, r_col], barriers.full.index(s), tiles.r.index(s))
        sm90.copy_in(d_desc, [t, v_col], barriers.full.index(s), tiles.do.index(s))
        tiles.beta_gate.index(s).store(b_beta_gate)
        mbarrier.arrive(barriers.full.index(s), count=1)
        b_beta_gate = common.load_beta_gate(
            p_beta_gate + gl.maximum(n - 2 - i, 0) * stride, c.C, c.HAS_GATE
        )


@gluon.jit
def wy_partition(tiles, barriers, length, n, scale, c):
    """Z and W into shared memory."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    aa: gl.constexpr = gl.DotOperandLayout(0, al, 2)
    wl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.K, 16])
    ra: gl.constexpr = gl.DotOperandLayout(0, wl, 2)
    o_i = gl.arange(0, c.C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, c.C, gl.SliceLayout(0, al))
    zero_a = gl.zeros([c.C, c.C], gl.float32, al)
    zero_w = gl.zeros([c.C, c.K], gl.float32, wl)
    seen = o_i[:, None] >= o_j[None, :]
    for i in range(n):
        s = i % c.ST
        w = i % 2
        num_rows = length - (n - 1 - i) * c.C
        mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)
        if num_rows < c.C:
            common.zero_tail_rows(tiles.q.index(s), num_rows, c.C, c.K)
            common.zero_tail_rows(tiles.k.index(s), num_rows, c.C, c.K)
            common.zero_tail_rows(tiles.do.index(s), num_rows, c.C, c.BV)
            common.zero_tail_rows(tiles.r.index(s), num_rows, c.C, c.C)
            sm90.fence_async_shared()
            gl.thread_barrier()
        b_a = warpgroup_mma(
            tiles.q.index(s), tiles.k.index(s).permute((1, 0)), zero_a, use_acc=False, is_async=True
        )
        b_share = tiles.beta_gate.index(s).slice(0, c.C).load(gl.SliceLayout(0, ra))
        b_beta = tiles.beta_gate.index(s).slice(0, c.C).load(gl.SliceLayout(0, al))
        if c.HAS_GATE:
            sums = tiles.beta_gate.index(s).slice(c.C, c.C)
            G_C = tiles.beta_gate.index(s).slice(2 * c.C - 1, 1).load(gl.SliceLayout(0, ra))
            b_share *= gl.exp2(G_C - sums.load(gl.SliceLayout(0, ra)))
            G_i = sums.load(gl.SliceLayout(1, al))
            G_j = sums.load(gl.SliceLayout(0, al))
        # R^T from registers as a left operand: it is scaled on the way
        b_r = tiles.r.index(s).permute((1, 0)).load(ra)
        b_r = (b_r.to(gl.float32) * b_share[None, :]).to(tiles.k.dtype)
        b_a = sm90.warpgroup_mma_wait(0, deps=(b_a,))
        b_w = warpgroup_mma(b_r, tiles.k.index(s), zero_w, use_acc=False, is_async=True)
        if c.HAS_GATE:
            # the exponentials run beside the product for W
            between = G_i[:, None] - G_j[None, :]
            b_a = b_a * gl.exp2(gl.where(seen, between, float("-inf")))
        b_a = gl.where(seen, b_a * (scale * b_beta)[None, :], 0.0).to(tiles.k.dtype)
        b_z = warpgroup_mma(
            gl.convert_layout(b_a, aa), tiles.r.index(s), zero_a, use_acc=False, is_async=True
        )
        # state_partition is done with the W and Z of two chunks ago
        mbarrier.wait(barriers.wz_empty.index(w), ((i // 2) & 1) ^ 1)
        b_w = sm90.warpgroup_mma_wait(1, deps=(b_w,))
        tiles.w.index(w).store(b_w.to(tiles.k.dtype))
        b_z = sm90.warpgroup_mma_wait(0, deps=(b_z,))
        tiles.z.index(w).store(b_z.to(tiles.k.dtype))
        sm90.fence_async_shared()
        mbarrier.arrive(barriers.wz_full.index(w), count=1)


@gluon.jit
def state_partition(tiles, copies, barriers, state_refs, reads, writes, n, scale, c):
    """reads, writes: whether s_in and s_out have the state at this program's ends.

    TRANSITION_ONLY: that before the segment alone.
    """
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.K, 16])
    yl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, yl, 2)
    ya: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_v = gl.arange(0, c.BV, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, c.K, gl.SliceLayout(0, sl))
    o_s = o_k[None, :] * c.V + o_v[:, None]
    if c.HAS_S_IN:
        m_in = (o_k >= 0)[None, :] & reads
        b_s = gl.load(state_refs.in_ptr + (state_refs.in_offset + o_s), mask=m_in, other=0.0).to(
            gl.float32
        )
    else:
        b_s = gl.zeros([c.BV, c.K], gl.float32, sl)
    zero = gl.zeros([c.BV, c.C], gl.float32, yl)
    for i in range(n):
        s = i % c.ST
        w = i % 2
        # wy_partition has seen the stage full, and may have cleared its tail
        mbarrier.wait(barriers.wz_full.index(w), (i // 2) & 1)
        mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)
        b_y = warpgroup_mma(
            tiles.do.index(s).permute((1, 0)), tiles.z.index(w), zero, use_acc=False, is_async=True
        )
        b_sb = b_s.to(tiles.k.dtype)
        b_y = warpgroup_mma(
            gl.convert_layout(b_sb, sa), tiles.w.index(w).permute((1, 0)), b_y, is_async=True
        )
        if not c.TRANSITION_ONLY:
            mbarrier.wait(copies.dstate_empty.index(0), (i & 1) ^ 1)
            copies.dstate.index(0).store(b_sb)
            sm90.fence_async_shared()
            mbarrier.arrive(copies.dstate_full.index(0), count=1)
        b_d = tiles.do.index(s).permute((1, 0)).load(ya).to(gl.float32) * scale
        if c.HAS_GATE:
            sums = tiles.beta_gate.index(s).slice(c.C, c.C)
            b_start = gl.exp2(sums.load(gl.SliceLayout(0, yl)))
            b_d *= gl.exp2(sums.load(gl.SliceLayout(0, ya)))[None, :]
            G_C = tiles.beta_gate.index(s).slice(2 * c.C - 1, 1).load(gl.SliceLayout(0, sl))
            b_s *= gl.exp2(G_C)[None, :]
        b_s = warpgroup_mma(b_d.to(tiles.k.dtype), tiles.q.index(s), b_s, is_async=True)
        b_y = sm90.warpgroup_mma_wait(1, deps=(b_y,))
        b_lhs = -b_y
        if c.HAS_GATE:
            b_lhs *= b_start[None, :]
        b_lhs = gl.convert_layout(b_lhs.to(tiles.k.dtype), ya)
        b_s = warpgroup_mma(b_lhs, tiles.k.index(s), b_s, is_async=True)
        if not c.TRANSITION_ONLY:
            mbarrier.wait(copies.dv_empty.index(0), (i & 1) ^ 1)
            copies.dv.index(0).permute((1, 0)).store(b_y.to(tiles.k.dtype))
            sm90.fence_async_shared()
            mbarrier.arrive(copies.dv_full.index(0), count=1)
        mbarrier.arrive(barriers.wz_empty.index(w), count=1)
        b_s = sm90.warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(barriers.empty.index(s), count=1)
    if c.HAS_S_OUT:
        # 0, but no compiler knows: the loop would keep what the addresses have in common
        o_out = state_refs.out_offset + (n >> 31) + o_k[None, :] * c.V + o_v[:, None]
        b_s = b_s.to(state_refs.out_ptr.dtype.element_ty)
        gl.store(state_refs.out_ptr + o_out, b_s, mask=(o_k >= 0)[None, :] & writes)


@gluon.jit
def save_partition(
    states_desc, y_desc, y_ptr, copies, row, chunk, HV, y_row, v_col, i_v, length, n, c
):
    """dS' after each chunk, and dv: each is waited for once the next one is on its way."""
    for i in range(n):
        i_c = n - 1 - i
        t = i_c * c.C
        mbarrier.wait(copies.dstate_full.index(0), i & 1)
        sm90.copy_out(states_desc, [(chunk + i_c * HV) * c.V + i_v, 0], copies.dstate.index(0))
        if i > 0:
            sm90.store_wait(1)
            mbarrier.arrive(copies.dv_empty.index(0), count=1)
        mbarrier.wait(copies.dv_full.index(0), i & 1)
        if t + c.C <= length:
            sm90.copy_out(y_desc, [row + t, v_col], copies.dv.index(0))
            sm90.store_wait(1)
        else:
            common.store_rows_masked(
                y_ptr, copies.dv.index(0), row + t, v_col, y_row, length - t, c.C, c.BV
            )
            sm90.store_wait(0)
        mbarrier.arrive(copies.dstate_empty.index(0), count=1)
    sm90.store_wait(0)


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "segment"])
def delta_chunk_dstate_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    do_desc,  # [tokens, HV * V] by [C, BV]
    r_desc,  # [tokens, HV * C] by [C, C]
    dv_desc,  # [tokens, HV * V] by [C, BV]; None where dE alone is wanted
    states_desc,  # [chunks * HV * V, K] by [BV, K]: dS' after each chunk; None with dv_desc
    dv_ptr,
    beta_gates_ptr,  # [chunks, HV, ROWS, C]: beta and G
    lognorm_ptr,  # [chunks, HV, BLOCKS], for dE with a gate
    s_in_ptr,  # [segments, HV, K, V]: gradient of the state after the segment; for dE [N, HV, K, V]
    s_out_ptr,  # [N, HV, K, V]: of that before the sequence; or dE [segments, HV, K, V]
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H, segment,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    HAS_GATE: gl.constexpr, HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr, SPLIT: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCKS: gl.constexpr = 0,
    EVERY: gl.constexpr = False,
):  # fmt: skip
    """grid (V / BV * HV * segments,), 4 warps: as delta_chunk_fwd_sm90_kernel, from the end; dE as
    E of segment_launch.py, EVERY too."""
    TRANSITION_ONLY: gl.constexpr = dv_desc is None
    dtype: gl.constexpr = k_desc.dtype
    qs = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    ks, ds, rs, gs = delta_device.alloc_stages(k_desc, do_desc, r_desc, HAS_GATE, K, BV, C, ST)
    ws = gl.allocate_shared_memory(dtype, [2, C, K], k_desc.layout)
    zs = gl.allocate_shared_memory(dtype, [2, C, C], r_desc.layout)
    # what a call does not use has another's name
    ss, ys = ws, ws
    if not TRANSITION_ONLY:
        ss = gl.allocate_shared_memory(dtype, [1, BV, K], states_desc.layout)
        ys = gl.allocate_shared_memory(dtype, [1, C, BV], dv_desc.layout)
    full = common.alloc_mbarriers(2, ST)
    empty = common.alloc_mbarriers(1, ST)
    wz_full = common.alloc_mbarriers(1, 2)
    wz_empty = common.alloc_mbarriers(1, 2)
    s_full, s_empty, y_full, y_empty = wz_full, wz_full, wz_full, wz_full
    if not TRANSITION_ONLY:
        s_full = common.alloc_mbarriers(1, 1)
        s_empty = common.alloc_mbarriers(1, 1)
        y_full = common.alloc_mbarriers(1, 1)
        y_empty = common.alloc_mbarriers(1, 1)
    i_v, i_h, i_seg, row, length, n, chunk, i_n, i_s, last = delta_device.program_coords(
        cu_ptr, T, N, HV, segment, V // BV, BV, C, PACKED, SPLIT
    )
    reads, writes, i_in, i_out = True, i_s == 0, i_seg, i_n
    if TRANSITION_ONLY:
        whole = n
        # chunks after these change the start by less than float32 rounds
        if HAS_GATE:
            n, _ = delta_device.effective_chunks(
                beta_gates_ptr, lognorm_ptr, chunk, HV, n, C, BLOCKS, True
            )
        first = i_s == 0
        if EVERY:
            first = i_s < 0
            last = first
        reads, writes, i_in, i_out = last & (n == whole), True, i_n, i_seg
        length = gl.minimum(length, n * C)
        # nobody asks for the first one's
        n = sm90.uniform(gl.where(first, 0, n))
    k_col = i_h // (HV // H) * K
    v_col = i_h * V + i_v
    r_col = i_h * C
    p_beta_gate, stride = delta_device.beta_gate_ptr(beta_gates_ptr, chunk, HV, C, HAS_GATE)
    o_in = delta_device.state_offset(i_in, i_h, HV, K, V) + i_v
    o_out = delta_device.state_offset(i_out, i_h, HV, K, V) + i_v
    tiles = Tiles(qs, ks, ds, rs, gs, ws, zs)
    copies = Copies(ss, ys, s_full, s_empty, y_full, y_empty)
    barriers = Barriers(full, empty, wz_full, wz_empty)
    state_refs = delta_device.StateRefs(s_in_ptr, s_out_ptr, o_in, o_out)
    c: gl.constexpr = Constants(K, V, BV, C, ST, HAS_GATE, HAS_S_IN, HAS_S_OUT, TRANSITION_ONLY)
    if TRANSITION_ONLY:
        gl.warp_specialize(
            [
                (state_partition, (
                    tiles, copies, barriers, state_refs, reads, writes, n, scale, c)),
                (wy_partition, (tiles, barriers, length, n, scale, c)),
                (load_partition, (
                    q_desc, k_desc, do_desc, r_desc, tiles, barriers, p_beta_gate, stride, row, n,
                    k_col, v_col, r_col, c)),
            ],
            [4, 1],
            [200, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (state_partition, (
                    tiles, copies, barriers, state_refs, reads, writes, n, scale, c)),
                (save_partition, (
                    states_desc, dv_desc, dv_ptr, copies, row, chunk, HV, HV * V, v_col, i_v,
                    length, n, c)),
                (wy_partition, (tiles, barriers, length, n, scale, c)),
                (load_partition, (
                    q_desc, k_desc, do_desc, r_desc, tiles, barriers, p_beta_gate, stride, row, n,
                    k_col, v_col, r_col, c)),
            ],
            [4, 4, 1],
            [64, 200, 24],
        )  # fmt: skip
