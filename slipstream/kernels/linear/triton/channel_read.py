# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Decay per channel: what the tokens of a chunk read, all chunks at once.

    o_i  = scale * ((q_i exp(gates until i))^T S + sum over j <= i of A[i, j] v_j)
    dv_j = scale * ((k_j exp(gates after j))^T dS' + sum over i >= j of A[i, j] do_i)      (BACK)

    A[i, j] = q_i . exp(G_i - G_j) k_j, by levels (channel_decay.py)        A[i, i] = q_i . u k_i

with S before and dS' after the chunk from channel_states.py; without u it is 1.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.channel_decay import (
    after,
    decay,
    gate_parts,
    in_block,
    is_later,
    safe_base,
    same_block,
    siblings,
    sums,
    to_seam,
    tokens,
    until,
)
from slipstream.kernels.linear.triton.delta_solve import find_chunk
from slipstream.kernels.linear.triton.walk import _block


@triton.jit(do_not_specialize=["scale", "T", "N", "HV", "HK", "HX", "first_head", "heads"])
def channel_read_kernel(
    q_ptr,  # [tokens, HK, K]
    k_ptr,  # [tokens, HK, K]
    g_ptr,  # [tokens, HV, K]
    u_ptr,  # [HV, K]
    x_ptr,  # [tokens, HX, V]: v, or do BACK
    states_ptr,  # [slots, heads, V, K]: S, or dS' BACK
    y_ptr,  # [tokens, HV, V]: o, or dv BACK
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
    BACK: tl.constexpr,
    BEFORE: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid (ceil(V / BV) * heads * slots,): BV columns of one chunk and value head a program."""
    if not GROUPED:
        HK = HV
        HX = HV
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_head = (pid // NV) % heads
    i_h = first_head + i_head
    slot = pid // NV // heads
    begin, length, i_c = find_chunk(cu_ptr, slot, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    o_v = (pid % NV) * BV + tl.arange(0, BV)
    m_c = o_c < length - i_c * C
    row = begin + i_c * C
    i_k = (row * HK + i_h // (HV // HK)) * K
    i_g = (row * HV + i_h) * K
    states_ptr += (slot.to(tl.int64) * heads + i_head) * (K * V)
    rows = tokens(C, tl.bfloat16 if PARTS > 0 else tl.float32)
    b_a = tl.zeros((C, C), tl.float32)
    b_own = tl.zeros((C,), tl.float32)
    b_y = tl.zeros((C, BV), tl.float32)
    for tile in range(tl.cdiv(K, BK)):
        o_k = tile * BK + tl.arange(0, BK)
        b_q = _block(q_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_k = _block(k_ptr + i_k, HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_g = _block(g_ptr + i_g, HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        m_s = (o_v < V)[:, None] & (o_k < K)[None, :] & (i_c * C < length)
        b_s = tl.load(states_ptr + o_v[:, None] * K + o_k[None, :], mask=m_s, other=0.0)
        b_pair = b_q.to(tl.float32) * b_k
        if u_ptr is not None:
            b_pair *= tl.load(u_ptr + i_h * K + o_k, mask=o_k < K, other=0.0)[None, :]
        b_own += tl.sum(b_pair, 1)
        b_g, b_parts = gate_parts(b_g, PARTS)
        if BACK:
            b_edge = b_k * decay(after(rows, C), b_parts, PARTS, PRECISION)
        else:
            b_edge = b_q * decay(until(rows, BEFORE), b_parts, PARTS, PRECISION)
        b_y = tl.dot(b_edge.to(b_s.dtype), tl.trans(b_s), b_y, input_precision=PRECISION)  # [C, BV]
        base = safe_base(b_g, LEVELS, BOUND)
        if base > 0:
            b_sum = sums(in_block(rows, base, False), b_parts, PARTS, PRECISION)
            b_w = (b_k * tl.exp2(-b_sum)).to(b_k.dtype)  # [C, BK]
            if BEFORE:
                b_sum = sums(in_block(rows, base, True), b_parts, PARTS, PRECISION)
            b_r = (b_q * tl.exp2(b_sum)).to(b_q.dtype)  # [C, BK]
            if BACK:
                b_rw = tl.dot(b_w, tl.trans(b_r), input_precision=PRECISION)  # [C, C]
            else:
                b_rw = tl.dot(b_r, tl.trans(b_w), input_precision=PRECISION)  # [C, C]
            b_a += tl.where(same_block(rows, base), b_rw, 0.0)
        for level in range(base, LEVELS):
            b_e = decay(to_seam(rows, level, BEFORE), b_parts, PARTS, PRECISION)
            b_x = (tl.where(is_later(rows, level), b_q, b_k) * b_e).to(b_q.dtype)  # [C, BK]
            b_xx = tl.dot(b_x, tl.trans(b_x), input_precision=PRECISION)  # [C, C]
            b_a += tl.where(siblings(rows, level), b_xx, 0.0)
    i, j = rows[:, None], o_c[None, :]
    seen = i < j if BACK else i > j
    b_a = tl.where(seen, b_a, tl.where(i == j, b_own[:, None], 0.0))
    i_x = (row * HX + i_h // (HV // HX)) * V
    b_x = _block(x_ptr + i_x, HX * V, o_c, m_c, o_v, V, V % BV != 0)  # [C, BV]
    b_y = tl.dot(b_a.to(b_x.dtype), b_x, b_y, input_precision=PRECISION) * scale
    m_y = m_c[:, None] & (o_v < V)[None, :]
    p_y = y_ptr + (row * HV + i_h) * V + o_c[:, None] * (HV * V) + o_v[None, :]
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_y)
