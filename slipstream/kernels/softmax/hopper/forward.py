# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
"""Softmax attention forward for sm_90: one warp loads, NC warpgroups of 64 queries compute.

    m' = max(m, max_s x_ts)     l' = e^(m - m') l + sum_s e^(x_ts - m')     o' likewise with v_s

The product q k^T of a tile runs beside p v of the one before and its exponentials; p goes from the
accumulator's registers into the next product, or by way of shared memory. K and V have a ring of ST
buffers each. Only tiles at the edges of what is seen are masked.
"""

from slipstream.kernels.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.softmax.hopper.common import (
    LEFT,
    RIGHT,
    SOFTCAP,
    barriers,
    clean,
    keys_seen,
    place,
    put,
    ready,
    stage,
)
from slipstream.kernels.softmax.hopper.forward_load import load_units, panels
from slipstream.kernels.softmax.hopper.units import board_of, hear
from slipstream.kernels.softmax.triton.scores import LN2, LOG2E

_SIZES = ["T", "S", "H", "N", "group", "tiles", "steps", "section", "units", "left", "right"]
_AT = [f"{x}_{i}" for x in "qkv" for i in ("rb", "rh", "ch")]
_DO_AT = ["do_rb", "do_rh", "do_ch"]
# beside common.py's flags and units.py's: a score of no key, and two of tiles.py's
SINKS = gl.constexpr(64)
SHARED = gl.constexpr(256)
EARLY = gl.constexpr(512)


@gluon.jit
def _weights(s, m, low, high, key, factor, cap, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """p of a tile whose first key is `key`, the new m, and what shrinks what was before."""
    layout: gl.constexpr = s.type.layout
    under = factor
    if FLAGS & SOFTCAP:
        s = cap - 2.0 * cap / (1.0 + gl.exp2(s * factor))
        under = 1.0
    if MASKED:
        o_n = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        seen = o_n[None, :] < high[:, None]
        if FLAGS & LEFT:
            seen = seen & (o_n[None, :] >= low[:, None])
        s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * under)
    base = top
    if MASKED:
        base = gl.where(top == float("-inf"), 0.0, top)
    return gl.exp2(s * under - base[:, None]), top, gl.exp2(m - base)


@gluon.jit
def _product(bufs_q, c: gl.constexpr, bufs_k, turn, zero, ST: gl.constexpr,
             PANELS: gl.constexpr):  # fmt: skip
    """q k^T of this turn, panel by panel of their width."""
    at = c * PANELS
    if bufs_q.shape[2] == 256:
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
def _hold(e, p, buf, dtype: gl.constexpr, FLAGS: gl.constexpr):
    """Weights as the left operand of the next product: in registers, or in shared memory."""
    if FLAGS & SHARED:
        buf.store(e.to(dtype))
        fence_async_shared()
    else:
        p = gl.convert_layout(e.to(dtype), p.type.layout)
    return p


@gluon.jit
def _weigh(p, buf, v, acc, FLAGS: gl.constexpr):
    """o + p v, under way."""
    if FLAGS & SHARED:
        acc = warpgroup_mma(buf, v, acc, is_async=True)
    else:
        acc = warpgroup_mma(p, v, acc, is_async=True)
    return acc


