"""Parts of the gradients' kernels of per-channel decay on sm_90 (dqkg.py)."""

from collections import namedtuple

from slipstream.kernels.linear.sm90.common.device import locate_sequence
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

LOG2E = gl.constexpr(1.4426950408889634)


# barriers of dplr_dqkg_sm90_kernel, full and empty: what a buffer holds
STATE = gl.constexpr(0)  # S before the chunk
DSTATE = gl.constexpr(1)  # dS' after it
GATES = gl.constexpr(2)
OPERANDS = gl.constexpr(3)  # q, k, a and b, two stages
READS = gl.constexpr(5)  # do and y
WRITES = gl.constexpr(6)  # x and v
SCORES = gl.constexpr(7)  # gradients of the scores
# rows of factors after those from a quarter to the next
START = gl.constexpr(3)
END = gl.constexpr(4)
TOTAL = gl.constexpr(5)
REST = gl.constexpr(6)


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
        if strong < 3:
            row, _, _ = locate_sequence(refs.cu, n // HV, T, N, c.C, c.C, c.PACKED, True)
            i_h = n % HV
            # phases: of a chunk, of a block of channels, of a stage of two
            was_chunk = (i_tile & 1) ^ 1
            for block in range(BLOCKS):
                unit = i_tile * BLOCKS + block
                was = (unit & 1) ^ 1
                i_k = block * c.BK
                k_col = i_h // (HV // H) * c.K + i_k
                stage = unit & 1
                was_stage = ((unit >> 1) & 1) ^ 1
                at = stage * (ops.shape[0] // 2)
                # q, k, a and b have two stages: those of the next block may come early
                mbarrier.wait(empty.index(OPERANDS + stage), was_stage)
                mbarrier.expect(full.index(OPERANDS + stage), input_bytes)
                copy_in(descs.q, [row, k_col], full.index(OPERANDS + stage), ops.index(at))
                copy_in(descs.k, [row, k_col], full.index(OPERANDS + stage), ops.index(at + 1))
                if c.GATED:
                    e_col = i_h * c.K + i_k
                    copy_in(descs.b, [row, e_col], full.index(OPERANDS + stage), ops.index(at + 2))
                if not c.DELTA:
                    copy_in(descs.a, [row, k_col], full.index(OPERANDS + stage), ops.index(at + 2))
                    copy_in(descs.b, [row, k_col], full.index(OPERANDS + stage), ops.index(at + 3))
                # one stage each below, in the order in which the products want them
                mbarrier.wait(empty.index(GATES), was)
                mbarrier.expect(full.index(GATES), descs.g.block_type.nbytes)
                copy_in(descs.g, [row, i_h * c.K + i_k], full.index(GATES), gs)
                mbarrier.wait(empty.index(STATE), was)
                mbarrier.expect(full.index(STATE), descs.states.block_type.nbytes)
                copy_in(descs.states, [n * c.V, i_k], full.index(STATE), ss.index(0))
                if block == 0:
                    # once a chunk: all blocks of channels read the same do and y
                    mbarrier.wait(empty.index(READS), was_chunk)
                    mbarrier.expect(full.index(READS), before_bytes)
                    copy_in(descs.do, [row, i_h * c.V], full.index(READS), os.index(0))
                    copy_in(descs.y, [n * c.V, 0], full.index(READS), ys.index(0))
                mbarrier.wait(empty.index(DSTATE), was)
                mbarrier.expect(full.index(DSTATE), descs.dstates.block_type.nbytes)
                copy_in(descs.dstates, [n * c.V, i_k], full.index(DSTATE), ds.index(0))
                if block == 0:
                    mbarrier.wait(empty.index(WRITES), was_chunk)
                    mbarrier.expect(full.index(WRITES), after_bytes)
                    copy_in(descs.x, [n * c.V, 0], full.index(WRITES), xs.index(0))
                    if not c.DELTA:
                        copy_in(descs.v, [row, i_h * c.V], full.index(WRITES), vs.index(0))
                if block == 0:
                    mbarrier.wait(empty.index(SCORES), was_chunk)
                    mbarrier.expect(full.index(SCORES), score_bytes)
                    copy_in(descs.dqb, [n * c.C, 0], full.index(SCORES), scores.index(0))
                    copy_in(descs.dab, [n * c.C, 0], full.index(SCORES), scores.index(1))
                    if not c.DELTA:
                        copy_in(descs.dqk, [n * c.C, 0], full.index(SCORES), scores.index(2))
                        copy_in(descs.dak, [n * c.C, 0], full.index(SCORES), scores.index(3))
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
    factors.index(TOTAL).store(gl.exp2(b_early + b_third + b_fourth))
    if not whole:
        put_between(factors, 0, b_early)
        put_between(factors, 1, b_second + b_third)
        put_between(factors, 2, b_late)
        b_early = 0.5 * b_first
        b_late = 0.5 * b_fourth
    factors.index(START).store(gl.exp2(b_early))
    factors.index(END).store(gl.exp2(b_late))


@gluon.jit
def put_between(factors, quarter: gl.constexpr, b_sum):
    b_next = 0.5 * b_sum
    factors.index(quarter).store(gl.exp2(gl.maximum(b_next, -126.0)))
    factors.index(REST + quarter).store(gl.exp2(gl.minimum(b_next + 126.0, 0.0)))


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
