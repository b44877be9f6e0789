# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
"""The gradients of k and v for sm_90: two warpgroups of 64 keys walk over their queries.

    p_ts = exp(x_ts - lse_t)      dp_ts = do_t . v_s      dx_ts = p_ts (dp_ts - delta_t)
    dk_s = scale sum_t dx_ts q_t      dv_s = sum_t p_ts do_t

p and dx are made transposed, keys by queries, so that they go from registers into the products. A
program takes all the query heads of its keys: nothing is added by two.
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
    LENGTHS,
    RIGHT,
    SOFTCAP,
    barriers,
    clean,
    corner,
    fetch,
    free,
    place,
    put,
    queries_seen,
    ready,
    stage,
)
from slipstream.kernels.softmax.hopper.forward import _AT, _DO_AT, _SIZES


@gluon.jit
def _load(descs, buffers, full, empty, offsets, sizes, window, ats, BM: gl.constexpr,
          ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    desc_q, desc_k, desc_v, desc_do = descs
    bufs_k, bufs_v, bufs_q, bufs_do = buffers
    full_k, full_q, full_do = full
    empty_k, empty_q, empty_do = empty
    at_q, at_k, at_v, at_do = ats
    group, units = sizes[4], sizes[8]
    turn = units * 0
    mine = units * 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        i_kv, i_b, begin, queries, i_kb, begin_k, keys, _, row = place(
            unit, offsets, sizes, 128, True, FLAGS
        )
        low, count, _, _ = queries_seen(row, queries, keys, window, BM, 128, FLAGS)
        row_k, col_k = corner(at_k, i_kb, i_kv, begin_k + row)
        row_v, col_v = corner(at_v, i_kb, i_kv, begin_k + row)
        for c in gl.static_range(2):
            mbarrier.wait(empty_k.index(c), (mine & 1) ^ 1)
            fetch(desc_k, row_k + c * 64, col_k, full_k.index(2 * c), bufs_k.index(c))
            fetch(desc_v, row_v + c * 64, col_v, full_k.index(2 * c + 1), bufs_v.index(c))
        for i_g in range(group):
            i_h = i_kv * group + i_g
            row_q, col_q = corner(at_q, i_b, i_h, begin + low)
            row_do, col_do = corner(at_do, i_b, i_h, begin + low)
            for i in range(count):
                slot = turn % ST
                free(empty_q, turn, ST)
                fetch(desc_q, row_q + i * BM, col_q, full_q.index(slot), bufs_q.index(slot))
                free(empty_do, turn, ST)
                fetch(desc_do, row_do + i * BM, col_do, full_do.index(slot), bufs_do.index(slot))
                turn += 1
        mine += 1


@gluon.jit
def numbers(ptr, there, other, BM: gl.constexpr, layout: gl.constexpr, MASKED: gl.constexpr):
    """BM numbers, of which `there` are there, along the columns of a product."""
    o_m = gl.arange(0, BM, gl.SliceLayout(0, layout))
    if MASKED:
        x = gl.load(ptr + o_m, mask=o_m < there, other=other)
    else:
        x = gl.load(ptr + o_m)
    return x


@gluon.jit
def weights(s, base, low, high, query, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """p, keys by queries from `query` on, and the softcap's tanh."""
    t = s
    if FLAGS & SOFTCAP:
        t = 1.0 - 2.0 / (1.0 + gl.exp2(s * factor))
        s = cap * t
    else:
        s = s * factor
    if MASKED:
        o_m = query + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        seen = o_m[None, :] >= low[:, None]
        if FLAGS & LEFT:
            seen = seen & (o_m[None, :] < high[:, None])
        s = gl.where(seen, s, float("-inf"))
    return gl.exp2(s - base[None, :]), t


