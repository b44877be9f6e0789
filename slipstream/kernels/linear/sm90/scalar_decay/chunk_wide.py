"""The scalar-decay family, no decay or one a token, on sm_90: the scan for heads of 256 channels.

What chunk_fwd.py computes, by its names, where r and w have D = 256 channels and x has X = 256: a
program takes BX = 64 of x's. Two warpgroups carry half of the columns of S [BX, D] each, and make
half of the tokens of y^T, for which S is copied to shared memory. Reversed it scans from the last
token to the first, j >= i, with exp(G_j - G_i).

    load_partition, 1 warp     score_partition, 4 warps       state_partition, 8 warps
      r, w, x -- full ---->      A                              S and y
                                 A, factors -- a_full --->      y^T = S r^T + x^T A
                                 <-- a_empty
      <-- empty                  arrives at empty               arrives at empty
      q -------------------------- q_full ------------->        q . y, if HAS_DG
      <-- q_empty

    buffers                    stages  arrivals a phase: full / empty
    r, w [C, D], x [C, BX]     ST      1 (TMA) / 2, the two partitions
    A [C, C], the factors      2       1 / 1
    q [C, BX]                  2       1 (TMA) / 1
    S [BX, D], 16 bits         1       state_partition's alone

Gradients of q and k are two launches of their own: dS, do, v and q, k of a chunk would not fit
shared memory beside each other.
"""

from slipstream.kernels.linear.sm90.common.device import (
    alloc_mbarriers,
    locate_sequence,
    store_tile_transposed,
    zero_tail_rows,
)
from slipstream.kernels.linear.sm90.scalar_decay.chunk_fwd import (
    first_anchor,
    gates_of,
    load_gates,
    place_gates,
)
from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BX = gl.constexpr(64)  # rows of S a program


