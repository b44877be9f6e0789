"""Decay per channel: what the scans (chunk.py) need of every chunk, all chunks at once.

    qs_i = q_i exp(gates until i)      ke_j = k_j exp(gates after j)    D = exp(gates of the chunk)
    A[i, j] = q_i . exp(G_i - G_j) k_j for j < i (subchunk_decay.py)        A[i, i] = q_i . u k_i
    P[i, j] = P[j, i] = do_i . v_j for j <= i, for the gradients (dqkg.py)

where u is 1 if there is none; ke may be kept in two parts, the second what the first was rounded
by, and P in float32. Rows of A whose decays allow it are a product of two factors, relative to the
chunk's start or, in bfloat16, to its middle (dplr/intra_anchored.py), where halves may decay by
2^-HALF each. A chunk with a channel beyond that is strong: its other rows are made in a kernel of
their own, whose registers the first then does not need.
"""

from collections import namedtuple

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.common.gate_ones import BASE, EDGES, KINDS, load_ones
from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.dplr import intra_anchored
from slipstream.kernels.linear.triton.dplr.intra_anchored import FAR
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block
from slipstream.kernels.linear.triton.vector_decay import subchunk_decay
from slipstream.kernels.linear.triton.vector_decay.subchunk_decay import HALF
from slipstream.kernels.primitives.device import LOG2E, WHOLE

# what a kernel passes on: pointers and constants
Refs = namedtuple("Refs", "q k g u a ones cu")
Constants = namedtuple(
    "Constants", "K BK C LEVELS BOUND SHIFT APART BEFORE PACKED BF16_TERMS PRECISION"
)


