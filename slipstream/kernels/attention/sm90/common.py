"""Device functions of attention's kernels for sm_90: units of work, tile bounds, rings of buffers.

A unit is a tile of a pair (sequence, head). A program takes units one after another
(forward.py). Pairs go in sections whose keys and values fit the L2 cache; of a section the
tiles with the most work come first.

    offsets = cu_q, cu_k, lengths         window = left, right         sizes: Sizes
    strides = rb, rh, ch: a tensor [B, T, H, D] as a matrix for TMA, in which batch b, row t, head h
              begin at row b rb + h rh + t and column h ch

Rings: i_step counts a ring's tiles over all units. Its stage is i_step % COUNT, its phase
i_step // COUNT & 1. `full` barriers tell that a stage is filled, `empty` that it may be refilled.

Register pressure decides this code. A warpgroup has 240 registers a thread, and accumulators take
most of them, so values that LLVM and ptxas would hoist out of a loop and keep are made `opaque`:
combined with i_step >> 30, which is 0 at run time but not to a compiler. Scalars that are needed
only at a unit's end are parked in shared memory (store_scalars, load_scalar).
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.triton import scores
from slipstream.kernels.primitives import device, sm90, sm90_device
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier


class Sizes(NamedTuple):
    """Numbers of a launch, in the order of the kernels' arguments."""

    T: Any  # queries
    S: Any  # keys
    H: Any  # heads of q
    N: Any  # sequences
    group: Any  # heads of q that share one of k
    tiles: Any  # units of a pair
    search_steps: Any  # of the binary search for a packed tile's sequence
    section: Any  # pairs at work at a time
    units: Any


class TileLocation(NamedTuple):
    """Where a unit's queries and keys are, all int32."""

    i_h: Any  # head, of k where units are tiles of keys
    i_b: Any  # batch row of q, 0 if packed
    begin: Any  # first row of the sequence's queries
    queries: Any  # how many the sequence has
    i_kb: Any  # batch row of k, 0 if packed
    begin_k: Any  # first row of the sequence's keys
    keys: Any  # how many it uses
    capacity: Any  # how many it has
    row: Any  # the tile's first row in its sequence
    i_n: Any  # sequence


class TileRange(NamedTuple):
    """Tiles of rows that another tile sees: `num_tiles` from row `first` on, of which those before
    `inner` and from `outer` on are seen in part and masked."""

    first: Any
    num_tiles: Any
    inner: Any
    outer: Any


# what a kernel is compiled for, added up in FLAGS; SINKS: an attention sink, a score of no key
FLAG = device.Names(
    *("LEFT", "RIGHT", "SOFTCAP", "LENGTHS", "PACKED_Q", "PACKED_K", "SINKS", "DYNAMIC"), bits=True
)
# rows that are zeroed or stored at a time
STEP = gl.constexpr(16)
# bits of the row and the column in a wgmma accumulator [64, N] that differ within a thread
THREAD_ROW_BITS = gl.constexpr(55)
THREAD_COLUMN_BITS = gl.constexpr(6)
# widths of a head up to which registers suffice: recomputing and parking cost more than they save
SPARE_REGISTERS = gl.constexpr(64)


@gluon.jit
def opaque(numbers, i_step):
    """The same numbers, xored with i_step >> 30: what is computed from them is computed where it
    is used, instead of being hoisted and kept in registers that the loops over tiles lack."""
    result = ()
    for i in gl.static_range(len(numbers)):
        result = result + (numbers[i] ^ (i_step >> 30),)
    return result


@gluon.jit
def opaque_range(x, i_step, THREAD_BITS: gl.constexpr):
    """opaque of x = gl.arange(0, 2^n) where a thread has several elements: THREAD_BITS are the bits
    that differ within a thread. The others are added to one of them, and none is kept."""
    return ((x & THREAD_BITS) ^ (i_step >> 30)) + (x & (x.shape[0] - 1 - THREAD_BITS))


@gluon.jit
def opaque_if_wide(i_step, WIDTH: gl.constexpr):
    """i_step to make values opaque by; the constant 0, which does nothing, if heads of WIDTH leave
    registers to spare."""
    return i_step if WIDTH > SPARE_REGISTERS else 0


