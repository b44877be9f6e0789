"""The gradient of q for sm_90 and heads of 256, warp-specialised.

    p_ts = exp(x_ts - lse_t)      dp_ts = do_t . v_s      dx_ts = p_ts (dp_ts - delta_t)
    dq_t = scale sum_s dx_ts k_s

A unit is 128 queries of a head.

    _load_partition, 1 warp              _key_loop, c = 0 and 1: 4 warps and 64 queries each
      q, do of each c  -- full.q -->       (barriers 2 c and 2 c + 1)
      k, v of a tile   -- full.k, .v -->   s = q k^T, dp = do v^T, dq += dx k
      waits for empty.q, .k, .v            returns v after dp, k after dq, q and do at the end

    buffers          stages   arrivals a phase: full / empty
    q, do [64, D]    2        1 (TMA) each / 1, its warpgroup; dq leaves through q
    k [BN, D]        KS       1 (TMA) / 2
    v [BN, D]        VS       1 (TMA) / 2

dx goes from registers into the product with k. Below 256 columns that product runs beside the next
tile's first two (_overlapped_loop); at 256 registers do not allow it, and the other warpgroup's
products run beside this one's exponentials instead (_tile_loop).
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90 import common
from slipstream.kernels.attention.sm90.bwd_dkv import NUM_SCALARS
from slipstream.kernels.attention.sm90.common import FLAG, THREAD_ROW_BITS
from slipstream.kernels.attention.sm90.forward import _DO_STRIDES, _SIZES, _STRIDES
from slipstream.kernels.primitives import sm90, sm90_device
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma


class Buffers(NamedTuple):
    """Tiles in shared memory; of q and do one a warpgroup."""

    q: Any
    do: Any
    k: Any
    v: Any


class Barriers(NamedTuple):
    """Two for each buffer: it is filled; it may be filled again."""

    q: Any  # full: q and do of each warpgroup; empty: both of each
    k: Any
    v: Any


@gluon.jit
def _load_partition(descs, buffers, full, empty, offsets, sizes, window, strides, BN: gl.constexpr,
          KS: gl.constexpr, VS: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """The producer warp: q and do of both warpgroups, then k and v tile by tile."""
    desc_q, desc_k, desc_v, desc_do = descs
    strides_q, strides_k, strides_v, strides_do = strides
    group, units = sizes.group, sizes.units
    i_step = units * 0
    units_done = units * 0
    for unit in range(common.program_id_volatile(i_step), units, gl.num_programs(0)):
        loc = common.locate_tile(unit, offsets, sizes, 128, False, FLAGS)
        visible = common.visible_key_tiles(loc.row, loc.queries, loc.keys, window, 128, BN, FLAGS)
        row_q, col_q = common.tile_coords(strides_q, loc.i_b, loc.i_h, loc.begin + loc.row)
        row_do, col_do = common.tile_coords(strides_do, loc.i_b, loc.i_h, loc.begin + loc.row)
        row_k, col_k = common.tile_coords(
            strides_k, loc.i_kb, loc.i_h // group, loc.begin_k + visible.first
        )
        row_v, col_v = common.tile_coords(
            strides_v, loc.i_kb, loc.i_h // group, loc.begin_k + visible.first
        )
        for c in gl.static_range(2):
            mbarrier.wait(empty.q.index(c), (units_done & 1) ^ 1)
            common.fetch(desc_q, row_q + c * 64, col_q, full.q.index(2 * c), buffers.q.index(c))
            common.fetch(
                desc_do, row_do + c * 64, col_do, full.q.index(2 * c + 1), buffers.do.index(c)
            )
        for i in range(visible.num_tiles):
            common.wait_empty(empty.k, i_step, KS)
            common.fetch(
                desc_k,
                row_k + i * BN,
                col_k,
                full.k.index(i_step % KS),
                buffers.k.index(i_step % KS),
            )
            common.wait_empty(empty.v, i_step, VS)
            common.fetch(
                desc_v,
                row_v + i * BN,
                col_v,
                full.v.index(i_step % VS),
                buffers.v.index(i_step % VS),
            )
            i_step += 1
        units_done += 1


@gluon.jit
def _scores(s, low, high, key, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """Scores in base 2, -inf where not seen, and the softcap's tanh."""
    t = s
    if FLAGS & FLAG.SOFTCAP:
        t = 1.0 - 2.0 * common.inverse(1.0 + gl.exp2(s * factor))
        s = cap * t
    else:
        s = s * factor
    if MASKED:
        o_n = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        if FLAGS & FLAG.LEFT:
            s = common.where_within(s, o_n[None, :], low[:, None], high[:, None])
        else:
            s = common.where_below(s, o_n[None, :], high[:, None])
    return s, t


