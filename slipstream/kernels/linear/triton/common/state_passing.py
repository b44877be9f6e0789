"""Delta rule: the state that each segment of a split sequence meets (delta/chunk.py).

    S <- M S + E, segment after segment; for gradients, from the last to the first, dS <- M^T dS + E

with V as the rows, as the scans have it, and in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.linear import backend, inputs, segments
from slipstream.kernels.linear.triton.delta import chunk, plan, solve_tril
from slipstream.runtime.backends import fp32_dot_precision
from slipstream.runtime.launch_cache import cached


@triton.jit(do_not_specialize=["T", "HV", "segment"])
def delta_state_passing_kernel(
    s_ptr,  # [segments, HV, K, V]: E, which becomes the state that the segment meets
    m_ptr,  # [segments, HV, K, K]
    s_in_ptr,  # [N, HV, K, V]
    s_out_ptr,  # [N, HV, K, V]
    cu_ptr,  # [N + 1]
    T, HV, segment,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
    HAS_S_IN: tl.constexpr, HAS_S_OUT: tl.constexpr, PACKED: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """grid (ceil(V / BV) * HV * N,)"""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_h = (pid // NV) % HV
    i_n = (pid // NV // HV).to(tl.int64)
    _, length, first = chunk.locate_sequence(cu_ptr, i_n, T, segment, PACKED)
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
        b_s = solve_tril.tile_product(b_s, b_m, INNER) + b_e
    if HAS_S_OUT:
        tl.store(s_out_ptr + o_n, b_s.to(s_out_ptr.dtype.element_ty), mask=m_s)


def state_passing(
    terms: inputs.LinearInputs,
    segments: segments.Segments,
    states: Tensor,
    M: Tensor,
    s_in: Tensor | None,
    s_out: Tensor | None,
    reverse: bool = False,
    exchange: backend.Exchange | None = None,
) -> None:
    """states: what each segment adds becomes the state before it; reverse: their gradients.

    Args:
        M: [segments, HV, K, K].
        exchange: is told what all of them come to before it is known what s_in has from other
            ranks.
    """

    def run(states: Tensor, s_out: Tensor | None) -> None:
        T, HV, V = terms.v.shape[1:]
        K = terms.q.shape[-1]
        tile, BK = plan.tile_of(terms)
        BV = tile.fwd.B
        inner = "halves" if tile.tma and terms.q.dtype != torch.float32 else fp32_dot_precision()
        launch: Any = cached(delta_state_passing_kernel)[(-(-V // BV) * HV * terms.sequences,)]
        launch(
            s_ptr=states,
            m_ptr=M,
            s_in_ptr=s_in,
            s_out_ptr=s_out,
            cu_ptr=terms.cu_seqlens,
            T=T,
            HV=HV,
            segment=segments.tokens,
            K=K,
            V=V,
            BK=BK,
            BV=BV,
            REVERSE=reverse,
            HAS_S_IN=s_in is not None,
            HAS_S_OUT=s_out is not None,
            PACKED=terms.cu_seqlens is not None,
            INNER=inner,
            num_warps=8,
            num_stages=1,
        )

    backend.pass_states(run, states, s_out, terms, segments, lambda: M, exchange)
