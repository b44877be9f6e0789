"""Per-channel decay, or free a and b: what needs no state, of chunks that are weak by quarters.

As wy.py, which marks a chunk of which a half decays too far for it, but with scores by quarters
(by_quarters.py). Where a quarter decays too far, too, the chunk is marked for intra_safe.py, which
takes over q exp(G), exp(G_C), and the rows of the scores of q whose tokens do not decay too far.
Programs without such a chunk end at once: a kernel of its own, for a branch in wy.py would cost
weak chunks more than the launch.
"""

from collections import namedtuple

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.dplr.by_quarters import (
    add_by_quarters,
    add_scores_of_reads,
    anchors,
    columns_of,
    farthest_quarter,
    from_start,
    quarter_sums,
    quarters_together,
    read_operands,
    rounded_sum,
    split_exp2,
    sums_from_start,
    until_end,
    write_operands,
    write_powers,
)
from slipstream.kernels.linear.triton.dplr.gate_sums import load_gates_of
from slipstream.kernels.linear.triton.dplr.intra_anchored import half_sums
from slipstream.kernels.linear.triton.dplr.wy import solve_chunk

# what the kernel passes on: pointers, numbers and constants
Refs = namedtuple(
    "Refs", "q k a b v g beta q_out w_out b_out k_out u_out total qb qk ak r strong cu"
)
Sizes = namedtuple("Sizes", "T N HV H")
Constants = namedtuple(
    "Constants",
    "K V WIDE BK PIECES BV C STEPS DELTA CHANNEL PACKED FP32 LIMIT APART PRECISION INNER",
)


@triton.jit(do_not_specialize=["scale", "keep", "total", "T", "N", "HV", "H"])
def dplr_wy_quarters_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,
    a_ptr,  # none for delta
    b_ptr,
    v_ptr,  # [tokens, HV, V]
    g_ptr,  # [tokens, HV, K] or [tokens, HV]
    beta_ptr,  # [tokens, HV], delta
    q_out_ptr,  # [chunks, HV, C, WIDE]: scale q exp(G)
    w_out_ptr,  # W
    b_out_ptr,  # b exp(G_C - G)
    k_out_ptr,  # k exp(G_C - G), dplr
    u_out_ptr,  # [chunks, HV, V, C]: U, float32
    total_ptr,  # [chunks, HV, WIDE]: exp(G_C)
    qb_ptr,  # [chunks, HV, C, C], scaled
    qk_ptr,  # scaled, dplr
    ak_ptr,  # dplr, if keep
    r_ptr,  # if keep
    strong_ptr,  # [chunks, HV]: 2 where the chunk is; 3 if a quarter decays by more than 2 LIMIT
    cu_ptr,  # [N + 1]
    scale, keep, total, T, N, HV, H,
    K: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    BK: tl.constexpr, PIECES: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STEPS: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, PACKED: tl.constexpr, FP32: tl.constexpr,
    LIMIT: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """grid (at least total / MAX_CHUNKS,). total: chunks times value heads. keep, which backward
    wants, is no constant: one compilation for both."""
    c: tl.constexpr = Constants(
        K, V, WIDE, BK, PIECES, BV, C, STEPS, DELTA, CHANNEL, PACKED, FP32, LIMIT, APART, PRECISION,
        INNER,
    )  # fmt: skip
    sizes = Sizes(T, N, HV, H)
    refs = Refs(
        q_ptr, k_ptr, a_ptr, b_ptr, v_ptr, g_ptr, beta_ptr, q_out_ptr, w_out_ptr, b_out_ptr,
        k_out_ptr, u_out_ptr, total_ptr, qb_ptr, qk_ptr, ak_ptr, r_ptr, strong_ptr, cu_ptr,
    )  # fmt: skip
    # one load for all chunks of this program: most programs end here
    o_at = tl.program_id(0) + tl.arange(0, MAX_CHUNKS) * tl.num_programs(0)
    if tl.max(tl.load(strong_ptr + o_at, mask=o_at < total, other=0), 0) < 2:
        return
    for at in tl.range(tl.program_id(0), total, tl.num_programs(0), disable_licm=True):
        if tl.load(strong_ptr + at) == 2:
            _chunk(refs, scale, keep, at, sizes, c)


