"""The gradients of k and v for sm_90 and heads of 256, warp-specialised.

    p_ts = exp(x_ts - lse_t)      dp_ts = do_t . v_s      dx_ts = p_ts (dp_ts - delta_t)
    dk_s = scale sum_t dx_ts q_t      dv_s = sum_t p_ts do_t

A unit is 64 keys of a head of k; a program loops over all queries of all heads that share it, so
nothing is added by two programs. dk and dv of 64 keys would take all registers of a warpgroup, so
one warpgroup computes dv and the other dk. Both need p: five products a tile where four would do.
p and dx are computed transposed, keys by queries, so that they go from registers into the products.

    _load_partition, 1 warp            _warpgroup_0: dv               _warpgroup_1: dk
      k, v, once a unit -- full.kv -->   reads k                        reads k and v
      q, do of a tile   -- full.q, do -> _dv_step: p^T = k q^T          _dk_step: p^T, dp^T = v do^T
                                                   dv += p^T do                   dk += dx^T q
      waits for empty.q, empty.do        returns q, then do             returns do, then q
      waits for empty.kv                 arrives at empty.kv[0]         arrives at [0], and at [1]
                                                                        once dk is staged

    buffers         stages   arrivals a phase: full / empty
    k [64, D]       1        1 (TMA) / 2; dk leaves through it
    v [64, D]       1        1 (TMA) / 1, _warpgroup_1
    q, do [BM, D]   ST       1 (TMA) / 2
    dv [64, D]      1        staging of dv, no barrier: _warpgroup_0 alone uses it
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90 import common
from slipstream.kernels.attention.sm90.common import FLAG, THREAD_COLUMN_BITS, THREAD_ROW_BITS
from slipstream.kernels.attention.sm90.forward import _DO_STRIDES, _SIZES, _STRIDES
from slipstream.kernels.primitives import sm90, sm90_device
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# scalars of a unit that each warpgroup parks in shared memory
NUM_SCALARS = gl.constexpr(5)


class Buffers(NamedTuple):
    """Tiles in shared memory."""

    kv: Any  # k, v
    q: Any
    do: Any


class Barriers(NamedTuple):
    """Two for each buffer: it is filled; it may be filled again."""

    kv: Any
    q: Any
    do: Any


@gluon.jit
def row_values(
    ptr, num_valid, i_step, other, BM: gl.constexpr, layout: gl.constexpr, MASKED: gl.constexpr
):
    """BM numbers of a tile's queries along the columns of a product; `other` from num_valid on."""
    o_m = gl.arange(0, BM, gl.SliceLayout(0, layout))
    if MASKED:
        m_m = common.opaque_range(o_m, i_step, THREAD_COLUMN_BITS) < num_valid
        x = gl.load(ptr + o_m, mask=m_m, other=other)
    else:
        x = gl.load(ptr + o_m)
    return x


@gluon.jit
def first_and_width(low, high, window, FLAGS: gl.constexpr):
    """The first query that a key is seen by, and how many; a side without a bound reads none."""
    width = high * 0
    if (FLAGS & FLAG.LEFT) and (FLAGS & FLAG.RIGHT):
        width += window[0] + window[1] + 1
    elif FLAGS & FLAG.LEFT:
        low *= 0
        width = gl.maximum(high, 0)
    elif not FLAGS & FLAG.RIGHT:
        low *= 0
    return low, width


@gluon.jit
def visible_queries(mask_args, i_step, layout: gl.constexpr, FLAGS: gl.constexpr):
    """The queries that see each of 64 keys: `width` from `low` on.

    mask_args: the query at the place of the first key, and the window.
    """
    at, window = mask_args
    o_n = common.opaque_range(gl.arange(0, 64, gl.SliceLayout(1, layout)), i_step, THREAD_ROW_BITS)
    low, high = common.opaque((at - window[1], at + window[0] + 1), i_step)
    return first_and_width(low + o_n, high + o_n, window, FLAGS)


@gluon.jit
def _halves(x):
    """The left and the right columns; registers stay where they are."""
    x = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return gl.split(gl.permute(x, (0, 2, 1)))


@gluon.jit
def _whole(a, b, like):
    """Inverse of _halves."""
    x = gl.permute(gl.join(a, b), (0, 2, 1))
    return gl.convert_layout(gl.reshape(x, [a.shape[0], 2 * a.shape[1]]), like.type.layout)


