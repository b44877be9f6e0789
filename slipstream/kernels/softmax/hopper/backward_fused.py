# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
"""All three gradients in one walk for sm_90: five products a tile where two kernels make seven.

backward_kv.py's walk, and of each tile

    dq_t += scale sum_s dx_ts k_s

over the 128 keys of both warpgroups: dx goes through shared memory, each warpgroup makes half the
columns, a turn late, so that nothing waits for it. A warp of its own adds the tile to dq's float32
sums in global memory by TMA. Sums are to come out the same each time, so key tiles add to a tile of
queries one after another, from the last keys to the first: `turns` counts those that have, and
who comes later waits. Units are numbered in that order too, so what is waited for has begun.
"""

from slipstream.kernels.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.softmax.hopper.backward_kv import numbers, weights
from slipstream.kernels.softmax.hopper.common import (
    RIGHT,
    SOFTCAP,
    barriers,
    clean,
    corner,
    fetch,
    free,
    pair_of_unit,
    put,
    queries_seen,
    ready,
    stage,
    unit_of,
)
from slipstream.kernels.softmax.hopper.forward import _AT, _DO_AT, _SIZES
from slipstream.kernels.softmax.hopper.turns import reduce_out, turn_done, turn_of


@gluon.jit
def _place(unit, sizes):
    """Head of keys, batch row, and first key, the last keys first."""
    heads = sizes[2] // sizes[4]
    tile, pair = pair_of_unit(unit, sizes[5], heads * sizes[3], sizes[7])
    return pair % heads, pair // heads, (sizes[5] - 1 - tile) * 128