@gluon.jit
def program_id_volatile(number):
    """The program's number, read where it is needed: gl.program_id is read once for all warps and
    kept in a register. The operand is unused; an asm instruction has to have one."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pair_of_unit(unit, tiles, pairs, section):
    """The tile and the pair of a unit, section by section."""
    before = unit // (tiles * section) * section
    unit -= before * tiles
    size = gl.minimum(section, pairs - before)
    return unit // size, before + unit % size


@gluon.jit
def _sequence_of_tile(tile, cu_ptr, N, search_steps, B: gl.constexpr):
    """scores.sequence_of_tile of packed rows, 32 sequences a step: each lane of a warp looks at
    one, where halving the range would wait for five loads."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(1, 33, layout)
    low = N * 0
    bits = search_steps
    while bits > 0:
        bits = gl.maximum(bits - 5, 0)
        at = low + (lanes << bits)
        first = gl.load(cu_ptr + at, mask=at < N, other=0).to(gl.int64) // B
        before = (at < N) & (first + at <= tile)
        low += gl.sum(before.to(gl.int32), 0) << bits
    tile -= (gl.load(cu_ptr + low).to(gl.int64) // B).to(gl.int32) + low
    return low, tile * B


@gluon.jit
def locate_tile(unit, offsets, sizes, B: gl.constexpr, KEYS: gl.constexpr, FLAGS: gl.constexpr):
    """Where a unit is. KEYS: units are tiles of keys, else of queries."""
    cu_q_ptr, cu_k_ptr, lengths_ptr = offsets
    sizes = Sizes(*opaque(sizes, unit))
    H, N, tiles = sizes.H, sizes.N, sizes.tiles
    if KEYS:
        H = H // sizes.group
        PACKED: gl.constexpr = FLAGS & FLAG.PACKED_K
        cu_ptr = cu_k_ptr
    else:
        PACKED: gl.constexpr = FLAGS & FLAG.PACKED_Q
        cu_ptr = cu_q_ptr
    pairs = H if PACKED else H * N
    tile, pair = pair_of_unit(unit, tiles, pairs, sizes.section)
    # longest first: under a causal mask the last queries see the most keys, and the first keys are
    # seen by the most queries
    if not KEYS:
        tile = tiles - 1 - tile
    if PACKED:
        i_n, row = _sequence_of_tile(tile, cu_ptr, N, sizes.search_steps, B)
    else:
        i_n, row = pair // H, tile * B
    i_b, begin, _, queries = scores.rows_of_sequence(
        i_n, cu_q_ptr, lengths_ptr, sizes.T, (FLAGS & FLAG.PACKED_Q) != 0, False
    )
    i_kb, begin_k, capacity, keys = scores.rows_of_sequence(
        i_n,
        cu_k_ptr,
        lengths_ptr,
        sizes.S,
        (FLAGS & FLAG.PACKED_K) != 0,
        (FLAGS & FLAG.LENGTHS) != 0,
    )
    i_b, begin, i_kb, begin_k = (
        i_b.to(gl.int32),
        begin.to(gl.int32),
        i_kb.to(gl.int32),
        begin_k.to(gl.int32),
    )
    return TileLocation(pair % H, i_b, begin, queries, i_kb, begin_k, keys, capacity, row, i_n)


@gluon.jit
def tile_range(low, inner, outer, high, B: gl.constexpr, MIN_TILES: gl.constexpr):
    """From bounds in rows to tiles; `inner` and `outer` are numbers of tiles."""
    count = gl.maximum(gl.cdiv(high - low, B), MIN_TILES)
    inner = gl.minimum(gl.maximum(inner - low, 0) // B, count)
    outer = gl.minimum(gl.maximum(outer - low, 0) // B, count)
    return TileRange(low, count, inner, gl.maximum(outer, inner))


@gluon.jit
def visible_key_tiles(
    row, queries, keys, window, BM: gl.constexpr, BN: gl.constexpr, FLAGS: gl.constexpr
):
    """The tiles of keys that BM queries see, at least one."""
    left, right = window
    shift = keys - queries
    low, inner, outer, high = scores.visible_tiles(
        row + shift,
        gl.minimum(row + BM, queries) - 1 + shift,
        gl.where(row < queries, keys, 0),
        left,
        right,
        BN,
        (FLAGS & FLAG.LEFT) != 0,
        (FLAGS & FLAG.RIGHT) != 0,
    )
    return tile_range(low, inner, outer, high, BN, 1)


@gluon.jit
def visible_query_tiles(row, queries, keys, window, BM: gl.constexpr, BN: gl.constexpr,
                 FLAGS: gl.constexpr, MIN_TILES: gl.constexpr = 1):  # fmt: skip
    """The tiles of the queries that see BN keys, at least MIN_TILES."""
    left, right = window
    shift = keys - queries
    low, inner, outer, high = scores.visible_tiles(
        row - shift,
        gl.minimum(row + BN, keys) - 1 - shift,
        gl.where(row < keys, queries, 0),
        right,
        left,
        BM,
        (FLAGS & FLAG.RIGHT) != 0,
        (FLAGS & FLAG.LEFT) != 0,
    )
    return tile_range(low, inner, outer, high, BM, MIN_TILES)


@gluon.jit
def tile_coords(strides, i_b, i_h, row):
    """Row and column of a tile in the matrix of its tensor."""
    rb, rh, ch = strides
    return i_b * rb + i_h * rh + row, i_h * ch


@gluon.jit
def fetch(desc, row, col, full, buffer):
    """Starts to load a tile by TMA; its bytes complete the phase of `full`."""
    mbarrier.expect(full, desc.block_type.nbytes)
    sm90.copy_in(desc, [row, col], full, buffer)


@gluon.jit
def wait_full(barriers, i_step, COUNT: gl.constexpr):
    """Waits until the stage of this step is filled."""
    mbarrier.wait(barriers.index(i_step % COUNT), (i_step // COUNT) & 1)


@gluon.jit
def wait_empty(barriers, i_step, COUNT: gl.constexpr):
    """Waits until the stage of this step may be filled: the phase before, so the first is free."""
    mbarrier.wait(barriers.index(i_step % COUNT), ((i_step // COUNT) & 1) ^ 1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers; a phase completes after the given number of arrivals."""
    result = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(result.index(i), count=ARRIVALS)
    return result


@gluon.jit
def store_scalars(pad, numbers, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Parks scalars in shared memory where wide heads leave no registers for them."""
    if WIDTH > SPARE_REGISTERS:
        sm90_device.store_scalars(pad, numbers, FIRST, 4)


@gluon.jit
def load_scalar(pad, numbers, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """The scalars that store_scalars parked, or as they are if it did not."""
    result = ()
    for i in gl.static_range(len(numbers)):
        if WIDTH > SPARE_REGISTERS:
            result = result + (sm90_device.load_scalar(pad, FIRST + i, 4),)
        else:
            result = result + (numbers[i],)
    return result


@gluon.constexpr_function
def rows_layout(width):
    """Rows of `width` 16-bit elements over four warps, 16 bytes a thread."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def zero_tail_rows(buffers, rows, i_step, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Zeroes the rows of tiles from `rows` on: they are another sequence's, and 0 times NaN is NaN.

    Every consumer does it for itself, with the same outcome, so that none waits for another.
    """
    layout: gl.constexpr = rows_layout(WIDTH)
    o_r = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    o_r = opaque_range(o_r, opaque_if_wide(i_step, WIDTH), 1024 // WIDTH - 1)
    if rows < ROWS:
        for i in gl.static_range(0, ROWS, STEP):
            if rows < i + STEP:
                for j in gl.static_range(len(buffers)):
                    rows_at = buffers[j].slice(i, STEP)
                    rows_at.store(gl.where((o_r < rows - i)[:, None], rows_at.load(layout), 0.0))
        sm90.fence_async_shared()
        sm90.threads_together()


@gluon.jit
def inverse(x):
    """1 / x for x from 1 to inf, in one instruction: a division also handles overflow."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def where_below(s, a, b):
    """s where a < b, -inf elsewhere, in asm: ptxas packs plain comparisons into words of bits and
    converts them back for as long as the products take."""
    _, a = gl.broadcast(s, a)
    _, b = gl.broadcast(s, b)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r",
        [s, a, b],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def where_within(s, x, low, width):
    """s where low <= x < low + width, -inf elsewhere, by one unsigned comparison."""
    _, x = gl.broadcast(s, x)
    _, low = gl.broadcast(s, low)
    _, width = gl.broadcast(s, width)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 x; sub.u32 x, $2, $3; setp.lt.u32 p, x, $4;"
        " selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r,r",
        [s, x, low, width],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def stage_through_smem(buffer, values, WIDTH: gl.constexpr):
    """64 rows from an accumulator's layout through shared memory to that of 16-byte stores, STEP
    rows at a time. The fence: TMA refills the buffer next."""
    buffer.store(values)
    rows = ()
    for i in gl.static_range(0, 64, STEP):
        rows = rows + (buffer.slice(i, STEP).load(rows_layout(WIDTH)),)
    sm90.fence_async_shared()
    return rows


@gluon.jit
def store_staged(ptr, values, stride, rows, i_step, WIDTH: gl.constexpr):
    """Stores what stage_through_smem returned: the first `rows` rows, `stride` apart."""
    layout: gl.constexpr = rows_layout(WIDTH)
    o_r = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    o_r = opaque_range(o_r, opaque_if_wide(i_step, WIDTH), 1024 // WIDTH - 1)
    p = ptr + o_r.to(gl.int64)[:, None] * stride + o_c[None, :]
    for i in gl.static_range(64 // STEP):
        gl.store(p, values[i], mask=(o_r < rows - i * STEP)[:, None] & (o_c >= 0)[None, :])
        p += STEP * stride