@triton.jit
def _chunk(refs, scale, keep, at, sizes, c):
    """One chunk of a value head."""
    T, N, HV, H = sizes
    act = refs.q.dtype.element_ty
    GK: tl.constexpr = c.K**c.CHANNEL
    i_chunk_head = tl.cast(at, tl.int64)
    i_h = at % HV
    begin, length, i_c = locate_chunk(refs.cu, at // HV, T, N, c.C, c.PACKED)
    o_c = tl.arange(0, c.C)
    m_c = o_c < length - i_c * c.C
    i = o_c[:, None]
    j = o_c[None, :]
    row = begin + i_c * c.C
    i_k = (row * H + i_h // (HV // H)) * c.K
    i_g = (row * HV + i_h) * GK
    i_a = i_chunk_head * (c.C * c.C)
    i_w = i_chunk_head * (c.C * c.WIDE)
    o_a = i * c.C + j
    write_ptr = refs.k if c.DELTA else refs.b
    b_qb = tl.zeros((c.C, c.C), tl.float32)
    b_qk = tl.zeros((c.C, c.C), tl.float32)
    b_ab = tl.zeros((c.C, c.C), tl.float32)
    b_ak = tl.zeros((c.C, c.C), tl.float32)
    BP: tl.constexpr = c.BK // c.PIECES
    p_g = refs.g + i_g + i * (HV * GK)
    b_farthest = tl.zeros((BP,), tl.float32)  # decay of a quarter of the chunk
    for n in range(c.WIDE // c.BK):
        o_n = n * c.BK + tl.arange(0, c.BK)
        b_sums = sums_from_start(p_g, o_n, o_c, m_c, False, c.K, c.CHANNEL, c.FP32, c.PRECISION)
        for piece in range(c.PIECES):
            o_k = n * c.BK + piece * BP + tl.arange(0, BP)
            o_w = i_w + i * c.WIDE + o_k[None, :]
            o_q = i_k + i * (H * c.K) + o_k[None, :]
            m_k = m_c[:, None]
            if c.K != c.WIDE:
                m_k = m_k & (o_k < c.K)[None, :]
            b_g = load_gates_of(p_g + o_k[None, :] * c.CHANNEL, m_k)
            b_early, b_late = half_sums(b_g)
            b_first, b_third = quarter_sums(b_g)
            b_far = farthest_quarter(b_first, b_third, b_early, b_late, c.LIMIT, c.APART)
            b_farthest = tl.maximum(b_farthest, b_far)
            b_half, b_anchor = anchors(b_first, b_third, b_early, o_c, c.LIMIT, c.APART)
            b_sum = rounded_sum(columns_of(b_sums, piece, c.PIECES))
            b_read, b_e = split_exp2(b_sum)
            b_q = tl.load(refs.q + o_q, mask=m_k, other=0.0) * b_read
            b_wide, b_start = from_start(b_q, b_e, b_half)
            # float32 until it is stored, so that q~ and the operand are rounded once each
            tl.store(refs.q_out + o_w, (b_wide * (b_start * scale)).to(act))
            q = read_operands(b_q, b_wide, b_e, b_anchor, o_c, act)
            b_b = tl.load(write_ptr + o_q, mask=m_k, other=0.0)
            if c.DELTA:
                b_a = b_b * b_read
                b_wide, _ = from_start(b_a, b_e, b_half)
                tl.store(refs.w_out + o_w, (b_wide * b_start).to(act))
                a = read_operands(b_a, b_wide, b_e, b_anchor, o_c, act)
            b_write, b_e = split_exp2(-b_sum)
            powers = write_powers(b_e, b_early, b_anchor, o_c, c.APART)
            b_end = until_end(b_early + b_late, b_e)
            tl.store(refs.total + i_chunk_head * c.WIDE + o_k, tl.exp2(b_early + b_late))
            b_b = b_b * b_write
            tl.store(refs.b_out + o_w, (b_b * b_end).to(act))
            b = write_operands(b_b, powers, o_c, act)
            b_qb = add_by_quarters(b_qb, q, b, c.PRECISION)
            if c.DELTA:
                b_ab = add_by_quarters(b_ab, a, b, c.PRECISION)
            else:
                b_k = tl.load(refs.k + o_q, mask=m_k, other=0.0) * b_write
                tl.store(refs.k_out + o_w, (b_k * b_end).to(act))
                b_qk = add_by_quarters(b_qk, q, write_operands(b_k, powers, o_c, act), c.PRECISION)
    b_qb = quarters_together(b_qb, o_c, c.APART)
    tl.store(refs.qb + i_a + o_a, tl.where(i >= j, b_qb * scale, 0.0).to(act))
    if c.DELTA:
        b_ab = quarters_together(b_ab, o_c, c.APART)
    else:
        b_qk = quarters_together(b_qk, o_c, c.APART)
        tl.store(refs.qk + i_a + o_a, tl.where(i >= j, b_qk * scale, 0.0).to(act))
    if tl.max(b_farthest, 0) > 2 * c.LIMIT:
        tl.store(refs.strong + i_chunk_head, 3)
    else:
        if not c.DELTA:
            for n in range(c.WIDE // c.BK):
                o_n = n * c.BK + tl.arange(0, c.BK)
                b_sums = sums_from_start(
                    p_g, o_n, o_c, m_c, False, c.K, c.CHANNEL, c.FP32, c.PRECISION
                )
                b_before = sums_from_start(
                    p_g, o_n, o_c, m_c, True, c.K, c.CHANNEL, c.FP32, c.PRECISION
                )
                for piece in range(c.PIECES):
                    o_k = n * c.BK + piece * BP + tl.arange(0, BP)
                    o_q = i_k + i * (H * c.K) + o_k[None, :]
                    m_k = m_c[:, None]
                    if c.K != c.WIDE:
                        m_k = m_k & (o_k < c.K)[None, :]
                    b_ab, b_ak, _ = add_scores_of_reads(
                        b_ab, b_ak, refs.a + o_q, refs.b + o_q, refs.k + o_q,
                        refs.w_out + i_w + i * c.WIDE + o_k[None, :],
                        p_g + o_k[None, :] * c.CHANNEL, columns_of(b_sums, piece, c.PIECES),
                        columns_of(b_before, piece, c.PIECES), o_c, m_k, c,
                    )  # fmt: skip
            b_ab = quarters_together(b_ab, o_c, c.APART)
            b_ak = tl.where(i > j, quarters_together(b_ak, o_c, c.APART), 0.0)
        solve_chunk(
            tl.where(i > j, b_ab, 0.0), b_ak, refs.beta + row * HV + i_h if c.DELTA else None, HV,
            refs.v + (row * HV + i_h) * c.V, refs.w_out + i_w,
            refs.u_out + i_chunk_head * (c.V * c.C), None if c.DELTA else refs.ak + i_a,
            refs.r + i_a, keep, o_c, m_c, c,
        )  # fmt: skip
