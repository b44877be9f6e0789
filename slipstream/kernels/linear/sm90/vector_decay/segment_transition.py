"""A decay per channel on sm_90, sequences in segments: what a segment does to the state before it.

    S <- total S + E

E is the state after the segment if the state before it is zero; total is the decay of each channel
from the segment's start to its end. A chunk, D and G as in intra.py, takes

    E <- D E + (k exp(G_C - G))^T v        total <- total D

    load_partition, 1 warp        gate_sum_partition, 1     key_partition, 4       state_partition,
                                                                                   twice: 64 rows
      k, v, gates -- full ----->    D
                                    -- summed ---------->     waits for full too
                                                              k exp(G_C - G)
                                                              in place
                                                              -- ready --------->    E
      <-- empty                                                                      arrive at empty

    buffers                   stages  arrivals a phase
    k, gates [C, K], v [C, V] ST      full 1 (TMA), summed 1, ready 1, empty 2

Exponents are sums of gates after a token, a product of zeros and ones with the gates, so that
nothing cancels at any strength.
"""

from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90.common.device import (
    alloc_mbarriers,
    program_coords,
    zero_tail_rows,
)
from slipstream.kernels.linear.sm90.vector_decay.intra import (
    gate_sum_partition,
    gate_sums,
    half,
    ones,
    take_gates,
)
from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HALF = gl.constexpr(64)  # rows of the state in a warpgroup


class Tiles(NamedTuple):
    """Buffers of chunks, ST stages."""

    k: Any  # k, then k exp(G_C - G)
    v: Any  # two halves a stage
    g: Any


@gluon.jit
def load_partition(
    k_desc, v_desc, g_desc, tiles, full, empty, row, n, k_col, g_col, v_col,
    C: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    nbytes: gl.constexpr = (
        k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes + g_desc.block_type.nbytes
    )
    for i in range(n):
        s = i % ST
        t = row + i * C
        mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), nbytes)
        copy_in(g_desc, [t, g_col], full.index(s), tiles.g.index(s))
        copy_in(k_desc, [t, k_col], full.index(s), tiles.k.index(s))
        copy_in(v_desc, [t, v_col], full.index(s), tiles.v.index(2 * s))
        copy_in(v_desc, [t, v_col + HALF], full.index(s), tiles.v.index(2 * s + 1))


@gluon.jit
def key_partition(
    tiles, gates, after, full, summed, ready, length, n,
    K: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """The keys of each chunk; clears a short chunk's rest."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    after.store(ones(o_i + 1, C - 1 - o_i, al, C, gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    for i in range(n):
        s = i % ST
        num_rows = length - i * C
        # the gates of a short chunk are cleared only once they have been summed
        mbarrier.wait(summed.index(s), (i // ST) & 1)
        mbarrier.wait(full.index(s), (i // ST) & 1)
        if num_rows < C:
            zero_tail_rows(tiles.k.index(s), num_rows, C, K)
            zero_tail_rows(tiles.g.index(s), num_rows, C, K)
            for h in gl.static_range(2):
                zero_tail_rows(tiles.v.index(2 * s + h), num_rows, C, 64)
            fence_async_shared()
            gl.thread_barrier()
        take_gates(tiles.g.index(s), gates, K, C)
        for h in gl.static_range(K // 64):
            k = half(tiles.k.index(s), h)
            b_k = k.load(al).to(gl.float32) * gl.exp2(gate_sums(after, gates, h, C))
            k.store(b_k.to(k.dtype))
        fence_async_shared()
        mbarrier.arrive(ready.index(s), count=1)


@gluon.jit
def state_partition(
    tiles, totals, ready, empty, e_ptr, total_ptr, n,
    I: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """Rows HALF * I and on of E^T; the first has total, too."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    columns: gl.constexpr = gl.SliceLayout(0, sl)
    o_v = HALF * I + gl.arange(0, HALF, gl.SliceLayout(1, sl))
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
        v_t = tiles.v.index(2 * s + I).permute((1, 0))
        b_s = warpgroup_mma(v_t, tiles.k.index(s), b_s, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(empty.index(s), count=1)
    gl.store(e_ptr + o_k[None, :] * V + o_v[:, None], b_s)
    # both warpgroups have it, since total has no columns of V
    if I == 0:
        gl.store(total_ptr + o_k, b_total)


@gluon.jit(do_not_specialize=["T", "N", "HV", "H", "segment"])
def vector_decay_segment_transition_sm90_kernel(
    k_desc,  # [tokens, H * K] by [C, K]
    v_desc,  # [tokens, HV * V] by [C, HALF]
    g_desc,  # [tokens, HV * K] by [C, K]
    e_ptr,  # [segments, HV, K, V]
    total_ptr,  # [segments, HV, K]
    cu_ptr,  # [N + 1]
    T,
    N,
    HV,
    H,
    segment,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    ST: gl.constexpr,
    BOUND: gl.constexpr,
    PACKED: gl.constexpr,
):
    """grid (HV * segments,), 4 warps: one program scans one head of one segment; V is 128."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ones_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    ks = gl.allocate_shared_memory(k_desc.dtype, [ST, C, K], k_desc.layout)
    vs = gl.allocate_shared_memory(v_desc.dtype, [2 * ST, C, HALF], v_desc.layout)
    gs = gl.allocate_shared_memory(g_desc.dtype, [ST, C, K], g_desc.layout)
    gates = gl.allocate_shared_memory(g_desc.dtype, [C, K], g_desc.layout)
    after = gl.allocate_shared_memory(gl.bfloat16, [C, C], ones_l)
    totals = gl.allocate_shared_memory(gl.float32, [ST, K], plain)
    flags = gl.allocate_shared_memory(gl.float32, [ST, 1], plain)
    full = alloc_mbarriers(1, ST)
    summed = alloc_mbarriers(1, ST)
    ready = alloc_mbarriers(1, ST)
    empty = alloc_mbarriers(2, ST)
    i_h, i_seg, row, length, _, n = program_coords(cu_ptr, T, N, HV, segment, C, PACKED, True)
    i_s = i_seg.to(gl.int64) * HV + i_h
    tiles = Tiles(ks, vs, gs)
    e_ptr += i_s * (K * V)
    total_ptr += i_s * K
    gl.warp_specialize(
        [
            (state_partition, (
                tiles, totals, ready, empty, e_ptr, total_ptr, n, 0, K, V, ST)),
            (state_partition, (
                tiles, totals, ready, empty, e_ptr, total_ptr, n, 1, K, V, ST)),
            (key_partition, (tiles, gates, after, full, summed, ready, length, n, K, C, ST)),
            (gate_sum_partition, (
                gs, totals, flags, full, summed, length, n, K, C, ST, BOUND, False)),
            (load_partition, (
                k_desc, v_desc, g_desc, tiles, full, empty, row, n, i_h // (HV // H) * K, i_h * K,
                i_h * V, C, ST)),
        ],
        [4, 4, 1, 1],
        [152, 136, 56, 40],
    )  # fmt: skip
