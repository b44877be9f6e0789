"""Delta rule, no decay or one a token, on sm_90: backward in one scan from the last chunk.

What chunk_dstate.py and dqkg.py do, with dS' [K, V], the gradient of the state after a
chunk, in no other memory than a program's own. From S before each chunk and w, with p = k,

    A = scale tril(q k^T decay)        x = do^T A + (k dS')^T exp(G_C - G)        dv = (x beta R)^T
    dS = exp(G_C) dS' + (q exp(G))^T scale do - (k exp(G))^T dv

and from a chunk's B = scale stril(do w^T decay) and M = stril(dv w^T decay) its gradients, by the
formulas of triton/delta/dqkg.py.

S and w are made once more, a block of `every` chunks at a time: forward leaves S before each block,
in 16 bits as it is in all products, and from there a program scans to the block's end before it
goes back (bwd_fused_recompute.py). Recomputed states go to memory of that program alone, except for
the first, which forward left, and the last, which is in shared memory; dS' is in memory too while S
takes its registers.

Four partitions of a program, which has all columns of V:

    load_partition, 1 warp            state_partition, V / 16 warps        dqk_partition, 4
      to a block's end, every chunk:
      k, v, R, beta, G -- full ---->    S, w; <-- empty (2 arrivals)
      S before it -- entry_full --->    S and w of all but the last chunk to memory -- recomputed
                                        those of the last -- state_full, w_full
      back:
      q, k, do, beta, G -- full --->    A, dS, dv, B, M -- pairs_full ----->  dq, dk, dbeta, dg
      R -- r_full ----------------->    reads R; <-- r_empty
      w -- w_full ----------------->    reads w -------------------------->   reads w, dS'
                                        waits for w_empty before dS'          <-- w_empty
      S -- state_full ---------------------------------------------------->   reads S, dv, B, M
                                        waits for state_empty before dv       <-- state_empty
                                                                              dq, dk -- grads_full
      <-- empty (2 arrivals): dqk_partition, and store_partition, 1 warp, which adds dq and dk of
          whole chunks, in the buffers of q and k, to those of other heads and passes the turn on

    buffers                       stages  arrivals a phase: full / empty
    q, k, do or v, beta, G        ST      2 (TMA, and the warp that stores beta and G) / 2
    R [C, C]                      1       1 (TMA) / 1
    w [C, V]                      1       1 (TMA, or the way to a block's end) / 1, with dS'
    S [V, K]                      1       1 (TMA, or the same) / 1, with dv, B, M and the diagonal
    dS', dv, B, M, the diagonal   1       1 for all / as w and as S have it
    dq, dk                        ST      1 / as q and k have it

What a program is, and how far its scan is, all read where they want it
(kernels/primitives/smem_scalars.py): registers are what there is least. Step j of a program is the
i-th back, where it has gone forward through j - i chunks.
"""

from slipstream.kernels.linear.sm90.common.device import (
    alloc_mbarriers,
    locate_segment,
    zero_tail_rows,
)
from slipstream.kernels.linear.sm90.delta.bwd_fused_dqk import (
    CHUNKS,
    COUNT,
    D_COL,
    GONE,
    HEAD,
    LENGTH,
    NUM_SCALARS,
    ROW,
    ROWS,
    STATE_IN,
    STATE_OUT,
    WORKSPACE,
    dqk_partition,
    store_partition,
)
from slipstream.kernels.linear.sm90.delta.bwd_fused_load import (
    Barriers,
    Buffers,
    Tiles,
    load_partition,
    locate_checkpoint_block,
)
from slipstream.kernels.linear.sm90.delta.bwd_fused_recompute import recompute_states
from slipstream.kernels.linear.sm90.delta.device import (
    StateRefs,
    checkpoint_index,
    load_state,
    store_state,
)
from slipstream.kernels.primitives.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.primitives.semaphore import (
    lock_workspace,
    unlock_workspace,
    wait_bulk_stores,
)
from slipstream.kernels.primitives.smem_scalars import alloc_scalars, load_scalar, store_scalars


