"""Attention to selected blocks of keys, forward for sm_90, warp-specialised.

    m' = max(m, max_s x_ts)     l' = e^(m - m') l + sum_s e^(x_ts - m')     o' likewise with v_s

A program takes units, NC tiles of 64 rows, one after another: a tile is QT neighbouring queries by
the R heads that share a list and a head of keys. Blocks that the unit's lists name are loaded once
for all its tiles, in BN keys a time, and a warpgroup multiplies those that its own queries name:

    load_partition, 1 warp                 _attend, c = 0 .. NC - 1: 4 warps and 64 rows each
      q of each c      -- full.q -->         (warpgroup c waits for its own)
      k[i], v[i]       -- full.k, full.v --> s = q k[i]^T, weights, acc += p v[i]; or nothing
    waits for empty.q, empty.k, empty.v, by which the warpgroups return buffers

    buffers                stages             arrivals a phase: full / empty
    q  [64, 64] a panel    NC                 1 (TMA, QT boxes of R rows) / 1
    k  [BN, 64] a panel    ST                 1 (TMA) / NC
    v  [BN, DV]            ST                 1 (TMA) / NC

A tile of 64 rows reads 32 KiB for 2 MFLOP from the L2 cache, whose bandwidth then bounds it; NC of
them read their union once. Who passes over a block still waits for it: phases of a barrier come
one by one. A query that does not name a block has weights of 0 in it: exp2(x - inf).
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90 import common, forward
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.device import LN2, LOG2E
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# columns of a panel: rows of 128 bytes, which a slice of 8 rows or more leaves in one piece
PANEL = gl.constexpr(64)


class Lists(NamedTuple):
    """Those of a unit's NC QT queries, as selected_merge_kernel leaves them."""

    merged_ptr: Any
    bits_ptr: Any
    counts_ptr: Any


class Sizes(NamedTuple):
    """Numbers of a launch, in the order of the kernel's arguments."""

    T: Any  # queries
    S: Any  # keys
    H: Any  # heads of q
    heads: Any  # sets of R heads with one list
    share: Any  # of these with one head of keys
    G: Any  # heads of lists
    W: Any  # width of a list
    tiles: Any  # units of a sequence and set
    units: Any


class Place(NamedTuple):
    """Where a unit is."""

    i_n: Any  # sequence
    i_u: Any  # set of heads
    row: Any  # first query
    i_l: Any  # list


@gluon.jit
def _place(unit, sizes, QUERIES: gl.constexpr):
    """The last tiles see the most of a causal sequence, and go first; sets of heads go one after
    another, so that neighbours' keys are in the L2 cache."""
    tile = sizes.tiles - 1 - unit % sizes.tiles
    pair = unit // sizes.tiles
    i_n, i_u = pair // sizes.heads, pair % sizes.heads
    return Place(i_n, i_u, tile * QUERIES, (i_n * sizes.tiles + tile) * sizes.G + i_u % sizes.G)


