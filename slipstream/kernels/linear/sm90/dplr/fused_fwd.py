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
the others have nothing to do; with such a sum in its first chunk the first launch leaves it at
once. There rows of A and P whose own sums are below it come from halves of 8 tokens
(strong_scores); in such a chunk and channel W is set to 0 first and b is made from exp2(G_C - G)
for its sum with W: no choice depends on a later token than its result. Other bits are those of the
first launch, as no products and sums are fused but by gl.fma.

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

With SPLIT a program has a segment of a sequence, after which W is S_out = M S_in + E. It scans the
64 tokens before the segment twice: from the unit matrix, which makes their M, and with v from 0. If
M's norm is below 2^-32 nothing else of the past counts, and the scan goes on. If not, it scans the
segment from 0, which makes E, and from the unit matrix, which makes M and, in the place of o, R;
then it waits for W of the program before, hands on its own, and adds R S_in to o. The second of a
sequence just waits and scans from there. All of this is of tokens before. Programs wait for those
of smaller numbers alone, which have begun.

    ring of blocks      -1 (twice)   0 .. n - 1                           nothing counts, or waits
                        -1 (twice)   0 .. n - 1 for E, for M              else
    decided, joined     both scan_partitions: M's norm is there; thrice: R is stored and M may be to
                            where q and k are, M is stored there, M has been read
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.common import BASE, NB, by_blocks, substitute
from slipstream.kernels.linear.sm90.delta import delta_device, solve_tril
from slipstream.kernels.primitives import semaphore, sm90
from slipstream.kernels.primitives.device import LOG2E
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma
from slipstream.kernels.primitives.sm90_device import halves

Constants = namedtuple("Constants", "K V C ST STRONG SPLIT HAS_S_IN HAS_S_OUT")
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
    norms: Any  # SPLIT: [2, 64], float32: squares of M's columns, by scan_partition


class Barriers(NamedTuple):
    full: Any  # [ST], as made and empty
    made: Any
    empty: Any
    v_full: Any  # [2 * 2]
    g_full: Any  # [2]
    g_empty: Any
    decided: Any  # SPLIT, by both scan_partitions: `norms` are there
    joined: Any  # the past is added


class Sequence(NamedTuple):
    """Rows of a program's sequence or segment, its columns of q and k, g, and v; whether (1) a
    segment comes before it, none follows, and it is the second."""

    row: Any
    length: Any
    n: Any
    k_col: Any
    g_col: Any
    v_col: Any
    lead: Any
    last: Any
    waits: Any


class Ends(NamedTuple):
    """SPLIT: W after the segment before, and after the program's own, [V, K]; by scan_partition
    what becomes `done` once they are there: `ready`, `signal`."""

    before: Any
    after: Any
    ready: Any
    signal: Any
    done: Any


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
def block_of(seq, i, c):
    """The block that comes i-th; the one before a segment is -1."""
    if c.SPLIT:
        i -= seq.lead
        i = gl.where(i < seq.n, i, i - seq.n)
    return i


