"""Delta rule on sm_90, sequences in segments: the state that each segment meets
(segment_transition.py).

    S = s_in        S <- M S + E        back from the last segment:        dS <- M^T dS + dE

A segment begins at the nearest one before it whose M counts as zero, and goes on from that one's E:
where states decay within a segment that is the one before. V as the rows, in float32.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import tile_product
from slipstream.kernels.linear.triton.scalar_decay.chunk import find_segment


@triton.jit(do_not_specialize=["T", "N", "HV", "segment"])
def delta_state_passing_sm90_kernel(
    transition_ptr,  # [segments, HV, K, V + K]: E and M; back dE of [segments, HV, K, V]
    m_ptr,  # [segments, HV, K, M_OFFSET + K]: what is beside M, and M
    m_is_zero_ptr,  # [segments, HV]
    s_in_ptr,  # [N, HV, K, V]
    entry_ptr,  # [segments, HV, K, V]
    cu_ptr,  # [N + 1]
    T,
    N,
    HV,
    segment,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    M_OFFSET: tl.constexpr,
    BACK: tl.constexpr,
    HAS_S_IN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """grid (V / BV * HV * segments,)"""
    NV: tl.constexpr = V // BV
    WIDE: tl.constexpr = M_OFFSET + K
    WIDTH: tl.constexpr = V if BACK else WIDE
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_seg = pid // NV // HV
    begin, length, i_s = find_segment(cu_ptr, i_seg, T, N, segment, PACKED)
    if PACKED:  # the sequence of begin
        i_n = i_seg - i_s - begin // segment
    else:
        i_n = i_seg // tl.cdiv(T, segment)
    count = tl.cdiv(length, segment)
    o_k = tl.arange(0, K)
    o_v = (pid % NV) * BV + tl.arange(0, BV)
    o_s = o_k[None, :] * V + o_v[:, None]
    o_e = o_k[None, :] * WIDTH + o_v[:, None]
    if BACK:
        o_m = o_k[:, None] * WIDE + (M_OFFSET + o_k)[None, :]
    else:
        o_m = o_k[None, :] * WIDE + (M_OFFSET + o_k)[:, None]
    step = 1 if BACK else -1
    # of a number that no segment has nothing is asked but that it ends
    if (i_s >= count - 1) if BACK else (i_s <= 0):
        b_s = tl.zeros((BV, K), tl.float32)
        if HAS_S_IN:
            o_n = (i_n.to(tl.int64) * HV + i_h) * (K * V)
            b_s = tl.load(s_in_ptr + o_n + o_s).to(tl.float32)
    else:
        start = i_seg + step
        while tl.load(m_is_zero_ptr + start * HV + i_h) == 0:
            start += step
        b_s = tl.load(transition_ptr + (start.to(tl.int64) * HV + i_h) * (K * WIDTH) + o_e)
        for i in range(1, tl.abs(i_seg - start)):
            at = (start - i * step).to(tl.int64) * HV + i_h
            b_m = tl.load(m_ptr + at * (K * WIDE) + o_m)
            b_s = tile_product(b_s, b_m, "halves") + tl.load(
                transition_ptr + at * (K * WIDTH) + o_e
            )
    tl.store(entry_ptr + (i_seg.to(tl.int64) * HV + i_h) * (K * V) + o_s, b_s)
