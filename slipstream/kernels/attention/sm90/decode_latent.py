"""Attention of all heads to one cache of latents (MLA, absorbed), for sm_90.

    x_ts = scale q_t . [c_s, r_s]     o_t = sum_s softmax(x_t)_s c_s     c [512], r [64]

A warpgroup loads 64 latents at a time by TMA, makes the scores of 64 rows, queries times heads, and
hands their exponentials to two others, each with a half of o's columns. Its products run beside
theirs with the tile before; once those are done, the next but one is loaded. triton/decode.py joins
the shares of the keys.
"""

from slipstream.kernels.attention.sm90.common import barriers, wait_empty, wait_full, zero_tail_rows
from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# rows of a program and keys of a step; half of a latent, and what follows it
BM = gl.constexpr(64)
BN = gl.constexpr(64)
HALF = gl.constexpr(256)
REST = gl.constexpr(64)
ST = gl.constexpr(2)
_SIZES = ["T", "H", "B", "tiles", "shares", "room", "stride_table", "rows_b"]


@gluon.jit
def _place(lengths_ptr, sizes, HAS_LENGTHS: gl.constexpr):
    """Share, sequence, first row, keys in use, first key of the share and how many tiles."""
    T, H, _, tiles, shares, room, _, _ = sizes
    pid = gl.program_id(0)
    tile = pid % tiles
    i_s = pid // tiles % shares
    i_b = pid // tiles // shares
    keys = room
    if HAS_LENGTHS:
        keys = gl.maximum(gl.minimum(gl.load(lengths_ptr + i_b).to(gl.int32), room), 0)
    most = gl.minimum(keys - T + 1 + (tile * BM + BM - 1) // H, keys)
    share = gl.cdiv(gl.cdiv(gl.maximum(most, 0), BN), shares) * BN
    low = i_s * share
    count = gl.cdiv(gl.maximum(gl.minimum(low + share, most) - low, 0), BN)
    return i_s, i_b, tile * BM, keys, low, count


@gluon.jit
def _row_of(table_ptr, i_b, key, sizes, PAGE: gl.constexpr):
    """Row of the cache that holds a key, the first of a tile. It is outside of the cache where the
    page is, and TMA reads zeros there."""
    room, stride_table, rows_b = sizes[5], sizes[6], sizes[7]
    row = i_b * rows_b + key
    if PAGE:
        key = gl.minimum(key, room - 1)
        page = gl.load(table_ptr + i_b.to(gl.int64) * stride_table + key // PAGE)
        row = page.to(gl.int32) * PAGE + key % PAGE
    return row


@gluon.jit
def _load_queries(desc_q, desc_qr, bufs_q, buf_qr, row, full_q):
    at = full_q.index(0)
    mbarrier.expect(at, desc_q.block_type.nbytes * 2 + desc_qr.block_type.nbytes)
    for j in gl.static_range(2):
        copy_in(desc_q, [row, j * HALF], at, bufs_q.index(j))
    copy_in(desc_qr, [row, 2 * HALF], at, buf_qr.index(0))


@gluon.jit
def _load(desc_k, desc_kr, bufs_k, bufs_kr, row, full_k, empty_k, turn):
    """Starts to load a tile of latents once its buffer is free."""
    wait_empty(empty_k, turn, ST)
    slot = turn % ST
    at = full_k.index(slot)
    mbarrier.expect(at, desc_k.block_type.nbytes * 2 + desc_kr.block_type.nbytes)
    for j in gl.static_range(2):
        copy_in(desc_k, [row, j * HALF], at, bufs_k.index(slot * 2 + j))
    copy_in(desc_kr, [row, 2 * HALF], at, bufs_kr.index(slot))


@gluon.jit
def _scores(bufs_q, buf_qr, bufs_k, bufs_kr, i, zero):
    slot = i % ST
    # a place that is not known keeps its descriptors out of registers that are needed
    at = i >> 30
    s = warpgroup_mma(
        bufs_q.index(at), bufs_k.index(slot * 2).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma(
        bufs_q.index(1 + at), bufs_k.index(slot * 2 + 1).permute((1, 0)), s, is_async=True
    )
    return warpgroup_mma(buf_qr.index(at), bufs_kr.index(slot).permute((1, 0)), s, is_async=True)


@gluon.jit
def _hand_over(buf_p, buf_row, p, row, told, heard, turn):
    """Exponentials and a number of each row to the other warpgroups, once they are done with those
    before."""
    wait_empty(heard, turn, 1)
    buf_p.index(0).store(p)
    buf_row.index(0).store(row)
    fence_async_shared()
    mbarrier.arrive(told.index(0))


@gluon.jit
def _weights(descs, lse_ptr, lengths_ptr, table_ptr, factor, buffers, full, empty, sizes,
             PAGE: gl.constexpr, HAS_LENGTHS: gl.constexpr):  # fmt: skip
    desc_q, desc_qr, desc_k, desc_kr = descs
    bufs_q, buf_qr, bufs_k, bufs_kr, buf_p, buf_row = buffers
    full_q, full_k, told = full
    T, H, B = sizes[0], sizes[1], sizes[2]
    i_s, i_b, row, keys, low, count = _place(lengths_ptr, sizes, HAS_LENGTHS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([BM, BN], gl.float32, layout)
    o_m = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
    o_n = gl.arange(0, BN, gl.SliceLayout(0, layout))
    high = gl.minimum(keys - T + 1 + o_m // H, keys)
    m = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    l = gl.zeros([BM], gl.float32, gl.SliceLayout(1, layout))
    _load_queries(desc_q, desc_qr, bufs_q, buf_qr, i_b * T * H + row, full_q)
    row_k = _row_of(table_ptr, i_b, low, sizes, PAGE)
    if count > 0:
        _load(desc_k, desc_kr, bufs_k, bufs_kr, row_k, full_k, empty[0], 0)
    row_k = _row_of(table_ptr, i_b, low + BN, sizes, PAGE)
    mbarrier.wait(full_q.index(0), 0)
    for i in range(count):
        wait_full(full_k, i, ST)
        s = _scores(bufs_q, buf_qr, bufs_k, bufs_kr, i, zero)
        # known a tile ahead: no load of a page stands between a free buffer and its filling
        after = _row_of(table_ptr, i_b, low + (i + 2) * BN, sizes, PAGE)
        if i + 1 < count:
            _load(desc_k, desc_kr, bufs_k, bufs_kr, row_k, full_k, empty[0], i + 1)
        row_k = after
        s = warpgroup_mma_wait(0, deps=(s,))
        seen = (low + i * BN + o_n)[None, :] < high[:, None]
        s = gl.where(seen, s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1) * factor)
        base = gl.where(top == float("-inf"), 0.0, top)
        e = gl.exp2(s * factor - base[:, None])
        shrink = gl.exp2(m - base)
        m = top
        l = l * shrink + gl.sum(e, 1)
        _hand_over(buf_p, buf_row, e.to(bufs_q.dtype), shrink, told, empty[1], i)
    blind = l == 0.0
    l = gl.where(blind, 1.0, l)
    _hand_over(buf_p, buf_row, zero.to(bufs_q.dtype), 1.0 / l, told, empty[1], count)
    lse = gl.where(blind, float("-inf"), m + gl.log2(l))
    at = (i_s * B + i_b).to(gl.int64) * H
    gl.store(lse_ptr + (at + o_m % H) * T + o_m // H, lse, mask=o_m < T * H)


@gluon.jit
def _values(c: gl.constexpr, o_ptr, lengths_ptr, buffers, full, empty, sizes,
            HAS_LENGTHS: gl.constexpr):  # fmt: skip
    bufs_k, buf_p, buf_row = buffers[2], buffers[4], buffers[5]
    told, heard = full[2], empty[1]
    T, H, B = sizes[0], sizes[1], sizes[2]
    i_s, i_b, row, keys, low, count = _place(lengths_ptr, sizes, HAS_LENGTHS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    acc = gl.zeros([BM, HALF], gl.float32, layout)
    for i in range(count):
        slot = i % ST
        wait_full(told, i, 1)
        v = bufs_k.index(slot * 2 + c)
        zero_tail_rows((v,), keys - low - i * BN, i, BN, HALF)
        acc = acc * buf_row.index(0).load(gl.SliceLayout(1, layout))[:, None]
        acc = warpgroup_mma(buf_p.index(0), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(heard.index(0))
        mbarrier.arrive(empty[0].index(slot))
    wait_full(told, count, 1)
    acc = acc * buf_row.index(0).load(gl.SliceLayout(1, layout))[:, None]
    o_r = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
    o_c = c * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    at = (i_s * B + i_b).to(gl.int64) * T * H + o_r
    p_o = o_ptr + at[:, None] * (2 * HALF) + o_c[None, :]
    gl.store(p_o, acc, mask=(o_r < T * H)[:, None] & (o_c >= 0)[None, :])


@gluon.jit
def _first(o_ptr, lengths_ptr, buffers, full, empty, sizes, HAS_LENGTHS: gl.constexpr):
    _values(0, o_ptr, lengths_ptr, buffers, full, empty, sizes, HAS_LENGTHS)


@gluon.jit
def _second(o_ptr, lengths_ptr, buffers, full, empty, sizes, HAS_LENGTHS: gl.constexpr):
    _values(1, o_ptr, lengths_ptr, buffers, full, empty, sizes, HAS_LENGTHS)


@gluon.jit(do_not_specialize=["factor", *_SIZES])
def softmax_latent_decode_sm90_kernel(
    desc_q,  # [B * T * H, 576] in tiles [64, 256], and [64, 64] for what follows a latent
    desc_qr,
    desc_k,  # rows of the cache, [*, 576], in such tiles
    desc_kr,
    o_ptr,  # [shares, B, T, H, 512]
    lse_ptr,  # [shares, B, H, T], in base 2
    lengths_ptr,  # [B]
    table_ptr,  # [B, pages]
    factor,
    T,
    H,
    B,
    tiles,
    shares,
    room,
    stride_table,
    rows_b,  # from a sequence to the next, in rows of the cache
    PAGE: gl.constexpr,  # a multiple of 64, or 0
    HAS_LENGTHS: gl.constexpr,
):
    """grid (tiles * shares * B,): row r of a sequence's tiles is query r / H of head r % H."""
    dtype: gl.constexpr = desc_q.dtype
    q_layout: gl.constexpr = desc_q.layout
    r_layout: gl.constexpr = desc_qr.layout
    bufs_q = gl.allocate_shared_memory(dtype, [2, BM, HALF], q_layout)
    buf_qr = gl.allocate_shared_memory(dtype, [1, BM, REST], r_layout)
    bufs_k = gl.allocate_shared_memory(dtype, [ST * 2, BN, HALF], q_layout)
    bufs_kr = gl.allocate_shared_memory(dtype, [ST, BN, REST], r_layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BN], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buf_p = gl.allocate_shared_memory(dtype, [1, BM, BN], p_layout)
    buf_row = gl.allocate_shared_memory(gl.float32, [1, BM], row_layout)
    full_q = barriers(1, 1)
    full_k = barriers(ST, 1)
    empty_k = barriers(ST, 2)
    told = barriers(1, 1)
    heard = barriers(1, 2)
    gl.warp_specialize([
        (_weights, ((desc_q, desc_qr, desc_k, desc_kr), lse_ptr, lengths_ptr, table_ptr, factor,
                    (bufs_q, buf_qr, bufs_k, bufs_kr, buf_p, buf_row),
                    (full_q, full_k, told), (empty_k, heard),
                    (T, H, B, tiles, shares, room, stride_table, rows_b), PAGE, HAS_LENGTHS)),
        (_first, (o_ptr, lengths_ptr, (bufs_q, buf_qr, bufs_k, bufs_kr, buf_p, buf_row),
                  (full_q, full_k, told), (empty_k, heard),
                  (T, H, B, tiles, shares, room, stride_table, rows_b), HAS_LENGTHS)),
        (_second, (o_ptr, lengths_ptr, (bufs_q, buf_qr, bufs_k, bufs_kr, buf_p, buf_row),
                   (full_q, full_k, told), (empty_k, heard),
                   (T, H, B, tiles, shares, room, stride_table, rows_b), HAS_LENGTHS)),
    ], [4, 4], [168, 168])  # fmt: skip
    # what the first part alone takes: compiler/smem_hazards.py
    mbarrier.invalidate(full_q.index(0))
    for i in gl.static_range(ST):
        mbarrier.invalidate(full_k.index(i))
