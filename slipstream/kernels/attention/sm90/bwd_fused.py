"""dq, dk and dv in one kernel for sm_90, warp-specialised: five products a tile, where two kernels
need seven.

A unit is 128 keys of a head of k, 64 a warpgroup; a program takes one unit and loops over its
queries from the last to the first. dk and dv stay in registers (bwd_dkv.py has the formulas). For
dq the warpgroups exchange dx through shared memory, and each tile of

    dq_t += sum_s dx_ts k_s

is added to float32 sums in global memory by TMA.

    load_partition    _tile_loop, c = 0 and 1 (4 warps)              add_even, add_odd (1 warp each)
      k, v   -- full.kv -->  once
      q, base   -- full.q -->  _step: p, dv += p do, dx, dk += dx q
      do, delta -- full.do -->   dx to shared memory -- full.dx --> the other warpgroup
      <-- empty.q                dq of the step before -- full.dq --> semaphore_acquire, TMA copy,
                                                                    semaphore_release
                                 <-- empty.dq                       once the copy is done
      at the end: empty.kv, at which both warpgroups meet before dk and dv leave through k and v

    buffers                stages  arrivals a phase: full / empty
    k, v [128, D]          1       1 (TMA) each / 2, once
    q, do, base, delta     ST      1 (TMA) for q with base and 1 for do with delta / 2 for all
    dx [128, BM]           2       2 / D = 64: 1, the warpgroup that makes dq of it
    dq [BM, D / 2]         2 x 2   D = 64: 1, else 2 / 1, the warp that adds it

dx is used one step late, so that nothing waits for it. With D = 128 each warpgroup computes half
of the columns of every dq; with D = 64 they alternate, and k and v stay in registers.

Determinism: tiles of keys add to a tile of queries in a fixed order, from the first keys on, which
store instead of adding. `semaphores` counts the tiles that have added; a later one waits until that
is its own number. Units are numbered in that order, so what is waited for has begun. Two warps add
alternating tiles, so that one waits for memory while the other waits for its semaphore. Tiles of
queries are numbered by head and sequence; a packed sequence begins at tile cu_q[n] / BM + n of its
head.
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90 import common
from slipstream.kernels.attention.sm90.bwd_dkv import first_and_width, weights
from slipstream.kernels.attention.sm90.common import FLAG, SPARE_REGISTERS, THREAD_ROW_BITS
from slipstream.kernels.attention.sm90.forward import _DO_STRIDES, _SIZES, _STRIDES
from slipstream.kernels.primitives import semaphore, sm90, sm90_device
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma


@gluon.jit
def tile_of_sequence(i_b, i_h, i_n, begin, sizes, BM: gl.constexpr, FLAGS: gl.constexpr):
    """The number of the first tile of a sequence's queries."""
    T, H, N = sizes.T, sizes.H, sizes.N
    if FLAGS & FLAG.PACKED_Q:
        first = i_h * (T // BM + N) + begin // BM + i_n
    else:
        first = (i_b * H + i_h) * gl.cdiv(T, BM)
    return first


@gluon.jit
def _add(parity: gl.constexpr, desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes,
         window, BM: gl.constexpr, D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """Stores or adds every second tile of dq, in the order of the keys."""
    group, units = sizes.group, sizes.units
    unit = common.program_id_volatile(units)
    i_step = unit >> 31  # an opaque zero
    loc = common.locate_tile(unit, offsets, sizes, 128, True, FLAGS)
    bounds = common.opaque(window, i_step)
    visible = common.visible_query_tiles(loc.row, loc.queries, loc.keys, bounds, BM, 128, FLAGS, 0)
    for i_g in range(group):
        opaque_sizes = common.Sizes(*common.opaque(sizes, i_step))
        first = tile_of_sequence(
            loc.i_b, loc.i_h * group + i_g, loc.i_n, loc.begin, opaque_sizes, BM, FLAGS
        )
        for i in range(visible.num_tiles):
            if i_step % 2 == parity:
                query = visible.first + (visible.num_tiles - 1 - i) * BM
                tile = first + query // BM
                rank = loc.row // 128
                # rank: tiles of keys before this one, with a left bound from the first that is seen
                if FLAGS & FLAG.LEFT:
                    rank -= gl.maximum(query + loc.keys - loc.queries - bounds[0], 0) // 128
                while semaphore.semaphore_acquire(semaphores_ptr + tile) < rank:
                    pass
                common.wait_full(full, i_step, 2)
                for c in gl.static_range(2):
                    to = [tile * BM, c * (D // 2)]
                    if rank == 0:
                        sm90.copy_out(desc_dq, to, buffers.index(2 * parity + c))
                    else:
                        semaphore.tma_reduce_add(desc_dq, to, buffers.index(2 * parity + c))
                # global memory has it: the buffer is free, and the next tile of keys may add
                sm90.store_wait(0)
                mbarrier.arrive(empty.index(parity))
                semaphore.semaphore_release(semaphores_ptr + tile, rank + 1)
            i_step += 1


@gluon.jit
def add_even(desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes, window,
             BM: gl.constexpr, D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _add(0, desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes, window, BM, D, FLAGS)


@gluon.jit
def add_odd(desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes, window, BM: gl.constexpr,
            D: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _add(1, desc_dq, semaphores_ptr, buffers, full, empty, offsets, sizes, window, BM, D, FLAGS)


class LoadBuffers(NamedTuple):
    """Those of Buffers that the producer warp fills."""

    k: Any
    v: Any
    q: Any
    do: Any
    base: Any
    delta: Any


class LoadFull(NamedTuple):
    """Their barriers: base comes with q, delta with do."""

    kv: Any
    q: Any
    do: Any


@gluon.jit
def fetch_both(desc, row, col, buffer, desc_rows, at, rows, full):
    """Starts to load a tile and a number for each of its rows, under one barrier."""
    mbarrier.expect(full, desc.block_type.nbytes + desc_rows.block_type.nbytes)
    sm90.copy_in(desc, [row, col], full, buffer)
    sm90.copy_in(desc_rows, [at], full, rows)


@gluon.jit
def packed_place(offsets, sizes, FLAGS: gl.constexpr):
    """Where this program's unit of packed keys is, looked for once a partition; else nothing."""
    loc = ()
    if FLAGS & FLAG.PACKED_K:
        unit = common.program_id_volatile(sizes.units)
        loc = common.locate_tile(unit, offsets, sizes, 128, True, FLAGS)
    return loc


@gluon.jit
def has_keys(loc, FLAGS: gl.constexpr):
    """Whether a unit has keys: the host counts the most tiles that packed lengths may have."""
    if FLAGS & FLAG.PACKED_K:
        result = loc.row < loc.capacity
    else:
        result = True
    return result


@gluon.jit
def load_partition(descs, buffers, full, empty_x, offsets, sizes, window, strides,
                   BM: gl.constexpr, ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    loc = packed_place(offsets, sizes, FLAGS)
    if has_keys(loc, FLAGS):
        _load_unit(
            loc, descs, buffers, full, empty_x, offsets, sizes, window, strides, BM, ST, FLAGS
        )


@gluon.jit
def _load_unit(
    loc, descs, buffers, full, empty_x, offsets, sizes, window, strides, BM, ST, FLAGS: gl.constexpr
):
    """The producer warp: k and v, then q with base and do with delta, the last queries first."""
    desc_q, desc_k, desc_v, desc_do, desc_base, desc_delta = descs
    strides_q, strides_k, strides_v, strides_do = strides
    units = sizes.units
    unit = common.program_id_volatile(units)
    i_step = unit >> 31  # an opaque zero
    group = common.Sizes(*common.opaque(sizes, i_step)).group
    if not FLAGS & FLAG.PACKED_K:
        loc = common.locate_tile(unit, offsets, sizes, 128, True, FLAGS)
    bounds = common.opaque(window, i_step)
    visible = common.visible_query_tiles(loc.row, loc.queries, loc.keys, bounds, BM, 128, FLAGS, 0)
    row_k, col_k = common.tile_coords(strides_k, loc.i_kb, loc.i_h, loc.begin_k + loc.row)
    row_v, col_v = common.tile_coords(strides_v, loc.i_kb, loc.i_h, loc.begin_k + loc.row)
    common.fetch(desc_k, row_k, col_k, full.kv.index(0), buffers.k.index(0))
    common.fetch(desc_v, row_v, col_v, full.kv.index(1), buffers.v.index(0))
    for i_g in range(group):
        i_h = loc.i_h * group + i_g
        row_q, col_q = common.tile_coords(
            common.opaque(strides_q, i_step), loc.i_b, i_h, loc.begin + visible.first
        )
        row_do, col_do = common.tile_coords(
            common.opaque(strides_do, i_step), loc.i_b, i_h, loc.begin + visible.first
        )
        i_r = (
            tile_of_sequence(
                loc.i_b,
                i_h,
                loc.i_n,
                loc.begin,
                common.Sizes(*common.opaque(sizes, i_step)),
                BM,
                FLAGS,
            )
            * BM
            + visible.first
        )
        for i in range(visible.num_tiles):
            stage = i_step % ST
            on = (visible.num_tiles - 1 - i) * BM
            common.wait_empty(empty_x, i_step, ST)
            fetch_both(desc_q, row_q + on, col_q, buffers.q.index(stage), desc_base, i_r + on,
                        buffers.base.index(stage), full.q.index(stage))  # fmt: skip
            fetch_both(desc_do, row_do + on, col_do, buffers.do.index(stage), desc_delta, i_r + on,
                        buffers.delta.index(stage), full.do.index(stage))  # fmt: skip
            i_step += 1


# scalars of a unit that each warpgroup parks in shared memory
NUM_SCALARS = gl.constexpr(12)


class Buffers(NamedTuple):
    """Tiles in shared memory; of dx two stages, of dq two of two halves."""

    k: Any
    v: Any
    q: Any
    do: Any
    dx: Any
    dq: Any
    base: Any
    delta: Any


class Full(NamedTuple):
    """Barriers that tell that a buffer is filled."""

    kv: Any  # k, v
    q: Any
    do: Any
    dx: Any
    dq: Any


class Empty(NamedTuple):
    """Barriers that tell that a buffer may be filled again."""

    q: Any  # of q and do
    dq: Any
    kv: Any  # once: k and v become the staging buffers of dk and dv
    dx: Any  # where D is 64, else `kv`, at which no partition waits as this


@gluon.jit
def _dq_half(c: gl.constexpr, buf_k, dx, zero, i_step):
    """Starts the product of half of dq's columns (D = 128): dx k[:, half c]."""
    WIDTH: gl.constexpr = zero.shape[1]
    k = buf_k.index(i_step >> 30).slice(c * WIDTH, WIDTH, 1)
    return warpgroup_mma(dx.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def _publish_half(c: gl.constexpr, dq, bufs_dq, full, empty, i_step):
    """Hands half a tile of dq to the warp that adds it (D = 128)."""
    common.wait_empty(empty.dq, i_step, 2)
    bufs_dq.index(i_step % 2 * 2 + c).store(dq)
    # the TMA of the adding warp reads what these threads stored
    sm90.fence_async_shared()
    mbarrier.arrive(full.dq.index(i_step % 2))


@gluon.jit
def _whole(c: gl.constexpr, buf_k, bufs_dx, bufs_dq, full, empty, zero, i_step):
    """Computes a whole tile of dq and hands it over, if the step is this warpgroup's (D = 64)."""
    if (i_step >= 0) & (i_step % 2 == c):
        stage = i_step % 2
        common.wait_full(full.dx, i_step, 2)
        dx = bufs_dx.index(stage).permute((1, 0))
        dq = warpgroup_mma(dx, buf_k.index(0), zero, use_acc=False, is_async=True)
        dq = sm90.warpgroup_mma_wait(0, deps=(dq,))
        a, b = gl.split(gl.permute(gl.reshape(dq, [dq.shape[0], 2, 32]), (0, 2, 1)))
        common.wait_empty(empty.dq, i_step, 2)
        bufs_dq.index(2 * stage).store(a)
        bufs_dq.index(2 * stage + 1).store(b)
        sm90.fence_async_shared()
        mbarrier.arrive(full.dq.index(stage))
        mbarrier.arrive(empty.dx.index(stage))


@gluon.jit
def _visible(at, window, i_step, layout: gl.constexpr, D: gl.constexpr, FLAGS: gl.constexpr):
    """The queries that see each of 64 keys: `width` from `low` on. at: the number of queries, the
    first key, and the number of keys."""
    queries, row, keys = at
    at = row - (keys - queries)
    i_step = common.opaque_if_wide(i_step, D)
    left, right = common.opaque(window, i_step)
    o_n = common.opaque_range(gl.arange(0, 64, gl.SliceLayout(1, layout)), i_step, THREAD_ROW_BITS)
    low, width = first_and_width(at + o_n - right, at + o_n + left + 1, (left, right), FLAGS)
    # rows past the last key are seen by no query
    return gl.where(row + o_n < keys, low, 1 << 30), width


@gluon.jit
def _step(c: gl.constexpr, zero, zero_q, kv_regs, dk, dv, buffers, full, empty, i_step, pad,
          scalars, window, query, masked, factor, cap, BM: gl.constexpr, D: gl.constexpr,
          ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """One tile of queries: adds to dk and dv, publishes dx, and computes dq of the step before.

    query: the tile's first row in the sequence. masked: whether a query of it may not see a key, or
    it has rows past the end. pad, scalars: those of the unit. kv_regs: k and v as operands, D = 64.
    """
    layout: gl.constexpr = zero.type.layout
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    stage = i_step % ST
    FIRST: gl.constexpr = c * NUM_SCALARS
    q, do = buffers.q.index(stage), buffers.do.index(stage)
    if D == 64:
        k, v = kv_regs
    else:
        # at constant indices the addresses of k and v are kept in registers
        opaque_zero = i_step >> 30
        k, v = (
            buffers.k.index(opaque_zero).slice(c * 64, 64),
            buffers.v.index(opaque_zero).slice(c * 64, 64),
        )
    common.wait_full(full.q, i_step, ST)
    if masked:
        common.wait_full(full.do, i_step, ST)
        (queries,) = common.load_scalar(pad, scalars[4:5], FIRST + 4, D)
        common.zero_tail_rows((q, do), queries - query, i_step, BM, D)
    if D != 64:
        # a unit's first step multiplies what the buffer happens to hold, and drops the result
        prev = i_step - 1
        if prev >= 0:
            common.wait_full(full.dx, prev, 2)
        dq = _dq_half(c, buffers.k, buffers.dx.index((i_step + 1) % 2), zero_q, i_step)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    if D != 64:
        dq = sm90.warpgroup_mma_wait(1, deps=(dq,))
        if prev >= 0:
            _publish_half(c, dq, buffers.dq, full, empty, prev)
    common.wait_full(full.do, i_step, ST)
    delta = buffers.delta.index(stage).load(gl.SliceLayout(0, layout))
    dp = gl.expand_dims(0.0 - delta, 0) + zero
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
    base = buffers.base.index(stage).load(gl.SliceLayout(0, layout))
    s = sm90.warpgroup_mma_wait(1, deps=(s,))
    o_m = query + gl.arange(0, BM, gl.SliceLayout(0, layout))
    if masked:
        at = common.load_scalar(pad, scalars[4:7], FIRST + 4, D)
        seen = _visible(at, window, i_step, layout, D, FLAGS)
        p, w = weights(s, base, seen, o_m, factor, cap, True, FLAGS)
        p = p.to(q.dtype)
    else:
        p, w = weights(s, base, (), o_m, factor, cap, False, FLAGS)
        p = p.to(q.dtype)
    dv = warpgroup_mma(gl.convert_layout(p, a_layout), do, dv, is_async=True)
    dp = sm90.warpgroup_mma_wait(1, deps=(dp,))
    dx = (w * dp).to(q.dtype)
    dk = warpgroup_mma(gl.convert_layout(dx, a_layout), q, dk, is_async=True)
    if D == 64:
        common.wait_empty(empty.dx, i_step, 2)
    buffers.dx.index(i_step % 2).slice(c * 64, 64).store(dx)
    # wgmma of the other warpgroup reads it through the async proxy
    sm90.fence_async_shared()
    mbarrier.arrive(full.dx.index(i_step % 2))
    if D == 64:
        _whole(c, buffers.k, buffers.dx, buffers.dq, full, empty, zero_q, i_step - 1)
    dk, dv = sm90.warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(empty.q.index(stage))
    return dk, dv


@gluon.jit
def _rotated_back(dk, cos_ptr, sin_ptr, rows, D: gl.constexpr):
    """Gradients of 64 keys, from those of the keys turned by a rotary embedding, whose pairs are
    (i, i + D / 2): both are one thread's. The tables' rows begin with the first key's."""
    HALF: gl.constexpr = D // 2
    a, b = gl.split(gl.permute(gl.reshape(dk, [64, 2, HALF]), (0, 2, 1)))
    layout: gl.constexpr = a.type.layout
    o_r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    at = o_r[:, None] * HALF + o_c[None, :]
    mask = (o_r < rows)[:, None] & (o_c >= 0)[None, :]
    cos = gl.load(cos_ptr + at, mask=mask, other=0.0)
    sin = gl.load(sin_ptr + at, mask=mask, other=0.0)
    both = gl.join(a * cos + b * sin, b * cos - a * sin)
    both = gl.reshape(gl.permute(both, (0, 2, 1)), [64, D])
    return gl.convert_layout(both, dk.type.layout)


@gluon.jit
def _unit(c: gl.constexpr, unit, loc, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty,
          offsets, sizes, window, pad, tables, BM: gl.constexpr, D: gl.constexpr,
          ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """The loop over a unit's queries for 64 of its keys, then dk and dv to memory."""
    group = sizes.group
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WIDTH: gl.constexpr = D if D == 64 else D // 2
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    zero = gl.zeros([64, BM], gl.float32, s_layout)
    zero_q = gl.zeros([64, WIDTH], gl.float32, q_layout)
    i_step = unit >> 31  # an opaque zero
    k, v = buffers.k.index(i_step).slice(c * 64, 64), buffers.v.index(i_step).slice(c * 64, 64)
    if not FLAGS & FLAG.PACKED_K:
        loc = common.locate_tile(unit, offsets, sizes, 128, True, FLAGS)
    queries, keys, row = loc.queries, loc.keys, loc.row
    query, count, inner, outer = common.visible_query_tiles(
        row, queries, keys, common.opaque(window, i_step), BM, 128, FLAGS, 0
    )
    # the last tile of keys masks all its steps: rows past the end are to add nothing to dq
    if row + 128 > keys:
        outer = inner
    row += c * 64
    FIRST: gl.constexpr = c * NUM_SCALARS
    scalars = (query + (count - 1) * BM, count, count - inner, count - outer, queries)
    scalars = scalars + (row, keys, loc.i_h, loc.i_kb, loc.begin_k, loc.capacity)
    scalars = scalars + (gl.maximum(group, 1),)
    common.store_scalars(pad, scalars, FIRST, D)
    dk = gl.zeros([64, D], gl.float32, k_layout)
    dv = gl.zeros([64, D], gl.float32, k_layout)
    for tile in gl.static_range(2):
        mbarrier.wait(full.kv.index(tile), 0)
    common.zero_tail_rows((k, v), keys - row, i_step, 64, D)
    kv_regs = (zero, zero)
    if D == 64:
        k_regs: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
        kv_regs = (k.load(k_regs), v.load(k_regs))
    i_head = 0
    going = True
    while going:
        if FLAGS & FLAG.SOFTCAP and D > SPARE_REGISTERS:
            # a loop each for steps with a mask, without and with: two ways to the weights in one
            # would spill
            for i_loop in gl.static_range(3 if FLAGS & FLAG.RIGHT else 2):
                last, count, inner, outer = common.load_scalar(pad, scalars[:4], FIRST, D)
                edges = (0, outer, inner, count)
                for i in range(edges[i_loop], edges[i_loop + 1]):
                    dk, dv = _step(
                        c, zero, zero_q, kv_regs, dk, dv, buffers, full, empty, i_step + i, pad,
                        scalars, window, last - i * BM, i_loop != 1, factor, cap, BM, D, ST, FLAGS,
                    )  # fmt: skip
        else:
            # one loop over a head's steps, so that the code of a step is there once
            last, count = common.load_scalar(pad, scalars[:2], FIRST, D)
            for i in range(count):
                inner, outer = common.load_scalar(pad, scalars[2:4], FIRST + 2, D)
                dk, dv = _step(
                    c, zero, zero_q, kv_regs, dk, dv, buffers, full, empty, i_step + i, pad,
                    scalars, window, last - i * BM, (i < outer) | (i >= inner), factor, cap, BM, D,
                    ST, FLAGS,
                )  # fmt: skip
        i_step += common.load_scalar(pad, scalars[1:2], FIRST + 1, D)[0]
        i_head += 1
        going = i_head < common.load_scalar(pad, scalars[11:], FIRST + 11, D)[0]
    if D == 64:
        _whole(c, buffers.k, buffers.dx, buffers.dq, full, empty, zero_q, i_step - 1)
    elif i_step > 0:
        common.wait_full(full.dx, i_step - 1, 2)
        dq = _dq_half(c, buffers.k, buffers.dx.index((i_step + 1) % 2), zero_q, i_step)
        dq = sm90.warpgroup_mma_wait(0, deps=(dq,))
        _publish_half(c, dq, buffers.dq, full, empty, i_step - 1)
    # both warpgroups are done with k once both have handed over the last tile
    mbarrier.arrive(empty.kv.index(0))
    mbarrier.wait(empty.kv.index(0), 0)
    opaque_zero = common.opaque_if_wide(i_step, D) >> 30
    k, v = (
        buffers.k.index(opaque_zero).slice(c * 64, 64),
        buffers.v.index(opaque_zero).slice(c * 64, 64),
    )
    if tables[0] is None:
        out_k = common.stage_through_smem(k, (dk * scale).to(k.dtype), D)
        out_v = common.stage_through_smem(v, dv.to(k.dtype), D)
    row, _, i_kv, i_kb, begin_k, capacity = common.load_scalar(pad, scalars[5:11], FIRST + 5, D)
    S, H, each = common.opaque((sizes.S, sizes.H, group), i_step)
    HKV = H // each
    if tables[0] is None:
        pitch = HKV
    else:
        # beside those of queries in one tensor; values first, which frees their registers
        pitch = H + 2 * HKV
        out_v = common.stage_through_smem(v, dv.to(k.dtype), D)
    at = ((i_kb.to(gl.int64) * S + begin_k + row) * pitch + i_kv) * D
    if tables[0] is None:
        common.store_staged(dk_ptr + at, out_k, pitch * D, capacity - row, i_step, D)
    common.store_staged(dv_ptr + at, out_v, pitch * D, capacity - row, i_step, D)
    if tables[0] is not None:
        cos_ptr, sin_ptr, table_rows = tables
        HALF: gl.constexpr = D // 2
        first = (i_kb.to(gl.int64) * table_rows + begin_k + row) * HALF
        dk = _rotated_back(dk * scale, cos_ptr + first, sin_ptr + first, capacity - row, D)
        out_k = common.stage_through_smem(k, dk.to(k.dtype), D)
        common.store_staged(dk_ptr + at, out_k, pitch * D, capacity - row, i_step, D)


@gluon.jit
def _tile_loop(c: gl.constexpr, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets,
               sizes, window, pad, tables, BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
               FLAGS: gl.constexpr):  # fmt: skip
    units = sizes.units
    loc = packed_place(offsets, sizes, FLAGS)
    if D > SPARE_REGISTERS:
        if has_keys(loc, FLAGS):
            _unit(c, common.program_id_volatile(units), loc, dk_ptr, dv_ptr, factor, cap, scale,
                  buffers, full, empty, offsets, sizes, window, pad, tables, BM, D, ST,
                  FLAGS)  # fmt: skip
    elif has_keys(loc, FLAGS):
        # one unit too, but a loop to the compiler: without it ptxas computes addresses of buffers
        # and barriers in uniform registers
        programs = gl.num_programs(0)
        # the same step count, but not read at the start and kept in a register
        if FLAGS & FLAG.SOFTCAP:
            programs = units
        for unit in range(common.program_id_volatile(units), units, programs):
            _unit(c, unit, loc, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets,
                  sizes, window, pad, tables, BM, D, ST, FLAGS)  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "cap", "scale", *_SIZES, *_STRIDES, *_DO_STRIDES,
                              "table_rows"])  # fmt: skip
def softmax_bwd_sm90_kernel(
    desc_q,  # tiles [BM, D]
    desc_k,  # [128, D]
    desc_v,  # [128, D]
    desc_do,  # [BM, D]
    desc_base,  # [BM] of [tiles * BM]: lse in base 2, inf for -inf and for no query
    desc_delta,  # [BM] of [tiles * BM]
    desc_dq,  # [BM, D / 2] of float32 [tiles * BM, D]: _add counts tiles of queries
    semaphores_ptr,  # [tiles], zeros
    dk_ptr,  # [KB, S, HKV, D]
    dv_ptr,  # [KB, S, HKV, D]
    cu_q_ptr,  # [N + 1]
    cu_k_ptr,  # [N + 1]
    lengths_ptr,  # [N]
    factor, cap, scale, T, S, H, N, group, tiles, search_steps, section, units, left, right,
    q_rb, q_rh, q_ch, k_rb, k_rh, k_ch, v_rb, v_rh, v_ch, do_rb, do_rh, do_ch,
    BM: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, FLAGS: gl.constexpr,
    CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
    cos_ptr=None,  # [B or 1, S, D / 2], float32: keys were turned, and dk is of those before
    sin_ptr=None,
    table_rows=None,  # S, or 0 for tables of one batch row
):  # fmt: skip
    """grid (units,); a unit is 128 keys of a head. ST: buffers of queries.

    With tables, dk and dv are heads of [KB, S, H + 2 HKV, D].
    """
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
    full_k = common.barriers(2, 1)
    full_q = common.barriers(ST, 1)
    full_do = common.barriers(ST, 1)
    empty_x = common.barriers(ST, 2)
    full_dx = common.barriers(2, 2)
    full_dq = common.barriers(2, 1 if D == 64 else 2)
    empty_dq = common.barriers(2, 1)
    done = common.barriers(1, 2)
    empty_dx = common.barriers(2, 1) if D == 64 else done
    pad = sm90_device.alloc_scalars(2 * NUM_SCALARS)
    buffers = Buffers(buf_k, buf_v, bufs_q, bufs_do, bufs_dx, bufs_dq, bufs_base, bufs_delta)
    full = Full(full_k, full_q, full_do, full_dx, full_dq)
    empty = Empty(empty_x, empty_dq, done, empty_dx)
    offsets = (cu_q_ptr, cu_k_ptr, lengths_ptr)
    sizes = common.Sizes(T, S, H, N, group, tiles, search_steps, section, units)
    tables = (cos_ptr, sin_ptr, table_rows)
    gl.warp_specialize([
        (_tile_loop, (0, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes,
                      (left, right), pad, tables, BM, D, ST, FLAGS)),
        (_tile_loop, (1, dk_ptr, dv_ptr, factor, cap, scale, buffers, full, empty, offsets, sizes,
                      (left, right), pad, tables, BM, D, ST, FLAGS)),
        (load_partition, ((desc_q, desc_k, desc_v, desc_do, desc_base, desc_delta),
                 LoadBuffers(buf_k, buf_v, bufs_q, bufs_do, bufs_base, bufs_delta),
                 LoadFull(full_k, full_q, full_do), empty_x,
                 offsets,
                 sizes, (left, right),
                 ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch),
                  (do_rb, do_rh, do_ch)),
                 BM, ST, FLAGS)),
        (add_even, (desc_dq, semaphores_ptr, bufs_dq, full_dq, empty_dq,
                 offsets,
                 sizes, (left, right),
                 BM, D, FLAGS)),
        (add_odd, (desc_dq, semaphores_ptr, bufs_dq, full_dq, empty_dq,
                offsets,
                sizes, (left, right),
                 BM, D, FLAGS)),
    ], [4, 1, 1, 1], [CONSUMER, PRODUCER, PRODUCER, PRODUCER])  # fmt: skip