@gluon.jit
def _step(c: gl.constexpr, bufs_q, buf_p, zero, ring_k, ring_v, state, turn, sight, key,
          ST: gl.constexpr, PANELS: gl.constexpr, MASKED: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    """q k^T of this turn beside p v of the one before, and that beside the exponentials."""
    bufs_k, full_k, empty_k = ring_k
    bufs_v, full_v, empty_v = ring_v
    low, high, factor, cap = sight
    p, m, l, acc = state
    before = turn - 1
    ready(full_k, turn, ST)
    s = _product(bufs_q, c, bufs_k, turn, zero, ST, PANELS)
    ready(full_v, before, ST)
    acc = _weigh(p, buf_p, bufs_v.index(before % ST), acc, FLAGS)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(empty_k.index(turn % ST))
    e, m, shrink = _weights(s, m, low, high, key, factor, cap, MASKED, FLAGS)
    l = l * shrink + gl.sum(e, 1)
    if not FLAGS & EARLY:
        # the assembler lifts the wait for p v over the exponentials, but not over another wait
        ready(full_v, before, ST)
    acc, e = warpgroup_mma_wait(0, deps=(acc, e))
    mbarrier.arrive(empty_v.index(before % ST))
    p = _hold(e, p, buf_p, bufs_q.dtype, FLAGS)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, m, l, acc


@gluon.jit
def _walk(c: gl.constexpr, bufs_q, buf_p, zero, ring_k, ring_v, turn, span, sight,
          BN: gl.constexpr, DV: gl.constexpr, ST: gl.constexpr, PANELS: gl.constexpr,
          FLAGS: gl.constexpr):  # fmt: skip
    """All tiles but p v of the last."""
    bufs_k, full_k, empty_k = ring_k
    low, high, factor, cap = sight
    key, count, inner, outer = span
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    ready(full_k, turn, ST)
    s = _product(bufs_q, c, bufs_k, turn, zero, ST, PANELS)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(empty_k.index(turn % ST))
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, zero.type.layout))
    e, m, _ = _weights(s, m, low, high, key, factor, cap, True, FLAGS)
    l = gl.sum(e, 1)
    if FLAGS & SHARED:
        p = _hold(e, l, buf_p, bufs_q.dtype, FLAGS)
    else:
        p = gl.convert_layout(e.to(bufs_q.dtype), p_layout)
    acc = gl.zeros([64, DV], gl.float32, o_layout)
    inner = gl.maximum(inner, 1)
    outer = gl.maximum(outer, 1)
    if FLAGS & LEFT:
        for i in range(1, inner):
            p, m, l, acc = _step(
                c, bufs_q, buf_p, zero, ring_k, ring_v, (p, m, l, acc), turn + i, sight,
                key + i * BN, ST, PANELS, True, FLAGS,
            )  # fmt: skip
    for i in range(inner, outer):
        p, m, l, acc = _step(
            c, bufs_q, buf_p, zero, ring_k, ring_v, (p, m, l, acc), turn + i, sight,
            key + i * BN, ST, PANELS, False, FLAGS,
        )  # fmt: skip
    for i in range(outer, count):
        p, m, l, acc = _step(
            c, bufs_q, buf_p, zero, ring_k, ring_v, (p, m, l, acc), turn + i, sight,
            key + i * BN, ST, PANELS, True, FLAGS,
        )  # fmt: skip
    return p, m, l, acc


@gluon.jit
def _with_sink(m, l, sink):
    """One more key, of this score and no value."""
    top = gl.maximum(m, sink)
    base = gl.where(top == float("-inf"), 0.0, top)
    shrink = gl.exp2(m - base)
    return top, l * shrink + gl.exp2(sink - base), shrink


