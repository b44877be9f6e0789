"""Attention of all heads to one cache of latents (MLA, absorbed), for sm_90, warp-specialised.

    x_ts = scale q_t . [c_s, r_s]     o_t = sum_s softmax(x_t)_s c_s     c [512], r [64]

A program has 64 rows (queries times heads) and one split of the keys; triton/decode.py combines the
splits.

    _scores_partition (4 warps, default)     _output_partition (twice 4 warps, half of o each)
      loads q, then tiles of c and r by TMA
      s = q [c, r]^T
      p and the factor of acc -- full.p -->    acc = factor acc + p c[:, half]
      <-- empty.p, empty.k                     p is read; the tile of c is read
      1 / l -- full.p -->                      o = acc / l

    buffers              stages   arrivals a phase: full / empty
    q [64, 576]          1        1 (TMA) / never refilled
    c, r [64, 576]       ST       1 (TMA) / 2
    p [64, 64], factor   1        1 / 2

The scores of a tile run beside the other warpgroups' product with the tile before; once that is
done, the next tile but one is loaded.
"""

from typing import Any, NamedTuple

from slipstream.kernels.attention.sm90.common import barriers, wait_empty, wait_full, zero_tail_rows
from slipstream.kernels.primitives import sm90
from slipstream.kernels.primitives.sm90 import gl, gluon, mbarrier, warpgroup_mma

# rows of a program and keys of a step; half of a latent, and the rotary part that follows it
BM = gl.constexpr(64)
BN = gl.constexpr(64)
HALF_LATENT = gl.constexpr(256)
ROPE_DIM = gl.constexpr(64)
# tiles of [64, 576] are 72 KB: shared memory holds two, and the queries
ST = gl.constexpr(2)


class Sizes(NamedTuple):
    """Numbers of a launch, in the order of the kernel's arguments."""

    T: Any
    H: Any
    B: Any
    tiles: Any
    splits: Any
    capacity: Any
    stride_table: Any
    rows_b: Any


class Buffers(NamedTuple):
    """In shared memory: halves of a latent, their rotary part, p and a number a row."""

    q: Any
    qr: Any
    k: Any
    kr: Any
    p: Any
    row: Any


class Full(NamedTuple):
    """Barriers that tell that a buffer is filled."""

    q: Any
    k: Any
    p: Any


class Empty(NamedTuple):
    """Barriers that tell that a buffer may be filled again."""

    k: Any
    p: Any


