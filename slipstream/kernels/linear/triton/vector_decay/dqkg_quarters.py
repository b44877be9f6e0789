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
from slipstream.kernels.linear.triton.vector_decay import subchunk_decay


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
        b_dr += subchunk_decay.dot_with(tl.where(of, b_p, 0.0).to(b_p.dtype), b_w, dtype, PRECISION)
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
def grads_by_quarters(refs, scale, i_tile, sizes, c):
    """BK channels of one chunk and value head."""
    T, N, HV, HK = sizes
    NK: tl.constexpr = (c.K + c.BK - 1) // c.BK
    SPAN: tl.constexpr = c.C.bit_length() - 3  # 2^SPAN tokens
    ONE: tl.constexpr = 1 if c.BF16_TERMS == 2 else c.BF16_TERMS  # 16 bits
    # what a read has of the token before it cancels between two sums, and strong gates leave little
    ALL_TERMS: tl.constexpr = 3 if c.BF16_TERMS > 0 else c.BF16_TERMS
    TWO: tl.constexpr = 2 if c.BF16_TERMS == 1 else c.BF16_TERMS
    TERMS: tl.constexpr = ALL_TERMS if c.BEFORE else TWO
    i_h = (i_tile // NK) % HV
    i_chunk = i_tile // NK // HV
    at = tl.cast(i_chunk, tl.int64) * HV + i_h
    begin, length, i_c = locate_chunk(refs.cu, i_chunk, T, N, c.C, c.PACKED)
    o_c = tl.arange(0, c.C)
    o_k = (i_tile % NK) * c.BK + tl.arange(0, c.BK)
    m_c = o_c < length - i_c * c.C
    row = begin + i_c * c.C
    rows = subchunk_decay.tokens(c.C, tl.bfloat16 if c.BF16_TERMS > 0 else tl.float32)
    i_k = (row * HK + i_h // (HV // HK)) * c.K
    i_o = (row * HV + i_h) * c.K
    at_o = o_c[:, None] * (HV * c.K) + o_k[None, :]
    m_o = m_c[:, None] & (o_k < c.K)[None, :]
    b_g = load_block(refs.g + i_o, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    b_k = load_block(refs.k + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    b_dq = load_block(refs.dqs + i_o, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    p_p = refs.p + at * (c.C * c.C)
    b_p = tl.load(p_p + o_c[:, None] * c.C + o_c[None, :])  # [C, C]
    b_q = load_block(refs.q + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    b_u = tl.full((c.BK,), 1.0, tl.float32) * scale
    if refs.u is not None:
        b_u *= tl.load(refs.u + i_h * c.K + o_k, mask=o_k < c.K, other=0.0).to(tl.float32)
    b_g, b_terms = subchunk_decay.split_gates(b_g, c.BF16_TERMS)
    b_h = subchunk_decay.quarter_halves(b_g)
    b_G = subchunk_decay.sums(
        subchunk_decay.block_span(rows, SPAN, False), b_terms, c.BF16_TERMS, c.PRECISION
    )
    b_G -= _of_tokens(b_h, c.C)
    b_w = b_k * tl.exp2(-b_G)  # [C, BK]
    b_e = b_G
    if c.BEFORE:
        b_e = subchunk_decay.sums(
            subchunk_decay.block_span(rows, SPAN, True), b_terms, c.BF16_TERMS, c.PRECISION
        )
        b_e -= _of_tokens(b_h, c.C)
    b_e = tl.exp2(b_e)
    b_dr = _reads(b_p, b_w, b_dq, b_h, rows, b_k.dtype, c.PRECISION)  # [C, BK]
    b_w = b_w.to(b_k.dtype)
    b_diagonal = tl.load(p_p + o_c * (c.C + 1)).to(tl.float32)[:, None]
    if refs.dq is not None:
        b_dq = b_dr * b_e * scale + b_diagonal * b_u[None, :] * b_k
        tl.store(refs.dq + i_o + at_o, b_dq.to(refs.dq.dtype.element_ty), mask=m_o)
    b_r = (b_q * b_e).to(b_k.dtype)  # [C, BK]
    b_leave = b_r * b_dr
    b_dw = _writes(b_p, b_r, b_h, rows, c.PRECISION)  # [C, BK]
    b_z = tl.load(refs.z + at * c.K + o_k, mask=o_k < c.K, other=0.0)
    b_dg = tl.zeros((c.C, c.BK), tl.float32) + b_z[None, :]
    if c.BEFORE:
        span = subchunk_decay.prefix_span_bwd(rows, c.C, True)
        b_dg = subchunk_decay.spans_to_gates_bwd(span, b_leave, b_dg, ALL_TERMS, c.PRECISION)
        b_leave = tl.zeros((c.C, c.BK), tl.float32)
    b_leave -= b_w * b_dw
    b_dg = subchunk_decay.spans_to_gates_bwd(
        subchunk_decay.prefix_span_bwd(rows, c.C, False), b_leave, b_dg, TERMS, c.PRECISION
    )
    b_dk = load_block(refs.dke + i_o, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    b_enter = b_dk * _of_tokens(tl.exp2(_until_end(b_h)), c.C)
    b_dw += b_enter
    b_dg = subchunk_decay.spans_to_gates_bwd(
        subchunk_decay.suffix_span_bwd(rows), b_w * b_enter, b_dg, ONE, c.PRECISION
    )
    tl.store(refs.dg + i_o + at_o, (b_dg * scale).to(refs.dg.dtype.element_ty), mask=m_o)
    if c.BEFORE:
        b_dk = b_dw * tl.exp2(-b_G) * scale
    else:
        b_dk = b_dw / b_e * scale  # G - h kept till here would go to the stack
    # read again: kept till here they would go to the stack
    b_q = load_block(refs.q + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)
    b_diagonal = tl.load(p_p + o_c * (c.C + 1)).to(tl.float32)[:, None]
    b_dk += b_diagonal * b_u[None, :] * b_q
    tl.store(refs.dk + i_o + at_o, b_dk.to(refs.dk.dtype.element_ty), mask=m_o)
    if refs.u is not None:
        b_k = load_block(refs.k + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)
        tl.store(
            refs.du + at * c.K + o_k, tl.sum(b_diagonal * scale * b_q * b_k, 0), mask=o_k < c.K
        )
