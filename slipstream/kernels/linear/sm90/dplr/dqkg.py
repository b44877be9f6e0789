"""Per-channel decay on sm_90, delta rule or free a and b: gradients of q, k, a, b and the gates.

The sums of triton/dplr/dqkg.py. With r = q P, s = a P_prev (delta: -beta k P), w = b N and
u = k N, in 16 bits,

    dr = exp(early) scale do S^T + dqb w + dqk u        dq = P (dr + own w + own' u)
    ds = exp(early) y S^T        + dab w + dak u        da = P_prev ds
    dw = exp(late) x dS'^T + dqb^T r + dab^T s          db = N (dw + own r)
    du = exp(late) v dS'^T + dqk^T r + dak^T s          dk = N (du + own' r)

P and N are relative to the middle of the chunk where its halves decay by no more than 2^-LIMIT of
wy.py (whole): P = exp(G - h) and N = exp(h - G), with h the gates of the first half, and a score's
gradient takes one product. In other chunks they are relative to half of what a quarter, 16 tokens,
decays by: G from the quarter's start and h half of its gates. Channels are columns here, so that
what a quarter wrote comes to the next ones by a factor a channel: dr and ds take what comes of the
first quarter, then rows of later ones are multiplied by exp(h + h'), h' of the quarter after it,
then comes the second quarter, and so on; dw and du begin with what the last quarter read. Such a
factor may be less than float32 has, and takes two steps. early and late are what the first and the
last half decay by, or half of the first and of the last quarter. own and own' are the gradients of
the scores of pairs (i, i), whose P N is 1, and

    dg_t = z + sum over i >= t of (r dr - w dw - u du)_i + sum over i > t of (s ds)_i
    z    = exp(G_C) sum over V of S dS' + sum over i of (w exp(late) x dS'^T + u ...)_i

The differences are of the same rounded factors, so that what cancels does so to the last bits.
Channels come in blocks of BK, one after the other: a thread holds half of what all of K's 128 would
take, and does without the stack. Every operand comes by TMA into a buffer of its own:

    load_partition, 1 warp                              dqkg_partition, 4 warps a 64 rows of a block
      of a block of channels, in the order of need:
      q, k, a, b   -- full[OPERANDS], 2 stages -->        decays, decay_operands
      gates        -- full[GATES] ---------------->       decays; <-- empty[GATES]
      S, dS'       -- full[STATE], full[DSTATE] -->       gradients_of_reads, gradients_of_writes
      of a chunk, once:
      do, y        -- full[READS] ---------------->       gradients_of_reads
      x, v         -- full[WRITES] --------------->       gradients_of_writes
      scores       -- full[SCORES] --------------->       both

    Each has one arrival a phase, full by TMA, empty by dqkg_partition after its last product with
    it: with the last block of the chunk for what a chunk has once, at the block's end for OPERANDS.

What goes to global memory is stored after a fence rather than before, which would wait for it.
Chunks with quarters that decay further are left to intra_safe_bwd.py.
"""

from collections import namedtuple

from slipstream.kernels.linear.sm90.common import alloc_mbarriers, locate_sequence
from slipstream.kernels.primitives import sm90, sm90_device
from slipstream.kernels.primitives.device import LOG2E, Names
from slipstream.kernels.primitives.sm90 import copy_in, gl, gluon, mbarrier, warpgroup_mma

# what the kernel of dqkg.py passes on: descriptors, pointers, shared memory, numbers, constants
Descs = namedtuple("Descs", "q k a b g v do x y states dstates dqb dab dqk dak")
Refs = namedtuple("Refs", "strong beta diag dq dk da db dg dbeta cu")
Buffers = namedtuple(
    "Buffers",
    "ss ds os ys xs vs ops gs gate_terms gate_sums factors scores full empty",
)
Sizes = namedtuple("Sizes", "total tokens T N HV H")
Constants = namedtuple("Constants", "K BK V C NK wide DELTA GATED PACKED")

# barriers of dplr_dqkg_sm90_kernel, full and empty: what a buffer holds
BUF = Names(
    "STATE",  # S before the chunk
    "DSTATE",  # dS' after it
    "GATES",
    "OPERANDS",  # q, k, a and b, two stages
    "OPERANDS_AHEAD",
    "READS",  # do and y
    "WRITES",  # x and v
    "SCORES",  # gradients of the scores
)
# rows of factors after those from a quarter to the next
AT = Names("START", "END", "TOTAL", "REST", first=3)


