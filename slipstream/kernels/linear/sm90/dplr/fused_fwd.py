"""KDA forward on sm_90 in one kernel: chunks of 16 tokens, q, k, v, g and beta read once.

A program scans one head of a sequence, in blocks of 64 tokens. With G_i the sum of a channel's
gates in base 2 from the chunk's start to token i,

    a = k exp2(G + 57)    r = q exp2(G + 57)    b = k exp2(-G - 57)    e = k exp2(G_C - G)
    T = (I + beta tril(a b^T, -1))^-1 beta      P = tril(r b^T)
    u = T (v - 2^-57 a S)      o = scale (2^-57 r S + P u)      S <- exp2(G_C) S + e^T u

Sums of 16 gates of -5 each, -115 in base 2, leave a, r and b normal numbers of bf16. A head with
a sum below LIMIT is done again by a second launch, with STRONG, where the others have nothing to
do. There rows of A and P whose own sums are below it come from halves of 8 tokens
(strong_scores), and e of such a chunk and channel from exp2(G_C - G) at once: no choice depends on
a later token than its result. Other bits are those of the first launch, as no products and sums are
fused but by gl.fma.

    load, a thread of          prepare_partition, 4 warps        scan_partition, 4 warps
    prepare_partition            of even, of odd blocks            for each 64 columns of V
      q, k, v -- full ------->     q, k become r, a; e, T, P,
      g ------ g_full ------->     exp2(G_C) -- made --------->    u, o, S of four chunks
      <-- g_empty <-- empty ---------------------------------

    buffers                      stages   arrivals a phase: full / empty
    q, k, v, e, b, total, tp     2        1 (TMA) / 2, a scan_partition each
    g, by halves of channels     1        1 (TMA), a barrier for each prepare_partition / 1
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90.common.device import (
    alloc_mbarriers,
    at_least,
    locate_segment,
    store_tile,
)
from slipstream.kernels.linear.sm90.common.tril_inverse import BASE, NB, by_blocks, substitute
from slipstream.kernels.linear.sm90.delta.device import (
    StateRefs,
    load_state,
    state_offset,
    store_state,
)
from slipstream.kernels.linear.sm90.delta.solve_tril import fast_exp2
from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

Constants = namedtuple("Constants", "K V C STRONG HAS_S_IN HAS_S_OUT")
LOG2E = gl.constexpr(1.4426950408889634)
APART = gl.constexpr(57.0)
# natural, as gates are: exp2(-G - 57) is below 2^123 down to here
LIMIT = gl.constexpr(-124.0)
LOWEST = gl.constexpr(-100.0)  # exp of it counts as 0, and sums of 16 keep their digits
LOWEST_WITHIN = gl.constexpr(-16.0)  # 2^-23 a step: what eight of them are apart, float32 holds
SUB = gl.constexpr(8)


class Tiles(NamedTuple):
    """ST = 2 stages of 64 tokens, one of each prepare_partition; q, k, e, b, g by halves of the
    channels, v and o by tiles of V."""

    q: Any  # [ST * 2, 64, 64], then r
    k: Any  # then a
    e: Any
    v: Any
    b: Any
    g: Any  # [2, 64, 64], float32, of one block
    o: Any  # [2, 64, 64]
    total: Any  # [ST * 2, NB, 64], float32
    tp: Any  # [ST, 2 * C, 16]: blocks of T, then of P; before, what `substitute` reads


class Barriers(NamedTuple):
    full: Any  # [ST], as made and empty
    made: Any
    empty: Any
    g_full: Any  # [ST * 2], a half each
    g_empty: Any  # [2]


class Sequence(NamedTuple):
    """Rows of a program's sequence, its columns of q and k, g, and v, and whether it has work."""

    row: Any
    length: Any
    n: Any
    k_col: Any
    g_col: Any
    v_col: Any
    wanted: Any


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def load_gates(g_desc, tiles, barriers, seq, i, s: gl.constexpr):
    """Of block i, once those of the block before have been read."""
    for h in gl.static_range(2):
        g_full = barriers.g_full.index(2 * s + h)
        mbarrier.wait(barriers.g_empty.index(h), (i & 1) ^ 1)
        mbarrier.expect(g_full, g_desc.block_type.nbytes)
        copy_in(g_desc, [seq.row + i * 64, seq.g_col + 64 * h], g_full, tiles.g.index(h))


