"""An indexer's lists in portable Triton; MATH.md has the formulas.

Tiles of queries, as many in a step as a buffer of scores allows, and two kernels a step: products
of a tile's queries and some keys, and the best of a query's scores. These are compared as integers
in the order of the floats, whose threshold is found bit by bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.indexer.inputs import Indexing, packed_tiles
from slipstream.runtime import backends, launch_cache


@triton.jit
def _tile(
    i_m, tiles_ptr, lengths_ptr, T, S, BLOCK: tl.constexpr, POOLED: tl.constexpr, BT: tl.constexpr
):
    """The fields of inputs.py:Tile, of tile i_m."""
    # of packed sequences a table has them
    if tiles_ptr is not None:
        p_tile = tiles_ptr + i_m * 6
        row, rows, key = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
        position, keys, entries = tl.load(p_tile + 3), tl.load(p_tile + 4), tl.load(p_tile + 5)
    else:
        each = tl.cdiv(T, BT)
        i_b, begin = i_m // each, i_m % each * BT
        keys = T if POOLED else S
        if lengths_ptr is not None:
            keys = tl.maximum(tl.load(lengths_ptr + i_b).to(tl.int32), 0)
            keys = keys if POOLED else tl.minimum(keys, S)
        entries = tl.minimum(keys // BLOCK, S) if POOLED else keys
        row, rows, key, position = i_b * T + begin, T - begin, i_b * S, keys - T + begin
    return row, tl.minimum(rows, BT), key, position, keys, entries


@triton.jit
def _seen(
    position, keys, entries, i, BLOCK: tl.constexpr, POOLED: tl.constexpr, CAUSAL: tl.constexpr
):
    """Position of the tile's query i, and how many blocks it sees."""
    o_p = position + i if CAUSAL else keys - 1 + 0 * i
    if POOLED:
        n = tl.minimum((o_p + 1) // BLOCK, entries)
    else:
        n = tl.minimum((o_p + BLOCK) // BLOCK, (entries + BLOCK - 1) // BLOCK)
    # division rounds towards 0
    return o_p, tl.where(o_p < 0, 0, n)


@triton.jit(do_not_specialize=["T", "S", "first", "columns", "blocks"])
def index_scores_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    tiles_ptr,
    lengths_ptr,
    scores_ptr,
    T,
    S,
    first,
    columns,
    blocks,
    HI: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    RELU: tl.constexpr,
    POOLED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles blocks, G), blocks of BN keys. q [rows, HI, D], k [rows, D], w [rows, HI], tiles
    [M, 6] or None, from `first` on, scores [tiles BT, G, columns] of blocks."""
    i_m, i_n = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_g = tl.program_id(1)
    row, rows, key, position, keys, entries = _tile(
        first + i_m, tiles_ptr, lengths_ptr, T, S, BLOCK, POOLED, BT
    )
    o_t, o_n, o_d = tl.arange(0, BT), i_n * BN + tl.arange(0, BN), tl.arange(0, BD)
    m_t, m_n, m_d = o_t < rows, o_n < entries, o_d < D
    o_p, _ = _seen(position, keys, entries, o_t, BLOCK, POOLED, CAUSAL)
    last, last_seen = _seen(position, keys, entries, rows - 1, BLOCK, POOLED, CAUSAL)
    # scores that no query of the tile sees are not made, and not read
    if i_n * BN < (last_seen if POOLED else tl.minimum(last + 1, entries)):
        o_k = (key + o_n).to(tl.int64) * D
        # keys that fit are read once for all heads
        if D <= BD:
            m_k = m_d[:, None] & m_n[None, :]
            b_k = tl.load(k_ptr + o_k[None, :] + o_d[:, None], mask=m_k, other=0.0)
        o_row, b_s = (row + o_t).to(tl.int64) * HI, tl.zeros([BT, BN], tl.float32)
        for h in range(i_g * (HI // G), (i_g + 1) * (HI // G)):
            p_q, p_k = q_ptr + (o_row + h)[:, None] * D, k_ptr + o_k[None, :]
            if D <= BD:
                b_q = tl.load(p_q + o_d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0)
                b_h = tl.dot(b_q, b_k, input_precision=PRECISION)
            else:
                # a loop of its own: unrolled, all of k would be in shared memory at once
                b_h = tl.zeros([BT, BN], tl.float32)
                for d in range(0, D, BD):
                    m_d = d + o_d < D
                    m_q, m_k = m_t[:, None] & m_d[None, :], m_d[:, None] & m_n[None, :]
                    b_q = tl.load(p_q + d + o_d[None, :], mask=m_q, other=0.0)
                    b_k = tl.load(p_k + d + o_d[:, None], mask=m_k, other=0.0)
                    b_h = tl.dot(b_q, b_k, b_h, input_precision=PRECISION)
            if RELU:
                b_h = tl.maximum(b_h, 0.0)
            if w_ptr is not None:
                b_h *= tl.load(w_ptr + o_row + h, mask=m_t, other=0.0).to(tl.float32)[:, None]
            b_s += b_h
        p_s = scores_ptr + ((i_m * BT + o_t).to(tl.int64) * G + i_g)[:, None] * columns
        if POOLED or BLOCK == 1:
            tl.store(p_s + o_n[None, :], b_s, mask=m_t[:, None] & m_n[None, :])
        else:
            # the last block of a query has keys that come after it
            visible = (o_n[None, :] <= o_p[:, None]) & m_n[None, :]
            b_s = tl.where(visible, b_s, float("-inf"))
            b_b = tl.max(tl.reshape(b_s, [BT, BN // BLOCK, BLOCK]), 2)
            o_b = i_n * (BN // BLOCK) + tl.arange(0, BN // BLOCK)
            tl.store(p_s + o_b[None, :], b_b, mask=m_t[:, None] & (o_b < columns)[None, :])


@triton.jit
def _ranks(p_s, o, seen, local):
    """Scores of blocks o as integers in their order, the last `local` seen before all others and
    those not seen behind."""
    b_s = tl.load(p_s + o, mask=o < seen, other=0.0)
    # -0 is 0, and nan the smallest number, as what is below all numbers is
    b_s = tl.where(b_s == 0, 0.0, tl.where(b_s > -3.4028234e38, b_s, -3.4028234e38))
    b_i = b_s.to(tl.int32, bitcast=True)
    b_i = b_i ^ ((b_i >> 31) & 0x7FFFFFFF)
    b_i = tl.where(o >= seen - local, 0x7FFFFFFF, b_i)
    return tl.where(o < seen, b_i, -0x7FFFFFFF - 1)


@triton.jit
def _count(b_i, p_s, least, seen, local, BN: tl.constexpr, ONE: tl.constexpr):
    """How many ranks of a row are `least` or more. b_i: of its first BN blocks."""
    n = tl.sum((b_i >= least).to(tl.int32))
    if not ONE:
        for c in range(BN, seen, BN):
            n += tl.sum((_ranks(p_s, c + tl.arange(0, BN), seen, local) >= least).to(tl.int32))
    return n


@triton.jit(do_not_specialize=["T", "S", "first", "columns", "topk", "local"])
def index_select_kernel(
    scores_ptr,
    tiles_ptr,
    lengths_ptr,
    out_ptr,
    T,
    S,
    first,
    columns,
    topk,
    local,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    POOLED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    ONE: tl.constexpr,
):
    """Grid (tiles BT, G). out [rows, G, topk]; ONE: BN columns are all there are."""
    i_r, i_g = tl.program_id(0), tl.program_id(1)
    i = i_r % BT
    row, rows, _, position, keys, entries = _tile(
        first + i_r // BT, tiles_ptr, lengths_ptr, T, S, BLOCK, POOLED, BT
    )
    _, seen = _seen(position, keys, entries, i, BLOCK, POOLED, CAUSAL)
    p_out = out_ptr + ((row + i).to(tl.int64) * G + i_g) * topk
    p_s = scores_ptr + (i_r.to(tl.int64) * G + i_g) * columns
    o = tl.arange(0, BC)
    if i < rows:
        # a list that is not full has all that there is, and no scores to read
        if seen <= topk:
            for c in range(0, topk, BC):
                tl.store(p_out + c + o, tl.where(c + o < seen, c + o, -1), mask=c + o < topk)
        else:
            b_i = _ranks(p_s, tl.arange(0, BN), seen, local)
            # the largest number that topk ranks reach, from the sign on, or one that just topk do
            low = tl.full([], -0x7FFFFFFF - 1, tl.int32)
            count = tl.full([], 0x7FFFFFFF, tl.int32)
            for bit in range(32):
                if count != topk:
                    step = 1 << tl.maximum(31 - bit, 0)
                    tried = tl.where(bit == 0, 0, low + step)
                    n = _count(b_i, p_s, tried, seen, local, BN, ONE)
                    low = tl.where(n >= topk, tried, low)
                    count = tl.where(n >= topk, n, count)
            # no rank is the largest number but those that are always taken
            above = _count(b_i, p_s, tl.where(low < 0x7FFFFFFF, low + 1, low), seen, local, BN, ONE)
            missing, written = tl.where(low < 0x7FFFFFFF, topk - above, topk), 0
            for c in range(0, seen, BC):
                b_c = _ranks(p_s, c + o, seen, local)
                # of those at the threshold the first ones, until the list is full
                level = (b_c == low) & (c + o < seen)
                b_level = tl.cumsum(level.to(tl.int32), 0)
                taken = ((b_c > low) | (level & (b_level <= missing))) & (c + o < seen)
                b_place = written + tl.cumsum(taken.to(tl.int32), 0) - 1
                tl.store(p_out + b_place, c + o, mask=taken)
                missing -= tl.sum(level.to(tl.int32))
                written += tl.sum(taken.to(tl.int32))


def select(
    x: Indexing, topk: int, local: int, buffer_bytes: int = 128 << 20, max_columns: int = 16384
) -> Tensor:
    """int32 [B, T, groups, topk]. max_columns: scores of a query in a program's registers."""
    (B, T, HI, D), S, q, G = x.q.shape, x.k.shape[1], x.q, x.groups
    out = torch.empty(B, T, G, topk, dtype=torch.int32, device=q.device)
    # float32, as all is without tensor cores, in shared memory of 64 KiB
    narrow, hip = q.dtype == torch.float32, torch.version.hip is not None
    if q.is_cuda and not hip:
        narrow |= torch.cuda.get_device_capability(q.device) < (8, 0)
    BT = 32 if narrow or T < 64 else 64 if hip or T < 128 else 128
    BN, BD = 128, min(max(triton.next_power_of_2(D), 16), 64 if narrow else 128)
    tiles = None if x.cu_seqlens is None else packed_tiles(x, BT)
    count = B * triton.cdiv(T, BT) if tiles is None else len(tiles)
    columns, blocks = S if x.pooled else triton.cdiv(S, x.block), triton.cdiv(S, BN)
    at_once = max(min(buffer_bytes // (4 * BT * G * max(columns, 1)), count), 1)
    scores = torch.empty(at_once * BT, G, columns, dtype=torch.float32, device=q.device)
    BC = min(max(triton.next_power_of_2(columns), 16), max_columns)
    common: dict[str, Any] = {"columns": columns, "G": G, "BLOCK": x.block, "POOLED": x.pooled}
    common |= {"T": T, "S": S, "CAUSAL": x.causal, "BT": BT, "scores_ptr": scores}
    common |= {"tiles_ptr": tiles, "lengths_ptr": x.key_lengths}
    given = {"q_ptr": q, "k_ptr": x.k, "w_ptr": x.weights, "HI": HI, "D": D, "RELU": x.relu}
    given |= {"BN": BN, "BD": BD, "PRECISION": backends.fp32_dot_precision(), "blocks": blocks}
    given |= {"num_warps": 4 if BT < 64 else 8, "num_stages": 1 if narrow else 2}
    taken = {"out_ptr": out, "topk": topk, "local": local, "BN": BC, "BC": min(BC, 2048)}
    taken |= {"ONE": columns <= BC, "num_warps": max(min(BC // 1024, 8), 1)}
    for first in range(0, count if topk else 0, at_once):
        now = min(at_once, count - first)
        if columns:
            launch = launch_cache.cached(index_scores_kernel)[(now * blocks, G)]
            launch(first=first, **given, **common)
        launch_cache.cached(index_select_kernel)[(now * BT, G)](first=first, **taken, **common)
    return out