@gluon.jit
def fast_exp2(b):
    """0 where that is not a normal number: fewer instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def fast_reciprocal(b):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def chunk_tiles(
    states_desc, dstates_desc, do_desc, y_desc, x_desc,
    V: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Shared memory for a chunk's S, dS', do, y and x, one of each.

    Taken by an index that no compiler knows (seen), or addresses would take registers all the time.
    """
    dtype: gl.constexpr = do_desc.dtype
    ss = gl.allocate_shared_memory(dtype, [1, V, K], states_desc.layout)
    ds = gl.allocate_shared_memory(dtype, [1, V, K], dstates_desc.layout)
    os = gl.allocate_shared_memory(dtype, [1, C, V], do_desc.layout)
    ys = gl.allocate_shared_memory(dtype, [1, V, C], y_desc.layout)
    xs = gl.allocate_shared_memory(dtype, [1, V, C], x_desc.layout)
    return ss, ds, os, ys, xs


@gluon.jit
def load_before(states_desc, do_desc, y_desc, ss, os, ys, bar, n, row, i_h, i_k, V: gl.constexpr):
    """S before a chunk, do and y."""
    nbytes: gl.constexpr = (
        states_desc.block_type.nbytes + do_desc.block_type.nbytes + y_desc.block_type.nbytes
    )
    mbarrier.expect(bar, nbytes)
    copy_in(states_desc, [n * V, i_k], bar, ss.index(0))
    copy_in(do_desc, [row, i_h * V], bar, os.index(0))
    copy_in(y_desc, [n * V, 0], bar, ys.index(0))


