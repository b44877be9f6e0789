"""Delta rule: the state that each segment of a split sequence meets (delta/chunk.py).

    S <- M S + E, segment after segment; for gradients, from the last to the first, dS <- M^T dS + E

with V as the rows, as the scans have it, and in float32.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.chunk import locate_sequence
from slipstream.kernels.linear.triton.delta.solve_tril import tile_product


@triton.jit(do_not_specialize=["T", "HV", "segment"])
def delta_state_passing_kernel(
    s_ptr,  # [segments, HV, K, V]: E, which becomes the state that the segment meets
    m_ptr,  # [segments, HV, K, K]
    s_in_ptr,  # [N, HV, K, V]
    s_out_ptr,  # [N, HV, K, V]
    cu_ptr,  # [N + 1]
    T,
    HV,
    segment,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_S_IN: tl.constexpr,
    HAS_S_OUT: tl.constexpr,
    PACKED: tl.constexpr,
    INNER: tl.constexpr,
):
    """grid (ceil(V / BV) * HV * N,)"""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_n = (pid // NV // HV).to(tl.int64)
    _, length, first = locate_sequence(cu_ptr, i_n, T, segment, PACKED)
    o_k = tl.arange(0, BK)
    o_v = (pid % NV) * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_s = (o_v < V)[:, None] & m_k[None, :]
    m_m = m_k[:, None] & m_k[None, :]
    o_s = o_k[None, :] * V + o_v[:, None]
    if REVERSE:
        o_m = o_k[:, None] * K + o_k[None, :]
    else:
        o_m = o_k[None, :] * K + o_k[:, None]
    o_n = (i_n * HV + i_h) * (K * V) + o_s
    if HAS_S_IN:
        b_s = tl.load(s_in_ptr + o_n, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_s = tl.zeros((BV, BK), tl.float32)
    count = tl.cdiv(length, segment)
    for i in range(count):
        i_seg = first + (count - 1 - i if REVERSE else i)
        i_s = i_seg * HV + i_h
        p_s = s_ptr + i_s * (K * V) + o_s
        b_e = tl.load(p_s, mask=m_s, other=0.0)
        tl.store(p_s, b_s, mask=m_s)
        b_m = tl.load(m_ptr + i_s * (K * K) + o_m, mask=m_m, other=0.0)  # [BK, BK]
        b_s = tile_product(b_s, b_m, INNER) + b_e
    if HAS_S_OUT:
        tl.store(s_out_ptr + o_n, b_s.to(s_out_ptr.dtype.element_ty), mask=m_s)
