"""Softmax attention forward for sm_90, warp-specialised.

    m' = max(m, max_s x_ts)     l' = e^(m - m') l + sum_s e^(x_ts - m')     o' likewise with v_s

A program takes units, tiles of 128 queries of a head, one after another. Its partitions and what
passes between them:

    load_partition, 1 warp                 _attend, c = 0 and 1: 4 warps and 64 queries each
      k[0]             -- full.k -->         s = q k[0]^T, the first weights p
      q of each c      -- full.q -->         (warpgroup c waits for its own stage of q)
      k[i], v[i - 1]   -- full.k, full.v --> _step i: s = q k[i]^T beside acc += p v[i - 1], and
                                             that beside the exponentials of s
      v[last]          -- full.v -->         acc += p v[last]; o through q's buffer to memory
      next unit        -- scheduler.full --> receive_next_tile
    waits for empty.q, empty.k, empty.v and scheduler.empty, by which the warpgroups return buffers

    buffers          stages                arrivals a phase: full / empty
    q  [64, D]       NC * Q_STAGES         1 (TMA) / 1, the warpgroup that owns the stage
    k  [BN, D]       ST                    1 (TMA) / NC
    v  [BN, DV]      ST                    1 (TMA) / NC
    next_units       SCHEDULER_STAGES      1 / NC

Order of a unit's loads: that in which the warpgroups wait for them, so that none delays one needed
earlier.

Which unit comes next is static, the unit `num_programs` on, or dynamic (flag DYNAMIC), the first
that is not taken yet, by a counter in global memory. Under a mask or with sequences of mixed
lengths units differ in work, and a static program may end long before another; taken in order, the
longest first, all programs end within one unit's time. No result depends on who takes what.

    load_partition: fetch_next_tile           each warpgroup: receive_next_tile
        atomic_add on the counter                 wait full
        wait empty                                read the number
        store to next_units, arrive full -->      arrive empty

Packed lengths are not known to the host, which counts the most tiles that they may have: those of
no queries are passed over by load_partition alone, which then hands out the first unit too. With a
unit it hands out where that is, so that no warpgroup looks for its sequence.

m need not be the maximum: all sums are relative to it, and it cancels when acc is divided by l. So
it may lag behind by SLACK, and acc and l are rescaled for few tiles: in most calls hardly ever
after the first.

p goes from the accumulator's registers into the next product, without shared memory. Only tiles at
the edges of what is seen are masked. K of 192 columns is loaded in PANELS of 64: TMA boxes are to
be powers of two wide.
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90 import common
from slipstream.kernels.primitives import sm90, sm90_device
from slipstream.kernels.primitives.device import LN2, LOG2E
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# the next tile is fetched while one is computed
SCHEDULER_STAGES = gl.constexpr(2)


class Scheduler(NamedTuple):
    """next_units: a ring in shared memory, with its barriers `full` and `empty`."""

    counter_ptr: Any  # how many units are taken, in global memory
    next_units: Any
    full: Any
    empty: Any


@gluon.constexpr_function
def hands_out_places(flags):
    """1 if units come with where they are: those of packed queries from the counter; else 0."""
    return int(bool(common.FLAG.DYNAMIC & flags) and bool(common.FLAG.PACKED_Q & flags))


@gluon.constexpr_function
def unit_scalars(flags):
    """Numbers of a stage of next_units: a unit and, if it comes with it, where it is."""
    return 1 + hands_out_places(flags) * len(common.TileLocation._fields)


@gluon.jit
def alloc_scheduler(CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COUNT: gl.constexpr = SCHEDULER_STAGES * unit_scalars(FLAGS)
    next_units = gl.allocate_shared_memory(gl.int32, [COUNT, 1], layout)
    # placeholders without DYNAMIC: the tuple has the same types
    full = next_units
    empty = next_units
    if FLAGS & common.FLAG.DYNAMIC:
        full = common.barriers(SCHEDULER_STAGES, 1)
        empty = common.barriers(SCHEDULER_STAGES, CONSUMERS)
    return next_units, full, empty


@gluon.jit
def _take(scheduler):
    return gl.atomic_add(scheduler.counter_ptr, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def _hand_out(unit, loc, scheduler, i_step, FLAGS: gl.constexpr):
    common.wait_empty(scheduler.empty, i_step, SCHEDULER_STAGES)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    COUNT: gl.constexpr = unit_scalars(FLAGS)
    numbers = (unit,) + loc
    for i in gl.static_range(COUNT):
        scheduler.next_units.index(i_step % SCHEDULER_STAGES * COUNT + i).store(
            gl.full([1], numbers[i], gl.int32, layout)
        )
    mbarrier.arrive(scheduler.full.index(i_step % SCHEDULER_STAGES))


@gluon.jit
def _hand_out_place(unit, scheduler, i_step, offsets, sizes, B: gl.constexpr, FLAGS: gl.constexpr):
    """Hands out this unit, or the first one taken after it that has queries, and where it is."""
    searching = True
    while searching:
        # the last one's place where there is none
        at = gl.minimum(unit, sizes.units - 1)
        loc = common.locate_tile(at, offsets, sizes, B, False, FLAGS)
        searching = (unit < sizes.units) & (loc.row >= loc.queries)
        if searching:
            unit = _take(scheduler)
        else:
            _hand_out(unit, loc, scheduler, i_step, FLAGS)
    return unit


@gluon.jit
def fetch_next_tile(unit, scheduler, i_step, offsets, sizes, B: gl.constexpr, FLAGS: gl.constexpr):
    """The unit after this one, for the producer; i_step: units handed out so far."""
    if FLAGS & common.FLAG.DYNAMIC:
        unit = _take(scheduler)
        if hands_out_places(FLAGS):
            unit = _hand_out_place(unit, scheduler, i_step, offsets, sizes, B, FLAGS)
        else:
            _hand_out(unit, (), scheduler, i_step, FLAGS)
    else:
        unit += gl.num_programs(0)
    return unit


@gluon.jit
def receive_next_tile(unit, scheduler, i_step, FLAGS: gl.constexpr):
    """The unit after this one, for a consumer; i_step: units received so far."""
    if FLAGS & common.FLAG.DYNAMIC:
        common.wait_full(scheduler.full, i_step, SCHEDULER_STAGES)
        unit = _scalar(scheduler, i_step, 0, 4, FLAGS)
        if not hands_out_places(FLAGS):
            mbarrier.arrive(scheduler.empty.index(i_step % SCHEDULER_STAGES))
    else:
        unit += gl.num_programs(0)
    return unit


@gluon.jit
def _scalar(scheduler, i_step, at, WARPS: gl.constexpr, FLAGS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at += i_step % SCHEDULER_STAGES * unit_scalars(FLAGS)
    return gl.max(scheduler.next_units.index(at).load(layout), 0)


@gluon.jit
def place_of_unit(unit, scheduler, i_step, offsets, sizes, B: gl.constexpr, WARPS: gl.constexpr,
                  FLAGS: gl.constexpr):  # fmt: skip
    """Where this unit is; i_step: units before it that were handed out to or received by WARPS."""
    if hands_out_places(FLAGS):
        numbers = ()
        for i in gl.static_range(1, unit_scalars(FLAGS)):
            numbers = numbers + (_scalar(scheduler, i_step, i, WARPS, FLAGS),)
        loc = common.TileLocation(*numbers)
    else:
        loc = common.locate_tile(unit, offsets, sizes, B, False, FLAGS)
    return loc


# how far, in powers of two, a maximum may grow before a row's sums are rescaled
SLACK = gl.constexpr(8.0)


@gluon.constexpr_function
def _scaling(n):
    """Asm that multiplies n numbers of a thread by n others, unless these are 1 in all rows of the
    warp. A thread has two rows, in alternating pairs of numbers."""
    lines = [f"setp.neu.f32 p, ${2 * n}, 0f3F800000;"]
    lines.append(f"setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;")
    lines.append("vote.sync.any.pred q, p, 0xffffffff;")
    lines += [f"mov.f32 ${i}, ${n + i};" for i in range(n)]
    lines.append("@!q bra DONE;")
    lines += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return f"{{ .reg .pred p, q; {' '.join(lines)} DONE: }}"


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=f"] * n + ["f"] * 2 * n)


@gluon.jit
def scaled(acc, by):
    """acc times a number for each row, mostly 1: where all of a warp are, nothing is multiplied."""
    by = gl.convert_layout(by, gl.SliceLayout(1, acc.type.layout))
    _, by = gl.broadcast(acc, by[:, None])
    N: gl.constexpr = 64 if acc.shape[1] >= 128 else acc.shape[1] // 2
    return gl.inline_asm_elementwise(
        _scaling(N), _operands(N), [acc, by], dtype=gl.float32, is_pure=False, pack=N
    )


@gluon.jit
def _row_max(s, like):
    """The maximum of each row, by halves first: one after another each would wait for the last."""
    for _ in gl.static_range(2):
        halves = gl.permute(gl.reshape(s, [s.shape[0], 2, s.shape[1] // 2]), (0, 2, 1))
        a, b = gl.split(halves)
        s = gl.maximum(a, b)
    return gl.convert_layout(gl.max(s, 1), like.type.layout)


@gluon.jit
def weights(s, m, mask_args, i_step, key, masked, DV: gl.constexpr, FLAGS: gl.constexpr):
    """p of a tile whose first key is `key`, the new m, and the factor of what was summed before.

    mask_args: the first query's position, the number of keys, the window, factor and cap. masked:
    whether a query may not see a key of the tile.
    """
    layout: gl.constexpr = s.type.layout
    at, keys, window, factor, cap = mask_args
    score_scale = factor
    if FLAGS & common.FLAG.SOFTCAP:
        s = cap - 2.0 * cap * common.inverse(1.0 + gl.exp2(s * factor))
        score_scale = 1.0
    if masked:
        o_m = common.opaque_range(
            gl.arange(0, 64, m.type.layout),
            common.opaque_if_wide(i_step, DV),
            common.THREAD_ROW_BITS,
        )
        o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        o_n = key + common.opaque_range(
            o_n, common.opaque_if_wide(i_step, DV), common.THREAD_COLUMN_BITS
        )
        low, high = at - window[0], at + window[1] + 1
        # with bounds on both sides: else kept in registers between masked tiles
        if FLAGS & common.FLAG.LEFT:
            low, high = common.opaque((low, high), i_step)
        if FLAGS & common.FLAG.RIGHT:
            high = gl.minimum(high + o_m, keys)
        # an opaque zero: comparisons that all rows share would be kept as bits
        elif FLAGS & common.FLAG.SOFTCAP:
            high = keys + (o_m & (i_step >> 30))
        else:
            high = keys + o_m * 0
        if FLAGS & common.FLAG.LEFT:
            low += o_m
            width = gl.maximum(high - low, 0)
            s = common.where_within(s, o_n[None, :], low[:, None], width[:, None])
        else:
            s = common.where_below(s, o_n[None, :], high[:, None])
    top = _row_max(s, m) * score_scale
    top = gl.where(top > m + SLACK, top, m)
    base = gl.where(top == float("-inf"), 0.0, top)
    return gl.exp2(s * score_scale - base[:, None]), top, gl.exp2(m - base)


@gluon.jit
def with_sink(m, l, sink):
    """m, l and their factor with one more key of this score and no value."""
    top = gl.maximum(m, sink)
    base = gl.where(top == float("-inf"), 0.0, top)
    shrink = gl.exp2(m - base)
    return top, l * shrink + gl.exp2(sink - base), shrink


@gluon.jit
def operand(e, acc, dtype: gl.constexpr):
    """Weights as the left operand of the next product, in registers."""
    return gl.convert_layout(e.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


class Buffers(NamedTuple):
    """Tiles in shared memory."""

    q: Any  # one or two stages a warpgroup
    k: Any
    v: Any


class Barriers(NamedTuple):
    """Two for each buffer: it is filled; it may be filled again."""

    q: Any
    k: Any
    v: Any


class Ring(NamedTuple):
    """Stages of k or v, and their barriers."""

    buffers: Any
    full: Any
    empty: Any


@gluon.constexpr_function
def panels(D):
    """Boxes by which TMA loads rows of q and k: each is to be a power of two wide. Of 512 columns
    one tile of keys alone fits, whose panels are filled again while others are multiplied."""
    return {192: 3, 512: 4}.get(D, 1)


@gluon.constexpr_function
def fills(D):
    """Loads of a tile of keys that have barriers of their own: of one panel each, or of all."""
    return panels(D) if D > 256 else 1


@gluon.jit
def _fetch_panels(desc, row, col, full, bufs, stage, PANELS: gl.constexpr):
    """Starts to load a tile of q or k."""
    mbarrier.expect(full, desc.block_type.nbytes * PANELS)
    for i in gl.static_range(PANELS):
        buffer = bufs.index(stage * PANELS + i)
        sm90.copy_in(desc, [row, col + i * desc.block_type.shape[1]], full, buffer)


@gluon.jit
def _fetch_keys(desc, row, col, ring, i_step, D: gl.constexpr, ST: gl.constexpr):
    """Starts to load a tile of keys, each of its loads as soon as the buffer is free."""
    COUNT: gl.constexpr = fills(D)
    PANELS: gl.constexpr = panels(D) // COUNT
    for i in gl.static_range(COUNT):
        at = i_step * COUNT + i
        common.wait_empty(ring.empty, at, ST * COUNT)
        stage = at % (ST * COUNT)
        column = col + i * PANELS * desc.block_type.shape[1]
        _fetch_panels(desc, row, column, ring.full.index(stage), ring.buffers, stage, PANELS)


@gluon.jit
def load_partition(descs, buffers, full, empty, offsets, sizes, window, strides, scheduler,
                   NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
                   FLAGS: gl.constexpr):  # fmt: skip
    desc_q, desc_k, desc_v = descs
    strides_q, strides_k, strides_v = strides
    PANELS: gl.constexpr = panels(D)
    Q_STAGES: gl.constexpr = buffers.q.shape[0] // (NC * PANELS)
    group, units = sizes.group, sizes.units
    ring_k = Ring(buffers.k, full.k, empty.k)
    i_step = units * 0
    units_done = units * 0
    unit = common.program_id_volatile(i_step)
    if hands_out_places(FLAGS):
        unit = _hand_out_place(unit, scheduler, units_done, offsets, sizes, 64 * NC, FLAGS)
    while unit < units:
        loc = place_of_unit(unit, scheduler, units_done, offsets, sizes, 64 * NC, 1, FLAGS)
        visible = common.visible_key_tiles(
            loc.row, loc.queries, loc.keys, window, 64 * NC, BN, FLAGS
        )
        row_q, col_q = common.tile_coords(strides_q, loc.i_b, loc.i_h, loc.begin + loc.row)
        row_k, col_k = common.tile_coords(
            strides_k, loc.i_kb, loc.i_h // group, loc.begin_k + visible.first
        )
        row_v, col_v = common.tile_coords(
            strides_v, loc.i_kb, loc.i_h // group, loc.begin_k + visible.first
        )
        # the first tile of keys before q, whose buffer the last unit's o may still leave
        _fetch_keys(desc_k, row_k, col_k, ring_k, i_step, D, ST)
        for c in gl.static_range(NC):
            stage_q = units_done % Q_STAGES * NC + c
            mbarrier.wait(empty.q.index(stage_q), ((units_done // Q_STAGES) & 1) ^ 1)
            _fetch_panels(
                desc_q, row_q + c * 64, col_q, full.q.index(stage_q), buffers.q, stage_q, PANELS
            )
        for i in range(1, visible.num_tiles):
            _fetch_keys(desc_k, row_k + i * BN, col_k, ring_k, i_step + i, D, ST)
            stage = (i_step + i - 1) % ST
            common.wait_empty(empty.v, i_step + i - 1, ST)
            common.fetch(
                desc_v, row_v + (i - 1) * BN, col_v, full.v.index(stage), buffers.v.index(stage)
            )
        i_step += visible.num_tiles
        stage = (i_step - 1) % ST
        common.wait_empty(empty.v, i_step - 1, ST)
        common.fetch(
            desc_v,
            row_v + (visible.num_tiles - 1) * BN,
            col_v,
            full.v.index(stage),
            buffers.v.index(stage),
        )
        # after all loads of this unit are on their way: the counter's latency is hidden
        handed_out = units_done + hands_out_places(FLAGS)
        unit = fetch_next_tile(unit, scheduler, handed_out, offsets, sizes, 64 * NC, FLAGS)
        units_done += 1


_SIZES = ["T", "S", "H", "N", "group", "tiles", "search_steps", "section", "units", "left", "right"]
_STRIDES = [f"{x}_{i}" for x in "qkv" for i in ("rb", "rh", "ch")]
_DO_STRIDES = ["do_rb", "do_rh", "do_ch"]
# scalars of a unit that each warpgroup parks in shared memory
NUM_SCALARS = gl.constexpr(8)


@gluon.jit
def _product(bufs_q, stage_q, ring, i_step, zero, D: gl.constexpr, ST: gl.constexpr):
    """Starts q k^T of this step, panel by panel of the width, as they are filled; of several
    loads each but the last goes back once it was multiplied."""
    PANELS: gl.constexpr = panels(D)
    FILLS: gl.constexpr = fills(D)
    at = stage_q * PANELS
    if D > 128:
        # opaque: at a constant index the descriptors of all panels are kept in registers
        at += i_step >> 30
    stage = i_step % ST * PANELS
    if ST == 1:
        stage += i_step >> 30
    common.wait_full(ring.full, i_step * FILLS, ST * FILLS)
    k = ring.buffers.index(stage).permute((1, 0))
    s = warpgroup_mma(bufs_q.index(at), k, zero, use_acc=False, is_async=True)
    for i in gl.static_range(1, PANELS):
        if FILLS > 1:
            common.wait_full(ring.full, i_step * FILLS + i, ST * FILLS)
        k = ring.buffers.index(stage + i).permute((1, 0))
        s = warpgroup_mma(bufs_q.index(at + i), k, s, is_async=True)
        if FILLS > 1:
            s = sm90.warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(ring.empty.index((i_step * FILLS + i - 1) % (ST * FILLS)))
    return s


@gluon.jit
def _last_fill(i_step, D: gl.constexpr, ST: gl.constexpr):
    """The barrier of a tile's last load."""
    FILLS: gl.constexpr = fills(D)
    return (i_step * FILLS + FILLS - 1) % (ST * FILLS)