@gluon.jit
def load_partition(descs, smem, refs, sizes, c):
    """Barriers: 0 of S, 1 of dS', 2 of g, 3 and 4 of q, k, a and b, of a block of channels.

    Of a chunk: 5 of do and y, 6 of x and v, 7 of scores.
    """
    total, _tokens, T, N, HV, H = sizes
    ss, ds, os, ys, xs, vs, ops, gs, _terms, _sums, _factors, scores, full, empty = smem
    do_bytes: gl.constexpr = descs.do.block_type.nbytes
    before_bytes: gl.constexpr = do_bytes + descs.y.block_type.nbytes
    after_bytes: gl.constexpr = descs.x.block_type.nbytes + (0 if c.DELTA else do_bytes)
    input_bytes: gl.constexpr = descs.q.block_type.nbytes * ((2 if c.DELTA else 4) + c.GATED)
    score_bytes: gl.constexpr = descs.dqb.block_type.nbytes * (2 if c.DELTA else 4)
    BLOCKS: gl.constexpr = c.K // c.BK
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    i_tile = total * 0
    strong_next = gl.load(refs.strong + pid)
    for i in range(gl.cdiv(total - pid, programs)):
        n = pid + i * programs
        strong = strong_next
        strong_next = gl.load(refs.strong + gl.minimum(n + programs, total - 1))  # from afar
        if (strong >= 0) & (strong < 3):
            row, _, _ = locate_sequence(refs.cu, n // HV, T, N, c.C, c.C, c.PACKED, True)
            i_h = n % HV
            # phases: of a chunk, of a block of channels, of a stage of two
            was_chunk = (i_tile & 1) ^ 1
            for block in range(BLOCKS):
                unit = i_tile * BLOCKS + block
                was = (unit & 1) ^ 1
                i_k = block * c.BK
                k_col = i_h // (HV // H) * c.K + i_k
                st = unit & 1
                was_stage = ((unit >> 1) & 1) ^ 1
                at = st * (ops.shape[0] // 2)
                # q, k, a and b have two stages: those of the next block may come early
                mbarrier.wait(empty.index(BUF.OPERANDS + st), was_stage)
                mbarrier.expect(full.index(BUF.OPERANDS + st), input_bytes)
                copy_in(descs.q, [row, k_col], full.index(BUF.OPERANDS + st), ops.index(at))
                copy_in(descs.k, [row, k_col], full.index(BUF.OPERANDS + st), ops.index(at + 1))
                if c.GATED:
                    e_col = i_h * c.K + i_k
                    copy_in(descs.b, [row, e_col], full.index(BUF.OPERANDS + st), ops.index(at + 2))
                if not c.DELTA:
                    copy_in(descs.a, [row, k_col], full.index(BUF.OPERANDS + st), ops.index(at + 2))
                    copy_in(descs.b, [row, k_col], full.index(BUF.OPERANDS + st), ops.index(at + 3))
                # one stage each below, in the order in which the products want them
                mbarrier.wait(empty.index(BUF.GATES), was)
                mbarrier.expect(full.index(BUF.GATES), descs.g.block_type.nbytes)
                copy_in(descs.g, [row, i_h * c.K + i_k], full.index(BUF.GATES), gs)
                mbarrier.wait(empty.index(BUF.STATE), was)
                mbarrier.expect(full.index(BUF.STATE), descs.states.block_type.nbytes)
                copy_in(descs.states, [n * c.V, i_k], full.index(BUF.STATE), ss.index(0))
                if block == 0:
                    # once a chunk: all blocks of channels read the same do and y
                    mbarrier.wait(empty.index(BUF.READS), was_chunk)
                    mbarrier.expect(full.index(BUF.READS), before_bytes)
                    copy_in(descs.do, [row, i_h * c.V], full.index(BUF.READS), os.index(0))
                    copy_in(descs.y, [n * c.V, 0], full.index(BUF.READS), ys.index(0))
                mbarrier.wait(empty.index(BUF.DSTATE), was)
                mbarrier.expect(full.index(BUF.DSTATE), descs.dstates.block_type.nbytes)
                copy_in(descs.dstates, [n * c.V, i_k], full.index(BUF.DSTATE), ds.index(0))
                if block == 0:
                    mbarrier.wait(empty.index(BUF.WRITES), was_chunk)
                    mbarrier.expect(full.index(BUF.WRITES), after_bytes)
                    copy_in(descs.x, [n * c.V, 0], full.index(BUF.WRITES), xs.index(0))
                    if not c.DELTA:
                        copy_in(descs.v, [row, i_h * c.V], full.index(BUF.WRITES), vs.index(0))
                if block == 0:
                    mbarrier.wait(empty.index(BUF.SCORES), was_chunk)
                    mbarrier.expect(full.index(BUF.SCORES), score_bytes)
                    copy_in(descs.dqb, [n * c.C, 0], full.index(BUF.SCORES), scores.index(0))
                    copy_in(descs.dab, [n * c.C, 0], full.index(BUF.SCORES), scores.index(1))
                    if not c.DELTA:
                        copy_in(descs.dqk, [n * c.C, 0], full.index(BUF.SCORES), scores.index(2))
                        copy_in(descs.dak, [n * c.C, 0], full.index(BUF.SCORES), scores.index(3))
            i_tile += 1


@gluon.jit
def seen(C: gl.constexpr, layout: gl.constexpr, none, KIND: gl.constexpr):
    """[C, C]: what G - h is of gates, around the "middle" or half of "quarters"; or "later" ones.

    none: 0, and no compiler knows it; another one each turn, or it would take registers all the
    time. Where an element of a left operand in registers is a constant, ptxas (12.8, 13.0) may give
    it its value only after the first product that reads it.
    """
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] + none
    t = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    if KIND == "middle":
        b_late = gl.where((t >= C // 2) & (t <= i), 1.0, 0.0)
        b = gl.where((t < C // 2) & (t > i), -1.0, b_late)
    elif KIND == "quarters":
        b = gl.where(i // (C // 4) == t // (C // 4), gl.where(t > i, -0.5, 0.5), 0.0)
    else:
        b = gl.where(t > i, 1.0, 0.0)
    return b.to(gl.bfloat16)


@gluon.jit
def clear(tile, num_rows, C: gl.constexpr, N: gl.constexpr, wide: gl.constexpr):
    """Zeroes in rows `num_rows` and on of a tile [C, N]: what is there belongs to nobody."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, wide], [1, 0])
    o_c = gl.arange(0, C, gl.SliceLayout(1, layout))
    b = tile.load(layout)
    tile.store(gl.where((o_c < num_rows)[:, None], b, gl.zeros_like(b)))


@gluon.jit
def put_factors(sums, factors, whole, wide: gl.constexpr):
    """Stores factors of each channel from the sums of gates of quarters [4, BK]: exp(h + h') from a
    quarter to the next, at least 2^-126, and the rest of that factor; exp(h) of the first and of
    the last quarter; the chunk's decay. whole: the decay of either half in place of exp(h), and no
    factors between."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4 * wide], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    sums = sums._reinterpret(gl.float32, sums.shape, plain)  # the same, to be indexed
    b_first = sums.index(0).load(line)
    b_second = sums.index(1).load(line)
    b_third = sums.index(2).load(line)
    b_fourth = sums.index(3).load(line)
    b_early = b_first + b_second
    b_late = b_third + b_fourth
    factors.index(AT.TOTAL).store(gl.exp2(b_early + b_third + b_fourth))
    if not whole:
        put_between(factors, 0, b_early)
        put_between(factors, 1, b_second + b_third)
        put_between(factors, 2, b_late)
        b_early = 0.5 * b_first
        b_late = 0.5 * b_fourth
    factors.index(AT.START).store(gl.exp2(b_early))
    factors.index(AT.END).store(gl.exp2(b_late))


@gluon.jit
def put_between(factors, quarter: gl.constexpr, b_sum):
    b_next = 0.5 * b_sum
    factors.index(quarter).store(gl.exp2(gl.maximum(b_next, -126.0)))
    factors.index(AT.REST + quarter).store(gl.exp2(gl.minimum(b_next + 126.0, 0.0)))


@gluon.jit
def towards(factors, quarter: gl.constexpr, zero, none, LATER: gl.constexpr, row: gl.constexpr):
    """[C, BK]: from `quarter` to the next one for the rows after it, or back for the others, of the
    factors' row; 1 for the rest."""
    layout: gl.constexpr = zero.type.layout
    C: gl.constexpr = zero.shape[0]
    b_f = factors.index(row).load(gl.SliceLayout(0, layout))[None, :]
    o_c = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] + none
    later = o_c >= (quarter + 1) * (C // 4)
    if LATER:
        b_f = gl.where(later, b_f, 1.0)
    else:
        b_f = gl.where(later, 1.0, b_f)
    return b_f


@gluon.jit
def part_product(b, score, rhs, step: gl.constexpr, STEPS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Starts b += score rhs, or score^T rhs, for the tokens of one step; the caller waits."""
    COUNT: gl.constexpr = score.shape[0] // STEPS
    if STEPS > 1:
        rhs = rhs.slice(step * COUNT, COUNT)
        score = score.slice(step * COUNT, COUNT, 0 if TRANSPOSED else 1)
    if TRANSPOSED:
        score = score.permute((1, 0))
    return warpgroup_mma(score, rhs, b, is_async=True)


@gluon.jit
def products_of_states(ss, ds, V: gl.constexpr, K: gl.constexpr, wide: gl.constexpr):
    """Sum over V of S dS' [K]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, wide], [1, 0])
    b_z = gl.zeros([16, K], gl.float32, layout)
    for i in gl.static_range(V // 16):
        b_s = ss.slice(i * 16, 16).load(layout).to(gl.float32)
        b_z += b_s * ds.slice(i * 16, 16).load(layout).to(gl.float32)
    return gl.sum(b_z, 0)


@gluon.jit
def store_gates(dg_ptr, b_dg, first, num_rows, o_c, o_k, stride):
    p = dg_ptr + first
    b_dg = b_dg.to(dg_ptr.dtype.element_ty)
    gl.store(p + (o_c[:, None] * stride + o_k[None, :]), b_dg, mask=(o_c < num_rows)[:, None])


@gluon.jit
def store_dbeta(p, b_dbeta, stride, m_c, NK: gl.constexpr):
    """All of it in the first of NK shares."""
    gl.store(p, b_dbeta, mask=m_c)
    for j in gl.static_range(1, NK):
        gl.store(p + j * stride, gl.zeros_like(b_dbeta), mask=m_c)


@gluon.jit
def erase_gradients(p, b_ds, b_k, b_erase, m):
    """Gradients of how much each channel erases, and of k by b_ds, the gradient of its reads."""
    gl.store(p, (-b_ds * b_k.to(gl.float32)).to(p.dtype.element_ty), mask=m)
    return -b_ds * b_erase.to(gl.float32)


@gluon.jit
def decays(
    smem, now, none, num_rows, b_dg, was_first, was_num_rows, dg_ptr, stride, zero, whole, c
):
    """Gates and G - h; the gradients of the gates before them are written."""
    cl: gl.constexpr = zero.type.layout
    ca: gl.constexpr = gl.DotOperandLayout(0, cl, 2)
    o_c = gl.arange(0, c.C, gl.SliceLayout(1, cl))
    o_k = gl.arange(0, c.BK, gl.SliceLayout(0, cl))
    mbarrier.wait(smem.full.index(BUF.GATES), now)
    if num_rows < c.C:
        clear(smem.gs, num_rows, c.C, c.BK, c.wide)
    b_g = smem.gs.load(cl).to(gl.float32) * LOG2E
    g_high, g_low = sm90_device.halves(b_g)
    smem.gate_terms.index(0).store(g_high)
    smem.gate_terms.index(1).store(g_low)
    smem.gate_sums.store(gl.sum(gl.reshape(b_g, [4, c.C // 4, c.BK]), 1))
    sm90.fence_async_shared()
    gl.thread_barrier()
    # after a fence, which waits for what is being stored
    store_gates(dg_ptr, b_dg, was_first, was_num_rows, o_c + none, o_k, stride)
    if whole:
        around = seen(c.C, ca, none, "middle")
    else:
        around = seen(c.C, ca, none, "quarters")
    b_e = warpgroup_mma(around, smem.gate_terms.index(1), zero, use_acc=False, is_async=True)
    b_e = warpgroup_mma(around, smem.gate_terms.index(0), b_e, is_async=True)
    put_factors(smem.gate_sums, smem.factors, whole, c.wide)
    b_e = sm90.warpgroup_mma_wait(0, deps=(b_e,))
    mbarrier.arrive(smem.empty.index(BUF.GATES), count=1)
    return b_g, b_e


@gluon.jit
def decay_operands(ops, at, b_g, b_e, b_p, b_n, b_sign, num_rows, c):
    """In their places: r, s, w and u; k as it was, P of s, and how much each channel erases."""
    act: gl.constexpr = ops.dtype
    cl: gl.constexpr = b_g.type.layout
    if num_rows < c.C:
        for j in gl.static_range(3 if c.DELTA else 4):
            clear(ops.index(at + j), num_rows, c.C, c.BK, c.wide)
    b_q = ops.index(at).load(cl).to(gl.float32)
    b_k = ops.index(at + 1).load(cl)
    b_erase = b_k
    if c.DELTA:
        b_f = b_p
        b_s = b_k.to(gl.float32) * b_p
        if c.GATED:
            b_erase = ops.index(at + 2).load(cl)
            ops.index(at + 2).store((-b_s * b_erase.to(gl.float32)).to(act))
        else:
            ops.index(at + 2).store((b_s * b_sign).to(act))
    else:
        b_f = fast_exp2(b_e - b_g)
        b_a = ops.index(at + 2).load(cl).to(gl.float32)
        b_w = ops.index(at + 3).load(cl).to(gl.float32)
        ops.index(at + 2).store((b_a * b_f).to(act))
        ops.index(at + 3).store((b_w * b_n).to(act))
    ops.index(at).store((b_q * b_p).to(act))
    ops.index(at + 1).store((b_k.to(gl.float32) * b_n).to(act))
    sm90.fence_async_shared()
    gl.thread_barrier()
    return b_k, b_f, b_erase


@gluon.jit
def reads_by_scores(
    b_dr, b_ds, ops, at, scores, factors, none, zero, STEPS: gl.constexpr, DELTA: gl.constexpr
):
    """dr and ds with what comes by way of the scores, in STEPS of as many tokens."""
    w = ops.index(at + (1 if DELTA else 3))
    u = ops.index(at + 1)
    for step in gl.static_range(STEPS):
        b_dr = part_product(b_dr, scores.index(none), w, step, STEPS, False)
        b_ds = part_product(b_ds, scores.index(none + 1), w, step, STEPS, False)
        if not DELTA:
            b_dr = part_product(b_dr, scores.index(none + 2), u, step, STEPS, False)
            b_ds = part_product(b_ds, scores.index(none + 3), u, step, STEPS, False)
        b_dr, b_ds = sm90.warpgroup_mma_wait(0, deps=(b_dr, b_ds))
        if step < STEPS - 1:
            for row in gl.static_range(step, AT.REST + step + 1, AT.REST):
                b_f = towards(factors, step, zero, none, True, row)
                b_dr *= b_f
                b_ds *= b_f
    return b_dr, b_ds


@gluon.jit
def writes_by_scores(
    b_dw, b_du, b_sum, ops, at, scores, factors, none, zero, STEPS: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    """dw and du the same way, the last step first; b_sum is decayed with them."""
    r = ops.index(at)
    s = ops.index(at + 2)
    for step in gl.static_range(STEPS - 1, -1, -1):
        b_dw = part_product(b_dw, scores.index(none), r, step, STEPS, True)
        b_dw = part_product(b_dw, scores.index(none + 1), s, step, STEPS, True)
        if DELTA:
            b_dw = sm90.warpgroup_mma_wait(0, deps=(b_dw,))
        else:
            b_du = part_product(b_du, scores.index(none + 2), r, step, STEPS, True)
            b_du = part_product(b_du, scores.index(none + 3), s, step, STEPS, True)
            b_dw, b_du = sm90.warpgroup_mma_wait(0, deps=(b_dw, b_du))
        if step > 0:
            for row in gl.static_range(step - 1, AT.REST + step, AT.REST):
                b_f = towards(factors, step - 1, zero, none, False, row)
                b_sum *= b_f
                b_dw *= b_f
                if not DELTA:
                    b_du *= b_f
    return b_dw, b_du, b_sum


@gluon.jit
def gradients_of_reads(smem, at, whole, i_tile, last, none, scale, zero, c):
    """dr and ds [C, BK], and the sum over V of S dS', decayed."""
    ss, ds = smem.ss.index(none), smem.ds.index(none)
    os, ys = smem.os.index(none), smem.ys.index(none)
    line: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
    b_z = products_of_states(ss, ds, c.V, c.BK, c.wide)
    b_z = gl.convert_layout(b_z, line) * smem.factors.index(AT.TOTAL).load(line)
    b_dr = warpgroup_mma(os, ss, zero, use_acc=False, is_async=True)
    b_ds = warpgroup_mma(ys.permute((1, 0)), ss, zero, use_acc=False, is_async=True)
    b_dr, b_ds = sm90.warpgroup_mma_wait(0, deps=(b_dr, b_ds))
    mbarrier.arrive(smem.empty.index(BUF.STATE), count=1)
    if last:
        mbarrier.arrive(smem.empty.index(BUF.READS), count=1)
    b_start = smem.factors.index(AT.START).load(line)[None, :]
    b_dr *= b_start * scale
    b_ds *= b_start
    mbarrier.wait(smem.full.index(BUF.SCORES), i_tile & 1)
    if whole:
        b_dr, b_ds = reads_by_scores(
            b_dr, b_ds, smem.ops, at, smem.scores, smem.factors, none, zero, 1, c.DELTA
        )  # fmt: skip
    else:
        b_dr, b_ds = reads_by_scores(
            b_dr, b_ds, smem.ops, at, smem.scores, smem.factors, none, zero, 4, c.DELTA
        )
    return b_dr, b_ds, b_z


@gluon.jit
def gradients_of_writes(smem, at, whole, last, none, b_z, zero, c):
    """dw and du [C, BK]; z with what they have of dS'."""
    ds, xs, vs = smem.ds.index(none), smem.xs.index(none), smem.vs.index(none)
    cl: gl.constexpr = zero.type.layout
    W: gl.constexpr = 1 if c.DELTA else 3
    b_dw = warpgroup_mma(xs.permute((1, 0)), ds, zero, use_acc=False, is_async=True)
    b_dw = sm90.warpgroup_mma_wait(0, deps=(b_dw,))
    b_end = smem.factors.index(AT.END).load(gl.SliceLayout(0, cl))[None, :]
    b_dw *= b_end
    b_sum = smem.ops.index(at + W).load(cl).to(gl.float32) * b_dw
    b_du = b_dw
    if not c.DELTA:
        b_du = warpgroup_mma(vs, ds, zero, use_acc=False, is_async=True)
        b_du = sm90.warpgroup_mma_wait(0, deps=(b_du,))
        b_du *= b_end
        b_sum += smem.ops.index(at + 1).load(cl).to(gl.float32) * b_du
    mbarrier.arrive(smem.empty.index(BUF.DSTATE), count=1)
    if last:
        mbarrier.arrive(smem.empty.index(BUF.WRITES), count=1)
    if whole:
        b_dw, b_du, b_sum = writes_by_scores(
            b_dw, b_du, b_sum, smem.ops, at, smem.scores, smem.factors, none, zero, 1, c.DELTA
        )
    else:
        b_dw, b_du, b_sum = writes_by_scores(
            b_dw, b_du, b_sum, smem.ops, at, smem.scores, smem.factors, none, zero, 4, c.DELTA
        )
    b_z += gl.sum(b_sum, 0)
    if c.DELTA:
        b_du = b_dw
    if last:
        mbarrier.arrive(smem.empty.index(BUF.SCORES), count=1)
    return b_dw, b_du, b_z


@gluon.jit
def gradients_of_gates(sums, at, b_s, b_t, b_x, b_z, none, C: gl.constexpr):
    """b_t + z + sums over later tokens of b_s, less b_x; under way."""
    ca: gl.constexpr = gl.DotOperandLayout(0, b_s.type.layout, 2)
    b_t -= b_x
    s_high, s_low = sm90_device.halves(b_s - b_x)
    sums.index(at).store(s_high)
    sums.index(at + 2).store(s_low)
    sm90.fence_async_shared()
    gl.thread_barrier()
    later = seen(C, ca, none, "later")
    b_dg = warpgroup_mma(later, sums.index(at + 2), b_t + b_z[None, :], is_async=True)
    return warpgroup_mma(later, sums.index(at), b_dg, is_async=True)


@gluon.jit
def clear_ends(smem, num_rows, none, c):
    """Past the chunk's tokens, do and v."""
    do, v = smem.os.index(none), smem.vs.index(none)
    clear(do, num_rows, c.C, c.V, c.wide)
    if not c.DELTA:
        clear(v, num_rows, c.C, c.V, c.wide)
    sm90.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def dqkg_partition(smem, refs, scale, sizes, c):
    total, tokens, T, N, HV, _H = sizes
    ops, full, empty = smem.ops, smem.full, smem.empty
    GATED: gl.constexpr = c.DELTA and refs.beta is None
    act: gl.constexpr = smem.ss.dtype
    W: gl.constexpr = 1 if c.DELTA else 3
    BLOCKS: gl.constexpr = c.K // c.BK
    cl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, c.wide], [16, c.BK // c.wide, 16])
    o_c = gl.arange(0, c.C, gl.SliceLayout(1, cl))
    o_k = gl.arange(0, c.BK, gl.SliceLayout(0, cl))
    zero = gl.zeros([c.C, c.BK], gl.float32, cl)
    sums = ops._reinterpret(gl.bfloat16, [ops.shape[0], c.C, c.BK], ops.layout)
    b_dg = zero
    was_first = total.to(gl.int64) * 0
    was_num_rows = total * 0
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    i_tile = total * 0  # chunks before it that are not strong
    strong_next = gl.load(refs.strong + pid)
    for i in range(gl.cdiv(total - pid, programs)):
        n = pid + i * programs
        strong = strong_next
        strong_next = gl.load(refs.strong + gl.minimum(n + programs, total - 1))  # from afar
        if (strong >= 0) & (strong < 3):
            row, num_rows, _ = locate_sequence(refs.cu, n // HV, T, N, c.C, c.C, c.PACKED, True)
            i_h = n % HV
            first = row.to(gl.int64) * HV + i_h
            b_dbeta = gl.zeros([c.C], gl.float32, gl.SliceLayout(1, cl))
            for block in range(BLOCKS):
                unit = i_tile * BLOCKS + block
                now = unit & 1
                at = now * (ops.shape[0] // 2)
                last = block == BLOCKS - 1
                none = unit + T >> 31 << 10
                m_c = o_c + none < num_rows
                m = m_c[:, None]
                first_k = first * c.K + block * c.BK
                p_diag = refs.diag + n.to(gl.int64) * (2 * c.C) + o_c
                b_qb = gl.load(p_diag)[:, None]
                b_sign = b_qb
                if c.DELTA and not GATED:
                    o_t = first + (o_c + none) * HV
                    b_sign = -gl.load(refs.beta + o_t, mask=m_c, other=0.0).to(gl.float32)[:, None]
                if not c.DELTA:
                    b_qk = gl.load(p_diag + c.C)[:, None]
                b_g, b_e = decays(
                    smem, now, none, num_rows, b_dg, was_first, was_num_rows, refs.dg, HV * c.K,
                    zero, strong == 0, c,
                )  # fmt: skip
                b_p = fast_exp2(b_e)
                b_n = fast_exp2(-b_e)
                mbarrier.wait(full.index(BUF.OPERANDS + now), (unit >> 1) & 1)
                b_k, b_f, b_erase = decay_operands(ops, at, b_g, b_e, b_p, b_n, b_sign, num_rows, c)
                # by way of the state before the chunk, and what was written
                mbarrier.wait(full.index(BUF.STATE), now)
                mbarrier.wait(full.index(BUF.DSTATE), now)
                mbarrier.wait(full.index(BUF.READS), i_tile & 1)
                mbarrier.wait(full.index(BUF.WRITES), i_tile & 1)
                if (num_rows < c.C) & (block == 0):
                    clear_ends(smem, num_rows, none, c)
                b_dr, b_ds, b_z = gradients_of_reads(
                    smem, at, strong == 0, i_tile, last, none, scale, zero, c
                )
                # kept all the time, it puts others on the stack
                o_n = o_k if c.DELTA else o_k + none
                o_o = (o_c + none)[:, None] * (HV * c.K) + o_n[None, :]
                b_t = ops.index(at).load(cl).to(gl.float32) * b_dr
                b_dr += b_qb * ops.index(at + W).load(cl).to(gl.float32)
                if not c.DELTA:
                    b_dr += b_qk * ops.index(at + 1).load(cl).to(gl.float32)
                gl.store(refs.dq + first_k + o_o, (b_dr * b_p).to(act), mask=m)
                b_s = ops.index(at + 2).load(cl).to(gl.float32) * b_ds
                b_ds *= b_f
                if GATED:
                    p_db = refs.db + first_k + o_o
                    b_ds = erase_gradients(p_db, b_ds, b_k, b_erase, m)
                elif c.DELTA:
                    b_dbeta -= gl.sum(b_ds * b_k.to(gl.float32), 1)
                    if last:
                        stride = tokens.to(gl.int64) * HV
                        p_dbeta = refs.dbeta + stride + o_t
                        store_dbeta(p_dbeta, b_dbeta, stride, m_c, c.NK)
                    b_ds *= b_sign
                if c.DELTA:
                    b_t += b_s
                    b_s = b_t
                else:
                    gl.store(refs.da + first_k + o_o, b_ds.to(act), mask=m)
                    b_s += b_t
                # by way of the state after it, and what was read
                b_dw, b_du, b_z = gradients_of_writes(
                    smem, at, strong == 0, last, none, b_z, zero, c
                )
                b_x = ops.index(at + W).load(cl).to(gl.float32) * b_dw
                if not c.DELTA:
                    b_x += ops.index(at + 1).load(cl).to(gl.float32) * b_du
                b_r = ops.index(at).load(cl)
                b_dg = gradients_of_gates(sums, at, b_s, b_t, b_x, b_z, none, c.C)
                b_n = fast_reciprocal(b_p)
                b_dw = (b_dw + b_qb * b_r) * b_n
                if c.DELTA:
                    gl.store(refs.dk + first_k + o_o, (b_dw + b_ds).to(act), mask=m)
                else:
                    gl.store(refs.db + first_k + o_o, b_dw.to(act), mask=m)
                    gl.store(refs.dk + first_k + o_o, ((b_du + b_qk * b_r) * b_n).to(act), mask=m)
                b_dg = sm90.warpgroup_mma_wait(0, deps=(b_dg,))
                mbarrier.arrive(empty.index(BUF.OPERANDS + now), count=1)
                was_first = first_k
                was_num_rows = num_rows
            i_tile += 1
    store_gates(refs.dg, b_dg, was_first, was_num_rows, o_c, o_k, HV * c.K)


@gluon.jit(do_not_specialize=["scale", "total", "T", "N", "HV", "H", "tokens"])
def dplr_dqkg_sm90_kernel(
    q_desc,  # [tokens, H * K] by [C, BK]
    k_desc,
    a_desc,  # none for delta
    b_desc,  # [tokens, HV * K], how much each channel erases, gated delta
    g_desc,  # [tokens, HV * K] by [C, BK]
    v_desc,  # [tokens, HV * V] by [C, V], dplr
    do_desc,
    x_desc,  # [chunks * HV * V, C] by [V, C]
    y_desc,
    states_desc,  # [chunks * HV * V, K] by [V, BK]
    dstates_desc,
    dqb_desc,  # [chunks * HV * C, C] by [C, C]
    dab_desc,
    dqk_desc,  # dplr
    dak_desc,
    strong_ptr,  # [chunks, HV]
    beta_ptr,  # [tokens, HV], delta; none for gated delta
    diag_ptr,  # [chunks, HV, 2, C]: gradients of the scores qb and qk of pairs (i, i)
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,
    da_ptr,  # dplr
    db_ptr,  # and of what erases
    dg_ptr,  # in the gates' dtype
    dbeta_ptr,  # [1 + NK, tokens, HV], delta, except for the first
    cu_ptr,  # [N + 1]
    scale, total, T, N, HV, H, tokens,
    K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, C: gl.constexpr, NK: gl.constexpr,
    WIDE: gl.constexpr, DELTA: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """grid (programs,), 4 WIDE warps: each does every programs-th of the chunks and value heads.

    One block of BK channels after the other: no sum but dbeta is over channels.
    """
    sizes = Sizes(total, tokens, T, N, HV, H)
    refs = Refs(
        strong_ptr, beta_ptr, diag_ptr, dq_ptr, dk_ptr, da_ptr, db_ptr, dg_ptr, dbeta_ptr, cu_ptr
    )
    descs = Descs(
        q_desc, k_desc, a_desc, b_desc, g_desc, v_desc, do_desc, x_desc, y_desc, states_desc,
        dstates_desc, dqb_desc, dab_desc, dqk_desc, dak_desc,
    )  # fmt: skip
    GATED: gl.constexpr = DELTA and beta_ptr is None
    dtype: gl.constexpr = q_desc.dtype
    ss, ds, os, ys, xs = chunk_tiles(states_desc, dstates_desc, do_desc, y_desc, x_desc, V, BK, C)
    ops = gl.allocate_shared_memory(dtype, [6 if DELTA else 8, C, BK], q_desc.layout)
    gate_terms = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], q_desc.layout)
    if g_desc.dtype == gl.float32:
        gs = gate_terms._reinterpret(gl.float32, [C, BK], g_desc.layout)
    else:
        gs = gate_terms.index(0)._reinterpret(g_desc.dtype, [C, BK], g_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    gate_sums = gl.allocate_shared_memory(gl.float32, [4, BK], plain)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    factors = gl.allocate_shared_memory(gl.float32, [9, BK], line)
    if DELTA:
        vs = xs
    else:
        vs = gl.allocate_shared_memory(dtype, [1, C, V], v_desc.layout)
    scores = gl.allocate_shared_memory(dtype, [2 if DELTA else 4, C, C], dqb_desc.layout)
    full = alloc_mbarriers(1, 8)
    empty = alloc_mbarriers(1, 8)
    c: gl.constexpr = Constants(K, BK, V, C, NK, WIDE, DELTA, GATED, PACKED)
    smem = Buffers(
        ss, ds, os, ys, xs, vs, ops, gs, gate_terms, gate_sums, factors, scores, full, empty
    )
    gl.warp_specialize(
        [
            (dqkg_partition, (smem, refs, scale, sizes, c)),
            (load_partition, (descs, smem, refs, sizes, c)),
        ],
        [1],
        [24],
    )  # fmt: skip
