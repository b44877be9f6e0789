"""Delta rule, no decay or one a token, on sm_90: backward in one scan from the last chunk.

What chunk_dstate.py and dqkg.py do, with dS' [K, V], the gradient of the state after a
chunk, in no other memory than a program's own. From S before each chunk and w, with p = k,

    A = scale tril(q k^T decay)        x = do^T A + (k dS')^T exp(G_C - G)        dv = (x beta R)^T
    dS = exp(G_C) dS' + (q exp(G))^T scale do - (k exp(G))^T dv

and from a chunk's B = scale stril(do w^T decay) and M = stril(dv w^T decay) its gradients, with own
the diagonal of scale do w^T, which gates do not reach,

    dq = scale exp(G) do S + B kb + own kb                kb = beta k, in the place of k
    dp = exp(G) dv S + M kb
    dk' = exp(G_C - G) w dS' + B^T q - M^T k + own q      dk = beta dk' - dp      dbeta = k . dk'
    dg = what is to come of (q . dq + p . dp - kb . dk'), and of sum(S' * dS')

In dg pairs of tokens that are both after a strong gate must cancel: so both sides multiply the same
rounded B, M and kb. BK channels of K at a time.

S and w are made once more, a block of `every` chunks at a time: forward leaves S before each block,
in 16 bits as it is in all products, and from there a program scans to the block's end before it
goes back, by all warps that go back later and all columns of V:

    w = R v - R (diag(exp(G)) k S)        S <- exp(G_C) S + (k exp(G_C - G))^T beta w

through the buffers of what there is on the way back: R in that of q, S in that of dS', w in that of
dv. Recomputed states go to memory of that program alone, except for the first, which forward left,
and the last, which is in shared memory; dS' is in memory too while S takes its registers.

Four partitions of a program, which has all columns of V:

    load_partition, 1 warp            state_partition, V / 16 warps        dqk_partition, 4
      to a block's end, every chunk:
      k, v, R, beta, G -- full ---->    S, w; <-- empty (2 arrivals)
      S before it -- entry_full --->    S and w of all but the last chunk to memory -- recomputed
                                        those of the last -- state_full, w_full
      back:
      q, k, do, beta, G -- full --->    A, dS, dv, B, M -- pairs_full ----->  dq, dk, dbeta, dg
      R -- r_full ----------------->    reads R; <-- r_empty
      w -- w_full ----------------->    reads w -------------------------->   reads w, dS'
                                        waits for w_empty before dS'          <-- w_empty
      S -- state_full ---------------------------------------------------->   reads S, dv, B, M
                                        waits for state_empty before dv       <-- state_empty
                                                                              dq, dk -- grads_full
      <-- empty (2 arrivals): dqk_partition, and store_partition, 1 warp, which adds dq and dk of
          whole chunks, in the buffers of q and k, to those of other heads and passes the turn on

    buffers                       stages  arrivals a phase: full / empty
    q, k, do or v, beta, G        ST      2 (TMA, and the warp that stores beta and G) / 2
    R [C, C]                      1       1 (TMA) / 1
    w [C, V]                      1       1 (TMA, or the way to a block's end) / 1, with dS'
    S [V, K]                      1       1 (TMA, or the same) / 1, with dv, B, M and the diagonal
    dS', dv, B, M, the diagonal   1       1 for all / as w and as S have it
    dq, dk                        ST      1 / as q and k have it

What a program is, and how far its scan is, all read where they want it
(kernels/primitives/sm90_device.py): registers are what there is least. Step j of a program is the
i-th back, where it has gone forward through j - i chunks.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.delta import delta_device
from slipstream.kernels.linear.sm90.delta.delta_device import LOG2E, MIN_CROSSED
from slipstream.kernels.linear.sm90.delta.dqkg import ROWS, release_next, row_products, store_or_add
from slipstream.kernels.primitives import device, sm90
from slipstream.kernels.primitives import semaphore as semaphores
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma
from slipstream.kernels.primitives.sm90_device import alloc_scalars, load_scalar, store_scalars

# constants of a launch, for device functions
Constants = namedtuple(
    "Constants", "K V BK C ST WARPS HAS_GATE HAS_S_IN HAS_S_OUT SPLIT GROUPED_HEADS"
)


@gluon.jit
def square(tile, like, C: gl.constexpr):
    """The first [C, C] of a tile, as `like` is."""
    SQUARES: gl.constexpr = tile.shape[0] * tile.shape[1] // (C * C)
    return tile._reinterpret(tile.dtype, [SQUARES, C, C], like.layout).index(0)


@gluon.jit
def recompute_states(
    descs, tiles, buffers, barriers, row, v_col, scratch, gone, first, count, length, c
):
    """From S before a part, which is there, to its end: S before its other chunks into memory, and
    w; of the last to where the way back begins. gone: chunks gone back through."""
    w_desc, states_desc = descs
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [c.WARPS, 1], [16, c.K, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [c.WARPS, 1], [16, c.C, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    zero = gl.zeros([c.V, c.C], gl.float32, xl)
    b_s = tiles.state.index(gone >> 30).load(sl).to(gl.float32)
    # `grads` is done with what the chunk before has there
    mbarrier.wait(barriers.w_empty.index(0), (gone & 1) ^ 1)
    mbarrier.wait(barriers.state_empty.index(0), (gone & 1) ^ 1)
    for at in range(count):
        j = 2 * gone + at
        s = j % c.ST
        rows = tiles.beta_gate.index(s)
        # 0, which no compiler knows: it would keep all addresses
        o = at >> 30
        o_w = at >> 29
        b_r = square(tiles.q.index(s), tiles.a.index(0), c.C)
        num_rows = length - (first + at) * c.C
        is_last = at == count - 1
        mbarrier.wait(barriers.full.index(s), (j // c.ST) & 1)
        if num_rows < c.C:
            common.zero_tail_rows(tiles.k.index(s), num_rows, c.C, c.K, c.WARPS)
            common.zero_tail_rows(tiles.do.index(s), num_rows, c.C, c.V, c.WARPS)
            common.zero_tail_rows(b_r, num_rows, c.C, c.C, c.WARPS)
            sm90.fence_async_shared()
            gl.thread_barrier()
        b_sb = b_s.to(tiles.k.dtype)
        sm90.store_wait(1)  # of the chunk before, S
        gl.thread_barrier()
        buffers.dstate.index(o).store(b_sb)
        if is_last:
            tiles.state.index(at >> 28).store(b_sb)
        sm90.fence_async_shared()
        sm90.store_wait(0)  # and w
        gl.thread_barrier()
        b_u = warpgroup_mma(
            buffers.dstate.index(o),
            tiles.k.index(s + o).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        if c.HAS_GATE:
            last = rows.slice(2 * c.C - 1, 1)
            b_s *= gl.exp2(last.load(gl.SliceLayout(0, sl)))[None, :]
        if (at > 0) & (at < count - 1):
            sm90.copy_out(states_desc, [scratch + (at - 1) * c.V, 0], buffers.dstate.index(o))
        b_u = sm90.warpgroup_mma_wait(0, deps=(b_u,))
        if c.HAS_GATE:
            b_u = -b_u * gl.exp2(rows.slice(c.C, c.C).load(gl.SliceLayout(0, xl)))[None, :]
        else:
            b_u = -b_u
        b_u = gl.convert_layout(b_u.to(tiles.k.dtype), sa)
        b_w = warpgroup_mma(b_u, b_r.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_w = warpgroup_mma(
            tiles.do.index(s).permute((1, 0)), b_r.permute((1, 0)), b_w, is_async=True
        )
        b_w = sm90.warpgroup_mma_wait(0, deps=(b_w,))
        if is_last:
            tiles.w.index(o_w).permute((1, 0)).store(b_w.to(tiles.k.dtype))
            sm90.fence_async_shared()
            mbarrier.arrive(barriers.w_full.index(0), count=1)
            mbarrier.arrive(barriers.state_full.index(0), count=1)
        else:
            b_share = rows.slice(0, c.C).load(gl.SliceLayout(0, xl))
            if c.HAS_GATE:
                b_G = rows.slice(c.C, c.C).load(gl.SliceLayout(0, xl))
                b_share *= gl.exp2(last.load(gl.SliceLayout(0, xl)) - b_G)
            b_lhs = gl.convert_layout((b_w * b_share[None, :]).to(tiles.k.dtype), xa)
            b_s = warpgroup_mma(b_lhs, tiles.k.index(s), b_s, is_async=True)
            buffers.dv.index(o_w).permute((1, 0)).store(b_w.to(tiles.k.dtype))
            sm90.fence_async_shared()
            gl.thread_barrier()
            sm90.copy_out(w_desc, [row + (first + at) * c.C, v_col], buffers.dv.index(o_w))
            b_s = sm90.warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(barriers.empty.index(s), count=2)


# Places of a program's numbers (kernels/primitives/sm90_device.py): what it is from its beginning
# on, then how far the scan is.
AT = device.Names(
    "WORKSPACE",  # its memory
    "ROW",  # the first token
    "LENGTH",  # tokens
    "CHUNKS",
    "HEAD",  # of v
    "CHUNK",  # the first, among those of all heads
    "CHECKPOINT",  # where S before the first part is left
    "K_COL",  # the first column of q and k
    "D_COL",  # and of their gradients
    "HEADS",  # of those
    "RANK",  # which of the heads that add those up this one is
    "SEMAPHORE",  # offset of the first chunk's semaphore
    "STATE_IN",  # where dS comes from
    "STATE_OUT",  # and goes to; -1 if it is not wanted
    "GONE",  # chunks gone back through
    "COUNT",  # those of the part
)


@gluon.jit
def step_of(i, i_c, n, every):
    """The step of a program that goes back through chunk c, the i-th of n: it has gone forward from
    the beginning of that chunk's part to the end."""
    return i + n - i_c // every * every


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
        strong = G - gl.where((o_c > 0)[None, :], before, 0.0) < MIN_CROSSED * LOG2E
        gl.store(dg_ptr + o_x, gl.where(strong, 0.0, dg + z[:, None]), mask=m)
    gl.store(dbeta_ptr + o_x, zero + sum_buffers.index(0).load(line)[None, :], mask=m)


