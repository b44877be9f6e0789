"""Delta rule on sm_90, sequences in segments: the state that each segment meets
(segment_launch.py).

    S = s_in        S <- M S + E        back from the last segment:        dS <- M^T dS + dE

A segment begins at the nearest one before it whose M counts as zero, and goes on from that one's E:
where states decay within a segment that is the one before. V as the rows, in float32.

One rank has s_in in E of the first segment, whose M counts as zero. Where sequences go on at other
ranks s_in comes later, so that E and M of all segments are their own, and what sequences end with
is wanted, too.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import tile_product
from slipstream.kernels.linear.triton.scalar_decay.device import locate_chunk


@triton.jit(do_not_specialize=["T", "N", "HV", "segment"])
def delta_state_passing_sm90_kernel(
    e_ptr,  # [segments, HV, K, E_WIDTH]: E and what is beside it; back dE
    m_ptr,  # [segments, HV, K, M_WIDTH]: M and what is beside it
    m_is_zero_ptr,  # [segments, HV]
    s_in_ptr,  # [N, HV, K, V]
    entry_ptr,  # [segments, HV, K, V]
    s_out_ptr,  # [N, HV, K, V]: what sequences end with; back, begin with
    cu_ptr,  # [N + 1]
    T, N, HV, segment,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, E_WIDTH: tl.constexpr,
    M_WIDTH: tl.constexpr, BACK: tl.constexpr, HAS_S_IN: tl.constexpr, HAS_S_OUT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """grid (V / BV * HV * segments,), with HAS_S_OUT (V / BV * HV * (N + segments),): the first
    are of s_out, each as if it were of the segment after the last."""
    NV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_seg = pid // NV // HV
    is_end = False
    if HAS_S_OUT:
        is_end = i_seg < N
        first = _first_segment(cu_ptr, tl.minimum(i_seg, N - 1), T, segment, PACKED)
        i_seg = tl.where(is_end, first, i_seg - N)
    begin, length, i_s = locate_chunk(cu_ptr, i_seg, T, N, segment, PACKED)
    if PACKED:
        i_n = i_seg - i_s - begin // segment
    else:
        i_n = i_seg // tl.cdiv(T, segment)
    count = tl.cdiv(length, segment)
    step = 1 if BACK else -1
    # how many segments come before, and where they end
    before = count - 1 - i_s if BACK else i_s
    if HAS_S_OUT:
        before = tl.where(is_end, count, before)
        i_seg += tl.where(is_end, -1 if BACK else count, 0)
    o_k = tl.arange(0, K)
    o_v = (pid % NV) * BV + tl.arange(0, BV)
    o_s = o_k[None, :] * V + o_v[:, None]
    o_e = o_k[None, :] * E_WIDTH + o_v[:, None]
    if BACK:
        o_m = o_k[:, None] * M_WIDTH + o_k[None, :]
    else:
        o_m = o_k[None, :] * M_WIDTH + o_k[:, None]
    o_n = (i_n.to(tl.int64) * HV + i_h) * (K * V)
    steps = 0  # whose M counts
    p_zero = m_is_zero_ptr + i_seg * HV + i_h
    # without s_in nothing meets the first segment's M
    most = before if HAS_S_IN else before - 1
    while tl.load(p_zero + (steps + 1) * step * HV, mask=steps < most, other=1) == 0:
        steps += 1
    if steps < before:
        at = (i_seg + (steps + 1) * step).to(tl.int64) * HV + i_h
        b_s = tl.load(e_ptr + at * (K * E_WIDTH) + o_e)
    else:
        b_s = tl.zeros((BV, K), tl.float32)
        if HAS_S_IN:
            b_s = tl.load(s_in_ptr + o_n + o_s).to(tl.float32)
    for i in range(steps):
        at = (i_seg + (steps - i) * step).to(tl.int64) * HV + i_h
        b_m = tl.load(m_ptr + at * (K * M_WIDTH) + o_m)
        b_s = tile_product(b_s, b_m, "halves") + tl.load(e_ptr + at * (K * E_WIDTH) + o_e)
    if HAS_S_OUT and is_end:
        tl.store(s_out_ptr + o_n + o_s, b_s)
    else:
        tl.store(entry_ptr + (i_seg.to(tl.int64) * HV + i_h) * (K * V) + o_s, b_s)


@triton.jit
def _first_segment(cu_ptr, i_n, T, segment, PACKED: tl.constexpr):
    """The number of the first segment of sequence i_n. Of a sequence without segments it is a
    number that locate_chunk gives to none."""
    if PACKED:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        first = (begin // segment).to(tl.int32) + i_n
    else:
        first = i_n * tl.cdiv(T, segment)
    return first
