"""The scalar-decay family, no decay or one a token, on sm_90: dk and dv in one scan, backwards.

With dS [K, V] the gradient of the state after a chunk, G and E as in chunk_fwd.py,

    dv^T = scale * (dS^T k^T exp(G_C - G) + do^T A^T)      A = (k q^T) E [j, i], i >= j
    dk = scale * (exp(G_C - G) v dS^T + B q)               B = (v do^T) E [j, i]
    dS <- exp(G_C) dS + (q exp(G))^T do

so that q, k, v and do are read once for both.

    load_partition, 1 warp       dqkv_partition, 4 warps        state_partition, twice: 64 rows
      q, k, v, do -- full -->      A, B                           dS^T and dv (chunk_fwd.py's)
                                   A, factors -- a_full --->      dv^T = dS^T k^T + do^T A^T
                                   <-- a_empty
                                   v dS^T <-- s_full              dS^T, for dk
                                   s_empty -->                    before the next dS^T
      <-- empty                    dk; arrives at empty           arrive at empty

    buffers                       stages  arrivals a phase: full / empty
    q, k [C, K], v, do [C, V]     ST      1 (TMA) / 3, the three partitions
    A [C, C], the factors         2       1 / 2, the two state_partitions
    dS^T [V, K]                   1       2, one a half / 1

dqkv_partition zeroes what is past the end of a short chunk, which the others see by a_full.
"""

