"""Launches with a decay per channel on sm_90: the scans in Gluon, and Triton's kernels around them.

Forward is one scan (chunk_fwd.py), which leaves nothing but o and the final state; of few heads and
long sequences segments are scanned at once, from states that it makes first, without o. Backward
is that scan reversed for dv, the two for dqs and dke (chunk_dqk.py), and Triton's kernels for P and
for what chunks add by themselves (triton/vector_decay/dqkg.py); where those cut a sequence, they
are Triton's altogether. Memory beyond results: forward a state a segment; backward P, half of k,
and a state every ANCHOR_INTERVAL chunks.

Nothing depends on device values.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities, Exchange, pass_states
from slipstream.kernels.linear.inputs import LinearInputs, sum_grouped_heads
from slipstream.kernels.linear.prefix_states import NO_POINTERS, PrefixStates
from slipstream.kernels.linear.segments import (
    ANCHOR_INTERVAL,
    CHUNK,
    Segments,
    num_sequences,
    size_args,
    vector_decay_sm90,
)
from slipstream.kernels.linear.sm90.common.tma import align16, align_for_tma, tma_descriptor
from slipstream.kernels.linear.sm90.vector_decay.chunk_dqk import vector_decay_dqk_sm90_kernel
from slipstream.kernels.linear.sm90.vector_decay.chunk_fwd import vector_decay_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.triton.common.decay_state_passing import decay_state_passing
from slipstream.kernels.linear.triton.vector_decay import backend as triton
from slipstream.kernels.linear.triton.vector_decay.launch import (
    ChunkLaunch,
    GateSums,
    IntraChunk,
    gate_sums,
)
from slipstream.runtime.backends import device_of
from slipstream.runtime.launch_cache import cached

# columns of a tile of TMA; tiles that are loaded ahead, and those of the segments' kernel
HALF, STAGES, SEGMENT_STAGES = 64, 2, 3
# what the z of a chunk is not known beyond (triton/vector_decay/chunk.py)
NEGLIGIBLE_LOG2 = 2.0**-10
CAPABILITIES = BackendCapabilities(exchanges=True)
# of 16 warps: what all parts of a program share
_PROGRAM = {"num_warps": 4, "maxnreg": 128}


def forward(
    terms: LinearInputs,
    scale: float,
    exchange: Exchange | None = None,
    prefix: PrefixStates | None = None,
) -> tuple[Tensor, Tensor]:
    """As Triton's, which it is where q is float32."""
    if terms.q.dtype == torch.float32:
        return triton.forward(terms, scale, exchange=exchange, prefix=prefix)
    terms = align_for_tma(triton.to_kernel_layout(terms))
    o = torch.empty_like(terms.v)
    final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
    s_in, s_out, segments = terms.initial_state, final, vector_decay_sm90(terms)
    if exchange is not None:
        segments = exchange.segments(terms, segments, CHUNK)
    with device_of(o.device):
        if segments is not None:
            s_in, s_out = entry_states(terms, segments, final, exchange), None
        chunk_fwd(terms, terms.v, o, scale, s_in, s_out, segments=segments, prefix=prefix)
    return o, final


def entry_states(
    terms: LinearInputs, segments: Segments, final: Tensor, exchange: Exchange | None = None
) -> Tensor:
    """The states before segments [count, HV, K, V]; final is written."""
    k, v = terms.k, terms.v
    K, (HV, V) = k.shape[-1], v.shape[2:]
    states = final.new_empty(segments.count, HV, K, V)
    total = final.new_empty(segments.count, HV, K)
    chunk_fwd(terms, v, None, 1.0, None, states, segments=segments, total=total)

    def run(states: Tensor, s_out: Tensor | None) -> None:
        ends = ChunkLaunch(terms.q, k, v, s_in=terms.initial_state, s_out=s_out, total=total)
        decay_state_passing(ends, terms, segments, states)

    pass_states(run, states, final, terms, segments, lambda: total[..., None], exchange)
    return states


def backward(
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    exchange: Exchange | None = None,
) -> dict[str, Tensor]:
    """As Triton's, which it is where q is float32, or where ranks exchange states."""
    if terms.q.dtype == torch.float32 or exchange is not None:
        return triton.backward(terms, dout, dfinal, scale, exchange=exchange)
    given = terms
    terms = align_for_tma(triton.to_kernel_layout(terms))
    problem = triton.make_problem(terms, terms.v)
    if problem.segments is not None:
        return triton.backward(given, dout, dfinal, scale)
    if dout is None or scale == 0.0:
        do = torch.zeros_like(terms.v)
    else:
        do = align16(dout.to(terms.v.dtype).contiguous())
    problem, scale = problem._replace(do=do), scale or 1.0  # o does not depend on q, k, v then
    dfinal = None if dfinal is None else dfinal.contiguous()
    shape = (*do.shape[:3], terms.q.shape[-1])
    dq, dk = do.new_empty(shape), do.new_empty(shape)
    dv, dg = torch.empty_like(do), torch.empty_like(problem.g)
    state, u, dinitial, du = terms.initial_state, terms.u, None, None
    if state is not None:
        dinitial = state.new_empty(terms.state_shape)
    if u is not None:
        du = u.new_empty(problem.chunks, *u.shape, dtype=torch.float32)
    ends: dict[str, Any] = {"scale_in": 1 / scale, "reverse": True}
    with device_of(do.device):
        sums = gate_sums(problem)
        # of slots that no chunk has too, whose part of the gradient of u has to be 0
        make = torch.empty if u is None or terms.cu_seqlens is None else torch.ones
        decay = make(problem.chunks, *shape[2:], dtype=torch.float32, device=do.device)
        chunk_dqk(terms, do, dq, state, sums, decay)
        chunk_dqk(terms, do, dk, dfinal, sums, decay, **ends)
        chunk_fwd(terms, do, dv, scale, dfinal, dinitial, **ends, scale_out=scale)
        intra = IntraChunk(None, terms.k, None, decay)
        more = {"dqs": dq, "dke": dk, "z": sums.z, "dq": dq, "dk": dk, "dg": dg, "du": du}
        triton.launch_grads(problem, intra, triton.choose_pairs(problem), scale, **more)
    dq, dk = (sum_grouped_heads(x, terms.q.shape[2]) for x in (dq, dk))
    grads = {"q": dq, "k": dk, "v": dv, "g": dg}
    if u is not None and du is not None:
        grads["u"] = du.sum(0).to(u.dtype)
    if dinitial is not None:
        grads["initial_state"] = dinitial
    return triton.to_input_layout(grads, given)


