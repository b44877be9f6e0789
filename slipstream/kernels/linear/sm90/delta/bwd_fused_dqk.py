"""Delta rule backward in one scan on sm_90 (bwd_fused.py): the gradients of a chunk.

With S before a chunk, dS' after it, w and dv, and B = scale stril(do w^T decay),
M = stril(dv w^T decay), own the diagonal of scale do w^T, which gates do not reach,

    dq = scale exp(G) do S + B kb + own kb                kb = beta k, in the place of k
    dp = exp(G) dv S + M kb
    dk' = exp(G_C - G) w dS' + B^T q - M^T k + own q      dk = beta dk' - dp      dbeta = k . dk'
    dg = what is to come of (q . dq + p . dp - kb . dk'), and of sum(S' * dS')

In dg pairs of tokens that are both after a strong gate must cancel: so both sides multiply the same
rounded B, M and kb. BK channels of K at a time.
"""

from slipstream.kernels.linear.sm90.common.device import store_tile
from slipstream.kernels.linear.sm90.delta.device import MIN_CROSSED
from slipstream.kernels.linear.sm90.delta.dqkg import ROWS, release_next, row_products, store_or_add
from slipstream.kernels.primitives.gluon_compat import (
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.primitives.semaphore import semaphore_acquire, tma_reduce_add
from slipstream.kernels.primitives.smem_scalars import load_scalar

# Places of a program's numbers (kernels/primitives/smem_scalars.py): what it is from its beginning
# on, then how far the scan is.
WORKSPACE = gl.constexpr(0)  # its memory
ROW = gl.constexpr(1)  # the first token
LENGTH = gl.constexpr(2)  # tokens
CHUNKS = gl.constexpr(3)
HEAD = gl.constexpr(4)  # of v
CHUNK = gl.constexpr(5)  # the first, among those of all heads
CHECKPOINT = gl.constexpr(6)  # where S before the first part is left
K_COL = gl.constexpr(7)  # the first column of q and k
D_COL = gl.constexpr(8)  # and of their gradients
HEADS = gl.constexpr(9)  # of those
RANK = gl.constexpr(10)  # which of the heads that add those up this one is
SEMAPHORE = gl.constexpr(11)  # offset of the first chunk's semaphore
STATE_IN = gl.constexpr(12)  # where dS comes from
STATE_OUT = gl.constexpr(13)  # and goes to; -1 if it is not wanted
GONE = gl.constexpr(14)  # chunks gone back through
COUNT = gl.constexpr(15)  # those of the part
NUM_SCALARS = gl.constexpr(16)


@gluon.jit
def step_of(i, c, n, every):
    """The step of a program that goes back through chunk c, the i-th of n: it has gone forward from
    the beginning of that chunk's part to the end."""
    return i + n - c // every * every


@gluon.jit
def start_of(rows, al: gl.constexpr, C: gl.constexpr):
    """exp(G) of a chunk's tokens. Read wherever it is wanted: registers are what there is least."""
    return gl.exp2(rows.slice(C, C).load(gl.SliceLayout(1, al)))


@gluon.jit
def end_of(rows, al: gl.constexpr, C: gl.constexpr):
    """exp(G_C - G)."""
    G_C = rows.slice(2 * C - 1, 1).load(gl.SliceLayout(1, al))
    return gl.exp2(G_C - rows.slice(C, C).load(gl.SliceLayout(1, al)))


@gluon.jit
def beta_of(rows, al: gl.constexpr, C: gl.constexpr):
    return rows.slice(0, C).load(gl.SliceLayout(1, al))


@gluon.jit
def diagonal_of(diags, al: gl.constexpr, C: gl.constexpr):
    """The one sum of each token that is not 0; a token has several, each over some columns."""
    b_diag = diags.slice(0, C).load(gl.SliceLayout(1, al))
    for i in gl.static_range(1, diags.shape[0] // C):
        b_diag += diags.slice(i * C, C).load(gl.SliceLayout(1, al))
    return b_diag


@gluon.jit
def row_dot(b, tile, al: gl.constexpr):
    """sum(b * tile) of each row."""
    return gl.sum(b * tile.load(al), 1)


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def write_sums(
    dg_ptr, dbeta_ptr, rows, sum_buffers, zs, none, o_t, num_rows, HV,
    C: gl.constexpr, HAS_GATE: gl.constexpr,
):  # fmt: skip
    """From shared memory, where each warp finds all tokens, so that no sum goes across warps."""
    by: gl.constexpr = gl.BlockedLayout([1, C // 32], [1, 32], [4, 1], [1, 0])
    line: gl.constexpr = gl.SliceLayout(0, by)
    o_w = gl.arange(0, 4, gl.SliceLayout(1, by))
    o_c = gl.arange(0, C, line) + none
    o_x = (o_t + o_c.to(gl.int64) * HV)[None, :] + o_w[:, None]  # o_w is 0 where it is stored
    m = (o_c < num_rows)[None, :] & (o_w == 0)[:, None]
    zero = gl.zeros([4, C], gl.float32, by)
    if HAS_GATE:
        z = gl.sum(gl.zeros([4, ROWS], gl.float32, by) + zs.load(line)[None, :], 1)
        z *= gl.exp2(rows.slice(2 * C - 1, 1).load(gl.SliceLayout(1, by)))
        z += gl.sum(zero + sum_buffers.index(1).load(line)[None, :], 1)
        b_g = zero + rows.slice(0, C).load(line)[None, :]
        dg = gl.associative_scan(b_g, 1, add, reverse=True)
        G = zero + rows.slice(C, C).load(line)[None, :]
        before = gl.gather(G, gl.maximum(o_c - 1, 0)[None, :] + 0 * o_w[:, None], 1)
        strong = G - gl.where((o_c > 0)[None, :], before, 0.0) < MIN_CROSSED
        gl.store(dg_ptr + o_x, gl.where(strong, 0.0, dg + z[:, None]), mask=m)
    gl.store(dbeta_ptr + o_x, zero + sum_buffers.index(0).load(line)[None, :], mask=m)


@gluon.jit
def replace(tile, b):
    """b in the place of a tile that all warps have read, for products."""
    gl.thread_barrier()
    tile.store(b)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_tail(
    q, k, counts_ptr, pad, c, num_rows,
    K: gl.constexpr, C: gl.constexpr, GROUPED_HEADS: gl.constexpr,
):  # fmt: skip
    """dq and dk of a short chunk, in turn. q, k: where to, by TMA or not, and the tile."""
    heads = load_scalar(pad, HEADS, 4)
    rank = load_scalar(pad, RANK, 4)
    if GROUPED_HEADS:
        while semaphore_acquire(counts_ptr + load_scalar(pad, SEMAPHORE, 4) + c * heads) < rank:
            pass
    at = load_scalar(pad, ROW, 4) + c * C, num_rows
    cols = load_scalar(pad, D_COL, 4), heads * K
    store_or_add(rank, q[0], q[1], q[2], at, cols, C, K, GROUPED_HEADS)
    store_or_add(rank, k[0], k[1], k[2], at, cols, C, K, GROUPED_HEADS)


@gluon.jit
def dqk_partition(
    descs, pointers, counts_ptr, tiles, buffers, barriers, pad, HV, G, every, scale,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    HAS_GATE: gl.constexpr, GROUPED_HEADS: gl.constexpr,
):  # fmt: skip
    dq_desc, dk_desc, dv_desc = descs
    dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, dg_ptr = pointers
    NK: gl.constexpr = K // BK
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    zero = gl.zeros([C, BK], gl.float32, al)
    n = load_scalar(pad, CHUNKS, 4)
    for i in range(n):
        c = n - 1 - i
        j = step_of(i, c, n, every)
        s = j % ST
        num_rows = load_scalar(pad, LENGTH, 4) - c * C
        rows = tiles.beta_gate.index(s)
        mbarrier.wait(barriers.pairs_full.index(0), i & 1)
        mbarrier.wait(barriers.full.index(s), (j // ST) & 1)
        mbarrier.wait(barriers.w_full.index(0), i & 1)
        e = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))
        gates = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))  # q . dq + p . dp - kb . dk'
        sums = gl.zeros([C], gl.float32, gl.SliceLayout(1, al))  # k . dk'
        row, v_col = load_scalar(pad, ROW, 4), load_scalar(pad, HEAD, 4) * V
        dv = buffers.dv.index(i >> 24)
        store_tile(dv_desc, dv_ptr, dv, row + c * C, v_col, HV * V, num_rows, C, V)
        b_diag = diagonal_of(buffers.diagonal, al, C)
        b_beta = beta_of(rows, al, C)
        dks = ()
        for h in gl.static_range(NK):
            o = i >> (
                27 + h
            )  # 0, another for each so that no address is kept, as in dstate_partition
            b_qs = tiles.q.index(s + o).slice(h * BK, BK, 1)
            b_ks = tiles.k.index(s + o).slice(h * BK, BK, 1)
            b_ds = buffers.dstate.index(o).slice(h * BK, BK, 1)
            b_dk = warpgroup_mma(tiles.w.index(o), b_ds, zero, use_acc=False, is_async=True)
            if h == 0:
                mbarrier.wait(barriers.state_full.index(0), i & 1)
                if HAS_GATE:
                    buffers.state_products.store(
                        row_products(tiles.state.index(o), buffers.dstate.index(o), V, K)
                    )
            b_dk = warpgroup_mma_wait(0, deps=(b_dk,))
            if h == NK - 1:
                mbarrier.arrive(barriers.w_empty.index(0), count=1)
            b_kb = (b_ks.load(al) * b_beta[:, None]).to(tiles.k.dtype)
            if HAS_GATE:
                b_dk *= end_of(rows, al, C)[:, None]
                e += gl.sum(b_dk * b_kb, 1)
            b_dk = warpgroup_mma(buffers.b.index(o).permute((1, 0)), b_qs, b_dk, is_async=True)
            b_dk = warpgroup_mma(buffers.m.index(o).permute((1, 0)), b_ks, b_dk, is_async=True)
            b_dk = warpgroup_mma_wait(0, deps=(b_dk,))
            if HAS_GATE:
                gates -= gl.sum(b_dk * b_kb, 1)
            b_dk += b_diag[:, None] * b_qs.load(al)
            b_k = b_ks.load(al)
            sums += gl.sum(b_dk * b_k, 1)
            b_dk *= b_beta[:, None]
            replace(b_ks, b_kb)
            b_ss = tiles.state.index(o).slice(h * BK, BK, 1)
            b_dp = warpgroup_mma(buffers.dv.index(o), b_ss, zero, use_acc=False, is_async=True)
            b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
            if HAS_GATE:
                b_dp *= -start_of(rows, al, C)[:, None]
            else:
                b_dp = -b_dp
            b_dp = warpgroup_mma(buffers.m.index(o), b_ks, b_dp, is_async=True)  # -dp
            b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
            if HAS_GATE:
                gates += gl.sum(b_dp * b_k, 1)
            dks += ((b_dk + b_dp).to(tiles.q.dtype),)
        buffers.token_sums.index(0).store(sums)
        if HAS_GATE:
            buffers.token_sums.index(1).store(e)
        for h in gl.static_range(NK):
            o = i >> (29 + h)
            b_qs = tiles.q.index(s + o).slice(h * BK, BK, 1)
            b_ks = tiles.k.index(s + o).slice(h * BK, BK, 1)
            b_ss = tiles.state.index(o).slice(h * BK, BK, 1)
            b_dq = warpgroup_mma(tiles.do.index(s + o), b_ss, zero, use_acc=False, is_async=True)
            b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
            b_dq *= scale
            if HAS_GATE:
                b_dq *= start_of(rows, al, C)[:, None]
            b_dq = warpgroup_mma(buffers.b.index(o), b_ks, b_dq, is_async=True)
            b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
            if HAS_GATE:
                gates += row_dot(b_dq, b_qs, al)
            b_dq += b_diag[:, None] * b_ks.load(al)
            if h == NK - 1:
                store_wait(0)
                mbarrier.arrive(barriers.state_empty.index(0), count=1)
            gl.thread_barrier()
            b_qs.store(b_dq.to(tiles.q.dtype))
            b_ks.store(dks[h])
        fence_async_shared()
        num_rows = load_scalar(pad, LENGTH, 4) - c * C
        if num_rows < C:  # store_partition takes whole chunks
            gl.thread_barrier()
            store_tail(
                (dq_desc, dq_ptr, tiles.q.index(s)), (dk_desc, dk_ptr, tiles.k.index(s)),
                counts_ptr, pad, c, num_rows, K, C, GROUPED_HEADS,
            )  # fmt: skip
        mbarrier.arrive(barriers.grads_full.index(i % ST), count=1)
        o_t = (load_scalar(pad, ROW, 4) + c * C).to(gl.int64) * HV + load_scalar(pad, HEAD, 4)
        if HAS_GATE:
            rows.slice(0, C).store(gates)  # beta is not read any more
        gl.thread_barrier()
        write_sums(
            dg_ptr, dbeta_ptr, rows, buffers.token_sums, buffers.state_products, i >> 23, o_t,
            num_rows, HV, C, HAS_GATE,
        )  # fmt: skip
        mbarrier.arrive(barriers.empty.index(s), count=1)
    store_wait(0)


@gluon.jit
def store_partition(
    descs, counts_ptr, tiles, barriers, pad, HV, G, every,
    K: gl.constexpr, C: gl.constexpr, ST: gl.constexpr, GROUPED_HEADS: gl.constexpr,
):  # fmt: skip
    """dq and dk out of the buffers of q and k, one warp: it waits for its turn, and until what it
    added is there, while the other parts go on."""
    dq_desc, dk_desc, _ = descs
    heads = load_scalar(pad, HEADS, 1)
    rank = load_scalar(pad, RANK, 1)
    col = load_scalar(pad, D_COL, 1)
    row = load_scalar(pad, ROW, 1)
    length = load_scalar(pad, LENGTH, 1)
    n = load_scalar(pad, CHUNKS, 1)
    p_semaphores = counts_ptr + load_scalar(pad, SEMAPHORE, 1)
    for i in range(n):
        c = n - 1 - i
        s = step_of(i, c, n, every) % ST
        t = row + c * C
        p_semaphore = p_semaphores + c * heads
        mbarrier.wait(barriers.grads_full.index(i % ST), (i // ST) & 1)
        if (c + 1) * C <= length:
            if GROUPED_HEADS:
                while semaphore_acquire(p_semaphore) < rank:
                    pass
                if rank > 0:
                    tma_reduce_add(dq_desc, [t, col], tiles.q.index(s))
                    tma_reduce_add(dk_desc, [t, col], tiles.k.index(s))
                else:
                    copy_out(dq_desc, [t, col], tiles.q.index(s))
                    copy_out(dk_desc, [t, col], tiles.k.index(s))
            else:
                copy_out(dq_desc, [t, col], tiles.q.index(s))
                copy_out(dk_desc, [t, col], tiles.k.index(s))
        store_wait(0)
        mbarrier.arrive(barriers.empty.index(s), count=1)
        if GROUPED_HEADS:
            release_next(p_semaphore, rank, G)
    store_wait(0)