@gluon.jit
def _step(c, zero, dk, dv, buffers, full, empty, base_ptr, delta_ptr, turn, low, high, query,
          queries, factor, cap, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
          MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """The queries of this turn; `query` is the first one's row in the sequence."""
    layout: gl.constexpr = zero.type.layout
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    there = queries - query
    base = numbers(base_ptr + query, there, float("inf"), BM, layout, MASKED)
    slot = turn % ST
    q, do = buffers[0].index(slot), buffers[1].index(slot)
    # 0, but not to a compiler that would keep the addresses of k and v in registers it lacks
    same = turn >> 30
    k, v = buffers[2].index(c + same), buffers[3].index(c + same)
    ready(full[1], turn, ST)
    if MASKED:
        ready(full[2], turn, ST)
        clean(q, there, BM, D)
        clean(do, there, BM, D)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not MASKED:
        ready(full[2], turn, ST)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    p, t = weights(s, base, low, high, query, factor, cap, MASKED, FLAGS)
    dv = warpgroup_mma(gl.convert_layout(p.to(k.dtype), a_layout), do, dv, is_async=True)
    delta = numbers(delta_ptr + query, there, 0.0, BM, layout, MASKED)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    dx = p * (dp - delta[None, :])
    if FLAGS & SOFTCAP:
        dx *= 1.0 - t * t
    dk = warpgroup_mma(gl.convert_layout(dx.to(k.dtype), a_layout), q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv,))
    mbarrier.arrive(empty[2].index(slot))
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(empty[1].index(slot))
    return dk, dv