@gluon.jit
def replace(tile, b):
    """b in the place of a tile that all warps have read, for products."""
    gl.thread_barrier()
    tile.store(b)
    sm90.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_tail(
    q, k, counts_ptr, pad, i_c, num_rows,
    K: gl.constexpr, C: gl.constexpr, GROUPED_HEADS: gl.constexpr,
):  # fmt: skip
    """dq and dk of a short chunk, in turn. q, k: where to, by TMA or not, and the tile."""
    heads = load_scalar(pad, AT.HEADS, 4)
    rank = load_scalar(pad, AT.RANK, 4)
    if GROUPED_HEADS:
        while (
            semaphores.semaphore_acquire(
                counts_ptr + load_scalar(pad, AT.SEMAPHORE, 4) + i_c * heads
            )
            < rank
        ):
            pass
    at = load_scalar(pad, AT.ROW, 4) + i_c * C, num_rows
    cols = load_scalar(pad, AT.D_COL, 4), heads * K
    store_or_add(rank, q[0], q[1], q[2], at, cols, C, K, GROUPED_HEADS)
    store_or_add(rank, k[0], k[1], k[2], at, cols, C, K, GROUPED_HEADS)


@gluon.jit
def dqk_partition(
    descs, pointers, counts_ptr, tiles, buffers, barriers, pad, HV, G, every, scale, c
):
    dq_desc, dk_desc, dv_desc = descs
    dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, dg_ptr = pointers
    NK: gl.constexpr = c.K // c.BK
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.C, 16])
    zero = gl.zeros([c.C, c.BK], gl.float32, al)
    n = load_scalar(pad, AT.CHUNKS, 4)
    for i in range(n):
        i_c = n - 1 - i
        j = step_of(i, i_c, n, every)
        s = j % c.ST
        num_rows = load_scalar(pad, AT.LENGTH, 4) - i_c * c.C
        rows = tiles.beta_gate.index(s)
        mbarrier.wait(barriers.pairs_full.index(0), i & 1)
        mbarrier.wait(barriers.full.index(s), (j // c.ST) & 1)
        mbarrier.wait(barriers.w_full.index(0), i & 1)
        e = gl.zeros([c.C], gl.float32, gl.SliceLayout(1, al))
        gates = gl.zeros([c.C], gl.float32, gl.SliceLayout(1, al))  # q . dq + p . dp - kb . dk'
        sums = gl.zeros([c.C], gl.float32, gl.SliceLayout(1, al))  # k . dk'
        row, v_col = load_scalar(pad, AT.ROW, 4), load_scalar(pad, AT.HEAD, 4) * c.V
        dv = buffers.dv.index(i >> 24)
        common.store_tile(dv_desc, dv_ptr, dv, row + i_c * c.C, v_col, HV * c.V, num_rows, c.C, c.V)
        b_diag = diagonal_of(buffers.diagonal, al, c.C)
        b_beta = beta_of(rows, al, c.C)
        dks = ()
        for h in gl.static_range(NK):
            # 0, another for each so that no address is kept, as in dstate_partition
            o = i >> (27 + h)
            b_qs = tiles.q.index(s + o).slice(h * c.BK, c.BK, 1)
            b_ks = tiles.k.index(s + o).slice(h * c.BK, c.BK, 1)
            b_ds = buffers.dstate.index(o).slice(h * c.BK, c.BK, 1)
            b_dk = warpgroup_mma(tiles.w.index(o), b_ds, zero, use_acc=False, is_async=True)
            if h == 0:
                mbarrier.wait(barriers.state_full.index(0), i & 1)
                if c.HAS_GATE:
                    buffers.state_products.store(
                        row_products(tiles.state.index(o), buffers.dstate.index(o), c.V, c.K)
                    )
            b_dk = sm90.warpgroup_mma_wait(0, deps=(b_dk,))
            if h == NK - 1:
                mbarrier.arrive(barriers.w_empty.index(0), count=1)
            b_kb = (b_ks.load(al) * b_beta[:, None]).to(tiles.k.dtype)
            if c.HAS_GATE:
                b_dk *= end_of(rows, al, c.C)[:, None]
                e += gl.sum(b_dk * b_kb, 1)
            b_dk = warpgroup_mma(buffers.b.index(o).permute((1, 0)), b_qs, b_dk, is_async=True)
            b_dk = warpgroup_mma(buffers.m.index(o).permute((1, 0)), b_ks, b_dk, is_async=True)
            b_dk = sm90.warpgroup_mma_wait(0, deps=(b_dk,))
            if c.HAS_GATE:
                gates -= gl.sum(b_dk * b_kb, 1)
            b_dk += b_diag[:, None] * b_qs.load(al)
            b_k = b_ks.load(al)
            sums += gl.sum(b_dk * b_k, 1)
            b_dk *= b_beta[:, None]
            replace(b_ks, b_kb)
            b_ss = tiles.state.index(o).slice(h * c.BK, c.BK, 1)
            b_dp = warpgroup_mma(buffers.dv.index(o), b_ss, zero, use_acc=False, is_async=True)
            b_dp = sm90.warpgroup_mma_wait(0, deps=(b_dp,))
            if c.HAS_GATE:
                b_dp *= -start_of(rows, al, c.C)[:, None]
            else:
                b_dp = -b_dp
            b_dp = warpgroup_mma(buffers.m.index(o), b_ks, b_dp, is_async=True)  # -dp
            b_dp = sm90.warpgroup_mma_wait(0, deps=(b_dp,))
            if c.HAS_GATE:
                gates += gl.sum(b_dp * b_k, 1)
            dks += ((b_dk + b_dp).to(tiles.q.dtype),)
        buffers.token_sums.index(0).store(sums)
        if c.HAS_GATE:
            buffers.token_sums.index(1).store(e)
        for h in gl.static_range(NK):
            o = i >> (29 + h)
            b_qs = tiles.q.index(s + o).slice(h * c.BK, c.BK, 1)
            b_ks = tiles.k.index(s + o).slice(h * c.BK, c.BK, 1)
            b_ss = tiles.state.index(o).slice(h * c.BK, c.BK, 1)
            b_dq = warpgroup_mma(tiles.do.index(s + o), b_ss, zero, use_acc=False, is_async=True)
            b_dq = sm90.warpgroup_mma_wait(0, deps=(b_dq,))
            b_dq *= scale
            if c.HAS_GATE:
                b_dq *= start_of(rows, al, c.C)[:, None]
            b_dq = warpgroup_mma(buffers.b.index(o), b_ks, b_dq, is_async=True)
            b_dq = sm90.warpgroup_mma_wait(0, deps=(b_dq,))
            if c.HAS_GATE:
                gates += row_dot(b_dq, b_qs, al)
            b_dq += b_diag[:, None] * b_ks.load(al)
            if h == NK - 1:
                sm90.store_wait(0)
                mbarrier.arrive(barriers.state_empty.index(0), count=1)
            gl.thread_barrier()
            b_qs.store(b_dq.to(tiles.q.dtype))
            b_ks.store(dks[h])
        sm90.fence_async_shared()
        num_rows = load_scalar(pad, AT.LENGTH, 4) - i_c * c.C
        if num_rows < c.C:  # store_partition takes whole chunks
            gl.thread_barrier()
            store_tail(
                (dq_desc, dq_ptr, tiles.q.index(s)), (dk_desc, dk_ptr, tiles.k.index(s)),
                counts_ptr, pad, i_c, num_rows, c.K, c.C, c.GROUPED_HEADS,
            )  # fmt: skip
        mbarrier.arrive(barriers.grads_full.index(i % c.ST), count=1)
        o_t = (load_scalar(pad, AT.ROW, 4) + i_c * c.C).to(gl.int64) * HV
        o_t += load_scalar(pad, AT.HEAD, 4)
        if c.HAS_GATE:
            rows.slice(0, c.C).store(gates)  # beta is not read any more
        gl.thread_barrier()
        write_sums(
            dg_ptr, dbeta_ptr, rows, buffers.token_sums, buffers.state_products, i >> 23, o_t,
            num_rows, HV, c.C, c.HAS_GATE,
        )  # fmt: skip
        mbarrier.arrive(barriers.empty.index(s), count=1)
    sm90.store_wait(0)


@gluon.jit
def store_partition(descs, counts_ptr, tiles, barriers, pad, HV, G, every, c):
    """dq and dk out of the buffers of q and k, one warp: it waits for its turn, and until what it
    added is there, while the other parts go on."""
    dq_desc, dk_desc, _ = descs
    heads = load_scalar(pad, AT.HEADS, 1)
    rank = load_scalar(pad, AT.RANK, 1)
    col = load_scalar(pad, AT.D_COL, 1)
    row = load_scalar(pad, AT.ROW, 1)
    length = load_scalar(pad, AT.LENGTH, 1)
    n = load_scalar(pad, AT.CHUNKS, 1)
    p_semaphores = counts_ptr + load_scalar(pad, AT.SEMAPHORE, 1)
    for i in range(n):
        i_c = n - 1 - i
        s = step_of(i, i_c, n, every) % c.ST
        t = row + i_c * c.C
        p_semaphore = p_semaphores + i_c * heads
        mbarrier.wait(barriers.grads_full.index(i % c.ST), (i // c.ST) & 1)
        if (i_c + 1) * c.C <= length:
            if c.GROUPED_HEADS:
                while semaphores.semaphore_acquire(p_semaphore) < rank:
                    pass
                if rank > 0:
                    semaphores.tma_reduce_add(dq_desc, [t, col], tiles.q.index(s))
                    semaphores.tma_reduce_add(dk_desc, [t, col], tiles.k.index(s))
                else:
                    sm90.copy_out(dq_desc, [t, col], tiles.q.index(s))
                    sm90.copy_out(dk_desc, [t, col], tiles.k.index(s))
            else:
                sm90.copy_out(dq_desc, [t, col], tiles.q.index(s))
                sm90.copy_out(dk_desc, [t, col], tiles.k.index(s))
        sm90.store_wait(0)
        mbarrier.arrive(barriers.empty.index(s), count=1)
        if c.GROUPED_HEADS:
            release_next(p_semaphore, rank, G)
    sm90.store_wait(0)


class Tiles(NamedTuple):
    """Buffers of what load_partition reads: ST stages of the first four, one of the others."""

    q: Any  # then dq; on the way to a block's end R
    k: Any  # then dk
    do: Any  # on the way to a block's end v
    beta_gate: Any
    r: Any
    w: Any
    state: Any
    a: Any  # scale tril(q k^T decay), of state_partition alone


class Buffers(NamedTuple):
    """Buffers that state_partition fills for dqk_partition, and sums of dqk_partition alone."""

    dstate: Any
    dv: Any
    b: Any
    m: Any
    diagonal: Any
    token_sums: Any
    state_products: Any


class Barriers(NamedTuple):
    """Barriers of the tiles, and of the buffers that state_partition fills."""

    full: Any  # q, k, do and beta_gate
    empty: Any
    r_full: Any
    r_empty: Any
    w_full: Any
    state_full: Any
    pairs_full: Any  # dstate, dv, b, m and diagonal of a chunk
    w_empty: Any  # of w and dstate
    state_empty: Any  # of state, dv, b, m and diagonal
    grads_full: Any  # dq and dk
    entry_full: Any  # S before a block
    recomputed: Any  # S and w of a block's chunks, in global memory


@gluon.jit
def locate_checkpoint_block(i, n, every):
    """The part that is next after i of n chunks have been gone back through: its first chunk, and
    how many it has."""
    first = gl.maximum(n - 1 - i, 0) // every * every
    return first, n - i - first


@gluon.jit
def load_partition(descs, beta_gates_ptr, tiles, barriers, pad, HV, every, c):
    q_desc, k_desc, v_desc, do_desc, r_desc, w_desc, states_desc, checkpoints_desc = descs
    nbytes: gl.constexpr = k_desc.block_type.nbytes + do_desc.block_type.nbytes
    row = load_scalar(pad, AT.ROW, 1)
    n = load_scalar(pad, AT.CHUNKS, 1)
    head = load_scalar(pad, AT.HEAD, 1)
    k_col = load_scalar(pad, AT.K_COL, 1)
    v_col = head * c.V
    r_col = head * c.C
    p_beta_gate, stride = delta_device.beta_gate_ptr(
        beta_gates_ptr, load_scalar(pad, AT.CHUNK, 1) * HV + head, HV, c.C, c.HAS_GATE
    )
    # where this program has S before the second chunk of a part
    scratch = load_scalar(pad, AT.WORKSPACE, 1) * ((every - 2) * c.V)
    m_step = HV * c.V  # from S before a part to that before the next
    num_blocks = gl.maximum(gl.cdiv(n, every), 1)
    checkpoint = load_scalar(pad, AT.CHECKPOINT, 1) + (num_blocks - 1) * m_step
    i = 0
    for block in range(num_blocks):
        first, count = locate_checkpoint_block(i, n, every)
        for at in range(2 * count):
            j = 2 * i + at
            s = j % c.ST
            back = at >= count
            i_c = gl.where(back, first + 2 * count - 1 - at, first + at)
            t = row + i_c * c.C
            b_beta_gate = common.load_beta_gate(p_beta_gate + i_c * stride, c.C, c.HAS_GATE)
            mbarrier.wait(barriers.empty.index(s), ((j // c.ST) & 1) ^ 1)
            if back:
                mbarrier.expect(barriers.full.index(s), nbytes + q_desc.block_type.nbytes)
                sm90.copy_in(k_desc, [t, k_col], barriers.full.index(s), tiles.k.index(s))
                sm90.copy_in(q_desc, [t, k_col], barriers.full.index(s), tiles.q.index(s))
                sm90.copy_in(do_desc, [t, v_col], barriers.full.index(s), tiles.do.index(s))
            else:
                b_r = square(tiles.q.index(s), tiles.r.index(0), c.C)
                mbarrier.expect(barriers.full.index(s), nbytes + r_desc.block_type.nbytes)
                sm90.copy_in(k_desc, [t, k_col], barriers.full.index(s), tiles.k.index(s))
                sm90.copy_in(v_desc, [t, v_col], barriers.full.index(s), tiles.do.index(s))
                sm90.copy_in(r_desc, [t, r_col], barriers.full.index(s), b_r)
            tiles.beta_gate.index(s).store(b_beta_gate)
            mbarrier.arrive(barriers.full.index(s), count=1)
            if at == 0:
                mbarrier.wait(barriers.state_empty.index(0), (i & 1) ^ 1)
                mbarrier.expect(barriers.entry_full.index(0), checkpoints_desc.block_type.nbytes)
                sm90.copy_in(
                    checkpoints_desc,
                    [checkpoint, 0],
                    barriers.entry_full.index(0),
                    tiles.state.index(0),
                )
            before = ((i + at - count) & 1) ^ 1
            if back:
                mbarrier.wait(barriers.r_empty.index(0), before)
                mbarrier.expect(barriers.r_full.index(0), r_desc.block_type.nbytes)
                sm90.copy_in(r_desc, [t, r_col], barriers.r_full.index(0), tiles.r.index(0))
            if at > count:  # those of the last chunk are there
                if at == count + 1:
                    mbarrier.wait(barriers.recomputed.index(0), block & 1)
                    semaphores.proxy_fence()
                mbarrier.wait(barriers.w_empty.index(0), before)
                mbarrier.expect(barriers.w_full.index(0), w_desc.block_type.nbytes)
                sm90.copy_in(w_desc, [t, v_col], barriers.w_full.index(0), tiles.w.index(0))
                mbarrier.wait(barriers.state_empty.index(0), before)
                mbarrier.expect(barriers.state_full.index(0), states_desc.block_type.nbytes)
                if i_c == first:
                    sm90.copy_in(
                        checkpoints_desc,
                        [checkpoint, 0],
                        barriers.state_full.index(0),
                        tiles.state.index(0),
                    )
                else:
                    s_row = scratch + (i_c - first - 1) * c.V
                    sm90.copy_in(
                        states_desc, [s_row, 0], barriers.state_full.index(0), tiles.state.index(0)
                    )
        i += count
        checkpoint -= m_step


@gluon.jit
def decay_of(
    rows, o_i, o_j,
    al: gl.constexpr, C: gl.constexpr, HAS_GATE: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """exp(G_i - G_j) where j < i, and if OWN 1 where j is i; else 0."""
    seen = o_i[:, None] >= o_j[None, :] if DIAGONAL else o_i[:, None] > o_j[None, :]
    if HAS_GATE:
        G_i = rows.slice(C, C).load(gl.SliceLayout(1, al))
        G_j = rows.slice(C, C).load(gl.SliceLayout(0, al))
        b_decay = gl.exp2(gl.where(seen, G_i[:, None] - G_j[None, :], float("-inf")))
    else:
        b_decay = gl.where(seen, 1.0, gl.zeros([C, C], gl.float32, al))
    return b_decay


@gluon.jit
def score_partition(
    os, ws, ys, rows, pair_buffers, none, scale,
    C: gl.constexpr, WARPS: gl.constexpr, HAS_GATE: gl.constexpr,
):  # fmt: skip
    """B and -M of a chunk, and what a token owes itself, into pair_buffers."""
    bs, ms, diags = pair_buffers
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 4 * C // WARPS, 16])
    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, C, gl.SliceLayout(0, al))
    zero = gl.zeros([C, C], gl.float32, al)
    b_b = warpgroup_mma(os, ws.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_m = warpgroup_mma(ys, ws.permute((1, 0)), zero, use_acc=False, is_async=True)
    b_decay = decay_of(rows, o_i + none, o_j, al, C, HAS_GATE, False)
    b_b, b_m = sm90.warpgroup_mma_wait(0, deps=(b_b, b_m))
    b_b *= scale
    # a sum for each half of the columns: over both it would take more memory, and barriers
    HALVES: gl.constexpr = WARPS // 4
    diag = gl.where((o_i + none)[:, None] == o_j[None, :], b_b, 0.0)
    diag = gl.sum(gl.reshape(diag, [C, HALVES, C // HALVES]), 2)
    diags.store(gl.reshape(gl.permute(diag, (1, 0)), [HALVES * C]))
    bs.store((b_b * b_decay).to(bs.dtype))
    ms.store((-b_m * b_decay).to(bs.dtype))


@gluon.jit
def dstate_partition(tiles, buffers, barriers, b_s, gone, count, length, n, scale, c):
    """Through a part from b_s, dS after it; dS before it."""
    al: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, c.WARPS // 4], [16, 4 * c.C // c.WARPS, 16]
    )
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [c.WARPS, 1], [16, c.K, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [c.WARPS, 1], [16, c.C, 16])
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    o_i = gl.arange(0, c.C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, c.C, gl.SliceLayout(0, al))
    zero_a = gl.zeros([c.C, c.C], gl.float32, al)
    zero = gl.zeros([c.V, c.C], gl.float32, xl)
    for at in range(count):
        i = gone + at
        j = 2 * gone + count + at
        s = j % c.ST
        num_rows = length - (n - 1 - i) * c.C
        rows = tiles.beta_gate.index(s)
        # 0, which no compiler knows: it would keep all addresses that two products have in common
        o = i >> 30
        o_x = i >> 29
        o_s = i >> 28
        o_y = i >> 27
        mbarrier.wait(barriers.full.index(s), (j // c.ST) & 1)
        mbarrier.wait(barriers.r_full.index(0), i & 1)
        if num_rows < c.C:
            common.zero_tail_rows(tiles.q.index(s), num_rows, c.C, c.K, c.WARPS)
            common.zero_tail_rows(tiles.k.index(s), num_rows, c.C, c.K, c.WARPS)
            common.zero_tail_rows(tiles.do.index(s), num_rows, c.C, c.V, c.WARPS)
            common.zero_tail_rows(tiles.r.index(o), num_rows, c.C, c.C, c.WARPS)
            sm90.fence_async_shared()
            gl.thread_barrier()
        b_a = warpgroup_mma(
            tiles.q.index(s), tiles.k.index(s).permute((1, 0)), zero_a, use_acc=False, is_async=True
        )
        b_decay = decay_of(rows, o_i + o, o_j, al, c.C, c.HAS_GATE, True) * scale
        b_a = sm90.warpgroup_mma_wait(0, deps=(b_a,))
        tiles.a.index(o).store((b_a * b_decay).to(tiles.k.dtype))
        mbarrier.wait(barriers.w_empty.index(0), (i & 1) ^ 1)
        buffers.dstate.index(o_x).store(b_s.to(tiles.k.dtype))
        sm90.fence_async_shared()
        gl.thread_barrier()
        # from shared memory, for all registers are taken
        b_x = warpgroup_mma(
            buffers.dstate.index(o_x),
            tiles.k.index(s + o_x).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        b_x = sm90.warpgroup_mma_wait(0, deps=(b_x,))
        if c.HAS_GATE:
            last = rows.slice(2 * c.C - 1, 1)
            G_j = rows.slice(c.C, c.C).load(gl.SliceLayout(0, xl))
            b_x *= gl.exp2(last.load(gl.SliceLayout(0, xl)) - G_j)[None, :]
        b_x = warpgroup_mma(
            tiles.do.index(s + o_s).permute((1, 0)), tiles.a.index(o_s), b_x, is_async=True
        )
        b_d = tiles.do.index(s + o_s).permute((1, 0)).load(xa).to(gl.float32) * scale
        if c.HAS_GATE:
            b_d *= gl.exp2(rows.slice(c.C, c.C).load(gl.SliceLayout(0, xa)))[None, :]
            b_s *= gl.exp2(last.load(gl.SliceLayout(0, sl)))[None, :]
        b_s = warpgroup_mma(b_d.to(tiles.k.dtype), tiles.q.index(s + o_s), b_s, is_async=True)
        b_x, b_s = sm90.warpgroup_mma_wait(0, deps=(b_x, b_s))
        b_x *= rows.slice(0, c.C).load(gl.SliceLayout(0, xl))[None, :]
        b_x = gl.convert_layout(b_x.to(tiles.k.dtype), xa)
        b_y = warpgroup_mma(b_x, tiles.r.index(o_s), zero, use_acc=False, is_async=True)
        b_y = sm90.warpgroup_mma_wait(0, deps=(b_y,))
        mbarrier.arrive(barriers.r_empty.index(0), count=1)
        b_lhs = -b_y
        if c.HAS_GATE:
            b_lhs *= gl.exp2(rows.slice(c.C, c.C).load(gl.SliceLayout(0, xl)))[None, :]
        b_lhs = gl.convert_layout(b_lhs.to(tiles.k.dtype), xa)
        b_s = warpgroup_mma(b_lhs, tiles.k.index(s + o_s), b_s, is_async=True)
        mbarrier.wait(barriers.state_empty.index(0), ((i + o_y) & 1) ^ 1)
        buffers.dv.index(o_y).permute((1, 0)).store(b_y.to(tiles.k.dtype))
        sm90.fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(barriers.w_full.index(0), (i + o_y) & 1)
        b_s = sm90.warpgroup_mma_wait(0, deps=(b_s,))
        pair_buffers = (buffers.b.index(o_y), buffers.m.index(o_y), buffers.diagonal)
        score_partition(
            tiles.do.index(s), tiles.w.index(o_y), buffers.dv.index(o_y), rows, pair_buffers, o_y,
            scale, c.C, c.WARPS, c.HAS_GATE,
        )  # fmt: skip
        sm90.fence_async_shared()
        mbarrier.arrive(barriers.pairs_full.index(0), count=1)
    return b_s


@gluon.jit
def state_partition(descs, states, tiles, buffers, barriers, pad, every, scale, c):
    """states: where dS comes from, goes to, and is while S is there."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [c.WARPS, 1], [16, c.K, 16])
    o_v = gl.arange(0, c.V, gl.SliceLayout(1, sl))
    o_k = gl.arange(0, c.K, gl.SliceLayout(0, sl))
    s_in_ptr, s_out_ptr, p_park = states
    block = 0
    going = True
    while going:
        gone = load_scalar(pad, AT.GONE, c.WARPS)
        n = load_scalar(pad, AT.CHUNKS, c.WARPS)
        first, count = locate_checkpoint_block(gone, n, every)
        store_scalars(pad, (count,), AT.COUNT, c.WARPS)
        if count > 0:
            mbarrier.wait(barriers.entry_full.index(0), block & 1)
        recompute_states(
            descs, tiles, buffers, barriers, load_scalar(pad, AT.ROW, c.WARPS),
            load_scalar(pad, AT.HEAD, c.WARPS) * c.V,
            load_scalar(pad, AT.WORKSPACE, c.WARPS) * ((every - 2) * c.V), gone, first, count,
            load_scalar(pad, AT.LENGTH, c.WARPS), c,
        )  # fmt: skip
        gone = load_scalar(pad, AT.GONE, c.WARPS)
        # 0, which no compiler knows: it would keep addresses
        none = (gone >> 30).to(gl.int64)
        if block == 0:
            i_entry = none + load_scalar(pad, AT.STATE_IN, c.WARPS)
            at_in = delta_device.StateRefs(s_in_ptr, None, i_entry * (c.K * c.V), None)
            b_d = delta_device.load_state(
                at_in, gl.zeros([c.V, c.K], gl.float32, sl), o_k + none, o_v, c.V, c.HAS_S_IN
            )
        else:
            i_state = load_scalar(pad, AT.STATE_IN if c.SPLIT else AT.WORKSPACE, c.WARPS)
            o_d = (none + i_state) * (c.K * c.V) + (o_v + none)[:, None] * c.K + o_k[None, :]
            b_d = gl.load(p_park + o_d)
        semaphores.wait_bulk_stores()
        gl.thread_barrier()
        mbarrier.arrive(barriers.recomputed.index(0), count=1)
        b_d = dstate_partition(
            tiles, buffers, barriers, b_d, gone, load_scalar(pad, AT.COUNT, c.WARPS),
            load_scalar(pad, AT.LENGTH, c.WARPS), load_scalar(pad, AT.CHUNKS, c.WARPS), scale, c,
        )  # fmt: skip
        gone = load_scalar(pad, AT.GONE, c.WARPS) + load_scalar(pad, AT.COUNT, c.WARPS)
        none = (gone >> 29).to(gl.int64)  # another, for nothing of the first is kept for this
        going = gone < load_scalar(pad, AT.CHUNKS, c.WARPS)
        if going:
            i_state = load_scalar(pad, AT.STATE_IN if c.SPLIT else AT.WORKSPACE, c.WARPS)
            o_d = (none + i_state) * (c.K * c.V) + (o_v + none)[:, None] * c.K + o_k[None, :]
            gl.store(p_park + o_d, b_d)
        else:
            to = load_scalar(pad, AT.STATE_OUT, c.WARPS)
            if to >= 0:
                at_out = delta_device.StateRefs(None, s_out_ptr, None, (none + to) * (c.K * c.V))
                delta_device.store_state(at_out, b_d, 0, o_k + none, o_v + none, c.V, c.HAS_S_OUT)
        gl.thread_barrier()  # all have read what it was
        store_scalars(pad, (gone,), AT.GONE, c.WARPS)
        gl.thread_barrier()
        block += 1


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "G", "segment", "every", "workspaces"])
def delta_chunk_bwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, K]
    k_desc,
    v_desc,  # [tokens, HV * V] by [C, V]
    do_desc,
    r_desc,  # [tokens, HV * C] by [C, C]
    dv_desc,  # [tokens, HV * V] by [C, V]: w, in whose place dv comes
    states_desc,  # [workspaces * (every - 2) * V, K] by [V, K]: S before a part's chunks
    checkpoints_desc,  # [checkpoints * HV * V, K] by [V, K]: S before each part
    dq_desc,  # [tokens, HV / G * K] by [C, K]
    dk_desc, dq_ptr, dk_ptr, dv_ptr,
    park_ptr,  # [workspaces, V, K]: dS, while S is there; if SPLIT it goes where s_in was
    beta_gates_ptr,  # [chunks, HV, ROWS, C]: beta and G
    dbeta_ptr,  # [tokens, HV]
    dg_ptr,
    s_in_ptr,  # [N, HV, K, V]: gradient of the state after a sequence; of segments [.., HV, K, V]
    s_out_ptr,  # [N, HV, K, V]: of that before it
    cu_ptr,  # [N + 1]
    counts_ptr,  # [workspaces], zeros: which of them a program has; then if GROUPED_HEADS
    # [chunks, HV / G], zeros: how many of G heads have added theirs
    scale, T, N, HV, H, G, segment, every, workspaces,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, ST: gl.constexpr,
    WARPS: gl.constexpr, HAS_GATE: gl.constexpr, HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr, GROUPED_HEADS: gl.constexpr, REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """grid (HV * N,), or if SPLIT as many for each segment, of `segment` tokens; WARPS = V / 16
    warps: one program scans one head of a sequence, or of a segment of it.

    In parts of `every` chunks, of which a segment has a whole number. GROUPED_HEADS: G, which add
    dq and dk up, is more than 1: one that waits does so for the program before it, which has begun.
    There are workspaces for all programs that run at a time, or nearly so.
    """
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    qs = gl.allocate_shared_memory(dtype, [ST, C, K], q_desc.layout)
    ks = gl.allocate_shared_memory(dtype, [ST, C, K], k_desc.layout)
    os = gl.allocate_shared_memory(dtype, [ST, C, V], do_desc.layout)
    gs = gl.allocate_shared_memory(gl.float32, [ST, (1 + HAS_GATE) * C], plain)
    rs = gl.allocate_shared_memory(dtype, [1, C, C], r_desc.layout)
    ws = gl.allocate_shared_memory(dtype, [1, C, V], dv_desc.layout)
    ss = gl.allocate_shared_memory(dtype, [1, V, K], states_desc.layout)
    a_s = gl.allocate_shared_memory(dtype, [1, C, C], r_desc.layout)
    ds = gl.allocate_shared_memory(dtype, [1, V, K], states_desc.layout)
    ys = gl.allocate_shared_memory(dtype, [1, C, V], dv_desc.layout)
    bs = gl.allocate_shared_memory(dtype, [1, C, C], r_desc.layout)
    ms = gl.allocate_shared_memory(dtype, [1, C, C], r_desc.layout)
    diags = gl.allocate_shared_memory(gl.float32, [WARPS // 4 * C], plain)
    # of a chunk's tokens k . dk', and what all gates before the end get of them; sum(S * dS')
    sum_buffers = gl.allocate_shared_memory(gl.float32, [1 + HAS_GATE, C], plain)
    zs = gl.allocate_shared_memory(gl.float32, [ROWS], plain)
    pad = alloc_scalars(AT.COUNT + 1)
    full = common.alloc_mbarriers(2, ST)
    empty = common.alloc_mbarriers(2, ST)
    r_full = common.alloc_mbarriers(1, 1)
    r_empty = common.alloc_mbarriers(1, 1)
    w_full = common.alloc_mbarriers(1, 1)
    s_full = common.alloc_mbarriers(1, 1)
    done = common.alloc_mbarriers(1, 1)
    early = common.alloc_mbarriers(1, 1)
    late = common.alloc_mbarriers(1, 1)
    written = common.alloc_mbarriers(1, ST)
    entry_full = common.alloc_mbarriers(1, 1)
    recomputed = common.alloc_mbarriers(1, 1)
    pid = gl.program_id(0)
    i_h = pid % HV
    row, length, first, i_n, i_s, _ = common.locate_segment(
        cu_ptr, pid // HV, T, N, segment, C, PACKED, SPLIT
    )
    n = gl.cdiv(length, C)
    checkpoint = delta_device.checkpoint_index(i_n, row - i_s * segment, T, every, C, PACKED)
    to = pid
    if SPLIT:
        if (n == 0) & (i_s != 0):
            return
        checkpoint += i_s * (segment // (every * C))
        to = gl.where(i_s == 0, i_n * HV + i_h, -1)
    workspace = semaphores.lock_workspace(counts_ptr, pid % workspaces, workspaces)
    chunk = gl.where(n > 0, first, 0)
    k_col = i_h // (HV // H) * K
    semaphore = workspaces + chunk * (HV // G) + i_h // G
    store_scalars(
        pad,
        (workspace, row, length, n, i_h, chunk, (checkpoint * HV + i_h) * V, k_col),
        AT.WORKSPACE,
        WARPS,
    )
    store_scalars(pad, (i_h // G * K, HV // G, i_h % G, semaphore, pid, to, 0), AT.D_COL, WARPS)
    tiles = Tiles(qs, ks, os, gs, rs, ws, ss, a_s)
    buffers = Buffers(ds, ys, bs, ms, diags, sum_buffers, zs)
    barriers = Barriers(
        full, empty, r_full, r_empty, w_full, s_full, done, early, late, written, entry_full,
        recomputed,
    )  # fmt: skip
    p_dg = dg_ptr if HAS_GATE else dbeta_ptr  # for only the first part takes None
    descs = (dq_desc, dk_desc, dv_desc)
    states = (s_in_ptr, s_out_ptr, s_in_ptr if SPLIT else park_ptr)
    c: gl.constexpr = Constants(
        K, V, BK, C, ST, WARPS, HAS_GATE, HAS_S_IN, HAS_S_OUT, SPLIT, GROUPED_HEADS
    )
    gl.warp_specialize(
        [
            (state_partition, (
                (dv_desc, states_desc), states, tiles, buffers, barriers, pad, every, scale, c)),
            (dqk_partition, (
                descs, (dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, p_dg), counts_ptr, tiles, buffers,
                barriers, pad, HV, G, every, scale, c)),
            (load_partition, (
                (q_desc, k_desc, v_desc, do_desc, r_desc, dv_desc, states_desc, checkpoints_desc),
                beta_gates_ptr, tiles, barriers, pad, HV, every, c)),
            (store_partition, (descs, counts_ptr, tiles, barriers, pad, HV, G, every, c)),
        ],
        [4, 1, 1],
        [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
    semaphores.unlock_workspace(counts_ptr + load_scalar(pad, AT.WORKSPACE, WARPS))
