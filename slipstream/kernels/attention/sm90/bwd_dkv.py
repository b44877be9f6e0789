"""The gradients of k and v for sm_90 and heads of 256: two warpgroups walk over the queries of the
same 64 keys, and one makes dv, one dk.

    p_ts = exp(x_ts - lse_t)      dp_ts = do_t . v_s      dx_ts = p_ts (dp_ts - delta_t)
    dk_s = scale sum_t dx_ts q_t      dv_s = sum_t p_ts do_t

Both gradients of 64 keys would take all registers of a warpgroup, so both make p^T: five products
a tile where four would do. p and dx are made transposed, keys by queries, so that they go from
registers into the products. A program takes all the query heads of its keys: nothing is added by
two.
"""

from slipstream.kernels.attention.sm90.common import (
    COLUMNS_OWN,
    LEFT,
    LENGTHS,
    RIGHT,
    ROWS_OWN,
    SOFTCAP,
    barriers,
    fetch,
    inverse,
    load_scalar,
    locate_tile,
    opaque,
    opaque_range,
    queries_seen,
    stage_through_smem,
    store_scalars,
    store_staged,
    tile_coords,
    wait_empty,
    wait_full,
    where_below,
    where_within,
    zero_tail_rows,
)
from slipstream.kernels.attention.sm90.forward import _AT, _DO_AT, _SIZES
from slipstream.kernels.attention.sm90.tile_scheduler import program_id_volatile
from slipstream.kernels.primitives.gluon_compat import (
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.primitives.smem_scalars import alloc_scalars

# numbers of a unit that each warpgroup writes down
NUM_SCALARS = gl.constexpr(5)


@gluon.jit
def numbers(ptr, there, turn, other, BM: gl.constexpr, layout: gl.constexpr, MASKED: gl.constexpr):
    """BM numbers, of which `there` are there, along the columns of a product."""
    o_m = gl.arange(0, BM, gl.SliceLayout(0, layout))
    if MASKED:
        m_m = opaque_range(o_m, turn, COLUMNS_OWN) < there
        x = gl.load(ptr + o_m, mask=m_m, other=other)
    else:
        x = gl.load(ptr + o_m)
    return x


@gluon.jit
def first_and_width(low, high, window, FLAGS: gl.constexpr):
    """The first query that is seen, and how many are; a side without a bound reads none."""
    width = high * 0
    if (FLAGS & LEFT) and (FLAGS & RIGHT):
        width += window[0] + window[1] + 1
    elif FLAGS & LEFT:
        low *= 0
        width = gl.maximum(high, 0)
    elif not FLAGS & RIGHT:
        low *= 0
    return low, width


@gluon.jit
def seen_by(sight, turn, layout: gl.constexpr, FLAGS: gl.constexpr):
    """The queries that see each of 64 keys: `width`, from `low` on.

    sight: the query at the place of the first key, and the window.
    """
    at, window = sight
    o_n = opaque_range(gl.arange(0, 64, gl.SliceLayout(1, layout)), turn, ROWS_OWN)
    low, high = opaque((at - window[1], at + window[0] + 1), turn)
    return first_and_width(low + o_n, high + o_n, window, FLAGS)


@gluon.jit
def _halves(x):
    """The first columns and the others."""
    x = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return gl.split(gl.permute(x, (0, 2, 1)))


@gluon.jit
def _whole(a, b, like):
    """What _halves makes two of."""
    x = gl.permute(gl.join(a, b), (0, 2, 1))
    return gl.convert_layout(gl.reshape(x, [a.shape[0], 2 * a.shape[1]]), like.type.layout)


@gluon.jit
def _weights(s, base, o_m, low, width, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    if FLAGS & SOFTCAP:
        t = 1.0 - 2.0 * inverse(1.0 + gl.exp2(s * factor))
        s = cap * t
    else:
        s = s * factor
    if MASKED:
        if FLAGS & LEFT:
            s = where_within(s, o_m, low, width)
        else:
            s = where_below(s, low - 1, o_m)
    p = gl.exp2(s - base)
    w = p
    if FLAGS & SOFTCAP:
        w = p * (1.0 - t * t)
    return p, w


@gluon.jit
def _in_parts(s, base, o_m, low, width, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """_weights of a few columns after those of others: of all at once it wants more registers
    than there are."""
    if s.shape[1] == 16:
        p, w = _weights(s, base, o_m, low, width, factor, cap, MASKED, FLAGS)
    else:
        s0, s1 = _halves(s)
        base0, base1 = _halves(base)
        o_m0, o_m1 = _halves(o_m)
        low0, low1 = _halves(low)
        width0, width1 = _halves(width)
        p0, w0 = _in_parts(s0, base0, o_m0, low0, width0, factor, cap, MASKED, FLAGS)
        p1, w1 = _in_parts(s1, base1, o_m1, low1, width1, factor, cap, MASKED, FLAGS)
        p, w = _whole(p0, p1, s), _whole(w0, w1, s)
    return p, w


@gluon.jit
def weights(s, base, sight, o_m, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """p, keys by queries o_m, and what dp - delta is to be multiplied by for dx."""
    if MASKED:
        low, width = sight
        low, width = low[:, None], width[:, None]
    else:
        low, width = o_m[None, :], o_m[None, :]
    if FLAGS & SOFTCAP:
        _, base = gl.broadcast(s, base[None, :])
        _, o_m = gl.broadcast(s, o_m[None, :])
        _, low = gl.broadcast(s, low)
        _, width = gl.broadcast(s, width)
        p, w = _in_parts(s, base, o_m, low, width, factor, cap, MASKED, FLAGS)
    else:
        p, w = _weights(s, base[None, :], o_m[None, :], low, width, factor, cap, MASKED, FLAGS)
    return p, w


@gluon.jit
def _load(descs, buffers, full, empty, offsets, sizes, window, ats, BM: gl.constexpr,
          ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    desc_q, desc_k, desc_v, desc_do = descs
    bufs_k, bufs_q, bufs_do = buffers
    full_k, full_q, full_do = full
    empty_k, empty_q, empty_do = empty
    at_q, at_k, at_v, at_do = ats
    group, units = sizes[4], sizes[8]
    turn = units * 0
    mine = units * 0
    for unit in range(program_id_volatile(turn), units, gl.num_programs(0)):
        i_kv, i_b, begin, queries, i_kb, begin_k, keys, _, row, _ = locate_tile(
            unit, offsets, sizes, 64, True, FLAGS
        )
        low, count, _, _ = queries_seen(row, queries, keys, window, BM, 64, FLAGS)
        row_k, col_k = tile_coords(at_k, i_kb, i_kv, begin_k + row)
        row_v, col_v = tile_coords(at_v, i_kb, i_kv, begin_k + row)
        mbarrier.wait(empty_k.index(0), (mine & 1) ^ 1)
        fetch(desc_k, row_k, col_k, full_k.index(0), bufs_k.index(0))
        mbarrier.wait(empty_k.index(1), (mine & 1) ^ 1)
        fetch(desc_v, row_v, col_v, full_k.index(1), bufs_k.index(1))
        for i_g in range(group):
            i_h = i_kv * group + i_g
            row_q, col_q = tile_coords(at_q, i_b, i_h, begin + low)
            row_do, col_do = tile_coords(at_do, i_b, i_h, begin + low)
            for i in range(count):
                slot = turn % ST
                wait_empty(empty_q, turn, ST)
                fetch(desc_q, row_q + i * BM, col_q, full_q.index(slot), bufs_q.index(slot))
                wait_empty(empty_do, turn, ST)
                fetch(desc_do, row_do + i * BM, col_do, full_do.index(slot), bufs_do.index(slot))
                turn += 1
        mine += 1


@gluon.jit
def _values(zero, dv, buffers, full, empty, base_ptr, delta_ptr, turn, sight, query, queries,
            factor, cap, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
            MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """dv from the queries of this turn."""
    bufs_k, bufs_q, bufs_do = buffers
    layout: gl.constexpr = zero.type.layout
    there = queries - query
    base = numbers(base_ptr + query, there, turn, float("inf"), BM, layout, MASKED)
    slot = turn % ST
    q, do = bufs_q.index(slot), bufs_do.index(slot)
    wait_full(full[1], turn, ST)
    if MASKED:
        zero_tail_rows((q,), there, turn, BM, D)
    k = bufs_k.index(turn >> 30)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(empty[1].index(slot))
    if MASKED:
        sight = seen_by(sight, turn, layout, FLAGS)
    o_m = opaque_range(gl.arange(0, BM, gl.SliceLayout(0, layout)), turn, COLUMNS_OWN) + query
    p, _ = weights(s, base, sight, o_m, factor, cap, MASKED, FLAGS)
    wait_full(full[2], turn, ST)
    if MASKED:
        zero_tail_rows((do,), there, turn, BM, D)
    p = gl.convert_layout(p.to(k.dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    mbarrier.arrive(empty[2].index(slot))
    return dv


@gluon.jit
def _keys(zero, dk, buffers, full, empty, base_ptr, delta_ptr, turn, sight, query, queries,
          factor, cap, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
          MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """dk from the queries of this turn."""
    bufs_k, bufs_q, bufs_do = buffers
    layout: gl.constexpr = zero.type.layout
    there = queries - query
    base = numbers(base_ptr + query, there, turn, float("inf"), BM, layout, MASKED)
    slot = turn % ST
    q, do = bufs_q.index(slot), bufs_do.index(slot)
    wait_full(full[1], turn, ST)
    if MASKED:
        wait_full(full[2], turn, ST)
        zero_tail_rows((q,), there, turn, BM, D)
        zero_tail_rows((do,), there, turn, BM, D)
    # turn >> 30 is 0, but not to a compiler that would keep addresses in registers it lacks
    k, v = bufs_k.index(turn >> 30), bufs_k.index(1 + (turn >> 30))
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not MASKED:
        wait_full(full[2], turn, ST)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    if MASKED:
        sight = seen_by(sight, turn, layout, FLAGS)
    o_m = opaque_range(gl.arange(0, BM, gl.SliceLayout(0, layout)), turn, COLUMNS_OWN) + query
    _, w = weights(s, base, sight, o_m, factor, cap, MASKED, FLAGS)
    delta = numbers(delta_ptr + query, there, turn, 0.0, BM, layout, MASKED)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(empty[2].index(slot))
    dx = w * (dp - delta[None, :])
    dx = gl.convert_layout(dx.to(k.dtype), gl.DotOperandLayout(0, dk.type.layout, 2))
    dk = warpgroup_mma(dx, q, dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(empty[1].index(slot))
    return dk


@gluon.jit
def _query_loop(step: gl.constexpr, KEYS: gl.constexpr, out_ptr, out_buffers, base_ptr, delta_ptr,
                factor, cap, scale, buffers, full, empty, offsets, sizes, window, pad,
                BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
                FLAGS: gl.constexpr):  # fmt: skip
    bufs_k = buffers[0]
    group, units = sizes[4], sizes[8]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zero = gl.zeros([64, BM], gl.float32, s_layout)
    turn = units * 0
    mine = units * 0
    for unit in range(program_id_volatile(turn), units, gl.num_programs(0)):
        i_kv, i_b, begin, queries, i_kb, begin_k, keys, room, row, _ = locate_tile(
            unit, offsets, sizes, 64, True, FLAGS
        )
        sides = opaque(window, turn)
        query, count, inner, outer = queries_seen(row, queries, keys, sides, BM, 64, FLAGS)
        sight = (row - (keys - queries), sides)
        spot = (row, i_kv, i_kb, begin_k, room)
        store_scalars(pad, spot, KEYS * NUM_SCALARS, D)
        acc = gl.zeros([64, D], gl.float32, k_layout)
        mbarrier.wait(full[0].index(0), mine & 1)
        if KEYS:
            mbarrier.wait(full[0].index(1), mine & 1)
        for i_g in range(group):
            T, H = opaque((sizes[0], sizes[2]), turn)
            i_r = i_b.to(gl.int64) * H + i_kv * group + i_g
            i_r = i_r * (gl.cdiv(T, 4) * 4) + begin
            if FLAGS & RIGHT:
                for i in range(inner):
                    acc = step(
                        zero, acc, buffers, full, empty, base_ptr + i_r, delta_ptr + i_r, turn + i,
                        sight, query + i * BM, queries, factor, cap, BM, D, ST, True, FLAGS,
                    )  # fmt: skip
            for i in range(inner, outer):
                acc = step(
                    zero, acc, buffers, full, empty, base_ptr + i_r, delta_ptr + i_r, turn + i,
                    sight, query + i * BM, queries, factor, cap, BM, D, ST, False, FLAGS,
                )  # fmt: skip
            for i in range(outer, count):
                acc = step(
                    zero, acc, buffers, full, empty, base_ptr + i_r, delta_ptr + i_r, turn + i,
                    sight, query + i * BM, queries, factor, cap, BM, D, ST, True, FLAGS,
                )  # fmt: skip
            turn += count
        mine += 1
        mbarrier.arrive(empty[0].index(0))
        if FLAGS & LENGTHS:  # keys that are not in use
            used = row + gl.arange(0, 64, gl.SliceLayout(1, k_layout)) < keys
            acc = gl.where(used[:, None], acc, 0.0)
        out = stage_through_smem(
            out_buffers.index(KEYS + (turn >> 30)), (acc * scale).to(bufs_k.dtype), D
        )
        if KEYS:
            mbarrier.arrive(empty[0].index(1))
        row, i_kv, i_kb, begin_k, room = load_scalar(pad, spot, KEYS * NUM_SCALARS, D)
        S, H, each = opaque((sizes[1], sizes[2], group), turn)
        HKV = H // each
        at = ((i_kb.to(gl.int64) * S + begin_k + row) * HKV + i_kv) * D
        store_staged(out_ptr + at, out, HKV * D, room - row, turn, D)


@gluon.jit
def _first(dv_ptr, base_ptr, delta_ptr, factor, cap, buffers, bufs_dv, full, empty, offsets,
           sizes, window, pad, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
           FLAGS: gl.constexpr):  # fmt: skip
    _query_loop(_values, 0, dv_ptr, bufs_dv, base_ptr, delta_ptr, factor, cap, 1.0, buffers, full,
          empty, offsets, sizes, window, pad, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit
def _second(dk_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes,
            window, pad, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
            FLAGS: gl.constexpr):  # fmt: skip
    _query_loop(_keys, 1, dk_ptr, buffers[0], base_ptr, delta_ptr, factor, cap, scale,
          buffers, full, empty, offsets, sizes, window, pad, BM, D, ST, FLAGS)  # fmt: skip


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
    """grid (programs,); a unit is 64 keys of a head."""
    dtype: gl.constexpr = desc_q.dtype
    bufs_k = gl.allocate_shared_memory(dtype, [2, 64, D], desc_k.layout)  # of k, of v
    bufs_dv = gl.allocate_shared_memory(dtype, [1, 64, D], desc_v.layout)
    bufs_q = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_q.layout)
    bufs_do = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_do.layout)
    full_k = barriers(2, 1)
    empty_k = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(empty_k.index(0), count=2)
    mbarrier.init(empty_k.index(1), count=1)
    full_q = barriers(ST, 1)
    empty_q = barriers(ST, 2)
    full_do = barriers(ST, 1)
    empty_do = barriers(ST, 2)
    pad = alloc_scalars(2 * NUM_SCALARS)
    gl.warp_specialize([
        (_first, (dv_ptr, base_ptr, delta_ptr, factor, cap, (bufs_k, bufs_q, bufs_do),
                  bufs_dv, (full_k, full_q, full_do), (empty_k, empty_q, empty_do),
                  (cu_q_ptr, cu_k_ptr, lengths_ptr),
                  (T, S, H, N, group, tiles, steps, section, units), (left, right),
                  pad, BM, D, ST, FLAGS)),
        (_second, (dk_ptr, base_ptr, delta_ptr, factor, cap, scale, (bufs_k, bufs_q, bufs_do),
                   (full_k, full_q, full_do), (empty_k, empty_q, empty_do),
                   (cu_q_ptr, cu_k_ptr, lengths_ptr),
                   (T, S, H, N, group, tiles, steps, section, units), (left, right),
                   pad, BM, D, ST, FLAGS)),
        (_load, ((desc_q, desc_k, desc_v, desc_do), (bufs_k, bufs_q, bufs_do),
                 (full_k, full_q, full_do), (empty_k, empty_q, empty_do),
                 (cu_q_ptr, cu_k_ptr, lengths_ptr),
                 (T, S, H, N, group, tiles, steps, section, units), (left, right),
                 ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch),
                  (do_rb, do_rh, do_ch)),
                 BM, ST, FLAGS)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