@gluon.jit
def _locate_tile(lengths_ptr, sizes, HAS_LENGTHS: gl.constexpr):
    """Split, sequence, first row, keys in use, first key of the split and how many sizes.tiles."""
    pid = gl.program_id(0)
    tile = pid % sizes.tiles
    i_s = pid // sizes.tiles % sizes.splits
    i_b = pid // sizes.tiles // sizes.splits
    keys = sizes.capacity
    if HAS_LENGTHS:
        keys = gl.maximum(gl.minimum(gl.load(lengths_ptr + i_b).to(gl.int32), sizes.capacity), 0)
    end = gl.minimum(keys - sizes.T + 1 + (tile * BM + BM - 1) // sizes.H, keys)
    split_keys = gl.cdiv(gl.cdiv(gl.maximum(end, 0), BN), sizes.splits) * BN
    low = i_s * split_keys
    count = gl.cdiv(gl.maximum(gl.minimum(low + split_keys, end) - low, 0), BN)
    return i_s, i_b, tile * BM, keys, low, count


@gluon.jit
def _row_of(table_ptr, i_b, key, sizes, PAGE: gl.constexpr):
    """Row of the cache that holds a key, the first of a tile. A page outside of the cache gives a
    row outside of it, where TMA reads zeros."""
    row = i_b * sizes.rows_b + key
    if PAGE:
        key = gl.minimum(key, sizes.capacity - 1)
        page = gl.load(table_ptr + i_b.to(gl.int64) * sizes.stride_table + key // PAGE)
        row = page.to(gl.int32) * PAGE + key % PAGE
    return row


@gluon.jit
def _load_queries(desc_q, desc_qr, bufs_q, buf_qr, row, full_q):
    """Starts to load the queries of this program's rows: two halves of a latent, and r."""
    full = full_q.index(0)
    mbarrier.expect(full, desc_q.block_type.nbytes * 2 + desc_qr.block_type.nbytes)
    for j in gl.static_range(2):
        sm90.copy_in(desc_q, [row, j * HALF_LATENT], full, bufs_q.index(j))
    sm90.copy_in(desc_qr, [row, 2 * HALF_LATENT], full, buf_qr.index(0))


@gluon.jit
def _load_latents(desc_k, desc_kr, bufs_k, bufs_kr, row, full_k, empty_k, i_step):
    """Starts to load a tile of latents once its buffer is free."""
    wait_empty(empty_k, i_step, ST)
    stage = i_step % ST
    full = full_k.index(stage)
    mbarrier.expect(full, desc_k.block_type.nbytes * 2 + desc_kr.block_type.nbytes)
    for j in gl.static_range(2):
        sm90.copy_in(desc_k, [row, j * HALF_LATENT], full, bufs_k.index(stage * 2 + j))
    sm90.copy_in(desc_kr, [row, 2 * HALF_LATENT], full, bufs_kr.index(stage))


@gluon.jit
def _scores(bufs_q, buf_qr, bufs_k, bufs_kr, i, zero):
    """Starts the three products of a tile's scores."""
    stage = i % ST
    # at constant indices the descriptors are kept in registers
    opaque_zero = i >> 30
    s = warpgroup_mma(
        bufs_q.index(opaque_zero),
        bufs_k.index(stage * 2).permute((1, 0)),
        zero,
        use_acc=False,
        is_async=True,
    )
    s = warpgroup_mma(
        bufs_q.index(1 + opaque_zero), bufs_k.index(stage * 2 + 1).permute((1, 0)), s, is_async=True
    )
    return warpgroup_mma(
        buf_qr.index(opaque_zero), bufs_kr.index(stage).permute((1, 0)), s, is_async=True
    )


@gluon.jit
def _publish(buf_p, buf_row, p, row, full_p, empty_p, i_step):
    """Hands exponentials and a number of each row to the other warpgroups, once they are done with
    those before."""
    wait_empty(empty_p, i_step, 1)
    buf_p.index(0).store(p)
    buf_row.index(0).store(row)
    # wgmma reads p through the async proxy
    sm90.fence_async_shared()
    mbarrier.arrive(full_p.index(0))


@gluon.jit
def _scores_partition(descs, lse_ptr, lengths_ptr, table_ptr, factor, buffers, full, empty, sizes,
             PAGE: gl.constexpr, HAS_LENGTHS: gl.constexpr):  # fmt: skip
    """Loads, scores and the online softmax; writes lse."""
    desc_q, desc_qr, desc_k, desc_kr = descs
    T, H, B = sizes.T, sizes.H, sizes.B
    i_s, i_b, row, keys, low, count = _locate_tile(lengths_ptr, sizes, HAS_LENGTHS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([BM, BN], gl.float32, layout)
    o_m = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
    o_n = gl.arange(0, BN, gl.SliceLayout(0, layout))
    high = gl.minimum(keys - T + 1 + o_m // H, keys)
    m = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    l = gl.zeros([BM], gl.float32, gl.SliceLayout(1, layout))
    _load_queries(desc_q, desc_qr, buffers.q, buffers.qr, i_b * T * H + row, full.q)
    row_k = _row_of(table_ptr, i_b, low, sizes, PAGE)
    if count > 0:
        _load_latents(desc_k, desc_kr, buffers.k, buffers.kr, row_k, full.k, empty.k, 0)
    row_k = _row_of(table_ptr, i_b, low + BN, sizes, PAGE)
    mbarrier.wait(full.q.index(0), 0)
    for i in range(count):
        wait_full(full.k, i, ST)
        s = _scores(buffers.q, buffers.qr, buffers.k, buffers.kr, i, zero)
        # the page is looked up a tile ahead, so that no load stands between a free buffer and its
        # filling
        after = _row_of(table_ptr, i_b, low + (i + 2) * BN, sizes, PAGE)
        if i + 1 < count:
            _load_latents(desc_k, desc_kr, buffers.k, buffers.kr, row_k, full.k, empty.k, i + 1)
        row_k = after
        s = sm90.warpgroup_mma_wait(0, deps=(s,))
        seen = (low + i * BN + o_n)[None, :] < high[:, None]
        s = gl.where(seen, s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1) * factor)
        base = gl.where(top == float("-inf"), 0.0, top)
        e = gl.exp2(s * factor - base[:, None])
        shrink = gl.exp2(m - base)
        m = top
        l = l * shrink + gl.sum(e, 1)
        _publish(buffers.p, buffers.row, e.to(buffers.q.dtype), shrink, full.p, empty.p, i)
    has_no_key = l == 0.0
    l = gl.where(has_no_key, 1.0, l)
    _publish(buffers.p, buffers.row, zero.to(buffers.q.dtype), 1.0 / l, full.p, empty.p, count)
    lse = gl.where(has_no_key, float("-inf"), m + gl.log2(l))
    at = (i_s * B + i_b).to(gl.int64) * H
    gl.store(lse_ptr + (at + o_m % H) * T + o_m // H, lse, mask=o_m < T * H)


@gluon.jit
def _output_partition(c: gl.constexpr, o_ptr, lengths_ptr, buffers, full, empty, sizes,
            HAS_LENGTHS: gl.constexpr):  # fmt: skip
    """Half c of o's columns."""
    T, H, B = sizes.T, sizes.H, sizes.B
    i_s, i_b, row, keys, low, count = _locate_tile(lengths_ptr, sizes, HAS_LENGTHS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_LATENT, 16])
    acc = gl.zeros([BM, HALF_LATENT], gl.float32, layout)
    for i in range(count):
        stage = i % ST
        wait_full(full.p, i, 1)
        v = buffers.k.index(stage * 2 + c)
        zero_tail_rows((v,), keys - low - i * BN, i, BN, HALF_LATENT)
        acc = acc * buffers.row.index(0).load(gl.SliceLayout(1, layout))[:, None]
        acc = warpgroup_mma(buffers.p.index(0), v, acc, is_async=True)
        acc = sm90.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.p.index(0))
        mbarrier.arrive(empty.k.index(stage))
    wait_full(full.p, count, 1)
    acc = acc * buffers.row.index(0).load(gl.SliceLayout(1, layout))[:, None]
    o_r = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
    o_c = c * HALF_LATENT + gl.arange(0, HALF_LATENT, gl.SliceLayout(0, layout))
    at = (i_s * B + i_b).to(gl.int64) * T * H + o_r
    p_o = o_ptr + at[:, None] * (2 * HALF_LATENT) + o_c[None, :]
    gl.store(p_o, acc, mask=(o_r < T * H)[:, None] & (o_c >= 0)[None, :])


@gluon.jit(do_not_specialize=["factor", *Sizes._fields])
def softmax_latent_decode_sm90_kernel(
    desc_q,  # [B * T * H, 576] in tiles [64, 256], and [64, 64] for what follows a latent
    desc_qr,
    desc_k,  # rows of the cache, [*, 576], in such tiles
    desc_kr,
    o_ptr,  # [shares, B, T, H, 512]
    lse_ptr,  # [shares, B, H, T], in base 2
    lengths_ptr,  # [B]
    table_ptr,  # [B, pages]
    factor, T, H, B, tiles, splits, capacity, stride_table,
    rows_b,  # from a sequence to the next, in rows of the cache
    PAGE: gl.constexpr,  # a multiple of 64, or 0
    HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """grid (tiles * shares * B,): row r of a sequence's tiles is query r / H of head r % H."""
    dtype: gl.constexpr = desc_q.dtype
    q_layout: gl.constexpr = desc_q.layout
    r_layout: gl.constexpr = desc_qr.layout
    bufs_q = gl.allocate_shared_memory(dtype, [2, BM, HALF_LATENT], q_layout)
    buf_qr = gl.allocate_shared_memory(dtype, [1, BM, ROPE_DIM], r_layout)
    bufs_k = gl.allocate_shared_memory(dtype, [ST * 2, BN, HALF_LATENT], q_layout)
    bufs_kr = gl.allocate_shared_memory(dtype, [ST, BN, ROPE_DIM], r_layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BN], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buf_p = gl.allocate_shared_memory(dtype, [1, BM, BN], p_layout)
    buf_row = gl.allocate_shared_memory(gl.float32, [1, BM], row_layout)
    full_q = barriers(1, 1)
    full_k = barriers(ST, 1)
    empty_k = barriers(ST, 2)
    full_p = barriers(1, 1)
    empty_p = barriers(1, 2)
    buffers = Buffers(bufs_q, buf_qr, bufs_k, bufs_kr, buf_p, buf_row)
    full, empty = Full(full_q, full_k, full_p), Empty(empty_k, empty_p)
    sizes = Sizes(T, H, B, tiles, splits, capacity, stride_table, rows_b)
    gl.warp_specialize([
        (_scores_partition, ((desc_q, desc_qr, desc_k, desc_kr), lse_ptr, lengths_ptr, table_ptr,
                             factor, buffers, full, empty, sizes, PAGE, HAS_LENGTHS)),
        (_output_partition, (0, o_ptr, lengths_ptr, buffers, full, empty, sizes, HAS_LENGTHS)),
        (_output_partition, (1, o_ptr, lengths_ptr, buffers, full, empty, sizes, HAS_LENGTHS)),
    ], [4, 4], [168, 168])  # fmt: skip
    # barriers that only the default partition uses are to be invalidated: compiler/smem_hazards.py
    mbarrier.invalidate(full_q.index(0))
    for i in gl.static_range(ST):
        mbarrier.invalidate(full_k.index(i))
