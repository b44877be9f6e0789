# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
"""Attention of all heads to one cache of latents (MLA, absorbed), for sm_90.

    x_ts = scale q_t . [c_s, r_s]     o_t = sum_s softmax(x_t)_s c_s     c [512], r [64]

One warp loads 64 latents at a time by TMA; two warpgroups take the same 64 rows, queries times
heads, and a half of o's columns each. Both make all scores: that costs half as many products again,
and no weights go from one to the other. triton/decode.py joins the shares of the keys.
"""

from slipstream.kernels.gluon import (
    copy_in,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.softmax.hopper.common import barriers, clean, free, ready

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
def _load(descs, table_ptr, lengths_ptr, buffers, full, empty, sizes, PAGE: gl.constexpr,
          HAS_LENGTHS: gl.constexpr):  # fmt: skip
    desc_q, desc_qr, desc_k, desc_kr = descs
    bufs_q, buf_qr, bufs_k, bufs_kr = buffers
    full_q, full_k = full
    T, H, stride_table, rows_b = sizes[0], sizes[1], sizes[6], sizes[7]
    _, i_b, row, _, low, count = _place(lengths_ptr, sizes, HAS_LENGTHS)
    row += i_b * T * H
    at_q = full_q.index(0)
    mbarrier.expect(at_q, desc_q.block_type.nbytes * 2 + desc_qr.block_type.nbytes)
    for j in gl.static_range(2):
        copy_in(desc_q, [row, j * HALF], at_q, bufs_q.index(j))
    copy_in(desc_qr, [row, 2 * HALF], at_q, buf_qr.index(0))
    for i in range(count):
        free(empty, i, ST)
        slot = i % ST
        key = low + i * BN
        row_k = i_b * rows_b + key
        if PAGE:
            page = gl.load(table_ptr + i_b.to(gl.int64) * stride_table + key // PAGE)
            row_k = page.to(gl.int32) * PAGE + key % PAGE
        at = full_k.index(slot)
        mbarrier.expect(at, desc_k.block_type.nbytes * 2 + desc_kr.block_type.nbytes)
        for j in gl.static_range(2):
            copy_in(desc_k, [row_k, j * HALF], at, bufs_k.index(slot * 2 + j))
        copy_in(desc_kr, [row_k, 2 * HALF], at, bufs_kr.index(slot))


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
def _attend(c: gl.constexpr, o_ptr, lse_ptr, lengths_ptr, factor, buffers, full, empty, sizes,
            HAS_LENGTHS: gl.constexpr):  # fmt: skip
    bufs_q, buf_qr, bufs_k, bufs_kr = buffers
    full_q, full_k = full
    T, H, B = sizes[0], sizes[1], sizes[2]
    i_s, i_b, row, keys, low, count = _place(lengths_ptr, sizes, HAS_LENGTHS)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero = gl.zeros([BM, BN], gl.float32, s_layout)
    o_m = row + gl.arange(0, BM, gl.SliceLayout(1, s_layout))
    o_n = gl.arange(0, BN, gl.SliceLayout(0, s_layout))
    high = gl.minimum(keys - T + 1 + o_m // H, keys)
    m = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    l = gl.zeros([BM], gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([BM, HALF], gl.float32, o_layout)
    mbarrier.wait(full_q.index(0), 0)
    for i in range(count):
        slot = i % ST
        ready(full_k, i, ST)
        s = _scores(bufs_q, buf_qr, bufs_k, bufs_kr, i, zero)
        s = warpgroup_mma_wait(0, deps=(s,))
        key = low + i * BN
        seen = (key + o_n)[None, :] < high[:, None]
        s = gl.where(seen, s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1) * factor)
        base = gl.where(top == float("-inf"), 0.0, top)
        e = gl.exp2(s * factor - base[:, None])
        shrink = gl.exp2(m - base)
        m = top
        l = l * shrink + gl.sum(e, 1)
        p = gl.convert_layout(e.to(bufs_q.dtype), p_layout)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        v = bufs_k.index(slot * 2 + c)
        clean(v, keys - key, BN, HALF)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(slot))
    blind = l == 0.0
    l = gl.where(blind, 1.0, l)
    at = i_s * B + i_b
    rows = T * H
    if c == 0:
        lse = gl.where(blind, float("-inf"), m + gl.log2(l))
        p_lse = lse_ptr + (at.to(gl.int64) * H + o_m % H) * T + o_m // H
        gl.store(p_lse, lse, mask=o_m < rows)
    acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, o_layout))[:, None]
    o_r = row + gl.arange(0, BM, gl.SliceLayout(1, o_layout))
    o_c = c * HALF + gl.arange(0, HALF, gl.SliceLayout(0, o_layout))
    p_o = o_ptr + (at.to(gl.int64) * rows + o_r)[:, None] * (2 * HALF) + o_c[None, :]
    gl.store(p_o, acc, mask=(o_r < rows)[:, None] & (o_c >= 0)[None, :])


@gluon.jit
def _first(o_ptr, lse_ptr, lengths_ptr, factor, buffers, full, empty, sizes,
           HAS_LENGTHS: gl.constexpr):  # fmt: skip
    _attend(0, o_ptr, lse_ptr, lengths_ptr, factor, buffers, full, empty, sizes, HAS_LENGTHS)


@gluon.jit
def _second(o_ptr, lse_ptr, lengths_ptr, factor, buffers, full, empty, sizes,
            HAS_LENGTHS: gl.constexpr):  # fmt: skip
    _attend(1, o_ptr, lse_ptr, lengths_ptr, factor, buffers, full, empty, sizes, HAS_LENGTHS)


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
    full_q = barriers(1, 1)
    full_k = barriers(ST, 1)
    empty = barriers(ST, 2)
    gl.warp_specialize([
        (_first, (o_ptr, lse_ptr, lengths_ptr, factor, (bufs_q, buf_qr, bufs_k, bufs_kr),
                  (full_q, full_k), empty,
                  (T, H, B, tiles, shares, room, stride_table, rows_b), HAS_LENGTHS)),
        (_second, (o_ptr, lse_ptr, lengths_ptr, factor, (bufs_q, buf_qr, bufs_k, bufs_kr),
                   (full_q, full_k), empty,
                   (T, H, B, tiles, shares, room, stride_table, rows_b), HAS_LENGTHS)),
        (_load, ((desc_q, desc_qr, desc_k, desc_kr), table_ptr, lengths_ptr,
                 (bufs_q, buf_qr, bufs_k, bufs_kr), (full_q, full_k), empty,
                 (T, H, B, tiles, shares, room, stride_table, rows_b), PAGE, HAS_LENGTHS)),
    ], [4, 1], [240, 24])  # fmt: skip
