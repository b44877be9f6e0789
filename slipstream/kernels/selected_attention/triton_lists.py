"""Lists of selected blocks, sorted and merged: of each tile of queries one, or of each query by
tiles of keys. A program works on a row of lists, which is sorted between these two kernels."""

import triton
import triton.language as tl

from slipstream.kernels.attention.triton.scores import rows_of_sequence, sequence_of_tile

_LISTS = ["T", "S", "G", "N", "W", "entries", "tiles", "search_steps", "total"]


@triton.jit
def _none():
    """What stands for no entry: beyond every one."""
    return 2147483647


@triton.jit(do_not_specialize=_LISTS)
def selected_keys_kernel(
    lists_ptr,  # [B, T, G, entries]
    keys_ptr,  # [rows of tiles, G, W], W = QT entries
    cu_q_ptr,
    cu_k_ptr,
    lengths_ptr,
    T,
    S,
    G,
    N,
    W,
    entries,
    tiles,
    search_steps,
    total,  # blocks of all sequences
    QT: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SB: tl.constexpr,
    BY_KEY: tl.constexpr,
    PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    BW: tl.constexpr,
):
    """grid (rows of tiles * G,): what the lists of a tile are sorted by, NONE for what is no entry
    or names no key that the query may see: block * QT + query, or BY_KEY (QT = 1) block, counted
    through all sequences, each from a multiple of SB keys on, and lists."""
    pid = tl.program_id(0)
    i_g = pid % G
    tile = pid // G
    i_n, row = sequence_of_tile(
        tile % tiles, tile // tiles, cu_q_ptr, N, search_steps, QT, PACKED_Q
    )
    i_b, begin, _, queries = rows_of_sequence(i_n, cu_q_ptr, lengths_ptr, T, PACKED_Q, False)
    _, begin_k, _, keys = rows_of_sequence(i_n, cu_k_ptr, lengths_ptr, S, PACKED_K, HAS_LENGTHS)
    first = 0
    if BY_KEY:
        if PACKED_K:
            first = (begin_k // SB).to(tl.int32) + i_n
        else:
            first = i_n * tl.cdiv(S, SB)
        first = (i_g * total + first) * (SB // BLOCK)
    p_keys = keys_ptr + pid.to(tl.int64) * W
    for j in range(0, W, BW):
        o_w = j + tl.arange(0, BW)
        i_q = row + o_w // entries
        m_w = (o_w < W) & (i_q < queries)
        i_l = ((i_b * T + begin + i_q) * G + i_g) * entries + o_w % entries
        b_l = tl.load(lists_ptr + i_l, mask=m_w, other=-1)
        b_at = b_l * BLOCK
        m_w = m_w & (b_l >= 0) & (b_l < tl.cdiv(keys, BLOCK))
        if CAUSAL:
            m_w = m_w & (b_at <= i_q + keys - queries)
        b_key = first + b_l if BY_KEY else b_l * QT + o_w // entries
        tl.store(p_keys + o_w, tl.where(m_w, b_key, _none()), mask=o_w < W)


@triton.jit(do_not_specialize=["W"])
def selected_merge_kernel(
    keys_ptr,  # [rows, W], sorted
    merged_ptr,  # [rows, W]: each key // DIV once, in order; BY_KEY filled up with NONE
    sums_ptr,  # [rows, W]
    bits_ptr,  # [rows, W], may be keys: 1 << key % DIV of each entry's keys
    counts_ptr,  # [rows], how many
    W,
    DIV: tl.constexpr,
    BY_KEY: tl.constexpr,
    BW: tl.constexpr,
):
    """grid (rows,). Bits are differences of running sums, where every key counts once. Sums wrap;
    their differences do not."""
    row = tl.program_id(0).to(tl.int64) * W
    done = W * 0
    total = tl.zeros([], sums_ptr.dtype.element_ty)
    b_one = tl.full([BW], 1, sums_ptr.dtype.element_ty)
    for j in range(0, W, BW):
        o_w = j + tl.arange(0, BW)
        b_key = tl.load(keys_ptr + row + o_w, mask=o_w < W, other=_none())
        b_before = tl.load(keys_ptr + row + o_w - 1, mask=(o_w > 0) & (o_w < W), other=-1)
        b_after = tl.load(keys_ptr + row + o_w + 1, mask=o_w + 1 < W, other=_none())
        m_w = b_key != _none()
        b_bit = tl.where(m_w & (b_key != b_before), b_one << (b_key % DIV), 0)
        b_is_last = m_w & ((b_after == _none()) | (b_key // DIV != b_after // DIV))
        b_last = b_is_last.to(tl.int32)
        b_place = done + tl.cumsum(b_last, 0) - 1
        tl.store(merged_ptr + row + b_place, b_key // DIV, mask=b_is_last)
        tl.store(sums_ptr + row + b_place, total + tl.cumsum(b_bit, 0), mask=b_is_last)
        done += tl.sum(b_last, 0)
        total += tl.sum(b_bit, 0)
    # sums, which other threads have written
    tl.debug_barrier()
    for j in range(0, W, BW):
        o_w = j + tl.arange(0, BW)
        b_bits = tl.load(sums_ptr + row + o_w, mask=o_w < done, other=0)
        b_bits -= tl.load(sums_ptr + row + o_w - 1, mask=(o_w > 0) & (o_w < done), other=0)
        tl.store(bits_ptr + row + o_w, b_bits, mask=o_w < W)
        if BY_KEY:
            tl.store(merged_ptr + row + o_w, _none(), mask=(o_w >= done) & (o_w < W))
    tl.store(counts_ptr + tl.program_id(0), done)
