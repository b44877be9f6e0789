"""Decays per channel on sm_90: what needs no state, of strong chunks.

As wy.py, which marks the chunks, does it for the others, but pairs (i, j) by levels, with the
decays of subchunk_decay.py, where token i has decayed too far; the rows of others are made as wy.py
makes them, for what comes after a token must not change its bits. Pairs within 16 tokens are, too,
relative to the first of these, unless token i has decayed too far since that one; if none has, the
levels within 16 tokens are left out. A row is at a level either a read, in the later half, or a
write, so that two tiles a level have them all:

    x = later: q, earlier: b        y = later: a, earlier: k
    qb = x x^T      ab = y x^T      qk = x y^T      ak = y y^T

for delta x = q and y = k, in both halves. Gates are bf16 numbers and what those leave, in shared
memory for delta, whose programs have room for it; else in the tiles of x and y, before those.
"""

from slipstream.kernels.linear.sm90.common.device import locate_sequence
from slipstream.kernels.linear.sm90.common.tril_inverse import halves
from slipstream.kernels.linear.sm90.dplr.solve_tril import (
    put,
    ready,
    scores,
    solve,
    together,
)
from slipstream.kernels.linear.sm90.dplr.subchunk_decay import (
    BLOCK,
    END,
    LEVELS,
    LOWEST,
    gates_seen,
    sum_gates,
)
from slipstream.kernels.linear.sm90.dplr.wy import LOG2E, ROUNDING, add, decay_operands, gates_of
from slipstream.kernels.primitives.gluon_compat import gl, gluon

FLAGS_PER_LOAD = gl.constexpr(16)  # marks that are looked at together


@gluon.jit
def put_gates(p, stride, num_rows, none, high, low, layout: gl.constexpr, CHANNEL: gl.constexpr):
    """64 channels' gates, as bf16 numbers and what those leave."""
    o_i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] + none
    o_j = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    p += o_i * stride + o_j * CHANNEL
    b_g = gl.load(p, mask=o_i < num_rows + 0 * o_j, other=0.0).to(gl.float32) * LOG2E
    g_high, g_low = halves(gl.maximum(b_g, LOWEST))
    high.store(g_high)
    low.store(g_low)
    ready()


@gluon.jit
def zero_diagonal(b_e, high, low):
    """Sums of gates less each token's own gate, which is read again: kept, it would take registers
    through products."""
    layout: gl.constexpr = b_e.type.layout
    return b_e - (high.load(layout).to(gl.float32) + low.load(layout).to(gl.float32))


@gluon.jit
def at_level(b_e, q, a, b, k, high, low, x, y, later, DELTA: gl.constexpr, GATED: gl.constexpr):
    """The tiles x and y of 64 channels; b_e: sums of gates."""
    layout: gl.constexpr = b_e.type.layout
    b_w = gl.exp2(b_e)
    if DELTA:
        x.store((q.load(layout).to(gl.float32) * b_w).to(x.dtype))
        b_y = a.load(layout).to(gl.float32)
        if GATED:
            b_y *= gl.where(later, k.load(layout).to(gl.float32), 1.0)
        y.store((b_y * b_w).to(y.dtype))
    else:
        b_e = gl.where(later, zero_diagonal(b_e, high, low), b_e)
        gl.thread_barrier()  # x and y come where the gates are
        b_x = gl.where(later, q.load(layout), b.load(layout)).to(gl.float32)
        x.store((b_x * b_w).to(x.dtype))
        b_y = gl.where(later, a.load(layout), k.load(layout)).to(gl.float32)
        y.store((b_y * gl.exp2(b_e)).to(y.dtype))


