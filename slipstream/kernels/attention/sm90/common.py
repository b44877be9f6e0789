"""What the kernels share: units of work, where a tile lies, what it sees, and rings of buffers.

A program takes unit after unit, `programs` apart. A unit is a tile of a pair (sequence, head);
`section` pairs, whose keys and values fit the L2 cache, are done before the next, tile by tile,
those with the most work first. All that tells the shape is a tuple:

    offsets = cu_q, cu_k, lengths         sizes = T, S, H, N, group, tiles, steps, section, units
    window = left, right                  at = rb, rh, ch: row and column of a batch and a head

`at` is where a tensor [B, T, H, D] lies in a matrix: batch b, row t, head h begin at row
b rb + h rh + t and column h ch.
"""

from slipstream.kernels.attention.triton.scores import (
    rows_of_sequence,
    seen_tiles,
    sequence_of_tile,
)
from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    threads_together,
)
from slipstream.kernels.primitives.smem_scalars import load_scalar as look_up
from slipstream.kernels.primitives.smem_scalars import store_scalars as write_down

# what a kernel is compiled for, added up in FLAGS
LEFT = gl.constexpr(1)
RIGHT = gl.constexpr(2)
SOFTCAP = gl.constexpr(4)
LENGTHS = gl.constexpr(8)
PACKED_Q = gl.constexpr(16)
PACKED_K = gl.constexpr(32)
# rows that are cleaned or stored at a time
STEP = gl.constexpr(16)
# bits of a product's row and column that are a thread's own
ROWS_OWN = gl.constexpr(55)
COLUMNS_OWN = gl.constexpr(6)
# channels that leave registers to spare: there it costs more to make anew and to note than to keep
SPARE_REGISTERS = gl.constexpr(64)


@gluon.jit
def opaque(numbers, turn):
    """The same numbers, to no compiler's knowledge, since it does not know that turn >> 30 is 0:
    what is made of them is made where it is wanted, and not kept from turn to turn in registers
    that the loops over tiles lack."""
    made = ()
    for i in gl.static_range(len(numbers)):
        made = made + (numbers[i] ^ (turn >> 30),)
    return made


@gluon.jit
def opaque_range(x, turn, OWN: gl.constexpr):
    """The same of x, which is gl.arange(0, 2^n), where a thread has several: OWN are the bits that
    are its own. Of one number the others are made, and none is kept."""
    return ((x & OWN) ^ (turn >> 30)) + (x & (x.shape[0] - 1 - OWN))


@gluon.jit
def opaque_if_wide(turn, WIDTH: gl.constexpr):
    """The turn to make anew by; 0, which a compiler knows, if WIDTH channels leave registers."""
    return turn if WIDTH > SPARE_REGISTERS else 0


@gluon.jit
def pair_of_unit(unit, tiles, pairs, section):
    """Tile and pair of a unit of work."""
    before = unit // (tiles * section) * section
    unit -= before * tiles
    size = gl.minimum(section, pairs - before)
    return unit // size, before + unit % size