@gluon.jit
def _step(stage_q, bufs_q, zero, ring_k, ring_v, state, i_step, mask_args, key, masked,
          D: gl.constexpr, ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """q k^T of this step beside p v of the one before, and that beside the exponentials; masked:
    whether a query may not see a key of the tile."""
    e, m, l, acc, shrink = state
    prev = i_step - 1
    s = _product(bufs_q, stage_q, ring_k, i_step, zero, D, ST)
    # while q k^T runs: p of the tile before as an operand, and acc at the new maximum
    p = operand(e, acc, bufs_q.dtype)
    acc = scaled(acc, shrink)
    common.wait_full(ring_v.full, prev, ST)
    acc = warpgroup_mma(p, ring_v.buffers.index(prev % ST), acc, is_async=True)
    # q k^T is done, p v may still run: k can be overwritten
    s = sm90.warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(ring_k.empty.index(_last_fill(i_step, D, ST)))
    e, m, shrink = weights(s, m, mask_args, i_step, key, masked, ring_v.buffers.shape[2], FLAGS)
    l = l * shrink + gl.sum(e, 1)
    # a second wait for a barrier that has long passed: ptxas would otherwise move the wait for p v
    # above the exponentials, which are to run beside it
    common.wait_full(ring_v.full, prev, ST)
    acc, e = sm90.warpgroup_mma_wait(0, deps=(acc, e))
    mbarrier.arrive(ring_v.empty.index(prev % ST))
    return e, m, l, acc, shrink


@gluon.jit
def _key_loop(stage_q, bufs_q, zero, ring_k, ring_v, i_step, key_range, mask_args, BN: gl.constexpr,
          D: gl.constexpr, DV: gl.constexpr, ST: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    """The loop over a unit's tiles of keys, all but p v of the last.

    Returns p of the last tile as an operand, m, l and acc. key_range: first key, number of tiles,
    and those between which no mask is needed.
    """
    key, count, inner, outer = key_range
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    s = _product(bufs_q, stage_q, ring_k, i_step, zero, D, ST)
    s = sm90.warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(ring_k.empty.index(_last_fill(i_step, D, ST)))
    # the first tile has no p v beside it
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, zero.type.layout))
    masked = (inner > 0) | (outer <= 0)
    e, m, _ = weights(s, m, mask_args, i_step, key, masked, DV, FLAGS)
    l = gl.sum(e, 1)
    acc = gl.zeros([64, DV], gl.float32, o_layout)
    shrink = gl.full([64], 1.0, gl.float32, m.type.layout)
    if DV == 128 and FLAGS & (common.FLAG.LEFT | common.FLAG.RIGHT):
        # one loop, with a branch around the mask alone: the code of a step is there once
        for i in range(1, count):
            e, m, l, acc, shrink = _step(
                stage_q, bufs_q, zero, ring_k, ring_v, (e, m, l, acc, shrink), i_step + i,
                mask_args, key + i * BN, (i < inner) | (i >= outer), D, ST, FLAGS,
            )  # fmt: skip
    else:
        # where the branch takes time a loop each: left edge (masked), inside, right edge (masked)
        edges = (1, gl.maximum(inner, 1), gl.maximum(outer, 1), count)
        for i_loop in gl.static_range(0 if FLAGS & common.FLAG.LEFT else 1, 3):
            for i in range(edges[i_loop], edges[i_loop + 1]):
                e, m, l, acc, shrink = _step(
                    stage_q, bufs_q, zero, ring_k, ring_v, (e, m, l, acc, shrink), i_step + i,
                    mask_args, key + i * BN, i_loop != 1, D, ST, FLAGS,
                )  # fmt: skip
    return operand(e, acc, bufs_q.dtype), m, l, scaled(acc, shrink)


