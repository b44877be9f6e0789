# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAssignmentType=false
# pyright: reportCallIssue=false
"""Kernels of norm_tries.py in Gluon: rows by TMA through shared memory, and rows of one warp each.

As in norm_tries_rows.py. Descriptors have lines of 32 words of 128 bytes, swizzled; a tile is so
many lines that they make BR rows. What a program reads is read again from shared memory after the
sums, and y is written where x was, so that registers hold little and many programs are at work.
"""

from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
)

LINE = gl.constexpr(32)


@gluon.jit
def _zero(b_x):
    return b_x.to(gl.int32, bitcast=True) >> 31


@gluon.jit
def _pair(b_v, zero):
    low, high = b_v << (16 + zero), b_v & (-65536 ^ zero)
    return low.to(gl.float32, bitcast=True), high.to(gl.float32, bitcast=True)


@gluon.jit
def _word(b_low, b_high):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [b_low, b_high], gl.int32, True, 1
    )


@gluon.constexpr_function
def lines_of(WARPS):
    """Four words a thread, a warp has four lines."""
    return gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])


@gluon.jit
def _rows(b_v, BR: gl.constexpr):
    return b_v.reshape((BR, b_v.shape[0] * b_v.shape[1] // BR))


@gluon.jit
def _weight(w_ptr, FIRST: gl.constexpr, LINES: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """Of some lines, of which a row has N."""
    layout: gl.constexpr = lines_of(WARPS)
    o = FIRST + gl.arange(0, LINES, gl.SliceLayout(1, layout)) % N
    return gl.load(w_ptr + o[:, None] * LINE + gl.arange(0, LINE, gl.SliceLayout(0, layout))[None])


@gluon.jit
def _rstd(x_s, eps, BR: gl.constexpr, PIECES: gl.constexpr, WARPS: gl.constexpr):
    LINES: gl.constexpr = x_s.shape[0] // PIECES
    b_square = 0.0
    for p in gl.static_range(PIECES):
        b_v = x_s.slice(p * LINES, LINES).load(lines_of(WARPS))
        b_low, b_high = _pair(_rows(b_v, BR), 0)
        b_square += b_low * b_low + b_high * b_high
    return gl.rsqrt(gl.sum(b_square, 1) / (2 * PIECES * LINES * LINE // BR) + eps)[:, None]


@gluon.jit
def _normed(x_s, g_s, b_w, b_rstd, BR: gl.constexpr, WARPS: gl.constexpr):
    """Writes y of some lines where x was."""
    layout: gl.constexpr = lines_of(WARPS)
    zero = _zero(b_rstd)
    b_low, b_high = _pair(_rows(x_s.load(layout), BR), zero)
    w_low, w_high = _pair(_rows(b_w, BR), zero)
    b_low, b_high = b_low * b_rstd * w_low, b_high * b_rstd * w_high
    if g_s is not None:
        g_low, g_high = _pair(_rows(g_s.load(layout), BR), 0)
        b_low = b_low * g_low / (1 + gl.exp(-g_low))
        b_high = b_high * g_high / (1 + gl.exp(-g_high))
    x_s.store(_word(b_low, b_high).reshape((x_s.shape[0], LINE)))


@gluon.jit
def norm_tma_kernel(
    x_desc, g_desc, w_ptr, y_desc, eps, BR: gl.constexpr, PIECES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Grid (R / BR). PIECES of a row are computed one after the other, for few registers."""
    LINES: gl.constexpr = x_desc.block_type.shape[0]
    at = [gl.program_id(0) * LINES, 0]
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    x_s = gl.allocate_shared_memory(gl.int32, [LINES, LINE], x_desc.layout)
    mbarrier.init(bar, count=1)
    if g_desc is not None:
        g_s = gl.allocate_shared_memory(gl.int32, [LINES, LINE], g_desc.layout)
        mbarrier.expect(bar, 2 * x_desc.block_type.nbytes)
        copy_in(x_desc, at, bar, x_s)
        copy_in(g_desc, at, bar, g_s)
    else:
        g_s = None
        mbarrier.expect(bar, x_desc.block_type.nbytes)
        copy_in(x_desc, at, bar, x_s)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    b_rstd = _rstd(x_s, eps, BR, PIECES, WARPS)
    PIECE: gl.constexpr = LINES // PIECES
    for p in gl.static_range(PIECES):
        b_w = _weight(w_ptr, p * PIECE, PIECE, LINES // BR, WARPS)
        part = None if g_s is None else g_s.slice(p * PIECE, PIECE)
        _normed(x_s.slice(p * PIECE, PIECE), part, b_w, b_rstd, BR, WARPS)
    fence_async_shared()
    copy_out(y_desc, at, x_s)
    store_wait(0)


@gluon.jit
def _fetch(x_desc, g_desc, x_s, g_s, bars, i, s, m):
    """Tile i to slot s, if m."""
    LINES: gl.constexpr = x_desc.block_type.shape[0]
    nbytes: gl.constexpr = x_desc.block_type.nbytes * (1 if g_desc is None else 2)
    bar = bars.index(s)
    mbarrier.expect(bar, nbytes, pred=m)
    copy_in(x_desc, [i * LINES, 0], bar, x_s.index(s), pred=m)
    if g_desc is not None:
        copy_in(g_desc, [i * LINES, 0], bar, g_s.index(s), pred=m)


@gluon.jit
def norm_ring_kernel(
    x_desc, g_desc, w_ptr, y_desc, count, eps, BR: gl.constexpr, SLOTS: gl.constexpr,
    LAG: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid (P): every P-th of `count` tiles, SLOTS of them on their way, in or out; w stays in
    registers. A slot is filled again LAG tiles after y was written from it."""
    LINES: gl.constexpr = x_desc.block_type.shape[0]
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    x_s = gl.allocate_shared_memory(gl.int32, [SLOTS, LINES, LINE], x_desc.layout)
    g_s = None
    if g_desc is not None:
        g_s = gl.allocate_shared_memory(gl.int32, [SLOTS, LINES, LINE], g_desc.layout)
    first, P = gl.program_id(0), gl.num_programs(0)
    for j in gl.static_range(SLOTS):
        mbarrier.init(bars.index(j), count=1)
    for j in gl.static_range(SLOTS - LAG):
        _fetch(x_desc, g_desc, x_s, g_s, bars, first + j * P, j, first + j * P < count)
    b_w = _weight(w_ptr, 0, LINES, LINES // BR, WARPS)
    for step in range(gl.cdiv(count - first, P)):
        i, s = first + step * P, step % SLOTS
        store_wait(LAG - 1)
        later = i + (SLOTS - LAG) * P
        _fetch(x_desc, g_desc, x_s, g_s, bars, later, (step + SLOTS - LAG) % SLOTS, later < count)
        mbarrier.wait(bars.index(s), (step // SLOTS) & 1)
        b_rstd = _rstd(x_s.index(s), eps, BR, 1, WARPS)
        _normed(x_s.index(s), None if g_s is None else g_s.index(s), b_w, b_rstd, BR, WARPS)
        fence_async_shared()
        copy_out(y_desc, [i * LINES, 0], x_s.index(s))
    store_wait(0)


@gluon.jit
def norm_warps_kernel(
    x_ptr, g_ptr, w_ptr, y_ptr, eps, D2: gl.constexpr, BR: gl.constexpr, WARPS: gl.constexpr
):
    """Grid (R / BR): a warp has rows of its own, so that no warp waits for another."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    o_r = gl.program_id(0).to(gl.int64) * BR + gl.arange(0, BR, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D2, gl.SliceLayout(0, layout))[None, :]
    o = o_r[:, None] * D2 + o_d
    b_v, b_g = gl.load(x_ptr + o), None
    if g_ptr is not None:
        b_g = gl.load(g_ptr + o)
    b_low, b_high = _pair(b_v, 0)
    b_sum = gl.sum(b_low * b_low + b_high * b_high, 1)
    b_rstd = gl.rsqrt(b_sum / (2 * D2) + eps)[:, None]
    zero = _zero(b_rstd)
    b_low, b_high = _pair(b_v, zero)
    w_low, w_high = _pair(gl.load(w_ptr + o_d), zero)
    b_low, b_high = b_low * b_rstd * w_low, b_high * b_rstd * w_high
    if b_g is not None:
        g_low, g_high = _pair(b_g, zero)
        b_low = b_low * g_low / (1 + gl.exp(-g_low))
        b_high = b_high * g_high / (1 + gl.exp(-g_high))
    gl.store(y_ptr + o, _word(b_low, b_high))


@gluon.jit
def l2_tma_kernel(x_desc, dy_desc, dx_desc, eps, BR: gl.constexpr, WARPS: gl.constexpr):
    """Grid (R / BR); r is made of x."""
    LINES: gl.constexpr = x_desc.block_type.shape[0]
    layout: gl.constexpr = lines_of(WARPS)
    at = [gl.program_id(0) * LINES, 0]
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    x_s = gl.allocate_shared_memory(gl.int32, [LINES, LINE], x_desc.layout)
    d_s = gl.allocate_shared_memory(gl.int32, [LINES, LINE], dy_desc.layout)
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 2 * x_desc.block_type.nbytes)
    copy_in(x_desc, at, bar, x_s)
    copy_in(dy_desc, at, bar, d_s)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    b_low, b_high = _pair(_rows(x_s.load(layout), BR), 0)
    d_low, d_high = _pair(_rows(d_s.load(layout), BR), 0)
    b_r = gl.rsqrt(gl.sum(b_low * b_low + b_high * b_high, 1) + eps)[:, None]
    b_low, b_high = b_low * b_r, b_high * b_r
    b_sum = gl.sum(b_low * d_low + b_high * d_high, 1)[:, None]
    d_low, d_high = (d_low - b_low * b_sum) * b_r, (d_high - b_high * b_sum) * b_r
    x_s.store(_word(d_low, d_high).reshape((LINES, LINE)))
    fence_async_shared()
    copy_out(dx_desc, at, x_s)
    store_wait(0)