@gluon.jit
def locate_tile(unit, offsets, sizes, B: gl.constexpr, KEYS: gl.constexpr, FLAGS: gl.constexpr):
    """Head, batch row and first row of queries and of keys, how many, room for keys, tile's row,
    and the sequence."""
    cu_q_ptr, cu_k_ptr, lengths_ptr = offsets
    T, S, H, N, group, tiles, steps, section, _ = opaque(sizes, unit)
    if KEYS:
        H = H // group
        PACKED: gl.constexpr = FLAGS & PACKED_K
        cu_ptr = cu_k_ptr
    else:
        PACKED: gl.constexpr = FLAGS & PACKED_Q
        cu_ptr = cu_q_ptr
    pairs = H if PACKED else H * N
    tile, pair = pair_of_unit(unit, tiles, pairs, section)
    if not KEYS:  # the last queries see the most keys, and the first keys the most queries
        tile = tiles - 1 - tile
    i_n, row = sequence_of_tile(tile, pair // H, cu_ptr, N, steps, B, PACKED != 0)
    i_b, begin, _, queries = rows_of_sequence(
        i_n, cu_q_ptr, lengths_ptr, T, (FLAGS & PACKED_Q) != 0, False
    )
    i_kb, begin_k, room, keys = rows_of_sequence(
        i_n, cu_k_ptr, lengths_ptr, S, (FLAGS & PACKED_K) != 0, (FLAGS & LENGTHS) != 0
    )
    i_b, begin, i_kb, begin_k = (
        i_b.to(gl.int32),
        begin.to(gl.int32),
        i_kb.to(gl.int32),
        begin_k.to(gl.int32),
    )
    return pair % H, i_b, begin, queries, i_kb, begin_k, keys, room, row, i_n


@gluon.jit
def tiles_of(low, inner, outer, high, B: gl.constexpr, LEAST: gl.constexpr):
    """First row, how many tiles from there, and which of them are seen whole."""
    count = gl.maximum(gl.cdiv(high - low, B), LEAST)
    inner = gl.minimum(gl.maximum(inner - low, 0) // B, count)
    outer = gl.minimum(gl.maximum(outer - low, 0) // B, count)
    return low, count, inner, gl.maximum(outer, inner)


@gluon.jit
def keys_seen(row, queries, keys, window, BM: gl.constexpr, BN: gl.constexpr, FLAGS: gl.constexpr):
    """tiles_of the keys that BM queries see, at least one."""
    left, right = window
    shift = keys - queries
    low, inner, outer, high = seen_tiles(
        row + shift,
        gl.minimum(row + BM, queries) - 1 + shift,
        gl.where(row < queries, keys, 0),
        left,
        right,
        BN,
        (FLAGS & LEFT) != 0,
        (FLAGS & RIGHT) != 0,
    )
    return tiles_of(low, inner, outer, high, BN, 1)


@gluon.jit
def queries_seen(row, queries, keys, window, BM: gl.constexpr, BN: gl.constexpr,
                 FLAGS: gl.constexpr, LEAST: gl.constexpr = 1):  # fmt: skip
    """tiles_of the queries that see BN keys."""
    left, right = window
    shift = keys - queries
    low, inner, outer, high = seen_tiles(
        row - shift,
        gl.minimum(row + BN, keys) - 1 - shift,
        gl.where(row < keys, queries, 0),
        right,
        left,
        BM,
        (FLAGS & RIGHT) != 0,
        (FLAGS & LEFT) != 0,
    )
    return tiles_of(low, inner, outer, high, BM, LEAST)


@gluon.jit
def tile_coords(at, i_b, i_h, row):
    """Coordinates of a tile in the matrix of its tensor."""
    rb, rh, ch = at
    return i_b * rb + i_h * rh + row, i_h * ch


@gluon.jit
def fetch(desc, row, col, full, buffer):
    """Starts to load a tile; `full` tells when it is there."""
    mbarrier.expect(full, desc.block_type.nbytes)
    copy_in(desc, [row, col], full, buffer)


@gluon.jit
def wait_full(barriers, turn, COUNT: gl.constexpr):
    """Waits until a ring's buffer of this turn is filled."""
    mbarrier.wait(barriers.index(turn % COUNT), (turn // COUNT) & 1)


@gluon.jit
def wait_empty(barriers, turn, COUNT: gl.constexpr):
    """Waits until a ring's buffer of this turn may be filled."""
    mbarrier.wait(barriers.index(turn % COUNT), ((turn // COUNT) & 1) ^ 1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def store_scalars(pad, numbers, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Writes down what would be kept in registers that the loops over tiles lack."""
    if WIDTH > SPARE_REGISTERS:
        write_down(pad, numbers, FIRST, 4)


@gluon.jit
def load_scalar(pad, numbers, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """The same numbers as note() wrote them, or as they are if it did not."""
    made = ()
    for i in gl.static_range(len(numbers)):
        if WIDTH > SPARE_REGISTERS:
            made = made + (look_up(pad, FIRST + i, 4),)
        else:
            made = made + (numbers[i],)
    return made


@gluon.constexpr_function
def rows_layout(width):
    """Rows of `width` 16-bit numbers over four warps, 16 bytes a thread."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def zero_tail_rows(buffers, rows, turn, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Zeroes rows of tiles from `rows` on: they are another sequence's, and 0 times NaN is NaN.

    Every consumer does it for itself, with the same outcome.
    """
    layout: gl.constexpr = rows_layout(WIDTH)
    o_r = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    o_r = opaque_range(o_r, opaque_if_wide(turn, WIDTH), 1024 // WIDTH - 1)
    if rows < ROWS:
        for i in gl.static_range(0, ROWS, STEP):
            if rows < i + STEP:
                for j in gl.static_range(len(buffers)):
                    part = buffers[j].slice(i, STEP)
                    part.store(gl.where((o_r < rows - i)[:, None], part.load(layout), 0.0))
        fence_async_shared()
        threads_together()


@gluon.jit
def inverse(x):
    """1 / x for x from 1 to inf, where a division would also see to what overflows on the way."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def where_below(s, a, b):
    """s where a < b, -inf elsewhere. Comparisons by themselves are packed into words of bits, made
    into one another for as long as the products take."""
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
    """s where low <= x < low + width, -inf elsewhere, by one comparison of unsigned numbers."""
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
    """64 rows in an accumulator's layout by way of shared memory into that of wide stores, STEP at
    a time: addresses are those of the first, and steps."""
    buffer.store(values)
    rows = ()
    for i in gl.static_range(0, 64, STEP):
        rows = rows + (buffer.slice(i, STEP).load(rows_layout(WIDTH)),)
    fence_async_shared()
    return rows


@gluon.jit
def store_staged(ptr, values, stride, rows, turn, WIDTH: gl.constexpr):
    """Stores what stage() returned, of which there are `rows`, `stride` apart."""
    layout: gl.constexpr = rows_layout(WIDTH)
    o_r = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    o_r = opaque_range(o_r, opaque_if_wide(turn, WIDTH), 1024 // WIDTH - 1)
    p = ptr + o_r.to(gl.int64)[:, None] * stride + o_c[None, :]
    for i in gl.static_range(64 // STEP):
        gl.store(p, values[i], mask=(o_r < rows - i * STEP)[:, None] & (o_c >= 0)[None, :])
        p += STEP * stride
