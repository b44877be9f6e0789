"""Decay per channel: the gradients of dqkg.py in chunks that are not one safe block.

By levels (subchunk_decay.py), and dg is what every exponent adds to its gates: at a level e_t what
x_t * dx_t is, at the edges of the chunk q_i * dq_i and k_j * dk_j of the states, and for all gates
of the chunk z. No sum here is the difference of larger ones.

Without dk_ptr dq is an output (backend.py), whose bits later tokens must not change: how each read
and channel is computed is chosen by the gates up to it (subchunk_decay.py).
"""

from collections import namedtuple

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.common.gate_ones import BASE, EDGES, KINDS, load_ones
from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block
from slipstream.kernels.linear.triton.vector_decay import subchunk_decay

# what dqkg.py's kernel passes on: pointers and constants
Refs = namedtuple("Refs", "q k g u p dqs dke z dq dk dg du decay ones cu")
Constants = namedtuple("Constants", "K BK C LEVELS BOUND SHIFT BEFORE PACKED BF16_TERMS PRECISION")


@triton.jit
def _load_tile(refs, i_tile, sizes, c):
    """g and k [C, BK]; which chunk and head they are of, their tokens, channels and which tokens
    there are; where they begin in a tensor of HK heads, and in one of HV; the numbers of tokens as
    block_span takes them, as rows and as columns."""
    T, N, HV, HK = sizes
    NK: tl.constexpr = (c.K + c.BK - 1) // c.BK
    i_h = (i_tile // NK) % HV
    i_chunk = i_tile // NK // HV
    at = tl.cast(i_tile // NK, tl.int64)
    begin, length, i_c = locate_chunk(refs.cu, i_chunk, T, N, c.C, c.PACKED)
    o_c = tl.arange(0, c.C)
    o_k = (i_tile % NK) * c.BK + tl.arange(0, c.BK)
    m_c = o_c < length - i_c * c.C
    row = begin + i_c * c.C
    rows = subchunk_decay.tokens(c.C, tl.bfloat16 if c.BF16_TERMS > 0 else tl.float32)
    i, j = rows[:, None], o_c[None, :]
    i_k = (row * HK + i_h // (HV // HK)) * c.K
    i_o = (row * HV + i_h) * c.K
    b_g = load_block(refs.g + i_o, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)
    b_k = load_block(refs.k + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)
    return b_g, b_k, at, o_c, o_k, m_c, i_k, i_o, rows, i, j


@triton.jit
def outputs_by_levels(refs, scale, i_tile, sizes, c):
    """dq of BK channels of one chunk and value head, without u."""
    _, _, HV, _ = sizes
    b_g, b_k, at, o_c, o_k, m_c, _, i_o, rows, i, j = _load_tile(refs, i_tile, sizes, c)
    b_dqs = load_block(refs.dqs + i_o, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    # read again: it would stay in registers
    p_p = refs.p + at * (c.C * c.C) + o_c[:, None] * c.C + o_c[None, :]
    p_dq = refs.dq + i_o + o_c[:, None] * (HV * c.K) + o_k[None, :]
    m_o = m_c[:, None] & (o_k < c.K)[None, :]
    b_g, b_terms = subchunk_decay.split_gates(b_g, c.BF16_TERMS)
    b_until = subchunk_decay.sums_of(
        load_ones(refs.ones, EDGES.START, c.C, KINDS.WRITES), b_terms, c.BF16_TERMS, c.PRECISION
    )
    whole = subchunk_decay.is_read_safe(b_until, c.BOUND)
    b_w = b_k * subchunk_decay.chunk_writes(b_until, c.BOUND)  # [C, BK]
    b_dq = subchunk_decay.anchored_reads(
        tl.load(p_p), b_w, b_dqs, None, rows, b_k.dtype, False, 0.0, c.PRECISION
    )
    b_dq = b_dq * tl.exp2(b_until) * scale
    tl.store(p_dq, b_dq.to(refs.dq.dtype.element_ty), mask=m_o & whole)
    # dqs of the others is as it was, where dq is in its place
    b_dqs = load_block(refs.dqs + i_o, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    b_dq = b_dqs * tl.exp2(b_until)
    b_read, b_write, first, safe = subchunk_decay.block_factors(
        refs.ones, b_terms, c.BOUND, c.SHIFT, False, c.BF16_TERMS, c.PRECISION
    )
    b_square = tl.where(subchunk_decay.same_block(rows, BASE) & (i > j), tl.load(p_p), 0.0)
    b_dq += subchunk_decay.dot_with(b_square, b_k * b_write, b_k.dtype, c.PRECISION) * b_read
    for level in range(first, c.LEVELS):
        b_ones = load_ones(refs.ones, EDGES.MIDDLE + level, c.C, KINDS.WRITES)
        b_e = tl.exp2(subchunk_decay.sums_of(b_ones, b_terms, c.BF16_TERMS, c.PRECISION))
        b_square = tl.where(subchunk_decay.siblings(rows, level), tl.load(p_p), 0.0)
        b_dx = subchunk_decay.dot_with(b_square, b_k * b_e, b_k.dtype, c.PRECISION) * b_e  # [C, BK]
        unsafe_reads = subchunk_decay.is_in_later_half(rows, level) & ((safe & (level < BASE)) == 0)
        b_dq += tl.where(unsafe_reads, b_dx, 0.0)
    b_diag = tl.load(refs.p + at * (c.C * c.C) + o_c * (c.C + 1)).to(tl.float32)
    b_dq = (b_dq + b_diag[:, None] * b_k) * scale
    tl.store(p_dq, b_dq.to(refs.dq.dtype.element_ty), mask=m_o & (whole == 0))


@triton.jit
def grads_by_levels(refs, scale, i_tile, sizes, c):
    """BK channels of one chunk and value head."""
    _, _, HV, HK = sizes
    ONE: tl.constexpr = 1 if c.BF16_TERMS == 2 else c.BF16_TERMS  # 16 bits
    TWO: tl.constexpr = 2 if c.BF16_TERMS == 1 else c.BF16_TERMS
    KIND: tl.constexpr = KINDS.READS if c.BEFORE else KINDS.WRITES
    OF_PAIRS: tl.constexpr = KINDS.BOTH if c.BEFORE else KINDS.WRITES
    b_g, b_k, at, o_c, o_k, m_c, i_k, i_o, rows, i, j = _load_tile(refs, i_tile, sizes, c)
    i_h = i_tile // ((c.K + c.BK - 1) // c.BK) % HV
    b_dq = load_block(refs.dqs + i_o, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    b_p = tl.load(refs.p + at * (c.C * c.C) + o_c[:, None] * c.C + o_c[None, :])  # [C, C]
    b_diag = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_p.to(tl.float32), 0.0), 1) * scale
    b_g, b_terms = subchunk_decay.split_gates(b_g, c.BF16_TERMS)
    b_until = subchunk_decay.sums_of(
        load_ones(refs.ones, EDGES.START, c.C, KIND), b_terms, c.BF16_TERMS, c.PRECISION
    )
    b_dq = b_dq * tl.exp2(b_until)
    b_dk = tl.zeros((c.C, c.BK), tl.float32)
    b_leave = b_dq
    b_q = load_block(refs.q + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    b_dk = load_block(refs.dke + i_o, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
    b_ones = load_ones(refs.ones, EDGES.START, c.C, KINDS.READS, True)
    b_dk = b_dk * tl.exp2(subchunk_decay.sums_of(b_ones, b_terms, c.BF16_TERMS, c.PRECISION))
    b_z = tl.load(refs.z + at * c.K + o_k, mask=o_k < c.K, other=0.0)
    b_dg = tl.zeros((c.C, c.BK), tl.float32) + b_z[None, :]
    b_ones = load_ones(refs.ones, EDGES.START, c.C, KINDS.READS)
    b_dg = subchunk_decay.sums_to_gates_bwd(b_ones, b_k * b_dk, b_dg, ONE, c.PRECISION)
    b_leave = b_q * b_dq
    base = subchunk_decay.safe_base(b_g, c.LEVELS, c.BOUND)
    if base > 0:
        b_w_sum = b_until
        if c.BEFORE or base < c.LEVELS:
            b_w_sum = subchunk_decay.sums(
                subchunk_decay.block_span(rows, base, False), b_terms, c.BF16_TERMS, c.PRECISION
            )
        b_r_sum = b_w_sum
        if c.BEFORE:
            b_r_sum = subchunk_decay.sums(
                subchunk_decay.block_span(rows, base, True), b_terms, c.BF16_TERMS, c.PRECISION
            )
        b_w = b_k * tl.exp2(-b_w_sum)  # [C, BK]
        b_square = tl.where(subchunk_decay.same_block(rows, base) & (i > j), b_p, 0.0)
        b_dr = subchunk_decay.dot_with(b_square, b_w, b_k.dtype, c.PRECISION)  # [C, BK]
        b_w = b_w.to(b_k.dtype)
        b_dq += b_dr * tl.exp2(b_r_sum)
        b_r = (b_q * tl.exp2(b_r_sum)).to(b_k.dtype)  # [C, BK]
        b_square = tl.where(subchunk_decay.same_block(rows, base) & (i < j), b_p, 0.0)
        b_dw = tl.dot(b_square, b_r, input_precision=c.PRECISION)  # [C, BK]
        b_dk += b_dw * tl.exp2(-b_w_sum)
        # the one difference: of the same products, so that they cancel to the last bits
        b_gain = b_r * b_dr
        b_enter = b_w * b_dw
        span = subchunk_decay.block_span_bwd(rows, base, False)
        if c.BEFORE:
            before = subchunk_decay.block_span_bwd(rows, base, True)
            b_dg = subchunk_decay.spans_to_gates_bwd(before, b_gain, b_dg, TWO, c.PRECISION)
            b_dg = subchunk_decay.spans_to_gates_bwd(span, -b_enter, b_dg, TWO, c.PRECISION)
        else:
            b_dg = subchunk_decay.spans_to_gates_bwd(span, b_gain - b_enter, b_dg, TWO, c.PRECISION)
    b_ones = load_ones(refs.ones, EDGES.START, c.C, KIND, True)
    b_dg = subchunk_decay.sums_to_gates_bwd(b_ones, b_leave, b_dg, ONE, c.PRECISION)
    for level in range(base, c.LEVELS):
        b_ones = load_ones(refs.ones, EDGES.MIDDLE + level, c.C, OF_PAIRS)
        b_e = tl.exp2(subchunk_decay.sums_of(b_ones, b_terms, c.BF16_TERMS, c.PRECISION))
        b_row = tl.where(subchunk_decay.is_in_later_half(rows, level), b_q, b_k)
        b_square = tl.where(subchunk_decay.siblings(rows, level), b_p, 0.0)
        b_dx = (
            subchunk_decay.dot_with(b_square, b_row * b_e, b_k.dtype, c.PRECISION) * b_e
        )  # [C, BK]
        b_later = subchunk_decay.is_in_later_half(rows, level).to(tl.float32)
        b_dq += b_dx * b_later
        b_dk += b_dx * (1.0 - b_later)
        b_ones = load_ones(refs.ones, EDGES.MIDDLE + level, c.C, OF_PAIRS, True)
        b_dg = subchunk_decay.sums_to_gates_bwd(b_ones, b_row * b_dx, b_dg, ONE, c.PRECISION)

    at_o = i_o + o_c[:, None] * (HV * c.K) + o_k[None, :]
    m_o = m_c[:, None] & (o_k < c.K)[None, :]
    b_write = _diagonal_factor(b_k.to(tl.float32), refs.u, i_h, o_k, c.K)
    if refs.dq is not None:
        b_dq = b_dq * scale + b_diag[:, None] * b_write
        tl.store(refs.dq + at_o, b_dq.to(refs.dq.dtype.element_ty), mask=m_o)
    b_read = b_q * b_diag[:, None]
    if refs.u is not None:
        tl.store(refs.du + at * c.K + o_k, tl.sum(b_read * b_k, 0), mask=o_k < c.K)
    b_dk = b_dk * scale + _diagonal_factor(b_read, refs.u, i_h, o_k, c.K)
    tl.store(refs.dk + at_o, b_dk.to(refs.dk.dtype.element_ty), mask=m_o)
    tl.store(refs.dg + at_o, (b_dg * scale).to(refs.dg.dtype.element_ty), mask=m_o)


@triton.jit
def _diagonal_factor(b_x, u_ptr, i_h, o_k, K: tl.constexpr):
    """b_x u, [C, BK]."""
    if u_ptr is not None:
        b_x *= tl.load(u_ptr + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    return b_x