@gluon.jit
def _finish(stage_q, i_step, out, bufs_q, empty_q, coords, sums, sizes, DV: gl.constexpr,
            PITCH: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """Stores o and its lse, and frees the queries, whose buffer o goes through."""
    o_ptr, lse_ptr, sinks_ptr = out
    i_h, i_b, begin, queries, row = coords
    m, l, acc = sums
    T, H = sizes
    o_layout: gl.constexpr = acc.type.layout
    o_m = common.opaque_range(gl.arange(0, 64, m.type.layout), i_step, common.THREAD_ROW_BITS)
    if FLAGS & common.FLAG.SINKS:
        m, l, shrink = with_sink(m, l, gl.load(sinks_ptr + i_h).to(gl.float32) * LOG2E)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    has_no_key = l == 0.0
    lse = gl.where(has_no_key, float("-inf"), (m + gl.log2(gl.where(has_no_key, 1.0, l))) * LN2)
    by = gl.convert_layout(1.0 / gl.where(has_no_key, 1.0, l), gl.SliceLayout(1, o_layout))
    acc = (acc * by[:, None]).to(bufs_q.dtype)
    p_o = o_ptr + ((i_b.to(gl.int64) * T + begin + row) * H + i_h) * PITCH
    if bufs_q.shape[2] == DV:
        rows = common.stage_through_smem(bufs_q.index(stage_q), acc, DV)
        mbarrier.arrive(empty_q.index(stage_q))
        common.store_staged(p_o, rows, H * PITCH, queries - row, i_step, DV)
    else:
        mbarrier.arrive(empty_q.index(stage_q))
        o_r = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
        o_v = gl.arange(0, DV, gl.SliceLayout(0, o_layout))
        p_o += o_r.to(gl.int64)[:, None] * (H * PITCH) + o_v[None, :]
        gl.store(p_o, acc, mask=(o_r < queries - row)[:, None] & (o_v >= 0)[None, :])
    p_lse = lse_ptr + (i_b.to(gl.int64) * H + i_h) * T + begin + row
    gl.store(p_lse + o_m, lse, mask=o_m < queries - row)


@gluon.jit
def _attend(c: gl.constexpr, out, factor, cap, buffers, full, empty, offsets, sizes,
            window_arg, scheduler, pad, NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
            DV: gl.constexpr, PITCH: gl.constexpr, ST: gl.constexpr,
            FLAGS: gl.constexpr):  # fmt: skip
    Q_STAGES: gl.constexpr = buffers.q.shape[0] // (NC * panels(D))
    units = sizes.units
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    i_step = units * 0
    units_done = units * 0
    unit = common.program_id_volatile(i_step)
    if hands_out_places(FLAGS):
        unit = receive_next_tile(unit, scheduler, units_done, FLAGS)
    while unit < units:
        loc = place_of_unit(unit, scheduler, units_done, offsets, sizes, 64 * NC, 4, FLAGS)
        if hands_out_places(FLAGS):
            mbarrier.arrive(scheduler.empty.index(units_done % SCHEDULER_STAGES))
        queries, keys, row = loc.queries, loc.keys, loc.row
        window = window_arg
        # opaque, so that bounds are computed for each unit instead of kept: registers are full
        if DV > 64:
            window = common.opaque(window_arg, i_step)
        key, count, inner, outer = common.visible_key_tiles(
            row, queries, keys, window, 64 * NC, BN, FLAGS
        )
        opaque_cap = cap
        # opaque: 2 cap would be computed once before the loop and spilled
        if FLAGS & common.FLAG.SOFTCAP and DV <= common.SPARE_REGISTERS:
            (bits,) = common.opaque((cap.to(gl.int32, bitcast=True),), i_step)
            opaque_cap = bits.to(gl.float32, bitcast=True)
        row += c * 64
        coords = (loc.i_h, loc.i_b, loc.begin, queries, row)
        common.store_scalars(pad, coords, c * NUM_SCALARS, DV)
        tail_scalars = (units_done, i_step + count, keys - key - (count - 1) * BN)
        # with a left bound the masks take the registers that are left
        if FLAGS & common.FLAG.LEFT:
            common.store_scalars(pad, tail_scalars, c * NUM_SCALARS + 5, DV)
        stage_q = units_done % Q_STAGES * NC + c
        mbarrier.wait(full.q.index(stage_q), (units_done // Q_STAGES) & 1)
        p, m, l, acc = _key_loop(
            stage_q, buffers.q, zero, Ring(buffers.k, full.k, empty.k),
            Ring(buffers.v, full.v, empty.v), i_step,
            (key, count, inner, outer), (row + keys - queries, keys, window, factor, opaque_cap),
            BN, D, DV, ST, FLAGS,
        )  # fmt: skip
        if FLAGS & common.FLAG.LEFT:
            units_done, i_step, num_valid = common.load_scalar(
                pad, tail_scalars, c * NUM_SCALARS + 5, DV
            )
        else:
            i_step += count
            num_valid = keys - key - (count - 1) * BN
        last = buffers.v.index((i_step - 1) % ST)
        common.wait_full(full.v, i_step - 1, ST)
        common.zero_tail_rows((last,), num_valid, i_step, BN, DV)
        acc = warpgroup_mma(p, last, acc, is_async=True)
        acc = sm90.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.v.index((i_step - 1) % ST))
        coords = common.load_scalar(pad, coords, c * NUM_SCALARS, DV)
        opaque_step = common.opaque_if_wide(i_step, DV)
        shape = common.opaque((sizes.T, sizes.H), opaque_step)
        _finish(
            stage_q + (opaque_step >> 30),
            opaque_step,
            out,
            buffers.q,
            empty.q,
            coords,
            (m, l, acc),
            shape,
            DV,
            PITCH,
            FLAGS,
        )
        received = units_done + hands_out_places(FLAGS)
        unit = receive_next_tile(unit, scheduler, received, FLAGS)
        units_done += 1


@gluon.jit(do_not_specialize=["factor", "cap", *_SIZES, *_STRIDES])
def softmax_fwd_sm90_kernel(
    desc_q,  # matrices with tiles [64, D], [BN, D] and [BN, DV]: common.py says where q, k, v lie
    desc_k, desc_v,
    o_ptr,  # [B, T, H, PITCH], of which DV columns are written
    lse_ptr,  # [B, H, T]
    sinks_ptr,  # [H]
    cu_q_ptr,  # [N + 1]
    cu_k_ptr,  # [N + 1]
    lengths_ptr,  # [N]
    counter_ptr,  # [1]
    factor, cap, T, S, H, N, group, tiles, search_steps, section, units, left, right,
    q_rb, q_rh, q_ch, k_rb, k_rh, k_ch, v_rb, v_rh, v_ch,
    NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PITCH: gl.constexpr,
    ST: gl.constexpr, Q_STAGES: gl.constexpr, FLAGS: gl.constexpr, CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):  # fmt: skip
    """grid (programs,). NC: 2 warpgroups. Q_STAGES: buffers of queries for each.
    CONSUMER, PRODUCER: registers of a thread."""
    dtype: gl.constexpr = desc_q.dtype
    PANELS: gl.constexpr = panels(D)
    QUERIES: gl.constexpr = NC * Q_STAGES
    bufs_q = gl.allocate_shared_memory(dtype, [QUERIES * PANELS, 64, D // PANELS], desc_q.layout)
    bufs_k = gl.allocate_shared_memory(dtype, [ST * PANELS, BN, D // PANELS], desc_k.layout)
    bufs_v = gl.allocate_shared_memory(dtype, [ST, BN, DV], desc_v.layout)
    full_q = common.barriers(QUERIES, 1)
    empty_q = common.barriers(QUERIES, 1)
    full_k = common.barriers(ST * fills(D), 1)
    empty_k = common.barriers(ST * fills(D), NC)
    full_v = common.barriers(ST, 1)
    empty_v = common.barriers(ST, NC)
    scheduler = Scheduler(counter_ptr, *alloc_scheduler(NC, FLAGS))
    pad = sm90_device.alloc_scalars(NC * NUM_SCALARS)
    out = (o_ptr, lse_ptr, sinks_ptr)
    buffers = Buffers(bufs_q, bufs_k, bufs_v)
    full, empty = Barriers(full_q, full_k, full_v), Barriers(empty_q, empty_k, empty_v)
    offsets = (cu_q_ptr, cu_k_ptr, lengths_ptr)
    sizes = common.Sizes(T, S, H, N, group, tiles, search_steps, section, units)
    gl.warp_specialize([
        (_attend, (0, out, factor, cap, buffers, full, empty, offsets, sizes, (left, right),
                   scheduler, pad, NC, BN, D, DV, PITCH, ST, FLAGS)),
        (_attend, (1, out, factor, cap, buffers, full, empty, offsets, sizes, (left, right),
                   scheduler, pad, NC, BN, D, DV, PITCH, ST, FLAGS)),
        (load_partition, ((desc_q, desc_k, desc_v), buffers, full, empty, offsets, sizes,
                          (left, right),
                          ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch)),
                          scheduler, NC, BN, D, ST, FLAGS)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
