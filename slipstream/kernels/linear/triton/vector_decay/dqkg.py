"""Decay per channel: the gradients on its side of the state, all chunks at once.

With dqs, dke and z of the scans (chunk.py), P = do v^T, and u = 1 if there is none,

    dq_i = scale * (dqs_i exp(gates until i) + sum over j < i of P[i, j] exp(G_i - G_j) k_j
                    + P[i, i] u k_i)
    dk_j = scale * (dke_j exp(gates after j) + sum over i > j of P[i, j] exp(G_i - G_j) q_i
                    + P[j, j] u q_j)
    du   = scale * sum over i of P[i, i] q_i k_i           of each chunk

In a chunk that is one safe block (subchunk_decay.py; intra_bwd.py has the others)

    r_i = q_i exp(G_i)     dr = (lower triangle of P) w   dq_i = scale * (dqs_i + dr_i) exp(G_i)
    w_j = k_j exp(-G_j)    dw = (upper) r                 dk_j = scale * (dke_j D + dw_j) exp(-G_j)

with G from the chunk's start and D = exp(G_C). In chunks of which each quarter is one, from half of
what it decays by (subchunk_decay.py), the products of a quarter come after those of the one before
it, or for dw of the one after it, and between them what later rows have so far, or earlier ones,
takes a channel's factor to the next quarter. dg is what every exponent adds to its gates:

    dg_t = z + sum over i >= t of (r_i * (dqs_i + dr_i) - w_i * dw_i)
             + sum over j < t of w_j * dke_j D

The one difference is of the same products, so that it cancels to the last bits. With u the
diagonal of P is left out of the triangles and counts apart, and so it is where quarters are taken.

Channels of K are independent, BK of them a program. Without dk_ptr it is dq alone, which with the
roles exchanged (backend.py) is o. dq and dk may be where dqs and dke are.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block
from slipstream.kernels.linear.triton.vector_decay.subchunk_decay import (
    are_quarters_safe,
    block_span,
    dot_with,
    is_block_safe,
    is_chunk_safe,
    of_quarter,
    of_tokens,
    prefix_span,
    prefix_span_bwd,
    quarter_halves,
    spans_to_gates_bwd,
    split_gates,
    suffix_span_bwd,
    sums,
    tokens,
    until_end,
)


@triton.jit
def anchored_reads(
    b_p, b_w, b_dqs, b_h, rows, dtype: tl.constexpr, BEFORE: tl.constexpr,
    QUARTERS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dqs + (lower triangle of P) w [C, BK], in float32; h as quarter_halves has it."""
    C: tl.constexpr = rows.shape[0]
    i, j = rows[:, None], tl.arange(0, C)[None, :]
    b_p = tl.where(i > j if BEFORE or QUARTERS else i >= j, b_p, 0.0)
    if QUARTERS:
        b_dr = b_dqs * tl.exp2(of_quarter(b_h, 0))[None, :]
        # a loop: four products side by side would go to the stack
        for quarter in range(4):
            end = (quarter + 1) * (C // 4)
            of = (j >= end - C // 4) & (j < end)
            b_dr += dot_with(tl.where(of, b_p, 0.0).to(b_p.dtype), b_w, dtype, PRECISION)
            b_next = tl.exp2(of_quarter(b_h, quarter) + of_quarter(b_h, quarter + 1))
            b_dr *= tl.where(i >= end, b_next[None, :], 1.0)
    else:
        b_dr = dot_with(b_p, b_w, dtype, PRECISION) + b_dqs
    return b_dr


@triton.jit
def anchored_writes(
    b_p, b_r, b_h, rows, BEFORE: tl.constexpr, QUARTERS: tl.constexpr, PRECISION: tl.constexpr
):
    """(upper triangle of P) r [C, BK]."""
    C: tl.constexpr = rows.shape[0]
    j, i = rows[:, None], tl.arange(0, C)[None, :]
    b_p = tl.where(j < i if BEFORE or QUARTERS else j <= i, b_p, 0.0)
    if QUARTERS:
        b_dw = tl.zeros(b_r.shape, tl.float32)
        for n in range(4):
            begin = (3 - n) * (C // 4)
            b_of = tl.where((i >= begin) & (i < begin + C // 4), b_p, 0.0).to(b_p.dtype)
            b_dw = tl.dot(b_of, b_r, b_dw, input_precision=PRECISION)
            b_next = tl.exp2(of_quarter(b_h, 2 - n) + of_quarter(b_h, 3 - n))
            b_dw *= tl.where(j < begin, b_next[None, :], 1.0)
    else:
        b_dw = tl.dot(b_p, b_r, input_precision=PRECISION)
    return b_dw


@triton.jit(do_not_specialize=["scale", "T", "N", "HV", "HK"])
def vector_decay_dqkg_kernel(
    q_ptr,  # [tokens, HK, K]
    k_ptr,  # [tokens, HK, K]
    g_ptr,  # [tokens, HV, K]
    u_ptr,  # [HV, K]
    p_ptr,  # [chunks, HV, C, C]: P, symmetric; float32 where its rounding would count
    dqs_ptr,  # [tokens, HV, K]
    dke_ptr,  # [tokens, HV, K]
    z_ptr,  # [chunks, HV, K]
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,  # [tokens, HV, K]
    dg_ptr,  # [tokens, HV, K]
    du_ptr,  # [chunks, HV, K]
    decay_ptr,  # [chunks, HV, K]
    cu_ptr,  # [N + 1]
    scale,
    T,
    N,
    HV,
    HK,
    K: tl.constexpr,
    BK: tl.constexpr,
    ALL: tl.constexpr,
    C: tl.constexpr,
    BOUND: tl.constexpr,
    BEFORE: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    BF16_TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(K / BK) * HV * chunks,): BK channels of one chunk and value head a program."""
    if not GROUPED:
        HK = HV
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    if is_block_safe(decay_ptr + (pid // NK).to(tl.int64) * K, K, ALL, BOUND):
        _tile(
            q_ptr, k_ptr, g_ptr, u_ptr, p_ptr, dqs_ptr, dke_ptr, z_ptr, dq_ptr, dk_ptr, dg_ptr,
            du_ptr, decay_ptr, cu_ptr, scale, pid, T, N, HV, HK,
            K, BK, C, False, BEFORE, PACKED, BF16_TERMS, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["scale", "total", "T", "N", "HV", "HK"])
def vector_decay_dqkg_quarters_kernel(
    q_ptr, k_ptr, g_ptr, u_ptr, p_ptr, dqs_ptr, dke_ptr, z_ptr, dq_ptr, dk_ptr, dg_ptr, du_ptr,
    decay_ptr, quarters_ptr, cu_ptr, scale, total, T, N, HV, HK,
    K: tl.constexpr, BK: tl.constexpr, ALL: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    C: tl.constexpr, BOUND: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr,
    GROUPED: tl.constexpr, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (at least total / MAX_CHUNKS,): the same of chunks that are not one safe block, where
    each quarter is one.

    total: tiles of K times chunks times value heads. quarters: [total], 1 where that is so, else 0.
    """
    if not GROUPED:
        HK = HV
    NK: tl.constexpr = (K + BK - 1) // BK
    # of a tile at once more would go to the stack
    TILES: tl.constexpr = 2 if K % BK == 0 and BK > 32 else 1
    if is_chunk_safe(decay_ptr, total, NK, K, ALL, BOUND, MAX_CHUNKS):
        return
    for i_tile in tl.range(tl.program_id(0), total, tl.num_programs(0), disable_licm=True):
        at = tl.cast(i_tile // NK, tl.int64)
        if not is_block_safe(decay_ptr + at * K, K, ALL, BOUND):
            safe = _has_safe_quarters(g_ptr, cu_ptr, i_tile, T, N, HV, K, BK, C, PACKED)
            tl.store(quarters_ptr + i_tile, safe.to(tl.int32))
            if safe:
                for i in tl.range(TILES, disable_licm=True):
                    _tile(
                        q_ptr, k_ptr, g_ptr, u_ptr, p_ptr, dqs_ptr, dke_ptr, z_ptr, dq_ptr, dk_ptr,
                        dg_ptr, du_ptr, None, cu_ptr, scale, i_tile * TILES + i, T, N, HV, HK,
                        K, BK // TILES, C, True, BEFORE, PACKED, BF16_TERMS, PRECISION,
                    )  # fmt: skip


@triton.jit
def _has_safe_quarters(
    g_ptr, cu_ptr, i_tile, T, N, HV,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Of BK channels of one chunk and value head."""
    NK: tl.constexpr = (K + BK - 1) // BK
    i_h = (i_tile // NK) % HV
    begin, length, i_c = locate_chunk(cu_ptr, i_tile // NK // HV, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = (i_tile % NK) * BK + tl.arange(0, BK)
    p_g = g_ptr + ((begin + i_c * C) * HV + i_h) * K
    b_g = load_block(p_g, HV * K, o_c, o_c < length - i_c * C, o_k, K, K % BK != 0)  # [C, BK]
    return are_quarters_safe(quarter_halves(b_g.to(tl.float32), C))


@triton.jit
def _tile(
    q_ptr, k_ptr, g_ptr, u_ptr, p_ptr, dqs_ptr, dke_ptr, z_ptr, dq_ptr, dk_ptr, dg_ptr, du_ptr,
    decay_ptr, cu_ptr, scale, pid, T, N, HV, HK,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, QUARTERS: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BK channels of one chunk and value head; unless QUARTERS the chunk is one safe block."""
    NK: tl.constexpr = (K + BK - 1) // BK
    HAS_DK: tl.constexpr = dk_ptr is not None
    ONE: tl.constexpr = 1 if BF16_TERMS == 2 else BF16_TERMS  # 16 bits
    TWO: tl.constexpr = 2 if BF16_TERMS == 1 else BF16_TERMS
    # what a read has of the token before it cancels between two sums, and strong gates leave little
    ALL_TERMS: tl.constexpr = 3 if QUARTERS and BF16_TERMS > 0 else TWO
    i_h = (pid // NK) % HV
    i_chunk = pid // NK // HV
    at = i_chunk.to(tl.int64) * HV + i_h
    begin, length, i_c = locate_chunk(cu_ptr, i_chunk, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = (pid % NK) * BK + tl.arange(0, BK)
    m_c = o_c < length - i_c * C
    row = begin + i_c * C
    rows = tokens(C, tl.bfloat16 if BF16_TERMS > 0 else tl.float32)
    i_k = (row * HK + i_h // (HV // HK)) * K
    i_o = (row * HV + i_h) * K
    at_o = o_c[:, None] * (HV * K) + o_k[None, :]
    m_o = m_c[:, None] & (o_k < K)[None, :]
    b_g = load_block(g_ptr + i_o, HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
    b_k = load_block(k_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
    b_dq = load_block(dqs_ptr + i_o, HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
    b_p = tl.load(p_ptr + at * (C * C) + o_c[:, None] * C + o_c[None, :])  # [C, C]
    if HAS_DK:
        b_q = load_block(q_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_z = tl.load(z_ptr + at * K + o_k, mask=o_k < K, other=0.0)
    # beside the sums, or the diagonal would cancel in dg what is much smaller
    APART: tl.constexpr = u_ptr is not None or QUARTERS
    if APART:
        b_u = tl.full((BK,), 1.0, tl.float32) * scale
        if u_ptr is not None:
            b_u *= tl.load(u_ptr + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_g, b_terms = split_gates(b_g, BF16_TERMS)
    b_h = None
    if QUARTERS:
        b_h = quarter_halves(b_g, C)
        QUARTER: tl.constexpr = C.bit_length() - 3  # 2^QUARTER tokens
        b_G = sums(block_span(rows, QUARTER, False), b_terms, BF16_TERMS, PRECISION)
        b_G -= of_tokens(b_h, C)
    else:
        b_G = sums(prefix_span(rows, False), b_terms, BF16_TERMS, PRECISION)
    b_w = b_k * tl.exp2(-b_G)  # [C, BK]
    b_e = b_G
    if BEFORE:
        if QUARTERS:
            b_e = sums(block_span(rows, QUARTER, True), b_terms, BF16_TERMS, PRECISION)
            b_e -= of_tokens(b_h, C)
        else:
            b_e = sums(prefix_span(rows, True), b_terms, BF16_TERMS, PRECISION)
    b_e = tl.exp2(b_e)
    b_dr = anchored_reads(
        b_p, b_w, b_dq, b_h, rows, b_k.dtype, BEFORE, QUARTERS, PRECISION
    )  # [C, BK]
    b_w = b_w.to(b_k.dtype)
    if dq_ptr is not None:
        b_dq = b_dr * b_e * scale
        if APART:
            b_diagonal = tl.load(p_ptr + at * (C * C) + o_c * (C + 1)).to(tl.float32)
            b_dq += b_diagonal[:, None] * b_u[None, :] * b_k
        tl.store(dq_ptr + i_o + at_o, b_dq.to(dq_ptr.dtype.element_ty), mask=m_o)
    if HAS_DK:
        b_r = (b_q * b_e).to(b_k.dtype)  # [C, BK]
        b_leave = b_r * b_dr
        b_dw = anchored_writes(b_p, b_r, b_h, rows, BEFORE, QUARTERS, PRECISION)  # [C, BK]
        b_dg = tl.zeros((C, BK), tl.float32) + b_z[None, :]
        if BEFORE:
            span = prefix_span_bwd(rows, C, True)
            b_dg = spans_to_gates_bwd(span, b_leave, b_dg, ALL_TERMS, PRECISION)
            b_leave = tl.zeros((C, BK), tl.float32)
        b_leave -= b_w * b_dw
        TERMS: tl.constexpr = ALL_TERMS if BEFORE else TWO
        b_dg = spans_to_gates_bwd(prefix_span_bwd(rows, C, False), b_leave, b_dg, TERMS, PRECISION)
        b_dk = load_block(dke_ptr + i_o, HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        if QUARTERS:
            b_enter = b_dk * of_tokens(tl.exp2(until_end(b_h)), C)
        else:
            b_end = tl.load(decay_ptr + at * K + o_k, mask=o_k < K, other=0.0)
            b_enter = b_dk * b_end[None, :]
        b_dw += b_enter
        b_dg = spans_to_gates_bwd(suffix_span_bwd(rows), b_w * b_enter, b_dg, ONE, PRECISION)
        tl.store(dg_ptr + i_o + at_o, (b_dg * scale).to(dg_ptr.dtype.element_ty), mask=m_o)
        if QUARTERS and not BEFORE:
            b_dk = b_dw / b_e * scale  # G - h kept till here would go to the stack
        else:
            b_dk = b_dw * tl.exp2(-b_G) * scale
        if APART:
            # read again: kept till here they would go to the stack
            b_q = load_block(q_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)
            b_diagonal = tl.load(p_ptr + at * (C * C) + o_c * (C + 1)).to(tl.float32)
            b_dk += b_diagonal[:, None] * b_u[None, :] * b_q
        tl.store(dk_ptr + i_o + at_o, b_dk.to(dk_ptr.dtype.element_ty), mask=m_o)
        if u_ptr is not None:
            b_k = load_block(k_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)
            b_pair = (b_diagonal * scale)[:, None] * b_q * b_k
            tl.store(du_ptr + at * K + o_k, tl.sum(b_pair, 0), mask=o_k < K)