@gluon.jit
def load_rows(descs, tiles, barriers, seq, i, s: gl.constexpr):
    q_desc, k_desc, v_desc = descs
    full = barriers.full.index(s)
    t = seq.row + i * 64
    mbarrier.expect(full, 6 * q_desc.block_type.nbytes)
    for h in gl.static_range(2):
        copy_in(q_desc, [t, seq.k_col + 64 * h], full, tiles.q.index(2 * s + h))
        copy_in(k_desc, [t, seq.k_col + 64 * h], full, tiles.k.index(2 * s + h))
        copy_in(v_desc, [t, seq.v_col + 64 * h], full, tiles.v.index(2 * s + h))


@gluon.jit
def clear_after(tile, rows, c):
    """Zeros in `rows` and on: what is there may be another sequence's, and not finite."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    o_t = gl.arange(0, c.C, gl.SliceLayout(1, layout))
    b = tile.load(layout)
    tile.store(gl.where((o_t < rows)[:, None], b, gl.zeros_like(b)))


@gluon.jit
def load_chunks(tile, flat: gl.constexpr):
    return gl.reshape(tile.load(flat), [NB, BASE, 64])


@gluon.jit
def put(tile, b, rows: gl.constexpr, columns: gl.constexpr):
    """Chunks [NB, BASE, columns] as rows of a tile."""
    tile.store(gl.reshape(b, [rows, columns]).to(tile.dtype))


@gluon.jit
def own_scores(b, wl: gl.constexpr):
    """Of [C, C] each chunk's with its own, [NB, BASE, BASE]."""
    i_n = gl.arange(0, NB, gl.SliceLayout(1, gl.SliceLayout(2, wl)))[:, None, None]
    b_0, b_1, b_2, b_3 = by_blocks(b, wl)
    return gl.where(i_n == 0, b_0, gl.where(i_n == 1, b_1, gl.where(i_n == 2, b_2, b_3)))


@gluon.jit
def scale_half(tiles, at, b_g, b_all, flat: gl.constexpr, c):
    """Operands of half of the channels, of which b_g [NB, BASE, 64] are the gates."""
    tiles.total.index(at).store(fast_exp2(b_all * LOG2E))
    b_sum = gl.associative_scan(b_g, 1, add)
    b_read = fast_exp2(gl.fma(b_sum, LOG2E, APART))
    b = load_chunks(tiles.k.index(at), flat).to(gl.float32)
    put(tiles.k.index(at), b * b_read, c.C, 64)
    b_q = load_chunks(tiles.q.index(at), flat).to(gl.float32)
    put(tiles.q.index(at), b_q * b_read, c.C, 64)
    b *= fast_exp2(gl.fma(b_sum, -LOG2E, -APART))
    put(tiles.b.index(at), b, c.C, 64)
    # exp2(G_C - G) in two factors, of which none leaves float32
    put(tiles.e.index(at), b * fast_exp2(gl.fma(b_all, LOG2E, APART))[:, None, :], c.C, 64)


