"""A decay per channel on sm_90: what a scan (chunk_fwd.py) needs of a chunk, made within it.

With G the sums of a chunk's gates, from its start to a token, and D = exp(G_C),

    r_i = q_i exp(G_i)      w_j = k_j exp(-G_j)      A = lower triangle of r w^T, [i, j]

take the place of q and k in shared memory. Where a chunk's gates add up to less than -BOUND in some
channel it is strong, and exp(-G_j) may not fit: then w_j = k_j exp(G_C - G_j), and A is made by
levels, as triton/vector_decay/subchunk_decay.py has it, whose spans of tokens are used here too:
every sum of gates is a product of a matrix of zeros and ones with the gates, so that nothing
cancels. Rows of A whose own gates do not add up to that are made as in chunks that are not strong,
for what comes after a token must not change its bits. Pairs within 16 tokens are, too, relative to
the first of these, unless the gates from there to the row's token add up to -BOUND - SHIFT; if they
do in no row, the levels within 16 tokens are left out. A factor D is missing from all w_j, or from
none, and the scan puts it into the state.

Where reads come before the write (u given) r_i leaves out its own gate, and A[i, i] = q_i . u k_i.

One warp sums up the chunk's gates beforehand, and says by a flag which of both it is.
"""

from slipstream.kernels.linear.sm90.common import zero_tail_rows
from slipstream.kernels.linear.triton.common.gate_ones import BASE
from slipstream.kernels.linear.triton.scalar_decay.device import LOG2E, LOWEST_GATE, ROUNDING
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma


@gluon.jit
def column_sums(gate, num_rows, K: gl.constexpr, C: gl.constexpr, MASKED: gl.constexpr):
    """Sums over the first `num_rows` rows, or all, by one warp."""
    EACH: gl.constexpr = 8
    tall: gl.constexpr = gl.BlockedLayout([EACH, K // 32], [1, 32], [1, 1], [1, 0])
    b_sum = gl.zeros([K], gl.float32, gl.SliceLayout(0, tall))
    for block in gl.static_range(C // EACH):
        b_g = gate.slice(block * EACH, EACH).load(tall).to(gl.float32)
        if MASKED:
            o_t = block * EACH + gl.arange(0, EACH, gl.SliceLayout(1, tall))
            b_g = gl.where((o_t < num_rows)[:, None], b_g, 0.0)
        b_sum += gl.sum(b_g, 0)
    return b_sum


@gluon.jit
def gate_sum_partition(
    gs, totals, flags, full, summed, length, n,
    K: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, BOUND: gl.constexpr,
):  # fmt: skip
    """D of each chunk and whether it is strong, by one warp."""
    single: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in range(n):
        s = i % ST
        num_rows = length - i * C
        mbarrier.wait(full.index(s), (i // ST) & 1)
        if num_rows < C:
            b_sum = column_sums(gs.index(s), num_rows, K, C, True)
        else:
            b_sum = column_sums(gs.index(s), num_rows, K, C, False)
        strong = gl.where(gl.min(b_sum, 0) < -BOUND, 1.0, 0.0)
        totals.index(s).store(gl.exp2(b_sum * LOG2E))
        flags.index(s).store(gl.full([1], 0.0, gl.float32, single) + strong)
        mbarrier.arrive(summed.index(s), count=1)


@gluon.jit
def flag_of(flags, s):
    """Above 0 if the chunk in stage s is strong."""
    return gl.max(flags.index(s).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def square(gate, dtype: gl.constexpr, K: gl.constexpr, C: gl.constexpr):
    """Where A is: in the place of the gates."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    return gate._reinterpret(dtype, [K // C, C, C], layout).index(0)


@gluon.jit
def ones(first, count, layout: gl.constexpr, C: gl.constexpr, dtype: gl.constexpr):
    """1 at [t, u] if u is one of the `count` tokens from `first` on, by t."""
    u = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    inside = (u >= first[:, None]) & (u < (first + count)[:, None])
    return gl.where(inside, 1.0, 0.0).to(dtype)


@gluon.jit
def half(tile, h: gl.constexpr):
    """64 columns of a tile."""
    return tile.slice(h * 64, 64, dim=1)


@gluon.jit
def gate_sums(b_ones, gates, h: gl.constexpr, C: gl.constexpr):
    """The sums of gates over each row's span, [C, 64] of half h, in base 2."""
    zero = gl.zeros([C, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    b_sum = warpgroup_mma(b_ones, half(gates, h), zero, use_acc=False, is_async=True)
    return sm90.warpgroup_mma_wait(0, deps=(b_sum,)) * LOG2E


@gluon.jit
def take_gates(gate, gates, K: gl.constexpr, C: gl.constexpr):
    """The gates, none below LOWEST_GATE; they may stay in their place."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    b_0 = half(gate, 0).load(layout)
    b_1 = half(gate, K // 64 - 1).load(layout)
    gl.thread_barrier()
    store_gates(b_0, gates, 0)
    if K > 64:
        store_gates(b_1, gates, 1)
    sm90.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_gates(b_g, gates, h: gl.constexpr):
    b_g = b_g.to(gl.float32)
    half(gates, h).store(gl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g).to(gates.dtype))


@gluon.jit
def add_diagonal(b_a, r, w, none, u_ptr, K: gl.constexpr, C: gl.constexpr, HAS_U: gl.constexpr):
    """A with q_i . u k_i as its diagonal."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    o_i = none + gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = none + gl.arange(0, C, gl.SliceLayout(0, al))
    b_diagonal = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))
    for h in gl.static_range(K // 64):
        b_pair = half(r, h).load(al).to(gl.float32) * half(w, h).load(al).to(gl.float32)
        if HAS_U:
            b_pair *= gl.load(u_ptr + h * 64 + o_j).to(gl.float32)[None, :]
        b_diagonal += gl.sum(b_pair, 1)
    return gl.where(o_i[:, None] == o_j[None, :], b_diagonal[:, None], b_a)


@gluon.jit
def read_sums(b_sum, gates, h: gl.constexpr, BEFORE: gl.constexpr):
    """The sums of gates up to each token as reads have them, the same instructions everywhere."""
    if BEFORE:
        b_sum -= half(gates, h).load(b_sum.type.layout).to(gl.float32) * LOG2E
    return b_sum


@gluon.jit
def weak_scores(
    r, w, gates, out, until, none, u_ptr, K: gl.constexpr, C: gl.constexpr,
    BEFORE: gl.constexpr,
):  # fmt: skip
    """r, w and A of a chunk whose factors are all finite."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    o_i = none + gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, C, gl.SliceLayout(0, al))
    seen = o_i[:, None] >= o_j[None, :]
    b_diagonal = gl.zeros([C, C], gl.float32, al)
    if BEFORE:
        b_diagonal = add_diagonal(b_diagonal, r, w, none, u_ptr, K, C, BEFORE)
        seen = o_i[:, None] > o_j[None, :]
    for h in gl.static_range(K // 64):
        b_sum = gate_sums(until, gates, h, C)
        b_k = half(w, h).load(al).to(gl.float32)
        half(w, h).store((b_k * gl.exp2(-b_sum)).to(w.dtype))
        b_sum = read_sums(b_sum, gates, h, BEFORE)
        b_q = half(r, h).load(al).to(gl.float32)
        half(r, h).store((b_q * gl.exp2(b_sum)).to(r.dtype))
    sm90.fence_async_shared()
    gl.thread_barrier()
    b_a = gl.zeros([C, C], gl.float32, al)
    for h in gl.static_range(K // 64):
        b_w = half(w, h).permute((1, 0))
        b_a = warpgroup_mma(half(r, h), b_w, b_a, use_acc=h > 0, is_async=True)
    b_a = sm90.warpgroup_mma_wait(0, deps=(b_a,))
    out.store(gl.where(seen, b_a, b_diagonal).to(out.dtype))


@gluon.jit
def block_scores(
    r, w, gates, free, none, K: gl.constexpr, C: gl.constexpr, BOUND: gl.constexpr,
    SHIFT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """A of pairs within 16 tokens, where rows allow it, and which rows do; free: two tiles."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    ones_l: gl.constexpr = gl.DotOperandLayout(0, al, 2)
    o_t = none + gl.arange(0, C, gl.SliceLayout(1, ones_l))
    start = o_t >> BASE << BASE
    b_ones = ones(start, o_t - start + 1, ones_l, C, gl.bfloat16)
    b_a = gl.zeros([C, C], gl.float32, al)
    b_lowest = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))
    x, y = free.index(none), free.index(none + 1)
    for h in gl.static_range(K // 64):
        b_sum = gate_sums(b_ones, gates, h, C)
        b_w = gl.exp2(gl.minimum(-b_sum - SHIFT * LOG2E, BOUND * LOG2E))
        x.store((half(w, h).load(al).to(gl.float32) * b_w).to(x.dtype))
        b_sum = read_sums(b_sum, gates, h, BEFORE)
        b_lowest = gl.minimum(b_lowest, gl.min(b_sum, 1))
        b_r = gl.exp2(b_sum + SHIFT * LOG2E)
        y.store((half(r, h).load(al).to(gl.float32) * b_r).to(x.dtype))
        sm90.fence_async_shared()
        gl.thread_barrier()
        b_a = warpgroup_mma(y, x.permute((1, 0)), b_a, use_acc=h > 0, is_async=True)
        b_a = sm90.warpgroup_mma_wait(0, deps=(b_a,))
        gl.thread_barrier()  # both are written again
    safe = (b_lowest >= -(BOUND + SHIFT) * LOG2E).to(gl.int32)
    o_i = none + gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = none + gl.arange(0, C, gl.SliceLayout(0, al))
    pairs = (o_i >> BASE)[:, None] == (o_j >> BASE)[None, :]
    pairs = pairs & (o_i[:, None] > o_j[None, :]) & (safe > 0)[:, None]
    return gl.where(pairs, b_a, 0.0), safe


@gluon.jit
def strong_scores(
    r, w, gates, free, out, until, none, u_ptr, K: gl.constexpr, C: gl.constexpr,
    LEVELS: gl.constexpr, BOUND: gl.constexpr, SHIFT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """r, w and A of a chunk, the rows below the bound by levels; free: two tiles."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    ones_l: gl.constexpr = gl.DotOperandLayout(0, al, 2)
    zero_a = gl.zeros([C, C], gl.float32, al)
    x = free.index(none)
    b_a, safe = block_scores(r, w, gates, free, none, K, C, BOUND, SHIFT, BEFORE)
    b_a = add_diagonal(b_a, r, w, none, u_ptr, K, C, BEFORE)
    for level in range(BASE * gl.min(safe, 0), LEVELS):
        # 0, as none: masks of a level take registers in it alone
        opaque = none + level >> 31 << 10
        o_t = opaque + gl.arange(0, C, gl.SliceLayout(1, ones_l))
        o_i = opaque + gl.arange(0, C, gl.SliceLayout(1, al))
        o_j = opaque + gl.arange(0, C, gl.SliceLayout(0, al))
        later = ((o_t >> level) & 1) == 1
        start = (o_t >> level) << level
        first = gl.where(later, start, o_t + 1)
        end = gl.where(later, o_t + (0 if BEFORE else 1), start + (1 << level))
        b_ones = ones(first, end - first, ones_l, C, gl.bfloat16)
        reads = (((o_i >> level) & 1) == 1)[:, None]
        siblings = ((o_i >> level)[:, None] ^ (o_j >> level)[None, :]) == 1
        siblings = siblings & ((safe == 0) | (o_i - o_i + level >= BASE))[:, None]
        for h in gl.static_range(K // 64):
            b_e = gl.exp2(gate_sums(b_ones, gates, h, C))
            b_x = gl.where(reads, half(r, h).load(al), half(w, h).load(al)).to(gl.float32)
            x.store((b_x * b_e).to(x.dtype))
            sm90.fence_async_shared()
            gl.thread_barrier()
            b_xx = warpgroup_mma(x, x.permute((1, 0)), zero_a, use_acc=False, is_async=True)
            b_xx = sm90.warpgroup_mma_wait(0, deps=(b_xx,))
            b_a += gl.where(siblings & (o_i[:, None] > o_j[None, :]), b_xx, 0.0)
            gl.thread_barrier()  # x is written again
    b_whole = zero_a
    b_lowest = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))
    for h in gl.static_range(K // 64):
        b_sum = gate_sums(until, gates, h, C)
        b_k = half(w, h).load(al).to(gl.float32)
        b_w = gl.exp2(gl.minimum(-b_sum, (BOUND + ROUNDING) * LOG2E))
        x.store((b_k * b_w).to(x.dtype))
        b_sum = read_sums(b_sum, gates, h, BEFORE)
        b_lowest = gl.minimum(b_lowest, gl.min(b_sum, 1))
        b_q = half(r, h).load(al).to(gl.float32)
        half(r, h).store((b_q * gl.exp2(b_sum)).to(r.dtype))
        sm90.fence_async_shared()
        gl.thread_barrier()
        b_w = x.permute((1, 0))
        b_whole = warpgroup_mma(half(r, h), b_w, b_whole, use_acc=h > 0, is_async=True)
        b_whole = sm90.warpgroup_mma_wait(0, deps=(b_whole,))
        # adding to 0 keeps the instructions that were checked on an H200
        b_g = gl.zeros([C, 64], gl.float32, al)
        b_g += half(gates, h).load(al).to(gl.float32) * LOG2E
        b_sum = gate_sums(until.permute((1, 0)), gates, h, C) - b_g  # of the gates after it
        b_k = half(w, h).load(al).to(gl.float32)
        half(w, h).store((b_k * gl.exp2(b_sum)).to(w.dtype))
        gl.thread_barrier()  # x is written again
    o_i = none + gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = none + gl.arange(0, C, gl.SliceLayout(0, al))
    seen = o_i[:, None] > o_j[None, :] if BEFORE else o_i[:, None] >= o_j[None, :]
    as_weak = b_lowest >= -(BOUND + ROUNDING) * LOG2E
    out.store(gl.where(as_weak[:, None] & seen, b_whole, b_a).to(out.dtype))


@gluon.jit
def score_partition(
    tiles, gates, until, free, flags, u_ptr, full, summed, ready, length, n, c, NX: gl.constexpr
):
    """r, w and A of each chunk; clears a short chunk's rest."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    o_i = gl.arange(0, c.C, gl.SliceLayout(1, al))
    until.index(0).store(ones(o_i * 0, o_i + 1, al, c.C, gl.bfloat16))
    sm90.fence_async_shared()
    gl.thread_barrier()
    for i in range(n):
        s = i % c.ST
        num_rows = length - i * c.C
        # 0, but no compiler knows: masks and addresses would take registers all the time
        none = length + i >> 31 << 10
        mbarrier.wait(summed.index(s), (i // c.ST) & 1)
        mbarrier.wait(full.index(s), (i // c.ST) & 1)
        if num_rows < c.C:
            zero_tail_rows(tiles.r.index(s), num_rows, c.C, c.K)
            zero_tail_rows(tiles.w.index(s), num_rows, c.C, c.K)
            zero_tail_rows(tiles.g.index(s), num_rows, c.C, c.K)
            for i_x in gl.static_range(NX):
                zero_tail_rows(tiles.x.index(NX * s + i_x), num_rows, c.C, 64)
            sm90.fence_async_shared()
            gl.thread_barrier()
        take_gates(tiles.g.index(s), gates.index(none), c.K, c.C)
        if flag_of(flags, s) > 0.0:
            none = i >> 30
            out = square(tiles.g.index(s + none), tiles.r.dtype, c.K, c.C)
            strong_scores(
                tiles.r.index(s), tiles.w.index(s), gates.index(none), free, out,
                until.index(none), none, u_ptr, c.K, c.C, c.LEVELS, c.BOUND, c.SHIFT, c.HAS_U,
            )  # fmt: skip
        else:
            # another one: what take_gates makes with it would be kept until here
            none = num_rows >> 31 << 10
            out = square(tiles.g.index(s + none), tiles.r.dtype, c.K, c.C)
            weak_scores(
                tiles.r.index(s), tiles.w.index(s), gates.index(none), out, until.index(none), none,
                u_ptr, c.K, c.C, c.HAS_U,
            )  # fmt: skip
        sm90.fence_async_shared()
        mbarrier.arrive(ready.index(s), count=1)


@gluon.jit
def key_partition(
    tiles, gates, after, full, summed, ready, length, n,
    K: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """w of each chunk as in strong ones, k exp(G_C - G), where the state alone is wanted; clears a
    short chunk's rest."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    after.index(0).store(ones(o_i + 1, C - 1 - o_i, al, C, gl.bfloat16))
    sm90.fence_async_shared()
    gl.thread_barrier()
    for i in range(n):
        s = i % ST
        num_rows = length - i * C
        # the gates of a short chunk are cleared only once they have been summed
        mbarrier.wait(summed.index(s), (i // ST) & 1)
        mbarrier.wait(full.index(s), (i // ST) & 1)
        if num_rows < C:
            zero_tail_rows(tiles.w.index(s), num_rows, C, K)
            zero_tail_rows(tiles.g.index(s), num_rows, C, K)
            for h in gl.static_range(2):
                zero_tail_rows(tiles.x.index(2 * s + h), num_rows, C, 64)
            sm90.fence_async_shared()
            gl.thread_barrier()
        take_gates(tiles.g.index(s), gates.index(0), K, C)
        for h in gl.static_range(K // 64):
            k = half(tiles.w.index(s), h)
            b_k = k.load(al).to(gl.float32) * gl.exp2(
                gate_sums(after.index(0), gates.index(0), h, C)
            )
            k.store(b_k.to(k.dtype))
        sm90.fence_async_shared()
        mbarrier.arrive(ready.index(s), count=1)
