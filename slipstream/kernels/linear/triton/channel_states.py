# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Decay per channel: the states before and their gradients after every chunk, by two walks.

    S  = S exp(G_C) + sum over t of v_t (k_t exp(gates after t))^T      S, dS' [V, K] of a chunk
    dS = dS' exp(G_C) + sum over t of do_t (q_t exp(gates until t))^T

The second walks from the last chunk to the first; dS is that of the state over the scale. Tiles of
a state do not depend on each other: a program has BV rows and BK columns of one. The two walks are
one launch, since one alone has too few programs to fill a device.
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.channel_decay import after, decay, gate_parts, tokens, until
from slipstream.kernels.linear.triton.delta_walk import _sequence
from slipstream.kernels.linear.triton.walk import LOG2E, _block


@triton.jit
def _walk(
    w_ptr,  # [tokens, HK, K]: k, or q BACK
    x_ptr,  # [tokens, HX, V]: v, or do BACK
    g_ptr,  # [tokens, HV, K]
    states_ptr,  # [slots, heads, V, K]
    s_in_ptr,  # [N, HV, K, V], or [N, HV, V, K] if not TRANSPOSED; times scale_in
    s_out_ptr,  # the same; times scale_out
    cu_ptr,
    pid,
    scale_in,
    scale_out,
    T,
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
    BACK: tl.constexpr,
    BEFORE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_head = (pid // NK // NV) % heads
    i_h = first_head + i_head
    i_n = (pid // NK // NV // heads).to(tl.int64)
    begin, length, first = _sequence(cu_ptr, i_n, T, C, PACKED)
    o_c = tl.arange(0, C)
    o_k = (pid % NK) * BK + tl.arange(0, BK)
    o_v = ((pid // NK) % NV) * BV + tl.arange(0, BV)
    w_ptr += (begin * HK + i_h // (HV // HK)) * K
    x_ptr += (begin * HX + i_h // (HV // HX)) * V
    g_ptr += (begin * HV + i_h) * K
    states_ptr += (first * heads + i_head) * (K * V)
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = o_v[:, None] * K + o_k[None, :]
    o_io = (i_n * HV + i_h) * (K * V)
    o_io += o_k[None, :] * V + o_v[:, None] if TRANSPOSED else o_s
    if s_in_ptr is not None:
        b_s = tl.load(s_in_ptr + o_io, mask=m_s, other=0.0).to(tl.float32) * scale_in  # [BV, BK]
    else:
        b_s = tl.zeros((BV, BK), tl.float32)
    rows = tokens(C, tl.bfloat16 if PARTS > 0 else tl.float32)
    span = until(rows, BEFORE) if BACK else after(rows, C)
    chunks = tl.cdiv(length, C)
    for i in range(chunks):
        i_c = chunks - 1 - i if BACK else i
        t = (i_c * C).to(tl.int64)
        m_c = o_c < length - i_c * C
        b_w = _block(w_ptr + t * (HK * K), HK * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_g = _block(g_ptr + t * (HV * K), HV * K, o_c, m_c, o_k, K, K % BK != 0)  # [C, BK]
        b_x = _block(x_ptr + t * (HX * V), HX * V, o_c, m_c, o_v, V, V % BV != 0)  # [C, BV]
        p_s = states_ptr + i_c.to(tl.int64) * heads * (K * V) + o_s
        tl.store(p_s, b_s.to(states_ptr.dtype.element_ty), mask=m_s)
        b_g, b_parts = gate_parts(b_g, PARTS)
        b_w = (b_w * decay(span, b_parts, PARTS, PRECISION)).to(b_x.dtype)
        b_s *= tl.exp2(tl.sum(b_g, 0) * LOG2E)[None, :]
        b_s = tl.dot(tl.trans(b_x), b_w, b_s, input_precision=PRECISION)  # [BV, BK]
    if s_out_ptr is not None:
        tl.store(s_out_ptr + o_io, b_s * scale_out, mask=m_s)


_SIZES = ["T", "HV", "HK", "HX", "first_head", "heads", "programs"]


@triton.jit(do_not_specialize=["scale", "scale_in", *_SIZES])
def channel_states_kernel(
    q_ptr,  # [tokens, HK, K]
    k_ptr,  # [tokens, HK, K]
    v_ptr,  # [tokens, HX, V]
    do_ptr,  # [tokens, HX, V]
    g_ptr,  # [tokens, HV, K]
    states_ptr,  # [slots, heads, V, K]: S before each chunk
    dstates_ptr,  # [slots, heads, V, K]: dS' after each chunk, over the scale
    initial_ptr,  # [N, HV, K, V], or [N, HV, V, K] if not TRANSPOSED, as the next three
    final_ptr,
    dfinal_ptr,
    dinitial_ptr,
    cu_ptr,  # [N + 1]
    scale,
    scale_in,  # 1 / scale
    T,
    HV,
    HK,
    HX,
    first_head,
    heads,
    programs,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    BEFORE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """programs = ceil(K / BK) * ceil(V / BV) * heads * N; grid (programs,), twice that with do."""
    if not GROUPED:
        HK = HV
        HX = HV
    pid = tl.program_id(0)
    if pid < programs:
        _walk(
            k_ptr, v_ptr, g_ptr, states_ptr, initial_ptr, final_ptr, cu_ptr, pid, 1.0, 1.0,
            T, HV, HK, HX, first_head, heads, K, V, BK, BV, C, False, BEFORE, TRANSPOSED,
            PACKED, PARTS, PRECISION,
        )  # fmt: skip
    elif do_ptr is not None:
        _walk(
            q_ptr, do_ptr, g_ptr, dstates_ptr, dfinal_ptr, dinitial_ptr, cu_ptr, pid - programs,
            scale_in, scale, T, HV, HK, HX, first_head, heads, K, V, BK, BV, C, True, BEFORE,
            TRANSPOSED, PACKED, PARTS, PRECISION,
        )  # fmt: skip
