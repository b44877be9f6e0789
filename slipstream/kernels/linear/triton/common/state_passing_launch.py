"""The launch between segments and their sequences: the state before each segment."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import Exchange, pass_states
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import Segments
from slipstream.kernels.linear.triton.common.state_passing import delta_state_passing_kernel
from slipstream.kernels.linear.triton.delta.plan import tile_of
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.runtime.launch_cache import cached


def state_passing(
    terms: LinearInputs,
    segments: Segments,
    states: Tensor,
    M: Tensor,
    s_in: Tensor | None,
    s_out: Tensor | None,
    reverse: bool = False,
    exchange: Exchange | None = None,
) -> None:
    """states: what each segment adds becomes the state before it; reverse: their gradients.

    Args:
        M: [segments, HV, K, K].
        exchange: is told what all of them come to before it is known what s_in has from other
            ranks.
    """

    def run(states: Tensor, s_out: Tensor | None) -> None:
        _launch(terms, segments, states, M, s_in, s_out, reverse)

    pass_states(run, states, s_out, terms, segments, lambda: M, exchange)


def _launch(
    terms: LinearInputs,
    segments: Segments,
    states: Tensor,
    M: Tensor,
    s_in: Tensor | None,
    s_out: Tensor | None,
    reverse: bool,
) -> None:
    T, HV, V = terms.v.shape[1:]
    K = terms.q.shape[-1]
    tile, BK = tile_of(terms)
    BV = tile.fwd.B
    inner = "halves" if tile.tma and terms.q.dtype != torch.float32 else "tf32x3"
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
        INNER="ieee" if INTERPRETED else inner,
        num_warps=8,
        num_stages=1,
    )
