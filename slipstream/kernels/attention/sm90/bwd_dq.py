"""The gradient of q for sm_90: one warp loads, two warpgroups of 64 queries walk over their keys.

    p_ts = exp(x_ts - lse_t)      dp_ts = do_t . v_s      dx_ts = p_ts (dp_ts - delta_t)
    dq_t = scale sum_s dx_ts k_s

dx goes from registers into the product with k, which runs beside the next tile's q k^T and do v^T.
"""

from slipstream.kernels.attention.sm90.common import (
    LEFT,
    RIGHT,
    ROWS_OWN,
    SOFTCAP,
    barriers,
    fetch,
    inverse,
    keys_seen,
    load_scalar,
    locate_tile,
    opaque,
    opaque_range,
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
def _load(descs, buffers, full, empty, offsets, sizes, window, ats, BN: gl.constexpr,
          KS: gl.constexpr, VS: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    desc_q, desc_k, desc_v, desc_do = descs
    bufs_q, bufs_do, bufs_k, bufs_v = buffers
    full_q, full_k, full_v = full
    empty_q, empty_k, empty_v = empty
    at_q, at_k, at_v, at_do = ats
    group, units = sizes[4], sizes[8]
    turn = units * 0
    mine = units * 0
    for unit in range(program_id_volatile(turn), units, gl.num_programs(0)):
        i_h, i_b, begin, queries, i_kb, begin_k, keys, _, row, _ = locate_tile(
            unit, offsets, sizes, 128, False, FLAGS
        )
        low, count, _, _ = keys_seen(row, queries, keys, window, 128, BN, FLAGS)
        row_q, col_q = tile_coords(at_q, i_b, i_h, begin + row)
        row_do, col_do = tile_coords(at_do, i_b, i_h, begin + row)
        row_k, col_k = tile_coords(at_k, i_kb, i_h // group, begin_k + low)
        row_v, col_v = tile_coords(at_v, i_kb, i_h // group, begin_k + low)
        for c in gl.static_range(2):
            mbarrier.wait(empty_q.index(c), (mine & 1) ^ 1)
            fetch(desc_q, row_q + c * 64, col_q, full_q.index(2 * c), bufs_q.index(c))
            fetch(desc_do, row_do + c * 64, col_do, full_q.index(2 * c + 1), bufs_do.index(c))
        for i in range(count):
            wait_empty(empty_k, turn, KS)
            fetch(desc_k, row_k + i * BN, col_k, full_k.index(turn % KS), bufs_k.index(turn % KS))
            wait_empty(empty_v, turn, VS)
            fetch(desc_v, row_v + i * BN, col_v, full_v.index(turn % VS), bufs_v.index(turn % VS))
            turn += 1
        mine += 1


@gluon.jit
def _scores(s, low, high, key, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """Scores in base 2, -inf where not seen, and the softcap's tanh."""
    t = s
    if FLAGS & SOFTCAP:
        t = 1.0 - 2.0 * inverse(1.0 + gl.exp2(s * factor))
        s = cap * t
    else:
        s = s * factor
    if MASKED:
        o_n = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        if FLAGS & LEFT:
            s = where_within(s, o_n[None, :], low[:, None], high[:, None])
        else:
            s = where_below(s, o_n[None, :], high[:, None])
    return s, t


@gluon.jit
def _gradient(p, t, dp, delta, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """dx, 0 where p is: rows of v after the last key may be anything."""
    dp -= delta[:, None]
    if MASKED:
        dp = gl.where(p > 0.0, dp, 0.0)
    if FLAGS & SOFTCAP:
        dp *= 1.0 - t * t
    return p * dp


@gluon.jit
def _step(q, do, zero, dx, dq, buffers, full, empty, base, delta, turn, low, high, key,
          factor, cap, KS: gl.constexpr, VS: gl.constexpr, MASKED: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    """q k^T and do v^T of this turn beside the product with k of the one before."""
    before = turn - 1
    bufs_k, bufs_v = buffers
    wait_full(full[1], turn, KS)
    k = bufs_k.index(turn % KS).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    wait_full(full[2], turn, VS)
    v = bufs_v.index(turn % VS).permute((1, 0))
    dp = warpgroup_mma(do, v, zero, use_acc=False, is_async=True)
    dq = warpgroup_mma(dx, bufs_k.index(before % KS), dq, is_async=True)
    s = warpgroup_mma_wait(2, deps=(s,))
    s, t = _scores(s, low, high, key, factor, cap, MASKED, FLAGS)
    p = gl.exp2(s - base[:, None])
    dp = warpgroup_mma_wait(1, deps=(dp,))
    mbarrier.arrive(empty[2].index(turn % VS))
    dp = _gradient(p, t, dp, delta, MASKED, FLAGS)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(empty[1].index(before % KS))
    return gl.convert_layout(dp.to(q.dtype), dx.type.layout), dq


@gluon.jit
def _alone(c, zero, dq, buffers, full, empty, base, delta, turn, low, high, key, keys, factor,
           cap, BN: gl.constexpr, D: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr,
           MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """A turn that leaves nothing to the next: fewer registers, and the other warpgroup's products
    run beside this one's exponentials."""
    bufs_q, bufs_do, bufs_k, bufs_v = buffers
    # turn >> 30 is 0, but not to a compiler that would keep addresses in registers it lacks: of v,
    # which has one buffer, too
    q, do = bufs_q.index(c + (turn >> 30)), bufs_do.index(c + (turn >> 30))
    k, v = bufs_k.index(turn % KS), bufs_v.index(turn % VS + (turn >> 30))
    wait_full(full[1], turn, KS)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    wait_full(full[2], turn, VS)
    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    s, t = _scores(s, low, high, key, factor, cap, MASKED, FLAGS)
    p = gl.exp2(s - base[:, None])
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(empty[2].index(turn % VS))
    dp = _gradient(p, t, dp, delta, MASKED, FLAGS)
    dx = gl.convert_layout(dp.to(q.dtype), gl.DotOperandLayout(0, dq.type.layout, 2))
    if MASKED:
        zero_tail_rows((k,), keys - key, 0 if FLAGS & SOFTCAP else turn, BN, D)
    dq = warpgroup_mma(dx, k, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(empty[1].index(turn % KS))
    return dq


@gluon.jit
def _apart(c, zero, buffers, full, empty, base, delta, turn, low, high, key, keys, count, inner,
           outer, factor, cap, BN: gl.constexpr, D: gl.constexpr, KS: gl.constexpr,
           VS: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """dq of a unit, tile by tile."""
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq = gl.zeros([64, D], gl.float32, q_layout)
    if FLAGS & LEFT:
        for i in range(inner):
            dq = _alone(
                c, zero, dq, buffers, full, empty, base, delta, turn + i, low, high,
                key + i * BN, keys, factor, cap, BN, D, KS, VS, True, FLAGS,
            )  # fmt: skip
    for i in range(inner, outer):
        dq = _alone(
            c, zero, dq, buffers, full, empty, base, delta, turn + i, low, high,
            key + i * BN, keys, factor, cap, BN, D, KS, VS, False, FLAGS,
        )  # fmt: skip
    for i in range(outer, count):
        dq = _alone(
            c, zero, dq, buffers, full, empty, base, delta, turn + i, low, high,
            key + i * BN, keys, factor, cap, BN, D, KS, VS, True, FLAGS,
        )  # fmt: skip
    return dq


@gluon.jit
def _overlapped(q, do, zero, buffers, full, empty, base, delta, turn, low, high, key, keys, count,
                inner, outer, factor, cap, BN: gl.constexpr, D: gl.constexpr, KS: gl.constexpr,
                VS: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """dq of a unit, each tile's last product beside the next one's first two."""
    bufs_k, bufs_v = buffers
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    wait_full(full[1], turn, KS)
    k = bufs_k.index(turn % KS).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    wait_full(full[2], turn, VS)
    v = bufs_v.index(turn % VS).permute((1, 0))
    dp = warpgroup_mma(do, v, zero, use_acc=False, is_async=True)
    s, dp = warpgroup_mma_wait(0, deps=(s, dp))
    mbarrier.arrive(empty[2].index(turn % VS))
    s, t = _scores(s, low, high, key, factor, cap, True, FLAGS)
    dp = _gradient(gl.exp2(s - base[:, None]), t, dp, delta, True, FLAGS)
    dx = gl.convert_layout(dp.to(q.dtype), gl.DotOperandLayout(0, q_layout, 2))
    dq = gl.zeros([64, D], gl.float32, q_layout)
    inner = gl.maximum(inner, 1)
    outer = gl.maximum(outer, 1)
    if FLAGS & LEFT:
        for i in range(1, inner):
            dx, dq = _step(
                q, do, zero, dx, dq, buffers, full, empty, base, delta, turn + i,
                low, high, key + i * BN, factor, cap, KS, VS, True, FLAGS,
            )  # fmt: skip
    for i in range(inner, outer):
        dx, dq = _step(
            q, do, zero, dx, dq, buffers, full, empty, base, delta, turn + i,
            low, high, key + i * BN, factor, cap, KS, VS, False, FLAGS,
        )  # fmt: skip
    for i in range(outer, count):
        dx, dq = _step(
            q, do, zero, dx, dq, buffers, full, empty, base, delta, turn + i,
            low, high, key + i * BN, factor, cap, KS, VS, True, FLAGS,
        )  # fmt: skip
    turn += count - 1
    last = bufs_k.index(turn % KS)
    zero_tail_rows((last,), keys - key - (count - 1) * BN, turn, BN, D)
    dq = warpgroup_mma(dx, last, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(empty[1].index(turn % KS))
    return dq


@gluon.jit
def _key_loop(c: gl.constexpr, dq_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full,
              empty, offsets, sizes, window, pad, BN: gl.constexpr, D: gl.constexpr,
              KS: gl.constexpr, VS: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    bufs_q, bufs_do, bufs_k, bufs_v = buffers
    units = sizes[8]
    q, do = bufs_q.index(c), bufs_do.index(c)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    turn = units * 0
    mine = units * 0
    for unit in range(program_id_volatile(turn), units, gl.num_programs(0)):
        i_h, i_b, begin, queries, _, _, keys, _, row, _ = locate_tile(
            unit, offsets, sizes, 128, False, FLAGS
        )
        key, count, inner, outer = keys_seen(row, queries, keys, window, 128, BN, FLAGS)
        row += c * 64
        left, right = window
        o_m = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
        if not FLAGS & SOFTCAP:  # with it there are registers to keep them in
            left, right = opaque(window, turn)
            o_m = opaque_range(o_m, turn, ROWS_OWN)
        low = row + keys - queries + o_m - left
        high = keys + o_m * 0
        if FLAGS & RIGHT:
            high = gl.minimum(row + keys - queries + o_m + right + 1, keys)
        if FLAGS & LEFT:
            high = gl.maximum(high - low, 0)
        T, H = opaque((sizes[0], sizes[2]), turn)
        i_r = (i_b.to(gl.int64) * H + i_h) * (gl.cdiv(T, 4) * 4) + begin + row
        base = gl.load(base_ptr + i_r + o_m, mask=o_m < queries - row, other=float("inf"))
        delta = gl.load(delta_ptr + i_r + o_m, mask=o_m < queries - row, other=0.0)
        spot = (i_h, i_b, begin, queries, row)
        store_scalars(pad, spot, c * NUM_SCALARS, D)
        mbarrier.wait(full[0].index(2 * c), mine & 1)
        mbarrier.wait(full[0].index(2 * c + 1), mine & 1)
        if D < 256:
            dq = _overlapped(
                q, do, zero, (bufs_k, bufs_v), full, empty, base, delta, turn, low, high, key, keys,
                count, inner, outer, factor, cap, BN, D, KS, VS, FLAGS,
            )  # fmt: skip
        else:
            dq = _apart(
                c, zero, buffers, full, empty, base, delta, turn, low, high, key, keys,
                count, inner, outer, factor, cap, BN, D, KS, VS, FLAGS,
            )  # fmt: skip
        turn += count
        mine += 1
        i_h, i_b, begin, queries, row = load_scalar(pad, spot, c * NUM_SCALARS, D)
        T, H = opaque((sizes[0], sizes[2]), turn)
        out = stage_through_smem(bufs_q.index(c + (turn >> 30)), (dq * scale).to(q.dtype), D)
        mbarrier.arrive(empty[0].index(c))
        i_t = i_b.to(gl.int64) * T + begin + row
        store_staged(dq_ptr + (i_t * H + i_h) * D, out, H * D, queries - row, turn, D)


@gluon.jit
def _first(dq_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes,
           window, pad, BN: gl.constexpr, D: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr,
           FLAGS: gl.constexpr):  # fmt: skip
    _key_loop(0, dq_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets,
              sizes, window, pad, BN, D, KS, VS, FLAGS)  # fmt: skip


@gluon.jit
def _second(dq_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes,
            window, pad, BN: gl.constexpr, D: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr,
            FLAGS: gl.constexpr):  # fmt: skip
    _key_loop(1, dq_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets,
              sizes, window, pad, BN, D, KS, VS, FLAGS)  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "cap", "scale", *_SIZES, *_AT, *_DO_AT])
def softmax_dq_sm90_kernel(
    desc_q,  # tiles [64, D]
    desc_k,  # [BN, D]
    desc_v,  # [BN, D]
    desc_do,  # [64, D]
    dq_ptr,  # [B, T, H, D]
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
    BN: gl.constexpr,
    D: gl.constexpr,
    KS: gl.constexpr,
    VS: gl.constexpr,
    FLAGS: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """grid (programs,). KS, VS: buffers of keys and of values."""
    dtype: gl.constexpr = desc_q.dtype
    bufs_q = gl.allocate_shared_memory(dtype, [2, 64, D], desc_q.layout)
    bufs_do = gl.allocate_shared_memory(dtype, [2, 64, D], desc_do.layout)
    bufs_k = gl.allocate_shared_memory(dtype, [KS, BN, D], desc_k.layout)
    bufs_v = gl.allocate_shared_memory(dtype, [VS, BN, D], desc_v.layout)
    full_q = barriers(4, 1)
    empty_q = barriers(2, 1)
    full_k = barriers(KS, 1)
    empty_k = barriers(KS, 2)
    full_v = barriers(VS, 1)
    empty_v = barriers(VS, 2)
    pad = alloc_scalars(2 * NUM_SCALARS)
    gl.warp_specialize([
        (_first, (dq_ptr, base_ptr, delta_ptr, factor, cap, scale,
                  (bufs_q, bufs_do, bufs_k, bufs_v), (full_q, full_k, full_v),
                  (empty_q, empty_k, empty_v), (cu_q_ptr, cu_k_ptr, lengths_ptr),
                  (T, S, H, N, group, tiles, steps, section, units), (left, right),
                  pad, BN, D, KS, VS, FLAGS)),
        (_second, (dq_ptr, base_ptr, delta_ptr, factor, cap, scale,
                   (bufs_q, bufs_do, bufs_k, bufs_v), (full_q, full_k, full_v),
                   (empty_q, empty_k, empty_v), (cu_q_ptr, cu_k_ptr, lengths_ptr),
                   (T, S, H, N, group, tiles, steps, section, units), (left, right),
                   pad, BN, D, KS, VS, FLAGS)),
        (_load, ((desc_q, desc_k, desc_v, desc_do), (bufs_q, bufs_do, bufs_k, bufs_v),
                 (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                 (cu_q_ptr, cu_k_ptr, lengths_ptr),
                 (T, S, H, N, group, tiles, steps, section, units), (left, right),
                 ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch),
                  (do_rb, do_rh, do_ch)),
                 BN, KS, VS, FLAGS)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