@triton.jit
def _from_middle(b_cut, b_early, rows, APART: tl.constexpr):
    """G - n [C, BK], and the middle [BK]: dplr/intra_anchored.py's, of G in base 2 and FAR."""
    later = (rows >= rows.shape[0] // 2)[:, None]
    b_middle = intra_anchored.middle_of(b_early, HALF / 2, APART)
    b_far = b_middle[None, :] + tl.where(later, FAR - APART, FAR + APART)
    return b_cut - b_far, b_middle


@triton.jit
def _read_decay(b):
    """2^b, but at least 2^-126: exp2_by_parts of dplr/intra_anchored.py, but exp2 has what is above
    b in the whole number after it, a number below 0, as G is."""
    b = tl.maximum(b, -126.0, propagate_nan=tl.PropagateNan.ALL)
    b_whole = (b + (0.5 - 2.0**-16)) + WHOLE
    b_mantissa = tl.exp2(b - (b_whole - WHOLE))
    bits = b_mantissa.to(tl.int32, bitcast=True) + (b_whole.to(tl.int32, bitcast=True) << 23)
    # the bits of a NaN would become those of a number
    return bits.to(tl.float32, bitcast=True) + 0.0 * b


@triton.jit
def _factors(b_q, b_k, b_cut, b_early, rows, o_c, APART: tl.constexpr):
    """r and w of A, and qs, [C, BK]; b_cut: G + FAR."""
    b_e, b_middle = _from_middle(b_cut, b_early, rows, APART)
    b_w = (b_k * intra_anchored.anchored_writes(b_e, HALF / 2, APART)).to(b_k.dtype)
    b_wide = b_q * _read_decay(b_e)
    b_r = b_wide.to(b_k.dtype)
    b_start = (b_wide * intra_anchored.exp2_of_start(b_middle, o_c, APART)).to(b_k.dtype)
    return b_r, b_w, b_start


@triton.jit
def _weak_factors(b_q, b_k, b_cut):
    """r, which is qs, and w of a weak chunk, with the digits of _factors: n is 0."""
    b_e = b_cut - FAR
    return (b_q * tl.exp2(b_e)).to(b_k.dtype), (b_k * tl.exp2(-b_e)).to(b_k.dtype)


@triton.jit
def _store_weak(decay_ptr, strong_ptr, at, K: tl.constexpr, BK: tl.constexpr):
    """What no kernel of strong chunks takes: no decay, of a number that no chunk has."""
    for tile in range(tl.cdiv(K, BK)):
        o_k = tile * BK + tl.arange(0, BK)
        tl.store(decay_ptr + at.to(tl.int64) * K + o_k, 1.0, mask=o_k < K)
    if strong_ptr is not None:
        tl.store(strong_ptr + at, 0)


@triton.jit(do_not_specialize=["T", "N", "HV", "HK", "HX"])
def vector_decay_intra_fwd_kernel(
    q_ptr,  # [tokens, HK, K]; None where qs and A are not wanted
    k_ptr,  # [tokens, HK, K]; None where P alone is wanted
    g_ptr,  # [tokens, HV, K]
    u_ptr,  # [HV, K]
    qs_ptr,  # [tokens, HV, K]
    ke_ptr,  # [tokens, HV, K]
    rest_ptr,  # [tokens, HV, K]: what ke was rounded by; None where that is not wanted
    a_ptr,  # [chunks, HV, C, C]; other rows are left to vector_decay_scores_kernel
    decay_ptr,  # [chunks, HV, K]
    strong_ptr,  # [chunks, HV], if APART: whether there are any
    v_ptr,  # [tokens, HX, V], for P
    do_ptr,
    p_ptr,  # [chunks, HV, C, C]; None where that is not wanted
    cu_ptr,  # [N + 1]
    T, N, HV, HK, HX,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    BOUND: tl.constexpr, APART: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr,
    GROUPED: tl.constexpr, BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (HV * chunks,): one chunk and value head a program."""
    if not GROUPED:  # what is there of q, k, v and do has HV heads
        HK = HV
        HX = HV
    pid = tl.program_id(0)
    i_h = pid % HV
    i_chunk = pid // HV
    begin, length, i_c = locate_chunk(cu_ptr, i_chunk, T, N, C, PACKED)
    if PACKED and i_c * C >= length:
        if k_ptr is not None:
            _store_weak(decay_ptr, strong_ptr, pid, K, BK)
        return
    o_c = tl.arange(0, C)
    m_c = o_c < length - i_c * C
    row = begin + i_c * C
    if k_ptr is not None:
        i_k = (row * HK + i_h // (HV // HK)) * K
        i_g = (row * HV + i_h) * K
        at = i_chunk.to(tl.int64) * HV + i_h
        rows = subchunk_decay.tokens(C, tl.bfloat16 if BF16_TERMS > 0 else tl.float32)
        b_a = tl.zeros((C, C), tl.float32)
        b_diag = tl.zeros((C,), tl.float32)
        strongest = tl.full((), 0.0, tl.float32)  # decay of a half of the chunk
        for tile in range(tl.cdiv(K, BK)):
            o_k = tile * BK + tl.arange(0, BK)
            o_o = i_g + o_c[:, None] * (HV * K) + o_k[None, :]
            m_o = m_c[:, None] & (o_k < K)[None, :]
            # all loads before the first store, past which none is moved
            b_g = load_block(g_ptr + i_g, HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
            b_k = load_block(k_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
            if q_ptr is not None:
                b_q = load_block(q_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
            b_g, b_terms = subchunk_decay.split_gates(b_g, BF16_TERMS)
            b_end = b_k * subchunk_decay.decay(
                subchunk_decay.suffix_span(rows, C), b_terms, BF16_TERMS, PRECISION
            )
            b_total = tl.sum(b_g, 0) * LOG2E  # [BK]
            b_first, b_rest = subchunk_decay.split_bf16(b_end, b_k.dtype)
            tl.store(ke_ptr + o_o, b_first, mask=m_o)
            if rest_ptr is not None:
                tl.store(rest_ptr + o_o, b_rest, mask=m_o)
            tl.store(decay_ptr + at * K + o_k, tl.exp2(b_total), mask=o_k < K)
            if q_ptr is not None:
                if BEFORE:
                    b_diag += _diagonal(b_q, b_k, u_ptr, i_h, o_k, K)
                b_until = subchunk_decay.sums(
                    subchunk_decay.prefix_span(rows, False), b_terms, BF16_TERMS, PRECISION
                )
                if APART > 0:
                    tl.static_assert(not BEFORE)
                    weak = False
                    if K <= BK:
                        # a loop with such a branch would not load ahead. Beyond it small reads
                        # would lose digits that they have by halves (intra_anchored.py).
                        weak = tl.min((b_total >= 1 - HALF / 2).to(tl.int32), 0) == 1
                    # before the branch: each side could round this by an instruction of its own
                    b_cut = b_until + FAR
                    if weak:
                        b_r, b_w = _weak_factors(b_q, b_k, b_cut)
                        tl.store(qs_ptr + o_o, b_r, mask=m_o)
                        b_a = tl.dot(b_r, tl.trans(b_w), b_a, input_precision=PRECISION)  # [C, C]
                    else:
                        b_early, b_late = subchunk_decay.half_sums(b_g, C)
                        b_half = intra_anchored.strongest_half(b_early, b_late, HALF / 2, APART)
                        strongest = tl.maximum(strongest, tl.max(b_half, 0))
                        b_r, b_w, b_start = _factors(b_q, b_k, b_cut, b_early, rows, o_c, APART)
                        tl.store(qs_ptr + o_o, b_start, mask=m_o)
                        b_a = tl.dot(b_r, tl.trans(b_w), b_a, input_precision=PRECISION)  # [C, C]
                        if K <= BK:
                            b_a = intra_anchored.together(b_a, o_c, APART)
                else:
                    b_w = (b_k * subchunk_decay.chunk_writes(b_until, BOUND)).to(
                        b_k.dtype
                    )  # [C, BK]
                    if BEFORE:
                        b_until = subchunk_decay.sums(
                            subchunk_decay.prefix_span(rows, True), b_terms, BF16_TERMS, PRECISION
                        )
                    b_r = (b_q * tl.exp2(b_until)).to(b_k.dtype)
                    tl.store(qs_ptr + o_o, b_r, mask=m_o)
                    b_a = tl.dot(b_r, tl.trans(b_w), b_a, input_precision=PRECISION)  # [C, C]
        if q_ptr is not None:
            if APART > 0:
                tl.store(strong_ptr + at, (strongest > HALF).to(tl.int32))
                if K > BK:
                    b_a = intra_anchored.together(b_a, o_c, APART)
            _store_scores(a_ptr + at * (C * C), b_a, b_diag, rows, None, C, BEFORE)
    if p_ptr is not None:
        i_x = (row * HX + i_h // (HV // HX)) * V
        b_p = _pairs(v_ptr + i_x, do_ptr + i_x, HX * V, o_c, m_c, V, BV, C, PRECISION)
        i_p = (i_chunk.to(tl.int64) * HV + i_h) * (C * C)
        tl.store(p_ptr + i_p + o_c[:, None] * C + o_c[None, :], b_p.to(p_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["total", "T", "N", "HV", "HK"])
def vector_decay_scores_kernel(
    q_ptr,  # [tokens, HK, K]
    k_ptr,  # [tokens, HK, K]
    g_ptr,  # [tokens, HV, K]
    u_ptr,  # [HV, K]
    decay_ptr,  # [chunks, HV, K]
    strong_ptr,  # [chunks, HV], if APART
    a_ptr,  # [chunks, HV, C, C]
    ones_ptr,  # gate_ones.py's
    cu_ptr,  # [N + 1]
    total, T, N, HV, HK,
    K: tl.constexpr, BK: tl.constexpr, ALL: tl.constexpr, MAX_CHUNKS: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, BOUND: tl.constexpr, SHIFT: tl.constexpr, APART: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr, BF16_TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (at least total / MAX_CHUNKS,): the other rows of A, of strong chunks and heads.

    total: chunks times value heads.
    """
    c: tl.constexpr = Constants(
        K, BK, C, LEVELS, BOUND, SHIFT, APART, BEFORE, PACKED, BF16_TERMS, PRECISION
    )
    refs = Refs(q_ptr, k_ptr, g_ptr, u_ptr, a_ptr, ones_ptr, cu_ptr)
    if not GROUPED:
        HK = HV
    sizes = subchunk_decay.Sizes(T, N, HV, HK)
    if APART > 0:
        # one load for all chunks of this program, up to MAX_CHUNKS
        o_at = tl.program_id(0) + tl.arange(0, MAX_CHUNKS) * tl.num_programs(0)
        strong = tl.load(strong_ptr + o_at, mask=o_at < total, other=0)
        weak = tl.max(strong, 0) == 0
    else:
        weak = subchunk_decay.is_chunk_safe(decay_ptr, total, 1, K, ALL, BOUND, MAX_CHUNKS)
    if weak:
        return
    for at in tl.range(tl.program_id(0), total, tl.num_programs(0), disable_licm=True):
        if APART > 0:
            weak = tl.load(strong_ptr + at) == 0
        else:
            weak = subchunk_decay.is_block_safe(
                decay_ptr + tl.cast(at, tl.int64) * K, K, ALL, BOUND
            )
        if not weak:
            _scores(refs, at, sizes, c)


@triton.jit
def _scores(refs, at, sizes, c):
    """Those rows of one chunk and value head."""
    T, N, HV, HK = sizes
    i_h = at % HV
    i_chunk = at // HV
    begin, length, i_c = locate_chunk(refs.cu, i_chunk, T, N, c.C, c.PACKED)
    o_c = tl.arange(0, c.C)
    m_c = o_c < length - i_c * c.C
    row = begin + i_c * c.C
    i_k = (row * HK + i_h // (HV // HK)) * c.K
    i_g = (row * HV + i_h) * c.K
    rows = subchunk_decay.tokens(c.C, tl.bfloat16 if c.BF16_TERMS > 0 else tl.float32)
    b_a = tl.zeros((c.C, c.C), tl.float32)
    b_diag = tl.zeros((c.C,), tl.float32)
    b_lowest = tl.zeros((c.C,), tl.float32)
    for tile in range(tl.cdiv(c.K, c.BK)):
        o_k = tile * c.BK + tl.arange(0, c.BK)
        b_q = load_block(refs.q + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
        b_k = load_block(refs.k + i_k, HK * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
        b_g = load_block(refs.g + i_g, HV * c.K, o_c, m_c, o_k, c.K, c.K % c.BK != 0)  # [C, BK]
        b_diag += _diagonal(b_q, b_k, refs.u, i_h, o_k, c.K)
        b_g, b_terms = subchunk_decay.split_gates(b_g, c.BF16_TERMS)
        if c.APART > 0:
            b_ones = load_ones(refs.ones, EDGES.START, c.C, KINDS.WRITES)
            b_until = subchunk_decay.sums_of(b_ones, b_terms, c.BF16_TERMS, c.PRECISION)
            b_early, _ = subchunk_decay.half_sums(b_g, c.C)
            b_e, b_middle = _from_middle(b_until + FAR, b_early, rows, c.APART)
            b_low = intra_anchored.lowest_read(b_e, b_middle, b_early, o_c, HALF / 2, c.APART)
        else:
            b_ones = load_ones(
                refs.ones, EDGES.START, c.C, KINDS.READS if c.BEFORE else KINDS.WRITES
            )
            b_low = tl.min(subchunk_decay.sums_of(b_ones, b_terms, c.BF16_TERMS, c.PRECISION), 1)
        b_lowest = tl.minimum(b_lowest, b_low)
        b_read, b_write, first, safe = subchunk_decay.block_factors(
            refs.ones, b_terms, c.BOUND, c.SHIFT, c.BEFORE, c.BF16_TERMS, c.PRECISION
        )
        b_r = (b_q * b_read).to(b_q.dtype)  # [C, BK]
        b_w = (b_k * b_write).to(b_k.dtype)  # [C, BK]
        b_rw = tl.dot(b_r, tl.trans(b_w), input_precision=c.PRECISION)  # [C, C]
        b_a += tl.where(subchunk_decay.same_block(rows, BASE), b_rw, 0.0)
        for level in range(first, BASE):
            b_x = tl.where(safe, 0.0, b_q)
            b_ones = load_ones(
                refs.ones, EDGES.MIDDLE + level, c.C, KINDS.BOTH if c.BEFORE else KINDS.WRITES
            )
            b_a = _add_level(b_a, b_x, b_k, b_ones, level, b_terms, rows, c.BF16_TERMS, c.PRECISION)
        for level in range(BASE, c.LEVELS):
            b_ones = load_ones(
                refs.ones, EDGES.MIDDLE + level, c.C, KINDS.BOTH if c.BEFORE else KINDS.WRITES
            )
            b_a = _add_level(b_a, b_q, b_k, b_ones, level, b_terms, rows, c.BF16_TERMS, c.PRECISION)
    if c.APART > 0:
        other = intra_anchored.is_read_anchored(b_lowest, HALF / 2) == 0
    else:
        other = subchunk_decay.is_read_safe(b_lowest, c.BOUND) == 0
    p_a = refs.a + tl.cast(at, tl.int64) * (c.C * c.C)
    _store_scores(p_a, b_a, b_diag, rows, other[:, None], c.C, True)


@triton.jit
def _add_level(
    b_a, b_q, b_k, b_ones, level, b_terms, rows,
    BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores and those of one level, [C, C]."""
    b_e = tl.exp2(subchunk_decay.sums_of(b_ones, b_terms, BF16_TERMS, PRECISION))
    b_x = (tl.where(subchunk_decay.is_in_later_half(rows, level), b_q, b_k) * b_e).to(
        b_q.dtype
    )  # [C, BK]
    b_xx = tl.dot(b_x, tl.trans(b_x), input_precision=PRECISION)  # [C, C]
    return b_a + tl.where(subchunk_decay.siblings(rows, level), b_xx, 0.0)


@triton.jit
def _diagonal(b_q, b_k, u_ptr, i_h, o_k, K: tl.constexpr):
    """q_i . u k_i, [C]."""
    b_pair = b_q.to(tl.float32) * b_k
    if u_ptr is not None:
        b_pair *= tl.load(u_ptr + i_h * K + o_k, mask=o_k < K, other=0.0)[None, :]
    return tl.sum(b_pair, 1)


@triton.jit
def _store_scores(p_a, b_a, b_diag, rows, mask, C: tl.constexpr, APART: tl.constexpr):
    """APART: with b_diag as the diagonal. mask: of rows [C, 1], or None for all."""
    o_c = tl.arange(0, C)
    i, j = rows[:, None], o_c[None, :]
    if APART:
        b_a = tl.where(i == j, b_diag[:, None], b_a)
    b_a = tl.where(i >= j, b_a, 0.0)
    p_a = p_a + o_c[:, None] * C + o_c[None, :]
    tl.store(p_a, b_a.to(p_a.dtype.element_ty), mask=mask)


@triton.jit
def _pairs(
    p_v, p_do, stride, o_c, m_c,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P of a chunk, [C, C]."""
    b_p = tl.zeros((C, C), tl.float32)
    b_pt = tl.zeros((C, C), tl.float32)  # [j, i], so that no product is transposed
    for tile in range(tl.cdiv(V, BV)):
        o_v = tile * BV + tl.arange(0, BV)
        b_do = load_block(p_do, stride, o_c, m_c, o_v, V, V % BV != 0)  # [C, BV]
        b_v = load_block(p_v, stride, o_c, m_c, o_v, V, V % BV != 0)  # [C, BV]
        b_p = tl.dot(b_do, tl.trans(b_v), b_p, input_precision=PRECISION)  # [C, C]
        b_pt = tl.dot(b_v, tl.trans(b_do), b_pt, input_precision=PRECISION)  # [C, C]
    return tl.where(o_c[:, None] >= o_c[None, :], b_p, b_pt)
