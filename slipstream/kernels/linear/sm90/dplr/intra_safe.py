"""Decays per channel on sm_90: what needs no state, of strong chunks.

As wy.py, which marks the chunks, does it for the others, but in blocks that are as small as the
gates want. A block of 2^s tokens is what a chunk is there: relative to its middle, APART, each of
its halves allowed 2^(-2 LIMIT), s from 5 down to 2, where gates are cut. Pairs of different blocks
are at one level l from s to 5, where the chunk lies in blocks of 2^(l + 1) tokens: with H the sum
of gates up to such a block's middle, rounded down,

    reads of the later half exp2(G_i - H)        writes of the earlier half exp2(H - G_j)

which at most are 2 and 1, at any gate. A row is then either a read or a write, so that two tiles a
level have them all:

    x = later: q, earlier: b        y = later: a, earlier: k
    qb = x x^T      ab = y x^T      qk = x y^T      ak = y y^T

for delta x = q and y = k, in both halves. s depends on gates of the whole chunk, but no bit of an
output does: whatever G is relative to is a whole number. float16 has no room for blocks: s is 0
there always, and rows that wy.py would take are made once more as it makes them.
"""

from collections import namedtuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.dplr import blocks, by_quarters, gate_sums, wy
from slipstream.kernels.linear.sm90.dplr.solve_tril import (
    ChunkRefs,
    put,
    ready,
    scores,
    solve,
)
from slipstream.kernels.linear.sm90.dplr.subchunk_decay import LEVELS
from slipstream.kernels.linear.triton.scalar_decay.device import LOG2E, ROUNDING
from slipstream.kernels.primitives.sm90 import gl, gluon

# what the kernel passes on: pointers, numbers and constants
Refs = namedtuple(
    "Refs",
    "q k a b v write g beta q_out w_out b_out k_out u_out total qb qk ak r cu",
)
Sizes = namedtuple("Sizes", "T N HV H token_heads")
Constants = namedtuple("Constants", "K V DELTA CHANNEL PACKED LIMIT APART")
# what products take: x and y of reads, z and w of writes
Operands = namedtuple("Operands", "x y z w")

FLAGS_PER_LOAD = gl.constexpr(128)  # marks that are looked at together


@gluon.jit
def erased(b_a, k, flat: gl.constexpr, GATED: gl.constexpr):
    """a, or, GATED, a times how much each channel erases, which k has."""
    b_a = b_a.to(gl.float32)
    if GATED:
        b_a *= k.load(flat).to(gl.float32)
    return b_a


@gluon.jit
def operands_at(ops, i):
    """The operands of 64 channels."""
    return Operands(ops.x.index(i), ops.y.index(i), ops.z.index(i), ops.w.index(i))


