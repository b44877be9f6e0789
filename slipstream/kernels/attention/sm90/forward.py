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

p goes from the accumulator's registers into the next product, without shared memory. Only tiles at
the edges of what is seen are masked. K of 192 columns is loaded in PANELS of 64: TMA boxes are to
be powers of two wide.
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90.common import (
    LEFT,
    RIGHT,
    SOFTCAP,
    SPARE_REGISTERS,
    THREAD_ROW_BITS,
    Sizes,
    barriers,
    load_scalar,
    locate_tile,
    opaque,
    opaque_if_wide,
    opaque_range,
    stage_through_smem,
    store_scalars,
    store_staged,
    visible_key_tiles,
    wait_full,
    zero_tail_rows,
)
from slipstream.kernels.attention.sm90.forward_load import Barriers, Buffers, load_partition, panels
from slipstream.kernels.attention.sm90.online_softmax import operand, scaled, weights, with_sink
from slipstream.kernels.attention.sm90.tile_scheduler import (
    Scheduler,
    alloc_scheduler,
    program_id_volatile,
    receive_next_tile,
)
from slipstream.kernels.attention.triton.scores import LN2, LOG2E
from slipstream.kernels.primitives.gluon_compat import (
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.primitives.smem_scalars import alloc_scalars

_SIZES = ["T", "S", "H", "N", "group", "tiles", "search_steps", "section", "units", "left", "right"]
_STRIDES = [f"{x}_{i}" for x in "qkv" for i in ("rb", "rh", "ch")]
_DO_STRIDES = ["do_rb", "do_rh", "do_ch"]
# a flag beside those of common.py and tile_scheduler.py: an attention sink, a score of no key
SINKS = gl.constexpr(64)
# scalars of a unit that each warpgroup parks in shared memory
NUM_SCALARS = gl.constexpr(8)


class Ring(NamedTuple):
    """Stages of k or v, and their barriers."""

    buffers: Any
    full: Any
    empty: Any


@gluon.jit
def _product(bufs_q, stage_q, bufs_k, i_step, zero, ST: gl.constexpr, PANELS: gl.constexpr):
    """Starts q k^T of this step, panel by panel of the width."""
    at = stage_q * PANELS
    if PANELS * bufs_q.shape[2] > 128:
        # opaque: at a constant index the descriptors of all panels are kept in registers
        at += i_step >> 30
    stage = i_step % ST * PANELS
    s = warpgroup_mma(
        bufs_q.index(at), bufs_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    for i in gl.static_range(1, PANELS):
        k = bufs_k.index(stage + i).permute((1, 0))
        s = warpgroup_mma(bufs_q.index(at + i), k, s, is_async=True)
    return s


@gluon.jit
def _step(stage_q, bufs_q, zero, ring_k, ring_v, state, i_step, mask_args, key, masked,
          ST: gl.constexpr, PANELS: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """q k^T of this step beside p v of the one before, and that beside the exponentials; masked:
    whether a query may not see a key of the tile."""
    e, m, l, acc, shrink = state
    prev = i_step - 1
    wait_full(ring_k.full, i_step, ST)
    s = _product(bufs_q, stage_q, ring_k.buffers, i_step, zero, ST, PANELS)
    # while q k^T runs: p of the tile before as an operand, and acc at the new maximum
    p = operand(e, acc, bufs_q.dtype)
    acc = scaled(acc, shrink)
    wait_full(ring_v.full, prev, ST)
    acc = warpgroup_mma(p, ring_v.buffers.index(prev % ST), acc, is_async=True)
    # q k^T is done, p v may still run: k can be overwritten
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(ring_k.empty.index(i_step % ST))
    e, m, shrink = weights(s, m, mask_args, i_step, key, masked, ring_v.buffers.shape[2], FLAGS)
    l = l * shrink + gl.sum(e, 1)
    # a second wait for a barrier that has long passed: ptxas would otherwise move the wait for p v
    # above the exponentials, which are to run beside it
    wait_full(ring_v.full, prev, ST)
    acc, e = warpgroup_mma_wait(0, deps=(acc, e))
    mbarrier.arrive(ring_v.empty.index(prev % ST))
    return e, m, l, acc, shrink


@gluon.jit
def _key_loop(stage_q, bufs_q, zero, ring_k, ring_v, i_step, key_range, mask_args, BN: gl.constexpr,
          DV: gl.constexpr, ST: gl.constexpr, PANELS: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    """The loop over a unit's tiles of keys, all but p v of the last.

    Returns p of the last tile as an operand, m, l and acc. key_range: first key, number of tiles,
    and those between which no mask is needed.
    """
    key, count, inner, outer = key_range
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    wait_full(ring_k.full, i_step, ST)
    s = _product(bufs_q, stage_q, ring_k.buffers, i_step, zero, ST, PANELS)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(ring_k.empty.index(i_step % ST))
    # the first tile has no p v beside it
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, zero.type.layout))
    masked = (inner > 0) | (outer <= 0)
    e, m, _ = weights(s, m, mask_args, i_step, key, masked, DV, FLAGS)
    l = gl.sum(e, 1)
    acc = gl.zeros([64, DV], gl.float32, o_layout)
    shrink = gl.full([64], 1.0, gl.float32, m.type.layout)
    if DV == 128 and FLAGS & (LEFT | RIGHT):
        # one loop, with a branch around the mask alone: the code of a step is there once
        for i in range(1, count):
            e, m, l, acc, shrink = _step(
                stage_q, bufs_q, zero, ring_k, ring_v, (e, m, l, acc, shrink), i_step + i,
                mask_args, key + i * BN, (i < inner) | (i >= outer), ST, PANELS, FLAGS,
            )  # fmt: skip
    else:
        # where the branch takes time a loop each: left edge (masked), inside, right edge (masked)
        edges = (1, gl.maximum(inner, 1), gl.maximum(outer, 1), count)
        for i_loop in gl.static_range(0 if FLAGS & LEFT else 1, 3):
            for i in range(edges[i_loop], edges[i_loop + 1]):
                e, m, l, acc, shrink = _step(
                    stage_q, bufs_q, zero, ring_k, ring_v, (e, m, l, acc, shrink), i_step + i,
                    mask_args, key + i * BN, i_loop != 1, ST, PANELS, FLAGS,
                )  # fmt: skip
    return operand(e, acc, bufs_q.dtype), m, l, scaled(acc, shrink)


@gluon.jit
def _finish(stage_q, i_step, out, bufs_q, empty_q, coords, sums, sizes, DV: gl.constexpr,
            FLAGS: gl.constexpr):  # fmt: skip
    """Stores o and its lse, and frees the queries, whose buffer o goes through."""
    o_ptr, lse_ptr, sinks_ptr = out
    i_h, i_b, begin, queries, row = coords
    m, l, acc = sums
    T, H = sizes
    o_layout: gl.constexpr = acc.type.layout
    o_m = opaque_range(gl.arange(0, 64, m.type.layout), i_step, THREAD_ROW_BITS)
    if FLAGS & SINKS:
        m, l, shrink = with_sink(m, l, gl.load(sinks_ptr + i_h).to(gl.float32) * LOG2E)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    has_no_key = l == 0.0
    lse = gl.where(has_no_key, float("-inf"), (m + gl.log2(gl.where(has_no_key, 1.0, l))) * LN2)
    by = gl.convert_layout(1.0 / gl.where(has_no_key, 1.0, l), gl.SliceLayout(1, o_layout))
    acc = (acc * by[:, None]).to(bufs_q.dtype)
    p_o = o_ptr + ((i_b.to(gl.int64) * T + begin + row) * H + i_h) * DV
    if bufs_q.shape[2] == DV:
        rows = stage_through_smem(bufs_q.index(stage_q), acc, DV)
        mbarrier.arrive(empty_q.index(stage_q))
        store_staged(p_o, rows, H * DV, queries - row, i_step, DV)
    else:
        mbarrier.arrive(empty_q.index(stage_q))
        o_r = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
        o_v = gl.arange(0, DV, gl.SliceLayout(0, o_layout))
        p_o += o_r.to(gl.int64)[:, None] * (H * DV) + o_v[None, :]
        gl.store(p_o, acc, mask=(o_r < queries - row)[:, None] & (o_v >= 0)[None, :])
    p_lse = lse_ptr + (i_b.to(gl.int64) * H + i_h) * T + begin + row
    gl.store(p_lse + o_m, lse, mask=o_m < queries - row)


@gluon.jit
def _attend(c: gl.constexpr, out, factor, cap, buffers, full, empty, offsets, sizes,
            window_arg, scheduler, pad, NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
            DV: gl.constexpr, ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    Q_STAGES: gl.constexpr = buffers.q.shape[0] // (NC * panels(D))
    units = sizes.units
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    i_step = units * 0
    units_done = units * 0
    unit = program_id_volatile(i_step)
    while unit < units:
        loc = locate_tile(unit, offsets, sizes, 64 * NC, False, FLAGS)
        queries, keys, row = loc.queries, loc.keys, loc.row
        window = window_arg
        # opaque, so that bounds are computed for each unit instead of kept: registers are full
        if DV > 64:
            window = opaque(window_arg, i_step)
        key, count, inner, outer = visible_key_tiles(row, queries, keys, window, 64 * NC, BN, FLAGS)
        opaque_cap = cap
        # opaque: 2 cap would be computed once before the loop and spilled
        if FLAGS & SOFTCAP and DV <= SPARE_REGISTERS:
            (bits,) = opaque((cap.to(gl.int32, bitcast=True),), i_step)
            opaque_cap = bits.to(gl.float32, bitcast=True)
        row += c * 64
        coords = (loc.i_h, loc.i_b, loc.begin, queries, row)
        store_scalars(pad, coords, c * NUM_SCALARS, DV)
        tail_scalars = (units_done, i_step + count, keys - key - (count - 1) * BN)
        # with a left bound the masks take the registers that are left
        if FLAGS & LEFT:
            store_scalars(pad, tail_scalars, c * NUM_SCALARS + 5, DV)
        stage_q = units_done % Q_STAGES * NC + c
        mbarrier.wait(full.q.index(stage_q), (units_done // Q_STAGES) & 1)
        p, m, l, acc = _key_loop(
            stage_q, buffers.q, zero, Ring(buffers.k, full.k, empty.k),
            Ring(buffers.v, full.v, empty.v), i_step,
            (key, count, inner, outer), (row + keys - queries, keys, window, factor, opaque_cap),
            BN, DV, ST, panels(D), FLAGS,
        )  # fmt: skip
        if FLAGS & LEFT:
            units_done, i_step, num_valid = load_scalar(pad, tail_scalars, c * NUM_SCALARS + 5, DV)
        else:
            i_step += count
            num_valid = keys - key - (count - 1) * BN
        last = buffers.v.index((i_step - 1) % ST)
        wait_full(full.v, i_step - 1, ST)
        zero_tail_rows((last,), num_valid, i_step, BN, DV)
        acc = warpgroup_mma(p, last, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.v.index((i_step - 1) % ST))
        coords = load_scalar(pad, coords, c * NUM_SCALARS, DV)
        opaque_step = opaque_if_wide(i_step, DV)
        shape = opaque((sizes.T, sizes.H), opaque_step)
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
            FLAGS,
        )
        unit = receive_next_tile(unit, scheduler, units_done, FLAGS)
        units_done += 1


@gluon.jit(do_not_specialize=["factor", "cap", *_SIZES, *_STRIDES])
def softmax_fwd_sm90_kernel(
    desc_q,  # matrices with tiles [64, D], [BN, D] and [BN, DV]: common.py says where q, k, v lie
    desc_k,
    desc_v,
    o_ptr,  # [B, T, H, DV]
    lse_ptr,  # [B, H, T]
    sinks_ptr,  # [H]
    cu_q_ptr,  # [N + 1]
    cu_k_ptr,  # [N + 1]
    lengths_ptr,  # [N]
    counter_ptr,  # [1]
    factor,
    cap,
    T,
    S,
    H,
    N,
    group,
    tiles,
    search_steps,
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
    Q_STAGES: gl.constexpr,
    FLAGS: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """grid (programs,). NC: 2 warpgroups. Q_STAGES: buffers of queries for each.
    CONSUMER, PRODUCER: registers of a thread."""
    dtype: gl.constexpr = desc_q.dtype
    PANELS: gl.constexpr = panels(D)
    QUERIES: gl.constexpr = NC * Q_STAGES
    bufs_q = gl.allocate_shared_memory(dtype, [QUERIES * PANELS, 64, D // PANELS], desc_q.layout)
    bufs_k = gl.allocate_shared_memory(dtype, [ST * PANELS, BN, D // PANELS], desc_k.layout)
    bufs_v = gl.allocate_shared_memory(dtype, [ST, BN, DV], desc_v.layout)
    full_q = barriers(QUERIES, 1)
    empty_q = barriers(QUERIES, 1)
    full_k = barriers(ST, 1)
    empty_k = barriers(ST, NC)
    full_v = barriers(ST, 1)
    empty_v = barriers(ST, NC)
    scheduler = Scheduler(counter_ptr, *alloc_scheduler(NC, FLAGS))
    pad = alloc_scalars(NC * NUM_SCALARS)
    out = (o_ptr, lse_ptr, sinks_ptr)
    buffers = Buffers(bufs_q, bufs_k, bufs_v)
    full, empty = Barriers(full_q, full_k, full_v), Barriers(empty_q, empty_k, empty_v)
    offsets = (cu_q_ptr, cu_k_ptr, lengths_ptr)
    sizes = Sizes(T, S, H, N, group, tiles, search_steps, section, units)
    gl.warp_specialize([
        (_attend, (0, out, factor, cap, buffers, full, empty, offsets, sizes, (left, right),
                   scheduler, pad, NC, BN, D, DV, ST, FLAGS)),
        (_attend, (1, out, factor, cap, buffers, full, empty, offsets, sizes, (left, right),
                   scheduler, pad, NC, BN, D, DV, ST, FLAGS)),
        (load_partition, ((desc_q, desc_k, desc_v), buffers, full, empty, offsets, sizes,
                          (left, right),
                          ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch)),
                          scheduler, NC, BN, D, ST, FLAGS)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
