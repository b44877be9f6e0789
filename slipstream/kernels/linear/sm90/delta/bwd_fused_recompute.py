"""Delta rule backward in one scan on sm_90 (bwd_fused.py): S and w of a part once more.

The scan of chunk_fwd_2tile.py, by all warps that go back later, with all columns of V:

    w = R v - R (diag(exp(G)) k S)        S <- exp(G_C) S + (k exp(G_C - G))^T beta w

through the buffers of what there is on the way back: R in that of q, S in that of dS', w in that of
dv. The last chunk's S and w go to where the way back looks for them.
"""

from slipstream.kernels.linear.sm90.common.device import zero_tail_rows
from slipstream.kernels.primitives.gluon_compat import (
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def square(tile, like, C: gl.constexpr):
    """The first [C, C] of a tile, as `like` is."""
    SQUARES: gl.constexpr = tile.shape[0] * tile.shape[1] // (C * C)
    return tile._reinterpret(tile.dtype, [SQUARES, C, C], like.layout).index(0)


@gluon.jit
def recompute_states(
    descs, tiles, buffers, barriers, row, v_col, scratch, gone, first, count, length,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, WARPS: gl.constexpr,
    HAS_GATE: gl.constexpr,
):  # fmt: skip
    """From S before a part, which is there, to its end: S before its other chunks into memory, and
    w; of the last to where the way back begins. gone: chunks gone back through."""
    w_desc, states_desc = descs
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    zero = gl.zeros([V, C], gl.float32, xl)
    b_s = tiles.state.index(gone >> 30).load(sl).to(gl.float32)
    # `grads` is done with what the chunk before has there
    mbarrier.wait(barriers.w_empty.index(0), (gone & 1) ^ 1)
    mbarrier.wait(barriers.state_empty.index(0), (gone & 1) ^ 1)
    for at in range(count):
        j = 2 * gone + at
        s = j % ST
        rows = tiles.beta_gate.index(s)
        # 0, which no compiler knows: it would keep all addresses
        o = at >> 30
        o_w = at >> 29
        b_r = square(tiles.q.index(s), tiles.a.index(0), C)
        num_rows = length - (first + at) * C
        is_last = at == count - 1
        mbarrier.wait(barriers.full.index(s), (j // ST) & 1)
        if num_rows < C:
            zero_tail_rows(tiles.k.index(s), num_rows, C, K, WARPS)
            zero_tail_rows(tiles.do.index(s), num_rows, C, V, WARPS)
            zero_tail_rows(b_r, num_rows, C, C, WARPS)
            fence_async_shared()
            gl.thread_barrier()
        b_sb = b_s.to(tiles.k.dtype)
        store_wait(1)  # of the chunk before, S
        gl.thread_barrier()
        buffers.dstate.index(o).store(b_sb)
        if is_last:
            tiles.state.index(at >> 28).store(b_sb)
        fence_async_shared()
        store_wait(0)  # and w
        gl.thread_barrier()
        b_u = warpgroup_mma(
            buffers.dstate.index(o),
            tiles.k.index(s + o).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        if HAS_GATE:
            last = rows.slice(2 * C - 1, 1)
            b_s *= gl.exp2(last.load(gl.SliceLayout(0, sl)))[None, :]
        if (at > 0) & (at < count - 1):
            copy_out(states_desc, [scratch + (at - 1) * V, 0], buffers.dstate.index(o))
        b_u = warpgroup_mma_wait(0, deps=(b_u,))
        if HAS_GATE:
            b_u = -b_u * gl.exp2(rows.slice(C, C).load(gl.SliceLayout(0, xl)))[None, :]
        else:
            b_u = -b_u
        b_u = gl.convert_layout(b_u.to(tiles.k.dtype), sa)
        b_w = warpgroup_mma(b_u, b_r.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_w = warpgroup_mma(
            tiles.do.index(s).permute((1, 0)), b_r.permute((1, 0)), b_w, is_async=True
        )
        b_w = warpgroup_mma_wait(0, deps=(b_w,))
        if is_last:
            tiles.w.index(o_w).permute((1, 0)).store(b_w.to(tiles.k.dtype))
            fence_async_shared()
            mbarrier.arrive(barriers.w_full.index(0), count=1)
            mbarrier.arrive(barriers.state_full.index(0), count=1)
        else:
            b_share = rows.slice(0, C).load(gl.SliceLayout(0, xl))
            if HAS_GATE:
                b_G = rows.slice(C, C).load(gl.SliceLayout(0, xl))
                b_share *= gl.exp2(last.load(gl.SliceLayout(0, xl)) - b_G)
            b_lhs = gl.convert_layout((b_w * b_share[None, :]).to(tiles.k.dtype), xa)
            b_s = warpgroup_mma(b_lhs, tiles.k.index(s), b_s, is_async=True)
            buffers.dv.index(o_w).permute((1, 0)).store(b_w.to(tiles.k.dtype))
            fence_async_shared()
            gl.thread_barrier()
            copy_out(w_desc, [row + (first + at) * C, v_col], buffers.dv.index(o_w))
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(barriers.empty.index(s), count=2)