@gluon.jit
def load_partition(
    descs,
    buffers,
    full,
    empty,
    lists,
    sizes,
    strides,
    NC: gl.constexpr,
    QT: gl.constexpr,
    R: gl.constexpr,
    BLOCK: gl.constexpr,
):
    desc_q, desc_k, desc_v = descs
    strides_k, strides_v = strides
    bufs_q, bufs_k, bufs_v = buffers
    ST: gl.constexpr = bufs_v.shape[0]
    BN: gl.constexpr = bufs_v.shape[1]
    PANELS: gl.constexpr = bufs_q.shape[0] // NC
    PARTS: gl.constexpr = BLOCK // BN
    i_step = sizes.units * 0
    units_done = sizes.units * 0
    unit = common.program_id_volatile(i_step)
    while unit < sizes.units:
        at = _place(unit, sizes, NC * QT)
        p_merged = lists.merged_ptr + at.i_l.to(gl.int64) * sizes.W
        count = gl.load(lists.counts_ptr + at.i_l)
        # an entry is there a turn before its keys are wanted
        upcoming = gl.load(p_merged, mask=count > 0, other=0)
        row_q = (at.i_n * sizes.T + at.row) * sizes.H + at.i_u * R
        for c in gl.static_range(NC):
            # boxes of R rows, one a query, arrive at one barrier, which counts their bytes
            mbarrier.wait(empty[0].index(c), (units_done & 1) ^ 1)
            mbarrier.expect(full[0].index(c), desc_q.block_type.nbytes * PANELS * QT)
            for j in gl.static_range(QT):
                for i in gl.static_range(PANELS):
                    sm90.copy_in(
                        desc_q,
                        [row_q + (c * QT + j) * sizes.H, i * PANEL],
                        full[0].index(c),
                        bufs_q.index(c * PANELS + i).slice(j * R, R),
                    )
        for e in range(count):
            entry = upcoming
            upcoming = gl.load(p_merged + e + 1, mask=e + 1 < count, other=0)
            for part in gl.static_range(PARTS):
                key = entry * BLOCK + part * BN
                row_k, col_k = common.tile_coords(strides_k, at.i_n, at.i_u // sizes.share, key)
                row_v, col_v = common.tile_coords(strides_v, at.i_n, at.i_u // sizes.share, key)
                stage = i_step % ST
                # keys are returned before values are, and so are waited for apart
                common.wait_empty(empty[1], i_step, ST)
                mbarrier.expect(full[1].index(stage), desc_k.block_type.nbytes * PANELS)
                for i in gl.static_range(PANELS):
                    sm90.copy_in(
                        desc_k,
                        [row_k, col_k + i * PANEL],
                        full[1].index(stage),
                        bufs_k.index(stage * PANELS + i),
                    )
                common.wait_empty(empty[2], i_step, ST)
                common.fetch(desc_v, row_v, col_v, full[2].index(stage), bufs_v.index(stage))
                i_step += 1
        unit += gl.num_programs(0)
        units_done += 1


@gluon.jit
def _weights(s, m, mask, key, factor):
    """p of a tile whose first key is `key`, the new m, and the factor of what was summed before."""
    listed, inner, high, _ = mask
    if key + s.shape[1] > inner:
        o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = common.where_below(s, (key + o_n)[None, :], high[:, None])
    # a maximum that lags spares acc a product; rows that do not name the tile keep theirs
    top = forward._row_max(s, m) * factor
    top = gl.where(listed & (top > m + forward.SLACK), top, m)
    base = gl.where(top == float("-inf"), 0.0, top)
    shrink = gl.exp2(m - base)
    base = gl.where(listed, base, float("inf"))
    return gl.exp2(s * factor - base[:, None]), top, shrink


@gluon.jit
def _step(
    c: gl.constexpr, sums, buffers, full, empty, i_step, zero, mask, key, factor, NC: gl.constexpr
):
    """Adds a tile of keys to m, l and acc. mask: rows whose queries name the tile, behind the last
    key that all of them see, behind that of each, and how many keys there are."""
    m, l, acc = sums
    bufs_q, bufs_k, bufs_v = buffers
    ST: gl.constexpr = bufs_v.shape[0]
    PANELS: gl.constexpr = bufs_q.shape[0] // NC
    stage = i_step % ST
    s = zero
    for i in gl.static_range(PANELS):
        s = warpgroup_mma(
            bufs_q.index(c * PANELS + i),
            bufs_k.index(stage * PANELS + i).permute((1, 0)),
            s,
            use_acc=i > 0,
            is_async=True,
        )
    s = sm90.warpgroup_mma_wait(0, deps=(s,))
    # the next keys come while weights are made
    mbarrier.arrive(empty[1].index(stage))
    p, m, shrink = _weights(s, m, mask, key, factor)
    l = l * shrink + gl.sum(p, 1)
    acc = forward.scaled(acc, shrink)
    p = forward.operand(p, acc, bufs_q.dtype)
    common.wait_full(full[2], i_step, ST)
    v = bufs_v.index(stage)
    # behind the last value there may be NaN, which a weight of 0 does not take away
    common.zero_tail_rows((v,), mask[3] - key, i_step, bufs_v.shape[1], bufs_v.shape[2])
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc = sm90.warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty[2].index(stage))
    return m, l, acc


@gluon.jit
def _finish(out, sums, at, sizes, row, i_h, HAS_SINKS: gl.constexpr):
    """Stores o and its lse. row, i_h: each row's query, which there may not be, and its head."""
    o_ptr, lse_ptr, sinks_ptr = out
    m, l, acc = sums
    m_m = row < sizes.T
    DV: gl.constexpr = acc.shape[1]
    o_layout: gl.constexpr = acc.type.layout
    if HAS_SINKS:
        m, l, shrink = forward.with_sink(m, l, gl.load(sinks_ptr + i_h).to(gl.float32) * LOG2E)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    # a query without keys: o is 0, lse is -inf
    has_no_key = l == 0.0
    l = gl.where(has_no_key, 1.0, l)
    lse = gl.where(has_no_key, float("-inf"), (m + gl.log2(l)) * LN2)
    i_n = at.i_n.to(gl.int64)
    gl.store(lse_ptr + (i_n * sizes.H + i_h) * sizes.T + row, lse, mask=m_m)
    by = gl.convert_layout(1.0 / l, gl.SliceLayout(1, o_layout))
    i_o = gl.convert_layout((i_n * sizes.T + row) * sizes.H + i_h, gl.SliceLayout(1, o_layout))
    m_o = gl.convert_layout(m_m.to(gl.int32), gl.SliceLayout(1, o_layout)) != 0
    o_v = gl.arange(0, DV, gl.SliceLayout(0, o_layout))
    p_o = o_ptr + i_o[:, None] * DV + o_v[None, :]
    gl.store(
        p_o, (acc * by[:, None]).to(o_ptr.dtype.element_ty), mask=m_o[:, None] & (o_v >= 0)[None, :]
    )


@gluon.jit
def _attend(
    c: gl.constexpr,
    out,
    factor,
    buffers,
    full,
    empty,
    lists,
    sizes,
    NC: gl.constexpr,
    QT: gl.constexpr,
    R: gl.constexpr,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    ST: gl.constexpr = buffers[2].shape[0]
    BN: gl.constexpr = buffers[2].shape[1]
    DV: gl.constexpr = buffers[2].shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    PARTS: gl.constexpr = BLOCK // BN
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    o_m = gl.arange(0, 64, rows)
    shift = sizes.S - sizes.T
    i_step = sizes.units * 0
    units_done = sizes.units * 0
    unit = common.program_id_volatile(i_step)
    while unit < sizes.units:
        at = _place(unit, sizes, NC * QT)
        p_bits = lists.bits_ptr + at.i_l.to(gl.int64) * sizes.W
        count = gl.load(lists.counts_ptr + at.i_l)
        upcoming = gl.load(p_bits, mask=count > 0, other=0)
        first = at.row + c * QT
        # behind the last key that all queries of the tile see, and that each sees
        inner = sizes.S
        high = sizes.S + o_m * 0
        if CAUSAL:
            inner = gl.minimum(first + shift + 1, sizes.S)
            high = gl.minimum(first + shift + 1 + o_m // R, sizes.S)
        m = gl.full([64], float("-inf"), gl.float32, rows)
        l = gl.zeros([64], gl.float32, rows)
        acc = gl.zeros([64, DV], gl.float32, o_layout)
        mbarrier.wait(full[0].index(c), units_done & 1)
        for e in range(count):
            bits = (upcoming >> (c * QT)) & ((1 << QT) - 1)
            upcoming = gl.load(p_bits + e + 1, mask=e + 1 < count, other=0)
            key = gl.load(lists.merged_ptr + at.i_l.to(gl.int64) * sizes.W + e) * BLOCK
            listed = (bits >> (o_m // R)) & 1 != 0
            for part in gl.static_range(PARTS):
                common.wait_full(full[1], i_step, ST)
                if bits != 0:
                    mask = (listed, inner, high, sizes.S)
                    m, l, acc = _step(
                        c,
                        (m, l, acc),
                        buffers,
                        full,
                        empty,
                        i_step,
                        zero,
                        mask,
                        key + part * BN,
                        factor,
                        NC,
                    )
                else:  # phases of a barrier come one by one, for blocks of others too
                    mbarrier.arrive(empty[1].index(i_step % ST))
                    common.wait_full(full[2], i_step, ST)
                    mbarrier.arrive(empty[2].index(i_step % ST))
                i_step += 1
        mbarrier.arrive(empty[0].index(c))
        i_h = at.i_u * R + o_m % R
        _finish(out, (m, l, acc), at, sizes, first + o_m // R, i_h, HAS_SINKS)
        unit += gl.num_programs(0)
        units_done += 1


_SIZES = ["T", "S", "H", "heads", "share", "G", "W", "tiles", "units"]
_STRIDES = [f"{x}_{i}" for x in "kv" for i in ("rb", "rh", "ch")]


@gluon.jit(do_not_specialize=["factor", *_SIZES, *_STRIDES])
def selected_fwd_sm90_kernel(
    desc_q,  # [B T H, D] in boxes [R, 64]
    desc_k, desc_v,  # matrices with tiles [BN, 64] and [BN, DV]: sm90/common.py says where they lie
    o_ptr,  # [B, T, H, DV]
    lse_ptr,  # [B, H, T]
    sinks_ptr,  # [H]
    merged_ptr, bits_ptr,  # [units' lists, W], of NC QT queries
    counts_ptr,
    factor, T, S, H, heads, share, G, W, tiles, units,
    k_rb, k_rh, k_ch, v_rb, v_rh, v_ch,
    NC: gl.constexpr, QT: gl.constexpr, R: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, BLOCK: gl.constexpr, ST: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_SINKS: gl.constexpr, CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    """grid (programs,). NC: 2 warpgroups. CONSUMER, PRODUCER: registers of a thread."""
    dtype: gl.constexpr = desc_q.dtype
    PANELS: gl.constexpr = D // PANEL
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, PANEL], dtype)
    buffers = (
        gl.allocate_shared_memory(dtype, [NC * PANELS, 64, PANEL], q_layout),
        gl.allocate_shared_memory(dtype, [ST * PANELS, BN, PANEL], desc_k.layout),
        gl.allocate_shared_memory(dtype, [ST, BN, DV], desc_v.layout),
    )
    full = (common.barriers(NC, 1), common.barriers(ST, 1), common.barriers(ST, 1))
    empty = (common.barriers(NC, 1), common.barriers(ST, NC), common.barriers(ST, NC))
    out = (o_ptr, lse_ptr, sinks_ptr)
    lists = Lists(merged_ptr, bits_ptr, counts_ptr)
    sizes = Sizes(T, S, H, heads, share, G, W, tiles, units)
    strides = ((k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch))
    descs = (desc_q, desc_k, desc_v)
    gl.warp_specialize([
        (_attend, (0, out, factor, buffers, full, empty, lists, sizes, NC, QT, R, BLOCK, CAUSAL,
                   HAS_SINKS)),
        (_attend, (1, out, factor, buffers, full, empty, lists, sizes, NC, QT, R, BLOCK, CAUSAL,
                   HAS_SINKS)),
        (load_partition, (descs, buffers, full, empty, lists, sizes, strides, NC, QT, R, BLOCK)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