@gluon.jit
def to_end(
    high, low, a, b, k, b_out_ptr, k_out_ptr, o_w, none, zero,
    rows: gl.constexpr, K: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """Of 64 channels b^ and k^."""
    layout: gl.constexpr = zero.type.layout
    aa: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    b_f = sum_gates(gates_seen(64, aa, END, none, False, True), high, low, zero)
    b_f = gl.exp2(b_f)
    if DELTA:
        put(b_out_ptr + o_w, (a.load(layout) * b_f).to(a.dtype), K, rows, none)
    else:
        put(b_out_ptr + o_w, (b.load(layout) * b_f).to(a.dtype), K, rows, none)
        put(k_out_ptr + o_w, (k.load(layout) * b_f).to(a.dtype), K, rows, none)


@gluon.jit
def load_tiles(
    q_ptr, k_ptr, a_ptr, b_ptr, begin, stride, num_rows, none, qs, reads, bs, keys,
    NK: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """Rows of `stride` from element `begin` on; of free a and b four tiles."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_r = gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None] + none
    o_q = begin + o_r * stride + gl.arange(0, 64, gl.SliceLayout(0, rows))[None, :]
    m_r = o_r < num_rows
    for j in gl.static_range(NK):
        qs.index(none + j).store(gl.load(q_ptr + o_q + j * 64, mask=m_r, other=0.0))
        p_a = (k_ptr if DELTA else a_ptr) + o_q + j * 64
        reads.index(none + j).store(gl.load(p_a, mask=m_r, other=0.0))
        if not DELTA:
            bs.index(none + j).store(gl.load(b_ptr + o_q + j * 64, mask=m_r, other=0.0))
            keys.index(none + j).store(gl.load(k_ptr + o_q + j * 64, mask=m_r, other=0.0))
    ready()


@gluon.jit
def load_erase(p, begin, stride, num_rows, none, tiles, NK: gl.constexpr, GATED: gl.constexpr):
    """How much each channel erases, as it is, if that is given."""
    if GATED:
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        o_r = gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None] + none
        o_c = gl.arange(0, 64, gl.SliceLayout(0, rows))[None, :]
        p += begin + o_r * stride + o_c
        for j in gl.static_range(NK):
            tiles.index(none + j).store(gl.load(p + j * 64, mask=o_r < num_rows, other=0.0))


@gluon.jit
def load_gates(p, stride, num_rows, none, CHANNEL: gl.constexpr):
    """64 channels' gates [4, 16, 64] as wy.py has them."""
    three: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    o_t = 16 * gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None, None] + none
    o_t += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, three)))[None, :, None]
    o_n = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, three)))[None, None, :]
    p += o_t * stride + o_n * CHANNEL
    b_g = gl.load(p, mask=o_t < num_rows + 0 * o_n, other=0.0).to(gl.float32)
    return gl.maximum(b_g * LOG2E, LOWEST)


@gluon.jit
def from_block(
    b_g, q, a, b, k, layout: gl.constexpr, LIMIT: gl.constexpr, SHIFT: gl.constexpr,
    DELTA: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Operands of 64 channels in place, relative to the start of each 16 tokens, and the least sum
    of gates from there on, by tokens."""
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    b_e = gl.associative_scan(b_g, 1, add) + SHIFT
    b_lowest = gl.reshape(gl.min(b_e, 2), [64]) - SHIFT
    HIGHEST: gl.constexpr = 2 * LIMIT + ROUNDING - SHIFT
    decay_operands(b_e, b_e - b_g, q, a, b, k, flat, HIGHEST, DELTA, GATED)
    return gl.convert_layout(b_lowest, gl.SliceLayout(1, layout))


@gluon.jit
def from_middle(
    b_g, q, a, b, k, middle, layout: gl.constexpr, LIMIT: gl.constexpr, APART: gl.constexpr,
    DELTA: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """wy.py's operands of 64 channels in place, and m; the least sum of gates by tokens, that of
    the first half or from there on."""
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    three: gl.constexpr = b_g.type.layout
    b_e, b_before, b_n, b_middle, b_early, _ = gates_of(b_g, LIMIT, APART)
    quarter = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None, None]
    b_sum = b_e + b_n
    if APART > 0:
        b_sum = gl.where(quarter < 2, b_sum, gl.minimum(b_sum - b_early, b_early))
    b_lowest = gl.reshape(gl.min(b_sum, 2), [64])
    middle.store(gl.reshape(b_middle, [64]))
    decay_operands(b_e, b_before, q, a, b, k, flat, 2 * LIMIT + 1 - APART, DELTA, GATED)
    return gl.convert_layout(b_lowest, gl.SliceLayout(1, layout))


@gluon.jit
def from_start(tiles, middles, none, NK: gl.constexpr, APART: gl.constexpr):
    """Tiles of reads relative to the start, without APART: less code than solve's way, and this
    kernel does not fit the instruction cache."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    later = gl.arange(0, 64, gl.SliceLayout(1, rows)) + none >= 32
    b_apart = gl.where(later, -APART, APART)[:, None]
    for n in range(NK):
        b_n = middles.index(none + n).load(gl.SliceLayout(0, rows))[None, :] + b_apart
        b = tiles.index(none + n).load(rows) * gl.exp2(b_n)
        tiles.index(none + n).store(b.to(tiles.dtype))


@gluon.jit(do_not_specialize=["scale", "keep", "total", "T", "N", "HV", "H"])
def dplr_intra_safe_sm90_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,
    a_ptr,  # none for delta
    b_ptr,  # [tokens, HV, K], how much each channel erases, gated delta
    v_ptr,  # [tokens, HV, V]
    write_ptr,  # [tokens, HV, V], gated delta
    g_ptr,  # [tokens, HV, K] or [tokens, HV]
    beta_ptr,  # [tokens, HV], delta; none for gated delta
    q_out_ptr,  # [slots, HV, C, K]: scale q exp(G)
    w_out_ptr,  # W
    b_out_ptr,  # b exp(G_C - G)
    k_out_ptr,  # k exp(G_C - G), dplr
    u_out_ptr,  # [slots, HV, V, C]: U, float32
    total_ptr,  # [slots, HV, K]: exp(G_C)
    qb_ptr,  # [slots, HV, C, C], scaled
    qk_ptr,  # scaled, dplr
    ak_ptr,  # dplr, if keep
    r_ptr,  # if keep
    strong_ptr,  # [slots, HV]: 2 where the chunk is
    cu_ptr,  # [N + 1]
    scale,
    keep,
    total,
    T,
    N,
    HV,
    H,
    K: gl.constexpr,
    V: gl.constexpr,
    DELTA: gl.constexpr,
    CHANNEL: gl.constexpr,
    PACKED: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
    APART: gl.constexpr,
):
    """grid (any,), 4 warps: every num_programs-th chunk a program, so that all have something to do
    where chunks are few and all of them strong. total: slots * HV."""
    some: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_m = gl.arange(0, FLAGS_PER_LOAD, some)
    at = gl.program_id(0)
    while at < total:  # a chunk needs all registers: one number, `at`, is what outlives it
        b_at = at + o_m * gl.num_programs(0)
        b_strong = gl.load(strong_ptr + b_at, mask=b_at < total, other=0)
        ahead = gl.min(gl.where(b_strong > 1, o_m, FLAGS_PER_LOAD), 0)
        if ahead < FLAGS_PER_LOAD:
            one_chunk(
                q_ptr, k_ptr, a_ptr, b_ptr, v_ptr, write_ptr, g_ptr, beta_ptr, q_out_ptr, w_out_ptr,
                b_out_ptr, k_out_ptr, u_out_ptr, total_ptr, qb_ptr, qk_ptr, ak_ptr, r_ptr,
                cu_ptr, scale, keep, at + ahead * gl.num_programs(0), T, N, HV, H,
                K, V, DELTA, CHANNEL, PACKED, LIMIT, SHIFT, APART,
            )  # fmt: skip
        # with 0, so that the step is made here
        at += (gl.minimum(ahead + 1, FLAGS_PER_LOAD) + (T + at >> 31)) * gl.num_programs(0)