@gluon.jit
def strong_scores(tiles, at, b_k, b_q, b_g, wl: gl.constexpr, c):
    """a b^T and r b^T of half of the channels by gates of any size, and e.

    Between halves of 8 tokens by gates from the border of the two, which make nothing larger;
    within by gates of at least LOWEST_WITHIN. Operands lie where e and b come to.
    """
    layout: gl.constexpr = b_g.type.layout
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    late = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None] >= SUB
    n_i = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, wl)))[None, :, None] // SUB
    n_j = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, wl)))[None, None, :] // SUB
    zero = gl.zeros([c.C, c.C], gl.float32, al)
    x, y = tiles.e.index(at), tiles.b.index(at)
    b_a = gl.zeros([NB, BASE, BASE], gl.float32, wl)
    b_p = b_a
    for within in gl.static_range(2):
        if within:
            b_h = gl.reshape(at_least(b_g, LOWEST_WITHIN), [2 * NB, SUB, 64])
            b_h = gl.reshape(gl.associative_scan(b_h, 1, add), [NB, BASE, 64])
            # from the middle of what eight tokens can be apart
            b_h = gl.convert_layout(b_h, layout, assert_trivial=True) - 0.5 * SUB * LOWEST_WITHIN
            b_read = fast_exp2(b_h * LOG2E)
            b_write = fast_exp2(-b_h * LOG2E)
            inside = n_i == n_j
        else:
            b_early = gl.where(late, 0.0, b_g)
            b_after = gl.associative_scan(gl.where(late, b_g, 0.0), 1, add)
            b_before = gl.sum(b_early, 1)[:, None, :] - gl.associative_scan(b_early, 1, add)
            b_read = gl.where(late, fast_exp2(b_after * LOG2E), 0.0)
            b_write = gl.where(late, 0.0, fast_exp2(b_before * LOG2E))
            inside = n_i > n_j
        put(y, b_k * b_write, c.C, 64)
        for queries in gl.static_range(2):
            b_x = b_q if queries else b_k
            put(x, b_x * b_read, c.C, 64)
            fence_async_shared()
            gl.thread_barrier()
            b = warpgroup_mma(x, y.permute((1, 0)), zero, use_acc=False, is_async=True)
            b = own_scores(warpgroup_mma_wait(0, deps=(b,)), wl)
            if queries:
                b_p += gl.where(inside, b, 0.0)
            else:
                b_a += gl.where(inside, b, 0.0)
            gl.thread_barrier()
    b_all = gl.sum(b_g, 1)
    b_rest = b_all[:, None, :] - gl.associative_scan(b_g, 1, add)
    return b_a, b_p, (b_k * fast_exp2(b_rest * LOG2E)).to(tiles.e.dtype)


