"""The scalar-decay family, no decay or one a token, on sm_90: the scan over chunks of C tokens.

What triton/scalar_decay/chunk.py computes, whose docstring says for what: forward, or with the
roles of the tensors changed one of three gradients. With S [X, D] the state before a chunk and G
the sum of the chunk's gates, which decay by E[j, i] = exp(G_i - G_j) between tokens j <= i,

    A = (w r^T) E [j, i]            y^T = scale * (S r^T exp(G_i) + x^T A)
    S <- exp(G_C) S + (x exp(G_C - G))^T w

The columns of x are rows here, HALF of them in a tile. With HALVES of 2, for X = 128, two
state_partitions carry 64 rows of S each in registers, from where S and x^T go into the products as
left operands. With HALVES of 1, for D = X = 256, a program takes 64 of x's columns: one
state_partition of two warpgroups, each with half of the columns of S [64, D], makes half of the
tokens of y^T, for which S is copied to shared memory. Reversed it scans from the last token to the
first, j >= i, with exp(G_j - G_i): dq, dk and dv of 256 channels are three launches, since dS, do,
v, q and k of a chunk would not fit shared memory beside each other.

    load_partition, 1 warp     score_partition, 4 warps       HALVES state_partitions, 64 rows of S
      r, w, x -- full ---->      A                              S and y
                                 A, factors -- a_full --->      y^T = S r^T + x^T A
                                 <-- a_empty
      <-- empty                  arrives at empty               arrive at empty
      q -------------------------- q_full ------------->        q . y, if HAS_DG
      <-- q_empty

    buffers                   stages  arrivals a phase: full / empty
    r, w [C, D], x [C, X]     ST      1 (TMA) / 1 + HALVES, score_ and the state_partitions
    A [C, C], the factors     2       1 / HALVES, the state_partitions
    q [C, X]                  2       1 (TMA) / HALVES
    S [64, D], 16 bits        1       of HALVES 1: state_partition's alone

score_partition is ahead of the chain: it zeroes what is past the end of a short chunk, which the
others see by a_full, and computes what the gates decay by.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.triton.scalar_decay.device import LOG2E, LOWEST_GATE
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# what a state_partition reads and writes in global memory besides y; constants of a launch
StateRefs = namedtuple("StateRefs", "s_in s_out pool rows later z anchor")
Output = namedtuple("Output", "desc ptr")
Gates = namedtuple("Gates", "ptr stride")
Scales = namedtuple("Scales", "y s_in s_out")
Constants = namedtuple(
    "Constants",
    "HALVES D X C ST ANCHOR_INTERVAL REVERSE TRANSPOSED HAS_GATE HAS_DG HAS_S_IN HAS_S_OUT SHARED",
)

HALF = gl.constexpr(64)  # rows of S of a state_partition


class StateTiles(NamedTuple):
    """Buffers that state_partition reads and writes, there and in chunk_bwd.py."""

    r: Any
    w: Any
    x: Any  # two halves a stage
    q: Any  # of HAS_DG
    state: Any  # of SHARED, or of HALVES 1
    scores: Any  # A
    factors: Any  # exp(G) and exp(G_C - G)
    y: Any


class StateBarriers(NamedTuple):
    """Their barriers."""

    full: Any  # r, w and x
    empty: Any
    q_full: Any
    q_empty: Any
    a_full: Any  # scores and factors
    a_empty: Any
    s_full: Any  # state
    s_empty: Any


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def place_gates(
    p, i_seg, row, T, segment, i_h, stride_b, stride_t, stride_h, PACKED: gl.constexpr
):  # fmt: skip
    """The gate of a segment's first token, which is token `row` of all."""
    i_b = 0 if PACKED else i_seg // gl.cdiv(T, segment)
    p += i_h.to(gl.int64) * stride_h + stride_b.to(gl.int64) * i_b
    return p + (row - i_b * T).to(gl.int64) * stride_t


@gluon.jit
def load_gates_of(p, stride, o_t, length):
    """Gates of tokens o_t, zero past the end."""
    return gl.load(p + o_t.to(gl.int64) * stride, mask=o_t < length, other=0.0)