@gluon.jit
def _load(descs, buffers, full, empty, sizes, window, ats, BM: gl.constexpr, ST: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    desc_q, desc_k, desc_v, desc_do = descs
    bufs_k, bufs_v, bufs_q, bufs_do = buffers
    full_k, full_q, full_do = full
    empty_k, empty_q, empty_do = empty
    at_q, at_k, at_v, at_do = ats
    T, S, group, units = sizes[0], sizes[1], sizes[4], sizes[8]
    turn = units * 0
    mine = units * 0
    for following in range(gl.program_id(0), units, gl.num_programs(0)):
        unit = unit_of(following, units)
        i_kv, i_b, row = _place(unit, sizes)
        low, count, _, _ = queries_seen(row, T, S, window, BM, 128, FLAGS)
        row_k, col_k = corner(at_k, i_b, i_kv, row)
        row_v, col_v = corner(at_v, i_b, i_kv, row)
        for c in gl.static_range(2):
            # one warpgroup's products read the other's keys
            mbarrier.wait(empty_k.index(0), (mine & 1) ^ 1)
            fetch(desc_k, row_k + c * 64, col_k, full_k.index(2 * c), bufs_k.index(c))
            fetch(desc_v, row_v + c * 64, col_v, full_k.index(2 * c + 1), bufs_v.index(c))
        for i_g in range(group):
            i_h = i_kv * group + i_g
            row_q, col_q = corner(at_q, i_b, i_h, low)
            row_do, col_do = corner(at_do, i_b, i_h, low)
            for i in range(count):
                slot = turn % ST
                free(empty_q, turn, ST)
                fetch(desc_q, row_q + i * BM, col_q, full_q.index(slot), bufs_q.index(slot))
                free(empty_do, turn, ST)
                fetch(desc_do, row_do + i * BM, col_do, full_do.index(slot), bufs_do.index(slot))
                turn += 1
        mine += 1


@gluon.jit
def _add(desc_dq, turns_ptr, buffers, full, empty, sizes, window, BM: gl.constexpr,
         D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """Adds each tile of dq once all later keys' are there; a turn is passed on a turn late."""
    T, S, H, group, units = sizes[0], sizes[1], sizes[2], sizes[4], sizes[8]
    turn = units * 0
    tiles = gl.cdiv(T, BM)
    for following in range(gl.program_id(0), units, gl.num_programs(0)):
        unit = unit_of(following, units)
        i_kv, i_b, row = _place(unit, sizes)
        low, count, _, _ = queries_seen(row, T, S, window, BM, 128, FLAGS)
        for i_g in range(group):
            i_h = i_kv * group + i_g
            p_turns = turns_ptr + (i_b * H + i_h) * tiles + low // BM
            for i in range(count):
                query = low + i * BM
                # the tiles of keys after these that the tile of queries sees
                last = gl.cdiv(S, 128) - 1
                if FLAGS & RIGHT:
                    end = gl.minimum(query + BM, T) - 1 + S - T + window[1]
                    last = gl.minimum(last, gl.maximum(end, row) // 128)
                place = last - row // 128
                ready(full, turn, 1)
                while turn_of(p_turns + i) < place:
                    pass
                at = i_b * tiles * BM + query
                for c in gl.static_range(2):
                    if BM == 128:
                        reduce_out(desc_dq, [at + c * 64, i_h * D], buffers.index(c))
                    else:
                        reduce_out(desc_dq, [at, i_h * D + c * (D // 2)], buffers.index(c))
                store_wait(0)
                mbarrier.arrive(empty.index(0))
                turn_done(p_turns + i, place + 1)
                turn += 1


@gluon.jit
def _dq(c: gl.constexpr, bufs_k, bufs_ds, slot, zero, D: gl.constexpr):
    """This warpgroup's share of dx k: 64 of 128 queries, or half the columns of 64."""
    WIDTH: gl.constexpr = zero.shape[1]
    QUERY: gl.constexpr = c * 64 if WIDTH == D else 0
    COLUMN: gl.constexpr = 0 if WIDTH == D else c * WIDTH
    dq = zero
    for i in gl.static_range(2):
        ds = bufs_ds.index(slot * 2 + i).slice(QUERY, 64, 1).permute((1, 0))
        k = bufs_k.index(i).slice(COLUMN, WIDTH, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _hand(c: gl.constexpr, dq, buffers, full, empty, turn, scale):
    """Half a tile to the warp that adds it."""
    free(empty[4], turn, 1)
    buffers[5].index(c).store(dq * scale)
    fence_async_shared()
    mbarrier.arrive(full[4].index(0))
    mbarrier.arrive(empty[3].index(turn & 1))


@gluon.jit
def _step(c: gl.constexpr, zero, zero_q, dk, dv, buffers, full, empty, base_ptr, delta_ptr, turn,
          first, low, query, queries, factor, cap, scale, BM: gl.constexpr, D: gl.constexpr,
          ST: gl.constexpr, MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """The queries of this turn; `query` is the first one's row in the sequence."""
    layout: gl.constexpr = zero.type.layout
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    bufs_k, bufs_v, bufs_q, bufs_do, bufs_ds, _ = buffers
    there = queries - query
    slot = turn % ST
    q, do = bufs_q.index(slot), bufs_do.index(slot)
    # 0, but not to a compiler that would keep the addresses of k and v in registers it lacks
    same = turn >> 30
    ready(full[1], turn, ST)
    if MASKED:
        ready(full[2], turn, ST)
        clean(q, there, BM, D)
        clean(do, there, BM, D)
    # of the turn before; in a unit's first turn it is made of what there is, and dropped
    if turn > first:
        ready(full[3], turn - 1, 2)
    dq = _dq(c, bufs_k, bufs_ds, (turn + 1) & 1, zero_q, D)
    s = warpgroup_mma(bufs_k.index(c + same), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    if turn > first:
        _hand(c, dq, buffers, full, empty, turn - 1, scale)
    base = numbers(base_ptr + query, there, float("inf"), BM, layout, MASKED)
    if not MASKED:
        ready(full[2], turn, ST)
    dp = warpgroup_mma(
        bufs_v.index(c + same), do.permute((1, 0)), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(1, deps=(s,))
    p, t = weights(s, base, low, low, query, factor, cap, MASKED, FLAGS)
    dv = warpgroup_mma(gl.convert_layout(p.to(q.dtype), a_layout), do, dv, is_async=True)
    delta = numbers(delta_ptr + query, there, 0.0, BM, layout, MASKED)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    dx = p * (dp - delta[None, :])
    if FLAGS & SOFTCAP:
        dx *= 1.0 - t * t
    dx = dx.to(q.dtype)
    dk = warpgroup_mma(gl.convert_layout(dx, a_layout), q, dk, is_async=True)
    free(empty[3], turn, 2)
    bufs_ds.index((turn & 1) * 2 + c).store(dx)
    fence_async_shared()
    mbarrier.arrive(full[3].index(turn & 1))
    dv = warpgroup_mma_wait(1, deps=(dv,))
    mbarrier.arrive(empty[2].index(slot))
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(empty[1].index(slot))
    return dk, dv


@gluon.jit
def _walk(c: gl.constexpr, dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full,
          empty, sizes, window, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    T, S, H, group, units = sizes[0], sizes[1], sizes[2], sizes[4], sizes[8]
    k, v = buffers[0].index(c), buffers[1].index(c)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WIDTH: gl.constexpr = D if BM == 128 else D // 2
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    zero = gl.zeros([64, BM], gl.float32, s_layout)
    zero_q = gl.zeros([64, WIDTH], gl.float32, q_layout)
    o_n = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    turn = units * 0
    mine = units * 0
    for following in range(gl.program_id(0), units, gl.num_programs(0)):
        unit = unit_of(following, units)
        i_kv, i_b, row = _place(unit, sizes)
        query, count, inner, outer = queries_seen(row, T, S, window, BM, 128, FLAGS)
        row += c * 64
        # each key is seen by the queries from `low` on
        low = o_n * 0
        if FLAGS & RIGHT:
            low = row + o_n - (S - T) - window[1]
        if row - c * 64 + 128 > S:  # keys that are not there are to add nothing to dq
            outer = inner
            low = gl.where(row + o_n < S, low, 1 << 30)
        dk = gl.zeros([64, D], gl.float32, k_layout)
        dv = gl.zeros([64, D], gl.float32, k_layout)
        for tile in gl.static_range(4):
            mbarrier.wait(full[0].index(tile), mine & 1)
        clean(k, S - row, 64, D)
        clean(v, S - row, 64, D)
        first = turn
        for i_g in range(group):
            i_r = i_b.to(gl.int64) * H + i_kv * group + i_g
            i_r = i_r * (gl.cdiv(T, 4) * 4)
            if FLAGS & RIGHT:
                for i in range(inner):
                    dk, dv = _step(
                        c, zero, zero_q, dk, dv, buffers, full, empty, base_ptr + i_r,
                        delta_ptr + i_r, turn + i, first, low, query + i * BM, T, factor,
                        cap, scale, BM, D, ST, True, FLAGS,
                    )  # fmt: skip
            for i in range(inner, outer):
                dk, dv = _step(
                    c, zero, zero_q, dk, dv, buffers, full, empty, base_ptr + i_r,
                    delta_ptr + i_r, turn + i, first, low, query + i * BM, T, factor,
                    cap, scale, BM, D, ST, False, FLAGS,
                )  # fmt: skip
            for i in range(outer, count):
                dk, dv = _step(
                    c, zero, zero_q, dk, dv, buffers, full, empty, base_ptr + i_r,
                    delta_ptr + i_r, turn + i, first, low, query + i * BM, T, factor,
                    cap, scale, BM, D, ST, True, FLAGS,
                )  # fmt: skip
            turn += count
        mine += 1
        ready(full[3], turn - 1, 2)
        dq = _dq(c, buffers[0], buffers[4], (turn + 1) & 1, zero_q, D)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _hand(c, dq, buffers, full, empty, turn - 1, scale)
        # both warpgroups are done with k once both have handed over the last tile
        mbarrier.arrive(empty[5].index(0))
        mbarrier.wait(empty[5].index(0), (mine & 1) ^ 1)
        out_k = stage(k, (dk * scale).to(k.dtype), D)
        out_v = stage(v, dv.to(k.dtype), D)
        mbarrier.arrive(empty[0].index(0))
        HKV = H // group
        at = ((i_b.to(gl.int64) * S + row) * HKV + i_kv) * D
        put(dk_ptr + at, out_k, HKV * D, S - row, D)
        put(dv_ptr + at, out_v, HKV * D, S - row, D)


@gluon.jit
def _first(dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, sizes,
           window, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
           FLAGS: gl.constexpr):  # fmt: skip
    _walk(0, dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, sizes,
          window, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit
def _second(dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, sizes,
            window, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
            FLAGS: gl.constexpr):  # fmt: skip
    _walk(1, dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, sizes,
          window, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "cap", "scale", *_SIZES, *_AT, *_DO_AT])
def softmax_bwd_sm90_kernel(
    desc_q,  # tiles [BM, D]
    desc_k,  # [64, D]
    desc_v,  # [64, D]
    desc_do,  # [BM, D]
    desc_dq,  # [64, D or D / 2] of float32 [B, T rounded up to BM, H, D], zeros
    turns_ptr,  # [B, H, tiles of queries], zeros
    dk_ptr,  # [B, S, HKV, D]
    dv_ptr,  # [B, S, HKV, D]
    base_ptr,  # [B, H, R], R = T rounded up to 4: lse in base 2, inf for -inf
    delta_ptr,  # [B, H, R]
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
    """grid (programs,), no more than run at a time; a unit is 128 keys of a head."""
    dtype: gl.constexpr = desc_q.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BM], dtype)
    bufs_k = gl.allocate_shared_memory(dtype, [2, 64, D], desc_k.layout)
    bufs_v = gl.allocate_shared_memory(dtype, [2, 64, D], desc_v.layout)
    bufs_q = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_q.layout)
    bufs_do = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_do.layout)
    bufs_ds = gl.allocate_shared_memory(dtype, [4, 64, BM], ds_layout)
    WIDTH: gl.constexpr = D if BM == 128 else D // 2
    bufs_dq = gl.allocate_shared_memory(gl.float32, [2, 64, WIDTH], desc_dq.layout)
    full_k = barriers(4, 1)
    empty_k = barriers(1, 2)
    full_q = barriers(ST, 1)
    empty_q = barriers(ST, 2)
    full_do = barriers(ST, 1)
    empty_do = barriers(ST, 2)
    full_ds = barriers(2, 2)
    empty_ds = barriers(2, 2)
    full_dq = barriers(1, 2)
    empty_dq = barriers(1, 1)
    done = barriers(1, 2)
    gl.warp_specialize([
        (_first, (dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale,
                  (bufs_k, bufs_v, bufs_q, bufs_do, bufs_ds, bufs_dq),
                  (full_k, full_q, full_do, full_ds, full_dq),
                  (empty_k, empty_q, empty_do, empty_ds, empty_dq, done),
                  (T, S, H, N, group, tiles, steps, section, units), (left, right),
                  BM, D, ST, FLAGS)),
        (_second, (dk_ptr, dv_ptr, base_ptr, delta_ptr, factor, cap, scale,
                   (bufs_k, bufs_v, bufs_q, bufs_do, bufs_ds, bufs_dq),
                   (full_k, full_q, full_do, full_ds, full_dq),
                   (empty_k, empty_q, empty_do, empty_ds, empty_dq, done),
                   (T, S, H, N, group, tiles, steps, section, units), (left, right),
                   BM, D, ST, FLAGS)),
        (_load, ((desc_q, desc_k, desc_v, desc_do), (bufs_k, bufs_v, bufs_q, bufs_do),
                 (full_k, full_q, full_do), (empty_k, empty_q, empty_do),
                 (T, S, H, N, group, tiles, steps, section, units), (left, right),
                 ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch),
                  (do_rb, do_rh, do_ch)),
                 BM, ST, FLAGS)),
        (_add, (desc_dq, turns_ptr, bufs_dq, full_dq, empty_dq,
                (T, S, H, N, group, tiles, steps, section, units), (left, right),
                BM, D, FLAGS)),
    ], [4, 1, 1], [CONSUMER, PRODUCER, PRODUCER])  # fmt: skip
