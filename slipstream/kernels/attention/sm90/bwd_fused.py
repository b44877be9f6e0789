"""All three gradients in one walk for sm_90: five products a tile where two kernels make seven.

Two warpgroups of 64 keys walk over their queries as in bwd_dkv.py, from the last to the first,
and make of each tile of queries

    dq_t += sum_s dx_ts k_s

over the 128 keys of both warpgroups, to which dx goes through shared memory, a turn late, so that
nothing waits for it. At 128 each makes half the columns; at 64 they take turns, and k and v stay in
registers. Two warps add the tiles to dq's float32 sums in global memory by TMA, turn about. Sums
are to come out the same each time, so tiles of keys add to a tile of queries one after another,
from the first keys on, which write it: `turns` counts those that have, and who comes later waits.
Units are numbered in that order too, so what is waited for has begun.
"""

from slipstream.kernels.attention.sm90.bwd_dkv import first_and_width, weights
from slipstream.kernels.attention.sm90.bwd_dq_accumulate import add_even, add_odd, tile_of_sequence
from slipstream.kernels.attention.sm90.common import (
    RIGHT,
    ROWS_OWN,
    SOFTCAP,
    SPARE_REGISTERS,
    barriers,
    fetch,
    load_scalar,
    locate_tile,
    opaque,
    opaque_if_wide,
    opaque_range,
    queries_seen,
    stage_through_smem,
    store_scalars,
    store_staged,
    tile_coords,
    wait_empty,
    wait_full,
    zero_tail_rows,
)
from slipstream.kernels.attention.sm90.forward import _AT, _DO_AT, _SIZES
from slipstream.kernels.attention.sm90.tile_scheduler import program_id_volatile
from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.primitives.smem_scalars import alloc_scalars

# numbers of a unit that each warpgroup writes down
NUM_SCALARS = gl.constexpr(11)


@gluon.jit
def _fetch_both(desc, row, col, buffer, desc_rows, at, rows, full):
    """A tile and a number of each of its rows."""
    mbarrier.expect(full, desc.block_type.nbytes + desc_rows.block_type.nbytes)
    copy_in(desc, [row, col], full, buffer)
    copy_in(desc_rows, [at], full, rows)