@gluon.jit
def _walk(c: gl.constexpr, dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full,
          empty, offsets, sizes, window, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    bufs_k, bufs_v, bufs_q, bufs_do = buffers
    T, S, H, group, units = sizes[0], sizes[1], sizes[2], sizes[4], sizes[8]
    left, right = window
    k, v = bufs_k.index(c), bufs_v.index(c)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zero = gl.zeros([64, BM], gl.float32, s_layout)
    o_n = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    turn = units * 0
    mine = units * 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        i_kv, i_b, begin, queries, i_kb, begin_k, keys, room, row = place(
            unit, offsets, sizes, 128, True, FLAGS
        )
        query, count, inner, outer = queries_seen(row, queries, keys, window, BM, 128, FLAGS)
        row += c * 64
        # each key is seen by the queries from `low` to before `high`
        low = o_n * 0
        high = row + o_n - (keys - queries) + left + 1
        if FLAGS & RIGHT:
            low = row + o_n - (keys - queries) - right
        dk = gl.zeros([64, D], gl.float32, k_layout)
        dv = gl.zeros([64, D], gl.float32, k_layout)
        mbarrier.wait(full[0].index(2 * c), mine & 1)
        mbarrier.wait(full[0].index(2 * c + 1), mine & 1)
        for i_g in range(group):
            i_r = i_b.to(gl.int64) * H + i_kv * group + i_g
            i_r = i_r * (gl.cdiv(T, 4) * 4) + begin
            if FLAGS & RIGHT:
                for i in range(inner):
                    dk, dv = _step(
                        c, zero, dk, dv, (bufs_q, bufs_do, bufs_k, bufs_v), full, empty,
                        base_ptr + i_r, delta_ptr + i_r, turn + i, low, high, query + i * BM,
                        queries, factor, cap, BM, D, ST, True, FLAGS,
                    )  # fmt: skip
            for i in range(inner, outer):
                dk, dv = _step(
                    c, zero, dk, dv, (bufs_q, bufs_do, bufs_k, bufs_v), full, empty, base_ptr + i_r,
                    delta_ptr + i_r, turn + i, low, high, query + i * BM, queries, factor,
                    cap, BM, D, ST, False, FLAGS,
                )  # fmt: skip
            for i in range(outer, count):
                dk, dv = _step(
                    c, zero, dk, dv, (bufs_q, bufs_do, bufs_k, bufs_v), full, empty, base_ptr + i_r,
                    delta_ptr + i_r, turn + i, low, high, query + i * BM, queries, factor,
                    cap, BM, D, ST, True, FLAGS,
                )  # fmt: skip
            turn += count
        mine += 1
        if FLAGS & LENGTHS:  # keys that are not in use
            used = row + gl.arange(0, 64, gl.SliceLayout(1, k_layout)) < keys
            dk = gl.where(used[:, None], dk, 0.0)
            dv = gl.where(used[:, None], dv, 0.0)
        out_k = stage(k, (dk * scale).to(k.dtype), D)
        out_v = stage(v, dv.to(k.dtype), D)
        mbarrier.arrive(empty[0].index(c))
        HKV = H // group
        at = ((i_kb.to(gl.int64) * S + begin_k + row) * HKV + i_kv) * D
        put(dk_ptr + at, out_k, HKV * D, room - row, D)
        put(dv_ptr + at, out_v, HKV * D, room - row, D)


@gluon.jit
def _first(dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets,
           sizes, window, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
           FLAGS: gl.constexpr):  # fmt: skip
    _walk(0, dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets,
          sizes, window, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit
def _second(dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets,
            sizes, window, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
            FLAGS: gl.constexpr):  # fmt: skip
    _walk(1, dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets,
          sizes, window, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "cap", "scale", *_SIZES, *_AT, *_DO_AT])
def softmax_dkv_sm90_kernel(
    desc_q,  # tiles [BM, D]
    desc_k,  # [64, D]
    desc_v,  # [64, D]
    desc_do,  # [BM, D]
    dk_ptr,  # [KB, S, HKV, D]
    dv_ptr,  # [KB, S, HKV, D]
    base_ptr,  # [B, H, R], R = T rounded up to 4: lse in base 2, inf for -inf
    delta_ptr,  # [B, H, R]
    cu_q_ptr,  # [N + 1]
    cu_k_ptr,  # [N + 1]
    lengths_ptr,  # [N]
    factor,
    cap,
    scale,
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
    do_rb,
    do_rh,
    do_ch,
    BM: gl.constexpr,
    D: gl.constexpr,
    ST: gl.constexpr,
    FLAGS: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """grid (programs,); a unit is 128 keys of a head."""
    dtype: gl.constexpr = desc_q.dtype
    bufs_k = gl.allocate_shared_memory(dtype, [2, 64, D], desc_k.layout)
    bufs_v = gl.allocate_shared_memory(dtype, [2, 64, D], desc_v.layout)
    bufs_q = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_q.layout)
    bufs_do = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_do.layout)
    full_k = barriers(4, 1)
    empty_k = barriers(2, 1)
    full_q = barriers(ST, 1)
    empty_q = barriers(ST, 2)
    full_do = barriers(ST, 1)
    empty_do = barriers(ST, 2)
    gl.warp_specialize([
        (_first, (dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale,
                  (bufs_k, bufs_v, bufs_q, bufs_do), (full_k, full_q, full_do),
                  (empty_k, empty_q, empty_do), (cu_q_ptr, cu_k_ptr, lengths_ptr),
                  (T, S, H, N, group, tiles, steps, section, units), (left, right),
                  BM, D, ST, FLAGS)),
        (_second, (dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale,
                   (bufs_k, bufs_v, bufs_q, bufs_do), (full_k, full_q, full_do),
                   (empty_k, empty_q, empty_do), (cu_q_ptr, cu_k_ptr, lengths_ptr),
                   (T, S, H, N, group, tiles, steps, section, units), (left, right),
                   BM, D, ST, FLAGS)),
        (_load, ((desc_q, desc_k, desc_v, desc_do), (bufs_k, bufs_v, bufs_q, bufs_do),
                 (full_k, full_q, full_do), (empty_k, empty_q, empty_do),
                 (cu_q_ptr, cu_k_ptr, lengths_ptr),
                 (T, S, H, N, group, tiles, steps, section, units), (left, right),
                 ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch),
                  (do_rb, do_rh, do_ch)),
                 BM, ST, FLAGS)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
