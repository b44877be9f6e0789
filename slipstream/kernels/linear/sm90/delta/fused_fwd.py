"""The delta rule's forward on sm_90 in one kernel, for calls of more heads and sequences than would
run at once: it reads q, k, v, g and beta once.

As KDA's (../dplr/fused_fwd.py), in blocks of 64 tokens. But decays multiply scores and rows of
tokens instead of q and k, so that no gate is too strong, and chunks have 32 tokens. With G_i the
sum of gates in base 2 from a chunk's start to token i, and G_C of all of them,

    A = tril(2^(G_i - G_j) k k^T, -1) beta              M = (I + A)^-1
    P = tril(2^(G_i - G_j) q k^T) scale beta            w = M (v - 2^G (k S))
    o = scale 2^G (q S) + P w                           S <- 2^G_C S + k^T (2^(G_C - G) beta w)

Inverses of 16 tokens are by substitution in float32; the block between two of them is the product
-M_1 A M_0 in 16 bits, as M is. Backward wants those of blocks of 64 tokens, R (solve_tril.py), with
M on their diagonals: where they are made M comes from there. `lines` has for each token -2^G,
beta 2^(G_C - G), scale 2^G and 2^G_C.

A program takes one head after the other, 128 columns of V of one: what it prepares is of the next
while the last blocks of this one are scanned.

    prepare_partition, 4 warps, of even, of odd blocks      scan_partition, 4 warps, of 64 columns
      loads q, k, R, g, beta one ahead, v    -- made ---->    w, o, S of two chunks
      M, P, lines                            <-- empty ---

    buffers           stages             arrivals a phase: full / empty
    q, k, m           ST                 1 (TMA) / 2, a scan_partition each
    p, lines          MADE               made / as these
    v                 2                  1 (TMA) / as these
"""

from collections import namedtuple
from typing import Any, NamedTuple

from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.common import BASE, NB
from slipstream.kernels.linear.sm90.delta import delta_device, solve_tril
from slipstream.kernels.linear.sm90.dplr import fused_fwd as kda
from slipstream.kernels.linear.triton.scalar_decay.device import LOG2E, LOWEST_GATE
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

Constants = namedtuple(
    "Constants", "K V C STEP ST MADE LINES HAS_R HAS_GATE HAS_S_IN HAS_S_OUT PACKED SAVES"
)


class Tiles(NamedTuple):
    """q and k by halves of the channels, v and o by tiles of V."""

    q: Any  # [ST * 2, 64, 64]
    k: Any
    v: Any  # [2 * 2, 64, 64], as o
    o: Any
    m: Any  # [ST, 2 * C, BASE]: columns of blocks of M; before, what `substitute` reads
    p: Any  # [MADE, 2 * C, BASE], of P
    lines: Any  # [MADE, LINES * NB, BASE], float32


class Barriers(NamedTuple):
    full: Any  # [ST], as made and empty
    made: Any
    empty: Any
    v_full: Any  # [2]


class Head(NamedTuple):
    """One that a program scans, its `count`-th."""

    count: Any
    exists: Any
    first: Any  # number of its first block, of all that the program scans
    n: Any  # blocks
    row: Any
    length: Any
    i_h: Any  # of 128 columns of V
    i_n: Any


@gluon.jit
def head_of(sizes, count, first, c):
    """Heads and sequences, the longest first, are dealt out from the first program to the last and
    back again."""
    cu_ptr, T, N, HV, _ = sizes
    HV *= c.V // 128
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    # shuffles: ptxas would take the loops for divergent, and serialise their products
    at = kda.known_uniform(count * programs + gl.where(count % 2 == 0, pid, programs - 1 - pid))
    i_h, i_n, row, length, _, n = common.program_coords(
        cu_ptr, T, N, HV, T, c.C, c.PACKED, False, gl.minimum(at, N * HV - 1)
    )
    n = kda.known_uniform(n)
    return Head(count, at < N * HV, kda.known_uniform(first), n, row, length, i_h, i_n)


