"""States that segments of a sequence begin with, where nothing but decay changes a state.

    S <- D S + E, segment after segment; for gradients from the last to the first

E is what a segment adds, D its decay: of the whole state, of each row or of each column.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.linear import inputs, segments
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
