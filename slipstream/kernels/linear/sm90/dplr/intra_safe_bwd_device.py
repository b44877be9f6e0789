"""Parts of intra_safe_bwd.py for a tile: sums into gates, triangles of scores, products."""

from slipstream.kernels.linear.sm90.dplr.subchunk_decay import gates_seen, sum_gates
from slipstream.kernels.linear.triton.common.gate_ones import BASE
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, warpgroup_mma


@gluon.jit
def to_gates(seen, b_x, buffer, b_dg):
    """b_dg + seen b_x, b_x rounded."""
    gl.thread_barrier()
    buffer.store(b_x.to(gl.bfloat16))
    sm90.fence_async_shared()
    gl.thread_barrier()
    b = warpgroup_mma(seen, buffer, b_dg, is_async=True)
    return sm90.warpgroup_mma_wait(0, deps=(b,))


@gluon.jit
def make_symmetric(score, num_rows, none, C: gl.constexpr):
    """D + D^T, of the chunk's tokens alone."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] + none
    j = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :] + none
    b = score.load(layout)
    b = b + score.permute((1, 0)).load(layout)
    gl.thread_barrier()
    score.store(gl.where((i < num_rows) & (j < num_rows), b, gl.zeros_like(b)))


@gluon.jit
def siblings(score, level, none, layout: gl.constexpr, C: gl.constexpr):
    """A score's gradient, of the pairs of a level."""
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] + none
    j = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :] + none
    b = score.load(layout)
    return gl.where((i ^ j) >> level == 1, b, gl.zeros_like(b))


@gluon.jit
def rows_of(ins, j, layout: gl.constexpr):
    """q, a, w or k, read from shared memory each time, since no registers are free to hold them."""
    return ins.index(j).load(layout).to(gl.float32)


@gluon.jit
def triangle(score, none, layout: gl.constexpr, LATER: gl.constexpr, C: gl.constexpr):
    """A score's gradient, of pairs within 16 tokens: rows are LATER than columns, or earlier."""
    i = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] + none
    j = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :] + none
    b = score.load(layout)
    ordered = i > j if LATER else i < j
    return gl.where(ordered & (i >> BASE == j >> BASE), b, gl.zeros_like(b))


@gluon.jit
def two_triangles(scores, ops, i, j, LATER: gl.constexpr, none, zero):
    """The products of scores i and j with the two tiles of ops, added."""
    ca: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 2)
    C: gl.constexpr = ops.shape[1]
    b_d = triangle(scores.index(i), none, ca, LATER, C)
    b = warpgroup_mma(b_d, ops.index(none), zero, use_acc=False, is_async=True)
    b = sm90.warpgroup_mma_wait(0, deps=(b,))  # or both left operands would take registers
    b_d = triangle(scores.index(j), none, ca, LATER, C)
    b = warpgroup_mma(b_d, ops.index(none + 1), b, is_async=True)
    return sm90.warpgroup_mma_wait(0, deps=(b,))


@gluon.jit
def one_triangle(scores, ops, i, none, zero):
    ca: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 2)
    b_d = triangle(scores.index(i), none, ca, True, ops.shape[1])
    b = warpgroup_mma(b_d, ops.index(none), zero, use_acc=False, is_async=True)
    return sm90.warpgroup_mma_wait(0, deps=(b,))


@gluon.jit
def decayed(ins, j, b_w, act: gl.constexpr):
    """An operand of products, rounded as it is there: what cancels in sums does to the last bit."""
    layout: gl.constexpr = b_w.type.layout
    return (rows_of(ins, j, layout) * b_w).to(act).to(gl.float32)


@gluon.jit
def in_halves_to_gates(seen, b_x, buffer, b_dg):
    """As to_gates, b_x as a bf16 number and what that leaves: what cancels is larger than sums."""
    b_dg = to_gates(seen, b_x, buffer, b_dg)
    return to_gates(seen, b_x - b_x.to(gl.bfloat16).to(gl.float32), buffer, b_dg)


@gluon.jit
def by_one_read(buffers, b_dread, b_dw, b_du, b_dg, level, T, READ: gl.constexpr):
    """A level's share of what q (READ 0) or a (1) reads of b and k."""
    scores, ops, ins, sums, gates = buffers
    C: gl.constexpr = ops.shape[1]
    act: gl.constexpr = ops.dtype
    INCLUSIVE: gl.constexpr = READ == 0
    cl: gl.constexpr = b_dg.type.layout
    ca: gl.constexpr = gl.DotOperandLayout(0, cl, 2)
    zero = gl.zeros_like(b_dg)
    # 0, another one each time, as dplr_grads_parts.seen has it
    none = T + 2 * level + READ >> 31 << 10
    later = (((gl.arange(0, C, gl.SliceLayout(1, cl)) + none >> level) & 1) == 1)[:, None]
    b_f = gl.exp2(sum_gates(
        gates_seen(C, ca, level, none, False, INCLUSIVE), gates.index(none), gates.index(none + 1),
        zero,
    ))  # fmt: skip
    b_read = rows_of(ins, none + READ, cl)
    ops.index(none).store((gl.where(later, b_read, rows_of(ins, none + 2, cl)) * b_f).to(act))
    ops.index(none + 1).store((gl.where(later, b_read, rows_of(ins, none + 3, cl)) * b_f).to(act))
    sm90.fence_async_shared()
    gl.thread_barrier()
    b_x, b_y = both_products(scores, ops, none + READ, none + READ + 2, level, none, zero)
    b_e = rows_of(ops, none, cl) * b_x + rows_of(ops, none + 1, cl) * b_y
    b_x *= b_f
    b_y *= b_f
    b_dw += gl.where(later, 0.0, b_x)
    b_du += gl.where(later, 0.0, b_y)
    b_dread += gl.where(later, b_x + b_y, 0.0)
    b_dg = to_gates(gates_seen(C, ca, level, none, True, INCLUSIVE), b_e, sums.index(none), b_dg)
    return b_dread, b_dw, b_du, b_dg


@gluon.jit
def sum_of_halves(gates, none, layout: gl.constexpr):
    """The gates, as sums have them."""
    return gates.index(none).load(layout).to(gl.float32) + gates.index(none + 1).load(layout).to(
        gl.float32
    )


@gluon.jit
def both_products(scores, ops, i, j, level, none, zero):
    """The products of a level with the gradients of scores i and j."""
    ca: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 2)
    C: gl.constexpr = ops.shape[1]
    b_d = siblings(scores.index(i), level, none, ca, C)
    b_i = warpgroup_mma(b_d, ops.index(none), zero, use_acc=False, is_async=True)
    b_d = siblings(scores.index(j), level, none, ca, C)
    b_j = warpgroup_mma(b_d, ops.index(none + 1), zero, use_acc=False, is_async=True)
    return sm90.warpgroup_mma_wait(0, deps=(b_i, b_j))
