# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
"""Softmax attention forward for sm_90: one warp loads, NC warpgroups of 64 queries compute.

    m' = max(m, max_s x_ts)     l' = e^(m - m') l + sum_s e^(x_ts - m')     o' likewise with v_s

The product q k^T of a tile runs beside p v of the one before and its exponentials; p goes from the
accumulator's registers into the next product. K and V have a ring of ST buffers each. Only tiles
at the edges of what is seen are masked.
"""

from slipstream.kernels.gluon import (
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.softmax.hopper.common import (
    LEFT,
    RIGHT,
    SOFTCAP,
    barriers,
    clean,
    corner,
    fetch,
    free,
    keys_seen,
    place,
    put,
    ready,
    stage,
)
from slipstream.kernels.softmax.triton.scores import LN2

_SIZES = ["T", "S", "H", "N", "group", "tiles", "steps", "section", "units", "left", "right"]
_AT = [f"{x}_{i}" for x in "qkv" for i in ("rb", "rh", "ch")]
_DO_AT = ["do_rb", "do_rh", "do_ch"]


@gluon.jit
def _load(descs, buffers, full, empty, offsets, sizes, window, ats, NC: gl.constexpr,
          BN: gl.constexpr, ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    desc_q, desc_k, desc_v = descs
    bufs_q, bufs_k, bufs_v = buffers
    full_q, full_k, full_v = full
    empty_q, empty_k, empty_v = empty
    at_q, at_k, at_v = ats
    group, units = sizes[4], sizes[8]
    turn = units * 0
    mine = units * 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        i_h, i_b, begin, queries, i_kb, begin_k, keys, _, row = place(
            unit, offsets, sizes, 64 * NC, False, FLAGS
        )
        low, count, _, _ = keys_seen(row, queries, keys, window, 64 * NC, BN, FLAGS)
        row_q, col_q = corner(at_q, i_b, i_h, begin + row)
        row_k, col_k = corner(at_k, i_kb, i_h // group, begin_k + low)
        row_v, col_v = corner(at_v, i_kb, i_h // group, begin_k + low)
        free(empty_k, turn, ST)
        fetch(desc_k, row_k, col_k, full_k.index(turn % ST), bufs_k.index(turn % ST))
        for c in gl.static_range(NC):
            mbarrier.wait(empty_q.index(c), (mine & 1) ^ 1)
            fetch(desc_q, row_q + c * 64, col_q, full_q.index(c), bufs_q.index(c))
        for i in range(1, count):
            slot = (turn + i) % ST
            free(empty_k, turn + i, ST)
            fetch(desc_k, row_k + i * BN, col_k, full_k.index(slot), bufs_k.index(slot))
            slot = (turn + i - 1) % ST
            free(empty_v, turn + i - 1, ST)
            fetch(desc_v, row_v + (i - 1) * BN, col_v, full_v.index(slot), bufs_v.index(slot))
        turn += count
        slot = (turn - 1) % ST
        free(empty_v, turn - 1, ST)
        fetch(desc_v, row_v + (count - 1) * BN, col_v, full_v.index(slot), bufs_v.index(slot))
        mine += 1


@gluon.jit
def _weights(s, m, low, high, key, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """p of a tile whose first key is `key`, the new m, and what shrinks what was before."""
    layout: gl.constexpr = s.type.layout
    under = factor
    if FLAGS & SOFTCAP:
        s = cap - 2.0 * cap / (1.0 + gl.exp2(s * factor))
        under = 1.0
    if MASKED:
        o_n = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        seen = o_n[None, :] < high[:, None]
        if FLAGS & LEFT:
            seen = seen & (o_n[None, :] >= low[:, None])
        s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * under)
    base = top
    if MASKED:
        base = gl.where(top == float("-inf"), 0.0, top)
    return gl.exp2(s * under - base[:, None]), top, gl.exp2(m - base)


@gluon.jit
def _step(q, zero, bufs_k, bufs_v, full_k, empty_k, full_v, empty_v, state, turn, low, high, key,
          factor, cap, ST: gl.constexpr, MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """q k^T of this turn beside p v of the one before."""
    p, m, l, acc = state
    before = turn - 1
    ready(full_k, turn, ST)
    s = warpgroup_mma(
        q, bufs_k.index(turn % ST).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    ready(full_v, before, ST)
    acc = warpgroup_mma(p, bufs_v.index(before % ST), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(empty_k.index(turn % ST))
    e, m, shrink = _weights(s, m, low, high, key, factor, cap, MASKED, FLAGS)
    l = l * shrink + gl.sum(e, 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty_v.index(before % ST))
    p = gl.convert_layout(e.to(q.dtype), p.type.layout)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, m, l, acc


@gluon.jit
def _attend(c: gl.constexpr, o_ptr, lse_ptr, factor, cap, buffers, full, empty, offsets, sizes,
            window, NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
            ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    bufs_q, bufs_k, bufs_v = buffers
    full_q, full_k, full_v = full
    empty_q, empty_k, empty_v = empty
    T, H, units = sizes[0], sizes[2], sizes[8]
    left, right = window
    q = bufs_q.index(c)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    o_m = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    turn = units * 0
    mine = units * 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        i_h, i_b, begin, queries, _, _, keys, _, row = place(
            unit, offsets, sizes, 64 * NC, False, FLAGS
        )
        key, count, inner, outer = keys_seen(row, queries, keys, window, 64 * NC, BN, FLAGS)
        row += c * 64
        # each query sees the keys from `low` to before `high`
        low = row + keys - queries + o_m - left
        high = keys + o_m * 0
        if FLAGS & RIGHT:
            high = gl.minimum(row + keys - queries + o_m + right + 1, keys)
        mbarrier.wait(full_q.index(c), mine & 1)
        ready(full_k, turn, ST)
        s = warpgroup_mma(
            q, bufs_k.index(turn % ST).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(empty_k.index(turn % ST))
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        e, m, _ = _weights(s, m, low, high, key, factor, cap, True, FLAGS)
        l = gl.sum(e, 1)
        p = gl.convert_layout(e.to(q.dtype), p_layout)
        acc = gl.zeros([64, DV], gl.float32, o_layout)
        inner = gl.maximum(inner, 1)
        outer = gl.maximum(outer, 1)
        if FLAGS & LEFT:
            for i in range(1, inner):
                p, m, l, acc = _step(
                    q, zero, bufs_k, bufs_v, full_k, empty_k, full_v, empty_v, (p, m, l, acc),
                    turn + i, low, high, key + i * BN, factor, cap, ST, True, FLAGS,
                )  # fmt: skip
        for i in range(inner, outer):
            p, m, l, acc = _step(
                q, zero, bufs_k, bufs_v, full_k, empty_k, full_v, empty_v, (p, m, l, acc),
                turn + i, low, high, key + i * BN, factor, cap, ST, False, FLAGS,
            )  # fmt: skip
        for i in range(outer, count):
            p, m, l, acc = _step(
                q, zero, bufs_k, bufs_v, full_k, empty_k, full_v, empty_v, (p, m, l, acc),
                turn + i, low, high, key + i * BN, factor, cap, ST, True, FLAGS,
            )  # fmt: skip
        turn += count
        mine += 1
        last = bufs_v.index((turn - 1) % ST)
        ready(full_v, turn - 1, ST)
        clean(last, keys - key - (count - 1) * BN, BN, DV)
        acc = warpgroup_mma(p, last, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty_v.index((turn - 1) % ST))
        blind = l == 0.0
        lse = gl.where(blind, float("-inf"), (m + gl.log2(gl.where(blind, 1.0, l))) * LN2)
        by = gl.convert_layout(gl.where(blind, 1.0, l), gl.SliceLayout(1, o_layout))
        out = stage(q, (acc / by[:, None]).to(q.dtype), DV)
        mbarrier.arrive(empty_q.index(c))
        i_t = i_b.to(gl.int64) * T + begin + row
        put(o_ptr + (i_t * H + i_h) * DV, out, H * DV, queries - row, DV)
        p_lse = lse_ptr + (i_b.to(gl.int64) * H + i_h) * T + begin + row
        gl.store(p_lse + o_m, lse, mask=o_m < queries - row)


@gluon.jit
def _first(o_ptr, lse_ptr, factor, cap, buffers, full, empty, offsets, sizes, window,
           NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
           ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _attend(0, o_ptr, lse_ptr, factor, cap, buffers, full, empty, offsets, sizes, window,
            NC, BN, D, DV, ST, FLAGS)  # fmt: skip


@gluon.jit
def _second(o_ptr, lse_ptr, factor, cap, buffers, full, empty, offsets, sizes, window,
            NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
            ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _attend(1, o_ptr, lse_ptr, factor, cap, buffers, full, empty, offsets, sizes, window,
            NC, BN, D, DV, ST, FLAGS)  # fmt: skip


@gluon.jit
def _third(o_ptr, lse_ptr, factor, cap, buffers, full, empty, offsets, sizes, window,
           NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
           ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _attend(2, o_ptr, lse_ptr, factor, cap, buffers, full, empty, offsets, sizes, window,
            NC, BN, D, DV, ST, FLAGS)  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "cap", *_SIZES, *_AT])
def softmax_fwd_sm90_kernel(
    desc_q,  # matrices with tiles [64, D], [BN, D] and [BN, DV]: common.py says where q, k, v lie
    desc_k,
    desc_v,
    o_ptr,  # [B, T, H, DV]
    lse_ptr,  # [B, H, T]
    cu_q_ptr,  # [N + 1]
    cu_k_ptr,  # [N + 1]
    lengths_ptr,  # [N]
    factor,
    cap,
    T,
    S,
    H,
    N,
    group,
    tiles,
    steps,
    section,
    units,
    left,
    right,
    q_rb,
    q_rh,
    q_ch,
    k_rb,
    k_rh,
    k_ch,
    v_rb,
    v_rh,
    v_ch,
    NC: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    ST: gl.constexpr,
    FLAGS: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """grid (programs,). NC: 2 or 3 warpgroups. CONSUMER, PRODUCER: registers of a thread."""
    dtype: gl.constexpr = desc_q.dtype
    bufs_q = gl.allocate_shared_memory(dtype, [NC, 64, D], desc_q.layout)
    bufs_k = gl.allocate_shared_memory(dtype, [ST, BN, D], desc_k.layout)
    bufs_v = gl.allocate_shared_memory(dtype, [ST, BN, DV], desc_v.layout)
    full_q = barriers(NC, 1)
    empty_q = barriers(NC, 1)
    full_k = barriers(ST, 1)
    empty_k = barriers(ST, NC)
    full_v = barriers(ST, 1)
    empty_v = barriers(ST, NC)
    if NC == 2:
        gl.warp_specialize([
            (_first, (o_ptr, lse_ptr, factor, cap, (bufs_q, bufs_k, bufs_v),
                      (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                      (cu_q_ptr, cu_k_ptr, lengths_ptr),
                      (T, S, H, N, group, tiles, steps, section, units), (left, right),
                      NC, BN, D, DV, ST, FLAGS)),
            (_second, (o_ptr, lse_ptr, factor, cap, (bufs_q, bufs_k, bufs_v),
                       (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                       (cu_q_ptr, cu_k_ptr, lengths_ptr),
                       (T, S, H, N, group, tiles, steps, section, units), (left, right),
                       NC, BN, D, DV, ST, FLAGS)),
            (_load, ((desc_q, desc_k, desc_v), (bufs_q, bufs_k, bufs_v), (full_q, full_k, full_v),
                     (empty_q, empty_k, empty_v), (cu_q_ptr, cu_k_ptr, lengths_ptr),
                     (T, S, H, N, group, tiles, steps, section, units), (left, right),
                     ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch)),
                     NC, BN, ST, FLAGS)),
        ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
    else:
        gl.warp_specialize([
            (_first, (o_ptr, lse_ptr, factor, cap, (bufs_q, bufs_k, bufs_v),
                      (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                      (cu_q_ptr, cu_k_ptr, lengths_ptr),
                      (T, S, H, N, group, tiles, steps, section, units), (left, right),
                      NC, BN, D, DV, ST, FLAGS)),
            (_second, (o_ptr, lse_ptr, factor, cap, (bufs_q, bufs_k, bufs_v),
                       (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                       (cu_q_ptr, cu_k_ptr, lengths_ptr),
                       (T, S, H, N, group, tiles, steps, section, units), (left, right),
                       NC, BN, D, DV, ST, FLAGS)),
            (_third, (o_ptr, lse_ptr, factor, cap, (bufs_q, bufs_k, bufs_v),
                      (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                      (cu_q_ptr, cu_k_ptr, lengths_ptr),
                      (T, S, H, N, group, tiles, steps, section, units), (left, right),
                      NC, BN, D, DV, ST, FLAGS)),
            (_load, ((desc_q, desc_k, desc_v), (bufs_q, bufs_k, bufs_v), (full_q, full_k, full_v),
                     (empty_q, empty_k, empty_v), (cu_q_ptr, cu_k_ptr, lengths_ptr),
                     (T, S, H, N, group, tiles, steps, section, units), (left, right),
                     ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch)),
                     NC, BN, ST, FLAGS)),
        ], [4, 4, 1], [CONSUMER, CONSUMER, PRODUCER])  # fmt: skip