@gluon.jit
def head_with(sizes, head, i, c):
    """That of block i, which is not before `head`."""
    while head.exists & (i >= head.first + head.n):
        head = head_of(sizes, head.count + 1, head.first + head.n, c)
    return head


@gluon.jit
def diagonal_and_front(b, i_n, wl: gl.constexpr):
    """Of [C, C] blocks of 16 x 16: those on the diagonal, and in front of the second in a chunk."""
    b_0, b_1, b_2, b_3 = common.by_blocks(b, wl)
    b_diag = gl.where(i_n == 0, b_0, gl.where(i_n == 1, b_1, gl.where(i_n == 2, b_2, b_3)))
    return b_diag, gl.where(i_n == 1, b_0, b_2)


@gluon.jit
def put_chunks(tile, b_diag, b_front, odd):
    """Blocks [NB, BASE, BASE] as the first and the last 16 columns of rows of two chunks."""
    kda.put(tile.index(0), gl.where(odd, b_front, b_diag), NB * BASE, BASE)
    kda.put(tile.index(1), gl.where(odd, b_diag, 0.0), NB * BASE, BASE)


@gluon.jit
def clear_ones(tile, rows, first, c):
    """Zeros on the diagonal of columns of M, of a chunk's `first` and on, and in `rows` and on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    o_t = gl.arange(0, c.C, gl.SliceLayout(1, layout))[:, None]
    o_j = gl.arange(0, BASE, gl.SliceLayout(0, layout))[None, :]
    stays = (o_t < rows) & (o_t % c.STEP != first + o_j)
    b = tile.load(layout)
    tile.store(gl.where(stays, b, gl.zeros_like(b)))


@gluon.jit
def times(lhs, rhs, b):
    """b and left by right, blocks [NB, BASE, BASE]."""
    wb: gl.constexpr = gl.DotOperandLayout(1, b.type.layout, 2)
    every = gl.zeros([NB, BASE, BASE], rhs.dtype, wb)
    _, rhs = gl.broadcast(every, rhs.load(wb))
    return common.mma_v2(lhs, rhs, b)


@gluon.jit
def load_block(q_desc, k_desc, r_desc, tiles, barriers, sizes, head, i, c):
    """q and k of a block, and if HAS_R what R has of its chunks, M."""
    _, _, _, HV, H = sizes
    STEPS: gl.constexpr = c.C // c.STEP
    s = i % c.ST
    full = barriers.full.index(s)
    row = head.row + (i - head.first) * c.C
    i_h = head.i_h // (c.V // 128)
    column = i_h // (HV // H) * c.K
    nbytes: gl.constexpr = c.K // 32 * q_desc.block_type.nbytes
    if c.HAS_R:
        mbarrier.expect(full, nbytes + 2 * STEPS * r_desc.block_type.nbytes)
        m = tiles.m.index(s)._reinterpret(r_desc.dtype, [2 * STEPS, c.STEP, BASE], r_desc.layout)
        for h in gl.static_range(2 * STEPS):
            at = h % STEPS * c.STEP
            to = [row + at, i_h * c.C + at + h // STEPS * BASE]
            sm90.copy_in(r_desc, to, full, m.index(h))
    else:
        mbarrier.expect(full, nbytes)
    for h in gl.static_range(c.K // 64):
        sm90.copy_in(q_desc, [row, column + 64 * h], full, tiles.q.index(2 * s + h))
        sm90.copy_in(k_desc, [row, column + 64 * h], full, tiles.k.index(2 * s + h))


@gluon.jit
def load_gates(g_ptr, beta_ptr, HV, head, i, c):
    """beta and gates of a block's chunks [C / STEP, STEP], which are a warp's; 0 where there are no
    tokens."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    o_t = gl.arange(0, c.C // c.STEP, gl.SliceLayout(1, layout))[:, None] * c.STEP
    o_t = o_t + gl.arange(0, c.STEP, gl.SliceLayout(0, layout))[None, :]
    row = head.row + (i - head.first) * c.C
    o = row.to(gl.int64) * HV + head.i_h // (c.V // 128)
    m = o_t < gl.where(head.exists, head.row + head.length - row, 0)
    b_beta = gl.load(beta_ptr + o + o_t * HV, mask=m, other=0.0).to(gl.float32)
    b_g = 0 * b_beta
    if c.HAS_GATE:
        b_g = gl.load(g_ptr + o + o_t * HV, mask=m, other=0.0).to(gl.float32)
    return b_beta, common.at_least(b_g, LOWEST_GATE) * LOG2E


