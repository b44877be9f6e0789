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

with G from the chunk's start and D = exp(G_C), and dg is what every exponent adds to its gates:

    dg_t = z + sum over i >= t of (r_i * (dqs_i + dr_i) - w_i * dw_i)
             + sum over j < t of w_j * dke_j D

The one difference is of the same products, so that it cancels to the last bits. With u the
diagonal of P is left out of the triangles and counts apart.

Channels of K are independent, BK of them a program. Without dk_ptr it is dq alone, which with the
roles exchanged (backend.py) is o. dq and dk may be where dqs and dke are.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block
from slipstream.kernels.linear.triton.vector_decay.subchunk_decay import (
    dot_with,
    is_block_safe,
    prefix_span,
    prefix_span_bwd,
    spans_to_gates_bwd,
    split_gates,
    suffix_span_bwd,
    sums,
    tokens,
)


@triton.jit
def anchored_reads(
    b_p, b_w, b_dqs, i, j, dtype: tl.constexpr, BEFORE: tl.constexpr, PRECISION: tl.constexpr
):
    """dqs + (lower triangle of P) w [C, BK], in float32."""
    lower = i > j if BEFORE else i >= j
    b_dr = dot_with(tl.where(lower, b_p, 0.0), b_w, dtype, PRECISION)
    return b_dr + b_dqs


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
    HAS_DK: tl.constexpr = dk_ptr is not None
    ONE: tl.constexpr = 1 if BF16_TERMS == 2 else BF16_TERMS  # 16 bits
    TWO: tl.constexpr = 2 if BF16_TERMS == 1 else BF16_TERMS
    pid = tl.program_id(0)
    i_h = (pid // NK) % HV
    i_chunk = pid // NK // HV
    at = i_chunk.to(tl.int64) * HV + i_h
    if not is_block_safe(decay_ptr + at * K, K, ALL, BOUND):
        return
    begin, length, i_c = locate_chunk(cu_ptr, i_chunk, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = (pid % NK) * BK + tl.arange(0, BK)
    m_c = o_c < length - i_c * C
    row = begin + i_c * C
    rows = tokens(C, tl.bfloat16 if BF16_TERMS > 0 else tl.float32)
    i, j = rows[:, None], o_c[None, :]
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
        b_end = tl.load(decay_ptr + at * K + o_k, mask=o_k < K, other=0.0)
    if u_ptr is not None:
        b_u = tl.load(u_ptr + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32) * scale
        b_diagonal = tl.load(p_ptr + at * (C * C) + o_c * (C + 1)).to(tl.float32)
        b_diag = b_diagonal[:, None] * b_u[None, :]
    b_g, b_terms = split_gates(b_g, BF16_TERMS)
    b_G = sums(prefix_span(rows, False), b_terms, BF16_TERMS, PRECISION)
    b_w = b_k * tl.exp2(-b_G)  # [C, BK]
    b_e = tl.exp2(sums(prefix_span(rows, True), b_terms, BF16_TERMS, PRECISION) if BEFORE else b_G)
    b_dr = anchored_reads(b_p, b_w, b_dq, i, j, b_k.dtype, BEFORE, PRECISION)  # [C, BK]
    b_w = b_w.to(b_k.dtype)
    if dq_ptr is not None:
        b_dq = b_dr * b_e * scale
        if u_ptr is not None:
            b_dq += b_diag * b_k
        tl.store(dq_ptr + i_o + at_o, b_dq.to(dq_ptr.dtype.element_ty), mask=m_o)
    if HAS_DK:
        b_r = (b_q * b_e).to(b_k.dtype)  # [C, BK]
        b_leave = b_r * b_dr
        upper = i < j if BEFORE else i <= j
        b_dw = tl.dot(tl.where(upper, b_p, 0.0), b_r, input_precision=PRECISION)  # [C, BK]
        b_dg = tl.zeros((C, BK), tl.float32) + b_z[None, :]
        if BEFORE:
            b_dg = spans_to_gates_bwd(prefix_span_bwd(rows, C, True), b_leave, b_dg, TWO, PRECISION)
            b_leave = tl.zeros((C, BK), tl.float32)
        b_leave -= b_w * b_dw
        b_dg = spans_to_gates_bwd(prefix_span_bwd(rows, C, False), b_leave, b_dg, TWO, PRECISION)
        b_dk = load_block(dke_ptr + i_o, HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_enter = b_dk * b_end[None, :]
        b_dw += b_enter
        b_dg = spans_to_gates_bwd(suffix_span_bwd(rows), b_w * b_enter, b_dg, ONE, PRECISION)
        tl.store(dg_ptr + i_o + at_o, (b_dg * scale).to(dg_ptr.dtype.element_ty), mask=m_o)
        b_dk = b_dw * tl.exp2(-b_G) * scale
        if u_ptr is not None:
            # read again: kept till here they would go to the stack
            b_q = load_block(q_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)
            b_diagonal = tl.load(p_ptr + at * (C * C) + o_c * (C + 1)).to(tl.float32)
            b_dk += b_diagonal[:, None] * b_u[None, :] * b_q
        tl.store(dk_ptr + i_o + at_o, b_dk.to(dk_ptr.dtype.element_ty), mask=m_o)
        if u_ptr is not None:
            b_k = load_block(k_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)
            b_pair = (b_diagonal * scale)[:, None] * b_q * b_k
            tl.store(du_ptr + at * K + o_k, tl.sum(b_pair, 0), mask=o_k < K)
