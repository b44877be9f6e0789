"""Decay per channel: gradients as in dqkg.py of chunks of which each quarter is one safe block.

Factors are exp(G_i - h) and exp(h - G_j), G from the quarter's start and h half of what it decays
by. The products of a quarter come after those of the one before it, or for dw of the one after it,
and between them what later rows have so far, or earlier ones, takes a channel's factor to the next
quarter, exp(h + h'). The diagonal of P counts apart: it would cancel in dg what is much smaller.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block
from slipstream.kernels.linear.triton.vector_decay.subchunk_decay import (
    block_span,
    dot_with,
    prefix_span_bwd,
    quarter_halves,
    spans_to_gates_bwd,
    split_gates,
    suffix_span_bwd,
    sums,
    tokens,
)


@triton.jit
def _of_quarter(b_h, quarter):
    """[BK]"""
    return tl.sum(tl.where(tl.arange(0, 4)[:, None] == quarter, b_h, 0.0), 0)


@triton.jit
def _to_quarter(b_x, b_h, quarter, other, rows):
    """Rows relative to h of a quarter as relative to that of the quarter beside it, [C, BK]. In
    two steps: float32 does not have exp(h + h')."""
    b_x *= tl.where(rows, tl.exp2(_of_quarter(b_h, quarter))[None, :], 1.0)
    return b_x * tl.where(rows, tl.exp2(_of_quarter(b_h, other))[None, :], 1.0)


@triton.jit
def _of_tokens(b_h, C: tl.constexpr):
    """[C, BK]: of each token's quarter."""
    BK: tl.constexpr = b_h.shape[1]
    return tl.reshape(tl.broadcast_to(b_h[:, None, :], (4, C // 4, BK)), (C, BK))


@triton.jit
def _until_end(b_h):
    """[4, BK]: the gates from h of each quarter to the chunk's end."""
    quarter = tl.arange(0, 4)
    later = (quarter[:, None] < quarter[None, :])[:, :, None]
    return b_h + 2 * tl.sum(tl.where(later, b_h[None, :, :], 0.0), 1)


@triton.jit
def _reads(b_p, b_w, b_dqs, b_h, rows, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """dqs + (P below the diagonal) w [C, BK], in float32."""
    C: tl.constexpr = rows.shape[0]
    i, j = rows[:, None], tl.arange(0, C)[None, :]
    b_p = tl.where(i > j, b_p, 0.0)
    b_dr = b_dqs * tl.exp2(_of_quarter(b_h, 0))[None, :]
    # a loop: four products side by side would go to the stack
    for quarter in range(4):
        end = (quarter + 1) * (C // 4)
        of = (j >= end - C // 4) & (j < end)
        b_dr += dot_with(tl.where(of, b_p, 0.0).to(b_p.dtype), b_w, dtype, PRECISION)
        b_dr = _to_quarter(b_dr, b_h, quarter, quarter + 1, i >= end)
    return b_dr


@triton.jit
def _writes(b_p, b_r, b_h, rows, PRECISION: tl.constexpr):
    """(P above the diagonal) r [C, BK]."""
    C: tl.constexpr = rows.shape[0]
    j, i = rows[:, None], tl.arange(0, C)[None, :]
    b_p = tl.where(j < i, b_p, 0.0)
    b_dw = tl.zeros(b_r.shape, tl.float32)
    for n in range(4):
        begin = (3 - n) * (C // 4)
        b_of = tl.where((i >= begin) & (i < begin + C // 4), b_p, 0.0).to(b_p.dtype)
        b_dw = tl.dot(b_of, b_r, b_dw, input_precision=PRECISION)
        b_dw = _to_quarter(b_dw, b_h, 3 - n, 2 - n, j < begin)
    return b_dw


@triton.jit
def grads_by_quarters(
    q_ptr, k_ptr, g_ptr, u_ptr, p_ptr, dqs_ptr, dke_ptr, z_ptr, dq_ptr, dk_ptr, dg_ptr, du_ptr,
    cu_ptr, scale, i_tile, T, N, HV, HK,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BEFORE: tl.constexpr,
    PACKED: tl.constexpr, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BK channels of one chunk and value head."""
    NK: tl.constexpr = (K + BK - 1) // BK
    SPAN: tl.constexpr = C.bit_length() - 3  # 2^SPAN tokens
    ONE: tl.constexpr = 1 if BF16_TERMS == 2 else BF16_TERMS  # 16 bits
    # what a read has of the token before it cancels between two sums, and strong gates leave little
    ALL_TERMS: tl.constexpr = 3 if BF16_TERMS > 0 else BF16_TERMS
    TWO: tl.constexpr = 2 if BF16_TERMS == 1 else BF16_TERMS
    TERMS: tl.constexpr = ALL_TERMS if BEFORE else TWO
    i_h = (i_tile // NK) % HV
    i_chunk = i_tile // NK // HV
    at = tl.cast(i_chunk, tl.int64) * HV + i_h
    begin, length, i_c = locate_chunk(cu_ptr, i_chunk, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = (i_tile % NK) * BK + tl.arange(0, BK)
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
    p_p = p_ptr + at * (C * C)
    b_p = tl.load(p_p + o_c[:, None] * C + o_c[None, :])  # [C, C]
    b_q = load_block(q_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
    b_u = tl.full((BK,), 1.0, tl.float32) * scale
    if u_ptr is not None:
        b_u *= tl.load(u_ptr + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_g, b_terms = split_gates(b_g, BF16_TERMS)
    b_h = quarter_halves(b_g)
    b_G = sums(block_span(rows, SPAN, False), b_terms, BF16_TERMS, PRECISION)
    b_G -= _of_tokens(b_h, C)
    b_w = b_k * tl.exp2(-b_G)  # [C, BK]
    b_e = b_G
    if BEFORE:
        b_e = sums(block_span(rows, SPAN, True), b_terms, BF16_TERMS, PRECISION)
        b_e -= _of_tokens(b_h, C)
    b_e = tl.exp2(b_e)
    b_dr = _reads(b_p, b_w, b_dq, b_h, rows, b_k.dtype, PRECISION)  # [C, BK]
    b_w = b_w.to(b_k.dtype)
    b_diagonal = tl.load(p_p + o_c * (C + 1)).to(tl.float32)[:, None]
    if dq_ptr is not None:
        b_dq = b_dr * b_e * scale + b_diagonal * b_u[None, :] * b_k
        tl.store(dq_ptr + i_o + at_o, b_dq.to(dq_ptr.dtype.element_ty), mask=m_o)
    b_r = (b_q * b_e).to(b_k.dtype)  # [C, BK]
    b_leave = b_r * b_dr
    b_dw = _writes(b_p, b_r, b_h, rows, PRECISION)  # [C, BK]
    b_z = tl.load(z_ptr + at * K + o_k, mask=o_k < K, other=0.0)
    b_dg = tl.zeros((C, BK), tl.float32) + b_z[None, :]
    if BEFORE:
        span = prefix_span_bwd(rows, C, True)
        b_dg = spans_to_gates_bwd(span, b_leave, b_dg, ALL_TERMS, PRECISION)
        b_leave = tl.zeros((C, BK), tl.float32)
    b_leave -= b_w * b_dw
    b_dg = spans_to_gates_bwd(prefix_span_bwd(rows, C, False), b_leave, b_dg, TERMS, PRECISION)
    b_dk = load_block(dke_ptr + i_o, HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
    b_enter = b_dk * _of_tokens(tl.exp2(_until_end(b_h)), C)
    b_dw += b_enter
    b_dg = spans_to_gates_bwd(suffix_span_bwd(rows), b_w * b_enter, b_dg, ONE, PRECISION)
    tl.store(dg_ptr + i_o + at_o, (b_dg * scale).to(dg_ptr.dtype.element_ty), mask=m_o)
    if BEFORE:
        b_dk = b_dw * tl.exp2(-b_G) * scale
    else:
        b_dk = b_dw / b_e * scale  # G - h kept till here would go to the stack
    # read again: kept till here they would go to the stack
    b_q = load_block(q_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)
    b_diagonal = tl.load(p_p + o_c * (C + 1)).to(tl.float32)[:, None]
    b_dk += b_diagonal * b_u[None, :] * b_q
    tl.store(dk_ptr + i_o + at_o, b_dk.to(dk_ptr.dtype.element_ty), mask=m_o)
    if u_ptr is not None:
        b_k = load_block(k_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)
        tl.store(du_ptr + at * K + o_k, tl.sum(b_diagonal * scale * b_q * b_k, 0), mask=o_k < K)