@gluon.jit
def prepare_partition(given, tiles, room, barriers, sizes, scale, half: gl.constexpr, c):
    """M, P and `lines` of even or odd blocks. room: for inverses of 16 tokens, what is left of
    them, and gates."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wl: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    wa: gl.constexpr = gl.DotOperandLayout(0, wl, 2)
    along_i: gl.constexpr = gl.SliceLayout(2, wl)
    along_j: gl.constexpr = gl.SliceLayout(1, wl)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.C, BASE], tiles.m.dtype)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    i_n = gl.arange(0, NB, gl.SliceLayout(1, along_i))[:, None, None]
    o_i = gl.arange(0, BASE, gl.SliceLayout(0, along_i))[None, :, None]
    o_j = gl.arange(0, BASE, gl.SliceLayout(0, along_j))[None, None, :]
    odd = i_n % 2 == 1
    below = o_i > o_j
    zero = gl.zeros([c.C, c.C], gl.float32, al)
    none = gl.zeros([NB, BASE, BASE], gl.float32, wl)
    sums, pair = room
    xs, fronts = pair
    q_desc, k_desc, v_desc, r_desc, g_ptr, beta_ptr = given
    _, T, _, HV, _ = sizes
    chunks = sums._reinterpret(gl.float32, [4, c.C // c.STEP, c.STEP], line)
    fronts_G, sums_G = sums.slice(0, NB), sums.slice(NB, NB)
    fronts_beta, betas = sums.slice(2 * NB, NB), sums.slice(3 * NB, NB)
    none_yet = T * 0  # no constant: a loop carries it
    head = head_with(sizes, head_of(sizes, none_yet, none_yet, c), half, c)
    b_beta, b_g = load_gates(g_ptr, beta_ptr, HV, head, half, c)
    among: gl.constexpr = gl.SliceLayout(0, b_g.type.layout)
    o_first = gl.zeros_like(b_g).to(gl.int32) + gl.arange(0, c.STEP, among)[None, :] % BASE
    if head.exists:
        load_block(q_desc, k_desc, r_desc, tiles, barriers, sizes, head, half, c)
    i = none_yet + half
    more = head.exists
    while more:
        s = i % c.ST
        t = (i - head.first) * c.C
        rows = head.length - t
        v_row = head.row + t
        v_column = head.i_h * 128
        m = tiles.m.index(s)._reinterpret(tiles.m.dtype, [2, c.C, BASE], small)
        p = tiles.p.index(i % c.MADE)._reinterpret(tiles.m.dtype, [2, c.C, BASE], small)
        block = tiles.m.index(s)._reinterpret(gl.float32, [BASE, NB, BASE], plain)
        made = tiles.lines.index(i % c.MADE)
        lines = made._reinterpret(gl.float32, [c.LINES, c.C // c.STEP, c.STEP], line)
        # now, and not where most is in registers
        head = head_with(sizes, head, i + 2, c)
        b_all = gl.sum(b_g, 1)[:, None]
        b_g = gl.associative_scan(b_g, 1, solve_tril.add)
        # those of a chunk's first 16 tokens, for its last 16 too
        chunks.index(0).store(gl.gather(b_g, o_first, 1))
        chunks.index(1).store(b_g)
        chunks.index(2).store(gl.gather(b_beta, o_first, 1))
        chunks.index(3).store(b_beta)
        mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)
        if rows < c.C:
            for h in range(c.K // 64):
                kda.clear_after(tiles.q.index(2 * s + h), rows, c)
                kda.clear_after(tiles.k.index(2 * s + h), rows, c)
            sm90.fence_async_shared()
        if c.HAS_R:
            for h in gl.static_range(2):
                clear_ones(m.index(h), rows, h * BASE, c)
        gl.thread_barrier()
        k_0, k_1 = tiles.k.index(2 * s), tiles.k.index(2 * s + 1)
        if not c.HAS_R:
            b_a = sm90.warpgroup_mma_wait(0, deps=(times_tokens(k_0, k_1, k_0, k_1, zero, c),))
            b_x, b_front = diagonal_and_front(b_a, i_n, wl)
        b_i = sums_G.load(along_i)[:, :, None]
        b_decay = solve_tril.fast_exp2(b_i - sums_G.load(along_j)[:, None, :])
        b_decay *= betas.load(along_j)[:, None, :]
        b_past = solve_tril.fast_exp2(b_i - fronts_G.load(along_j)[:, None, :])
        b_past *= fronts_beta.load(along_j)[:, None, :]
        if not c.HAS_R:
            b_x = gl.where(below, b_x * b_decay, 0.0)
            front = common.tile_of(fronts, 0, False)
            front.store(gl.where(odd, b_front * b_past, 0.0).to(xs.dtype))
        b_a = times_tokens(tiles.q.index(2 * s), tiles.q.index(2 * s + 1), k_0, k_1, zero, c)
        if i >= c.MADE:  # a block before has left m, p and lines
            mbarrier.wait(barriers.empty.index((i - c.MADE) % c.ST), ((i - c.MADE) // c.ST) & 1)
        b_start = solve_tril.fast_exp2(b_g)
        lines.index(0).store(-b_start)
        lines.index(1).store(b_beta * solve_tril.fast_exp2(b_all - b_g))
        lines.index(2).store(b_start * scale)
        lines.index(3).store(solve_tril.fast_exp2(b_all + 0 * b_g))
        # of the next block: loads take long
        b_beta, b_g = load_gates(g_ptr, beta_ptr, HV, head, i + 2, c)
        b_diag, b_front = diagonal_and_front(sm90.warpgroup_mma_wait(0, deps=(b_a,)), i_n, wl)
        b_diag = gl.where(o_i >= o_j, b_diag * b_decay * scale, 0.0)
        put_chunks(p, b_diag, b_front * b_past * scale, odd)
        if i >= 2:  # the block before has left where v and the next q and k go
            mbarrier.wait(barriers.empty.index((i - 2) % c.ST), ((i - 2) // c.ST) & 1)
        gl.thread_barrier()
        v_full = barriers.v_full.index(half)
        mbarrier.expect(v_full, 2 * v_desc.block_type.nbytes)
        for h in gl.static_range(2):
            sm90.copy_in(v_desc, [v_row, v_column + 64 * h], v_full, tiles.v.index(2 * h + half))
        if head.exists:
            load_block(q_desc, k_desc, r_desc, tiles, barriers, sizes, head, i + 2, c)
        if not c.HAS_R:  # while the scan is at the block before, and the copies come
            b_x = common.substitute(b_x, block)
            x = common.tile_of(xs, 0, True)
            x.store(b_x.to(xs.dtype))
            gl.thread_barrier()
            b_x = x.load(wa)
            b_front = times(b_x, front, none)
            b_front = gl.convert_layout((-b_front).to(xs.dtype), wa)
            b_front = times(b_front, common.tile_of(xs, 1, True), none).to(xs.dtype)
            put_chunks(m, gl.where(below, gl.convert_layout(b_x, wl), 0.0), b_front, odd)
        sm90.fence_async_shared()
        mbarrier.arrive(barriers.made.index(s), count=1)
        i += 2
        more = head.exists


@gluon.jit
def times_tokens(x_0, x_1, y_0, y_1, zero, c):
    """x y^T, each by halves of the channels, on its way; of 64 channels the first half is all."""
    b = warpgroup_mma(x_0, y_0.permute((1, 0)), zero, use_acc=False, is_async=True)
    if c.K > 64:
        b = warpgroup_mma(x_1, y_1.permute((1, 0)), b, is_async=True)
    return b


@gluon.jit
def narrow(b, like):
    """b in like's 16 bits, made where this stands: between products ptxas would wait for those
    before."""
    NAME: gl.constexpr = "bf16x2" if like.dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + NAME + ".f32 $0, $2, $1;",
        "=r,r,r",
        [b],
        dtype=like.dtype,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def times_chunk(b_x, tiles, j, b, sa: gl.constexpr):
    """b and b_x [64, STEP] by a chunk's M or P, of which there are 16 columns a tile."""
    b_0, b_1 = gl.split(gl.permute(gl.reshape(b_x, [64, 2, BASE]), (0, 2, 1)))
    b_0 = gl.convert_layout(b_0, sa)
    b_1 = gl.convert_layout(b_1, sa)
    b = warpgroup_mma(b_0, tiles.index(j).permute((1, 0)), b, is_async=True)
    return warpgroup_mma(b_1, tiles.index(2 + j).permute((1, 0)), b, is_async=True)


