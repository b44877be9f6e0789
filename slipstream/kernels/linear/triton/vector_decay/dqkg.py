"""Decay per channel: the gradients on its side of the state, all chunks at once.

With dqs, dke and z of the scans (chunk.py), P = do v^T, and u = 1 if there is none,

    dq_i = scale * (dqs_i exp(gates until i) + sum over j < i of P[i, j] exp(G_i - G_j) k_j
                    + P[i, i] u k_i)
    dk_j = scale * (dke_j exp(gates after j) + sum over i > j of P[i, j] exp(G_i - G_j) q_i
                    + P[j, j] u q_j)
    du   = scale * sum over i of P[i, i] q_i k_i           of each chunk

In a chunk that is one safe block (subchunk_decay.py)

    r_i = q_i exp(G_i)     dr = (lower triangle of P) w   dq_i = scale * (dqs_i + dr_i) exp(G_i)
    w_j = k_j exp(-G_j)    dw = (upper) r                 dk_j = scale * (dke_j D + dw_j) exp(-G_j)

with G from the chunk's start and D = exp(G_C), or in chunks of which each half is one relative to n
of subchunk_decay.py: there products of a half come before those of the other, and what one half
has is rescaled between them. dqkg_quarters.py has the chunks of which only quarters are safe
blocks, dqkg_levels.py the rest. dg is what every exponent adds to its gates:

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
from slipstream.kernels.linear.triton.vector_decay import dqkg_levels, dqkg_quarters, subchunk_decay


@triton.jit
def anchored_writes(
    b_p, b_r, rows, BEFORE: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr
):
    """(upper triangle of P) r [C, BK]."""
    C: tl.constexpr = rows.shape[0]
    j, i = rows[:, None], tl.arange(0, C)[None, :]
    b_p = tl.where(j < i if BEFORE else j <= i, b_p, 0.0)
    if APART > 0:
        b_dw = tl.dot(tl.where(i < C // 2, 0.0, b_p), b_r, input_precision=PRECISION)
        b_dw *= tl.where(j < C // 2, 2.0 ** (-2 * APART), 1.0)
        b_dw = tl.dot(tl.where(i < C // 2, b_p, 0.0), b_r, b_dw, input_precision=PRECISION)
    else:
        b_dw = tl.dot(b_p, b_r, input_precision=PRECISION)
    return b_dw


@triton.jit(do_not_specialize=["scale", "total", "T", "N", "HV", "HK"])
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
    pieces_ptr,  # [chunks, HV, tiles of K]: PIECES that takes a chunk; None if 1 and 0 take all
    ones_ptr,  # gate_ones.py's, for PIECES 0
    cu_ptr,  # [N + 1]
    scale,
    total,  # tiles of K times chunks times value heads; None for PIECES 1
    T, N, HV, HK,
    K: tl.constexpr, BK: tl.constexpr, ALL: tl.constexpr, MAX_CHUNKS: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, BOUND: tl.constexpr, SHIFT: tl.constexpr, APART: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr, BF16_TERMS: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """BK channels of one chunk and value head at a time, of the chunks that are safe in PIECES.

    PIECES: 1 for chunks that are one safe block, 2 for others of which each half is one, 4 for
    others of which each quarter is one, 0 for the rest. 2 writes `pieces` of all but the first.

    grid (ceil(K / BK) * HV * chunks,) for PIECES 1, for others at least total / MAX_CHUNKS.
    """
    c: tl.constexpr = dqkg_levels.Constants(
        K, BK, C, LEVELS, BOUND, SHIFT, BEFORE, PACKED, BF16_TERMS, PRECISION
    )
    refs = dqkg_levels.Refs(
        q_ptr, k_ptr, g_ptr, u_ptr, p_ptr, dqs_ptr, dke_ptr, z_ptr, dq_ptr, dk_ptr, dg_ptr, du_ptr,
        decay_ptr, ones_ptr, cu_ptr,
    )  # fmt: skip
    if not GROUPED:
        HK = HV
    sizes = subchunk_decay.Sizes(T, N, HV, HK)
    NK: tl.constexpr = (K + BK - 1) // BK
    if PIECES == 1:
        pid = tl.program_id(0)
        if subchunk_decay.is_block_safe(decay_ptr + (pid // NK).to(tl.int64) * K, K, ALL, BOUND):
            _tile(refs, scale, pid, sizes, c, 0.0)
    else:
        # most programs end here
        if PIECES == 4:
            # one load for all chunks of this program
            o_at = tl.program_id(0) + tl.arange(0, MAX_CHUNKS) * tl.num_programs(0)
            b_pieces = tl.load(pieces_ptr + o_at, mask=o_at < total, other=0)
            if tl.max((b_pieces == 4).to(tl.int32), 0) == 0:
                return
        else:
            if subchunk_decay.is_chunk_safe(decay_ptr, total, NK, K, ALL, BOUND, MAX_CHUNKS):
                return
        for i_tile in tl.range(tl.program_id(0), total, tl.num_programs(0), disable_licm=True):
            at = tl.cast(i_tile // NK, tl.int64)
            if PIECES == 2:
                if not subchunk_decay.is_block_safe(decay_ptr + at * K, K, ALL, BOUND):
                    pieces = _safe_pieces(refs, i_tile, sizes, c)
                    tl.store(pieces_ptr + i_tile, pieces)
                    if pieces == 2:
                        _tile(refs, scale, i_tile, sizes, c, APART)
            elif PIECES == 4:
                # of a chunk that is one safe block nothing is known
                by_quarters = tl.load(pieces_ptr + i_tile) == 4
                if by_quarters and not subchunk_decay.is_block_safe(
                    decay_ptr + at * K, K, ALL, BOUND
                ):
                    # 32 channels at a time have no stack, but products that ptxas 12.8 gets wrong
                    dqkg_quarters.grads_by_quarters(refs, scale, i_tile, sizes, c)
            else:
                strong = not subchunk_decay.is_block_safe(decay_ptr + at * K, K, ALL, BOUND)
                if pieces_ptr is not None:
                    strong = strong and tl.load(pieces_ptr + i_tile) == 0
                if strong:
                    if dk_ptr is None:
                        tl.static_assert(u_ptr is None)
                        dqkg_levels.outputs_by_levels(refs, scale, i_tile, sizes, c)
                    else:
                        dqkg_levels.grads_by_levels(refs, scale, i_tile, sizes, c)


@triton.jit
def _safe_pieces(refs, i_tile, sizes, c):
    """2 if both halves of one chunk and value head are safe in all of BK channels, 4 if quarters
    are, else 0."""
    T, N, HV, _ = sizes
    NK: tl.constexpr = (c.K + c.BK - 1) // c.BK
    i_h = (i_tile // NK) % HV
    begin, length, i_c = locate_chunk(refs.cu, i_tile // NK // HV, T, N, c.C, c.PACKED)
    o_c = tl.arange(0, c.C)
    o_k = (i_tile % NK) * c.BK + tl.arange(0, c.BK)
    p_g = refs.g + ((begin + i_c * c.C) * HV + i_h) * c.K
    b_g = load_block(
        p_g, HV * c.K, o_c, o_c < length - i_c * c.C, o_k, c.K, c.K % c.BK != 0
    )  # [C, BK]
    b_g = b_g.to(tl.float32)
    b_early, b_late = subchunk_decay.half_sums(b_g, c.C)
    pieces = 2
    # a branch: most chunks that are not one safe block end here
    if not subchunk_decay.are_halves_safe(b_early, b_late):
        pieces = tl.where(
            subchunk_decay.are_quarters_safe(subchunk_decay.quarter_halves(b_g)), 4, 0
        )
    return pieces


@triton.jit
def _tile(refs, scale, pid, sizes, c, APART: tl.constexpr):
    """BK channels of one chunk and value head; APART: 0 if the chunk is one safe block."""
    T, N, HV, _ = sizes
    NK: tl.constexpr = (c.K + c.BK - 1) // c.BK
    chunk = locate_chunk(refs.cu, pid // NK // HV, T, N, c.C, c.PACKED)
    if c.PACKED and chunk[2] * c.C >= chunk[1]:
        if refs.u is not None:
            o_k = (pid % NK) * c.BK + tl.arange(0, c.BK)
            # the gradient of u is the sum of all
            tl.store(refs.du + (pid // NK).to(tl.int64) * c.K + o_k, 0.0, mask=o_k < c.K)
    else:
        _chunk_tile(refs, scale, pid, chunk, sizes, c, APART)


@triton.jit
def _chunk_tile(refs, scale, pid, chunk, sizes, c, APART: tl.constexpr):
    _, _, HV, HK = sizes
    NK: tl.constexpr = (c.K + c.BK - 1) // c.BK
    HAS_DK: tl.constexpr = refs.dk is not None
    ONE: tl.constexpr = 1 if c.BF16_TERMS == 2 else c.BF16_TERMS  # 16 bits
    TWO: tl.constexpr = 2 if c.BF16_TERMS == 1 else c.BF16_TERMS
    i_h = (pid // NK) % HV
    i_chunk = pid // NK // HV
    at = i_chunk.to(tl.int64) * HV + i_h
    begin, length, i_c = chunk
    o_c = tl.arange(0, c.C)
    o_k = (pid % NK) * c.BK + tl.arange(0, c.BK)
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
    b_p = tl.load(refs.p + at * (c.C * c.C) + o_c[:, None] * c.C + o_c[None, :])  # [C, C]
    if HAS_DK:
        b_q = load_block(refs.q + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
        b_z = tl.load(refs.z + at * c.K + o_k, mask=o_k < c.K, other=0.0)
    if refs.u is not None:
        b_u = tl.load(refs.u + i_h * c.K + o_k, mask=o_k < c.K, other=0.0).to(tl.float32) * scale
        b_diagonal = tl.load(refs.p + at * (c.C * c.C) + o_c * (c.C + 1)).to(tl.float32)
        b_diag = b_diagonal[:, None] * b_u[None, :]
    b_g, b_terms = subchunk_decay.split_gates(b_g, c.BF16_TERMS)
    b_G = subchunk_decay.sums(
        subchunk_decay.prefix_span(rows, False), b_terms, c.BF16_TERMS, c.PRECISION
    )
    b_early = None
    if APART > 0:
        b_early, b_late = subchunk_decay.half_sums(b_g, c.C)
        b_G -= subchunk_decay.offsets(b_early, rows, APART)
    b_w = b_k * tl.exp2(-b_G)  # [C, BK]
    b_e = b_G
    if c.BEFORE:
        b_e = subchunk_decay.sums(
            subchunk_decay.prefix_span(rows, True), b_terms, c.BF16_TERMS, c.PRECISION
        )
        if APART > 0:
            b_e -= subchunk_decay.offsets(b_early, rows, APART)
    b_e = tl.exp2(b_e)
    b_dr = subchunk_decay.anchored_reads(
        b_p, b_w, b_dq, b_early, rows, b_k.dtype, c.BEFORE, APART, c.PRECISION
    )  # [C, BK]
    b_w = b_w.to(b_k.dtype)
    if refs.dq is not None:
        b_dq = b_dr * b_e * scale
        if refs.u is not None:
            b_dq += b_diag * b_k
        tl.store(refs.dq + i_o + at_o, b_dq.to(refs.dq.dtype.element_ty), mask=m_o)
    if HAS_DK:
        b_r = (b_q * b_e).to(b_k.dtype)  # [C, BK]
        b_leave = b_r * b_dr
        b_dw = anchored_writes(b_p, b_r, rows, c.BEFORE, APART, c.PRECISION)  # [C, BK]
        b_dg = tl.zeros((c.C, c.BK), tl.float32) + b_z[None, :]
        if c.BEFORE:
            b_dg = subchunk_decay.spans_to_gates_bwd(
                subchunk_decay.prefix_span_bwd(rows, c.C, True), b_leave, b_dg, TWO, c.PRECISION
            )
            b_leave = tl.zeros((c.C, c.BK), tl.float32)
        b_leave -= b_w * b_dw
        b_dg = subchunk_decay.spans_to_gates_bwd(
            subchunk_decay.prefix_span_bwd(rows, c.C, False), b_leave, b_dg, TWO, c.PRECISION
        )
        b_dk = load_block(refs.dke + i_o, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
        if APART > 0:
            b_enter = b_dk * tl.exp2(
                b_late[None, :] - subchunk_decay.offsets(0.0 * b_early, rows, APART)
            )
        else:
            b_end = tl.load(refs.decay + at * c.K + o_k, mask=o_k < c.K, other=0.0)
            b_enter = b_dk * b_end[None, :]
        b_dw += b_enter
        b_dg = subchunk_decay.spans_to_gates_bwd(
            subchunk_decay.suffix_span_bwd(rows), b_w * b_enter, b_dg, ONE, c.PRECISION
        )
        tl.store(refs.dg + i_o + at_o, (b_dg * scale).to(refs.dg.dtype.element_ty), mask=m_o)
        b_dk = b_dw * tl.exp2(-b_G) * scale
        if refs.u is not None:
            # read again: kept till here they would go to the stack
            b_q = load_block(refs.q + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)
            b_diagonal = tl.load(refs.p + at * (c.C * c.C) + o_c * (c.C + 1)).to(tl.float32)
            b_dk += b_diagonal[:, None] * b_u[None, :] * b_q
        tl.store(refs.dk + i_o + at_o, b_dk.to(refs.dk.dtype.element_ty), mask=m_o)
        if refs.u is not None:
            b_k = load_block(refs.k + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)
            b_pair = (b_diagonal * scale)[:, None] * b_q * b_k
            tl.store(refs.du + at * c.K + o_k, tl.sum(b_pair, 0), mask=o_k < c.K)