@gluon.jit
def decay_of(
    rows,
    o_i,
    o_j,
    al: gl.constexpr,
    C: gl.constexpr,
    HAS_GATE: gl.constexpr,
    DIAGONAL: gl.constexpr,
):
    """exp(G_i - G_j) where j < i, and if OWN 1 where j is i; else 0."""
    seen = o_i[:, None] >= o_j[None, :] if DIAGONAL else o_i[:, None] > o_j[None, :]
    if HAS_GATE:
        G_i = rows.slice(C, C).load(gl.SliceLayout(1, al))
        G_j = rows.slice(C, C).load(gl.SliceLayout(0, al))
        b_decay = gl.exp2(gl.where(seen, G_i[:, None] - G_j[None, :], float("-inf")))
    else:
        b_decay = gl.where(seen, 1.0, gl.zeros([C, C], gl.float32, al))
    return b_decay


@gluon.jit
def score_partition(
    os,
    ws,
    ys,
    rows,
    pair_buffers,
    none,
    scale,
    C: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_GATE: gl.constexpr,
):
    """B and -M of a chunk, and what a token owes itself, into pair_buffers."""
    bs, ms, diags = pair_buffers
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 4 * C // WARPS, 16])
    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, C, gl.SliceLayout(0, al))
    zero = gl.zeros([C, C], gl.float32, al)
    b_b = warpgroup_mma(os, ws.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_m = warpgroup_mma(ys, ws.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_decay = decay_of(rows, o_i + none, o_j, al, C, HAS_GATE, False)
    b_b, b_m = warpgroup_mma_wait(0, deps=(b_b, b_m))
    b_b *= scale
    # a sum for each half of the columns: over both it would take more memory, and barriers
    HALVES: gl.constexpr = WARPS // 4
    diag = gl.where((o_i + none)[:, None] == o_j[None, :], b_b, 0.0)
    diag = gl.sum(gl.reshape(diag, [C, HALVES, C // HALVES]), 2)
    diags.store(gl.reshape(gl.permute(diag, (1, 0)), [HALVES * C]))
    bs.store((b_b * b_decay).to(bs.dtype))
    ms.store((-b_m * b_decay).to(bs.dtype))


@gluon.jit
def dstate_partition(
    tiles, buffers, barriers, b_s, gone, count, length, n, scale,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, WARPS: gl.constexpr,
    HAS_GATE: gl.constexpr,
):  # fmt: skip
    """Through a part from b_s, dS after it; dS before it."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 4 * C // WARPS, 16])
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, C, gl.SliceLayout(0, al))
    zero_a = gl.zeros([C, C], gl.float32, al)
    zero = gl.zeros([V, C], gl.float32, xl)
    for at in range(count):
        i = gone + at
        j = 2 * gone + count + at
        s = j % ST
        num_rows = length - (n - 1 - i) * C
        rows = tiles.beta_gate.index(s)
        # 0, which no compiler knows: it would keep all addresses that two products have in common
        o = i >> 30
        o_x = i >> 29
        o_s = i >> 28
        o_y = i >> 27
        mbarrier.wait(barriers.full.index(s), (j // ST) & 1)
        mbarrier.wait(barriers.r_full.index(0), i & 1)
        if num_rows < C:
            zero_tail_rows(tiles.q.index(s), num_rows, C, K, WARPS)
            zero_tail_rows(tiles.k.index(s), num_rows, C, K, WARPS)
            zero_tail_rows(tiles.do.index(s), num_rows, C, V, WARPS)
            zero_tail_rows(tiles.r.index(o), num_rows, C, C, WARPS)
            fence_async_shared()
            gl.thread_barrier()
        b_a = warpgroup_mma(
            tiles.q.index(s), tiles.k.index(s).permute((1, 0)), zero_a, use_acc=False, is_async=True
        )
        b_decay = decay_of(rows, o_i + o, o_j, al, C, HAS_GATE, True) * scale
        b_a = warpgroup_mma_wait(0, deps=(b_a,))
        tiles.a.index(o).store((b_a * b_decay).to(tiles.k.dtype))
        mbarrier.wait(barriers.w_empty.index(0), (i & 1) ^ 1)
        buffers.dstate.index(o_x).store(b_s.to(tiles.k.dtype))
        fence_async_shared()
        gl.thread_barrier()
        # from shared memory, for all registers are taken
        b_x = warpgroup_mma(
            buffers.dstate.index(o_x),
            tiles.k.index(s + o_x).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        b_x = warpgroup_mma_wait(0, deps=(b_x,))
        if HAS_GATE:
            last = rows.slice(2 * C - 1, 1)
            G_j = rows.slice(C, C).load(gl.SliceLayout(0, xl))
            b_x *= gl.exp2(last.load(gl.SliceLayout(0, xl)) - G_j)[None, :]
        b_x = warpgroup_mma(
            tiles.do.index(s + o_s).permute((1, 0)), tiles.a.index(o_s), b_x, is_async=True
        )
        b_d = tiles.do.index(s + o_s).permute((1, 0)).load(xa).to(gl.float32) * scale
        if HAS_GATE:
            b_d *= gl.exp2(rows.slice(C, C).load(gl.SliceLayout(0, xa)))[None, :]
            b_s *= gl.exp2(last.load(gl.SliceLayout(0, sl)))[None, :]
        b_s = warpgroup_mma(b_d.to(tiles.k.dtype), tiles.q.index(s + o_s), b_s, is_async=True)
        b_x, b_s = warpgroup_mma_wait(0, deps=(b_x, b_s))
        b_x *= rows.slice(0, C).load(gl.SliceLayout(0, xl))[None, :]
        b_x = gl.convert_layout(b_x.to(tiles.k.dtype), xa)
        b_y = warpgroup_mma(b_x, tiles.r.index(o_s), zero, use_acc=False, is_async=True)
        b_y = warpgroup_mma_wait(0, deps=(b_y,))
        mbarrier.arrive(barriers.r_empty.index(0), count=1)
        b_lhs = -b_y
        if HAS_GATE:
            b_lhs *= gl.exp2(rows.slice(C, C).load(gl.SliceLayout(0, xl)))[None, :]
        b_lhs = gl.convert_layout(b_lhs.to(tiles.k.dtype), xa)
        b_s = warpgroup_mma(b_lhs, tiles.k.index(s + o_s), b_s, is_async=True)
        mbarrier.wait(barriers.state_empty.index(0), ((i + o_y) & 1) ^ 1)
        buffers.dv.index(o_y).permute((1, 0)).store(b_y.to(tiles.k.dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(barriers.w_full.index(0), (i + o_y) & 1)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        pair_buffers = (buffers.b.index(o_y), buffers.m.index(o_y), buffers.diagonal)
        score_partition(
            tiles.do.index(s), tiles.w.index(o_y), buffers.dv.index(o_y), rows, pair_buffers, o_y,
            scale, C, WARPS, HAS_GATE,
        )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(barriers.pairs_full.index(0), count=1)
    return b_s


@gluon.jit
def state_partition(
    descs, states, tiles, buffers, barriers, pad, every, scale,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, WARPS: gl.constexpr,
    HAS_GATE: gl.constexpr, HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """states: where dS comes from, goes to, and is while S is there."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    o_v = gl.arange(0, V, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, K, gl.SliceLayout(0, sl))
    s_in_ptr, s_out_ptr, p_park = states
    block = 0
    going = True
    while going:
        gone = load_scalar(pad, GONE, WARPS)
        n = load_scalar(pad, CHUNKS, WARPS)
        first, count = locate_checkpoint_block(gone, n, every)
        store_scalars(pad, (count,), COUNT, WARPS)
        if count > 0:
            mbarrier.wait(barriers.entry_full.index(0), block & 1)
        recompute_states(
            descs, tiles, buffers, barriers, load_scalar(pad, ROW, WARPS),
            load_scalar(pad, HEAD, WARPS) * V,
            load_scalar(pad, WORKSPACE, WARPS) * ((every - 2) * V), gone, first, count,
            load_scalar(pad, LENGTH, WARPS),
            K, V, C, ST, WARPS, HAS_GATE,
        )  # fmt: skip
        gone = load_scalar(pad, GONE, WARPS)
        # 0, which no compiler knows: it would keep addresses
        none = (gone >> 30).to(gl.int64)
        if block == 0:
            i_entry = none + load_scalar(pad, STATE_IN, WARPS)
            at_in = StateRefs(s_in_ptr, None, i_entry * (K * V), None)
            b_d = load_state(at_in, gl.zeros([V, K], gl.float32, sl), o_k + none, o_v, V, HAS_S_IN)
        else:
            i_state = load_scalar(pad, STATE_IN if SPLIT else WORKSPACE, WARPS)
            o_d = (none + i_state) * (K * V) + (o_v + none)[:, None] * K + o_k[None, :]
            b_d = gl.load(p_park + o_d)
        wait_bulk_stores()
        gl.thread_barrier()
        mbarrier.arrive(barriers.recomputed.index(0), count=1)
        b_d = dstate_partition(
            tiles, buffers, barriers, b_d, gone, load_scalar(pad, COUNT, WARPS),
            load_scalar(pad, LENGTH, WARPS), load_scalar(pad, CHUNKS, WARPS), scale,
            K, V, C, ST, WARPS, HAS_GATE,
        )  # fmt: skip
        gone = load_scalar(pad, GONE, WARPS) + load_scalar(pad, COUNT, WARPS)
        none = (gone >> 29).to(gl.int64)  # another, for nothing of the first is kept for this
        going = gone < load_scalar(pad, CHUNKS, WARPS)
        if going:
            i_state = load_scalar(pad, STATE_IN if SPLIT else WORKSPACE, WARPS)
            o_d = (none + i_state) * (K * V) + (o_v + none)[:, None] * K + o_k[None, :]
            gl.store(p_park + o_d, b_d)
        else:
            to = load_scalar(pad, STATE_OUT, WARPS)
            if to >= 0:
                at_out = StateRefs(None, s_out_ptr, None, (none + to) * (K * V))
                store_state(at_out, b_d, 0, o_k + none, o_v + none, V, HAS_S_OUT)
        gl.thread_barrier()  # all have read what it was
        store_scalars(pad, (gone,), GONE, WARPS)
        gl.thread_barrier()
        block += 1


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "G", "segment", "every", "workspaces"])
def delta_chunk_bwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    v_desc,  # [tokens, HV * V] by [C, V]
    do_desc,
    r_desc,  # [tokens, HV * C] by [C, C]
    dv_desc,  # [tokens, HV * V] by [C, V]: w, in whose place dv comes
    states_desc,  # [workspaces * (every - 2) * V, K] by [V, K]: S before a part's chunks
    checkpoints_desc,  # [checkpoints * HV * V, K] by [V, K]: S before each part
    dq_desc,  # [tokens, HV / G * K] by [C, K]
    dk_desc,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    park_ptr,  # [workspaces, V, K]: dS, while S is there; if SPLIT it goes where s_in was
    beta_gates_ptr,  # [chunks, HV, ROWS, C]: beta and G
    dbeta_ptr,  # [tokens, HV]
    dg_ptr,
    s_in_ptr,  # [N, HV, K, V]: gradient of the state after a sequence; of segments [.., HV, K, V]
    s_out_ptr,  # [N, HV, K, V]: of that before it
    cu_ptr,  # [N + 1]
    counts_ptr,  # [workspaces], zeros: which of them a program has; then if GROUPED_HEADS
    # [chunks, HV / G], zeros: how many of G heads have added theirs
    scale,
    T,
    N,
    HV,
    H,
    G,
    segment,
    every,
    workspaces,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    C: gl.constexpr,
    ST: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_S_IN: gl.constexpr,
    HAS_S_OUT: gl.constexpr,
    PACKED: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUPED_HEADS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """grid (HV * N,), or if SPLIT as many for each segment, of `segment` tokens; WARPS = V / 16
    warps: one program scans one head of a sequence, or of a segment of it.

    In parts of `every` chunks, of which a segment has a whole number. GROUPED_HEADS: G, which add
    dq and dk up, is more than 1: one that waits does so for the program before it, which has begun.
    There are workspaces for all programs that run at a time, or nearly so.
    """
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    qs = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    ks = gl.allocate_shared_memory(dtype, [ST, C, K], k_desc.layout)
    os = gl.allocate_shared_memory(dtype, [ST, C, V], do_desc.layout)
    gs = gl.allocate_shared_memory(gl.float32, [ST, (1 + HAS_GATE) * C], plain)
    rs = gl.allocate_shared_memory(dtype, [1, C, C], r_desc.layout)
    ws = gl.allocate_shared_memory(dtype, [1, C, V], dv_desc.layout)
    ss = gl.allocate_shared_memory(dtype, [1, V, K], states_desc.layout)
    a_s = gl.allocate_shared_memory(dtype, [1, C, C], r_desc.layout)
    ds = gl.allocate_shared_memory(dtype, [1, V, K], states_desc.layout)
    ys = gl.allocate_shared_memory(dtype, [1, C, V], dv_desc.layout)
    bs = gl.allocate_shared_memory(dtype, [1, C, C], r_desc.layout)
    ms = gl.allocate_shared_memory(dtype, [1, C, C], r_desc.layout)
    diags = gl.allocate_shared_memory(gl.float32, [WARPS // 4 * C], plain)
    # of a chunk's tokens k . dk', and what all gates before the end get of them; sum(S * dS')
    sum_buffers = gl.allocate_shared_memory(gl.float32, [1 + HAS_GATE, C], plain)
    zs = gl.allocate_shared_memory(gl.float32, [ROWS], plain)
    pad = alloc_scalars(NUM_SCALARS)
    full = alloc_mbarriers(2, ST)
    empty = alloc_mbarriers(2, ST)
    r_full = alloc_mbarriers(1, 1)
    r_empty = alloc_mbarriers(1, 1)
    w_full = alloc_mbarriers(1, 1)
    s_full = alloc_mbarriers(1, 1)
    done = alloc_mbarriers(1, 1)
    early = alloc_mbarriers(1, 1)
    late = alloc_mbarriers(1, 1)
    written = alloc_mbarriers(1, ST)
    entry_full = alloc_mbarriers(1, 1)
    recomputed = alloc_mbarriers(1, 1)
    pid = gl.program_id(0)
    i_h = pid % HV
    row, length, first, i_n, i_s, _ = locate_segment(
        cu_ptr, pid // HV, T, N, segment, C, PACKED, SPLIT
    )
    n = gl.cdiv(length, C)
    checkpoint = checkpoint_index(i_n, row - i_s * segment, T, every, C, PACKED)
    to = pid
    if SPLIT:
        if (n == 0) & (i_s != 0):
            return
        checkpoint += i_s * (segment // (every * C))
        to = gl.where(i_s == 0, i_n * HV + i_h, -1)
    workspace = lock_workspace(counts_ptr, pid % workspaces, workspaces)
    chunk = gl.where(n > 0, first, 0)
    k_col = i_h // (HV // H) * K
    semaphore = workspaces + chunk * (HV // G) + i_h // G
    store_scalars(
        pad,
        (workspace, row, length, n, i_h, chunk, (checkpoint * HV + i_h) * V, k_col),
        WORKSPACE,
        WARPS,
    )
    store_scalars(pad, (i_h // G * K, HV // G, i_h % G, semaphore, pid, to, 0), D_COL, WARPS)
    tiles = Tiles(qs, ks, os, gs, rs, ws, ss, a_s)
    buffers = Buffers(ds, ys, bs, ms, diags, sum_buffers, zs)
    barriers = Barriers(
        full, empty, r_full, r_empty, w_full, s_full, done, early, late, written, entry_full,
        recomputed,
    )  # fmt: skip
    p_dg = dg_ptr if HAS_GATE else dbeta_ptr  # for only the first part takes None
    descs = (dq_desc, dk_desc, dv_desc)
    states = (s_in_ptr, s_out_ptr, s_in_ptr if SPLIT else park_ptr)
    gl.warp_specialize(
        [
            (state_partition, (
                (dv_desc, states_desc), states, tiles, buffers, barriers, pad, every, scale,
                K, V, C, ST, WARPS, HAS_GATE, HAS_S_IN, HAS_S_OUT, SPLIT)),
            (dqk_partition, (
                descs, (dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, p_dg), counts_ptr, tiles, buffers,
                barriers, pad, HV, G, every, scale,
                K, V, BK, C, ST, HAS_GATE, GROUPED_HEADS)),
            (load_partition, (
                (q_desc, k_desc, v_desc, do_desc, r_desc, dv_desc, states_desc, checkpoints_desc),
                beta_gates_ptr, tiles, barriers, pad, HV, every,
                V, C, ST, HAS_GATE)),
            (store_partition, (
                descs, counts_ptr, tiles, barriers, pad, HV, G, every,
                K, C, ST, GROUPED_HEADS)),
        ],
        [4, 1, 1],
        [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
    unlock_workspace(counts_ptr + load_scalar(pad, WORKSPACE, WARPS))