@gluon.jit
def one_chunk(
    q_ptr, k_ptr, a_ptr, b_ptr, v_ptr, write_ptr, g_ptr, beta_ptr, q_out_ptr, w_out_ptr,
    b_out_ptr, k_out_ptr, u_out_ptr, total_ptr, qb_ptr, qk_ptr, ak_ptr, r_ptr, cu_ptr, scale, keep,
    pid, T, N, HV, H, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr, CHANNEL: gl.constexpr,
    PACKED: gl.constexpr, LIMIT: gl.constexpr, SHIFT: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 64
    NK: gl.constexpr = K // 64
    GK: gl.constexpr = K**CHANNEL
    GATED: gl.constexpr = DELTA and beta_ptr is None
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    act: gl.constexpr = q_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], act)
    qs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    reads = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    bs = qs
    keys = qs
    if not DELTA:
        bs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    if GATED or not DELTA:
        keys = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    xs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    ys = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    if DELTA:
        highs = gl.allocate_shared_memory(gl.bfloat16, [NK, 64, 64], tile)
        lows = gl.allocate_shared_memory(gl.bfloat16, [NK, 64, 64], tile)
    else:
        highs = xs._reinterpret(gl.bfloat16, [NK, 64, 64], tile)
        lows = ys._reinterpret(gl.bfloat16, [NK, 64, 64], tile)
    i_h = pid % HV
    row, num_rows, _ = locate_sequence(cu_ptr, pid // HV, T, N, C, C, PACKED, True)
    index = gl.cast(pid, gl.int64)
    token = row.to(gl.int64) * HV + i_h
    # 0, another one each time: what is made of it is not kept for the next chunk, level or part
    none = T + pid >> 31 << 10
    o_i = gl.arange(0, 64, gl.SliceLayout(1, al))[:, None] + none
    o_j = gl.arange(0, 64, gl.SliceLayout(0, al))[None, :]
    begin = (row.to(gl.int64) * H + i_h // (HV // H)) * K
    zero, writes = gl.zeros([64, 64], gl.float32, al), xs if DELTA else bs
    load_erase(b_ptr, token * K, HV * K, num_rows, none, keys, NK, GATED)
    load_tiles(q_ptr, k_ptr, a_ptr, b_ptr, begin, H * K, num_rows, none, qs, reads, bs, keys,
               NK, DELTA)  # fmt: skip
    b_lowest = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))
    for n in range(NK):
        p_g = g_ptr + (token + none) * GK + n * (64 * CHANNEL)
        b_low = from_block(
            load_gates(p_g, HV * GK, num_rows, none, CHANNEL), qs.index(none + n),
            reads.index(none + n), writes.index(none + n), keys.index(none + n), al, LIMIT, SHIFT,
            DELTA, GATED)  # fmt: skip
        b_lowest = gl.minimum(b_lowest, b_low)
    by_block = (b_lowest >= -2 * LIMIT).to(gl.int32)
    first = BLOCK * gl.min(by_block, 0)
    ready()
    pairs = (o_i >> BLOCK == o_j >> BLOCK) & (o_i > o_j) & (by_block > 0)[:, None]
    b_qb = gl.where(pairs, scores(qs, writes, NK, zero, none), 0.0).to(act)
    b_ab = gl.where(pairs, scores(reads, writes, NK, zero, none), 0.0)
    if not DELTA:
        b_qk = gl.where(pairs, scores(qs, keys, NK, zero, none), 0.0).to(act)
        b_ak = gl.where(pairs, scores(reads, keys, NK, zero, none), 0.0).to(act)
    gl.thread_barrier()
    none = T + pid + 1 >> 31 << 10
    load_tiles(q_ptr, k_ptr, a_ptr, b_ptr, begin, H * K, num_rows, none, qs, reads, bs, keys,
               NK, DELTA)  # fmt: skip
    if DELTA:
        for n in range(NK):
            put_gates(g_ptr + (token + none) * GK + n * (64 * CHANNEL), HV * GK, num_rows, none,
                      highs.index(none + n), lows.index(none + n), al, CHANNEL)  # fmt: skip
    same = o_i + none == o_j
    b_qb = gl.where(same, scores(qs, reads if DELTA else bs, NK, zero, none).to(act), b_qb)
    if not DELTA:
        b_qk = gl.where(same, scores(qs, keys, NK, zero, none).to(act), b_qk)
    for level in range(first, LEVELS):
        gl.thread_barrier()
        now = T + pid + level >> 31 << 10
        later = ((o_i + now >> level) & 1) == 1
        seen = gates_seen(C, gl.DotOperandLayout(0, al, 2), level, now, False, True)
        for n in range(NK):
            if not DELTA:
                put_gates(g_ptr + (token + now) * GK + n * (64 * CHANNEL), HV * GK, num_rows, now,
                          highs.index(now + n), lows.index(now + n), al, CHANNEL)  # fmt: skip
            b_e = sum_gates(seen, highs.index(now + n), lows.index(now + n), zero)
            at_level(
                b_e, qs.index(now + n), reads.index(now + n), bs.index(now + n),
                keys.index(now + n), highs.index(now + n), lows.index(now + n),
                xs.index(now + n), ys.index(now + n), later, DELTA, GATED)  # fmt: skip
        ready()
        pairs = (((o_i + now >> level) ^ (o_j >> level)) == 1) & later
        pairs = pairs & ((by_block == 0)[:, None] | (level + o_j - o_j >= BLOCK))
        if DELTA:
            b_qb = gl.where(pairs, scores(xs, ys, NK, zero, now).to(act), b_qb)
            b_ab = gl.where(pairs, scores(ys, ys, NK, zero, now), b_ab)
        else:
            b_qb = gl.where(pairs, scores(xs, xs, NK, zero, now).to(act), b_qb)
            b_qk = gl.where(pairs, scores(xs, ys, NK, zero, now).to(act), b_qk)
            b_ab = gl.where(pairs, scores(ys, xs, NK, zero, now), b_ab)
            b_ak = gl.where(pairs, scores(ys, ys, NK, zero, now).to(act), b_ak)
    none = T + pid + LEVELS >> 31 << 10
    i_a = index * (C * C)
    put(qb_ptr + i_a, (b_qb.to(gl.float32) * scale).to(act), C, rows, none)
    if not DELTA:
        put(qk_ptr + i_a, (b_qk.to(gl.float32) * scale).to(act), C, rows, none)
    gl.thread_barrier()
    for n in range(NK):
        if not DELTA:
            put_gates(g_ptr + (token + none) * GK + n * (64 * CHANNEL), HV * GK, num_rows, none,
                      highs.index(none + n), lows.index(none + n), al, CHANNEL)  # fmt: skip
        to_end(
            highs.index(none + n), lows.index(none + n), reads.index(none + n),
            bs.index(none + n), keys.index(none + n), b_out_ptr, k_out_ptr,
            index * (C * K) + n * 64, none, zero, rows, K, DELTA)  # fmt: skip
    gl.thread_barrier()
    finish(
        b_ab, None if DELTA else b_ak, qs, reads, writes, keys, v_ptr, write_ptr, g_ptr, beta_ptr,
        w_out_ptr, u_out_ptr, qb_ptr, qk_ptr, ak_ptr, r_ptr, scale, keep, index, token, num_rows,
        T + pid + LEVELS + 1 >> 31 << 10, HV, K, V, DELTA, CHANNEL, LIMIT, APART)  # fmt: skip


