"""Delta rule, no decay or one a token, on sm_90: backward in one walk from the last chunk.

What delta_walk_back.py and delta_grads.py do, with dS' [K, V], the gradient of the state after a
chunk, in no other memory than a program's own. From S before each chunk and w, with p = k,

    A = scale tril(q k^T decay)        x = do^T A + (k dS')^T exp(G_C - G)        dv = (x beta R)^T
    dS = exp(G_C) dS' + (q exp(G))^T scale do - (k exp(G))^T dv

and from a chunk's B = scale stril(do w^T decay) and M = stril(dv w^T decay) its gradients, by the
formulas of the portable delta_grads.py. Four parts of a program, which has all columns of V:

    walk     dS and dv, V as the rows; B and M; clears a short chunk's rest
    grads    dq and dk, through the buffers of q and k; dbeta, dg; writes dv (delta_back_grads.py)
    load     q, k, do, R, w and S by TMA, beta and G
    write    dq and dk of whole chunks, added to those of other heads, and passes the turn on

Two stages of q, k, do, beta and G, one of all else. Of each chunk `grads` says when dS' and w are
free, and when the rest is; a stage is free once `write` and `grads` are done with it.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from slipstream.kernels.gluon import (
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.linear.hopper.delta_back_grads import grads_part, write_part
from slipstream.kernels.linear.hopper.delta_parts import (
    hand_on,
    met,
    rows_of,
    state_of,
    window_of,
)
from slipstream.kernels.linear.hopper.parts import clear, load_rows, place, ring


@gluon.jit
def load_part(
    descs, tiles, rings, p_rows, stride, row, state, step, n, k_col, v_col, r_col,
    C: gl.constexpr, ST: gl.constexpr, HAS_GATE: gl.constexpr,
):  # fmt: skip
    """state: the row of S before the last chunk; step: from a chunk's to the one before."""
    q_desc, k_desc, do_desc, r_desc, w_desc, states_desc = descs
    qs, ks, os, gs, rs, ws, ss, _ = tiles
    full, empty, r_full, r_empty, w_full, s_full, _, early, late, _ = rings
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes + k_desc.block_type.nbytes + do_desc.block_type.nbytes
    )
    b_rows = load_rows(p_rows + gl.maximum(n - 1, 0) * stride, C, HAS_GATE)
    for i in range(n):
        s = i % ST
        t = row + (n - 1 - i) * C
        before = (i & 1) ^ 1
        mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), nbytes)
        copy_in(k_desc, [t, k_col], full.index(s), ks.index(s))
        copy_in(q_desc, [t, k_col], full.index(s), qs.index(s))
        copy_in(do_desc, [t, v_col], full.index(s), os.index(s))
        gs.index(s).store(b_rows)
        mbarrier.arrive(full.index(s), count=1)
        mbarrier.wait(r_empty.index(0), before)
        mbarrier.expect(r_full.index(0), r_desc.block_type.nbytes)
        copy_in(r_desc, [t, r_col], r_full.index(0), rs.index(0))
        mbarrier.wait(early.index(0), before)
        mbarrier.expect(w_full.index(0), w_desc.block_type.nbytes)
        copy_in(w_desc, [t, v_col], w_full.index(0), ws.index(0))
        mbarrier.wait(late.index(0), before)
        mbarrier.expect(s_full.index(0), states_desc.block_type.nbytes)
        copy_in(states_desc, [state - i * step, 0], s_full.index(0), ss.index(0))
        b_rows = load_rows(p_rows + gl.maximum(n - 2 - i, 0) * stride, C, HAS_GATE)


@gluon.jit
def decay_of(
    rows, o_i, o_j, al: gl.constexpr, C: gl.constexpr, HAS_GATE: gl.constexpr, OWN: gl.constexpr
):
    """exp(G_i - G_j) where j < i, and if OWN 1 where j is i; else 0."""
    seen = o_i[:, None] >= o_j[None, :] if OWN else o_i[:, None] > o_j[None, :]
    if HAS_GATE:
        G_i = rows.slice(C, C).load(gl.SliceLayout(1, al))
        G_j = rows.slice(C, C).load(gl.SliceLayout(0, al))
        b_decay = gl.exp2(gl.where(seen, G_i[:, None] - G_j[None, :], float("-inf")))
    else:
        b_decay = gl.where(seen, 1.0, gl.zeros([C, C], gl.float32, al))
    return b_decay


@gluon.jit
def scores_part(
    os, ws, ys, rows, left_over, scale, C: gl.constexpr, WARPS: gl.constexpr, HAS_GATE: gl.constexpr
):
    """B and -M of a chunk, and what a token owes itself, into left_over."""
    bs, ms, owns = left_over
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 4 * C // WARPS, 16])
    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, C, gl.SliceLayout(0, al))
    zero = gl.zeros([C, C], gl.float32, al)
    b_b = warpgroup_mma(os, ws.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_m = warpgroup_mma(ys, ws.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_decay = decay_of(rows, o_i, o_j, al, C, HAS_GATE, False)
    b_b, b_m = warpgroup_mma_wait(0, deps=(b_b, b_m))
    b_b *= scale
    owns.store(gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_b, 0.0), 1))
    bs.store((b_b * b_decay).to(bs.dtype))
    ms.store((-b_m * b_decay).to(bs.dtype))


