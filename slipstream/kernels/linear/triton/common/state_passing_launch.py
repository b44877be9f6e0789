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
    E: Tensor | None = None,
    m_is_zero: Tensor | None = None,
) -> None:
    """states: what each segment adds becomes the state before it; reverse: their gradients.

    Args:
        M: [segments, HV, K, K]; there may be others beside its rows.
        exchange: is told what all of them come to before it is known what s_in has from other
            ranks.
        E: what segments add [segments, HV, K, V], as M; None: `states`.
        m_is_zero: of segments [segments, HV], where M is not written; None: nowhere.
    """

    def run(states: Tensor, s_out: Tensor | None) -> None:
        _launch(terms, segments, states, M, s_in, s_out, reverse, E, m_is_zero)

    def transition() -> Tensor:
        if m_is_zero is None:
            return M
        return torch.where(m_is_zero[..., None, None] == 0, M, 0.0)

    pass_states(run, states, s_out, terms, segments, transition, exchange, E is not None)


def _launch(
    terms: LinearInputs,
    segments: Segments,
    states: Tensor,
    M: Tensor,
    s_in: Tensor | None,
    s_out: Tensor | None,
    reverse: bool,
    E: Tensor | None,
    m_is_zero: Tensor | None,
) -> None:
    T, HV, V = terms.v.shape[1:]
    K = terms.q.shape[-1]
    tile, BK = tile_of(terms)
    BV = tile.fwd.B
    inner = "halves" if tile.tma and terms.q.dtype != torch.float32 else "tf32x3"
    launch: Any = cached(delta_state_passing_kernel)[(-(-V // BV) * HV * terms.sequences,)]
    launch(
        s_ptr=states,
        e_ptr=states if E is None else E,
        m_ptr=M,
        m_is_zero_ptr=m_is_zero,
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
        E_WIDTH=V if E is None else E.stride(2),
        M_WIDTH=M.stride(2),
        MASKED=m_is_zero is not None,
        REVERSE=reverse,
        HAS_S_IN=s_in is not None,
        HAS_S_OUT=s_out is not None,
        PACKED=terms.cu_seqlens is not None,
        INNER="ieee" if INTERPRETED else inner,
        num_warps=8,
        num_stages=1,
    )
