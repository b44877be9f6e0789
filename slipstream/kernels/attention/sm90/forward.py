"""Softmax attention forward for sm_90: one warp loads, two warpgroups of 64 queries compute.

    m' = max(m, max_s x_ts)     l' = e^(m - m') l + sum_s e^(x_ts - m')     o' likewise with v_s

The product q k^T of a tile runs beside p v of the one before, and that beside the exponentials; p
goes from the accumulator's registers into the next product. Between two products of a warpgroup
there is nothing to be done: what p v needs of the tile before is made while q k^T runs. K and V
have a ring of ST buffers each. Only tiles at the edges of what is seen are masked.
"""

from slipstream.kernels.attention.sm90.common import (
    LEFT,
    ROWS_OWN,
    SOFTCAP,
    SPARE_REGISTERS,
    barriers,
    keys_seen,
    load_scalar,
    locate_tile,
    opaque,
    opaque_if_wide,
    opaque_range,
    stage_through_smem,
    store_scalars,
    store_staged,
    wait_full,
    zero_tail_rows,
)
from slipstream.kernels.attention.sm90.forward_load import load_units, panels
from slipstream.kernels.attention.sm90.online_softmax import operand, scaled, weights, with_sink
from slipstream.kernels.attention.sm90.tile_scheduler import (
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

_SIZES = ["T", "S", "H", "N", "group", "tiles", "steps", "section", "units", "left", "right"]
_AT = [f"{x}_{i}" for x in "qkv" for i in ("rb", "rh", "ch")]
_DO_AT = ["do_rb", "do_rh", "do_ch"]
# beside the flags of common.py and tile_scheduler.py: a score of no key
SINKS = gl.constexpr(64)
# numbers of a unit that each warpgroup writes down
NUM_SCALARS = gl.constexpr(8)


@gluon.jit
def _product(bufs_q, at_q, bufs_k, turn, zero, ST: gl.constexpr, PANELS: gl.constexpr):
    """q k^T of this turn, panel by panel of their width."""
    at = at_q * PANELS
    if PANELS * bufs_q.shape[2] > 128:
        # a place that is not known keeps its descriptors out of registers that are needed
        at += turn >> 30
    slot = turn % ST * PANELS
    s = warpgroup_mma(
        bufs_q.index(at), bufs_k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    for i in gl.static_range(1, PANELS):
        k = bufs_k.index(slot + i).permute((1, 0))
        s = warpgroup_mma(bufs_q.index(at + i), k, s, is_async=True)
    return s


@gluon.jit
def _step(at_q, bufs_q, zero, ring_k, ring_v, state, turn, sight, key, ST: gl.constexpr,
          PANELS: gl.constexpr, MASKED: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    """q k^T of this turn beside p v of the one before, and that beside the exponentials."""
    bufs_k, full_k, empty_k = ring_k
    bufs_v, full_v, empty_v = ring_v
    e, m, l, acc, shrink = state
    before = turn - 1
    wait_full(full_k, turn, ST)
    s = _product(bufs_q, at_q, bufs_k, turn, zero, ST, PANELS)
    p = operand(e, acc, bufs_q.dtype)
    acc = scaled(acc, shrink)
    wait_full(full_v, before, ST)
    acc = warpgroup_mma(p, bufs_v.index(before % ST), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(empty_k.index(turn % ST))
    e, m, shrink = weights(s, m, sight, turn, key, bufs_v.shape[2], MASKED, FLAGS)
    l = l * shrink + gl.sum(e, 1)
    # the assembler lifts the wait for p v over the exponentials, but not over another wait
    wait_full(full_v, before, ST)
    acc, e = warpgroup_mma_wait(0, deps=(acc, e))
    mbarrier.arrive(empty_v.index(before % ST))
    return e, m, l, acc, shrink


@gluon.jit
def _key_loop(at_q, bufs_q, zero, ring_k, ring_v, turn, span, sight, BN: gl.constexpr,
          DV: gl.constexpr, ST: gl.constexpr, PANELS: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    """All tiles but p v of the last."""
    bufs_k, full_k, empty_k = ring_k
    key, count, inner, outer = span
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    wait_full(full_k, turn, ST)
    s = _product(bufs_q, at_q, bufs_k, turn, zero, ST, PANELS)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(empty_k.index(turn % ST))
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, zero.type.layout))
    if (inner == 0) & (outer > 0):
        e, m, _ = weights(s, m, sight, turn, key, DV, False, FLAGS)
    else:
        e, m, _ = weights(s, m, sight, turn, key, DV, True, FLAGS)
    l = gl.sum(e, 1)
    acc = gl.zeros([64, DV], gl.float32, o_layout)
    shrink = gl.full([64], 1.0, gl.float32, m.type.layout)
    inner = gl.maximum(inner, 1)
    outer = gl.maximum(outer, 1)
    if FLAGS & LEFT:
        for i in range(1, inner):
            e, m, l, acc, shrink = _step(
                at_q, bufs_q, zero, ring_k, ring_v, (e, m, l, acc, shrink), turn + i, sight,
                key + i * BN, ST, PANELS, True, FLAGS,
            )  # fmt: skip
    for i in range(inner, outer):
        e, m, l, acc, shrink = _step(
            at_q, bufs_q, zero, ring_k, ring_v, (e, m, l, acc, shrink), turn + i, sight,
            key + i * BN, ST, PANELS, False, FLAGS,
        )  # fmt: skip
    for i in range(outer, count):
        e, m, l, acc, shrink = _step(
            at_q, bufs_q, zero, ring_k, ring_v, (e, m, l, acc, shrink), turn + i, sight,
            key + i * BN, ST, PANELS, True, FLAGS,
        )  # fmt: skip
    return operand(e, acc, bufs_q.dtype), m, l, scaled(acc, shrink)


@gluon.jit
def _finish(at_q, turn, out, bufs_q, empty_q, spot, sums, sizes, DV: gl.constexpr,
            FLAGS: gl.constexpr):  # fmt: skip
    """Stores o and its lse, and frees the queries, whose buffer o goes through."""
    o_ptr, lse_ptr, sinks_ptr = out
    i_h, i_b, begin, queries, row = spot
    m, l, acc = sums
    T, H = sizes
    o_layout: gl.constexpr = acc.type.layout
    o_m = opaque_range(gl.arange(0, 64, m.type.layout), turn, ROWS_OWN)
    if FLAGS & SINKS:
        m, l, shrink = with_sink(m, l, gl.load(sinks_ptr + i_h).to(gl.float32) * LOG2E)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    blind = l == 0.0
    lse = gl.where(blind, float("-inf"), (m + gl.log2(gl.where(blind, 1.0, l))) * LN2)
    by = gl.convert_layout(1.0 / gl.where(blind, 1.0, l), gl.SliceLayout(1, o_layout))
    acc = (acc * by[:, None]).to(bufs_q.dtype)
    p_o = o_ptr + ((i_b.to(gl.int64) * T + begin + row) * H + i_h) * DV
    if bufs_q.shape[2] == DV:
        rows = stage_through_smem(bufs_q.index(at_q), acc, DV)
        mbarrier.arrive(empty_q.index(at_q))
        store_staged(p_o, rows, H * DV, queries - row, turn, DV)
    else:
        mbarrier.arrive(empty_q.index(at_q))
        o_r = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
        o_v = gl.arange(0, DV, gl.SliceLayout(0, o_layout))
        p_o += o_r.to(gl.int64)[:, None] * (H * DV) + o_v[None, :]
        gl.store(p_o, acc, mask=(o_r < queries - row)[:, None] & (o_v >= 0)[None, :])
    p_lse = lse_ptr + (i_b.to(gl.int64) * H + i_h) * T + begin + row
    gl.store(p_lse + o_m, lse, mask=o_m < queries - row)


@gluon.jit
def _attend(c: gl.constexpr, out, factor, cap, buffers, full, empty, offsets, sizes,
            given, board, pad, NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
            DV: gl.constexpr, ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    bufs_q, bufs_k, bufs_v = buffers
    full_q, full_k, full_v = full
    empty_q, empty_k, empty_v = empty
    ROOM: gl.constexpr = bufs_q.shape[0] // (NC * panels(D))
    units = sizes[8]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    turn = units * 0
    mine = units * 0
    unit = program_id_volatile(turn)
    while unit < units:
        i_h, i_b, begin, queries, _, _, keys, _, row, _ = locate_tile(
            unit, offsets, sizes, 64 * NC, False, FLAGS
        )
        window = given
        if DV > 64:  # where registers end
            window = opaque(given, turn)
        key, count, inner, outer = keys_seen(row, queries, keys, window, 64 * NC, BN, FLAGS)
        sharp = cap
        if (
            FLAGS & SOFTCAP and DV <= SPARE_REGISTERS
        ):  # lest twice the cap be made for all units, and stored
            (bits,) = opaque((cap.to(gl.int32, bitcast=True),), turn)
            sharp = bits.to(gl.float32, bitcast=True)
        row += c * 64
        spot = (i_h, i_b, begin, queries, row)
        store_scalars(pad, spot, c * NUM_SCALARS, DV)
        rest = (mine, turn + count, keys - key - (count - 1) * BN)
        if FLAGS & LEFT:  # its masks take what registers there are
            store_scalars(pad, rest, c * NUM_SCALARS + 5, DV)
        at_q = mine % ROOM * NC + c
        mbarrier.wait(full_q.index(at_q), (mine // ROOM) & 1)
        p, m, l, acc = _key_loop(
            at_q, bufs_q, zero, (bufs_k, full_k, empty_k), (bufs_v, full_v, empty_v), turn,
            (key, count, inner, outer), (row + keys - queries, keys, window, factor, sharp), BN, DV,
            ST, panels(D), FLAGS,
        )  # fmt: skip
        if FLAGS & LEFT:
            mine, turn, there = load_scalar(pad, rest, c * NUM_SCALARS + 5, DV)
        else:
            turn += count
            there = keys - key - (count - 1) * BN
        last = bufs_v.index((turn - 1) % ST)
        wait_full(full_v, turn - 1, ST)
        zero_tail_rows((last,), there, turn, BN, DV)
        acc = warpgroup_mma(p, last, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty_v.index((turn - 1) % ST))
        spot = load_scalar(pad, spot, c * NUM_SCALARS, DV)
        now = opaque_if_wide(turn, DV)
        shape = opaque((sizes[0], sizes[2]), now)
        _finish(at_q + (now >> 30), now, out, bufs_q, empty_q, spot, (m, l, acc), shape, DV, FLAGS)
        unit = receive_next_tile(unit, board, mine, FLAGS)
        mine += 1


@gluon.jit
def _first(out, factor, cap, buffers, full, empty, offsets, sizes, window, board, pad,
           NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
           ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _attend(0, out, factor, cap, buffers, full, empty, offsets, sizes, window, board, pad,
            NC, BN, D, DV, ST, FLAGS)  # fmt: skip


@gluon.jit
def _second(out, factor, cap, buffers, full, empty, offsets, sizes, window, board, pad,
            NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
            ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _attend(1, out, factor, cap, buffers, full, empty, offsets, sizes, window, board, pad,
            NC, BN, D, DV, ST, FLAGS)  # fmt: skip


@gluon.jit(do_not_specialize=["factor", "cap", *_SIZES, *_AT])
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
    NC: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    ST: gl.constexpr,
    ROOM: gl.constexpr,
    FLAGS: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """grid (programs,). NC: 2 warpgroups. ROOM: buffers of queries for each.
    CONSUMER, PRODUCER: registers of a thread."""
    dtype: gl.constexpr = desc_q.dtype
    PANELS: gl.constexpr = panels(D)
    QUERIES: gl.constexpr = NC * ROOM
    bufs_q = gl.allocate_shared_memory(dtype, [QUERIES * PANELS, 64, D // PANELS], desc_q.layout)
    bufs_k = gl.allocate_shared_memory(dtype, [ST * PANELS, BN, D // PANELS], desc_k.layout)
    bufs_v = gl.allocate_shared_memory(dtype, [ST, BN, DV], desc_v.layout)
    full_q = barriers(QUERIES, 1)
    empty_q = barriers(QUERIES, 1)
    full_k = barriers(ST, 1)
    empty_k = barriers(ST, NC)
    full_v = barriers(ST, 1)
    empty_v = barriers(ST, NC)
    words, told, heard = alloc_scheduler(NC, FLAGS)
    pad = alloc_scalars(NC * NUM_SCALARS)
    gl.warp_specialize([
        (_first, ((o_ptr, lse_ptr, sinks_ptr), factor, cap,
                  (bufs_q, bufs_k, bufs_v),
                  (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                  (cu_q_ptr, cu_k_ptr, lengths_ptr),
                  (T, S, H, N, group, tiles, steps, section, units), (left, right),
                  (counter_ptr, words, told, heard), pad, NC, BN, D, DV, ST, FLAGS)),
        (_second, ((o_ptr, lse_ptr, sinks_ptr), factor, cap,
                   (bufs_q, bufs_k, bufs_v),
                   (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                   (cu_q_ptr, cu_k_ptr, lengths_ptr),
                   (T, S, H, N, group, tiles, steps, section, units), (left, right),
                   (counter_ptr, words, told, heard), pad, NC, BN, D, DV, ST, FLAGS)),
        (load_units, ((desc_q, desc_k, desc_v), (bufs_q, bufs_k, bufs_v),
                      (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                      (cu_q_ptr, cu_k_ptr, lengths_ptr),
                      (T, S, H, N, group, tiles, steps, section, units), (left, right),
                      ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch)),
                      (counter_ptr, words, told, heard), NC, BN, D, ST, FLAGS)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
