"""Launches of the delta rule's backward in one kernel on sm_90.

It leaves the states of chunks in memory and nothing else: dv comes where w was. How many states
there are at a time says bwd_schedule.py. Forward leaves the state before each part of a sequence,
or runs once more before this.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import Exchange
from slipstream.kernels.linear.delta import WYFactors
from slipstream.kernels.linear.inputs import LinearInputs, sum_grouped_heads
from slipstream.kernels.linear.segments import CHUNK, NUM_SMS, size_args
from slipstream.kernels.linear.sm90.common.tma import tma_descriptor
from slipstream.kernels.linear.sm90.delta import segment_launch
from slipstream.kernels.linear.sm90.delta.bwd_fused import delta_chunk_bwd_sm90_kernel
from slipstream.kernels.linear.sm90.delta.bwd_schedule import BackwardSchedule
from slipstream.runtime.backends import FEWER_REGISTERS
from slipstream.runtime.launch_cache import cached

# of tiles that are loaded ahead, and channels of one, as backend.py's descriptors have them
STAGES, TILE_K = 2, 64
# By V: registers of all warps, of those of the gradients, and of those that load and write.
BWD_OPTIONS: dict[int, dict[str, Any]] = {
    64: {"num_warps": 4, "maxnreg": 168, "REGISTERS": 208, "LOAD_REGISTERS": 32},
    128: {"num_warps": 8, "maxnreg": 128, "REGISTERS": 184, "LOAD_REGISTERS": 24},
}


def backward(
    terms: LinearInputs,
    do: Tensor,
    dfinal: Tensor | None,
    wy: WYFactors,
    scale: float,
    dstate: Tensor | None,
    schedule: BackwardSchedule,
    grads: dict[str, Tensor],
    checkpoints: Tensor,
    exchange: Exchange | None,
) -> dict[str, Tensor]:
    """As DeltaBackend.gradients.

    Args:
        grads: of empty_grads.
        checkpoints: the states before each part of a sequence, as forward left them.
    """
    ds_in, segments = dfinal, schedule.segments
    if exchange is not None:
        cut = exchange.segments(terms, segments, CHUNK)
        if cut is not None:
            ends = dfinal, cut, exchange
            dstates = segment_launch.entry_dstates(terms, do, wy, scale, *ends)
            ds_in = dfinal if segments is None else dstates
    elif segments is not None:
        M, m_is_zero = segment_launch.segment_transition(terms, wy, None, segments, alone=True)
        dE = segment_launch.segment_transition_bwd(terms, do, wy, scale, dfinal, segments)
        ds_in = segment_launch.state_passing(
            terms, dE, M, m_is_zero, dfinal, segments, reverse=True
        )
        del M, dE
    ends = {"s_in": ds_in, "s_out": dstate}
    launch_bwd_fused(terms, do, wy, scale, checkpoints, grads, schedule, **ends)
    H = terms.q.shape[2]
    return grads | {name: sum_grouped_heads(grads[name], H) for name in "qk"}


def empty_grads(terms: LinearInputs, do: Tensor, heads_per_sum: int) -> dict[str, Tensor]:
    """Memory for the gradients; that of v also holds w meanwhile."""
    B, T, HV = terms.v.shape[:3]
    heads, K = HV // heads_per_sum, terms.q.shape[3]
    grads = {name: do.new_empty(B, T, heads, K) for name in "qk"}
    for name in ("beta", "g"):
        if getattr(terms, name) is not None:
            grads[name] = do.new_empty(B, T, HV, dtype=torch.float32)
    return grads | {"v": do.new_empty(do.shape)}


def launch_bwd_fused(
    terms: LinearInputs,
    do: Tensor,
    wy: WYFactors,
    scale: float,
    checkpoints: Tensor,
    grads: dict[str, Tensor],
    schedule: BackwardSchedule,
    *,
    s_in: Tensor | None,
    s_out: Tensor | None,
) -> None:
    """Into grads.

    Args:
        s_in: gradients of the states after sequences; those after segments, in float32, are
            overwritten.
    """
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    heads, w, beta_gate = grads["q"].shape[2], grads["v"], wy.beta_gate
    segments, programs = schedule.segments, schedule.programs(terms)
    workspaces = min(programs, NUM_SMS)
    semaphores = beta_gate.shape[0] * heads if heads < HV else 0
    states = w.new_empty(workspaces * max(schedule.interval - 2, 1), V, K)
    run: Any = cached(delta_chunk_bwd_sm90_kernel)[(programs,)]
    run(
        q_desc=tma_descriptor(terms.q, H * K, CHUNK, K),
        k_desc=tma_descriptor(terms.k, H * K, CHUNK, K),
        v_desc=tma_descriptor(terms.v, HV * V, CHUNK, V),
        do_desc=tma_descriptor(do, HV * V, CHUNK, V),
        r_desc=tma_descriptor(wy.r, HV * CHUNK, CHUNK, CHUNK),
        dv_desc=tma_descriptor(w, HV * V, CHUNK, V),  # dv comes where w was
        states_desc=tma_descriptor(states, K, V, K),
        checkpoints_desc=tma_descriptor(checkpoints, K, V, K),
        dq_desc=tma_descriptor(grads["q"], heads * K, CHUNK, K),
        dk_desc=tma_descriptor(grads["k"], heads * K, CHUNK, K),
        dq_ptr=grads["q"],
        dk_ptr=grads["k"],
        dv_ptr=w,
        park_ptr=None if segments else beta_gate.new_empty(workspaces, V, K),
        beta_gates_ptr=beta_gate,
        dbeta_ptr=grads["beta"],
        dg_ptr=grads.get("g"),
        s_in_ptr=s_in,
        s_out_ptr=s_out,
        cu_ptr=terms.cu_seqlens,
        counts_ptr=w.new_zeros(workspaces + semaphores, dtype=torch.int32),
        scale=scale,
        **size_args(terms, segments),
        G=HV // heads,
        every=schedule.interval,
        workspaces=workspaces,
        K=K,
        V=V,
        BK=TILE_K,
        C=CHUNK,
        ST=STAGES,
        WARPS=V // 16,
        HAS_GATE=terms.g is not None,
        HAS_S_IN=s_in is not None,
        HAS_S_OUT=s_out is not None,
        PACKED=terms.cu_seqlens is not None,
        SPLIT=segments is not None,
        GROUPED_HEADS=heads < HV,
        **BWD_OPTIONS[V],
        **FEWER_REGISTERS,
    )