@gluon.jit
def _attend(c: gl.constexpr, out, factor, cap, buffers, full, empty, offsets, sizes,
            window, board, NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
            ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    o_ptr, lse_ptr, sinks_ptr = out
    bufs_q, bufs_k, bufs_v, bufs_p = buffers
    full_q, full_k, full_v = full
    empty_q, empty_k, empty_v = empty
    T, H, units = sizes[0], sizes[2], sizes[8]
    left, right = window
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    o_m = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    turn = units * 0
    mine = units * 0
    unit = gl.program_id(0)
    while unit < units:
        i_h, i_b, begin, queries, _, _, keys, _, row, _ = place(
            unit, offsets, sizes, 64 * NC, False, FLAGS
        )
        key, count, inner, outer = keys_seen(row, queries, keys, window, 64 * NC, BN, FLAGS)
        row += c * 64
        # each query sees the keys from `low` to before `high`
        low = row + keys - queries + o_m - left
        high = keys + o_m * 0
        if FLAGS & RIGHT:
            high = gl.minimum(row + keys - queries + o_m + right + 1, keys)
        mbarrier.wait(full_q.index(c), mine & 1)
        buf_p = bufs_p.index(c if FLAGS & SHARED else 0)
        p, m, l, acc = _walk(
            c, bufs_q, buf_p, zero, (bufs_k, full_k, empty_k), (bufs_v, full_v, empty_v), turn,
            (key, count, inner, outer), (low, high, factor, cap), BN, DV, ST, panels(D), FLAGS,
        )  # fmt: skip
        turn += count
        last = bufs_v.index((turn - 1) % ST)
        ready(full_v, turn - 1, ST)
        clean(last, keys - key - (count - 1) * BN, BN, DV)
        acc = _weigh(p, buf_p, last, acc, FLAGS)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty_v.index((turn - 1) % ST))
        if FLAGS & SINKS:
            m, l, shrink = _with_sink(m, l, gl.load(sinks_ptr + i_h).to(gl.float32) * LOG2E)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        blind = l == 0.0
        lse = gl.where(blind, float("-inf"), (m + gl.log2(gl.where(blind, 1.0, l))) * LN2)
        by = gl.convert_layout(gl.where(blind, 1.0, l), gl.SliceLayout(1, o_layout))
        acc = (acc / by[:, None]).to(bufs_q.dtype)
        i_t = i_b.to(gl.int64) * T + begin + row
        p_o = o_ptr + (i_t * H + i_h) * DV
        if D == DV:
            rows = stage(bufs_q.index(c), acc, DV)
            mbarrier.arrive(empty_q.index(c))
            put(p_o, rows, H * DV, queries - row, DV)
        else:
            mbarrier.arrive(empty_q.index(c))
            o_r = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
            o_v = gl.arange(0, DV, gl.SliceLayout(0, o_layout))
            p_o += o_r.to(gl.int64)[:, None] * (H * DV) + o_v[None, :]
            gl.store(p_o, acc, mask=(o_r < queries - row)[:, None] & (o_v >= 0)[None, :])
        p_lse = lse_ptr + (i_b.to(gl.int64) * H + i_h) * T + begin + row
        gl.store(p_lse + o_m, lse, mask=o_m < queries - row)
        unit = hear(unit, board, mine, FLAGS)
        mine += 1


