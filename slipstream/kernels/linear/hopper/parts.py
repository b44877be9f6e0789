"""What the delta rule's walks on sm_90 share."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from slipstream.kernels.gluon import gl, gluon, mbarrier


@gluon.jit
def place(cu_ptr, slot, T, N, segment, C: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr):
    """First token of a slot's sequence or segment, its tokens, the slot of its first chunk.

    As the portable find_segment, find_chunk.
    """
    i_n = slot
    i_s = 0
    if PACKED:
        if SPLIT:
            i_n = 0
            past = N
            while past - i_n > 1:
                middle = (i_n + past) // 2
                before = gl.load(cu_ptr + middle).to(gl.int32) // segment + middle <= slot
                i_n = gl.where(before, middle, i_n)
                past = gl.where(before, past, middle)
        begin = gl.maximum(gl.load(cu_ptr + i_n).to(gl.int32), 0)
        length = gl.maximum(gl.minimum(gl.load(cu_ptr + i_n + 1).to(gl.int32), T) - begin, 0)
        first = begin // C + i_n
        if SPLIT:
            i_s = slot - (begin // segment + i_n)
    else:
        if SPLIT:
            i_n = slot // gl.cdiv(T, segment)
            i_s = slot - i_n * gl.cdiv(T, segment)
        begin = i_n * T
        length = T
        first = i_n * gl.cdiv(T, C)
    if SPLIT:
        begin += i_s * segment
        first += i_s * (segment // C)
        length = gl.minimum(gl.maximum(length - i_s * segment, 0), segment)
    return begin, length, first


@gluon.jit
def ring(COUNT: gl.constexpr, N: gl.constexpr):
    """N barriers of COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def clear(tile, left, C: gl.constexpr, N: gl.constexpr):
    """Zeroes in rows `left` and on of a tile [C, N]: what is there belongs to nobody."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_c = gl.arange(0, C, gl.SliceLayout(1, layout))
    b = tile.load(layout)
    tile.store(gl.where((o_c < left)[:, None], b, gl.zeros_like(b)))