@gluon.jit
def _weights(s, base, o_m, low, width, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """p, and the factor of dp - delta in dx: p, or with a softcap p (1 - tanh^2)."""
    if FLAGS & FLAG.SOFTCAP:
        t = 1.0 - 2.0 * common.inverse(1.0 + gl.exp2(s * factor))
        s = cap * t
    else:
        s = s * factor
    if MASKED:
        if FLAGS & FLAG.LEFT:
            s = common.where_within(s, o_m, low, width)
        else:
            s = common.where_below(s, low - 1, o_m)
    p = gl.exp2(s - base)
    w = p
    if FLAGS & FLAG.SOFTCAP:
        w = p * (1.0 - t * t)
    return p, w


@gluon.jit
def _weights_by_columns(
    s, base, o_m, low, width, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr
):
    """_weights 16 columns at a time: of all at once the softcap would spill."""
    if s.shape[1] == 16:
        p, w = _weights(s, base, o_m, low, width, factor, cap, MASKED, FLAGS)
    else:
        s0, s1 = _halves(s)
        base0, base1 = _halves(base)
        o_m0, o_m1 = _halves(o_m)
        low0, low1 = _halves(low)
        width0, width1 = _halves(width)
        p0, w0 = _weights_by_columns(s0, base0, o_m0, low0, width0, factor, cap, MASKED, FLAGS)
        p1, w1 = _weights_by_columns(s1, base1, o_m1, low1, width1, factor, cap, MASKED, FLAGS)
        p, w = _whole(p0, p1, s), _whole(w0, w1, s)
    return p, w


@gluon.jit
def weights(s, base, mask_args, o_m, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """p, keys by queries o_m, and what dp - delta is multiplied by for dx."""
    if MASKED:
        low, width = mask_args
        low, width = low[:, None], width[:, None]
    else:
        low, width = o_m[None, :], o_m[None, :]
    if FLAGS & FLAG.SOFTCAP:
        _, base = gl.broadcast(s, base[None, :])
        _, o_m = gl.broadcast(s, o_m[None, :])
        _, low = gl.broadcast(s, low)
        _, width = gl.broadcast(s, width)
        p, w = _weights_by_columns(s, base, o_m, low, width, factor, cap, MASKED, FLAGS)
    else:
        p, w = _weights(s, base[None, :], o_m[None, :], low, width, factor, cap, MASKED, FLAGS)
    return p, w


@gluon.jit
def _load_partition(descs, buffers, full, empty, offsets, sizes, window, strides, BM: gl.constexpr,
          ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """The producer warp: k and v of a unit, then q and do tile by tile, head by head."""
    desc_q, desc_k, desc_v, desc_do = descs
    strides_q, strides_k, strides_v, strides_do = strides
    group, units = sizes.group, sizes.units
    i_step = units * 0
    units_done = units * 0
    for unit in range(common.program_id_volatile(i_step), units, gl.num_programs(0)):
        loc = common.locate_tile(unit, offsets, sizes, 64, True, FLAGS)
        visible = common.visible_query_tiles(loc.row, loc.queries, loc.keys, window, BM, 64, FLAGS)
        row_k, col_k = common.tile_coords(strides_k, loc.i_kb, loc.i_h, loc.begin_k + loc.row)
        row_v, col_v = common.tile_coords(strides_v, loc.i_kb, loc.i_h, loc.begin_k + loc.row)
        mbarrier.wait(empty.kv.index(0), (units_done & 1) ^ 1)
        common.fetch(desc_k, row_k, col_k, full.kv.index(0), buffers.kv.index(0))
        mbarrier.wait(empty.kv.index(1), (units_done & 1) ^ 1)
        common.fetch(desc_v, row_v, col_v, full.kv.index(1), buffers.kv.index(1))
        for i_g in range(group):
            i_h = loc.i_h * group + i_g
            row_q, col_q = common.tile_coords(strides_q, loc.i_b, i_h, loc.begin + visible.first)
            row_do, col_do = common.tile_coords(strides_do, loc.i_b, i_h, loc.begin + visible.first)
            for i in range(visible.num_tiles):
                stage = i_step % ST
                common.wait_empty(empty.q, i_step, ST)
                common.fetch(
                    desc_q, row_q + i * BM, col_q, full.q.index(stage), buffers.q.index(stage)
                )
                common.wait_empty(empty.do, i_step, ST)
                common.fetch(
                    desc_do, row_do + i * BM, col_do, full.do.index(stage), buffers.do.index(stage)
                )
                i_step += 1
        units_done += 1


@gluon.jit
def _dv_step(zero, dv, buffers, full, empty, base_ptr, delta_ptr, i_step, mask_args, query, queries,
            factor, cap, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
            MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """dv += p^T do of one tile of queries."""
    layout: gl.constexpr = zero.type.layout
    num_valid = queries - query
    base = row_values(base_ptr + query, num_valid, i_step, float("inf"), BM, layout, MASKED)
    stage = i_step % ST
    q, do = buffers.q.index(stage), buffers.do.index(stage)
    common.wait_full(full.q, i_step, ST)
    if MASKED:
        common.zero_tail_rows((q,), num_valid, i_step, BM, D)
    k = buffers.kv.index(i_step >> 30)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    # q was read by the product alone: it can be refilled
    s = sm90.warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(empty.q.index(stage))
    if MASKED:
        mask_args = visible_queries(mask_args, i_step, layout, FLAGS)
    o_m = (
        common.opaque_range(gl.arange(0, BM, gl.SliceLayout(0, layout)), i_step, THREAD_COLUMN_BITS)
        + query
    )
    p, _ = weights(s, base, mask_args, o_m, factor, cap, MASKED, FLAGS)
    common.wait_full(full.do, i_step, ST)
    if MASKED:
        common.zero_tail_rows((do,), num_valid, i_step, BM, D)
    p = gl.convert_layout(p.to(k.dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dv = sm90.warpgroup_mma_wait(0, deps=(dv,))
    mbarrier.arrive(empty.do.index(stage))
    return dv


@gluon.jit
def _dk_step(zero, dk, buffers, full, empty, base_ptr, delta_ptr, i_step, mask_args, query, queries,
          factor, cap, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
          MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """dk += dx^T q of one tile of queries."""
    layout: gl.constexpr = zero.type.layout
    num_valid = queries - query
    base = row_values(base_ptr + query, num_valid, i_step, float("inf"), BM, layout, MASKED)
    stage = i_step % ST
    q, do = buffers.q.index(stage), buffers.do.index(stage)
    common.wait_full(full.q, i_step, ST)
    # masked tiles wait for both at once, to zero the rows after the last query
    if MASKED:
        common.wait_full(full.do, i_step, ST)
        common.zero_tail_rows((q,), num_valid, i_step, BM, D)
        common.zero_tail_rows((do,), num_valid, i_step, BM, D)
    # opaque zeros: with constant indices the addresses of k and v are kept in registers
    k, v = buffers.kv.index(i_step >> 30), buffers.kv.index(1 + (i_step >> 30))
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not MASKED:
        common.wait_full(full.do, i_step, ST)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = sm90.warpgroup_mma_wait(1, deps=(s,))
    if MASKED:
        mask_args = visible_queries(mask_args, i_step, layout, FLAGS)
    o_m = (
        common.opaque_range(gl.arange(0, BM, gl.SliceLayout(0, layout)), i_step, THREAD_COLUMN_BITS)
        + query
    )
    _, w = weights(s, base, mask_args, o_m, factor, cap, MASKED, FLAGS)
    delta = row_values(delta_ptr + query, num_valid, i_step, 0.0, BM, layout, MASKED)
    dp = sm90.warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(empty.do.index(stage))
    dx = w * (dp - delta[None, :])
    dx = gl.convert_layout(dx.to(k.dtype), gl.DotOperandLayout(0, dk.type.layout, 2))
    dk = warpgroup_mma(dx, q, dk, is_async=True)
    dk = sm90.warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(empty.q.index(stage))
    return dk


@gluon.jit
def _query_loop(step: gl.constexpr, KEYS: gl.constexpr, out_ptr, out_buffers, base_ptr, delta_ptr,
                factor, cap, scale, buffers, full, empty, offsets, sizes, window, pad,
                BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
                FLAGS: gl.constexpr):  # fmt: skip
    """A consumer's loop over units: step is _dv_step or, with KEYS, _dk_step."""
    group, units = sizes.group, sizes.units
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zero = gl.zeros([64, BM], gl.float32, s_layout)
    i_step = units * 0
    units_done = units * 0
    for unit in range(common.program_id_volatile(i_step), units, gl.num_programs(0)):
        loc = common.locate_tile(unit, offsets, sizes, 64, True, FLAGS)
        queries, keys, row = loc.queries, loc.keys, loc.row
        bounds = common.opaque(window, i_step)
        query, count, inner, outer = common.visible_query_tiles(
            row, queries, keys, bounds, BM, 64, FLAGS
        )
        mask_args = (row - (keys - queries), bounds)
        coords = (row, loc.i_h, loc.i_kb, loc.begin_k, loc.capacity)
        common.store_scalars(pad, coords, KEYS * NUM_SCALARS, D)
        acc = gl.zeros([64, D], gl.float32, k_layout)
        mbarrier.wait(full.kv.index(0), units_done & 1)
        if KEYS:
            mbarrier.wait(full.kv.index(1), units_done & 1)
        for i_g in range(group):
            T, H = common.opaque((sizes.T, sizes.H), i_step)
            i_r = loc.i_b.to(gl.int64) * H + loc.i_h * group + i_g
            i_r = i_r * (gl.cdiv(T, 4) * 4) + loc.begin
            # masked edge, inside, masked edge
            edges = (0, inner, outer, count)
            for i_loop in gl.static_range(0 if FLAGS & FLAG.RIGHT else 1, 3):
                for i in range(edges[i_loop], edges[i_loop + 1]):
                    acc = step(
                        zero, acc, buffers, full, empty, base_ptr + i_r, delta_ptr + i_r,
                        i_step + i, mask_args, query + i * BM, queries, factor, cap, BM, D, ST,
                        i_loop != 1, FLAGS,
                    )  # fmt: skip
            i_step += count
        units_done += 1
        mbarrier.arrive(empty.kv.index(0))
        # keys beyond the length in use have no gradient
        if FLAGS & FLAG.LENGTHS:
            used = row + gl.arange(0, 64, gl.SliceLayout(1, k_layout)) < keys
            acc = gl.where(used[:, None], acc, 0.0)
        out = common.stage_through_smem(
            out_buffers.index(KEYS + (i_step >> 30)), (acc * scale).to(buffers.kv.dtype), D
        )
        if KEYS:
            mbarrier.arrive(empty.kv.index(1))
        row, i_kv, i_kb, begin_k, capacity = common.load_scalar(pad, coords, KEYS * NUM_SCALARS, D)
        S, H, each = common.opaque((sizes.S, sizes.H, group), i_step)
        HKV = H // each
        at = ((i_kb.to(gl.int64) * S + begin_k + row) * HKV + i_kv) * D
        common.store_staged(out_ptr + at, out, HKV * D, capacity - row, i_step, D)


@gluon.jit
def _warpgroup_0(dv_ptr, base_ptr, delta_ptr, factor, cap, buffers, bufs_dv, full, empty, offsets,
           sizes, window, pad, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
           FLAGS: gl.constexpr):  # fmt: skip
    _query_loop(_dv_step, 0, dv_ptr, bufs_dv, base_ptr, delta_ptr, factor, cap, 1.0, buffers, full,
          empty, offsets, sizes, window, pad, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit
def _warpgroup_1(dk_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers, full, empty, offsets,
                 sizes, window, pad, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
                 FLAGS: gl.constexpr):  # fmt: skip
    _query_loop(_dk_step, 1, dk_ptr, buffers.kv, base_ptr, delta_ptr, factor, cap, scale,
          buffers, full, empty, offsets, sizes, window, pad, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "cap", "scale", *_SIZES, *_STRIDES, *_DO_STRIDES])
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
    factor, cap, scale, T, S, H, N, group, tiles, search_steps, section, units, left, right,
    q_rb, q_rh, q_ch, k_rb, k_rh, k_ch, v_rb, v_rh, v_ch, do_rb, do_rh, do_ch,
    BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, FLAGS: gl.constexpr,
    CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    """grid (programs,); a unit is 64 keys of a head."""
    dtype: gl.constexpr = desc_q.dtype
    bufs_k = gl.allocate_shared_memory(dtype, [2, 64, D], desc_k.layout)  # of k, of v
    bufs_dv = gl.allocate_shared_memory(dtype, [1, 64, D], desc_v.layout)
    bufs_q = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_q.layout)
    bufs_do = gl.allocate_shared_memory(dtype, [ST, BM, D], desc_do.layout)
    full_k = common.barriers(2, 1)
    empty_k = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(empty_k.index(0), count=2)
    mbarrier.init(empty_k.index(1), count=1)
    full_q = common.barriers(ST, 1)
    empty_q = common.barriers(ST, 2)
    full_do = common.barriers(ST, 1)
    empty_do = common.barriers(ST, 2)
    pad = sm90_device.alloc_scalars(2 * NUM_SCALARS)
    buffers = Buffers(bufs_k, bufs_q, bufs_do)
    full, empty = Barriers(full_k, full_q, full_do), Barriers(empty_k, empty_q, empty_do)
    offsets = (cu_q_ptr, cu_k_ptr, lengths_ptr)
    sizes = common.Sizes(T, S, H, N, group, tiles, search_steps, section, units)
    gl.warp_specialize([
        (_warpgroup_0, (dv_ptr, base_ptr, delta_ptr, factor, cap, buffers,
                  bufs_dv, full, empty, offsets, sizes, (left, right),
                  pad, BM, D, ST, FLAGS)),
        (_warpgroup_1, (dk_ptr, base_ptr, delta_ptr, factor, cap, scale, buffers,
                   full, empty, offsets, sizes, (left, right),
                   pad, BM, D, ST, FLAGS)),
        (_load_partition, ((desc_q, desc_k, desc_v, desc_do), buffers, full, empty, offsets,
                 sizes, (left, right),
                 ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch),
                  (do_rb, do_rh, do_ch)),
                 BM, ST, FLAGS)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