@gluon.jit
def _first(out, factor, cap, buffers, full, empty, offsets, sizes, window, board,
           NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
           ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _attend(0, out, factor, cap, buffers, full, empty, offsets, sizes, window, board,
            NC, BN, D, DV, ST, FLAGS)  # fmt: skip


@gluon.jit
def _second(out, factor, cap, buffers, full, empty, offsets, sizes, window, board,
            NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
            ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _attend(1, out, factor, cap, buffers, full, empty, offsets, sizes, window, board,
            NC, BN, D, DV, ST, FLAGS)  # fmt: skip


@gluon.jit
def _third(out, factor, cap, buffers, full, empty, offsets, sizes, window, board,
           NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
           ST: gl.constexpr, FLAGS: gl.constexpr):  # fmt: skip
    _attend(2, out, factor, cap, buffers, full, empty, offsets, sizes, window, board,
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
    FLAGS: gl.constexpr,
    CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """grid (programs,). NC: 2 or 3 warpgroups. CONSUMER, PRODUCER: registers of a thread."""
    dtype: gl.constexpr = desc_q.dtype
    PANELS: gl.constexpr = panels(D)
    bufs_q = gl.allocate_shared_memory(dtype, [NC * PANELS, 64, D // PANELS], desc_q.layout)
    bufs_k = gl.allocate_shared_memory(dtype, [ST * PANELS, BN, D // PANELS], desc_k.layout)
    bufs_v = gl.allocate_shared_memory(dtype, [ST, BN, DV], desc_v.layout)
    # of no use where weights stay in registers
    HELD: gl.constexpr = NC if FLAGS & SHARED else 1
    ROWS: gl.constexpr = 64 if FLAGS & SHARED else 8
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BN], dtype)
    bufs_p = gl.allocate_shared_memory(dtype, [HELD, ROWS, BN], p_layout)
    full_q = barriers(NC, 1)
    empty_q = barriers(NC, 1)
    full_k = barriers(ST, 1)
    empty_k = barriers(ST, NC)
    full_v = barriers(ST, 1)
    empty_v = barriers(ST, NC)
    words, told, heard = board_of(NC)
    if NC == 2:
        gl.warp_specialize([
            (_first, ((o_ptr, lse_ptr, sinks_ptr), factor, cap, (bufs_q, bufs_k, bufs_v, bufs_p),
                      (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                      (cu_q_ptr, cu_k_ptr, lengths_ptr),
                      (T, S, H, N, group, tiles, steps, section, units), (left, right),
                      (counter_ptr, words, told, heard), NC, BN, D, DV, ST, FLAGS)),
            (_second, ((o_ptr, lse_ptr, sinks_ptr), factor, cap, (bufs_q, bufs_k, bufs_v, bufs_p),
                       (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                       (cu_q_ptr, cu_k_ptr, lengths_ptr),
                       (T, S, H, N, group, tiles, steps, section, units), (left, right),
                       (counter_ptr, words, told, heard), NC, BN, D, DV, ST, FLAGS)),
            (load_units, ((desc_q, desc_k, desc_v), (bufs_q, bufs_k, bufs_v),
                          (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                          (cu_q_ptr, cu_k_ptr, lengths_ptr),
                          (T, S, H, N, group, tiles, steps, section, units), (left, right),
                          ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch)),
                          (counter_ptr, words, told, heard), NC, BN, D, ST, FLAGS)),
        ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
    else:
        gl.warp_specialize([
            (_first, ((o_ptr, lse_ptr, sinks_ptr), factor, cap, (bufs_q, bufs_k, bufs_v, bufs_p),
                      (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                      (cu_q_ptr, cu_k_ptr, lengths_ptr),
                      (T, S, H, N, group, tiles, steps, section, units), (left, right),
                      (counter_ptr, words, told, heard), NC, BN, D, DV, ST, FLAGS)),
            (_second, ((o_ptr, lse_ptr, sinks_ptr), factor, cap, (bufs_q, bufs_k, bufs_v, bufs_p),
                       (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                       (cu_q_ptr, cu_k_ptr, lengths_ptr),
                       (T, S, H, N, group, tiles, steps, section, units), (left, right),
                       (counter_ptr, words, told, heard), NC, BN, D, DV, ST, FLAGS)),
            (_third, ((o_ptr, lse_ptr, sinks_ptr), factor, cap, (bufs_q, bufs_k, bufs_v, bufs_p),
                      (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                      (cu_q_ptr, cu_k_ptr, lengths_ptr),
                      (T, S, H, N, group, tiles, steps, section, units), (left, right),
                      (counter_ptr, words, told, heard), NC, BN, D, DV, ST, FLAGS)),
            (load_units, ((desc_q, desc_k, desc_v), (bufs_q, bufs_k, bufs_v),
                          (full_q, full_k, full_v), (empty_q, empty_k, empty_v),
                          (cu_q_ptr, cu_k_ptr, lengths_ptr),
                          (T, S, H, N, group, tiles, steps, section, units), (left, right),
                          ((q_rb, q_rh, q_ch), (k_rb, k_rh, k_ch), (v_rb, v_rh, v_ch)),
                          (counter_ptr, words, told, heard), NC, BN, D, ST, FLAGS)),
        ], [4, 4, 1], [CONSUMER, CONSUMER, PRODUCER])  # fmt: skip