@gluon.jit
def scores(x, b, s: gl.constexpr, zero, wl: gl.constexpr):
    """x b^T of the stage's chunks."""
    b_s = warpgroup_mma(
        x.index(2 * s), b.index(2 * s).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    b_s = warpgroup_mma(x.index(2 * s + 1), b.index(2 * s + 1).permute((1, 0)), b_s, is_async=True)
    return own_scores(warpgroup_mma_wait(0, deps=(b_s,)), wl)


@gluon.jit
def prepare_partition(
    descs, g_desc, tiles, barriers, p_beta, p_strong, HV, seq, s: gl.constexpr, c
):  # fmt: skip
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wl: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    xl: gl.constexpr = gl.BlockedLayout([1, BASE // 2, 1], [1, 2, BASE], [4, 1, 1], [2, 1, 0])
    o_i = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, wl)))[None, :, None]
    o_j = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, wl)))[None, None, :]
    # beta of a chunk's tokens, as rows and as columns of blocks
    o_r = gl.arange(0, NB, gl.SliceLayout(1, gl.SliceLayout(2, wl)))[:, None] * BASE
    o_r = o_r + gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, wl)))[None, :]
    o_c = gl.arange(0, NB, gl.SliceLayout(1, gl.SliceLayout(1, xl)))[:, None] * BASE
    o_c = o_c + gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, xl)))[None, :]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    block = tiles.tp.index(s)._reinterpret(gl.float32, [BASE, NB, BASE], plain)
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.C, BASE], tiles.tp.dtype)
    tp = tiles.tp.index(s)._reinterpret(tiles.tp.dtype, [2, c.C, BASE], small)
    zero = gl.zeros([c.C, c.C], gl.float32, al)
    b_zero = gl.reshape(gl.zeros([c.C, 64], gl.float32, flat), [NB, BASE, 64])
    b_low = gl.sum(b_zero, 1)
    if s < seq.n:
        load_rows(descs, tiles, barriers, seq, s, s)
        load_gates(g_desc, tiles, barriers, seq, s, s)
    for i in range(s, seq.n, 2):
        rows = seq.length - i * c.C
        b_rows = gl.load(p_beta + (i * c.C + o_r) * HV, mask=o_r < rows, other=0.0).to(gl.float32)
        b_columns = gl.load(p_beta + (i * c.C + o_c) * HV, mask=o_c < rows, other=0.0)
        b_columns = b_columns.to(gl.float32)
        mbarrier.wait(barriers.full.index(s), (i // 2) & 1)
        if rows < c.C:
            for h in gl.static_range(2):
                clear_after(tiles.q.index(2 * s + h), rows, c)
                clear_after(tiles.k.index(2 * s + h), rows, c)
                clear_after(tiles.v.index(2 * s + h), rows, c)
            gl.thread_barrier()
        b_a = gl.zeros([NB, BASE, BASE], gl.float32, wl)
        b_p = b_a
        b_least = gl.sum(b_zero, 2)
        strong = 0
        if c.STRONG:
            for h in gl.static_range(2):
                mbarrier.wait(barriers.g_full.index(2 * s + h), (i // 2) & 1)
                if rows < c.C:
                    clear_after(tiles.g.index(h), rows, c)
                    gl.thread_barrier()
                b_all = gl.sum(load_chunks(tiles.g.index(h), flat), 1)
                strong += (gl.min(gl.min(b_all, 1), 0) < LIMIT).to(gl.int32)
        for h in range(2):
            at = 2 * s + h
            mbarrier.wait(barriers.g_full.index(at), (i // 2) & 1)
            if rows < c.C:
                clear_after(tiles.g.index(h), rows, c)
                gl.thread_barrier()
            b_g = load_chunks(tiles.g.index(h), flat)
            mbarrier.arrive(barriers.g_empty.index(h), count=1)
            b_all = gl.sum(b_g, 1)
            if c.STRONG:
                b_far = b_zero.to(tiles.e.dtype)
                if strong > 0:
                    b_k = load_chunks(tiles.k.index(at), flat).to(gl.float32)
                    b_q = load_chunks(tiles.q.index(at), flat).to(gl.float32)
                    b_x, b_y, b_far = strong_scores(
                        tiles, at, b_k, b_q, at_least(b_g, LOWEST), wl, c
                    )
                    b_a += b_x
                    b_p += b_y
                    b_sum = gl.associative_scan(b_g, 1, add)  # gates are at most 0: it falls
                    b_least = gl.minimum(b_least, gl.min(b_sum, 2))
                scale_half(tiles, at, b_g, b_all, flat, c)
                # of a chunk and channel beyond LIMIT: only later chunks read it
                if strong > 0:
                    b_e = load_chunks(tiles.e.index(at), flat)
                    put(tiles.e.index(at), gl.where(b_all[:, None, :] < LIMIT, b_far, b_e), c.C, 64)
            else:
                b_low = gl.minimum(b_low, b_all)
                scale_half(tiles, at, b_g, b_all, flat, c)
        if c.STRONG:
            weak = gl.convert_layout(b_least, gl.SliceLayout(2, wl))[:, :, None] >= LIMIT
        fence_async_shared()
        gl.thread_barrier()
        b_d = scores(tiles.k, tiles.b, s, zero, wl)
        if c.STRONG:
            b_d = gl.where(weak, b_d, b_a)
        b_x = substitute(gl.where(o_i > o_j, b_d * b_rows[:, :, None], 0.0), block)
        b_d = scores(tiles.q, tiles.b, s, zero, wl)
        if c.STRONG:
            b_d = gl.where(weak, b_d, b_p)
        b_x *= b_columns[:, None, :]
        gl.thread_barrier()  # all have read `block`
        put(tp.index(0), b_x, c.C, BASE)
        # P u is summed with r S, which is 2^57 times too large
        put(tp.index(1), gl.where(o_i >= o_j, b_d * 2.0**APART, 0.0), c.C, BASE)
        fence_async_shared()
        mbarrier.arrive(barriers.made.index(s), count=1)
        # gates first: they wait for the other prepare_partition alone, rows for the scan
        if i + 2 < seq.n:
            load_gates(g_desc, tiles, barriers, seq, i + 2, s)
            mbarrier.wait(barriers.empty.index(s), (i // 2) & 1)
            load_rows(descs, tiles, barriers, seq, i + 2, s)
    if not c.STRONG:
        gl.store(p_strong + s, (gl.min(gl.min(b_low, 1), 0) < LIMIT).to(gl.int32))


@gluon.jit
def scan_partition(
    o_desc, o_ptr, tiles, barriers, state_refs, o_row, seq, scale, tile: gl.constexpr, c
):  # fmt: skip
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BASE, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    along: gl.constexpr = gl.SliceLayout(0, sl)
    o_v = gl.arange(0, 64, gl.SliceLayout(1, sl)) + tile * 64
    o_k = gl.arange(0, 64, along)
    b_s0 = gl.zeros([64, 64], gl.float32, sl)
    b_s1 = gl.zeros([64, 64], gl.float32, sl)
    b_s0 = load_state(state_refs, b_s0, o_k, o_v, c.V, c.HAS_S_IN)
    b_s1 = load_state(state_refs, b_s1, 64 + o_k, o_v, c.V, c.HAS_S_IN)
    zero = gl.zeros([64, BASE], gl.float32, xl)
    dtype: gl.constexpr = tiles.k.dtype
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BASE, 64], dtype)
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BASE, BASE], dtype)
    for i in range(seq.n):
        s = i % 2
        mbarrier.wait(barriers.full.index(s), (i // 2) & 1)
        mbarrier.wait(barriers.made.index(s), (i // 2) & 1)
        a_0 = tiles.k.index(2 * s)._reinterpret(dtype, [NB, BASE, 64], wide)
        a_1 = tiles.k.index(2 * s + 1)._reinterpret(dtype, [NB, BASE, 64], wide)
        r_0 = tiles.q.index(2 * s)._reinterpret(dtype, [NB, BASE, 64], wide)
        r_1 = tiles.q.index(2 * s + 1)._reinterpret(dtype, [NB, BASE, 64], wide)
        e_0 = tiles.e.index(2 * s)._reinterpret(dtype, [NB, BASE, 64], wide)
        e_1 = tiles.e.index(2 * s + 1)._reinterpret(dtype, [NB, BASE, 64], wide)
        v = tiles.v.index(2 * s + tile)._reinterpret(dtype, [NB, BASE, 64], wide)
        out = tiles.o.index(tile)._reinterpret(dtype, [NB, BASE, 64], wide)
        tp = tiles.tp.index(s)._reinterpret(dtype, [2 * NB, BASE, BASE], small)
        totals = tiles.total.index(2 * s)._reinterpret(gl.float32, [2 * NB, 64], line)
        store_wait(0)
        for j in range(NB):
            # all transposed: rows along V, so that S and u go on as left operands
            b_0 = gl.convert_layout(b_s0.to(dtype), sa)
            b_1 = gl.convert_layout(b_s1.to(dtype), sa)
            b_u = warpgroup_mma(
                b_0, a_0.index(j).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            b_u = warpgroup_mma(b_1, a_1.index(j).permute((1, 0)), b_u, is_async=True)
            b_o = warpgroup_mma(
                b_0, r_0.index(j).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            b_o = warpgroup_mma(b_1, r_1.index(j).permute((1, 0)), b_o, is_async=True)
            b_v = v.index(j).permute((1, 0)).load(xl).to(gl.float32)
            # while the tensor cores are at it
            b_s0 *= totals.index(j).load(along)[None, :]
            b_s1 *= totals.index(NB + j).load(along)[None, :]
            b_u = warpgroup_mma_wait(1, deps=(b_u,))
            b_w = gl.convert_layout(gl.fma(b_u, -(2.0**-APART), b_v).to(dtype), sa)
            b_u = warpgroup_mma(
                b_w, tp.index(j).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            b_u, b_o = warpgroup_mma_wait(0, deps=(b_u, b_o))
            b_u = b_u.to(dtype)
            b_x = gl.convert_layout(b_u, xa)
            b_s0 = warpgroup_mma(b_x, e_0.index(j), b_s0, is_async=True)
            b_s1 = warpgroup_mma(b_x, e_1.index(j), b_s1, is_async=True)
            b_x = gl.convert_layout(b_u, sa)
            b_o = warpgroup_mma(b_x, tp.index(NB + j).permute((1, 0)), b_o, is_async=True)
            b_s0, b_s1, b_o = warpgroup_mma_wait(0, deps=(b_s0, b_s1, b_o))
            out.index(j).permute((1, 0)).store((b_o * (scale * 2.0**-APART)).to(dtype))
        mbarrier.arrive(barriers.empty.index(s), count=1)
        fence_async_shared()
        gl.thread_barrier()
        store_tile(
            o_desc, o_ptr, tiles.o.index(tile), seq.row + i * c.C, seq.v_col + 64 * tile, o_row,
            seq.length - i * c.C, c.C, 64,
        )  # fmt: skip
    store_wait(0)
    if seq.wanted:
        store_state(state_refs, b_s0, seq.length >> 30, o_k, o_v, c.V, c.HAS_S_OUT)
        store_state(state_refs, b_s1, seq.length >> 30, 64 + o_k, o_v, c.V, c.HAS_S_OUT)


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H"])
def kda_fused_fwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [64, 64]
    k_desc,
    v_desc,  # [tokens, HV * V] by [64, 64]
    g_desc,  # [tokens, HV * K] by [64, 64], float32
    o_desc,  # [tokens, HV * V] by [64, 64]
    o_ptr,
    beta_ptr,  # [tokens, HV]
    strong_ptr,  # [N * HV, 2] int32, by the launch without STRONG
    s_in_ptr,  # [N, HV, K, V]
    s_out_ptr,
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, HAS_S_IN: gl.constexpr,
    HAS_S_OUT: gl.constexpr, PACKED: gl.constexpr, STRONG: gl.constexpr,
):  # fmt: skip
    """grid (HV * N,), 4 warps. With STRONG, those programs that met strong gates without it."""
    c: gl.constexpr = Constants(K, V, C, STRONG, HAS_S_IN, HAS_S_OUT)
    dtype: gl.constexpr = k_desc.dtype
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BASE], dtype)
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    tiles = Tiles(
        gl.allocate_shared_memory(dtype, [4, 64, 64], q_desc.layout),
        gl.allocate_shared_memory(dtype, [4, 64, 64], k_desc.layout),
        gl.allocate_shared_memory(dtype, [4, 64, 64], k_desc.layout),
        gl.allocate_shared_memory(dtype, [4, 64, 64], v_desc.layout),
        gl.allocate_shared_memory(dtype, [4, 64, 64], k_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, 64, 64], g_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 64, 64], o_desc.layout),
        gl.allocate_shared_memory(gl.float32, [4, NB, 64], lines),
        gl.allocate_shared_memory(dtype, [2, 2 * C, BASE], small),
    )
    barriers = Barriers(
        alloc_mbarriers(1, 2), alloc_mbarriers(1, 2), alloc_mbarriers(2, 2),
        alloc_mbarriers(1, 4), alloc_mbarriers(1, 2),
    )  # fmt: skip
    pid = gl.program_id(0)
    i_h = pid % HV
    row, length, _, i_n, _, _ = locate_segment(cu_ptr, pid // HV, T, N, 1, C, PACKED, False)
    # both prepare_partitions say of their blocks; neither waits for the other
    p_strong = strong_ptr + 2 * pid
    wanted = True
    if STRONG:
        wanted = gl.load(p_strong) + gl.load(p_strong + 1) > 0
        length = gl.where(wanted, length, 0)
    n = gl.cdiv(length, C)
    seq = Sequence(row, length, n, i_h // (HV // H) * K, i_h * K, i_h * V, wanted)
    o_state = state_offset(i_n, i_h, HV, K, V)
    state_refs = StateRefs(s_in_ptr, s_out_ptr, o_state, o_state)
    p_beta = beta_ptr + row.to(gl.int64) * HV + i_h
    descs = q_desc, k_desc, v_desc
    o_row = HV * V
    gl.warp_specialize(
        [
            (scan_partition, (
                o_desc, o_ptr, tiles, barriers, state_refs, o_row, seq, scale, 0, c)),
            (scan_partition, (
                o_desc, o_ptr, tiles, barriers, state_refs, o_row, seq, scale, 1, c)),
            (prepare_partition, (descs, g_desc, tiles, barriers, p_beta, p_strong, HV, seq, 0, c)),
            (prepare_partition, (descs, g_desc, tiles, barriers, p_beta, p_strong, HV, seq, 1, c)),
        ],
        [4, 4, 4],
        [144, 112, 112],
    )  # fmt: skip