from collections import namedtuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.scalar_decay import chunk_fwd
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# shared memory of dqkv_partition and load_partition
Buffers = namedtuple(
    "Buffers", "qs ks vs ds ss scores factors sums dks full empty a_full a_empty s_full s_empty"
)


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, do_desc, buffers, row, n, k_col, v_col, c):
    qs, ks, vs, ds, _, _, _, _, _, full, empty, _, _, _, _ = buffers
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes
        + k_desc.block_type.nbytes
        + 2 * v_desc.block_type.nbytes
        + 2 * do_desc.block_type.nbytes
    )
    for i in range(n):
        s = i % c.ST
        t = row + (n - 1 - i) * c.C
        mbarrier.wait(empty.index(s), ((i // c.ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), nbytes)
        sm90.copy_in(k_desc, [t, k_col], full.index(s), ks.index(s))
        sm90.copy_in(q_desc, [t, k_col], full.index(s), qs.index(s))
        sm90.copy_in(v_desc, [t, v_col], full.index(s), vs.index(2 * s))
        sm90.copy_in(v_desc, [t, v_col + chunk_fwd.HALF], full.index(s), vs.index(2 * s + 1))
        sm90.copy_in(do_desc, [t, v_col], full.index(s), ds.index(2 * s))
        sm90.copy_in(do_desc, [t, v_col + chunk_fwd.HALF], full.index(s), ds.index(2 * s + 1))


@gluon.jit
def dqkv_partition(
    dk_desc, dk_ptr, buffers, p_g, stride_g, p_rows, p_later, row, HV, dk_col, length, n, scale, c
):
    (
        qs, ks, vs, ds, ss, scores, factors, sums, dks, full, empty, a_full, a_empty, s_full,
        s_empty,
    ) = buffers  # fmt: skip
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    kl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.D, 16])
    ba: gl.constexpr = gl.DotOperandLayout(0, kl, 2)
    o_j = gl.arange(0, c.C, gl.SliceLayout(1, al))
    o_i = gl.arange(0, c.C, gl.SliceLayout(0, al))
    o_t = gl.arange(0, c.C, gl.SliceLayout(1, kl))
    o_k = gl.arange(0, c.D, gl.SliceLayout(0, kl))
    zero_a = gl.zeros([c.C, c.C], gl.float32, al)
    zero_k = gl.zeros([c.C, c.D], gl.float32, kl)
    seen = o_j[:, None] <= o_i[None, :]
    b_decay = gl.where(seen, 1.0, zero_a)
    if c.HAS_GATE:
        b_g = chunk_fwd.load_gates(p_g, stride_g, gl.maximum(n - 1, 0) * c.C, length, c.C)
    for i in range(n):
        s = i % c.ST
        a = i % 2
        t = (n - 1 - i) * c.C
        if c.HAS_GATE:
            b_start, b_end, G_C = chunk_fwd.gates_of(b_g, sums, c.C)
            # the next chunk's: their latency is behind this one's products
            b_g = chunk_fwd.load_gates(p_g, stride_g, gl.maximum(n - 2 - i, 0) * c.C, length, c.C)
        mbarrier.wait(full.index(s), (i // c.ST) & 1)
        if length - t < c.C:
            common.zero_tail_rows(qs.index(s), length - t, c.C, c.D)
            common.zero_tail_rows(ks.index(s), length - t, c.C, c.D)
            for half in gl.static_range(2):
                common.zero_tail_rows(vs.index(2 * s + half), length - t, c.C, chunk_fwd.HALF)
                common.zero_tail_rows(ds.index(2 * s + half), length - t, c.C, chunk_fwd.HALF)
            sm90.fence_async_shared()
            gl.thread_barrier()
        b_a = warpgroup_mma(
            ks.index(s), qs.index(s).permute((1, 0)), zero_a, use_acc=False, is_async=True
        )
        if c.HAS_GATE:
            between = sums.load(gl.SliceLayout(0, al))[None, :]
            between = between - sums.load(gl.SliceLayout(1, al))[:, None]
            # masked before exp2, which would overflow where i < j
            b_decay = gl.exp2(gl.where(seen, between, float("-inf")))
        b_a = sm90.warpgroup_mma_wait(0, deps=(b_a,))
        b_b = warpgroup_mma(
            vs.index(2 * s), ds.index(2 * s).permute((1, 0)), zero_a, use_acc=False, is_async=True
        )
        b_b = warpgroup_mma(
            vs.index(2 * s + 1), ds.index(2 * s + 1).permute((1, 0)), b_b, is_async=True
        )
        b_a *= b_decay
        mbarrier.wait(a_empty.index(a), ((i // 2) & 1) ^ 1)
        # A is published before B is waited for: the chain needs it first
        scores.index(a).permute((1, 0)).store(b_a.to(qs.dtype))
        if c.HAS_GATE:
            factors.index(2 * a).store(b_end)
            factors.index(2 * a + 1).store(b_start)
        sm90.fence_async_shared()
        mbarrier.arrive(a_full.index(a), count=1)
        b_b = sm90.warpgroup_mma_wait(0, deps=(b_b,))
        b_b *= b_decay
        b_b = gl.convert_layout(b_b.to(qs.dtype), ba)
        mbarrier.wait(s_full.index(0), i & 1)
        b_k = warpgroup_mma(vs.index(2 * s), ss.index(0), zero_k, use_acc=False, is_async=True)
        b_k = warpgroup_mma(vs.index(2 * s + 1), ss.index(1), b_k, is_async=True)
        b_k = sm90.warpgroup_mma_wait(0, deps=(b_k,))
        # dS has been read: the state partitions may store the next one
        mbarrier.arrive(s_empty.index(0), count=1)
        if c.HAS_GATE:
            b_k *= factors.index(2 * a).load(gl.SliceLayout(1, kl))[:, None]
        # of a chunk that decays less dg does not read them, and they would take a tenth longer
        if c.HAS_DG:
            # with room for other orders of their sum than dg's (its min_chunk_gate, of base e)
            is_strong = G_C < -8.0
            if is_strong:
                b_row = gl.sum(ks.index(s).load(kl).to(gl.float32) * b_k, 1) * scale
                gl.store(p_later + t + o_t, b_row, mask=o_t < length - t)
        b_k = warpgroup_mma(b_b, qs.index(s), b_k, is_async=True)
        b_k = sm90.warpgroup_mma_wait(0, deps=(b_k,))
        b_k *= scale
        if c.HAS_DG:
            # before the stage is given back: k is read here for the last time
            b_row = gl.sum(ks.index(s).load(kl).to(gl.float32) * b_k, 1)
            gl.store(p_rows + t + o_t, b_row, mask=o_t < length - t)
        mbarrier.arrive(empty.index(s), count=1)
        if t + c.C <= length:
            # the tile before has left its buffer
            sm90.store_wait(0)
            dks.store(b_k.to(qs.dtype))
            sm90.fence_async_shared()
            gl.thread_barrier()
            sm90.copy_out(dk_desc, [row + t, dk_col], dks)
        else:
            p = dk_ptr + (row + t + o_t).to(gl.int64)[:, None] * (HV * c.D) + dk_col
            gl.store(p + o_k[None, :], b_k.to(qs.dtype), mask=(o_t < length - t)[:, None])
    sm90.store_wait(0)


_SIZES = ["T", "N", "HV", "H", "tokens", "segment", "num_anchors"]
_STRIDES = ["stride_gb", "stride_gt", "stride_gh"]


@gluon.jit(do_not_specialize=["scale", "scale_in", "scale_out", *_SIZES, *_STRIDES])
def scalar_decay_chunk_bwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    v_desc,  # [tokens, HV * V] by [C, HALF]
    do_desc,
    dk_desc,  # [tokens, HV * K] by [C, K]
    dv_desc,  # [tokens, HV * V] by [C, HALF]
    dk_ptr, dv_ptr,
    g_ptr,  # [B, T, HV] by strides
    s_in_ptr,  # [segments, HV, K, V]: gradient of the state after the segment; times scale_in
    s_out_ptr,  # the same, of that before it; times scale_out
    rows_ptr,  # [2, HV, tokens]: k . dk, and what later chunks add to it
    z_ptr,  # [2, anchors, HV]: sum(S * dS) after an anchor interval
    anchor_ptr,  # [anchors, HV, K, V]
    cu_ptr,  # [N + 1]
    scale, scale_in, scale_out, T, N, HV, H, tokens, segment, num_anchors, stride_gb, stride_gt,
    stride_gh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    ANCHOR_INTERVAL: gl.constexpr, HAS_GATE: gl.constexpr, HAS_DG: gl.constexpr,
    HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr, SPLIT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """grid (HV * segments,), 4 warps: one program scans one head of one segment; V is 128.

    Without SPLIT a segment is a sequence.
    """
    dtype: gl.constexpr = q_desc.dtype
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    qs = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    ks = gl.allocate_shared_memory(dtype, [ST, C, K], k_desc.layout)
    vs = gl.allocate_shared_memory(dtype, [2 * ST, C, chunk_fwd.HALF], v_desc.layout)
    ds = gl.allocate_shared_memory(dtype, [2 * ST, C, chunk_fwd.HALF], do_desc.layout)
    ss = gl.allocate_shared_memory(dtype, [2, chunk_fwd.HALF, K], q_desc.layout)
    dks = gl.allocate_shared_memory(dtype, [C, K], dk_desc.layout)
    dvs = gl.allocate_shared_memory(dtype, [2, C, chunk_fwd.HALF], dv_desc.layout)
    scores = gl.allocate_shared_memory(dtype, [2, C, C], a_layout)
    factors = scores
    sums = scores
    if HAS_GATE:
        factors = gl.allocate_shared_memory(gl.float32, [4, C], plain)
        sums = gl.allocate_shared_memory(gl.float32, [C], plain)
    full = common.alloc_mbarriers(1, ST)
    empty = common.alloc_mbarriers(3, ST)
    a_full = common.alloc_mbarriers(1, 2)
    a_empty = common.alloc_mbarriers(2, 2)
    s_full = common.alloc_mbarriers(2, 1)
    s_empty = common.alloc_mbarriers(1, 1)
    i_h, i_seg, row, length, _, n = common.program_coords(
        cu_ptr, T, N, HV, segment, C, PACKED, SPLIT
    )
    k_col = i_h // (HV // H) * K
    o_s = (i_seg.to(gl.int64) * HV + i_h) * (K * V)
    # what is not given: something else, for only the first part takes None
    p_g = g_ptr if HAS_GATE else dk_ptr
    p_in = s_in_ptr if HAS_S_IN else dk_ptr
    p_out = s_out_ptr if HAS_S_OUT else dk_ptr
    p_rows = rows_ptr if HAS_DG else dk_ptr
    p_later = p_rows
    p_z = z_ptr if HAS_DG else dk_ptr
    p_anchor = anchor_ptr if HAS_DG else dk_ptr
    if HAS_GATE:
        p_g = chunk_fwd.place_gates(
            p_g, i_seg, row, T, segment, i_h, stride_gb, stride_gt, stride_gh, PACKED
        )
    if HAS_DG:
        anchor = chunk_fwd.first_anchor(i_seg, row, T, segment, ANCHOR_INTERVAL * C, SPLIT, PACKED)
        anchor = anchor.to(gl.int64) * HV + i_h
        p_rows += i_h.to(gl.int64) * tokens + row
        p_later = p_rows + HV.to(gl.int64) * tokens
        p_z += anchor
        p_anchor += anchor * (K * V)
    to_half = HV.to(gl.int64) * num_anchors
    tiles = chunk_fwd.StateTiles(ks, qs, ds, ds, ss, scores, factors, dvs)
    barriers = chunk_fwd.StateBarriers(full, empty, full, empty, a_full, a_empty, s_full, s_empty)
    pool = common.PoolRefs(None, None, None)
    c: gl.constexpr = chunk_fwd.Constants(
        2, K, V, C, ST, ANCHOR_INTERVAL, True, False, HAS_GATE, HAS_DG, HAS_S_IN, HAS_S_OUT, True
    )
    buffers = Buffers(
        qs, ks, vs, ds, ss, scores, factors, sums, dks, full, empty, a_full, a_empty, s_full,
        s_empty,
    )  # fmt: skip
    output = chunk_fwd.Output(dv_desc, dv_ptr)
    scales = chunk_fwd.Scales(scale, scale_in, scale_out)
    refs = chunk_fwd.StateRefs(p_in, p_out, pool, p_rows, p_rows, p_z, p_anchor)
    v_col = i_h * V
    p_z = p_z + to_half if HAS_DG else p_z
    second = chunk_fwd.StateRefs(p_in, p_out, pool, p_rows, p_rows, p_z, p_anchor)
    gl.warp_specialize(
        [
            (chunk_fwd.state_partition, (
                output, tiles, barriers, refs, o_s, row, HV, v_col, length, n, scales, 0, 0, c)),
            (chunk_fwd.state_partition, (
                output, tiles, barriers, second, o_s, row, HV, v_col, length, n, scales, 0, 1,
                c)),
            (dqkv_partition, (
                dk_desc, dk_ptr, buffers, p_g, stride_gt, p_rows, p_later, row, HV, i_h * K, length,
                n, scale, c)),
            (load_partition, (
                q_desc, k_desc, v_desc, do_desc, buffers, row, n, k_col, i_h * V, c)),
        ],
        [4, 4, 1],
        [152, 184, 24],
    )  # fmt: skip
