"""What the linear family on sm_90 shares: device functions, and tensors as TMA takes them.

`inverse` is that of a chunk's unit lower triangle, which four warps make of 64 rows:

    R (I + A) = I        R_ii = (I + A_ii)^-1        R_ij = -(sum_{j < k <= i} R_ik A_kj) R_jj

by blocks of 16 rows: those on the diagonal by substitution, then the block `away` to the left of
each, all four at once, with away 1, 2, 3. A warp has a row of blocks, R_ik in registers; what it
takes of other rows is in shared memory before the first product, so that no warp waits for another
between products. Where a row has no block so far to the left, its warp computes something of what
lies before them in shared memory, which is not used.

Rows of a block on the diagonal lie in a thread and its columns in lanes, so that a step of the
substitution exchanges one number a thread.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import inputs, segments
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.device import WHOLE
from slipstream.kernels.primitives.sm90 import LARGER_VIEWS, TensorDescriptor, gl, gluon, mbarrier
from slipstream.kernels.primitives.sm90_device import halves
from slipstream.runtime.launch_cache import cache

# Packed sequences that programs take by their lengths.
MAX_SORTED = gl.constexpr(64)


class PoolRefs(NamedTuple):
    """Where a scan leaves its state on the way (kernels/linear/prefix_states.py), or None."""

    ptr: Any  # of the program's head, in a row of [HV, V, K]
    rows: Any  # one for each of its chunks
    size: Any  # of a row


@gluon.jit
def pool_refs_of(ptr, rows_ptr, i_n, i_s, at, HV, T, segment, SIZE: gl.constexpr, C: gl.constexpr):
    """The pool of segment i_s of sequence i_n. at: a program's place in a row; SIZE: of a head."""
    rows_ptr += i_n * gl.cdiv(T, C) + i_s * (segment // C)
    return PoolRefs(ptr + at, rows_ptr, HV.to(gl.int64) * SIZE)


@gluon.jit
def store_to_pool(pool, to, b_s, o):
    """b_s to a row of the pool, if that is not below 0."""
    if to >= 0:
        gl.store(pool.ptr + to.to(gl.int64) * pool.size + o, b_s.to(pool.ptr.dtype.element_ty))


@gluon.jit
def locate_sequence(
    cu_ptr, i_seg, T, N, segment, C: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr
):
    """First token of a sequence or segment, its tokens, the number of its first chunk.

    As Triton's locate_chunk, of segments too; a number that none has gets no tokens.
    """
    begin, length, first, _, _, _ = locate_segment(cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT)
    return begin, length, first


@gluon.jit
def locate_segment(
    cu_ptr, i_seg, T, N, segment, C: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr
):
    """That, the sequence, the number in it of the segment, and whether that is the last one; one
    that no segment has is never it."""
    i_n = i_seg
    i_s = 0
    if PACKED:
        if SPLIT:
            i_n = 0
            past = N
            # binary search: segments of sequence n begin at number begin // segment + n, so that
            # no table of segments is made and nothing waits for the lengths
            while past - i_n > 1:
                middle = (i_n + past) // 2
                before = gl.load(cu_ptr + middle).to(gl.int32) // segment + middle <= i_seg
                i_n = gl.where(before, middle, i_n)
                past = gl.where(before, past, middle)
        # wrong offsets are reported by runtime/token_ids.py; here they must not leave memory
        begin = gl.maximum(gl.load(cu_ptr + i_n).to(gl.int32), 0)
        length = gl.maximum(gl.minimum(gl.load(cu_ptr + i_n + 1).to(gl.int32), T) - begin, 0)
        # an upper bound of the chunks before: each sequence has room for one that is not whole
        first = begin // C + i_n
        if SPLIT:
            i_s = i_seg - (begin // segment + i_n)
    else:
        if SPLIT:
            i_n = i_seg // gl.cdiv(T, segment)
            i_s = i_seg - i_n * gl.cdiv(T, segment)
        begin = i_n * T
        length = T
        first = i_n * gl.cdiv(T, C)
    last = True
    if SPLIT:
        exists = (i_s == 0) | ((i_s > 0) & (i_s * segment < length))
        last = exists & ((i_s + 1) * segment >= length)
        begin += i_s * segment
        first += i_s * (segment // C)
        # a segment number that no sequence has is a segment of no tokens
        length = gl.where(exists, gl.minimum(length - i_s * segment, segment), 0)
    return begin, length, first, i_n, i_s, last


@gluon.jit
def longest_first(cu_ptr, i_n, N, HV, PACKED: gl.constexpr):
    """The i_n-th longest of few packed sequences, of others sequence i_n itself: the last program
    to begin should be a short one, since all wait for it. As Triton's of the vector decay."""
    if PACKED:  # noqa: SIM102
        # each of N HV programs looks at all lengths
        if (N <= MAX_SORTED) & (N * HV <= 1024):
            # each warp has all of them
            layout: gl.constexpr = gl.BlockedLayout([MAX_SORTED // 32], [32], [gl.num_warps()], [0])
            o = gl.arange(0, MAX_SORTED, layout)
            m = o < N
            length = gl.load(cu_ptr + o + 1, mask=m, other=0).to(gl.int32)
            length -= gl.load(cu_ptr + o, mask=m, other=0).to(gl.int32)
            # wrong offsets count as no tokens, and what is no sequence as fewer: it comes last
            length = gl.where(m, gl.maximum(length, 0), -1)
            before = gl.zeros([MAX_SORTED], gl.int32, layout)
            begin = gl.load(cu_ptr).to(gl.int32)
            for j in range(N):
                end = gl.load(cu_ptr + j + 1).to(gl.int32)
                other = gl.maximum(end - begin, 0)
                before += ((other > length) | ((other == length) & (o > j))).to(gl.int32)
                begin = end
            i_n = sm90.uniform(gl.sum(gl.where(before == i_n, o, 0), 0))
    return i_n


@gluon.jit
def program_coords(
    cu_ptr, T, N, HV, segment, C: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, pid=None
):
    """Coordinates of a program that scans one head of a segment: the head, the segment, what
    locate_sequence says of it, and its chunks. pid: its number, if not the program's own."""
    pid = gl.program_id(0) if pid is None else pid
    i_h = pid % HV
    i_seg = longest_first(cu_ptr, pid // HV, N, HV, PACKED and not SPLIT)
    row, length, first = locate_sequence(cu_ptr, i_seg, T, N, segment, C, PACKED, SPLIT)
    return i_h, i_seg, row, length, first, gl.cdiv(length, C)


@gluon.jit
def alloc_mbarriers(COUNT: gl.constexpr, N: gl.constexpr):
    """N barriers of COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def invalidate_mbarriers(bars):
    """For barriers that no warp_specialize takes, once no thread waits at them: what is in shared
    memory later may come where they were, and be overwritten (compiler/smem_hazards.py)."""
    N: gl.constexpr = bars.shape[0]
    # all warps are past their last wait
    gl.thread_barrier()
    for i in gl.static_range(N):
        mbarrier.invalidate(bars.index(i))


@gluon.jit
def zero_tail_rows(tile, num_rows, C: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr = 4):
    """Zeroes in rows `num_rows` and on of a tile [C, N], which are of other sequences."""
    STEP: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    o_c = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    # a slice at a time: the whole tile would be in registers at once
    for i in gl.static_range(0, C, STEP):
        rows = tile.slice(i, STEP)
        b = rows.load(layout)
        rows.store(gl.where((o_c < num_rows - i)[:, None], b, gl.zeros_like(b)))


@gluon.jit
def store_rows_masked(p, tile, i_t, i_col, stride, num_rows, C: gl.constexpr, BK: gl.constexpr):
    """A tile of shared memory to rows i_t and on, those before `num_rows`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_t = gl.arange(0, C, gl.SliceLayout(1, layout))
    o_n = gl.arange(0, BK, gl.SliceLayout(0, layout))
    p_x = p + (i_t + o_t).to(gl.int64)[:, None] * stride + (i_col + o_n)[None, :]
    gl.store(p_x, tile.load(layout), mask=(o_t < num_rows)[:, None])


@gluon.jit
def add_rows_masked(p, tile, i_t, i_col, stride, num_rows, C: gl.constexpr, BK: gl.constexpr):
    """That, added to what the same threads wrote there."""
    STEP: gl.constexpr = 16  # of 32 rows there are too few registers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_t = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    o_n = gl.arange(0, BK, gl.SliceLayout(0, layout))
    for i in gl.static_range(0, C, STEP):
        p_x = p + (i_t + o_t + i).to(gl.int64)[:, None] * stride + (i_col + o_n)[None, :]
        m = (o_t < num_rows - i)[:, None]
        b_x = gl.load(p_x, mask=m, other=0.0).to(gl.float32)
        b_x += tile.slice(i, STEP).load(layout).to(gl.float32)
        gl.store(p_x, b_x.to(tile.dtype), mask=m)


@gluon.jit
def store_tile(desc, p, tile, i_t, i_col, stride, num_rows, C: gl.constexpr, BK: gl.constexpr):
    """A tile of shared memory to rows i_t and on, those before `num_rows` alone."""
    if num_rows >= C:
        sm90.copy_out(desc, [i_t, i_col], tile)
    else:
        store_rows_masked(p, tile, i_t, i_col, stride, num_rows, C, BK)


@gluon.jit
def store_tile_transposed(desc, p, tile, b, i_t, i_col, stride, num_rows, C: gl.constexpr):
    """b [64, C] as columns i_col and on of rows i_t and on, of which the first `num_rows`."""
    layout: gl.constexpr = b.type.layout
    if num_rows >= C:
        # the tile's last copy out still reads it
        sm90.store_wait(0)
        tile.permute((1, 0)).store(b.to(tile.dtype))
        # TMA sees what the warps wrote only after a fence, and one thread issues it for all
        sm90.fence_async_shared()
        gl.thread_barrier()
        sm90.copy_out(desc, [i_t, i_col], tile)
    else:
        o_t = gl.arange(0, C, gl.SliceLayout(0, layout))
        o_n = gl.arange(0, 64, gl.SliceLayout(1, layout))
        p_x = p + (i_t + o_t).to(gl.int64)[None, :] * stride + (i_col + o_n)[:, None]
        gl.store(p_x, b.to(tile.dtype), mask=(o_t < num_rows)[None, :])


@gluon.jit
def load_beta_gate(p, C: gl.constexpr, HAS_GATE: gl.constexpr):
    """beta and G of a chunk, by one warp that takes them to shared memory.

    Parts that load them themselves wait for them at every fence, wherever they are used.
    """
    N: gl.constexpr = (1 + HAS_GATE) * C
    return gl.load(p + gl.arange(0, N, gl.BlockedLayout([N // 32], [32], [1], [0])))


@gluon.jit
def exp2_by_parts(b):
    """2^b for |b| < 126, multiples of 2^-13. A whole number more moves the exponent alone: the
    instruction rounds otherwise below 0 than above it, so that it gets what is after the point."""
    b_whole = (b - (0.5 - 2.0**-14)) + WHOLE
    b_mantissa = gl.exp2(b - (b_whole - WHOLE))
    # as a product, which keeps NaN; the sum's last bits are the whole number
    bits = (b_whole.to(gl.int32, bitcast=True) << 23) + 0x3F800000
    return b_mantissa * bits.to(gl.float32, bitcast=True)


@gluon.jit
def exp2_and_inverse(b):
    """exp2_by_parts of b and of -b, |b| < 125."""
    b_whole = (b - (0.5 - 2.0**-14)) + WHOLE
    b_fraction = b - (b_whole - WHOLE)
    bits = (b_whole.to(gl.int32, bitcast=True) << 23) + 0x3F800000
    # -b is -1 less a whole number, and 1 less what b has after its point
    inverse_bits = 0x7E800000 - bits
    b_inverse = gl.exp2(1.0 - b_fraction) * inverse_bits.to(gl.float32, bitcast=True)
    return gl.exp2(b_fraction) * bits.to(gl.float32, bitcast=True), b_inverse


@gluon.jit
def exp2_of_whole(b):
    """2^b of a whole number, -126 to 127."""
    bits = ((b + WHOLE).to(gl.int32, bitcast=True) << 23) + 0x3F800000
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def exp2_or_least(b):
    """exp2_by_parts of b below 126, but 2^-126 where it would be less."""
    return exp2_by_parts(at_least(b, -126.0))


@gluon.jit
def at_least(b, low):
    """The larger one, and NaN for NaN, which gl.maximum would drop."""
    return gl.where(b < low, low, b)


_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def align16(x: Tensor) -> Tensor:
    """x, or a copy of it that begins at a multiple of 16 bytes."""
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x


def align_for_tma(terms: inputs.LinearInputs) -> inputs.LinearInputs:
    """With all tensors that kernels read by TMA aligned."""
    names = ("q", "k", "v", "a", "b", "g", "erase")
    given = {name: x for name in names if (x := getattr(terms, name)) is not None}
    return terms._replace(**{name: align16(x) for name, x in given.items()})


def tma_descriptor(
    x: Tensor | None, width: int, rows: int, columns: int, stride: int | None = None
) -> Any:
    """A descriptor of x as rows of `width`, in tiles [rows, columns]; None of None. stride: from
    row to row, `width` if None."""
    if x is None:
        return None
    shape, strides = [x.numel() // width, width], [stride or width, 1]
    return TensorDescriptor(x, shape, strides, *_tile(int(rows), int(columns), x.dtype))


def token_tiles(x: Tensor | None, columns: int, stride: int | None = None) -> Any:
    """A descriptor of x [B, T, heads, channels] as rows of all heads, in tiles [CHUNK, columns];
    None of None. stride: from token to token, if not those of all heads."""
    if x is None:
        return None
    return tma_descriptor(x, x.shape[2] * x.shape[3], segments.CHUNK, columns, stride)


@cache
def _tile(rows: int, columns: int, dtype: torch.dtype) -> tuple[list[int], Any]:
    return [rows, columns], gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[dtype])


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
        rows = tiles.index(BEFORE - at)._reinterpret(tiles.dtype, [NB, BASE, BASE], layout)
    elif at == 0:
        rows = tiles._reinterpret(tiles.dtype, [NB, BASE, BASE], layout)
    else:
        tile = tiles.index((warp_of_four() - at) & (NB - 1))
        rows = tile._reinterpret(tiles.dtype, [1, BASE, BASE], layout)
    return rows


@gluon.jit
def tiles(BEFORE: gl.constexpr, dtype: gl.constexpr = gl.bfloat16):
    """Allocates blocks of four rows, after the BEFORE rows that `tile_of` may read."""
    ROWS: gl.constexpr = NB + BEFORE if LARGER_VIEWS else NB
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    high = gl.allocate_shared_memory(dtype, [ROWS, BASE * BASE], flat)
    low = gl.allocate_shared_memory(dtype, [ROWS, BASE * BASE], flat)
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