@gluon.jit
def load_partition(
    r_desc, w_desc, x_desc, q_desc, rs, ws, xs, qs, full, empty, q_full, q_empty, row, n, r_col,
    x_col, C: gl.constexpr, ST: gl.constexpr, REVERSE: gl.constexpr, HAS_DG: gl.constexpr,
):  # fmt: skip
    nbytes: gl.constexpr = (
        r_desc.block_type.nbytes + w_desc.block_type.nbytes + x_desc.block_type.nbytes
    )
    for i in range(n):
        s = i % ST
        t = row + (n - 1 - i if REVERSE else i) * C
        mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
        mbarrier.expect(full.index(s), nbytes)
        copy_in(w_desc, [t, r_col], full.index(s), ws.index(s))
        copy_in(r_desc, [t, r_col], full.index(s), rs.index(s))
        copy_in(x_desc, [t, x_col], full.index(s), xs.index(s))
        if HAS_DG:
            b = i % 2
            mbarrier.wait(q_empty.index(b), ((i // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(b), q_desc.block_type.nbytes)
            copy_in(q_desc, [t, x_col], q_full.index(b), qs.index(b))


@gluon.jit
def score_partition(
    rs, ws, xs, scores, factors, sums, full, empty, a_full, a_empty, p_g, stride_g, length, n,
    D: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, REVERSE: gl.constexpr,
    HAS_GATE: gl.constexpr,
):  # fmt: skip
    """A [j, i] of each chunk, and what S r^T and x decay by."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    o_j = gl.arange(0, C, gl.SliceLayout(1, al))
    o_i = gl.arange(0, C, gl.SliceLayout(0, al))
    zero = gl.zeros([C, C], gl.float32, al)
    seen = o_j[:, None] >= o_i[None, :] if REVERSE else o_j[:, None] <= o_i[None, :]
    if HAS_GATE:
        b_g = load_gates(p_g, stride_g, gl.maximum(n - 1, 0) * C if REVERSE else 0, length, C)
    for i in range(n):
        s = i % ST
        a = i % 2
        t = (n - 1 - i if REVERSE else i) * C
        mbarrier.wait(full.index(s), (i // ST) & 1)
        if length - t < C:
            zero_tail_rows(rs.index(s), length - t, C, D)
            zero_tail_rows(ws.index(s), length - t, C, D)
            zero_tail_rows(xs.index(s), length - t, C, BX)
            fence_async_shared()
            gl.thread_barrier()
        b_a = warpgroup_mma(
            ws.index(s), rs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if HAS_GATE:
            b_start, b_end = gates_of(b_g, sums, C)
            # the next chunk's, which come from afar
            b_g = load_gates(p_g, stride_g, gl.maximum(t - C, 0) if REVERSE else t + C, length, C)
            G_j = sums.load(gl.SliceLayout(1, al))[:, None]
            G_i = sums.load(gl.SliceLayout(0, al))[None, :]
            between = G_j - G_i if REVERSE else G_i - G_j
            b_decay = gl.exp2(gl.where(seen, between, float("-inf")))
        b_a = warpgroup_mma_wait(0, deps=(b_a,))
        mbarrier.arrive(empty.index(s), count=1)
        b_a = b_a * b_decay if HAS_GATE else gl.where(seen, b_a, 0.0)
        mbarrier.wait(a_empty.index(a), ((i // 2) & 1) ^ 1)
        scores.index(a).store(b_a.to(rs.dtype))
        if HAS_GATE:
            factors.index(2 * a + REVERSE).store(b_start)
            factors.index(2 * a + 1 - REVERSE).store(b_end)
        fence_async_shared()
        mbarrier.arrive(a_full.index(a), count=1)


@gluon.jit
def state_partition(
    y_desc, y_ptr, rs, ws, xs, qs, state, scores, factors, ys, full, empty, q_full, q_empty,
    a_full, a_empty, s_in_ptr, s_out_ptr, p_rows, p_z, p_anchor, o_s, row, HV, HX, i_x, y_col,
    length, n, scale, scale_in, scale_out,
    D: gl.constexpr, X: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    ANCHOR_INTERVAL: gl.constexpr, REVERSE: gl.constexpr, TRANSPOSED: gl.constexpr,
    HAS_GATE: gl.constexpr, HAS_DG: gl.constexpr, HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr,
):  # fmt: skip
    """S and y^T of the program's rows."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    yl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, yl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_x = i_x * BX + gl.arange(0, BX, gl.SliceLayout(1, sl))
    o_d = gl.arange(0, D, gl.SliceLayout(0, sl))
    o_a = o_x[:, None] * D + o_d[None, :] if TRANSPOSED else o_d[None, :] * X + o_x[:, None]
    o_s += o_a
    if HAS_S_IN:
        b_s = gl.load(s_in_ptr + o_s).to(gl.float32) * scale_in
    else:
        b_s = gl.zeros([BX, D], gl.float32, sl)
    zero = gl.zeros([BX, C], gl.float32, yl)
    o_c = gl.arange(0, C, gl.SliceLayout(0, yl))
    for i in range(n):
        s = i % ST
        a = i % 2
        c = n - 1 - i if REVERSE else i
        t = c * C
        if HAS_DG and REVERSE and (c % ANCHOR_INTERVAL == ANCHOR_INTERVAL - 1) | (i == 0):
            anchor = HV.to(gl.int64) * (c // ANCHOR_INTERVAL)
            b_z = gl.sum(b_s * gl.load(p_anchor + anchor * (D * X) + o_a), 1)
            gl.store(p_z + anchor, gl.sum(b_z, 0) * scale_out)
        # a warpgroup has half of S's columns, and multiplies all of them by half of the tokens
        state.store(b_s.to(rs.dtype))
        fence_async_shared()
        gl.thread_barrier()
        # score_partition has seen the stage full, and may have cleared its tail
        mbarrier.wait(a_full.index(a), (i // 2) & 1)
        mbarrier.wait(full.index(s), (i // ST) & 1)
        if HAS_GATE:
            last = factors.index(2 * a + REVERSE).slice(C - 1, 1)  # exp(G_C)
            b_s *= last.load(gl.SliceLayout(1, sl))[:, None]
        b_y = warpgroup_mma(state, rs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        x_t = xs.index(s).permute((1, 0))
        b_x = x_t.load(xa)
        if HAS_GATE:
            b_end = factors.index(2 * a + 1).load(gl.SliceLayout(0, xa))
            b_x = (b_x.to(gl.float32) * b_end[None, :]).to(rs.dtype)
        else:
            b_y = warpgroup_mma(x_t, scores.index(a), b_y, is_async=True)
        b_s = warpgroup_mma(b_x, ws.index(s), b_s, is_async=True)
        if HAS_GATE:
            b_y = warpgroup_mma_wait(1, deps=(b_y,))
            b_y *= factors.index(2 * a).load(gl.SliceLayout(0, yl))[None, :]
            b_y = warpgroup_mma(x_t, scores.index(a), b_y, is_async=True)
        b_y, b_s = warpgroup_mma_wait(0, deps=(b_y, b_s))
        mbarrier.arrive(empty.index(s), count=1)
        mbarrier.arrive(a_empty.index(a), count=1)
        b_y *= scale
        store_tile_transposed(y_desc, y_ptr, ys, b_y, row + t, y_col, HV * X, length - t, C)
        if HAS_DG:
            b = i % 2
            mbarrier.wait(q_full.index(b), (i // 2) & 1)
            b_q = gl.convert_layout(qs.index(b).permute((1, 0)).load(sa), yl)
            b_row = gl.sum(b_q.to(gl.float32) * b_y, 0)
            gl.store(p_rows + t + o_c, b_row, mask=o_c < length - t)
            mbarrier.arrive(q_empty.index(b), count=1)
        if HAS_DG and not REVERSE and (c % ANCHOR_INTERVAL == ANCHOR_INTERVAL - 1) | (c == n - 1):
            anchor = HV.to(gl.int64) * (c // ANCHOR_INTERVAL)
            gl.store(p_anchor + anchor * (D * X) + o_a, b_s)
    store_wait(0)
    if HAS_S_OUT:
        gl.store(s_out_ptr + o_s, (b_s * scale_out).to(s_out_ptr.dtype.element_ty))


_SIZES = ["T", "N", "HV", "HR", "HX", "tokens", "segment", "num_anchors"]
_STRIDES = ["stride_gb", "stride_gt", "stride_gh"]


@gluon.jit(do_not_specialize=["scale", "scale_in", "scale_out", *_SIZES, *_STRIDES])
def scalar_decay_chunk_wide_sm90_kernel(
    r_desc,  # [tokens, HR * D] by [C, D]
    w_desc,  # [tokens, HR * D] by [C, D]
    x_desc,  # [tokens, HX * X] by [C, BX]
    y_desc,  # [tokens, HV * X] by [C, BX]
    q_desc,  # [tokens, HX * X] by [C, BX]: q for the dq scan, k for the dk scan
    y_ptr,
    g_ptr,  # [B, T, HV] by strides
    s_in_ptr,  # [segments, HV, D, X], or [segments, HV, X, D] if TRANSPOSED; times scale_in
    s_out_ptr,  # the same; times scale_out
    rows_ptr,  # [X // BX, HV, tokens]: q . dq, or k . dk
    z_ptr,  # [X // BX, anchors, HV]: sum(S * dS) after an anchor interval, by the dk scan
    anchor_ptr,  # [anchors, HV, X, D]
    cu_ptr,  # [N + 1]
    scale,
    scale_in,
    scale_out,
    T,
    N,
    HV,
    HR,
    HX,
    tokens,
    segment,
    num_anchors,
    stride_gb,
    stride_gt,
    stride_gh,
    D: gl.constexpr,
    X: gl.constexpr,
    C: gl.constexpr,
    ST: gl.constexpr,
    ANCHOR_INTERVAL: gl.constexpr,
    REVERSE: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_DG: gl.constexpr,
    HAS_S_IN: gl.constexpr,
    HAS_S_OUT: gl.constexpr,
    SPLIT: gl.constexpr,
    PACKED: gl.constexpr,
):
    """grid (X // BX * HV * segments,), 8 warps: one program scans BX rows of one head's state.

    Without SPLIT a segment is a sequence.
    """
    dtype: gl.constexpr = x_desc.dtype
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    rs = gl.allocate_shared_memory(dtype, [ST, C, D], r_desc.layout)
    ws = gl.allocate_shared_memory(dtype, [ST, C, D], w_desc.layout)
    xs = gl.allocate_shared_memory(dtype, [ST, C, BX], x_desc.layout)
    ys = gl.allocate_shared_memory(dtype, [C, BX], y_desc.layout)
    scores = gl.allocate_shared_memory(dtype, [2, C, C], a_layout)
    state = gl.allocate_shared_memory(dtype, [BX, D], r_desc.layout)
    qs = xs
    factors = scores
    sums = scores
    full = alloc_mbarriers(1, ST)
    empty = alloc_mbarriers(2, ST)
    a_full = alloc_mbarriers(1, 2)
    a_empty = alloc_mbarriers(1, 2)
    q_full = full
    q_empty = empty
    if HAS_DG:
        qs = gl.allocate_shared_memory(dtype, [2, C, BX], q_desc.layout)
        q_full = alloc_mbarriers(1, 2)
        q_empty = alloc_mbarriers(1, 2)
    if HAS_GATE:
        factors = gl.allocate_shared_memory(gl.float32, [4, C], plain)
        sums = gl.allocate_shared_memory(gl.float32, [C], plain)
    pid = gl.program_id(0)
    tiles: gl.constexpr = X // BX
    i_x = pid % tiles
    i_h = pid // tiles % HV
    i_seg = pid // tiles // HV
    row, length, _ = locate_sequence(cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT)
    n = gl.cdiv(length, C)
    r_col = i_h // (HV // HR) * D
    x_col = i_h // (HV // HX) * X + i_x * BX
    o_s = (i_seg.to(gl.int64) * HV + i_h) * (D * X)
    # what is not given: something else, for only the first part takes None
    p_g = g_ptr if HAS_GATE else y_ptr
    p_in = s_in_ptr if HAS_S_IN else y_ptr
    p_out = s_out_ptr if HAS_S_OUT else y_ptr
    p_rows = rows_ptr if HAS_DG else y_ptr
    p_z = z_ptr if HAS_DG else y_ptr
    p_anchor = anchor_ptr if HAS_DG else y_ptr
    if HAS_GATE:
        p_g = place_gates(p_g, i_seg, row, T, segment, i_h, stride_gb, stride_gt, stride_gh, PACKED)
    if HAS_DG:
        anchor = (
            first_anchor(i_seg, row, T, segment, ANCHOR_INTERVAL * C, SPLIT, PACKED).to(gl.int64)
            * HV
            + i_h
        )
        p_rows += (i_x * HV + i_h).to(gl.int64) * tokens + row
        p_z += (i_x * num_anchors).to(gl.int64) * HV + anchor
        p_anchor += anchor * (D * X)
    gl.warp_specialize(
        [
            (state_partition, (
                y_desc, y_ptr, rs, ws, xs, qs, state, scores, factors, ys, full, empty, q_full,
                q_empty, a_full, a_empty, p_in, p_out, p_rows, p_z, p_anchor, o_s, row, HV, HX,
                i_x, i_h * X + i_x * BX, length, n, scale, scale_in, scale_out, D, X, C, ST,
                ANCHOR_INTERVAL, REVERSE, TRANSPOSED, HAS_GATE, HAS_DG, HAS_S_IN, HAS_S_OUT)),
            (score_partition, (
                rs, ws, xs, scores, factors, sums, full, empty, a_full, a_empty, p_g, stride_gt,
                length, n, D, C, ST, REVERSE, HAS_GATE)),
            (load_partition, (
                r_desc, w_desc, x_desc, q_desc if HAS_DG else x_desc, rs, ws, xs, qs, full, empty,
                q_full, q_empty, row, n, r_col, x_col, C, ST, REVERSE, HAS_DG)),
        ],
        [4, 1],
        [104, 24],
    )  # fmt: skip
