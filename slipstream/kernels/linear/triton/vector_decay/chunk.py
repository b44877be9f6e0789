"""Decay per channel: everything that meets the state, by scans that keep it in registers.

    qs_i = q_i exp(gates until i)      ke_j = k_j exp(gates after j)      D = exp(gates of a chunk)

made beforehand (intra_fwd.py), no factor above 1, leave for a chunk of C tokens

    o   = scale * (qs S + A v)        S  = D S + ke^T v        scans forward
    dqs = do S^T                      with the same S          scans forward
    dke = v dS'^T                     dS = D dS' + qs^T do     scans reversed
    dv  = scale * (ke dS' + A^T do)   with the same dS         scans reversed

where S is before the chunk and dS' is the gradient of the state after it over the scale. As in
scalar_decay/chunk.py the columns of x are the rows of all products: y^T = S r^T + x^T A^T, S = D S
+ x^T w. The state's rows decay (ROWS) for dqs and dke, its columns for o and dv.

The gradient of a gate takes z = sum over V of D S * dS' of its chunk (dqkg.py). With
Z = sum over V of S * dS' between two chunks, Z after a chunk less the sum of ke * dke is its z, and
z plus the sum of qs * dqs is the Z before. The dq scan leaves those sums,
and every ANCHOR_INTERVAL chunks the
state, from which the dk scan takes Z anew, since differences lose digits. Where D is below what is
lost by rounding z is 0: what the differences leave is only what was lost.

The loop over chunks is told its stages: Triton then also loads ahead what no product takes, such as
decays, whose latency each chunk would have to wait for.

A result in float32 of operands of 16 bits takes ke, and S where it is multiplied, in two parts: the
second is what the first was rounded by (rest).
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.scalar_decay.chunk import (
    first_chunk_of,
    load_rows,
    locate_segment,
    pool_rows_of,
    store_block,
    store_to_pool,
)
from slipstream.kernels.linear.triton.vector_decay.subchunk_decay import split_bf16


@triton.jit
def _scores(p, chunk, o_c, C: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        b_a = p.load([chunk.to(tl.int32), 0, 0]).reshape(C, C)
    else:
        b_a = tl.load(p + chunk.to(tl.int64) * (C * C) + o_c[:, None] * C + o_c[None, :])
    return b_a


@triton.jit
def longest_first(cu_ptr, i_n, N, MAX_N: tl.constexpr, PACKED: tl.constexpr):
    """The i_n-th longest of at most MAX_N packed sequences, of others sequence i_n itself: the last
    program to begin should be a short one, since all wait for it."""
    if PACKED and N <= MAX_N:
        o = tl.arange(0, MAX_N)
        m = o < N
        begin = tl.load(cu_ptr + o, mask=m, other=0)
        # wrong offsets count as no tokens, and what is no sequence as fewer: it comes last
        length = tl.maximum(tl.load(cu_ptr + o + 1, mask=m, other=0) - begin, 0)
        length = tl.where(m, length, -1)
        before = length[None, :] > length[:, None]
        before |= (length[None, :] == length[:, None]) & (o[None, :] < o[:, None])
        i_n = tl.sum(tl.where(tl.sum(before.to(tl.int32), 1) == i_n, o, 0), 0)
    return i_n


_SIZES = ["T", "N", "HV", "HR", "HX", "segment"]


@triton.jit(do_not_specialize=["scale", "scale_in", "scale_out", *_SIZES])
def vector_decay_chunk_kernel(
    r_ptr,  # [tokens, HR, D], or, if TMA, a descriptor of [B, T, HR, D]; so w, x, y, other
    w_ptr, x_ptr,  # [tokens, HR, D], [tokens, HX, X]
    rest_ptr,  # the second part of x if ROWS else of w; None where there is none
    y_ptr,  # [tokens, HV, X]; None where only the state is wanted
    a_ptr,  # [chunks * HV, C, C]: A, or, if TMA, a descriptor of it
    decay_ptr,  # [chunks, HV, X if ROWS else D]
    s_in_ptr, s_out_ptr,  # [segments, HV, D, X], [segments, HV, X, D] if TRANSPOSED; times scale_*
    total_ptr,  # [segments, HV, D]: exp(gates of the segment)
    other_ptr,  # [tokens, HX, X]: qs for the dq scan, ke for the dk scan
    sums_ptr, z_ptr,  # [chunks, HV, X]: of qs * dqs; z
    anchor_ptr,  # [anchors, HV, X, D]
    cu_ptr,  # [N + 1]
    scale, scale_in, scale_out, T, N, HV, HR, HX, segment,
    D: tl.constexpr, X: tl.constexpr, BD: tl.constexpr, BX: tl.constexpr, C: tl.constexpr,
    ANCHOR_INTERVAL: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, pool_ptr=None, to_ptr=None,
):  # fmt: skip
    """grid (ceil(X / BX) * HV * segments,): a program scans one tile of X of one head and segment.

    Without SPLIT a segment is a sequence, segment is T. pool_ptr, to_ptr: of scalar_decay/chunk.py.
    """
    if not GROUPED:  # tiles of one shape then share their offsets, and with them registers
        HR = HV
        HX = HV
    HAS_Y: tl.constexpr = y_ptr is not None
    HAS_REST: tl.constexpr = rest_ptr is not None
    HAS_A: tl.constexpr = a_ptr is not None
    HAS_SUMS: tl.constexpr = sums_ptr is not None
    NX: tl.constexpr = (X + BX - 1) // BX
    pid = tl.program_id(0)
    i_x = pid % NX
    i_h = (pid // NX) % HV
    i_seg = longest_first(cu_ptr, pid // NX // HV, N, 64, PACKED and not SPLIT)
    begin, length, i_b, skip, first_anchor = locate_segment(
        cu_ptr, i_seg, T, N, segment, ANCHOR_INTERVAL * C, PACKED, SPLIT
    )
    if SPLIT or not PACKED:
        first_chunk = first_chunk_of(begin, skip, i_seg, T, segment, C, PACKED)
    else:
        first_chunk = begin // C + i_seg
    o_c = tl.arange(0, C)
    o_d = tl.arange(0, BD)
    o_n = tl.arange(0, BX)
    o_x = i_x * BX + o_n
    i_r = i_h // (HV // HR)
    i_w = i_h // (HV // HX)
    if not TMA:
        r_ptr += (begin * HR + i_r) * D
        w_ptr += (begin * HR + i_r) * D
        x_ptr += (begin * HX + i_w) * X
        if HAS_REST:
            rest_ptr += (begin * HX + i_w) * X if ROWS else (begin * HR + i_r) * D
        if HAS_Y:
            y_ptr += (begin * HV + i_h) * X
        if HAS_SUMS:
            other_ptr += (begin * HX + i_w) * X
    m_s = (o_x < X)[:, None] & (o_d < D)[None, :]
    o_s = o_x[:, None] * D + o_d[None, :]
    i_s = (i_seg.to(tl.int64) * HV + i_h) * (D * X)
    o_io = o_s if TRANSPOSED else o_d[None, :] * X + o_x[:, None]
    if s_in_ptr is not None:
        b_s = tl.load(s_in_ptr + i_s + o_io, mask=m_s, other=0.0).to(tl.float32) * scale_in
    else:
        b_s = tl.zeros((BX, BD), tl.float32)
    if total_ptr is not None:
        b_total = tl.full((BD,), 1.0, tl.float32)
    b_z = tl.zeros((BX,), tl.float32)
    if to_ptr is not None:
        p_to = pool_rows_of(to_ptr, i_seg, i_b, begin, skip, T, segment, PACKED, SPLIT)
    chunks = tl.cdiv(tl.maximum(length, 0), C)
    if HAS_SUMS:
        segment_anchors = tl.cdiv(chunks, ANCHOR_INTERVAL)
        anchor_ptr += (first_anchor * HV + i_h) * (D * X)
    else:
        segment_anchors = 1
    for i_anchor in range(segment_anchors):
        if HAS_SUMS:
            anchor = segment_anchors - 1 - i_anchor if REVERSE else i_anchor
            first = anchor * ANCHOR_INTERVAL
            count = tl.minimum(chunks - first, ANCHOR_INTERVAL)
            p_anchor = anchor_ptr + anchor.to(tl.int64) * HV * (D * X) + o_s  # pyright: ignore
            if REVERSE:
                b_z = tl.sum(b_s * tl.load(p_anchor, mask=m_s, other=0.0), 1)
        else:
            first = 0
            count = chunks
        for i in tl.range(count, num_stages=STAGES):
            i_c = first + count - 1 - i if REVERSE else first + i
            t = i_c * C
            m_c = o_c < length - t
            chunk = (first_chunk + i_c) * HV + i_h
            b_w = load_rows(w_ptr, (i_b, skip, i_r, 0), t, HR, o_c, m_c, o_d, D, BD, TMA)  # [C, BD]
            b_x = load_rows(x_ptr, (i_b, skip, i_w, i_x * BX), t, HX, o_c, m_c, o_n, X, BX, TMA)
            b_x = tl.trans(b_x)  # [BX, C]
            if HAS_Y:
                b_r = load_rows(r_ptr, (i_b, skip, i_r, 0), t, HR, o_c, m_c, o_d, D, BD, TMA)
                if HAS_REST:
                    b_first, b_second = split_bf16(b_s, b_r.dtype)
                    b_y = tl.dot(b_second, tl.trans(b_r))
                    b_y = tl.dot(b_first, tl.trans(b_r), b_y)
                else:
                    b_y = tl.dot(b_s.to(b_r.dtype), tl.trans(b_r), input_precision=PRECISION)
                if HAS_A:
                    b_a = _scores(a_ptr, chunk, o_c, C, TMA)  # [i, j]
                    if not REVERSE:
                        b_a = tl.trans(b_a)
                    b_y = tl.dot(b_x, b_a, b_y, input_precision=PRECISION)
            if ROWS:
                p_decay = decay_ptr + chunk.to(tl.int64) * X + o_x
                b_decay = tl.load(p_decay, mask=o_x < X, other=0.0)
                b_s *= b_decay[:, None]
            else:
                p_decay = decay_ptr + chunk.to(tl.int64) * D + o_d
                b_decay = tl.load(p_decay, mask=o_d < D, other=0.0)
                b_s *= b_decay[None, :]
                if total_ptr is not None:
                    b_total *= b_decay
            if HAS_REST:
                if ROWS:
                    at = (i_b, skip, i_w, i_x * BX)
                    b_rest = load_rows(rest_ptr, at, t, HX, o_c, m_c, o_n, X, BX, TMA)
                    b_s = tl.dot(tl.trans(b_rest), b_w, b_s)
                else:
                    at = (i_b, skip, i_r, 0)
                    b_rest = load_rows(rest_ptr, at, t, HR, o_c, m_c, o_d, D, BD, TMA)
                    b_s = tl.dot(b_x, b_rest, b_s)
            b_s = tl.dot(b_x, b_w, b_s, input_precision=PRECISION)  # [BX, BD]
            if to_ptr is not None:
                store_to_pool(pool_ptr, p_to, skip + t + C, i_h, HV, b_s, o_x, o_d, m_s, X, D)
            if HAS_SUMS:
                at = (i_b, skip, i_w, i_x * BX)
                b_other = load_rows(other_ptr, at, t, HX, o_c, m_c, o_n, X, BX, TMA)
                b_sum = tl.sum(tl.trans(b_other).to(tl.float32) * b_y, 1)
                o_z = chunk.to(tl.int64) * X + o_x
                if REVERSE:
                    lost = 2.0**-22 if b_x.dtype == tl.float32 else 2.0**-10
                    b_z = tl.where(b_decay < lost, 0.0, b_z - b_sum)
                    tl.store(z_ptr + o_z, b_z, mask=o_x < X)
                    b_z += tl.load(sums_ptr + o_z, mask=o_x < X, other=0.0)
                else:
                    tl.store(sums_ptr + o_z, b_sum, mask=o_x < X)
            if HAS_Y:
                at = (i_b, skip, i_h, i_x * BX)
                store_block(y_ptr, at, t, HV, b_y * scale, o_c, m_c, o_n, X, BX, TMA)
        if HAS_SUMS and not REVERSE:
            tl.store(p_anchor, b_s, mask=m_s)
    if s_out_ptr is not None:
        tl.store(s_out_ptr + i_s + o_io, b_s * scale_out, mask=m_s)
    if total_ptr is not None:
        p_total = total_ptr + (i_seg.to(tl.int64) * HV + i_h) * D + o_d
        tl.store(p_total, b_total, mask=(o_d < D) & (i_x == 0))