@gluon.jit
def load_gates(p, stride, t, length, C: gl.constexpr):
    """Those of the chunk from token t on, zero past the end."""
    o_c = t + gl.arange(0, C, gl.BlockedLayout([2], [32], [4], [0]))
    return load_gates_of(p, stride, o_c, length)


@gluon.jit
def add_up_gates(b_g, o_c, C: gl.constexpr):
    """G of each token of a chunk, in base 2, and G_C."""
    b_g = b_g.to(gl.float32)
    b_G = gl.associative_scan(gl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g) * LOG2E, 0, add)
    return b_G, gl.sum(gl.where(o_c == C - 1, b_G, 0.0), 0)


@gluon.jit
def gates_of(b_g, sums, C: gl.constexpr):
    """exp(G), exp(G_C - G), and G_C; G of base 2 goes to `sums`."""
    o_c = gl.arange(0, C, gl.BlockedLayout([2], [32], [4], [0]))
    b_G, G_C = add_up_gates(b_g, o_c, C)
    sums.store(b_G)
    return gl.exp2(b_G), gl.exp2(G_C - b_G), G_C


@gluon.jit
def first_anchor(
    i_seg, row, T, segment, TOKENS: gl.constexpr, SPLIT: gl.constexpr, PACKED: gl.constexpr
):
    """The number of a segment's first anchor interval of TOKENS (as Triton's locate_segment)."""
    if SPLIT:
        anchor = i_seg * gl.cdiv(segment, TOKENS)
    elif PACKED:
        anchor = row // TOKENS + i_seg
    else:
        anchor = i_seg * gl.cdiv(T, TOKENS)
    return anchor


