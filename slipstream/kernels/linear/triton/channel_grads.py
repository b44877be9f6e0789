# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
"""Decay per channel: the gradients on its side of the state, all chunks at once.

With P = do v^T, S before and dS' after the chunk (channel_states.py), and u = 1 if there is none,

    dq_i = scale * ((do_i^T S) exp(gates until i) + sum over j < i of P[i, j] exp(G_i - G_j) k_j
                    + P[i, i] u k_i)
    dk_j = scale * ((v_j^T dS') exp(gates after j) + sum over i > j of P[i, j] exp(G_i - G_j) q_i
                    + P[j, j] u q_j)
    du   = scale * sum over i of P[i, i] q_i k_i           of each chunk

by levels (channel_decay.py), and dg is what every exponent adds to its gates: at a level e_t what
x_t * dx_t is, at the edges of the chunk q_i * dq_i and k_j * dk_j of the states, and for all gates
of the chunk sum over V of exp(G_C) S * dS'. No sum is the difference of larger ones.

Channels of K are independent, BK of them a program. Without dk_ptr it is dq alone, which with the
roles exchanged (channel_launch.py) is o.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.channel_decay import (
    after,
    after_back,
    back_to_gates,
    decay,
    gate_parts,
    in_block,
    in_block_back,
    is_later,
    safe_base,
    same_block,
    siblings,
    sums,
    to_seam,
    to_seam_back,
    tokens,
    until,
    until_back,
)
from slipstream.kernels.linear.triton.delta_solve import find_chunk
from slipstream.kernels.linear.triton.walk import LOG2E, _block


@triton.jit(do_not_specialize=["scale", "T", "N", "HV", "HK", "HX", "first_head", "heads"])
def channel_grads_kernel(
    q_ptr,  # [tokens, HK, K]
    k_ptr,  # [tokens, HK, K]
    g_ptr,  # [tokens, HV, K]
    u_ptr,  # [HV, K]
    v_ptr,  # [tokens, HX, V]
    do_ptr,  # [tokens, HX, V]
    states_ptr,  # [slots, heads, V, K]
    dstates_ptr,  # [slots, heads, V, K]
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,  # [tokens, HV, K]
    dg_ptr,  # [tokens, HV, K]
    du_ptr,  # [slots, HV, K]
    cu_ptr,  # [N + 1]
    scale,
    T,
    N,
    HV,
    HK,
    HX,
    first_head,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BOUND: tl.constexpr,
    BEFORE: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(K / BK) * heads * slots,): BK channels of one chunk and value head a program."""
    if not GROUPED:
        HK = HV
        HX = HV
    NK: tl.constexpr = (K + BK - 1) // BK
    ALL: tl.constexpr = dk_ptr is not None
    ONE: tl.constexpr = 1 if PARTS == 2 else PARTS  # 16 bits
    TWO: tl.constexpr = 2 if PARTS == 1 else PARTS
    pid = tl.program_id(0)
    i_head = (pid // NK) % heads
    i_h = first_head + i_head
    slot = pid // NK // heads
    begin, length, i_c = find_chunk(cu_ptr, slot, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = (pid % NK) * BK + tl.arange(0, BK)
    m_c = o_c < length - i_c * C
    row = begin + i_c * C
    i_x = (row * HX + i_h // (HV // HX)) * V
    i_s = (slot.to(tl.int64) * heads + i_head) * (K * V)
    rows = tokens(C, tl.bfloat16 if PARTS > 0 else tl.float32)
    i, j = rows[:, None], o_c[None, :]
    b_p = tl.zeros((C, C), tl.float32)
    b_pt = tl.zeros((C, C), tl.float32)  # [j, i], so that no product is transposed
    b_dq = tl.zeros((C, BK), tl.float32)
    b_dk = tl.zeros((C, BK), tl.float32)
    b_z = tl.zeros((BK,), tl.float32)
    for tile in range(tl.cdiv(V, BV)):
        o_v = tile * BV + tl.arange(0, BV)
        b_do = _block(do_ptr + i_x, HX * V, o_c, m_c, o_v, V, V % BV != 0)  # [C, BV]
        b_v = _block(v_ptr + i_x, HX * V, o_c, m_c, o_v, V, V % BV != 0)  # [C, BV]
        o_s = i_s + o_v[:, None] * K + o_k[None, :]
        m_s = (o_v < V)[:, None] & (o_k < K)[None, :] & (i_c * C < length)
        b_s = tl.load(states_ptr + o_s, mask=m_s, other=0.0)  # [BV, BK]
        b_p = tl.dot(b_do, tl.trans(b_v), b_p, input_precision=PRECISION)  # [C, C]
        b_dq = tl.dot(b_do, b_s, b_dq, input_precision=PRECISION)  # [C, BK]
        if ALL:
            b_ds = tl.load(dstates_ptr + o_s, mask=m_s, other=0.0)  # [BV, BK]
            b_pt = tl.dot(b_v, tl.trans(b_do), b_pt, input_precision=PRECISION)  # [C, C]
            b_dk = tl.dot(b_v, b_ds, b_dk, input_precision=PRECISION)  # [C, BK]
            b_z += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 0)

    i_k = (row * HK + i_h // (HV // HK)) * K
    b_k = _block(k_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
    i_o = (row * HV + i_h) * K
    b_g = _block(g_ptr + i_o, HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
    b_g, b_parts = gate_parts(b_g, PARTS)
    b_own = tl.sum(tl.where(i == j, b_p, 0.0), 1)
    b_dq *= decay(until(rows, BEFORE), b_parts, PARTS, PRECISION)
    b_both = b_p.to(b_k.dtype)
    b_dg = tl.zeros((C, BK), tl.float32)
    if ALL:
        b_q = _block(q_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_dk *= decay(after(rows, C), b_parts, PARTS, PRECISION)
        b_both = tl.where(i > j, b_p, b_pt).to(b_k.dtype)
        b_dg += (b_z * tl.exp2(tl.sum(b_g, 0) * LOG2E))[None, :]
        b_dg = back_to_gates(until_back(rows, C, BEFORE), b_q * b_dq, b_dg, ONE, PRECISION)
        b_dg = back_to_gates(after_back(rows), b_k * b_dk, b_dg, ONE, PRECISION)
    base = safe_base(b_g, LEVELS, BOUND)
    if base > 0:
        b_w_sum = sums(in_block(rows, base, False), b_parts, PARTS, PRECISION)
        b_r_sum = b_w_sum
        if BEFORE:
            b_r_sum = sums(in_block(rows, base, True), b_parts, PARTS, PRECISION)
        b_w = (b_k * tl.exp2(-b_w_sum)).to(b_k.dtype)  # [C, BK]
        b_square = tl.where(same_block(rows, base) & (i > j), b_both, 0.0)
        b_dr = tl.dot(b_square, b_w, input_precision=PRECISION)  # [C, BK]
        b_dq += b_dr * tl.exp2(b_r_sum)
        if ALL:
            b_r = (b_q * tl.exp2(b_r_sum)).to(b_k.dtype)  # [C, BK]
            b_square = tl.where(same_block(rows, base) & (i < j), b_both, 0.0)
            b_dw = tl.dot(b_square, b_r, input_precision=PRECISION)  # [C, BK]
            b_dk += b_dw * tl.exp2(-b_w_sum)
            # the one difference: of the same products, so that they cancel to the last bits
            b_leave = b_r * b_dr
            b_enter = b_w * b_dw
            span = in_block_back(rows, base, False)
            if BEFORE:
                before = in_block_back(rows, base, True)
                b_dg = back_to_gates(before, b_leave, b_dg, TWO, PRECISION)
                b_dg = back_to_gates(span, -b_enter, b_dg, TWO, PRECISION)
            else:
                b_dg = back_to_gates(span, b_leave - b_enter, b_dg, TWO, PRECISION)
    for level in range(base, LEVELS):
        b_e = decay(to_seam(rows, level, BEFORE), b_parts, PARTS, PRECISION)
        b_row = b_k
        if ALL:
            b_row = tl.where(is_later(rows, level), b_q, b_k)
        b_x = (b_row * b_e).to(b_k.dtype)  # [C, BK]
        b_square = tl.where(siblings(rows, level), b_both, 0.0)
        b_dx = tl.dot(b_square, b_x, input_precision=PRECISION) * b_e  # [C, BK]
        b_later = is_later(rows, level).to(tl.float32)
        b_dq += b_dx * b_later
        if ALL:
            b_dk += b_dx * (1.0 - b_later)
            span = to_seam_back(rows, level, BEFORE)
            b_dg = back_to_gates(span, b_row * b_dx, b_dg, ONE, PRECISION)

    m_o = m_c[:, None] & (o_k < K)[None, :]
    o_o = i_o + o_c[:, None] * (HV * K) + o_k[None, :]
    b_own = (b_own * scale)[:, None]
    b_write = b_k.to(tl.float32)
    if u_ptr is not None:
        b_u = tl.load(u_ptr + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        b_write *= b_u
    if dq_ptr is not None:
        b_dq = b_dq * scale + b_own * b_write
        tl.store(dq_ptr + o_o, b_dq.to(dq_ptr.dtype.element_ty), mask=m_o)
    if ALL:
        b_read = b_q * b_own
        if u_ptr is not None:
            p_du = du_ptr + (slot.to(tl.int64) * HV + i_h) * K + o_k
            tl.store(p_du, tl.sum(b_read * b_k, 0), mask=o_k < K)
            b_read *= b_u
        b_dk = b_dk * scale + b_read
        tl.store(dk_ptr + o_o, b_dk.to(dk_ptr.dtype.element_ty), mask=m_o)
        tl.store(dg_ptr + o_o, (b_dg * scale).to(dg_ptr.dtype.element_ty), mask=m_o)