@gluon.jit
def walk_part(
    tiles, made, rings, ends, length, n, scale,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, WARPS: gl.constexpr,
    HAS_GATE: gl.constexpr, HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    qs, ks, os, gs, rs, ws, _, a_s = tiles
    ds, ys, bs, ms, owns = made
    full, _, r_full, r_empty, w_full, _, done, early, late, _ = rings
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 4 * C // WARPS, 16])
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, C, gl.SliceLayout(0, al))
    o_v = gl.arange(0, V, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, K, gl.SliceLayout(0, sl))
    zero_a = gl.zeros([C, C], gl.float32, al)
    zero = gl.zeros([V, C], gl.float32, xl)
    b_s = met(ends, gl.zeros([V, K], gl.float32, sl), o_k, o_v, V, HAS_S_IN, CUT)
    for i in range(n):
        s = i % ST
        left = length - (n - 1 - i) * C
        rows = gs.index(s)
        # 0, which no compiler knows: it would keep all addresses that two products have in common
        o = i >> 30
        o_x = i >> 29
        o_s = i >> 28
        mbarrier.wait(full.index(s), (i // ST) & 1)
        mbarrier.wait(r_full.index(0), i & 1)
        if left < C:
            mbarrier.wait(w_full.index(0), i & 1)
            clear(qs.index(s), left, C, K, WARPS)
            clear(ks.index(s), left, C, K, WARPS)
            clear(os.index(s), left, C, V, WARPS)
            clear(rs.index(o), left, C, C, WARPS)
            clear(ws.index(o), left, C, V, WARPS)
            fence_async_shared()
            gl.thread_barrier()
        b_a = warpgroup_mma(
            qs.index(s), ks.index(s).permute((1, 0)), zero_a, use_acc=False, is_async=True
        )
        b_decay = decay_of(rows, o_i, o_j, al, C, HAS_GATE, True) * scale
        b_a = warpgroup_mma_wait(0, deps=(b_a,))
        a_s.index(o).store((b_a * b_decay).to(ks.dtype))
        mbarrier.wait(early.index(0), (i & 1) ^ 1)
        ds.index(o_x).store(b_s.to(ks.dtype))
        fence_async_shared()
        gl.thread_barrier()
        # from shared memory, for all registers are taken
        b_x = warpgroup_mma(
            ds.index(o_x), ks.index(s + o_x).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        b_x = warpgroup_mma_wait(0, deps=(b_x,))
        if HAS_GATE:
            last = rows.slice(2 * C - 1, 1)
            G_j = rows.slice(C, C).load(gl.SliceLayout(0, xl))
            b_x *= gl.exp2(last.load(gl.SliceLayout(0, xl)) - G_j)[None, :]
        b_x = warpgroup_mma(os.index(s + o_s).permute((1, 0)), a_s.index(o_s), b_x, is_async=True)
        b_d = os.index(s + o_s).permute((1, 0)).load(xa).to(gl.float32) * scale
        if HAS_GATE:
            b_d *= gl.exp2(rows.slice(C, C).load(gl.SliceLayout(0, xa)))[None, :]
            b_s *= gl.exp2(last.load(gl.SliceLayout(0, sl)))[None, :]
        b_s = warpgroup_mma(b_d.to(ks.dtype), qs.index(s + o_s), b_s, is_async=True)
        b_x, b_s = warpgroup_mma_wait(0, deps=(b_x, b_s))
        b_x *= rows.slice(0, C).load(gl.SliceLayout(0, xl))[None, :]
        b_x = gl.convert_layout(b_x.to(ks.dtype), xa)
        b_y = warpgroup_mma(b_x, rs.index(o_s), zero, use_acc=False, is_async=True)
        b_y = warpgroup_mma_wait(0, deps=(b_y,))
        mbarrier.arrive(r_empty.index(0), count=1)
        b_left = -b_y
        if HAS_GATE:
            b_left *= gl.exp2(rows.slice(C, C).load(gl.SliceLayout(0, xl)))[None, :]
        b_left = gl.convert_layout(b_left.to(ks.dtype), xa)
        b_s = warpgroup_mma(b_left, ks.index(s + o_s), b_s, is_async=True)
        mbarrier.wait(late.index(0), (i & 1) ^ 1)
        ys.index(o).permute((1, 0)).store(b_y.to(ks.dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(w_full.index(0), i & 1)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        left_over = (bs.index(o), ms.index(o), owns)
        scores_part(
            os.index(s), ws.index(o), ys.index(o), rows, left_over, scale, C, WARPS, HAS_GATE
        )
        fence_async_shared()
        mbarrier.arrive(done.index(0), count=1)
    hand_on(ends, b_s, length >> 30, o_k, o_v, V, HAS_S_OUT, CUT)


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "G", "begin", "span"])
def delta_back_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    do_desc,  # [tokens, HV * V] by [C, V]
    r_desc,  # [tokens, HV * C] by [C, C]
    dv_desc,  # [tokens, HV * V] by [C, V]: w, in whose place dv comes
    states_desc,  # [chunks * HV * V, K] by [V, K]: S before each chunk of the span
    dq_desc,  # [tokens, HV / G * K] by [C, K]
    dk_desc,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    rows_ptr,  # [chunks, HV, ROWS, C]: beta and G
    dbeta_ptr,  # [tokens, HV]
    dg_ptr,
    s_in_ptr,  # [N, HV, K, V]: gradient of the state after the span
    s_out_ptr,  # of that before it
    cu_ptr,  # [N + 1]
    windows_ptr,  # [N, 4] of a span, if CUT
    m_in_ptr,  # [slots, HV, K, V]: gradients of states at the border after it
    m_out_ptr,
    turns_ptr,  # [chunks, HV / G], zeros: how many of G heads have added theirs
    scale,
    T,
    N,
    HV,
    H,
    G,
    begin,
    span,
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
    SHARED: gl.constexpr,
    REGISTERS: gl.constexpr,
    FEW: gl.constexpr,
    SKIP: gl.constexpr = False,
    CUT: gl.constexpr = False,
):
    """grid (HV * N,), WARPS = V / 16 warps: one program walks `span` tokens of one head of a
    sequence, from its token `begin` on.

    Of packed ones all, or if CUT those that delta_windows.py says. SHARED: G, which add dq and dk
    up, is more than 1: one that waits does so for the program before it, which has begun. SKIP as
    delta_walk_sm90_kernel has it.
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
    owns = gl.allocate_shared_memory(gl.float32, [C], plain)
    full = ring(2, ST)
    empty = ring(2, ST)
    r_full = ring(1, 1)
    r_empty = ring(1, 1)
    w_full = ring(1, 1)
    s_full = ring(1, 1)
    done = ring(1, 1)
    early = ring(1, 1)
    late = ring(1, 1)
    written = ring(1, ST)
    i_h = gl.program_id(0) % HV
    i_n = gl.program_id(0) // HV
    row, length, first = place(cu_ptr, i_n, T, N, T, C, PACKED, False)
    kept = first
    ends = (s_in_ptr, s_out_ptr, state_of(i_n, i_h, HV, K, V))
    n = gl.cdiv(length, C)
    if CUT:
        none = n == 0  # whose state is handed on all the same
        begun, length, n, kept, o_mark, before, after = window_of(
            windows_ptr, i_n, i_h, HV, length, n, K, V, C
        )
        if n == 0 and not none:
            return
        row += begun * C
        first += begun
        ends = (s_in_ptr, s_out_ptr, ends[2], m_in_ptr, m_out_ptr, o_mark, after, before)
    if not PACKED:
        row += begin
        length = gl.minimum(length - begin, span)
        first += begin // C
        kept = i_n * gl.cdiv(length, C)  # of S there is that of the span alone
        n = gl.cdiv(length, C)
    if SKIP and n == 0:
        return
    chunk = gl.where(n > 0, first, 0)
    k_col = i_h // (HV // H) * K
    p_rows, stride = rows_of(rows_ptr, chunk * HV + i_h, HV, C, HAS_GATE)
    tiles = (qs, ks, os, gs, rs, ws, ss, a_s)
    made = (ds, ys, bs, ms, owns)
    rings = (full, empty, r_full, r_empty, w_full, s_full, done, early, late, written)
    # what is not given: something else, for only the first part takes None
    p_turns = turns_ptr + chunk * (HV // G) + i_h // G if SHARED else rows_ptr
    p_dg = dg_ptr if HAS_GATE else dbeta_ptr
    descs = (dq_desc, dk_desc, dv_desc)
    gl.warp_specialize(
        [
            (walk_part, (
                tiles, made, rings, ends, length, n, scale,
                K, V, C, ST, WARPS, HAS_GATE, HAS_S_IN, HAS_S_OUT, CUT)),
            (grads_part, (
                descs, (dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, p_dg), p_turns,
                tiles, made, rings, row, i_h, HV, G, length, n, scale,
                K, V, BK, C, ST, HAS_GATE, SHARED)),
            (load_part, (
                (q_desc, k_desc, do_desc, r_desc, dv_desc, states_desc), tiles, rings, p_rows,
                stride, row, ((kept + n - 1) * HV + i_h) * V, HV * V, n, k_col, i_h * V, i_h * C,
                C, ST, HAS_GATE)),
            (write_part, (
                descs, p_turns, tiles, rings, row, i_h, HV, G, length, n, K, C, ST, SHARED)),
        ],
        [4, 1, 1],
        [REGISTERS, FEW, FEW],
    )  # fmt: skip