@gluon.jit
def finish(
    b_ab, b_ak, qs, reads, writes, keys, v_ptr, write_ptr, g_ptr, beta_ptr, w_out_ptr, u_out_ptr,
    qb_ptr, qk_ptr, ak_ptr, r_ptr, scale, keep, index, token, num_rows, none, HV,
    K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr, CHANNEL: gl.constexpr,
    LIMIT: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Rows of scores as wy.py makes them, where tokens allow that; W and U of all."""
    C: gl.constexpr = 64
    NK: gl.constexpr = K // 64
    GK: gl.constexpr = K**CHANNEL
    GATED: gl.constexpr = DELTA and beta_ptr is None
    act: gl.constexpr = qs.dtype
    al: gl.constexpr = b_ab.type.layout
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    zero = gl.zeros([64, 64], gl.float32, al)
    i_a = index * (C * C)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    middles = gl.allocate_shared_memory(gl.float32, [NK, 64], plain)
    b_lowest = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))
    for n in range(NK):
        p_g = g_ptr + (token + none) * GK + n * (64 * CHANNEL)
        b_low = from_middle(
            load_gates(p_g, HV * GK, num_rows, none, CHANNEL), qs.index(none + n),
            reads.index(none + n), writes.index(none + n), keys.index(none + n),
            middles.index(none + n), al, LIMIT, APART, DELTA, GATED)  # fmt: skip
        b_lowest = gl.minimum(b_lowest, b_low)
    as_weak = b_lowest >= -(2 * LIMIT + ROUNDING)
    o_i = gl.arange(0, 64, gl.SliceLayout(1, al))[:, None] + none
    o_j = gl.arange(0, 64, gl.SliceLayout(0, al))[None, :]
    seen = o_i >= o_j
    past = (o_i > o_j) & as_weak[:, None]
    ready()
    b_whole = together(scores(qs, writes, NK, zero, none), none, APART) * scale
    b_whole = gl.where(seen, b_whole, 0.0).to(act)
    put(qb_ptr + i_a, b_whole, C, rows, none, as_weak)
    if not DELTA:
        b_whole = together(scores(qs, keys, NK, zero, none), none, APART) * scale
        b_whole = gl.where(seen, b_whole, 0.0).to(act)
        put(qk_ptr + i_a, b_whole, C, rows, none, as_weak)
        b_weak = together(scores(reads, keys, NK, zero, none), none, APART)
        b_ak = gl.where(past, b_weak.to(act), b_ak)
        if keep != 0:
            put(ak_ptr + i_a, b_ak, C, rows, none)
    b_weak = together(scores(reads, writes, NK, zero, none), none, APART)
    b_ab = gl.where(past, b_weak, b_ab)
    if DELTA and not GATED:
        o_b = gl.arange(0, 64, gl.SliceLayout(1, al)) + none
        b_beta = gl.load(beta_ptr + token + o_b * HV, mask=o_b < num_rows, other=0.0)
        b_ab = b_ab * b_beta.to(gl.float32)[:, None]
    if not DELTA:
        b_ab = -b_ab
    aks = qs.index(none)
    gl.thread_barrier()
    if not DELTA:
        aks.store(b_ak)
    if APART > 0:
        from_start(reads, middles, none, NK, APART)
    ready()
    solve(
        b_ab, None if DELTA else aks, reads, None,
        beta_ptr + token if DELTA and not GATED else None, v_ptr + token * V,
        write_ptr + token * V if GATED else None, w_out_ptr + index * (C * K),
        u_out_ptr + index * (V * C), r_ptr + i_a, keep, num_rows, HV, K, V, DELTA, 0.0, none,
    )  # fmt: skip
    gl.thread_barrier()
