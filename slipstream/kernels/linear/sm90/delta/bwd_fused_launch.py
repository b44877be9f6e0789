"""The delta rule's backward in one walk on sm_90: its launches.

It leaves S of chunks in memory and nothing else: dv comes where w was. How much of S there is at a
time says bwd_schedule.py. Forward leaves S before each part, or walks here once more.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90.delta import launch as sm90
from slipstream.kernels.linear.sm90.delta.bwd_fused import delta_chunk_bwd_sm90_kernel
from slipstream.kernels.linear.sm90.delta.bwd_schedule import (
    NUM_SMS,
    BackwardSchedule,
    empty_checkpoints,
)
from slipstream.kernels.linear.sm90.delta.launch import TILE_K, scalar_args, tma_descriptor
from slipstream.kernels.linear.sm90.plan import CHUNK
from slipstream.kernels.linear.triton.common.gqa_reduce import reduce_grouped_heads
from slipstream.kernels.linear.triton.common.zero_counters import zero_counters
from slipstream.kernels.linear.triton.delta.backend import WYFactors
from slipstream.kernels.linear.workspace import reuse_or_empty
from slipstream.runtime.launch_cache import cached

STAGES = 2
# By V: registers of all warps, of those of the gradients, and of those that load and write.
BWD_OPTIONS: dict[int, dict[str, Any]] = {
    64: {"num_warps": 4, "maxnreg": 168, "REGISTERS": 208, "FEW": 32},
    128: {"num_warps": 8, "maxnreg": 128, "REGISTERS": 184, "FEW": 24},
}


def backward(
    terms: LinearInputs,
    do: Tensor,
    dfinal: Tensor | None,
    solved: WYFactors,
    scale: float,
    dstate: Tensor | None,
    out: Mapping[str, Tensor],
    *,
    cut: BackwardSchedule,
    together: int,
    forward: Callable[[Tensor, Tensor], None],
    left: Sequence[Tensor] = (),
) -> dict[str, Tensor]:
    """As portable.backward has them, into dstate too.

    Args:
        together: value heads whose gradients of q and k are added up at once.
        forward: called as forward(o, marks) leaves S before each part.
        left: that, where forward did.
    """
    made = _results(terms, do, out, together)
    marks = left[0] if left else empty_checkpoints(terms, cut)
    if not left:
        forward(made["v"], marks)
    after = dfinal
    if cut.slots:
        segment = cut.tokens, cut.slots
        M, far = sm90.segment_transition(terms, solved, None, segment, alone=True)
        dE = sm90.segment_transition_bwd(terms, do, solved, scale, dfinal, segment)
        after = sm90.state_passing(terms, dE, M, far, dfinal, segment, back=True)
        del M, dE
    launch_bwd_fused(terms, do, solved, scale, marks, made, cut, s_in=after, s_out=dstate)
    H = terms.q.shape[2]
    return made | {name: reduce_grouped_heads(made[name], H, out.get(name)) for name in "qk"}


def _results(
    terms: LinearInputs, do: Tensor, out: Mapping[str, Tensor], together: int
) -> dict[str, Tensor]:
    B, T, HV = terms.v.shape[:3]
    like = (B, T, HV // together, terms.q.shape[3]), do.dtype, do.device
    made = {name: reuse_or_empty(out.get(name), *like) for name in "qk"}
    for name in ("beta", "g"):
        if getattr(terms, name) is not None:
            made[name] = reuse_or_empty(out.get(name), (B, T, HV), torch.float32, do.device)
    made["v"] = reuse_or_empty(out.get("v"), do.shape, do.dtype, do.device)
    return made


def launch_bwd_fused(
    terms: LinearInputs,
    do: Tensor,
    solved: WYFactors,
    scale: float,
    marks: Tensor,
    made: dict[str, Tensor],
    cut: BackwardSchedule,
    *,
    s_in: Tensor | None,
    s_out: Tensor | None,
) -> None:
    """What sm90.walk_back and sm90.grads do. Into made, as those have it.

    Args:
        marks: of marks_like.
        s_in: gradients of the states after sequences; after segments, in float32, which are
            spent.
    """
    HV, V = terms.v.shape[2:]
    H, K = terms.q.shape[2:]
    heads, w, rows = made["q"].shape[2], made["v"], solved.rows
    segment = (cut.tokens, cut.slots) if cut.slots else None
    programs = cut.programs(terms)
    slots, turns = min(programs, NUM_SMS), rows.shape[0] * heads if heads < HV else 0
    states = w.new_empty(slots * max(cut.every - 2, 1), V, K)
    launch: Any = cached(delta_chunk_bwd_sm90_kernel)[(programs,)]
    launch(
        *(tma_descriptor(x, H * K, CHUNK, K) for x in (terms.q, terms.k)),
        *(tma_descriptor(x, HV * V, CHUNK, V) for x in (terms.v, do)),
        tma_descriptor(solved.r, HV * CHUNK, CHUNK, CHUNK),
        tma_descriptor(w, HV * V, CHUNK, V),
        *(tma_descriptor(x, K, V, K) for x in (states, marks)),
        *(tma_descriptor(made[name], heads * K, CHUNK, K) for name in "qk"),
        made["q"],
        made["k"],
        w,
        None if segment else rows.new_empty(slots, V, K),
        rows,
        made["beta"],
        made.get("g"),
        s_in,
        s_out,
        terms.cu_seqlens,
        zero_counters(slots + turns, w),
        scale,
        *scalar_args(terms, None)[:4],
        HV // heads,
        scalar_args(terms, segment)[4],
        cut.every,
        slots,
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
        SPLIT=segment is not None,
        SHARED=heads < HV,
        **BWD_OPTIONS[V],
    )