@gluon.jit
def scan_partition(outputs, tiles, barriers, states, sizes, tile: gl.constexpr, c):
    o_desc, o_ptr = outputs
    s_in_ptr, s_out_ptr, saved_desc, every = states
    _, T, _, HV, _ = sizes
    TILES: gl.constexpr = c.V // 128
    STEP: gl.constexpr = c.STEP
    STEPS: gl.constexpr = c.C // STEP
    dtype: gl.constexpr = tiles.k.dtype
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    xl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    sa: gl.constexpr = gl.DotOperandLayout(0, xl, 2)
    xa: gl.constexpr = gl.DotOperandLayout(0, sl, 2)
    along: gl.constexpr = gl.SliceLayout(0, sl)
    tokens: gl.constexpr = gl.SliceLayout(0, xl)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, 64], dtype)
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, BASE], dtype)
    o_v = gl.arange(0, 64, gl.SliceLayout(1, sl)) + tile * 64
    o_k = gl.arange(0, 64, along)
    zero = gl.zeros([64, STEP], gl.float32, xl)
    out = tiles.o.index(tile)._reinterpret(dtype, [STEPS, STEP, 64], wide)
    head = head_of(sizes, T * 0, T * 0, c)
    while head.exists:
        o_state = delta_device.state_offset(head.i_n, head.i_h // TILES, HV, c.K, c.V)
        o_state += head.i_h % TILES * 128
        refs = delta_device.StateRefs(s_in_ptr, s_out_ptr, o_state, o_state)
        # all transposed: rows along V, so that S and u go on as left operands; S by halves of K
        none = gl.zeros([64, 64], gl.float32, sl)
        b_s0 = delta_device.load_state(refs, none, o_k, o_v, c.V, c.HAS_S_IN)
        b_s1 = delta_device.load_state(refs, none, 64 + o_k, o_v, c.V, c.HAS_S_IN and c.K > 64)
        if c.SAVES:
            due = head.length * 0
            number = delta_device.checkpoint_index(head.i_n, head.row, T, every, c.C, c.PACKED)
            row_saved = (number * HV * TILES + head.i_h) * 128 + tile * 64
        for n in range(head.n):
            if c.SAVES:  # noqa: SIM102
                if n == due:
                    for h in gl.static_range(c.K // 64):
                        sm90.store_wait(0)
                        tiles.o.index(tile).store((b_s1 if h else b_s0).to(dtype))
                        sm90.fence_async_shared()
                        gl.thread_barrier()
                        sm90.copy_out(saved_desc, [row_saved, 64 * h], tiles.o.index(tile))
                    due += every
                    row_saved += HV * TILES * 128
            i = head.first + n
            s = i % c.ST
            at = 2 * tile + i % 2
            row = head.row + n * c.C
            rows = head.length - n * c.C
            mbarrier.wait(barriers.v_full.index(i % 2), (i // 2) & 1)
            if rows < c.C:
                kda.clear_after(tiles.v.index(at), rows, c)
                gl.thread_barrier()
            mbarrier.wait(barriers.made.index(s), (i // c.ST) & 1)
            k_0 = tiles.k.index(2 * s)._reinterpret(dtype, [STEPS, STEP, 64], wide)
            k_1 = tiles.k.index(2 * s + 1)._reinterpret(dtype, [STEPS, STEP, 64], wide)
            q_0 = tiles.q.index(2 * s)._reinterpret(dtype, [STEPS, STEP, 64], wide)
            q_1 = tiles.q.index(2 * s + 1)._reinterpret(dtype, [STEPS, STEP, 64], wide)
            v = tiles.v.index(at)._reinterpret(dtype, [STEPS, STEP, 64], wide)
            m = tiles.m.index(s)._reinterpret(dtype, [2 * STEPS, STEP, BASE], small)
            p = tiles.p.index(i % c.MADE)._reinterpret(dtype, [2 * STEPS, STEP, BASE], small)
            # numbers of tokens by chunks, and one by one
            made = tiles.lines.index(i % c.MADE)
            lines = made._reinterpret(gl.float32, [c.LINES * STEPS, STEP], line)
            ends = made._reinterpret(gl.float32, [c.LINES * c.C, 1], line)
            sm90.store_wait(0)
            for j in range(STEPS):
                b_0 = gl.convert_layout(b_s0.to(dtype), sa)
                b_1 = b_0
                if c.K > 64:
                    b_1 = gl.convert_layout(narrow(b_s1, tiles.k), sa)
                b_u = times_tokens(b_0, b_1, k_0.index(j), k_1.index(j), zero, c)
                b_o = times_tokens(b_0, b_1, q_0.index(j), q_1.index(j), zero, c)
                b_v = v.index(j).permute((1, 0)).load(xl).to(gl.float32)
                b_end = ends.index((3 * STEPS + j) * STEP).load(along)[None, :]
                b_start = lines.index(j).load(tokens)[None, :]
                b_u, b_s0, b_s1 = sm90.warpgroup_mma_wait(1, deps=(b_u, b_s0, b_s1))
                b_w = gl.fma(b_u, b_start, b_v)
                b_u = times_chunk(b_w.to(dtype), m, j, b_w, sa)
                # before the wait, which hides them
                b_rest = lines.index(STEPS + j).load(tokens)[None, :]
                b_read = lines.index(2 * STEPS + j).load(tokens)[None, :]
                b_s0 *= b_end
                if c.K > 64:
                    b_s1 *= b_end
                b_o = sm90.warpgroup_mma_wait(2, deps=(b_o,)) * b_read
                b_u = sm90.warpgroup_mma_wait(0, deps=(b_u,))
                b_x = gl.convert_layout((b_u * b_rest).to(dtype), xa)
                b_s0 = warpgroup_mma(b_x, k_0.index(j), b_s0, is_async=True)
                if c.K > 64:
                    b_s1 = warpgroup_mma(b_x, k_1.index(j), b_s1, is_async=True)
                b_o = times_chunk(b_u.to(dtype), p, j, b_o, sa)
                b_s0, b_s1 = sm90.warpgroup_mma_wait(2, deps=(b_s0, b_s1))
                b_o = sm90.warpgroup_mma_wait(0, deps=(b_o,))
                out.index(j).permute((1, 0)).store(b_o.to(dtype))
            sm90.fence_async_shared()
            gl.thread_barrier()
            column = head.i_h * 128 + 64 * tile
            o = tiles.o.index(tile)
            common.store_tile(o_desc, o_ptr, o, row, column, HV * c.V, rows, c.C, 64)
            mbarrier.arrive(barriers.empty.index(s), count=1)
        # 0, which no compiler knows: it would keep the addresses of the state before
        zero_bits = head.length >> 30
        delta_device.store_state(refs, b_s0, zero_bits, o_k, o_v, c.V, c.HAS_S_OUT)
        if c.K > 64:
            delta_device.store_state(refs, b_s1, zero_bits, 64 + o_k, o_v, c.V, c.HAS_S_OUT)
        head = head_of(sizes, head.count + 1, head.first + head.n, c)
    sm90.store_wait(0)


@gluon.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "every"])
def delta_fused_fwd_sm90_kernel(
    q_desc,  # [tokens, H * K] by [64, 64]
    k_desc,
    v_desc,  # [tokens, HV * V] by [64, 64]
    r_desc,  # [tokens, HV * C] by [32, BASE], from solve_tril.py, or None
    o_desc,
    saved_desc,  # [checkpoints * HV * V, K] by [64, 64]: S before every so many chunks, or None
    o_ptr,
    g_ptr,  # [tokens, HV]
    beta_ptr,
    s_in_ptr,  # [N, HV, K, V]
    s_out_ptr,
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H, every,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, HAS_GATE: gl.constexpr,
    HAS_S_IN: gl.constexpr, HAS_S_OUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """grid (at most HV * N,), 4 warps: a program scans one head of a sequence after the other."""
    ST: gl.constexpr = 4
    MADE: gl.constexpr = 3
    LINES: gl.constexpr = 4  # numbers of a token
    HAS_R: gl.constexpr = r_desc is not None
    SAVES: gl.constexpr = saved_desc is not None
    c: gl.constexpr = Constants(
        K, V, C, 32, ST, MADE, LINES, HAS_R, HAS_GATE, HAS_S_IN, HAS_S_OUT, PACKED, SAVES
    )
    dtype: gl.constexpr = k_desc.dtype
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BASE], dtype)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    q = gl.allocate_shared_memory(dtype, [2 * ST, 64, 64], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [2 * ST, 64, 64], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [4, 64, 64], v_desc.layout)
    o = gl.allocate_shared_memory(dtype, [2, 64, 64], o_desc.layout)
    m = gl.allocate_shared_memory(dtype, [ST, 2 * C, BASE], small)
    p = gl.allocate_shared_memory(dtype, [MADE, 2 * C, BASE], small)
    lines = gl.allocate_shared_memory(gl.float32, [MADE, LINES * NB, BASE], line)
    sums = gl.allocate_shared_memory(gl.float32, [2, 4 * NB, BASE], line)
    even, odd = (sums.index(0), common.tiles(1, dtype)), (sums.index(1), common.tiles(1, dtype))
    tiles = Tiles(q, k, v, o, m, p, lines)
    full, made = common.alloc_mbarriers(1, ST), common.alloc_mbarriers(1, ST)
    barriers = Barriers(full, made, common.alloc_mbarriers(2, ST), common.alloc_mbarriers(1, 2))
    sizes = cu_ptr, T, N, HV, H
    given = q_desc, k_desc, v_desc, r_desc, g_ptr, beta_ptr
    outputs = o_desc, o_ptr
    states = s_in_ptr, s_out_ptr, saved_desc, every
    gl.warp_specialize(
        [
            (scan_partition, (outputs, tiles, barriers, states, sizes, 0, c)),
            (scan_partition, (outputs, tiles, barriers, states, sizes, 1, c)),
            (prepare_partition, (given, tiles, even, barriers, sizes, scale, 0, c)),
            (prepare_partition, (given, tiles, odd, barriers, sizes, scale, 1, c)),
        ],
        [4, 4, 4],
        [160, 96, 96],
    )  # fmt: skip
