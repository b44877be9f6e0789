"""On sm_90, the inverse of a chunk's unit lower triangle, which four warps make of 64 rows.

    R (I + A) = I        R_ii = (I + A_ii)^-1        R_ij = -(sum_{j < k <= i} R_ik A_kj) R_jj

by blocks of 16 rows: those on the diagonal by substitution, then the block `away` to the left of
each, all four at once, with away 1, 2, 3. A warp has a row of blocks, R_ik in registers; what it
takes of other rows is in shared memory before the first product, so that no warp waits for another
between products. Where a row has no block so far to the left, its warp computes something of what
lies before them in shared memory, which is not used.

Rows of a block on the diagonal lie in a thread and its columns in lanes, so that a step of the
substitution exchanges one number a thread.
"""

from slipstream.kernels.primitives.bf16_halves import halves
from slipstream.kernels.primitives.sm90 import LARGER_VIEWS, gl, gluon

mma_v2 = gl.nvidia.hopper.mma_v2
# blocks of [16, 16] on the diagonal of [64, 64], one a warp; mma.sync joins those of 16 rows
NB = gl.constexpr(4)
BASE = gl.constexpr(16)


@gluon.jit
def by_blocks(b, wl: gl.constexpr):
    """b [64, 64] by columns of blocks, [NB, BASE, BASE] each, a row of blocks to a warp."""
    b = gl.permute(gl.reshape(b, [NB, BASE, 2, 2, BASE]), (0, 1, 4, 2, 3))
    b_even, b_odd = gl.split(b)
    b_0, b_2 = gl.split(b_even)
    b_1, b_3 = gl.split(b_odd)
    return (
        gl.convert_layout(b_0, wl, assert_trivial=True),
        gl.convert_layout(b_1, wl, assert_trivial=True),
        gl.convert_layout(b_2, wl, assert_trivial=True),
        gl.convert_layout(b_3, wl, assert_trivial=True),
    )


@gluon.jit
def from_blocks(b_0, b_1, b_2, b_3, layout: gl.constexpr):
    """by_blocks undone."""
    b = gl.join(gl.join(b_0, b_2), gl.join(b_1, b_3))
    b = gl.reshape(gl.permute(b, (0, 1, 3, 4, 2)), [NB * BASE, NB * BASE])
    return gl.convert_layout(b, layout, assert_trivial=True)


@gluon.jit
def substitute(b_d, block):
    """Inverses of I + b_d [NB, BASE, BASE], strictly lower triangles; rows lie in a thread."""
    xl: gl.constexpr = gl.BlockedLayout([1, BASE // 2, 1], [1, 2, BASE], [4, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    # by rows, so that a step reads one row of each block
    block.store(gl.permute(b_d, (1, 0, 2)))
    gl.thread_barrier()
    rows = block._reinterpret(gl.float32, [BASE, NB, BASE], flat)  # the same, to be indexed
    o_row = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, xl)))[None, :, None]
    o_column = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, xl)))[None, None, :]
    # static: a row of the inverse stays in registers, whose index must be known
    b_x = gl.where(o_row == o_column, 1.0, gl.zeros([NB, BASE, BASE], gl.float32, xl))
    for i in gl.static_range(1, BASE):
        b_row = rows.index(i).load(gl.SliceLayout(2, xl))  # [NB, BASE]
        b_new = gl.sum(b_row[:, :, None] * b_x, 1)
        b_x = gl.where(o_row == i, b_x - b_new[:, None, :], b_x)
    return b_x


@gluon.jit
def warp_of_four():
    """The number of a warp. Triton takes it for the same one in all threads, so that a tile in
    shared memory with this index is loaded as if all warps had the same elements."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %tid.x; bfe.u32 $0, t, 5, 2; }",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def tile_of(tiles, at: gl.constexpr, COLUMNS: gl.constexpr):
    """For each row of blocks the row `at` before; by columns or by rows. Where Triton has no views
    that are larger than a tile, only a warp's own if `at` is not 0."""
    order: gl.constexpr = [1, 2, 0] if COLUMNS else [2, 1, 0]
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, order=order)
    if LARGER_VIEWS:
        BEFORE: gl.constexpr = tiles.shape[0] - NB
        rows = tiles.index(BEFORE - at)._reinterpret(gl.bfloat16, [NB, BASE, BASE], layout)
    elif at == 0:
        rows = tiles._reinterpret(gl.bfloat16, [NB, BASE, BASE], layout)
    else:
        tile = tiles.index((warp_of_four() - at) & (NB - 1))
        rows = tile._reinterpret(gl.bfloat16, [1, BASE, BASE], layout)
    return rows