@gluon.jit
def load_partition(r_desc, w_desc, x_desc, q_desc, tiles, barriers, row, n, r_col, x_col, c):
    nbytes: gl.constexpr = (
        r_desc.block_type.nbytes + w_desc.block_type.nbytes + c.HALVES * x_desc.block_type.nbytes
    )
    for i in range(n):
        s = i % c.ST
        t = row + (n - 1 - i if c.REVERSE else i) * c.C
        mbarrier.wait(barriers.empty.index(s), ((i // c.ST) & 1) ^ 1)
        mbarrier.expect(barriers.full.index(s), nbytes)
        sm90.copy_in(w_desc, [t, r_col], barriers.full.index(s), tiles.w.index(s))
        sm90.copy_in(r_desc, [t, r_col], barriers.full.index(s), tiles.r.index(s))
        for half in gl.static_range(c.HALVES):
            col = x_col + half * HALF
            sm90.copy_in(
                x_desc, [t, col], barriers.full.index(s), tiles.x.index(c.HALVES * s + half)
            )
        if c.HAS_DG:
            b = i % 2
            mbarrier.wait(barriers.q_empty.index(b), ((i // 2) & 1) ^ 1)
            mbarrier.expect(barriers.q_full.index(b), c.HALVES * q_desc.block_type.nbytes)
            for half in gl.static_range(c.HALVES):
                col = x_col + half * HALF
                sm90.copy_in(
                    q_desc, [t, col], barriers.q_full.index(b), tiles.q.index(c.HALVES * b + half)
                )


@gluon.jit
def score_partition(
    rs, ws, xs, scores, factors, sums, full, empty, a_full, a_empty, gates, length, n, c
):
    """A [j, i] of each chunk, and what S r^T and x decay by."""
    p_g, stride_g = gates
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    o_j = gl.arange(0, c.C, gl.SliceLayout(1, al))
    o_i = gl.arange(0, c.C, gl.SliceLayout(0, al))
    zero = gl.zeros([c.C, c.C], gl.float32, al)
    seen = o_j[:, None] >= o_i[None, :] if c.REVERSE else o_j[:, None] <= o_i[None, :]
    if c.HAS_GATE:
        b_g = load_gates(p_g, stride_g, gl.maximum(n - 1, 0) * c.C if c.REVERSE else 0, length, c.C)
    for i in range(n):
        s = i % c.ST
        a = i % 2
        t = (n - 1 - i if c.REVERSE else i) * c.C
        mbarrier.wait(full.index(s), (i // c.ST) & 1)
        if length - t < c.C:
            common.zero_tail_rows(rs.index(s), length - t, c.C, c.D)
            common.zero_tail_rows(ws.index(s), length - t, c.C, c.D)
            for half in gl.static_range(c.HALVES):
                common.zero_tail_rows(xs.index(c.HALVES * s + half), length - t, c.C, HALF)
            sm90.fence_async_shared()
            gl.thread_barrier()
        b_a = warpgroup_mma(
            ws.index(s), rs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if c.HAS_GATE:
            b_start, b_end, _ = gates_of(b_g, sums, c.C)
            # the next chunk's, which come from afar
            b_g = load_gates(
                p_g, stride_g, gl.maximum(t - c.C, 0) if c.REVERSE else t + c.C, length, c.C
            )
            G_j = sums.load(gl.SliceLayout(1, al))[:, None]
            G_i = sums.load(gl.SliceLayout(0, al))[None, :]
            between = G_j - G_i if c.REVERSE else G_i - G_j
            b_decay = gl.exp2(gl.where(seen, between, float("-inf")))
        b_a = sm90.warpgroup_mma_wait(0, deps=(b_a,))
        mbarrier.arrive(empty.index(s), count=1)
        b_a = b_a * b_decay if c.HAS_GATE else gl.where(seen, b_a, 0.0)
        mbarrier.wait(a_empty.index(a), ((i // 2) & 1) ^ 1)
        scores.index(a).store(b_a.to(rs.dtype))
        if c.HAS_GATE:
            factors.index(2 * a + c.REVERSE).store(b_start)
            factors.index(2 * a + 1 - c.REVERSE).store(b_end)
        sm90.fence_async_shared()
        mbarrier.arrive(a_full.index(a), count=1)


@gluon.jit
def row_products(q, b_y, sa: gl.constexpr, yl: gl.constexpr):
    """q . y of a chunk's tokens."""
    b_q = gl.convert_layout(q.permute((1, 0)).load(sa), yl)
    return gl.sum(b_q.to(gl.float32) * b_y, 0)


@gluon.jit
def state_partition(
    output, tiles, barriers, refs, o_s, row, HV, y_col, length, n, scales, i_x, I: gl.constexpr, c
):
    """Rows HALF * (i_x + I) and on of S, and of y^T. SHARED: S is copied for dk, but q . y is not
    made."""
    scale, scale_in, scale_out = scales
    y_desc, y_ptr = output
    GROUPS: gl.constexpr = 3 - c.HALVES  # warpgroups
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, c.D // GROUPS, 16])
    yl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, c.C // GROUPS, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, yl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_x = HALF * (i_x + I) + gl.arange(0, HALF, gl.SliceLayout(1, sl))
    o_d = gl.arange(0, c.D, gl.SliceLayout(0, sl))
    o_a = o_x[:, None] * c.D + o_d[None, :] if c.TRANSPOSED else o_d[None, :] * c.X + o_x[:, None]
    o_s += o_a
    if c.HAS_S_IN:
        b_s = gl.load(refs.s_in + o_s).to(gl.float32) * scale_in
    else:
        b_s = gl.zeros([HALF, c.D], gl.float32, sl)
    zero = gl.zeros([HALF, c.C], gl.float32, yl)
    o_c = gl.arange(0, c.C, gl.SliceLayout(0, yl))
    y_col += HALF * I
    for i in range(n):
        s = i % c.ST
        a = i % 2
        i_c = n - 1 - i if c.REVERSE else i
        if refs.pool.rows is not None:
            to = gl.load(refs.pool.rows + i)
        if c.HAS_DG and c.REVERSE and (i_c % c.ANCHOR_INTERVAL == c.ANCHOR_INTERVAL - 1) | (i == 0):
            anchor = HV.to(gl.int64) * (i_c // c.ANCHOR_INTERVAL)
            b_z = gl.sum(b_s * gl.load(refs.anchor + anchor * (c.D * c.X) + o_a), 1)
            gl.store(refs.z + anchor, gl.sum(b_z, 0) * scale_out)
        if c.HALVES == 1:
            # a warpgroup has half of S's columns, and multiplies all of them by half of the tokens
            tiles.state.store(b_s.to(tiles.r.dtype))
            sm90.fence_async_shared()
            gl.thread_barrier()
        # score_partition has seen the stage full, and may have cleared its tail
        mbarrier.wait(barriers.a_full.index(a), (i // 2) & 1)
        mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)
        if c.SHARED:
            mbarrier.wait(barriers.s_empty.index(0), (i & 1) ^ 1)
            tiles.state.index(I).store(b_s.to(tiles.r.dtype))
            sm90.fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(barriers.s_full.index(0), count=1)
            lhs = tiles.state.index(I)
        elif c.HALVES == 1:
            lhs = tiles.state
        else:
            lhs = gl.convert_layout(b_s.to(tiles.r.dtype), sa)
        if c.HAS_GATE:
            last = tiles.factors.index(2 * a + c.REVERSE).slice(c.C - 1, 1)  # exp(G_C)
            b_s *= last.load(gl.SliceLayout(1, sl))[:, None]
        b_y = warpgroup_mma(
            lhs, tiles.r.index(s).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        x_t = tiles.x.index(c.HALVES * s + I).permute((1, 0))
        b_x = x_t.load(xa)
        if c.HAS_GATE:
            b_end = tiles.factors.index(2 * a + 1).load(gl.SliceLayout(0, xa))
            b_x = (b_x.to(gl.float32) * b_end[None, :]).to(tiles.r.dtype)
        else:
            b_y = warpgroup_mma(x_t, tiles.scores.index(a), b_y, is_async=True)
        b_s = warpgroup_mma(b_x, tiles.w.index(s), b_s, is_async=True)
        if c.HAS_GATE:
            b_y = sm90.warpgroup_mma_wait(1, deps=(b_y,))
            b_y *= tiles.factors.index(2 * a).load(gl.SliceLayout(0, yl))[None, :]
            if c.HAS_DG and c.REVERSE and not c.SHARED:
                mbarrier.wait(barriers.q_full.index(a), (i // 2) & 1)
                b_row = row_products(tiles.q.index(c.HALVES * a + I), b_y, sa, yl) * scale
                gl.store(refs.later + i_c * c.C + o_c, b_row, mask=o_c < length - i_c * c.C)
            b_y = warpgroup_mma(x_t, tiles.scores.index(a), b_y, is_async=True)
        b_y, b_s = sm90.warpgroup_mma_wait(0, deps=(b_y, b_s))
        mbarrier.arrive(barriers.empty.index(s), count=1)
        mbarrier.arrive(barriers.a_empty.index(a), count=1)
        if refs.pool.rows is not None:
            common.store_to_pool(refs.pool, to, b_s, o_x[:, None] * c.D + o_d[None, :])
        b_y *= scale
        t = i_c * c.C
        common.store_tile_transposed(
            y_desc, y_ptr, tiles.y.index(I), b_y, row + t, y_col, HV * c.X, length - t, c.C
        )
        if c.HAS_DG and not c.SHARED:
            mbarrier.wait(barriers.q_full.index(a), (i // 2) & 1)
            b_row = row_products(tiles.q.index(c.HALVES * a + I), b_y, sa, yl)
            gl.store(refs.rows + t + o_c, b_row, mask=o_c < length - t)
            mbarrier.arrive(barriers.q_empty.index(a), count=1)
        is_end = (i_c % c.ANCHOR_INTERVAL == c.ANCHOR_INTERVAL - 1) | (i_c == n - 1)
        if c.HAS_DG and not c.REVERSE and is_end:
            anchor = HV.to(gl.int64) * (i_c // c.ANCHOR_INTERVAL)
            gl.store(refs.anchor + anchor * (c.D * c.X) + o_a, b_s)
    sm90.store_wait(0)
    if c.HAS_S_OUT:
        gl.store(refs.s_out + o_s, (b_s * scale_out).to(refs.s_out.dtype.element_ty))


_SIZES = ["T", "N", "HV", "HR", "HX", "tokens", "segment", "num_anchors"]
_STRIDES = ["stride_gb", "stride_gt", "stride_gh"]


@gluon.jit(do_not_specialize=["scale", "scale_in", "scale_out", *_SIZES, *_STRIDES])
def scalar_decay_chunk_fwd_sm90_kernel(
    r_desc,  # [tokens, HR * D] by [C, D]
    w_desc,  # [tokens, HR * D] by [C, D]
    x_desc,  # [tokens, HX * X] by [C, HALF]
    y_desc,  # [tokens, HV * X] by [C, HALF]
    q_desc,  # [tokens, HX * X] by [C, HALF]: q for the dq scan, k for the dk scan
    y_ptr,
    g_ptr,  # [B, T, HV] by strides
    s_in_ptr,  # [segments, HV, D, X], or [segments, HV, X, D] if TRANSPOSED; times scale_in
    s_out_ptr,  # the same; times scale_out
    rows_ptr,  # [X // HALF, HV, tokens]: q . dq; or twice as many: k . dk, what later chunks add
    z_ptr,  # [X // HALF, anchors, HV]: sum(S * dS) after an anchor interval, by the dk scan
    anchor_ptr,  # [anchors, HV, X, D]
    cu_ptr,  # [N + 1]
    scale, scale_in, scale_out, T, N, HV, HR, HX, tokens, segment, num_anchors,
    stride_gb, stride_gt, stride_gh,
    D: gl.constexpr,
    X: gl.constexpr,
    C: gl.constexpr,
    ST: gl.constexpr,
    HALVES: gl.constexpr,
    ANCHOR_INTERVAL: gl.constexpr,
    REVERSE: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_DG: gl.constexpr,
    HAS_S_IN: gl.constexpr,
    HAS_S_OUT: gl.constexpr,
    SPLIT: gl.constexpr,
    PACKED: gl.constexpr,
    pool_ptr=None,  # [rows, HV, V, K], a pool
    to_ptr=None,  # [N, T / C, rounded up]: rows of it for S after chunks; none below 0
):  # fmt: skip
    """grid (X // (HALVES * HALF) * HV * segments,), 4 warps, 8 with HALVES of 1: one program scans
    HALVES * HALF rows of the state of one head of one segment.

    Without SPLIT a segment is a sequence.
    """
    scales = Scales(scale, scale_in, scale_out)
    output = Output(y_desc, y_ptr)
    dtype: gl.constexpr = x_desc.dtype
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    rs = gl.allocate_shared_memory(dtype, [ST, C, D], r_desc.layout)
    ws = gl.allocate_shared_memory(dtype, [ST, C, D], w_desc.layout)
    xs = gl.allocate_shared_memory(dtype, [HALVES * ST, C, HALF], x_desc.layout)
    ys = gl.allocate_shared_memory(dtype, [HALVES, C, HALF], y_desc.layout)
    scores = gl.allocate_shared_memory(dtype, [2, C, C], a_layout)
    state = ys
    if HALVES == 1:
        state = gl.allocate_shared_memory(dtype, [HALF, D], r_desc.layout)
    qs = xs
    factors = scores
    sums = scores
    full = common.alloc_mbarriers(1, ST)
    empty = common.alloc_mbarriers(1 + HALVES, ST)
    a_full = common.alloc_mbarriers(1, 2)
    a_empty = common.alloc_mbarriers(HALVES, 2)
    q_full = full
    q_empty = empty
    if HAS_DG:
        qs = gl.allocate_shared_memory(dtype, [2 * HALVES, C, HALF], q_desc.layout)
        q_full = common.alloc_mbarriers(1, 2)
        q_empty = common.alloc_mbarriers(HALVES, 2)
    if HAS_GATE:
        factors = gl.allocate_shared_memory(gl.float32, [4, C], plain)
        sums = gl.allocate_shared_memory(gl.float32, [C], plain)
    if HALVES == 2:
        i_h, i_seg, row, length, _, n = common.program_coords(
            cu_ptr, T, N, HV, segment, C, PACKED, SPLIT
        )
        i_x = 0
    else:
        pid = gl.program_id(0)
        i_x = pid % (X // HALF)
        i_h = pid // (X // HALF) % HV
        i_seg = pid // (X // HALF) // HV
        i_seg = common.longest_first(cu_ptr, i_seg, N, X // HALF * HV, PACKED and not SPLIT)
        row, length, _ = common.locate_sequence(cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT)
        n = gl.cdiv(length, C)
    r_col = i_h // (HV // HR) * D
    x_col = i_h // (HV // HX) * X + i_x * HALF
    o_s = (i_seg.to(gl.int64) * HV + i_h) * (D * X)
    # what is not given: something else, for only the first part takes None
    p_g = g_ptr if HAS_GATE else y_ptr
    p_in = s_in_ptr if HAS_S_IN else y_ptr
    p_out = s_out_ptr if HAS_S_OUT else y_ptr
    p_rows = rows_ptr if HAS_DG else y_ptr
    p_later = rows_ptr + X // HALF * HV.to(gl.int64) * tokens if HAS_DG and REVERSE else y_ptr
    p_z = z_ptr if HAS_DG and REVERSE else y_ptr
    p_anchor = anchor_ptr if HAS_DG else y_ptr
    if HAS_GATE:
        p_g = place_gates(
            p_g, i_seg, row, T, segment, i_h, stride_gb, stride_gt, stride_gh, PACKED
        )  # fmt: skip
    if HAS_DG:
        anchor = first_anchor(i_seg, row, T, segment, ANCHOR_INTERVAL * C, SPLIT, PACKED)
        anchor = anchor.to(gl.int64) * HV + i_h
        p_rows += (i_x * HV + i_h).to(gl.int64) * tokens + row
        if REVERSE:
            p_later += (i_x * HV + i_h).to(gl.int64) * tokens + row
            p_z += (i_x * num_anchors).to(gl.int64) * HV + anchor
        p_anchor += anchor * (D * X)
    pool = common.PoolRefs(None, None, None)
    if to_ptr is not None:
        _, _, _, i_n, i_split, _ = common.locate_segment(
            cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT
        )
        at = i_h * X * D
        pool = common.pool_refs_of(pool_ptr, to_ptr, i_n, i_split, at, HV, T, segment, X * D, C)
    tiles = StateTiles(rs, ws, xs, qs, state, scores, factors, ys)
    # S is not shared with others: its barriers are never waited for
    barriers = StateBarriers(full, empty, q_full, q_empty, a_full, a_empty, full, empty)
    y_col = i_h * X + i_x * HALF
    gates = Gates(p_g, stride_gt)
    c: gl.constexpr = Constants(
        HALVES, D, X, C, ST, ANCHOR_INTERVAL, REVERSE, TRANSPOSED, HAS_GATE, HAS_DG, HAS_S_IN,
        HAS_S_OUT, False,
    )  # fmt: skip
    refs = StateRefs(p_in, p_out, pool, p_rows, p_later, p_z, p_anchor)
    if HALVES == 1:
        gl.warp_specialize(
            [
                (state_partition, (
                    output, tiles, barriers, refs, o_s, row, HV, y_col, length, n, scales, i_x, 0,
                    c)),
                (score_partition, (
                    rs, ws, xs, scores, factors, sums, full, empty, a_full, a_empty, gates, length,
                    n, c)),
                (load_partition, (
                    r_desc, w_desc, x_desc, q_desc if HAS_DG else x_desc, tiles, barriers, row, n,
                    r_col, x_col, c)),
            ],
            [4, 1],
            [104, 24],
        )  # fmt: skip
    else:
        p_second = p_rows + HV.to(gl.int64) * tokens if HAS_DG else p_rows
        second = StateRefs(p_in, p_out, pool, p_second, p_later, p_z, p_anchor)
        gl.warp_specialize(
            [
                (state_partition, (
                    output, tiles, barriers, refs, o_s, row, HV, y_col, length, n, scales, i_x, 0,
                    c)),
                (state_partition, (
                    output, tiles, barriers, second, o_s, row, HV, y_col, length, n, scales, i_x, 1,
                    c)),
                (score_partition, (
                    rs, ws, xs, scores, factors, sums, full, empty, a_full, a_empty, gates, length,
                    n, c)),
                (load_partition, (
                    r_desc, w_desc, x_desc, q_desc if HAS_DG else x_desc, tiles, barriers, row, n,
                    r_col, x_col, c)),
            ],
            [4, 4, 1],
            [192, 104, 24],
        )  # fmt: skip
