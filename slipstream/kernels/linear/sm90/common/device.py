"""Device functions that the linear family's kernels on sm_90 share."""

from typing import Any, NamedTuple

from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier

WHOLE = gl.constexpr(1.5 * 2.0**23)  # float32 beside it are whole numbers, which its last bits are


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

    As Triton's locate_chunk, of segments too.
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
def program_coords(
    cu_ptr, T, N, HV, segment, C: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr
):
    """Coordinates of a program that scans one head of a segment: the head, the segment, what
    locate_sequence says of it, and its chunks."""
    pid = gl.program_id(0)
    i_h = pid % HV
    i_seg = pid // HV
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


# rows of a slice
STEP = gl.constexpr(32)
ADDED = gl.constexpr(16)  # rows at a time, for want of registers


@gluon.jit
def zero_tail_rows(tile, num_rows, C: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr = 4):
    """Zeroes in rows `num_rows` and on of a tile [C, N], which are of other sequences."""
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
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_t = gl.arange(0, ADDED, gl.SliceLayout(1, layout))
    o_n = gl.arange(0, BK, gl.SliceLayout(0, layout))
    for i in gl.static_range(0, C, ADDED):
        p_x = p + (i_t + o_t + i).to(gl.int64)[:, None] * stride + (i_col + o_n)[None, :]
        m = (o_t < num_rows - i)[:, None]
        b_x = gl.load(p_x, mask=m, other=0.0).to(gl.float32)
        b_x += tile.slice(i, ADDED).load(layout).to(gl.float32)
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