@gluon.jit
def tiles(BEFORE: gl.constexpr):
    """Allocates blocks of four rows, after the BEFORE rows that `tile_of` may read."""
    ROWS: gl.constexpr = NB + BEFORE if LARGER_VIEWS else NB
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    high = gl.allocate_shared_memory(gl.bfloat16, [ROWS, BASE * BASE], flat)
    low = gl.allocate_shared_memory(gl.bfloat16, [ROWS, BASE * BASE], flat)
    return high, low


@gluon.jit
def put(into, b, COLUMNS: gl.constexpr):
    """Halves of b [NB, BASE, BASE] where `times` finds them."""
    high, low = halves(b)
    tile_of(into[0], 0, COLUMNS).store(high)
    tile_of(into[1], 0, COLUMNS).store(low)


@gluon.jit
def lefts(b, wa: gl.constexpr):
    """Halves of b as left operands."""
    high, low = halves(b)
    return gl.convert_layout(high, wa), gl.convert_layout(low, wa)


@gluon.jit
def times(lhs, rhs, at: gl.constexpr, b, COLUMNS: gl.constexpr):
    """b and left by right in float32, except for 2^-16 of it or less; a warp takes of right, its
    halves, the block of the row `at` before its own."""
    wb: gl.constexpr = gl.DotOperandLayout(1, b.type.layout, 2)
    every = gl.zeros([NB, BASE, BASE], gl.bfloat16, wb)
    _, high = gl.broadcast(every, tile_of(rhs[0], at, COLUMNS).load(wb))
    _, low = gl.broadcast(every, tile_of(rhs[1], at, COLUMNS).load(wb))
    # the product of both low halves is below 2^-16 and left out
    b = mma_v2(lhs[0], low, b)
    b = mma_v2(lhs[1], high, b)
    return mma_v2(lhs[0], high, b)


@gluon.jit
def inverse(b_a):
    """(I + b_a)^-1 of what is below the diagonal of b_a [64, 64], which has wgmma's layout; and the
    diagonal of b_a [NB, BASE]."""
    al: gl.constexpr = b_a.type.layout
    wl: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    wa: gl.constexpr = gl.DotOperandLayout(0, wl, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    block = gl.allocate_shared_memory(gl.float32, [BASE, NB, BASE], plain)
    # a_n: blocks n to the left; each has as many rows before it as `times` reaches back
    a_1 = tiles(2)
    a_2 = tiles(1)
    a_3 = tiles(0)
    xs = tiles(3)
    i_n = gl.arange(0, NB, gl.SliceLayout(1, gl.SliceLayout(2, wl)))[:, None, None]
    o_i = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, wl)))[None, :, None]
    o_j = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, wl)))[None, None, :]
    zero = gl.zeros([NB, BASE, BASE], gl.float32, wl)
    b_0, b_1, b_2, b_3 = by_blocks(b_a, wl)
    b_d = gl.where(i_n == 0, b_0, gl.where(i_n == 1, b_1, gl.where(i_n == 2, b_2, b_3)))
    put(a_1, gl.where(i_n == 1, b_0, gl.where(i_n == 2, b_1, b_2)), False)
    put(a_2, gl.where(i_n == 2, b_0, b_1), False)
    put(a_3, b_0, False)
    b_diag = gl.sum(gl.where(o_i == o_j, b_d, 0.0), 2)
    # strictly below the diagonal: what is above it in b_a is anything
    put(xs, substitute(gl.where(o_i > o_j, b_d, 0.0), block), True)
    # the only barrier of the products: from here on a warp reads what is there already
    gl.thread_barrier()
    x = (tile_of(xs[0], 0, True).load(wa), tile_of(xs[1], 0, True).load(wa))

    b_1 = times(x, a_1, 0, zero, False)
    b_1 = times(lefts(-b_1, wa), xs, 1, zero, True)
    r_1 = lefts(b_1, wa)

    b_2 = times(x, a_2, 0, zero, False)
    b_2 = times(r_1, a_1, 1, b_2, False)
    b_2 = times(lefts(-b_2, wa), xs, 2, zero, True)
    r_2 = lefts(b_2, wa)

    b_3 = times(x, a_3, 0, zero, False)
    b_3 = times(r_1, a_2, 1, b_3, False)
    b_3 = times(r_2, a_1, 2, b_3, False)
    b_3 = times(lefts(-b_3, wa), xs, 3, zero, True)

    b_x = gl.convert_layout(x[0].to(gl.float32) + x[1].to(gl.float32), wl)
    b_r = from_blocks(
        gl.where(i_n == 0, b_x, gl.where(i_n == 1, b_1, gl.where(i_n == 2, b_2, b_3))),
        gl.where(i_n == 1, b_x, gl.where(i_n == 2, b_1, gl.where(i_n == 3, b_2, 0.0))),
        gl.where(i_n == 2, b_x, gl.where(i_n == 3, b_1, 0.0)),
        gl.where(i_n == 3, b_x, 0.0),
        al,
    )
    return b_r, b_diag