@gluon.jit
def _load(descs, buffers, full, empty_x, offsets, sizes, window, ats, BM: gl.constexpr,
          ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    desc_q, desc_k, desc_v, desc_do, desc_base, desc_delta = descs
    buf_k, buf_v, bufs_q, bufs_do, bufs_base, bufs_delta = buffers
    full_k, full_q, full_do = full
    at_q, at_k, at_v, at_do = ats
    units = sizes[8]
    unit = program_id_volatile(units)
    turn = unit >> 31  # 0, but not to a compiler
    group = opaque(sizes, turn)[4]
    i_kv, i_b, begin, queries, i_kb, begin_k, keys, _, row, i_n = locate_tile(
        unit, offsets, sizes, 128, True, FLAGS
    )
    sides = opaque(window, turn)
    low, count, _, _ = queries_seen(row, queries, keys, sides, BM, 128, FLAGS, 0)
    row_k, col_k = tile_coords(at_k, i_kb, i_kv, begin_k + row)
    row_v, col_v = tile_coords(at_v, i_kb, i_kv, begin_k + row)
    fetch(desc_k, row_k, col_k, full_k.index(0), buf_k.index(0))
    fetch(desc_v, row_v, col_v, full_k.index(1), buf_v.index(0))
    for i_g in range(group):
        i_h = i_kv * group + i_g
        row_q, col_q = tile_coords(opaque(at_q, turn), i_b, i_h, begin + low)
        row_do, col_do = tile_coords(opaque(at_do, turn), i_b, i_h, begin + low)
        i_r = tile_of_sequence(i_b, i_h, i_n, begin, opaque(sizes, turn), BM, FLAGS) * BM + low
        for i in range(count):
            slot = turn % ST
            on = (count - 1 - i) * BM
            wait_empty(empty_x, turn, ST)
            _fetch_both(desc_q, row_q + on, col_q, bufs_q.index(slot), desc_base, i_r + on,
                        bufs_base.index(slot), full_q.index(slot))  # fmt: skip
            _fetch_both(desc_do, row_do + on, col_do, bufs_do.index(slot), desc_delta, i_r + on,
                        bufs_delta.index(slot), full_do.index(slot))  # fmt: skip
            turn += 1


@gluon.jit
def _share(c: gl.constexpr, buf_k, dx, zero, turn):
    """Half the columns of dx k."""
    WIDTH: gl.constexpr = zero.shape[1]
    k = buf_k.index(turn >> 30).slice(c * WIDTH, WIDTH, 1)
    return warpgroup_mma(dx.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def _half(c: gl.constexpr, dq, bufs_dq, full, empty, turn):
    """Half a tile to the warp that adds it."""
    wait_empty(empty[1], turn, 2)
    bufs_dq.index(turn % 2 * 2 + c).store(dq)
    fence_async_shared()
    mbarrier.arrive(full[4].index(turn % 2))


@gluon.jit
def _whole(c: gl.constexpr, buf_k, bufs_dx, bufs_dq, full, empty, zero, turn):
    """dq of a turn, if it is this warpgroup's."""
    if (turn >= 0) & (turn % 2 == c):
        slot = turn % 2
        wait_full(full[3], turn, 2)
        dx = bufs_dx.index(slot).permute((1, 0))
        dq = warpgroup_mma(dx, buf_k.index(0), zero, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        a, b = gl.split(gl.permute(gl.reshape(dq, [dq.shape[0], 2, 32]), (0, 2, 1)))
        wait_empty(empty[1], turn, 2)
        bufs_dq.index(2 * slot).store(a)
        bufs_dq.index(2 * slot + 1).store(b)
        fence_async_shared()
        mbarrier.arrive(full[4].index(slot))
        mbarrier.arrive(empty[3].index(slot))


@gluon.jit
def _sight(at, row, keys, window, turn, layout: gl.constexpr, D: gl.constexpr,
           FLAGS: gl.constexpr):  # fmt: skip
    """The queries that see each of 64 keys: `width`, from `low` on. at: the first key, as a row of
    queries."""
    turn = opaque_if_wide(turn, D)
    left, right = opaque(window, turn)
    o_n = opaque_range(gl.arange(0, 64, gl.SliceLayout(1, layout)), turn, ROWS_OWN)
    low, width = first_and_width(at + o_n - right, at + o_n + left + 1, (left, right), FLAGS)
    # a key that is not there
    return gl.where(row + o_n < keys, low, 1 << 30), width


@gluon.jit
def _step(c: gl.constexpr, zero, zero_q, held, dk, dv, buffers, full, empty, turn, sight,
          query, queries, factor, cap, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
          MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """The queries of this turn; `query` is the first one's row in the sequence."""
    layout: gl.constexpr = zero.type.layout
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    buf_k, buf_v, bufs_q, bufs_do, bufs_dx, bufs_dq, bufs_base, bufs_delta = buffers
    there = queries - query
    slot = turn % ST
    q, do = bufs_q.index(slot), bufs_do.index(slot)
    if D == 64:
        k, v = held
    else:
        # 0, but not to a compiler that would keep the addresses of k and v in registers it lacks
        same = turn >> 30
        k, v = buf_k.index(same).slice(c * 64, 64), buf_v.index(same).slice(c * 64, 64)
    wait_full(full[1], turn, ST)
    if MASKED:
        wait_full(full[2], turn, ST)
        zero_tail_rows((q, do), there, turn, BM, D)
    if D != 64:
        # in a unit's first turn it is made of what there is, and dropped
        before = turn - 1
        if before >= 0:
            wait_full(full[3], before, 2)
        dq = _share(c, buf_k, bufs_dx.index((turn + 1) % 2), zero_q, turn)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    if D != 64:
        dq = warpgroup_mma_wait(1, deps=(dq,))
        if before >= 0:
            _half(c, dq, bufs_dq, full, empty, before)
    if not MASKED:
        wait_full(full[2], turn, ST)
    delta = bufs_delta.index(slot).load(gl.SliceLayout(0, layout))
    dp = gl.expand_dims(0.0 - delta, 0) + zero
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
    base = bufs_base.index(slot).load(gl.SliceLayout(0, layout))
    s = warpgroup_mma_wait(1, deps=(s,))
    o_m = query + gl.arange(0, BM, gl.SliceLayout(0, layout))
    p, w = weights(s, base, sight, o_m, factor, cap, MASKED, FLAGS)
    dv = warpgroup_mma(gl.convert_layout(p.to(q.dtype), a_layout), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    dx = (w * dp).to(q.dtype)
    dk = warpgroup_mma(gl.convert_layout(dx, a_layout), q, dk, is_async=True)
    if D == 64:
        wait_empty(empty[3], turn, 2)
    bufs_dx.index(turn % 2).slice(c * 64, 64).store(dx)
    fence_async_shared()
    mbarrier.arrive(full[3].index(turn % 2))
    if D == 64:
        _whole(c, buf_k, bufs_dx, bufs_dq, full, empty, zero_q, turn - 1)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(empty[0].index(slot))
    return dk, dv


@gluon.jit
def _unit(c: gl.constexpr, unit, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets,
          sizes, window, pad, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    group = sizes[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WIDTH: gl.constexpr = D if D == 64 else D // 2
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    zero = gl.zeros([64, BM], gl.float32, s_layout)
    zero_q = gl.zeros([64, WIDTH], gl.float32, q_layout)
    turn = unit >> 31  # 0, but not to a compiler
    k, v = buffers[0].index(turn).slice(c * 64, 64), buffers[1].index(turn).slice(c * 64, 64)
    i_kv, _, _, queries, i_kb, begin_k, keys, room, row, _ = locate_tile(
        unit, offsets, sizes, 128, True, FLAGS
    )
    query, count, inner, outer = queries_seen(
        row, queries, keys, opaque(window, turn), BM, 128, FLAGS, 0
    )
    if row + 128 > keys:  # keys that are not there are to add nothing to dq
        outer = inner
    row += c * 64
    FIRST: gl.constexpr = c * NUM_SCALARS
    known = (query + (count - 1) * BM, count, inner, outer, queries)
    known = known + (row, keys, i_kv, i_kb, begin_k, room)
    store_scalars(pad, known, FIRST, D)
    dk = gl.zeros([64, D], gl.float32, k_layout)
    dv = gl.zeros([64, D], gl.float32, k_layout)
    for tile in gl.static_range(2):
        mbarrier.wait(full[0].index(tile), 0)
    zero_tail_rows((k, v), keys - row, turn, 64, D)
    held = (zero, zero)
    if D == 64:
        k_regs: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
        held = (k.load(k_regs), v.load(k_regs))
    for _ in range(gl.maximum(opaque((group,), opaque_if_wide(turn, D))[0], 1)):
        last, count, inner, outer, queries, row, keys = load_scalar(pad, known[:7], FIRST, D)
        sight = _sight(row - (keys - queries), row, keys, window, turn, s_layout, D, FLAGS)
        for i in range(count - outer):
            dk, dv = _step(
                c, zero, zero_q, held, dk, dv, buffers, full, empty, turn + i, sight,
                last - i * BM, queries, factor, cap, BM, D, ST, True, FLAGS,
            )  # fmt: skip
        for i in range(count - outer, count - inner):
            dk, dv = _step(
                c, zero, zero_q, held, dk, dv, buffers, full, empty, turn + i, sight,
                last - i * BM, queries, factor, cap, BM, D, ST, False, FLAGS,
            )  # fmt: skip
        if FLAGS & RIGHT:
            last, count, inner, _, queries, row, keys = load_scalar(pad, known[:7], FIRST, D)
            sight = _sight(
                row - (keys - queries), row, keys, window, turn + inner, s_layout, D, FLAGS
            )
            for i in range(count - inner, count):
                dk, dv = _step(
                    c, zero, zero_q, held, dk, dv, buffers, full, empty, turn + i, sight,
                    last - i * BM, queries, factor, cap, BM, D, ST, True, FLAGS,
                )  # fmt: skip
        turn += load_scalar(pad, known[1:2], FIRST + 1, D)[0]
    if D == 64:
        _whole(c, buffers[0], buffers[4], buffers[5], full, empty, zero_q, turn - 1)
    elif turn > 0:
        wait_full(full[3], turn - 1, 2)
        dq = _share(c, buffers[0], buffers[4].index((turn + 1) % 2), zero_q, turn)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _half(c, dq, buffers[5], full, empty, turn - 1)
    # both warpgroups are done with k once both have handed over the last tile
    mbarrier.arrive(empty[2].index(0))
    mbarrier.wait(empty[2].index(0), 0)
    same = opaque_if_wide(turn, D) >> 30
    k, v = buffers[0].index(same).slice(c * 64, 64), buffers[1].index(same).slice(c * 64, 64)
    out_k = stage_through_smem(k, (dk * scale).to(k.dtype), D)
    out_v = stage_through_smem(v, dv.to(k.dtype), D)
    row, _, i_kv, i_kb, begin_k, room = load_scalar(pad, known[5:], FIRST + 5, D)
    S, H, each = opaque((sizes[1], sizes[2], group), turn)
    HKV = H // each
    at = ((i_kb.to(gl.int64) * S + begin_k + row) * HKV + i_kv) * D
    store_staged(dk_ptr + at, out_k, HKV * D, room - row, turn, D)
    store_staged(dv_ptr + at, out_v, HKV * D, room - row, turn, D)


@gluon.jit
def _tile_loop(c: gl.constexpr, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets,
               sizes, window, pad, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
               FLAGS: gl.constexpr):  # fmt: skip
    units = sizes[8]
    if D > SPARE_REGISTERS:
        _unit(c, program_id_volatile(units), dk_ptr, dv_ptr, factor, cap, scale, buffers, full,
              empty, offsets, sizes, window, pad, BM, D, ST, FLAGS)  # fmt: skip
    else:
        # one unit too, but not to a compiler: ptxas would make addresses of buffers and barriers
        # in uniform registers
        programs = gl.num_programs(0)
        if FLAGS & SOFTCAP:  # as many, but not read at the beginning and kept
            programs = units
        for unit in range(program_id_volatile(units), units, programs):
            _unit(c, unit, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes,
                  window, pad, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit
def _first(dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes, window,
           pad, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
           FLAGS: gl.constexpr):  # fmt: skip
    _tile_loop(0, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes, window,
               pad, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit
def _second(dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes, window,
            pad, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
            FLAGS: gl.constexpr):  # fmt: skip
    _tile_loop(1, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes, window,
               pad, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "cap", "scale", *_SIZES, *_AT, *_DO_AT])
def softmax_bwd_sm90_kernel(
    desc_q,  # tiles [BM, D]
    desc_k,  # [128, D]
    desc_v,  # [128, D]
    desc_do,  # [BM, D]
    desc_base,  # [BM] of [tiles * BM]: lse in base 2, inf for -inf and for no query
    desc_delta,  # [BM] of [tiles * BM]
    desc_dq,  # [BM, D / 2] of float32 [tiles * BM, D]: bwd_dq_accumulate.py counts tiles of queries
    turns_ptr,  # [tiles], zeros
    dk_ptr,  # [KB, S, HKV, D]
    dv_ptr,  # [KB, S, HKV, D]
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
    """grid (units,); a unit is 128 keys of a head. ST: buffers of queries."""
    dtype: gl.constexpr = desc_q.dtype
    dx_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, BM], dtype)
    buf_k = gl.allocate_shared_memory(dtype, [1, 128, D], desc_k.layout)
    buf_v = gl.allocate_shared_memory(dtype, [1, 128, D], desc_v.layout)
    bufs_q = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_q.layout)
    bufs_do = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_do.layout)
    bufs_dx = gl.allocate_shared_memory(dtype, [2, 128, BM], dx_layout)
    bufs_dq = gl.allocate_shared_memory(gl.float32, [4, BM, D // 2], desc_dq.layout)
    bufs_base = gl.allocate_shared_memory(gl.float32, [ST, BM], desc_base.layout)
    bufs_delta = gl.allocate_shared_memory(gl.float32, [ST, BM], desc_delta.layout)
    full_k = barriers(2, 1)
    full_q = barriers(ST, 1)
    full_do = barriers(ST, 1)
    empty_x = barriers(ST, 2)
    full_dx = barriers(2, 2)
    full_dq = barriers(2, 1 if D == 64 else 2)
    empty_dq = barriers(2, 1)
    done = barriers(1, 2)
    empty_dx = barriers(2, 1) if D == 64 else done
    pad = alloc_scalars(2 * NUM_SCALARS)
    gl.warp_specialize([
        (_first, (dk_ptr, dv_ptr, factor, cap, scale,
                  (buf_k, buf_v, bufs_q, bufs_do, bufs_dx, bufs_dq, bufs_base, bufs_delta),
                  (full_k, full_q, full_do, full_dx, full_dq),
                  (empty_x, empty_dq, done, empty_dx),
                  (cu_q_ptr, cu_k_ptr, lengths_ptr),
                  (T, S, H, N, group, tiles, steps, section, units), (left, right),
                  pad, BM, D, ST, FLAGS)),
        (_second, (dk_ptr, dv_ptr, factor, cap, scale,
                   (buf_k, buf_v, bufs_q, bufs_do, bufs_dx, bufs_dq, bufs_base, bufs_delta),
                   (full_k, full_q, full_do, full_dx, full_dq),
                   (empty_x, empty_dq, done, empty_dx),
                   (cu_q_ptr, cu_k_ptr, lengths_ptr),
                   (T, S, H, N, group, tiles, steps, section, units), (left, right),
                   pad, BM, D, ST, FLAGS)),
        (_load, ((desc_q, desc_k, desc_v, desc_do, desc_base, desc_delta),
                 (buf_k, buf_v, bufs_q, bufs_do, bufs_base, bufs_delta),
                 (full_k, full_q, full_do), empty_x,
                 (cu_q_ptr, cu_k_ptr, lengths_ptr),
                 (T, S, H, N, group, tiles, steps, section, units), (left, right),
                 ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch),
                  (do_rb, do_rh, do_ch)),
                 BM, ST, FLAGS)),
        (add_even, (desc_dq, turns_ptr, bufs_dq, full_dq, empty_dq,
                 (cu_q_ptr, cu_k_ptr, lengths_ptr),
                 (T, S, H, N, group, tiles, steps, section, units), (left, right), BM, D, FLAGS)),
        (add_odd, (desc_dq, turns_ptr, bufs_dq, full_dq, empty_dq,
                (cu_q_ptr, cu_k_ptr, lengths_ptr),
                (T, S, H, N, group, tiles, steps, section, units), (left, right), BM, D, FLAGS)),
    ], [4, 1, 1, 1], [CONSUMER, PRODUCER, PRODUCER, PRODUCER])  # fmt: skip