@gluon.jit
def _gradient(p, t, dp, delta, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """dx, 0 where p is: rows of v after the last key may hold anything."""
    dp -= delta[:, None]
    if MASKED:
        dp = gl.where(p > 0.0, dp, 0.0)
    if FLAGS & FLAG.SOFTCAP:
        dp *= 1.0 - t * t
    return p * dp


@gluon.jit
def _step(c, zero, dq, buffers, full, empty, base, delta, i_step, low, high, key, keys,
          factor, cap, BN: gl.constexpr, D: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr,
          MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """dq += dx k of one tile, with nothing left to the next step: fewer registers."""
    # opaque zeros: with constant indices the addresses are kept in registers, v's single stage too
    q, do = buffers.q.index(c + (i_step >> 30)), buffers.do.index(c + (i_step >> 30))
    k, v = buffers.k.index(i_step % KS), buffers.v.index(i_step % VS + (i_step >> 30))
    common.wait_full(full.k, i_step, KS)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    common.wait_full(full.v, i_step, VS)
    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = sm90.warpgroup_mma_wait(1, deps=(s,))
    s, t = _scores(s, low, high, key, factor, cap, MASKED, FLAGS)
    p = gl.exp2(s - base[:, None])
    dp = sm90.warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(empty.v.index(i_step % VS))
    dp = _gradient(p, t, dp, delta, MASKED, FLAGS)
    dx = gl.convert_layout(dp.to(q.dtype), gl.DotOperandLayout(0, dq.type.layout, 2))
    if MASKED:
        common.zero_tail_rows((k,), keys - key, 0 if FLAGS & FLAG.SOFTCAP else i_step, BN, D)
    dq = warpgroup_mma(dx, k, dq, is_async=True)
    dq = sm90.warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(empty.k.index(i_step % KS))
    return dq


@gluon.jit
def _tile_loop(c, zero, buffers, full, empty, base, delta, i_step, low, high, key, keys, count,
               inner, outer, factor, cap, BN: gl.constexpr, D: gl.constexpr, KS: gl.constexpr,
               VS: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """dq of a unit, tile by tile."""
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq = gl.zeros([64, D], gl.float32, q_layout)
    # left edge (masked), inside, right edge (masked)
    edges = (0, inner, outer, count)
    for i_loop in gl.static_range(0 if FLAGS & FLAG.LEFT else 1, 3):
        for i in range(edges[i_loop], edges[i_loop + 1]):
            dq = _step(
                c, zero, dq, buffers, full, empty, base, delta, i_step + i, low, high,
                key + i * BN, keys, factor, cap, BN, D, KS, VS, i_loop != 1, FLAGS,
            )  # fmt: skip
    return dq


@gluon.jit
def _key_loop(c: gl.constexpr, dq_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full,
              empty, offsets, sizes, window, pad, BN: gl.constexpr, D: gl.constexpr,
              KS: gl.constexpr, VS: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """A consumer's loop over units; c: which 64 queries it has."""
    units = sizes.units
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    i_step = units * 0
    units_done = units * 0
    for unit in range(common.program_id_volatile(i_step), units, gl.num_programs(0)):
        loc = common.locate_tile(unit, offsets, sizes, 128, False, FLAGS)
        queries, keys, row = loc.queries, loc.keys, loc.row
        key, count, inner, outer = common.visible_key_tiles(
            row, queries, keys, window, 128, BN, FLAGS
        )
        row += c * 64
        left, right = window
        o_m = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
        # with a softcap there are registers to keep these in
        if not FLAGS & FLAG.SOFTCAP:
            left, right = common.opaque(window, i_step)
            o_m = common.opaque_range(o_m, i_step, THREAD_ROW_BITS)
        low = row + keys - queries + o_m - left
        high = keys + o_m * 0
        if FLAGS & FLAG.RIGHT:
            high = gl.minimum(row + keys - queries + o_m + right + 1, keys)
        if FLAGS & FLAG.LEFT:
            high = gl.maximum(high - low, 0)
        T, H = common.opaque((sizes.T, sizes.H), i_step)
        i_r = (loc.i_b.to(gl.int64) * H + loc.i_h) * (gl.cdiv(T, 4) * 4) + loc.begin + row
        base = gl.load(base_ptr + i_r + o_m, mask=o_m < queries - row, other=float("inf"))
        delta = gl.load(delta_ptr + i_r + o_m, mask=o_m < queries - row, other=0.0)
        coords = (loc.i_h, loc.i_b, loc.begin, queries, row)
        common.store_scalars(pad, coords, c * NUM_SCALARS, D)
        mbarrier.wait(full.q.index(2 * c), units_done & 1)
        mbarrier.wait(full.q.index(2 * c + 1), units_done & 1)
        dq = _tile_loop(
            c, zero, buffers, full, empty, base, delta, i_step, low, high, key, keys,
            count, inner, outer, factor, cap, BN, D, KS, VS, FLAGS,
        )  # fmt: skip
        i_step += count
        units_done += 1
        i_h, i_b, begin, queries, row = common.load_scalar(pad, coords, c * NUM_SCALARS, D)
        T, H = common.opaque((sizes.T, sizes.H), i_step)
        # q has been read: dq leaves through its buffer
        out = common.stage_through_smem(
            buffers.q.index(c + (i_step >> 30)), (dq * scale).to(buffers.q.dtype), D
        )
        mbarrier.arrive(empty.q.index(c))
        i_t = i_b.to(gl.int64) * T + begin + row
        common.store_staged(dq_ptr + (i_t * H + i_h) * D, out, H * D, queries - row, i_step, D)


@gluon.jit(do_not_specialize=["factor", "cap", "scale", *_SIZES, *_STRIDES, *_DO_STRIDES])
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
    factor, cap, scale, T, S, H, N, group, tiles, search_steps, section, units, left, right,
    q_rb, q_rh, q_ch, k_rb, k_rh, k_ch, v_rb, v_rh, v_ch, do_rb, do_rh, do_ch,
    BN: gl.constexpr, D: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr, FLAGS: gl.constexpr,
    CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    """grid (programs,). KS, VS: buffers of keys and of values."""
    dtype: gl.constexpr = desc_q.dtype
    bufs_q = gl.allocate_shared_memory(dtype, [2, 64, D], desc_q.layout)
    bufs_do = gl.allocate_shared_memory(dtype, [2, 64, D], desc_do.layout)
    bufs_k = gl.allocate_shared_memory(dtype, [KS, BN, D], desc_k.layout)
    bufs_v = gl.allocate_shared_memory(dtype, [VS, BN, D], desc_v.layout)
    full_q = common.barriers(4, 1)
    empty_q = common.barriers(2, 1)
    full_k = common.barriers(KS, 1)
    empty_k = common.barriers(KS, 2)
    full_v = common.barriers(VS, 1)
    empty_v = common.barriers(VS, 2)
    pad = sm90_device.alloc_scalars(2 * NUM_SCALARS)
    buffers = Buffers(bufs_q, bufs_do, bufs_k, bufs_v)
    full, empty = Barriers(full_q, full_k, full_v), Barriers(empty_q, empty_k, empty_v)
    offsets = (cu_q_ptr, cu_k_ptr, lengths_ptr)
    sizes = common.Sizes(T, S, H, N, group, tiles, search_steps, section, units)
    gl.warp_specialize([
        (_key_loop, (0, dq_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty,
                     offsets, sizes, (left, right), pad, BN, D, KS, VS, FLAGS)),
        (_key_loop, (1, dq_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty,
                     offsets, sizes, (left, right), pad, BN, D, KS, VS, FLAGS)),
        (_load_partition, ((desc_q, desc_k, desc_v, desc_do), buffers,
                 full, empty, offsets,
                 sizes, (left, right),
                 ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch),
                  (do_rb, do_rh, do_ch)),
                 BN, KS, VS, FLAGS)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