@gluon.jit
def block_operands(
    b_e, b_before, later, tile, ops, flat: gl.constexpr, APART: gl.constexpr, DELTA: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Operands of pairs in a block: x and y of reads q and a, z and w of writes b and k."""
    x, y, z, w = ops
    q, a, b, k = tile
    b_apart = gl.where(later > 0, APART, -APART)
    b_f = blocks.flattened(common.exp2_by_parts(b_e + b_apart), flat)
    blocks.put_product(x, q.load(flat), b_f)
    if not DELTA:
        b_f = blocks.flattened(common.exp2_by_parts(b_before + b_apart), flat)
    b_a = a.load(flat)
    blocks.put_product(y, erased(b_a, k, flat, GATED), b_f)
    b_f = blocks.flattened(common.exp2_by_parts(-(b_e + b_apart)), flat)
    if DELTA:
        blocks.put_product(z, b_a, b_f)
    else:
        blocks.put_product(z, b.load(flat), b_f)
        blocks.put_product(w, k.load(flat), b_f)


@gluon.jit
def level_operands(
    b_e, b_before, later, tile, ops, flat: gl.constexpr, DELTA: gl.constexpr, GATED: gl.constexpr
):
    """x and y of pairs in the halves of a block."""
    x, y, _, _ = ops
    q, a, b, k = tile
    reads = blocks.flattened(later + 0 * b_e.to(gl.int32), flat) > 0
    b_f = blocks.flattened(common.exp2_or_least(gl.where(later > 0, b_e, -b_e)), flat)
    b_a = a.load(flat)
    if DELTA:
        blocks.put_product(x, gl.where(reads, q.load(flat), b_a), b_f)
        b_a = gl.where(reads, erased(b_a, k, flat, GATED), b_a.to(gl.float32))
        blocks.put_product(y, b_a, b_f)
    else:
        blocks.put_product(x, gl.where(reads, q.load(flat), b.load(flat)), b_f)
        b_f = blocks.flattened(common.exp2_or_least(gl.where(later > 0, b_before, -b_e)), flat)
        blocks.put_product(y, gl.where(reads, b_a, k.load(flat)), b_f)


@gluon.jit
def to_edges(
    b_g, tile, q_out_ptr, b_out_ptr, k_out_ptr, o_w, scale, flat: gl.constexpr, APART: gl.constexpr,
    DELTA: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """a as it reads the state, in place, and q~, b^ and k^ of 64 channels; a and q~ relative to
    what wy.py has where m is -APART, so that all is rounded alike."""
    q, a, b, k = tile
    three: gl.constexpr = b_g.type.layout
    b_e, b_before, b_all = gate_sums.sums_of_quarters(b_g)
    four: gl.constexpr = b_all.type.layout
    b_base = gate_sums.sum_before(b_all, by_quarters.quarters(four), three)
    # no difference of sums across quarters, which at strong gates would be inexact
    b_rest = gate_sums.sum_from(b_all, by_quarters.quarters(four), three)
    b_n = gl.where(by_quarters.quarters(three) < 2, 0.0, -2.0 * APART)
    b_start = gl.where(by_quarters.quarters(three) < 2, 1.0, 2.0 ** (-2 * APART))
    b_off = b_n - b_base
    b_f = blocks.flattened(gl.exp2(b_rest - b_e), flat)
    b_r = blocks.flattened(common.exp2_or_least(b_e - b_off), flat)
    b_q = q.load(flat) * b_r * by_quarters.of_tokens(b_start * scale, flat)
    gl.store(q_out_ptr + o_w, b_q.to(q.dtype))
    b_a = a.load(flat)
    if DELTA:
        gl.store(b_out_ptr + o_w, (b_a * b_f).to(a.dtype))
        b_f = b_r
    else:
        gl.store(b_out_ptr + o_w, (b.load(flat) * b_f).to(a.dtype))
        gl.store(k_out_ptr + o_w, (k.load(flat) * b_f).to(a.dtype))
        b_f = blocks.flattened(common.exp2_or_least(b_before - b_off), flat)
    blocks.put_product(a, erased(b_a, k, flat, GATED), b_f)


@gluon.jit
def whole_operands(
    b_g, tile, ops, layout: gl.constexpr, flat: gl.constexpr, LIMIT: gl.constexpr,
    DELTA: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Operands of all pairs, as wy.py has them in float16. Returns each token's lowest G."""
    three: gl.constexpr = b_g.type.layout
    b_e, b_before, b_all = gate_sums.sums_of_quarters(b_g)
    four: gl.constexpr = b_all.type.layout
    b_base = gate_sums.sum_before(b_all, by_quarters.quarters(four), three)
    b_e += b_base
    LOW: gl.constexpr = -(2 * LIMIT + 1)
    block_operands(
        common.at_least(b_e, LOW), common.at_least(b_before + b_base, LOW), b_e.to(gl.int32) * 0,
        tile, ops, flat, 0.0, DELTA, GATED,
    )  # fmt: skip
    return gl.convert_layout(gl.reshape(gl.min(b_e, 2), [64]), gl.SliceLayout(1, layout))


@gluon.jit
def add_pairs(
    b_qb, b_ab, b_qk, b_ak, ops, zero, scale, level, first, none, NK: gl.constexpr,
    DELTA: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Scores of a level, or, below `first`, of blocks of 2^first tokens."""
    xs, ys, zs, ws = ops
    layout: gl.constexpr = zero.type.layout
    act: gl.constexpr = xs.dtype
    o_i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] + none
    o_j = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    pairs = (((o_i >> level) ^ (o_j >> level)) == 1) & (o_i > o_j)
    if level < first:
        b_apart = gl.where(pairs, 2.0 ** (-2 * APART), 1.0)
        seen = (o_i >> first == o_j >> first) & (o_i >= o_j)
        pairs = seen & (o_i > o_j)
        b_qb = gl.where(seen, scores(xs, zs, NK, zero, none) * b_apart * scale, 0.0).to(act)
        b_ab = gl.where(pairs, scores(ys, zs, NK, zero, none) * b_apart, 0.0)
        if not DELTA:
            b_qk = gl.where(seen, scores(xs, ws, NK, zero, none) * b_apart * scale, 0.0).to(act)
            b_ak = gl.where(pairs, scores(ys, ws, NK, zero, none) * b_apart, 0.0).to(act)
    elif DELTA:
        b_qb = gl.where(pairs, (scores(xs, ys, NK, zero, none) * scale).to(act), b_qb)
        b_ab = gl.where(pairs, scores(ys, ys, NK, zero, none), b_ab)
    else:
        b_qb = gl.where(pairs, (scores(xs, xs, NK, zero, none) * scale).to(act), b_qb)
        b_qk = gl.where(pairs, (scores(xs, ys, NK, zero, none) * scale).to(act), b_qk)
        b_ab = gl.where(pairs, scores(ys, xs, NK, zero, none), b_ab)
        b_ak = gl.where(pairs, scores(ys, ys, NK, zero, none).to(act), b_ak)
    return b_qb, b_ab, b_qk, b_ak


@gluon.jit
def put_whole_rows(
    b_qb, b_ab, b_qk, b_ak, ops, zero, scale, b_lowest, none, NK: gl.constexpr, LIMIT: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    """Scores with the rows that wy.py would take as it makes them."""
    xs, ys, zs, ws = ops
    layout: gl.constexpr = zero.type.layout
    act: gl.constexpr = xs.dtype
    o_i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] + none
    o_j = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    as_weak = (b_lowest >= -(2 * LIMIT + ROUNDING))[:, None]
    pairs = as_weak & (o_i > o_j)
    seen = as_weak & (o_i >= o_j)
    b_qb = gl.where(seen, (scores(xs, zs, NK, zero, none) * scale).to(act), b_qb)
    b_ab = gl.where(pairs, scores(ys, zs, NK, zero, none), b_ab)
    if not DELTA:
        b_qk = gl.where(seen, (scores(xs, ws, NK, zero, none) * scale).to(act), b_qk)
        b_ak = gl.where(pairs, scores(ys, ws, NK, zero, none).to(act), b_ak)
    return b_qb, b_ab, b_qk, b_ak


@gluon.jit
def load_tiles(
    q_ptr, k_ptr, a_ptr, b_ptr, begin, stride, num_rows, none, tiles, NK: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    """Rows of `stride` from element `begin` on; of free a and b four tiles."""
    qs, reads, bs, keys = tiles
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
def load_gates(p, n, stride, num_rows, none, CHANNEL: gl.constexpr):
    """Gates of the n-th 64 channels [4, 16, 64] as wy.py has them."""
    three: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    o_t = 16 * gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None, None] + none
    o_t += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, three)))[None, :, None]
    o_n = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, three)))[None, None, :]
    p += o_t * stride + (n * 64 + o_n) * CHANNEL
    b_g = gl.load(p, mask=o_t < num_rows + 0 * o_n, other=0.0).to(gl.float32)
    # LIMIT of bf16: halves of blocks of four are above -2 LIMIT
    return common.at_least(b_g * LOG2E, -80.0)


@gluon.jit
def largest_excess(tiles, none, NK: gl.constexpr, DELTA: gl.constexpr, GATED: gl.constexpr):
    """excess_of all channels."""
    excess = 0.0
    for n in range(NK):
        i = none + n
        excess_n = wy.excess_of(by_quarters.tiles_at(tiles, i), DELTA, GATED)
        excess = gl.maximum(excess, excess_n)
    return excess


@gluon.jit
def put_operands(
    p_g, stride, num_rows, level, first, none, tiles, ops, flat: gl.constexpr, NK: gl.constexpr,
    CHANNEL: gl.constexpr, APART: gl.constexpr, DELTA: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Writes operands of a level, or, below `first`, of blocks of 2^first tokens."""
    for n in range(NK):
        b_g = load_gates(p_g, n, stride, num_rows, none, CHANNEL)
        b_e, b_before, later = blocks.exponents(b_g, level, none, APART)
        if level < first:
            block_operands(
                b_e, b_before, later, by_quarters.tiles_at(tiles, none + n),
                operands_at(ops, none + n), flat, APART, DELTA, GATED,
            )  # fmt: skip
        else:
            level_operands(
                b_e, b_before, later, by_quarters.tiles_at(tiles, none + n),
                operands_at(ops, none + n), flat, DELTA, GATED,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["scale", "keep", "total", "T", "N", "HV", "H", "token_heads"])
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
    scale, keep, total, T, N, HV, H,
    token_heads,  # as in wy.py
    K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr, CHANNEL: gl.constexpr,
    PACKED: gl.constexpr, LIMIT: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """grid (any,), 4 warps: every num_programs-th chunk a program, so that all have something to do
    where chunks are few and all of them strong. total: slots * HV."""
    c: gl.constexpr = Constants(K, V, DELTA, CHANNEL, PACKED, LIMIT, APART)
    sizes = Sizes(T, N, HV, H, token_heads)
    refs = Refs(
        q_ptr, k_ptr, a_ptr, b_ptr, v_ptr, write_ptr, g_ptr, beta_ptr, q_out_ptr, w_out_ptr,
        b_out_ptr, k_out_ptr, u_out_ptr, total_ptr, qb_ptr, qk_ptr, ak_ptr, r_ptr, cu_ptr,
    )  # fmt: skip
    some: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_m = gl.arange(0, FLAGS_PER_LOAD, some)
    at = gl.program_id(0)
    while at < total:  # a chunk needs all registers: one number, `at`, is what outlives it
        b_at = at + o_m * gl.num_programs(0)
        b_strong = gl.load(strong_ptr + b_at, mask=b_at < total, other=0)
        strong = b_strong > (2 if by_quarters.takes_quarters(K, DELTA, APART) else 1)
        ahead = gl.min(gl.where(strong, o_m, FLAGS_PER_LOAD), 0)
        if ahead < FLAGS_PER_LOAD:
            one_chunk(refs, scale, keep, at + ahead * gl.num_programs(0), sizes, c)
        # with 0, so that the step is made here
        at += (gl.minimum(ahead + 1, FLAGS_PER_LOAD) + (T + at >> 31)) * gl.num_programs(0)


@gluon.jit
def one_chunk(refs, scale, keep, pid, sizes, c):
    T, N, HV, H, token_heads = sizes
    C: gl.constexpr = 64
    NK: gl.constexpr = c.K // 64
    GK: gl.constexpr = c.K**c.CHANNEL
    GATED: gl.constexpr = c.DELTA and refs.beta is None
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    act: gl.constexpr = refs.q.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], act)
    qs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    reads = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    bs = reads if c.DELTA else gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    keys = reads
    if GATED or not c.DELTA:
        keys = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    xs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    ys = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    zs = gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    ws = zs if c.DELTA else gl.allocate_shared_memory(act, [NK, 64, 64], tile)
    ops = Operands(xs, ys, zs, ws)
    tiles = by_quarters.Tiles(qs, reads, bs, keys)
    i_h = pid % HV
    row, num_rows, _ = common.locate_sequence(refs.cu, pid // HV, T, N, C, C, c.PACKED, True)
    index = gl.cast(pid, gl.int64)
    token = row.to(gl.int64) * token_heads + i_h
    # 0, another one each time: what is made of it is not kept for the next chunk, level or part
    none = T + pid >> 31 << 10
    o_i = gl.arange(0, 64, gl.SliceLayout(1, al))[:, None] + none
    o_j = gl.arange(0, 64, gl.SliceLayout(0, al))[None, :]
    p_g = refs.g + token * GK
    token_keys = token_heads // (HV // H)
    begin = (row.to(gl.int64) * token_keys + i_h // (HV // H)) * c.K
    zero = gl.zeros([64, 64], gl.float32, al)
    load_erase(refs.b, token * c.K, token_heads * c.K, num_rows, none, keys, NK, GATED)
    load_tiles(
        refs.q, refs.k, refs.a, refs.b, begin, token_keys * c.K, num_rows, none, tiles, NK, c.DELTA
    )
    first = 0
    b_qb, b_ab, b_qk, b_ak = zero.to(act), zero, zero.to(act), zero.to(act)
    if c.APART > 0:
        first = LEVELS - 1
        excess = largest_excess(tiles, none, NK, c.DELTA, GATED)
        for n in range(NK):
            b_g = load_gates(p_g, n, token_heads * GK, num_rows, none, c.CHANNEL)
            first = gl.minimum(first, blocks.block_level(b_g, excess, c.LIMIT))
    else:
        b_qb = gl.where(o_i == o_j, scores(qs, bs, NK, zero, none) * scale, 0.0).to(act)
        if not c.DELTA:
            b_qk = gl.where(o_i == o_j, scores(qs, keys, NK, zero, none) * scale, 0.0).to(act)
    # blocks of 2^first tokens, which level first - 1 halves, come before the levels
    for level in range(first - (1 if c.APART > 0 else 0), LEVELS):
        gl.thread_barrier()
        now = T + pid + level >> 31 << 10
        put_operands(
            p_g, token_heads * GK, num_rows, level, first, now, tiles, ops, flat, NK, c.CHANNEL,
            c.APART, c.DELTA, GATED,
        )  # fmt: skip
        ready()
        b_qb, b_ab, b_qk, b_ak = add_pairs(
            b_qb, b_ab, b_qk, b_ak, ops, zero, scale, level, first, now, NK, c.DELTA, c.APART
        )
    none = T + pid + LEVELS >> 31 << 10
    if c.APART == 0:
        gl.thread_barrier()
        b_lowest = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))
        for n in range(NK):
            b_low = whole_operands(
                load_gates(p_g, n, token_heads * GK, num_rows, none, c.CHANNEL),
                by_quarters.tiles_at(tiles, none + n), operands_at(ops, none + n), al, flat,
                c.LIMIT, c.DELTA, GATED,
            )  # fmt: skip
            b_lowest = gl.minimum(b_lowest, b_low)
        ready()
        b_qb, b_ab, b_qk, b_ak = put_whole_rows(
            b_qb, b_ab, b_qk, b_ak, ops, zero, scale, b_lowest, none, NK, c.LIMIT, c.DELTA
        )
    i_a = index * (C * C)
    put(refs.qb + i_a, b_qb, C, rows, none)
    if c.DELTA and not GATED:
        o_b = gl.arange(0, 64, gl.SliceLayout(1, al)) + none
        b_beta = gl.load(refs.beta + token + o_b * token_heads, mask=o_b < num_rows, other=0.0)
        b_ab = b_ab * b_beta.to(gl.float32)[:, None]
    if not c.DELTA:
        put(refs.qk + i_a, b_qk, C, rows, none)
        if keep != 0:
            put(refs.ak + i_a, b_ak, C, rows, none)
        b_ab = -b_ab
    gl.thread_barrier()
    o_f = gl.arange(0, 64, gl.SliceLayout(1, flat))[:, None] * c.K + index * (C * c.K) + none
    o_f += gl.arange(0, 64, gl.SliceLayout(0, flat))[None, :]
    for n in range(NK):
        to_edges(
            load_gates(p_g, n, token_heads * GK, num_rows, none, c.CHANNEL),
            by_quarters.tiles_at(tiles, none + n), refs.q_out, refs.b_out, refs.k_out, n * 64 + o_f,
            scale, flat, c.APART, c.DELTA, GATED,
        )  # fmt: skip
    if not c.DELTA:
        gl.thread_barrier()
        qs.index(none).store(b_ak)
    ready()
    p_beta = refs.beta + token if c.DELTA and not GATED else None
    chunk_refs = ChunkRefs(
        refs.v + token * c.V, refs.write + token * c.V if GATED else None,
        refs.w_out + index * (C * c.K), refs.u_out + index * (c.V * C), refs.r + i_a,
    )  # fmt: skip
    b_ak = None if c.DELTA else qs.index(none)
    solve(b_ab, b_ak, reads, None, p_beta, chunk_refs, keep, num_rows, token_heads, c, none)
    gl.thread_barrier()
