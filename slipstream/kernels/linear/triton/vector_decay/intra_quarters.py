"""Decay per channel: scores of chunks of which a half decays too far for intra_fwd.py, by quarters.

A [C, C] again, as in dplr/by_quarters.py; where a quarter decays too far, too, rows of tokens that
do not, and the chunk is marked for vector_decay_scores_kernel. Programs of other chunks have
nothing to do.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.dplr.by_quarters import (
    add_by_quarters,
    anchors,
    farthest_quarter,
    from_start,
    quarter_sums,
    quarters_together,
    read_operands,
    rounded_sum,
    split_exp2,
    write_operands,
    write_powers,
)
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block
from slipstream.kernels.linear.triton.scalar_decay.device import LOG2E
from slipstream.kernels.linear.triton.vector_decay.subchunk_decay import (
    HALF,
    half_sums,
    prefix_span,
    split_gates,
    sums,
    tokens,
)


@triton.jit(do_not_specialize=["total", "T", "N", "HV", "HK"])
def vector_decay_quarters_kernel(
    q_ptr,  # [tokens, HK, K]
    k_ptr,  # [tokens, HK, K]
    g_ptr,  # [tokens, HV, K]
    strong_ptr,  # [chunks, HV]: 1 where the chunk is; 2 if a quarter decays by more than 2^-HALF
    a_ptr,  # [chunks, HV, C, C]
    cu_ptr,  # [N + 1]
    total,
    T,
    N,
    HV,
    HK,
    K: tl.constexpr,
    BK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    C: tl.constexpr,
    APART: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    BF16_TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (at least total / MAX_CHUNKS,). total: chunks times value heads."""
    if not GROUPED:
        HK = HV
    # one load for all chunks of this program: most programs end here
    o_at = tl.program_id(0) + tl.arange(0, MAX_CHUNKS) * tl.num_programs(0)
    if tl.max(tl.load(strong_ptr + o_at, mask=o_at < total, other=0), 0) == 0:
        return
    for at in tl.range(tl.program_id(0), total, tl.num_programs(0), disable_licm=True):
        if tl.load(strong_ptr + at) > 0:
            _scores(
                q_ptr, k_ptr, g_ptr, strong_ptr, a_ptr, cu_ptr, at, T, N, HV, HK,
                K, BK, C, APART, PACKED, BF16_TERMS, PRECISION,
            )  # fmt: skip


@triton.jit
def _scores(
    q_ptr, k_ptr, g_ptr, strong_ptr, a_ptr, cu_ptr, at, T, N, HV, HK,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, APART: tl.constexpr, PACKED: tl.constexpr,
    BF16_TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Those of one chunk and value head."""
    i_h = at % HV
    begin, length, i_c = locate_chunk(cu_ptr, at // HV, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    m_c = o_c < length - i_c * C
    row = begin + i_c * C
    i_k = (row * HK + i_h // (HV // HK)) * K
    i_g = (row * HV + i_h) * K
    rows = tokens(C, tl.bfloat16 if BF16_TERMS > 0 else tl.float32)
    b_a = tl.zeros((C, C), tl.float32)
    b_farthest = tl.zeros((BK,), tl.float32)  # decay of a quarter of the chunk
    for tile in range(tl.cdiv(K, BK)):
        o_k = tile * BK + tl.arange(0, BK)
        b_g = load_block(g_ptr + i_g, HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_k = load_block(k_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_q = load_block(q_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_g, b_terms = split_gates(b_g, BF16_TERMS)
        b_sum = rounded_sum(sums(prefix_span(rows, False), b_terms, BF16_TERMS, PRECISION))
        b_early, b_late = half_sums(b_g, C)
        b_first, b_third = quarter_sums(b_g * LOG2E)
        b_farthest = tl.maximum(b_farthest, farthest_quarter(b_first, b_third, b_early, b_late))
        b_half, b_anchor = anchors(b_first, b_third, b_early, o_c, HALF / 2, APART)
        b_write, b_e = split_exp2(-b_sum)
        powers = write_powers(b_e, b_early, b_anchor, o_c, APART)
        write = write_operands(b_k * b_write, powers, o_c, b_k.dtype)
        b_read, b_e = split_exp2(b_sum)
        b_r = b_q * b_read
        b_wide, _ = from_start(b_r, b_e, b_half)
        read = read_operands(b_r, b_wide, b_e, b_anchor, o_c, b_k.dtype)
        b_a = add_by_quarters(b_a, read, write, PRECISION)
    if tl.max(b_farthest, 0) > HALF:
        tl.store(strong_ptr + at, 2)
    b_a = quarters_together(b_a, o_c, APART)
    b_a = tl.where(rows[:, None] >= o_c[None, :], b_a, 0.0)
    p_a = a_ptr + tl.cast(at, tl.int64) * (C * C) + o_c[:, None] * C + o_c[None, :]
    tl.store(p_a, b_a.to(p_a.dtype.element_ty))