@gluon.jit
def known_uniform(n):
    """n, which is the same in all threads, so that ptxas knows it and keeps addresses once a warp:
    14% of the loops' instructions."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [n],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def past_counts(norms, layout: gl.constexpr):
    """Whether (1) anything is left of what was 64 tokens before the segment."""
    b = gl.sum(norms.index(0).load(layout) + norms.index(1).load(layout), 0)
    gl.thread_barrier()  # nothing is stored there again, but no arrival is to come before a load
    return known_uniform(gl.where(b < 2.0**-64, 0, 1))  # squares: of 2^-32


@gluon.jit
def comes(tiles, barriers, seq, i, layout: gl.constexpr, c):
    """Whether there is an i-th block: a segment is scanned twice where its past counts."""
    n = seq.lead + seq.n
    more = i < n
    if c.SPLIT and (i >= n) & (i < n + seq.n) & (seq.lead > seq.waits):
        mbarrier.wait(barriers.decided, 0)
        more = past_counts(tiles.norms, layout) > 0
    return more


@gluon.jit
def begins_strong(p_g, stride, rows, K: gl.constexpr):
    """Whether the first chunk has strong gates. Most strong heads are known by it, and are left to
    the other launch at once."""
    layout: gl.constexpr = gl.BlockedLayout([BASE, 1], [1, 32], [1, 4], [1, 0])
    o_t = gl.arange(0, BASE, gl.SliceLayout(1, layout))[:, None]
    o_k = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    b_g = gl.load(p_g + o_t * stride + o_k, mask=o_t < rows, other=0.0)
    return gl.min(gl.sum(b_g, 0), 0) < LIMIT


@gluon.jit
def load_rows(descs, tiles, barriers, seq, i, c):
    q_desc, k_desc, g_desc = descs
    s = i % c.ST
    full = barriers.full.index(s)
    t = seq.row + block_of(seq, i, c) * 64
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
def load_values(v_desc, tiles, barriers, seq, i, row, tile: gl.constexpr):
    at = 2 * tile + i % 2
    v_full = barriers.v_full.index(at)
    mbarrier.expect(v_full, v_desc.block_type.nbytes)
    sm90.copy_in(v_desc, [row, seq.v_col + 64 * tile], v_full, tiles.v.index(at))


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
    t = block_of(seq, i, c) * c.C
    rows = seq.length - t
    if h == 0:
        # first, so that they come while this half's operands are made
        g_full = barriers.g_full.index(half)
        mbarrier.wait(barriers.g_empty, (i & 1) ^ 1)
        gl.thread_barrier()
        mbarrier.expect(g_full, g_desc.block_type.nbytes)
        sm90.copy_in(g_desc, [seq.row + t, seq.g_col + 64], g_full, tiles.g)
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
def say_strong(p_strong, b_low, c):
    """b_low: the smallest sums of a chunk's gates."""
    strong = gl.min(gl.min(b_low, 1), 0) < LIMIT
    if c.SPLIT:  # several programs of a head write, and nothing but this
        if strong:
            gl.store(p_strong, 1)
    else:  # whether there were blocks or not: the memory was not cleared
        gl.store(p_strong, strong.to(gl.int32))


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
    along: gl.constexpr = gl.SliceLayout(0, al)
    i = seq.n * 0 + half
    more = comes(tiles, barriers, seq, i, along, c)
    if more:
        load_rows(descs, tiles, barriers, seq, i, c)
    while more:
        s = i % c.ST
        phase = (i // c.ST) & 1
        t = block_of(seq, i, c) * c.C
        rows = seq.length - t
        block = tiles.mp.index(half)._reinterpret(gl.float32, [BASE, NB, BASE], plain)
        mp = tiles.mp.index(half)._reinterpret(tiles.mp.dtype, [2, c.C, BASE], small)
        lines = tiles.lines.index(half)._reinterpret(gl.float32, [2, NB, BASE], line)
        b_rows = gl.load(p_beta + (t + o_r) * HV, mask=o_r < rows, other=0.0).to(gl.float32)
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
            p_gates = p_g + t.to(gl.int64) * stride
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
        # racecheck names this and its loads: at `made`, `empty` one thread arrives for 128 that met
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
        more = comes(tiles, barriers, seq, i, along, c)
        if more:
            n = i - c.ST  # the last block to have this place
            if n >= 0:
                mbarrier.wait(barriers.empty.index(n % c.ST), (n // c.ST) & 1)
            load_rows(descs, tiles, barriers, seq, i, c)
    if not c.STRONG:
        say_strong(p_strong + half, b_low, c)


@gluon.jit
def scan_blocks(
    v_desc, outputs, tiles, barriers, o_row, seq, scale, b_s0, b_s1, place, tile: gl.constexpr, c
):
    """W after blocks. place: the first one's number, how many there are; how far v's numbers are
    ahead of theirs; rows of tokens and v, and of what v comes after these, or -1; whether they are
    left; whether what is read is o (1) or R (2).
    """
    first, count, ahead, row, v_row, v_after, leaves, reads = place
    o_desc, o_ptr, r_desc, r_ptr = outputs
    sl: gl.constexpr = b_s0.type.layout
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BASE, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    along: gl.constexpr = gl.SliceLayout(0, sl)
    tokens: gl.constexpr = gl.SliceLayout(0, xl)
    zero = gl.zeros([64, BASE], gl.float32, xl)
    dtype: gl.constexpr = tiles.k.dtype
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BASE, 64], dtype)
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BASE, BASE], dtype)
    for n in range(count):
        i = first + n
        y = i + ahead
        s = i % c.ST
        t = row + n * c.C
        rows = seq.row + seq.length - t
        # into the place of the block before, which all threads have read when they last met
        if n + 1 < count:
            load_values(v_desc, tiles, barriers, seq, y + 1, v_row + (n + 1) * c.C, tile)
        elif v_after >= 0:
            load_values(v_desc, tiles, barriers, seq, y + 1, v_after, tile)
        at = 2 * tile + y % 2
        mbarrier.wait(barriers.v_full.index(at), (y // 2) & 1)
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
        mbarrier.arrive(barriers.empty.index(s), count=1, pred=leaves)
        sm90.fence_async_shared()
        gl.thread_barrier()
        col = seq.v_col + 64 * tile
        if reads == 1:
            common.store_tile(o_desc, o_ptr, tiles.o.index(tile), t, col, o_row, rows, c.C, 64)
        if c.SPLIT and reads == 2:
            common.store_tile(r_desc, r_ptr, tiles.o.index(tile), t, col, o_row, rows, c.C, 64)
    sm90.store_wait(0)
    return b_s0, b_s1


@gluon.jit
def load_past(outputs, tiles, barriers, seq, y, row, tile: gl.constexpr):
    """o of a block to where v was, and R to where q and k were."""
    o_desc, _, r_desc, _ = outputs
    at = 2 * tile + y % 2
    v_full = barriers.v_full.index(at)
    mbarrier.expect(v_full, 3 * o_desc.block_type.nbytes)
    sm90.copy_in(o_desc, [row, seq.v_col + 64 * tile], v_full, tiles.v.index(at))
    for h in gl.static_range(2):
        x = tiles.k if tile else tiles.q
        sm90.copy_in(r_desc, [row, seq.v_col + 64 * h], v_full, x.index(2 * (y % 2) + h))


@gluon.jit
def add_past(outputs, ends, tiles, barriers, o_row, seq, y, b_m0, b_m1, o, tile: gl.constexpr, c):
    """W after the segment is M of that before it, and what the segment adds, which is where W goes;
    and R of that before it is added to o. b_m0, b_m1: columns of M as rows. y: v's number.
    """
    sl: gl.constexpr = b_m0.type.layout
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_v = gl.arange(0, 64, gl.SliceLayout(1, xa))
    o_k = gl.arange(0, 64, gl.SliceLayout(0, xa))
    o_desc, o_ptr, _, _ = outputs
    # o and R are there for copies by TMA
    semaphore.wait_bulk_stores()
    semaphore.proxy_fence()
    mbarrier.arrive(barriers.joined, count=1)
    mbarrier.wait(barriers.joined, 0)
    for h in gl.static_range(2):
        b_high, b_low = halves((b_m1 if h else b_m0) * 2.0**LOWERED)
        tiles.q.index(2 * tile + h).store(b_high)
        tiles.k.index(2 * tile + h).store(b_low)
    sm90.fence_async_shared()
    mbarrier.arrive(barriers.joined, count=1)
    mbarrier.wait(barriers.joined, 1)
    b_s = gl.load(ends.after + o)
    while semaphore.semaphore_acquire(ends.ready) < ends.done:
        pass
    p_before = ends.before + o_v[:, None] * c.K + o_k[None, :]
    b_x0, b_y0 = halves(gl.load(p_before))
    b_x1, b_y1 = halves(gl.load(p_before + 64))
    for n in range(2):  # halves of the channels, for want of registers
        b_s = warpgroup_mma(b_x0, tiles.q.index(n), b_s, is_async=True)
        b_s = warpgroup_mma(b_x1, tiles.q.index(2 + n), b_s, is_async=True)
        b_s = warpgroup_mma(b_y0, tiles.q.index(n), b_s, is_async=True)
        b_s = warpgroup_mma(b_y1, tiles.q.index(2 + n), b_s, is_async=True)
        b_s = warpgroup_mma(b_x0, tiles.k.index(n), b_s, is_async=True)
        b_s = warpgroup_mma(b_x1, tiles.k.index(2 + n), b_s, is_async=True)
        b_next = gl.load(ends.after + o + 64)
        b_s = sm90.warpgroup_mma_wait(0, deps=(b_s,))
        gl.store(ends.after + o + 64 * n, b_s)
        b_s = b_next
    gl.thread_barrier()
    semaphore.semaphore_release(ends.signal, ends.done)
    mbarrier.arrive(barriers.joined, count=1)
    mbarrier.wait(barriers.joined, 0)
    semaphore.proxy_fence()
    zero = gl.zeros([64, 64], gl.float32, sl)
    load_past(outputs, tiles, barriers, seq, y, seq.row, tile)
    for n in range(seq.n):
        t = seq.row + n * c.C
        if n + 1 < seq.n:
            load_past(outputs, tiles, barriers, seq, y + n + 1, t + c.C, tile)
        s = (y + n) % 2
        mbarrier.wait(barriers.v_full.index(2 * tile + s), ((y + n) // 2) & 1)
        x = tiles.k if tile else tiles.q
        r_0, r_1 = x.index(2 * s).permute((1, 0)), x.index(2 * s + 1).permute((1, 0))
        b_o = warpgroup_mma(b_x0, r_0, zero, use_acc=False, is_async=True)
        b_o = warpgroup_mma(b_x1, r_1, b_o, is_async=True)
        b_o = warpgroup_mma(b_y0, r_0, b_o, is_async=True)
        b_o = warpgroup_mma(b_y1, r_1, b_o, is_async=True)
        b_v = tiles.v.index(2 * tile + s).permute((1, 0)).load(sl).to(gl.float32)
        b_o = gl.fma(sm90.warpgroup_mma_wait(0, deps=(b_o,)), 2.0**LOWERED, b_v)
        out, col, rows = tiles.o.index(tile), seq.v_col + 64 * tile, seq.row + seq.length - t
        common.store_tile_transposed(o_desc, o_ptr, out, b_o, t, col, o_row, rows, c.C)
        gl.thread_barrier()  # all have read what the next copies go to
    sm90.store_wait(0)


@gluon.jit
def scan_partition(
    v_desc, outputs, tiles, barriers, state_refs, ends, o_row, seq, scale, tile: gl.constexpr, c
):
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    along: gl.constexpr = gl.SliceLayout(0, sl)
    o_r = gl.arange(0, 64, gl.SliceLayout(1, sl))
    o_v = o_r + tile * 64
    o_k = gl.arange(0, 64, along)
    zero = gl.zeros([64, 64], gl.float32, sl)
    b_s0 = delta_device.load_state(state_refs, zero, o_k, o_v, c.V, c.HAS_S_IN) * 2.0**-LOWERED
    b_s1 = delta_device.load_state(state_refs, zero, 64 + o_k, o_v, c.V, c.HAS_S_IN) * 2.0**-LOWERED
    nowhere: gl.constexpr = 1 << 30  # past all rows of a descriptor
    if seq.n > 0:
        v_row = seq.row
        if c.SPLIT:
            v_row = gl.where(seq.lead > 0, nowhere, v_row)
        load_values(v_desc, tiles, barriers, seq, 0, v_row, tile)
    if c.SPLIT:
        at = tile * 64 * c.K
        ends = Ends(
            ends.before + at, ends.after + at, ends.ready + tile, ends.signal + tile, ends.done
        )
        o = o_r[:, None] * c.K + o_k[None, :]
        counts = seq.n * 0  # whether the past does
        i = counts
        for scan in range(gl.where(seq.lead > 0, 0, 2), 4):
            if (scan == 2) & (seq.lead > 0):
                mbarrier.wait(barriers.decided, 0)
                counts = past_counts(tiles.norms, along)
            # of the block before M, then W from 0; of the segment o, then R
            of_m = (scan == 0) | (scan == 3)
            joins = counts > seq.waits
            count = gl.where(scan < 2, 1, gl.where((scan == 3) & (joins == 0), 0, seq.n))
            row = gl.where(scan < 2, seq.row - c.C, seq.row)
            if (scan == 3) & joins:
                gl.store(ends.after + o, b_s0)
                gl.store(ends.after + o + 64, b_s1)
            if (scan < 2) | joins:
                b_one = gl.where(of_m, 2.0**-LOWERED, 0.0)
                b_s0 = gl.where(o_v[:, None] == o_k[None, :], b_one, zero)
                b_s1 = gl.where(o_v[:, None] == 64 + o_k[None, :], b_one, zero)
            if (scan == 2) & (counts > 0) & (joins == 0):
                while semaphore.semaphore_acquire(ends.ready) < ends.done:
                    pass
                b_s0 = gl.load(ends.before + o)
                b_s1 = gl.load(ends.before + o + 64)
            v_row = gl.where(of_m, nowhere, row)
            v_after = gl.where(scan == 0, row, gl.where(scan == 1, seq.row, -1))
            v_after = gl.where((scan == 2) & joins, nowhere, v_after)
            ahead = gl.where(scan > 0, seq.lead, 0)
            place = (i, count, ahead, row, v_row, v_after, scan > 0, scan - 1)
            b_s0, b_s1 = scan_blocks(
                v_desc, outputs, tiles, barriers, o_row, seq, scale, b_s0, b_s1, place, tile, c
            )
            i += gl.where(scan > 0, count, 0)
            if scan == 0:
                b_m0 = b_s0 * 2.0**LOWERED
                b_m1 = b_s1 * 2.0**LOWERED
                b_m = gl.sum(b_m0 * b_m0 + b_m1 * b_m1, 1)
                if not c.STRONG:  # NaN where another launch follows: less to do here
                    wide: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
                    b_t = gl.minimum(
                        tiles.total.index(0).load(wide), tiles.total.index(1).load(wide)
                    )
                    b_m = gl.where(gl.min(gl.min(b_t, 1), 0) == 0, 0.0, b_m)
                tiles.norms.index(tile).store(b_m)
                mbarrier.arrive(barriers.decided, count=1)
        if counts > seq.waits:
            add_past(outputs, ends, tiles, barriers, o_row, seq, i + 1, b_s0, b_s1, o, tile, c)
            b_s0 = gl.load(ends.after + o)
            b_s1 = gl.load(ends.after + o + 64)
        elif seq.last == 0:
            gl.store(ends.after + o, b_s0)
            gl.store(ends.after + o + 64, b_s1)
            gl.thread_barrier()
            semaphore.semaphore_release(ends.signal, ends.done)
    else:
        b_s0, b_s1 = scan_blocks(
            v_desc, outputs, tiles, barriers, o_row, seq, scale, b_s0, b_s1,
            (0, seq.n, 0, seq.row, seq.row, -1, True, 1), tile, c,
        )  # fmt: skip
    if seq.last > 0:
        b_s0 *= 2.0**LOWERED
        b_s1 *= 2.0**LOWERED
        delta_device.store_state(state_refs, b_s0, seq.length >> 30, o_k, o_v, c.V, c.HAS_S_OUT)
        delta_device.store_state(
            state_refs, b_s1, seq.length >> 30, 64 + o_k, o_v, c.V, c.HAS_S_OUT
        )


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "segment"])
def kda_fused_fwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [64, 64]
    k_desc,
    v_desc,  # [tokens, HV * V] by [64, 64]
    g_desc,  # [tokens, HV * K] by [64, 64], float32
    o_desc,  # [tokens, HV * V] by [64, 64]
    o_ptr,
    r_desc,  # as these; SPLIT
    r_ptr,
    g_ptr,
    beta_ptr,  # [tokens, HV]
    strong_ptr,  # [N * HV, 2] int32, by the launch without STRONG
    # with SPLIT zeros, and then those of a segment's ends: [segments * HV, 2]
    ends_ptr,  # [segments, HV, V, K] float32: W after; SPLIT
    s_in_ptr,  # [N, HV, K, V]
    s_out_ptr,
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H, segment,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, HAS_S_IN: gl.constexpr,
    HAS_S_OUT: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, STRONG: gl.constexpr,
):  # fmt: skip
    """grid (HV * segments,), 4 warps; without SPLIT a segment is a sequence. With STRONG, those
    programs that met strong gates without it."""
    pid = gl.program_id(0)
    i_h = pid % HV
    i_seg = pid // HV
    row, length, _, i_n, i_s, last = common.locate_segment(
        cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT
    )
    # both prepare_partitions say of their blocks; neither waits for the other
    p_strong = strong_ptr + 2 * (i_n * HV + i_h)
    p_g = g_ptr + row.to(gl.int64) * HV * K + i_h * K
    # programs begin in order: that of the segment before is at work, or done
    after_done = strong_ptr + 2 * (N * HV + pid)
    if SPLIT and (length == 0) & (last == 0):  # a number that no segment has
        return
    # before all else: most calls have no such heads
    if STRONG and gl.load(p_strong) + gl.load(p_strong + 1) == 0:
        return
    if not STRONG and begins_strong(p_g, HV * K, length, K):
        for half in gl.static_range(2):
            gl.store(p_strong + half, 1)
            if SPLIT:
                semaphore.semaphore_release(after_done + half, 1)
        return
    n = gl.cdiv(length, C)
    lead = gl.where(i_s > 0, 1, 0)
    last = gl.where(last, 1, 0)
    ST: gl.constexpr = 2 if STRONG else 3
    c: gl.constexpr = Constants(K, V, C, ST, STRONG, SPLIT, HAS_S_IN, HAS_S_OUT)
    dtype: gl.constexpr = k_desc.dtype
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BASE], dtype)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    q = gl.allocate_shared_memory(dtype, [2 * ST, 64, 64], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [2 * ST, 64, 64], k_desc.layout)
    b = gl.allocate_shared_memory(dtype, [ST, 128, 64], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [4, 64, 64], v_desc.layout)
    o = gl.allocate_shared_memory(dtype, [2, 64, 64], o_desc.layout)
    # with STRONG more than are used: beyond 196 KiB, as the other launch, it leaves the L1 cache's
    # share of a multiprocessor as it is, which takes 2 to 6 us to change
    total = gl.allocate_shared_memory(gl.float32, [6, NB, 64], line)
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
    norms = total
    decided, joined = g_empty, g_empty
    if SPLIT:
        norms = gl.allocate_shared_memory(
            gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        )
        of_past = common.alloc_mbarriers(2, 2)
        decided, joined = of_past.index(0), of_past.index(1)
    tiles = Tiles(q, k, b, g, v, o, total, mp, lines, far, keep, norms)
    barriers = Barriers(
        common.alloc_mbarriers(1, ST), common.alloc_mbarriers(1, ST), common.alloc_mbarriers(2, ST),
        v_full, g_full, g_empty, decided, joined,
    )  # fmt: skip
    # the second one's past is there before its own E and M would be
    waits = gl.where(i_s == 1, 1, 0)
    seq = Sequence(row, length, n, i_h // (HV // H) * K, i_h * K, i_h * V, lead, last, waits)
    o_state = delta_device.state_offset(i_n, i_h, HV, K, V)
    state_refs = delta_device.StateRefs(s_in_ptr, s_out_ptr, o_state, o_state)
    p_beta = beta_ptr + row.to(gl.int64) * HV + i_h
    descs = q_desc, k_desc, g_desc
    o_row = HV * V
    outputs = o_desc, o_ptr, r_desc, r_ptr
    ends = Ends(None, None, None, None, None)
    if SPLIT:
        after = ends_ptr + delta_device.state_offset(i_seg, i_h, HV, K, V)
        before, before_done = after + HV.to(gl.int64) * (-K * V), after_done + HV * -2
        ends = Ends(before, after, before_done, after_done, 1 + STRONG)
    gl.warp_specialize(
        [
            (scan_partition, (
                v_desc, outputs, tiles, barriers, state_refs, ends, o_row, seq, scale, 0, c)),
            (scan_partition, (
                v_desc, outputs, tiles, barriers, state_refs, ends, o_row, seq, scale, 1, c)),
            (prepare_partition, (descs, p_g, p_beta, p_strong, tiles, barriers, HV, seq, 0, c)),
            (prepare_partition, (descs, p_g, p_beta, p_strong, tiles, barriers, HV, seq, 1, c)),
        ],
        [4, 4, 4],
        [144, 112, 112],
    )  # fmt: skip