def chunk_fwd(
    terms: LinearInputs,
    x: Tensor,
    y: Tensor | None,
    scale: float,
    s_in: Tensor | None,
    s_out: Tensor | None,
    scale_in: float = 1.0,
    scale_out: float = 1.0,
    reverse: bool = False,
    segments: Segments | None = None,
    prefix: PrefixStates | None = None,
    total: Tensor | None = None,
) -> None:
    """x: v or, reverse, do; y: o or dv. s_in is that of segments, if cut. Without y, E of segments
    into s_out, and total."""
    q, g, u = terms.q, terms.g, None if y is None else terms.u
    assert g is not None
    K, X = q.shape[-1], x.shape[-1]
    launch: Any = cached(vector_decay_chunk_fwd_sm90_kernel)[
        (x.shape[2] * num_sequences(terms, segments),)
    ]
    launch(
        q_desc=None if y is None else _tiles(q, K),
        k_desc=_tiles(terms.k, K),
        x_desc=_tiles(x, HALF),
        g_desc=_tiles(g, K),
        y_desc=None if y is None else _tiles(y, HALF),
        y_ptr=y,
        u_ptr=u,
        s_in_ptr=s_in,
        s_out_ptr=s_out,
        total_ptr=total,
        **(prefix.pointers() if prefix else NO_POINTERS),
        scale=scale,
        scale_in=scale_in,
        scale_out=scale_out,
        **_sizes(terms, segments),
        K=K,
        X=X,
        C=CHUNK,
        ST=SEGMENT_STAGES if y is None else STAGES,
        LEVELS=CHUNK.bit_length() - 1,
        SHIFT=triton.SHIFT[q.dtype],
        HAS_U=u is not None,
        HAS_S_OUT=s_out is not None,
        SPLIT=segments is not None,
        **_flags(terms, s_in, reverse),
    )


def chunk_dqk(
    terms: LinearInputs,
    do: Tensor,
    y: Tensor,
    s_in: Tensor | None,
    sums: GateSums,
    decay: Tensor,
    scale_in: float = 1.0,
    reverse: bool = False,
) -> None:
    """y: dqs or, reverse, dke."""
    q, v, g = terms.q, terms.v, terms.g
    assert g is not None
    K, V = q.shape[-1], v.shape[-1]
    launch: Any = cached(vector_decay_dqk_sm90_kernel)[(v.shape[2] * terms.sequences,)]
    launch(
        q_desc=_tiles(q, K),
        k_desc=_tiles(terms.k, K),
        v_desc=_tiles(v, V),
        do_desc=_tiles(do, V),
        g_desc=_tiles(g, K),
        y_desc=_tiles(y, HALF),
        y_ptr=y,
        s_in_ptr=s_in,
        sums_ptr=sums.sums,
        z_ptr=sums.z,
        anchor_ptr=sums.anchors,
        decay_ptr=decay,
        scale_in=scale_in,
        **{name: x for name, x in _sizes(terms, None).items() if name != "segment"},
        K=K,
        V=V,
        C=CHUNK,
        ST=STAGES,
        ANCHOR_INTERVAL=ANCHOR_INTERVAL,
        LOST=NEGLIGIBLE_LOG2,
        BEFORE=terms.u is not None,
        **_flags(terms, s_in, reverse),
    )


def _sizes(terms: LinearInputs, segments: Segments | None) -> dict[str, Any]:
    """cu_ptr to segment."""
    return {"cu_ptr": terms.cu_seqlens, **size_args(terms, segments)}


def _flags(terms: LinearInputs, s_in: Tensor | None, reverse: bool) -> dict[str, Any]:
    return {
        "BOUND": triton.BOUND[terms.q.dtype],
        "REVERSE": reverse,
        "HAS_S_IN": s_in is not None,
        "PACKED": terms.cu_seqlens is not None,
        **_PROGRAM,
    }


def _tiles(x: Tensor, columns: int) -> Any:
    """A descriptor of x as rows of all heads, in tiles [CHUNK, columns]."""
    return tma_descriptor(x, x.shape[2] * x.shape[3], CHUNK, columns)
