"""Delta rule: the state that each segment of a split sequence meets (delta/chunk.py).

    S <- M S + E, segment after segment; for gradients, from the last to the first, dS <- M^T dS + E

with V as the rows, as the scans have it, and in float32.

States that segments of a sequence begin with, where nothing but decay changes a state.

    S <- D S + E, segment after segment; for gradients from the last to the first

E is what a segment adds, D its decay: of the whole state, of each row or of each column.
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


@triton.jit
def _load_segment(
    states_ptr, total_ptr, at, exists, o, m, o_d, D: tl.constexpr, SIZE: tl.constexpr
):
    """A segment's addition to the state, and its decay."""
    m = m & exists
    b_e = tl.load(states_ptr + at * SIZE + o, mask=m, other=0.0)
    b_d = 1.0
    if D > 0:
        b_d = tl.load(total_ptr + at * D + o_d, mask=m, other=0.0)
    elif total_ptr is not None:
        b_d = tl.exp2(tl.load(total_ptr + at, mask=exists, other=0.0))
    return b_e, b_d


@triton.jit(do_not_specialize=["scale_in", "scale_out", "T", "N", "HV", "segment"])
def decay_state_passing_kernel(
    states_ptr,  # [segments, HV, SIZE]: what a segment adds; becomes the state that it meets
    total_ptr,  # [segments, HV, D]; or [segments, HV], in base 2, if D is 0; None is no decay
    s_in_ptr,  # [N, HV, SIZE], times scale_in
    s_out_ptr,  # the same, times scale_out
    cu_ptr,  # [N + 1]
    scale_in, scale_out, T, N, HV, segment,
    D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
    COLUMNS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """grid (ceil(SIZE / BLOCK) * HV * N,): one program follows a part of one state.

    A state is [D, SIZE / D], or the other way round if its COLUMNS decay.
    """
    pid = tl.program_id(0)
    NB: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    i_h = (pid // NB) % HV
    i_n = (pid // NB // HV).to(tl.int64)
    o = (pid % NB) * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    o_d = o
    if D > 0:
        o_d = o % D if COLUMNS else o // (SIZE // D)
    if PACKED:
        begin = tl.maximum(tl.load(cu_ptr + i_n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_ptr + i_n + 1).to(tl.int64), T)
        i_seg = begin // segment + i_n
        count = tl.cdiv(tl.maximum(end - begin, 0), segment).to(tl.int32)
    else:
        count = tl.cdiv(T, segment)
        i_seg = i_n * count
    o_io = (i_n * HV + i_h) * SIZE + o
    if s_in_ptr is not None:
        b_s = tl.load(s_in_ptr + o_io, mask=m, other=0.0).to(tl.float32) * scale_in
    else:
        b_s = tl.zeros((BLOCK,), tl.float32)
    step = -HV if REVERSE else HV
    at = (i_seg + (count - 1 if REVERSE else 0)) * HV + i_h
    b_e, b_d = _load_segment(states_ptr, total_ptr, at, count > 0, o, m, o_d, D, SIZE)
    for i in range(count):
        # before the store, which no later load may overtake: else each waits for the one before
        b_next, b_d_next = _load_segment(
            states_ptr, total_ptr, at + step, i + 1 < count, o, m, o_d, D, SIZE
        )
        tl.store(states_ptr + at * SIZE + o, b_s, mask=m)
        b_s = b_s * b_d + b_e
        b_e, b_d = b_next, b_d_next
        at += step
    if s_out_ptr is not None:
        tl.store(s_out_ptr + o_io, (b_s * scale_out).to(s_out_ptr.dtype.element_ty), mask=m)


def decay_state_passing(
    chunks: Any, terms: inputs.LinearInputs, segments: segments.Segments, states: Tensor
) -> None:
    """states [segments, HV, ...]: what segments add; becomes the states before them.

    Args:
        chunks: the launch that the states are for; s_out is written, if given, total is the decay.
    """
    size, total = states[0, 0].numel(), chunks.total
    HV, block = states.shape[1], 1024  # numbers of a state that a program follows
    cached(decay_state_passing_kernel)[-(-size // block) * HV * terms.sequences,](
        states_ptr=states,
        total_ptr=total,
        s_in_ptr=chunks.s_in,
        s_out_ptr=chunks.s_out,
        cu_ptr=terms.cu_seqlens,
        # of fixed segments backend.py scales states, once for each sequence (unscaled, scaled)
        scale_in=1.0 if segments.fixed else chunks.scale_in,
        scale_out=1.0 if segments.fixed else chunks.scale_out,
        T=terms.v.shape[1],
        N=terms.sequences,
        HV=HV,
        segment=segments.tokens,
        D=0 if total is None or total.dim() == 2 else total.shape[2],
        SIZE=size,
        BLOCK=block,
        REVERSE=chunks.reverse,
        COLUMNS=terms.gv is not None,
        PACKED=terms.cu_seqlens is not None,
        num_warps=4,
    )


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
