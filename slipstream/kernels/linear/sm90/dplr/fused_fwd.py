"""KDA forward on sm_90 in one kernel: chunks of 16 tokens, q, k, v, g and beta read once.

A program scans one head of a sequence, in blocks of 64 tokens. With G_i the sum of a channel's
gates in base 2 from the chunk's start to token i, and W = 2^-30 S,

    a = k exp2(G + 57)    r = q exp2(G + 57)    b = k exp2(-G - 57)
    M = (I + beta tril(a b^T, -1))^-1     P = tril(r b^T)     w = beta (2^27 v - a W)
    u = M w     o = 2^-27 scale (r W + P u)     W <- exp2(G_C) (W + b^T u)

The diagonals of M and P, I and d, multiply w and u in float32; only the rest is rounded to bf16 and
goes through tensor cores.

Sums of 16 gates of -5 each, -115 in base 2, leave a, r and b normal numbers of bf16, and exp2(G_C)
one of float32. A head with a sum below LIMIT is done again by a second launch, with STRONG, where
the others have nothing to do. There rows of A and P whose own sums are below it come from halves of
8 tokens (strong_scores); in such a chunk and channel W is set to 0 first and b is made from
exp2(G_C - G) for its sum with W: no choice depends on a later token than its result. Other bits are
those of the first launch, as no products and sums are fused but by gl.fma.

    prepare_partition, 4 warps, of even, of odd blocks      scan_partition, 4 warps, of 64 columns
    loads q, k, g, beta                                     of V: loads v, one block ahead
      q, k become r, a; makes b, M, P, d, exp2(G_C)
                                             -- made ---->  u, o, W of four chunks
                                             <-- empty ---

    buffers                            stages             arrivals a phase: full / empty
    q, k, b, total                     3, 2 with STRONG   1 (TMA) / 2, a scan_partition each
    mp, lines                          2                  made / as these
    v, of each scan_partition          2                  1 (TMA) / its threads' barrier
    g, the second 64 channels          1                  1 (TMA) / 1
The first 64 channels of g come to where b goes. With STRONG, threads load gates by themselves.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.common import BASE, NB, by_blocks, substitute
from slipstream.kernels.linear.sm90.delta import delta_device, solve_tril
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.device import LOG2E
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

Constants = namedtuple("Constants", "K V C ST STRONG HAS_S_IN HAS_S_OUT")
APART = gl.constexpr(57.0)
# W is so much smaller than S: b^T u, up to 2^96 u, does not leave float32
LOWERED = gl.constexpr(30.0)
LIFT = gl.constexpr(2.0 ** (57 - 30))
# natural, as gates are: exp2 is a normal number of float32 down to here
LIMIT = gl.constexpr(-87.0)
LOWEST_WITHIN = gl.constexpr(-16.0)  # 2^-23 a step: what eight of them are apart, float32 holds
SUB = gl.constexpr(8)


class Tiles(NamedTuple):
    """q, k, b by halves of the channels, v and o by tiles of V."""

    q: Any  # [ST * 2, 64, 64], then r
    k: Any  # then a
    b: Any  # [ST, 2 * 64, 64], before [64, 64] of g
    g: Any  # [64, 64], float32
    v: Any  # [2 * 2, 64, 64]
    o: Any  # [2, 64, 64]
    total: Any  # [ST * 2, NB, 64], float32
    mp: Any  # [2, 2 * C, 16]: blocks of M - I, then of P - d; before, what `substitute` reads
    lines: Any  # [2, 2 * NB, 16], float32: 2^27 beta, then d
    far: Any  # STRONG: [2 * 2, 64, 64], of each prepare_partition, b of channels whose W becomes 0
    keep: Any  # STRONG: as total, 0 for those


class Barriers(NamedTuple):
    full: Any  # [ST], as made and empty
    made: Any
    empty: Any
    v_full: Any  # [2 * 2]
    g_full: Any  # [2]
    g_empty: Any


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
def first_gates(g_desc, tiles, s):
    """Where those of the first 64 channels are before b is."""
    return tiles.b.index(s)._reinterpret(gl.float32, [64, 64], g_desc.layout)


@gluon.jit
def half_of(b, s, h, layout: gl.constexpr):
    return b.index(s)._reinterpret(b.dtype, [2, 64, 64], layout).index(h)


@gluon.jit
def load_rows(descs, tiles, barriers, seq, i, c):
    q_desc, k_desc, g_desc = descs
    s = i % c.ST
    full = barriers.full.index(s)
    t = seq.row + i * 64
    if c.STRONG:
        mbarrier.expect(full, 4 * q_desc.block_type.nbytes)
    else:
        mbarrier.expect(full, 4 * q_desc.block_type.nbytes + g_desc.block_type.nbytes)
        # the scan has left this place, so that b of the block before is not read any more
        sm90.copy_in(g_desc, [t, seq.g_col], full, first_gates(g_desc, tiles, s))
    for h in gl.static_range(2):
        sm90.copy_in(q_desc, [t, seq.k_col + 64 * h], full, tiles.q.index(2 * s + h))
        sm90.copy_in(k_desc, [t, seq.k_col + 64 * h], full, tiles.k.index(2 * s + h))


@gluon.jit
def load_values(v_desc, tiles, barriers, seq, i, tile: gl.constexpr):
    at = 2 * tile + i % 2
    v_full = barriers.v_full.index(at)
    mbarrier.expect(v_full, v_desc.block_type.nbytes)
    sm90.copy_in(v_desc, [seq.row + i * 64, seq.v_col + 64 * tile], v_full, tiles.v.index(at))


@gluon.jit
def load_gates(p_g, stride, rows, flat: gl.constexpr, c):
    """Chunks [NB, BASE, 64] of half of the channels; 0 in `rows` and on."""
    o_t = gl.arange(0, c.C, gl.SliceLayout(1, flat))
    o_k = gl.arange(0, 64, gl.SliceLayout(0, flat))
    p_g += (o_t * stride)[:, None] + o_k[None, :]
    return gl.reshape(gl.load(p_g, mask=(o_t < rows)[:, None], other=0.0), [NB, BASE, 64])


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
def take_gates(g_desc, tiles, barriers, seq, i, h, half: gl.constexpr, flat: gl.constexpr, c):
    """As load_gates; the first half's turn asks for the second's."""
    rows = seq.length - i * c.C
    if h == 0:
        # first, so that they come while this half's operands are made
        g_full = barriers.g_full.index(half)
        mbarrier.wait(barriers.g_empty, (i & 1) ^ 1)
        gl.thread_barrier()
        mbarrier.expect(g_full, g_desc.block_type.nbytes)
        sm90.copy_in(g_desc, [seq.row + i * c.C, seq.g_col + 64], g_full, tiles.g)
        tile = first_gates(g_desc, tiles, i % c.ST)
        if rows < c.C:
            clear_after(tile, rows, c)
            gl.thread_barrier()
        b_g = load_chunks(tile, flat)
    else:
        mbarrier.wait(barriers.g_full.index(half), (i // 2) & 1)
        if rows < c.C:
            clear_after(tiles.g, rows, c)
            gl.thread_barrier()
        b_g = load_chunks(tiles.g, flat)
        mbarrier.arrive(barriers.g_empty, count=1)
    return b_g


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
def scale_half(tiles, at, y, b_g, b_all, flat: gl.constexpr, c):
    """Operands of half of the channels, of which b_g [NB, BASE, 64] are the gates; b into y."""
    b_total = solve_tril.fast_exp2(b_all * LOG2E)
    if c.STRONG:
        tiles.keep.index(at).store(gl.where(b_all < LIMIT, 0.0, 1.0))
        b_total = gl.where(b_all < LIMIT, 1.0, b_total)
    tiles.total.index(at).store(b_total)
    b_sum = gl.associative_scan(b_g, 1, add)
    b_read = solve_tril.fast_exp2(gl.fma(b_sum, LOG2E, APART))
    b = load_chunks(tiles.k.index(at), flat).to(gl.float32)
    put(tiles.k.index(at), b * b_read, c.C, 64)
    b_q = load_chunks(tiles.q.index(at), flat).to(gl.float32)
    put(tiles.q.index(at), b_q * b_read, c.C, 64)
    b *= solve_tril.fast_exp2(gl.fma(b_sum, -LOG2E, -APART))
    put(y, b, c.C, 64)


@gluon.jit
def strong_scores(x, y, b_k, b_q, b_g, wl: gl.constexpr, c):
    """a b^T and r b^T of half of the channels by gates of any size, and b for W that is 0.

    Between halves of 8 tokens by gates from the border of the two, which make nothing larger;
    within by gates of at least LOWEST_WITHIN. x, y: room for operands.
    """
    layout: gl.constexpr = b_g.type.layout
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    late = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None] >= SUB
    n_i = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, wl)))[None, :, None] // SUB
    n_j = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, wl)))[None, None, :] // SUB
    zero = gl.zeros([c.C, c.C], gl.float32, al)
    b_a = gl.zeros([NB, BASE, BASE], gl.float32, wl)
    b_p = b_a
    for within in gl.static_range(2):
        if within:
            b_h = gl.reshape(common.at_least(b_g, LOWEST_WITHIN), [2 * NB, SUB, 64])
            b_h = gl.reshape(gl.associative_scan(b_h, 1, add), [NB, BASE, 64])
            # from the middle of what eight tokens can be apart
            b_h = gl.convert_layout(b_h, layout, assert_trivial=True) - 0.5 * SUB * LOWEST_WITHIN
            b_read = solve_tril.fast_exp2(b_h * LOG2E)
            b_write = solve_tril.fast_exp2(-b_h * LOG2E)
            inside = n_i == n_j
        else:
            b_early = gl.where(late, 0.0, b_g)
            b_after = gl.associative_scan(gl.where(late, b_g, 0.0), 1, add)
            b_before = gl.sum(b_early, 1)[:, None, :] - gl.associative_scan(b_early, 1, add)
            b_read = gl.where(late, solve_tril.fast_exp2(b_after * LOG2E), 0.0)
            b_write = gl.where(late, 0.0, solve_tril.fast_exp2(b_before * LOG2E))
            inside = n_i > n_j
        put(y, b_k * b_write, c.C, 64)
        for queries in gl.static_range(2):
            b_x = b_q if queries else b_k
            put(x, b_x * b_read, c.C, 64)
            sm90.fence_async_shared()
            gl.thread_barrier()
            b = warpgroup_mma(x, y.permute((1, 0)), zero, use_acc=False, is_async=True)
            b = own_scores(sm90.warpgroup_mma_wait(0, deps=(b,)), wl)
            if queries:
                b_p += gl.where(inside, b, 0.0)
            else:
                b_a += gl.where(inside, b, 0.0)
            gl.thread_barrier()
    b_all = gl.sum(b_g, 1)
    b_rest = b_all[:, None, :] - gl.associative_scan(b_g, 1, add)
    return b_a, b_p, b_k * solve_tril.fast_exp2(gl.fma(b_rest, LOG2E, -APART))


@gluon.jit
def scores(x, y_0, y_1, s, zero, wl: gl.constexpr):
    """x b^T of the stage's chunks."""
    b_s = warpgroup_mma(x.index(2 * s), y_0.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_s = warpgroup_mma(x.index(2 * s + 1), y_1.permute((1, 0)), b_s, is_async=True)
    return own_scores(sm90.warpgroup_mma_wait(0, deps=(b_s,)), wl)


@gluon.jit
def put_far(tiles, s, half, strong, b_like, flat: gl.constexpr, layout: gl.constexpr, c):
    """b of channels whose W becomes 0. Only the scan reads it: the scores are made."""
    if strong > 0:
        for h in range(2):
            b_keep = tiles.keep.index(2 * s + h).load(b_like.type.layout)
            y = half_of(tiles.b, s, h, layout)
            b_b = load_chunks(y, flat)
            b_far = load_chunks(tiles.far.index(2 * half + h), flat)
            put(y, gl.where(b_keep[:, None, :] > 0, b_b, b_far), c.C, 64)


@gluon.jit
def prepare_partition(
    descs, p_g, p_beta, p_strong, tiles, barriers, HV, seq, half: gl.constexpr, c
):  # fmt: skip
    flat: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wl: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    xl: gl.constexpr = gl.BlockedLayout([1, BASE // 2, 1], [1, 2, BASE], [4, 1, 1], [2, 1, 0])
    o_i = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, wl)))[None, :, None]
    o_j = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, wl)))[None, None, :]
    o_xi = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, xl)))[None, :, None]
    o_xj = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, xl)))[None, None, :]
    o_r = gl.arange(0, NB, gl.SliceLayout(1, gl.SliceLayout(2, wl)))[:, None] * BASE
    o_r = o_r + gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, wl)))[None, :]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.C, BASE], tiles.mp.dtype)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    zero = gl.zeros([c.C, c.C], gl.float32, al)
    b_zero = gl.reshape(gl.zeros([c.C, 64], gl.float32, flat), [NB, BASE, 64])
    b_low = gl.sum(b_zero, 1)
    stride = HV * c.K
    k_layout: gl.constexpr = descs[1].layout
    g_desc = descs[2]
    i = seq.n * 0 + half
    more = i < seq.n
    if more:
        load_rows(descs, tiles, barriers, seq, i, c)
    # with a `for`, or with the condition here, ptxas does not know that i is the same in all
    # threads, which takes 14% more instructions
    while more:
        s = i % c.ST
        phase = (i // c.ST) & 1
        rows = seq.length - i * c.C
        block = tiles.mp.index(half)._reinterpret(gl.float32, [BASE, NB, BASE], plain)
        mp = tiles.mp.index(half)._reinterpret(tiles.mp.dtype, [2, c.C, BASE], small)
        lines = tiles.lines.index(half)._reinterpret(gl.float32, [2, NB, BASE], line)
        b_rows = gl.load(p_beta + (i * c.C + o_r) * HV, mask=o_r < rows, other=0.0).to(gl.float32)
        mbarrier.wait(barriers.full.index(s), phase)
        if rows < c.C:
            for h in gl.static_range(2):
                clear_after(tiles.q.index(2 * s + h), rows, c)
                clear_after(tiles.k.index(2 * s + h), rows, c)
            gl.thread_barrier()
        b_a = gl.zeros([NB, BASE, BASE], gl.float32, wl)
        b_p = b_a
        b_least = gl.sum(b_zero, 2)
        strong = 0
        if c.STRONG:
            p_gates = p_g + (i * c.C).to(gl.int64) * stride
            for h in gl.static_range(2):
                b_all = gl.sum(load_gates(p_gates + 64 * h, stride, rows, flat, c), 1)
                strong += (gl.min(gl.min(b_all, 1), 0) < LIMIT).to(gl.int32)
        for h in range(2):
            at = 2 * s + h
            y = half_of(tiles.b, s, h, k_layout)
            if c.STRONG:
                b_g = load_gates(p_gates + 64 * h, stride, rows, flat, c)
            else:
                b_g = take_gates(g_desc, tiles, barriers, seq, i, h, half, flat, c)
            b_all = gl.sum(b_g, 1)
            if c.STRONG:
                if strong > 0:
                    b_k = load_chunks(tiles.k.index(at), flat).to(gl.float32)
                    b_q = load_chunks(tiles.q.index(at), flat).to(gl.float32)
                    far = tiles.far.index(2 * half + h)
                    # exp of -100 counts as 0, and sums of 16 keep their digits
                    b_x, b_y, b_far = strong_scores(
                        far, y, b_k, b_q, common.at_least(b_g, -100.0), wl, c
                    )
                    put(far, b_far, c.C, 64)
                    b_a += b_x
                    b_p += b_y
                    b_sum = gl.associative_scan(b_g, 1, add)  # gates are at most 0: it falls
                    b_least = gl.minimum(b_least, gl.min(b_sum, 2))
            else:
                b_low = gl.minimum(b_low, b_all)
            scale_half(tiles, at, y, b_g, b_all, flat, c)
        if c.STRONG:
            weak = gl.convert_layout(b_least, gl.SliceLayout(2, wl))[:, :, None] >= LIMIT
        sm90.fence_async_shared()
        gl.thread_barrier()
        y_0 = half_of(tiles.b, s, 0, k_layout)
        y_1 = half_of(tiles.b, s, 1, k_layout)
        b_d = scores(tiles.k, y_0, y_1, s, zero, wl)
        if c.STRONG:
            b_d = gl.where(weak, b_d, b_a)
        if c.ST > 2 and i >= 2:  # the block before has left `mp` and `lines`
            mbarrier.wait(barriers.empty.index((i - 2) % c.ST), ((i - 2) // c.ST) & 1)
        # racecheck names this and where it is loaded: `made` and `empty` order the two, at each of
        # which one thread arrives for 128 that have met (arrives_early of tests/support/sass.py)
        lines.index(0).store(b_rows * LIFT)
        b_x = substitute(gl.where(o_i > o_j, b_d * b_rows[:, :, None], 0.0), block)
        b_d = scores(tiles.q, y_0, y_1, s, zero, wl)
        if c.STRONG:
            b_d = gl.where(weak, b_d, b_p)
        lines.index(1).store(gl.sum(gl.where(o_i == o_j, b_d, 0.0), 2))
        gl.thread_barrier()  # all have read `block`
        put(mp.index(0), gl.where(o_xi > o_xj, b_x, 0.0), c.C, BASE)
        put(mp.index(1), gl.where(o_i > o_j, b_d, 0.0), c.C, BASE)
        if c.STRONG:
            put_far(tiles, s, half, strong, b_low, flat, k_layout, c)
        sm90.fence_async_shared()
        mbarrier.arrive(barriers.made.index(s), count=1)
        i += 2
        more = i < seq.n
        if more:
            n = i - c.ST  # the last block to have this place
            if n >= 0:
                mbarrier.wait(barriers.empty.index(n % c.ST), (n // c.ST) & 1)
            load_rows(descs, tiles, barriers, seq, i, c)
    # both write, whether they had blocks or not: the memory was not cleared
    if not c.STRONG:
        gl.store(p_strong + half, (gl.min(gl.min(b_low, 1), 0) < LIMIT).to(gl.int32))


@gluon.jit
def scan_partition(
    v_desc, o_desc, o_ptr, tiles, barriers, state_refs, o_row, seq, scale, tile: gl.constexpr, c
):  # fmt: skip
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BASE, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    along: gl.constexpr = gl.SliceLayout(0, sl)
    tokens: gl.constexpr = gl.SliceLayout(0, xl)
    o_v = gl.arange(0, 64, gl.SliceLayout(1, sl)) + tile * 64
    o_k = gl.arange(0, 64, along)
    b_s0 = gl.zeros([64, 64], gl.float32, sl)
    b_s1 = gl.zeros([64, 64], gl.float32, sl)
    b_s0 = delta_device.load_state(state_refs, b_s0, o_k, o_v, c.V, c.HAS_S_IN) * 2.0**-LOWERED
    b_s1 = delta_device.load_state(state_refs, b_s1, 64 + o_k, o_v, c.V, c.HAS_S_IN) * 2.0**-LOWERED
    zero = gl.zeros([64, BASE], gl.float32, xl)
    dtype: gl.constexpr = tiles.k.dtype
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BASE, 64], dtype)
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BASE, BASE], dtype)
    if seq.n > 0:
        load_values(v_desc, tiles, barriers, seq, 0, tile)
    for i in range(seq.n):
        s = i % c.ST
        rows = seq.length - i * c.C
        # into the place of the block before, which all threads have read when they last met
        if i + 1 < seq.n:
            load_values(v_desc, tiles, barriers, seq, i + 1, tile)
        at = 2 * tile + i % 2
        mbarrier.wait(barriers.v_full.index(at), (i // 2) & 1)
        if rows < c.C:
            clear_after(tiles.v.index(at), rows, c)
            gl.thread_barrier()
        mbarrier.wait(barriers.made.index(s), (i // c.ST) & 1)
        a_0 = tiles.k.index(2 * s)._reinterpret(dtype, [NB, BASE, 64], wide)
        a_1 = tiles.k.index(2 * s + 1)._reinterpret(dtype, [NB, BASE, 64], wide)
        r_0 = tiles.q.index(2 * s)._reinterpret(dtype, [NB, BASE, 64], wide)
        r_1 = tiles.q.index(2 * s + 1)._reinterpret(dtype, [NB, BASE, 64], wide)
        b = tiles.b.index(s)._reinterpret(dtype, [2 * NB, BASE, 64], wide)
        v = tiles.v.index(at)._reinterpret(dtype, [NB, BASE, 64], wide)
        out = tiles.o.index(tile)._reinterpret(dtype, [NB, BASE, 64], wide)
        mp = tiles.mp.index(i % 2)._reinterpret(dtype, [2 * NB, BASE, BASE], small)
        lines = tiles.lines.index(i % 2)._reinterpret(gl.float32, [2 * NB, BASE], line)
        total_0 = tiles.total.index(2 * s)._reinterpret(gl.float32, [NB, 64], line)
        total_1 = tiles.total.index(2 * s + 1)._reinterpret(gl.float32, [NB, 64], line)
        if c.STRONG:
            keep_0 = tiles.keep.index(2 * s)._reinterpret(gl.float32, [NB, 64], line)
            keep_1 = tiles.keep.index(2 * s + 1)._reinterpret(gl.float32, [NB, 64], line)
        sm90.store_wait(0)
        for j in range(NB):
            # all transposed: rows along V, so that W and u go on as left operands
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
            b_beta = lines.index(j).load(tokens)[None, :]
            if c.STRONG:
                b_s0 *= keep_0.index(j).load(along)[None, :]
                b_s1 *= keep_1.index(j).load(along)[None, :]
            b_u = sm90.warpgroup_mma_wait(1, deps=(b_u,))
            # beta is 2^27 times as large: one multiplication less
            b_w = gl.fma(b_u, -1 / LIFT, b_v) * b_beta
            b_x = gl.convert_layout(b_w.to(dtype), sa)
            b_u = warpgroup_mma(b_x, mp.index(j).permute((1, 0)), b_w, is_async=True)
            # before the wait, which hides them; sooner they would want too many registers
            b_t0 = total_0.index(j).load(along)[None, :]
            b_t1 = total_1.index(j).load(along)[None, :]
            b_u, b_o = sm90.warpgroup_mma_wait(0, deps=(b_u, b_o))
            b_o = gl.fma(b_u, lines.index(NB + j).load(tokens)[None, :], b_o)
            b_u = b_u.to(dtype)
            b_x = gl.convert_layout(b_u, xa)
            b_s0 = warpgroup_mma(b_x, b.index(j), b_s0, is_async=True)
            b_s1 = warpgroup_mma(b_x, b.index(NB + j), b_s1, is_async=True)
            b_x = gl.convert_layout(b_u, sa)
            b_o = warpgroup_mma(b_x, mp.index(NB + j).permute((1, 0)), b_o, is_async=True)
            # each as soon as it is there: the others are still at work
            b_s0 = sm90.warpgroup_mma_wait(2, deps=(b_s0,)) * b_t0
            b_s1 = sm90.warpgroup_mma_wait(1, deps=(b_s1,)) * b_t1
            b_o = sm90.warpgroup_mma_wait(0, deps=(b_o,))
            out.index(j).permute((1, 0)).store((b_o * (scale / LIFT)).to(dtype))
        mbarrier.arrive(barriers.empty.index(s), count=1)
        sm90.fence_async_shared()
        gl.thread_barrier()
        common.store_tile(
            o_desc, o_ptr, tiles.o.index(tile), seq.row + i * c.C, seq.v_col + 64 * tile, o_row,
            rows, c.C, 64,
        )  # fmt: skip
    sm90.store_wait(0)
    if seq.wanted:
        b_s0 *= 2.0**LOWERED
        b_s1 *= 2.0**LOWERED
        delta_device.store_state(state_refs, b_s0, seq.length >> 30, o_k, o_v, c.V, c.HAS_S_OUT)
        delta_device.store_state(
            state_refs, b_s1, seq.length >> 30, 64 + o_k, o_v, c.V, c.HAS_S_OUT
        )


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H"])
def kda_fused_fwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [64, 64]
    k_desc,
    v_desc,  # [tokens, HV * V] by [64, 64]
    g_desc,  # [tokens, HV * K] by [64, 64], float32
    o_desc,  # [tokens, HV * V] by [64, 64]
    o_ptr,
    g_ptr,
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
    ST: gl.constexpr = 2 if STRONG else 3
    c: gl.constexpr = Constants(K, V, C, ST, STRONG, HAS_S_IN, HAS_S_OUT)
    dtype: gl.constexpr = k_desc.dtype
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BASE], dtype)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    q = gl.allocate_shared_memory(dtype, [2 * ST, 64, 64], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [2 * ST, 64, 64], k_desc.layout)
    b = gl.allocate_shared_memory(dtype, [ST, 128, 64], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [4, 64, 64], v_desc.layout)
    o = gl.allocate_shared_memory(dtype, [2, 64, 64], o_desc.layout)
    total = gl.allocate_shared_memory(gl.float32, [2 * ST, NB, 64], line)
    mp = gl.allocate_shared_memory(dtype, [2, 2 * C, BASE], small)
    lines = gl.allocate_shared_memory(gl.float32, [2, 2 * NB, BASE], line)
    v_full = common.alloc_mbarriers(1, 4)
    # each launch has what it uses alone: Triton gives the memory of an unused barrier away
    g, far, keep = q, b, total
    g_full, g_empty = v_full, v_full.index(0)
    if STRONG:
        far = gl.allocate_shared_memory(dtype, [4, 64, 64], k_desc.layout)
        keep = gl.allocate_shared_memory(gl.float32, [2 * ST, NB, 64], line)
    else:
        g = gl.allocate_shared_memory(gl.float32, [64, 64], g_desc.layout)
        g_full, g_empty = common.alloc_mbarriers(1, 2), common.alloc_mbarriers(1, 1).index(0)
    tiles = Tiles(q, k, b, g, v, o, total, mp, lines, far, keep)
    barriers = Barriers(
        common.alloc_mbarriers(1, ST), common.alloc_mbarriers(1, ST), common.alloc_mbarriers(2, ST),
        v_full, g_full, g_empty,
    )  # fmt: skip
    pid = gl.program_id(0)
    i_h = pid % HV
    row, length, _, i_n, _, _ = common.locate_segment(cu_ptr, pid // HV, T, N, 1, C, PACKED, False)
    # both prepare_partitions say of their blocks; neither waits for the other
    p_strong = strong_ptr + 2 * pid
    wanted = True
    if STRONG:
        wanted = gl.load(p_strong) + gl.load(p_strong + 1) > 0
        length = gl.where(wanted, length, 0)
    n = gl.cdiv(length, C)
    seq = Sequence(row, length, n, i_h // (HV // H) * K, i_h * K, i_h * V, wanted)
    o_state = delta_device.state_offset(i_n, i_h, HV, K, V)
    state_refs = delta_device.StateRefs(s_in_ptr, s_out_ptr, o_state, o_state)
    p_beta = beta_ptr + row.to(gl.int64) * HV + i_h
    p_g = g_ptr + row.to(gl.int64) * HV * K + i_h * K
    descs = q_desc, k_desc, g_desc
    o_row = HV * V
    gl.warp_specialize(
        [
            (scan_partition, (
                v_desc, o_desc, o_ptr, tiles, barriers, state_refs, o_row, seq, scale, 0, c)),
            (scan_partition, (
                v_desc, o_desc, o_ptr, tiles, barriers, state_refs, o_row, seq, scale, 1, c)),
            (prepare_partition, (descs, p_g, p_beta, p_strong, tiles, barriers, HV, seq, 0, c)),
            (prepare_partition, (descs, p_g, p_beta, p_strong, tiles, barriers, HV, seq, 1, c)),
        ],
        [4, 4, 4],
        [144, 112, 112],
    )  # fmt: skip
