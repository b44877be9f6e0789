"""Launches with a decay per channel: no synchronisation, nothing that depends on device values.

Forward: q and k times their decays to the edges of their chunk, and the scores within it, all
chunks at once (intra_fwd.py), then one scan (chunk.py). Backward: the same again, P =
do v^T within chunks, three scans, then the gradients on the side that decays (dqkg.py).

Memory beyond results, with K = V and chunks of 64: forward 2.5 times k;
backward 2.5 times k, less what there is room for where the gradient of the gate
will be, P half of k, and a state every ANCHOR_INTERVAL chunks a quarter of it in 16 bits; with
grouped heads the gradients of q and k for each value head; for a sequence in segments a state a
segment, once forward and twice backward.

Decay of the columns of the state, gv, is decay of the rows with the roles exchanged: with q, k, v
and do there for do, v, k and q here, dq there is o here, dk is dv, o is dq and dv is dk.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities, Exchange, scaled, unscaled
from slipstream.kernels.linear.inputs import LinearInputs, contiguous, sum_grouped_heads
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.kernels.linear.segments import NUM_SMS
from slipstream.kernels.linear.triton.common.gate_ones import gate_ones
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.tiles import family_of, power_of_two
from slipstream.kernels.linear.triton.vector_decay.dqkg import vector_decay_dqkg_kernel
from slipstream.kernels.linear.triton.vector_decay.intra_fwd import (
    vector_decay_intra_fwd_kernel,
    vector_decay_scores_kernel,
)
from slipstream.kernels.linear.triton.vector_decay.launch import (
    ChunkLaunch,
    IntraChunk,
    VectorDecayProblem,
    choose_segments,
    entry_states,
    gate_sums,
    launch,
    size_args,
)
from slipstream.kernels.linear.triton.vector_decay.tiles import KernelTile, VectorDecayTile, choose
from slipstream.runtime.backends import device_of, fp32_dot_precision
from slipstream.runtime.launch_cache import cache, cached

# What the gates of a block that subchunk_decay.py calls safe add up to at least, negated: its
# factors, exp of it at most, times k have to fit the dtype, and in float32 its rounding counts.
BOUND = {torch.bfloat16: 60.0, torch.float16: 6.0, torch.float32: 6.0}

# By how much the exponents of both factors are shifted to lie on both sides of 0, so that blocks
# may decay further: where 16 bits have float32's exponents, for others would lose small numbers.
SHIFT = {torch.bfloat16: 60.0, torch.float16: 0.0, torch.float32: 0.0}

# In base 2, how far both halves of a chunk are from its middle, which may then decay further
# (subchunk_decay.py).
APART = {torch.bfloat16: 55.0, torch.float16: 0.0, torch.float32: 0.0}

CAPABILITIES = BackendCapabilities(fp32_out=True, exchanges=True)
# Chunks a program of the kernels that most chunks do not need; and programs that fill any GPU.
MAX_PAIRS_SHARE = 32
TARGET_PROGRAMS = 4 * NUM_SMS


@cache
def _tile(device: torch.device, K: int, bytes_each: int) -> VectorDecayTile:
    return choose("interpreter" if INTERPRETED else family_of(device), K, bytes_each)


def forward(
    terms: LinearInputs,
    scale: float,
    dtype: torch.dtype | None = None,
    exchange: Exchange | None = None,
    prefix: PrefixStates | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in dtype, q's if None, and the final state [N, HV, K, V], float32.

    Args:
        prefix: states to leave on the way, of a call without gv.
    """
    terms = to_kernel_layout(terms)
    o = terms.v.new_empty(terms.v.shape, dtype=dtype)
    final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
    with device_of(o.device):
        _forward(terms, scale, o, final, exchange, prefix)
    return o, final


def _forward(
    terms: LinearInputs,
    scale: float,
    o: Tensor,
    final: Tensor,
    exchange: Exchange | None,
    prefix: PrefixStates | None,
) -> None:
    problem = make_problem(terms, None, exchange)
    wide = o.dtype if terms.gv is not None else problem.k.dtype
    p = _pairs_fit(problem, wide) if problem.q is None else None
    intra = _intra_chunk(problem, fine=wide != problem.k.dtype, p=p)
    state = terms.initial_state
    chunks = ChunkLaunch(intra.ke, intra.ke, problem.v, rest=intra.rest, s_in=state, s_out=final)
    if problem.segments is not None:
        chunks = entry_states(chunks, problem, intra, exchange)._replace(s_out=None)
    if p is None:
        chunks = chunks._replace(r=intra.qs, y=o, a=intra.a, scale=scale, prefix=prefix)
        launch(chunks, problem, intra)
    else:
        assert problem.do is not None
        launch(
            chunks._replace(r=problem.do, w=problem.v, x=intra.ke, y=o, rows=True), problem, intra
        )
        launch_grads(problem, intra, p, scale, dqs=o, dq=o)


def backward(
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    exchange: Exchange | None = None,
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    given = terms
    terms = to_kernel_layout(terms)
    do = (
        torch.zeros_like(terms.v)
        if dout is None or scale == 0.0
        else dout.to(terms.v.dtype).contiguous()
    )
    scale = scale or 1.0  # o does not depend on q, k, v then, and do is 0
    problem = make_problem(terms, do, exchange)
    q, v, over_v, g = problem.q, problem.v, problem.do, problem.g
    assert q is not None and over_v is not None
    wide = do.shape[:3]
    shape = (*wide, terms.q.shape[-1])
    dq, dk = (do.new_empty(shape) for _ in range(2))
    dv, dg = do.new_empty(do.shape), g.new_empty(g.shape)
    dk_here, dv_here = (dk, dv) if terms.gv is None else (dv, dk)
    dqs = dq if terms.gv is None else torch.empty_like(dv)
    state = terms.initial_state
    dinitial = None if state is None else state.new_empty(terms.state_shape)
    u = terms.u
    du = None if u is None else u.new_empty(problem.chunks, *u.shape, dtype=torch.float32)
    with device_of(do.device):
        intra = _intra_chunk(problem, memory=dg)
        assert intra.qs is not None
        states = ChunkLaunch(intra.qs, intra.ke, v, s_in=state)
        dv_chunks = ChunkLaunch(intra.ke, intra.qs, over_v, s_out=dinitial, reverse=True)
        dfinal = unscaled(None if dfinal is None else dfinal.contiguous(), scale, exchange)
        dv_chunks = dv_chunks._replace(s_in=dfinal, scale_in=1 / scale, scale_out=scale)
        if problem.segments is not None:
            states = entry_states(states, problem, intra)
            dv_chunks = entry_states(dv_chunks, problem, intra, exchange)._replace(s_out=None)
        sums = gate_sums(problem)
        dq_chunks = states._replace(r=over_v, w=v, x=intra.ke, y=dqs, other=intra.qs, rows=True)
        dk_chunks = dv_chunks._replace(
            r=v, w=over_v, x=intra.qs, y=dk_here, other=intra.ke, rows=True
        )
        launch(dq_chunks, problem, intra, sums)
        launch(dk_chunks._replace(s_out=None), problem, intra, sums)
        launch(dv_chunks._replace(y=dv_here, a=intra.a, scale=scale), problem, intra)
        if terms.gv is not None:
            launch(states._replace(y=dq, a=intra.a, scale=scale), problem, intra)
        more: dict[str, Any] = {"dq": dq} if terms.gv is None else {}
        more |= {"dqs": dqs, "dke": dk_here, "z": sums.z, "dk": dk_here, "dg": dg, "du": du}
        launch_grads(problem, intra, choose_pairs(problem), scale, **more)
    dq, dk = (sum_grouped_heads(x, terms.q.shape[2]) for x in (dq, dk))
    grads = {"q": dq, "k": dk, "v": dv, "gv" if terms.g is None else "g": dg}
    if u is not None and du is not None:
        grads["u"] = du.sum(0).to(u.dtype)
    if dinitial is not None:
        grads["initial_state"] = scaled(dinitial, scale, exchange)
    return to_input_layout(grads, given)


def to_kernel_layout(terms: LinearInputs) -> LinearInputs:
    """Everything as the kernels index it, the gate one a channel."""
    g, gv, u = terms.g, terms.gv, terms.u
    if gv is None:
        g = terms.v.new_zeros(terms.v.shape[:3]) if g is None else g
        g = g[..., None] if g.dim() == 3 else g
        g = g.expand(*g.shape[:3], terms.q.shape[-1]).contiguous()
    return contiguous(terms)._replace(
        g=g,
        gv=None if gv is None else gv.contiguous(),
        u=None if u is None else u.contiguous(),
    )


def to_input_layout(grads: dict[str, Tensor], given: LinearInputs) -> dict[str, Tensor]:
    """Without the gradient of a gate that was not given, and that of one a token summed."""
    if given.g is None:
        grads.pop("g", None)
    elif given.g.dim() == 3:
        grads["g"] = grads["g"].sum(-1)
    return grads


def make_problem(
    terms: LinearInputs, do: Tensor | None, exchange: Exchange | None = None
) -> VectorDecayProblem:
    """do: of backward."""
    backward = do is not None
    q, k, v, g = terms.q, terms.k, terms.v, terms.g
    if terms.gv is not None:
        q, k, v, g, do = do, v, k, terms.gv, q
    assert g is not None
    tile = _tile(k.device, k.shape[-1], k.element_size())
    problem = VectorDecayProblem(q, k, v, do, g, terms, tile, None)
    return problem._replace(segments=choose_segments(problem, exchange, backward))


def _intra_chunk(
    problem: VectorDecayProblem,
    memory: Tensor | None = None,
    fine: bool = False,
    p: Tensor | None = None,
) -> IntraChunk:
    """Args:
    memory: a tensor that is free until the gradients are written.
    fine: ke in two parts.
    p: memory for P, which is then computed too.
    """
    k, g, terms, C = problem.k, problem.g, problem.terms, problem.tile.C
    HV, K = g.shape[2:]
    free: list[Tensor] = []
    if memory is not None and memory.element_size() >= k.element_size():
        free = [x.view(g.shape) for x in memory.view(-1).view(k.dtype).split(g.numel())]

    def like_g() -> Tensor:
        return free.pop() if free else torch.empty(g.shape, dtype=k.dtype, device=k.device)

    has_q = problem.q is not None
    # With u the kernel would have 344 bytes of registers on the stack; with gates in 16 bits early
    # bits changed on an H100 (docs/dev/tried/vector-decay.md, 26 and 27 November).
    apart = APART[k.dtype] if terms.u is None and g.dtype == torch.float32 else 0.0
    intra = IntraChunk(
        like_g() if has_q else None,
        like_g(),
        k.new_empty(problem.chunks, HV, C, C) if has_q else None,
        k.new_empty(problem.chunks, HV, K, dtype=torch.float32),
        like_g() if fine else None,
        k.new_empty(problem.chunks, HV, dtype=torch.int32) if has_q and apart else None,
    )
    inputs: dict[str, Any] = {"q_ptr": problem.q, "k_ptr": k, "g_ptr": g}
    inputs |= {"u_ptr": terms.u if has_q else None, "HK": k.shape[2], **size_args(problem)}
    kernel_tile = problem.tile.prepare
    options: dict[str, Any] = {**_options(problem, kernel_tile), "K": K, "BOUND": BOUND[k.dtype]}
    outputs = {f"{name}_ptr": x for name, x in intra._asdict().items()}
    pairs, HX = {"v_ptr": None, "do_ptr": None, "p_ptr": None}, problem.v.shape[2]
    if p is not None:
        pairs = {"v_ptr": problem.v, "do_ptr": problem.do, "p_ptr": p}
    grouped = options["GROUPED"] or (p is not None and HX != HV)
    # ptxas takes 233 by itself, which leave a multiprocessor two programs in place of three
    registers = kernel_tile.registers if has_q and apart and K <= kernel_tile.BK else None
    cached(vector_decay_intra_fwd_kernel)[HV * problem.chunks,](
        **inputs,
        **outputs,
        **pairs,
        HX=HX,
        APART=apart,
        **{**options, "GROUPED": grouped},
        **_values(problem),
        **({} if registers is None else {"maxnreg": registers}),
    )
    if intra.a is not None:
        total = HV * problem.chunks
        options |= {
            **_bound(problem),
            "SHIFT": SHIFT[k.dtype],
            "APART": apart,
            "LEVELS": C.bit_length() - 1,
            "MAX_CHUNKS": MAX_PAIRS_SHARE,
            "num_stages": 1,
        }
        cached(vector_decay_scores_kernel)[_programs(total),](
            **inputs,
            decay_ptr=intra.decay,
            strong_ptr=intra.strong,
            a_ptr=intra.a,
            ones_ptr=_ones(problem),
            total=total,
            **options,
        )
    return intra


def choose_pairs(problem: VectorDecayProblem) -> Tensor:
    p, HV, HX = _pairs_fit(problem), problem.g.shape[2], problem.v.shape[2]
    absent = (f"{name}_ptr" for name in ("q", "k", "g", "u", *IntraChunk._fields))
    # the same whatever they would be, so that they compile nothing new
    unused = dict.fromkeys(("K", "BK", "BOUND", "APART", "BEFORE", "BF16_TERMS"), 0)
    options = _options(problem, problem.tile.prepare) | unused
    cached(vector_decay_intra_fwd_kernel)[HV * problem.chunks,](
        **dict.fromkeys(absent),
        v_ptr=problem.v,
        do_ptr=problem.do,
        p_ptr=p,
        **size_args(problem),
        HK=HV,
        HX=HX,
        **{**options, "GROUPED": HX != HV},
        **_values(problem),
    )
    return p


def _pairs_fit(problem: VectorDecayProblem, dtype: torch.dtype | None = None) -> Tensor:
    return problem.k.new_empty(
        problem.chunks, problem.g.shape[2], problem.tile.C, problem.tile.C, dtype=dtype
    )


def _values(problem: VectorDecayProblem) -> dict[str, int]:
    V = problem.v.shape[-1]
    return {"V": V, "BV": _tile(problem.k.device, V, problem.k.element_size()).prepare.BK}


def launch_grads(
    problem: VectorDecayProblem, intra: IntraChunk, p: Tensor, scale: float, **named: Tensor | None
) -> None:
    """named: dqs and dke, and what there is of the other tensors of dqkg.py."""
    kernel_tile, K, C = problem.tile.grads, problem.k.shape[-1], problem.tile.C
    total = -(-K // kernel_tile.BK) * problem.g.shape[2] * problem.chunks
    args: dict[str, Any] = {
        "q_ptr": problem.q if "dk" in named else None,
        "k_ptr": problem.k,
        "g_ptr": problem.g,
        "u_ptr": problem.terms.u,
        "p_ptr": p,
        **{f"{x}_ptr": named.get(x) for x in ("dqs", "dke", "z", "dq", "dk", "dg", "du")},
        "decay_ptr": intra.decay,
        "scale": scale,
        **size_args(problem),
        "HK": problem.k.shape[2],
    }
    apart = APART[problem.k.dtype] if "dk" in named else 0.0
    options: dict[str, Any] = {
        **_options(problem, kernel_tile),
        **_bound(problem),
        "K": K,
        "MAX_CHUNKS": MAX_PAIRS_SHARE,
        "LEVELS": C.bit_length() - 1,
        "SHIFT": SHIFT[problem.k.dtype],
        "APART": apart,
    }
    pieces = problem.k.new_empty(total, dtype=torch.int32) if apart else None

    def launch(PIECES: int, programs: int, **more: Any) -> None:
        cached(vector_decay_dqkg_kernel)[programs,](**args, **more, **options, PIECES=PIECES)

    launch(1, total, pieces_ptr=None, ones_ptr=None, total=None)
    for count in (2, 4) if apart else ():
        launch(count, _programs(total), pieces_ptr=pieces, ones_ptr=None, total=total)
    launch(0, _programs(total), pieces_ptr=pieces, ones_ptr=_ones(problem), total=total)


def _ones(problem: VectorDecayProblem) -> Tensor:
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    return gate_ones(problem.k.device, problem.tile.C, dtype)


def _programs(total: int) -> int:
    """Programs of up to MAX_PAIRS_SHARE chunks each: enough to fill a GPU, if there are."""
    return max(-(-total // MAX_PAIRS_SHARE), min(total, TARGET_PROGRAMS))


def _options(problem: VectorDecayProblem, kernel_tile: KernelTile) -> dict[str, Any]:
    k = problem.k
    bf16_terms = 1 if problem.g.dtype == torch.bfloat16 else 2
    if k.dtype == torch.float32:
        bf16_terms = 3
    return {
        "BK": kernel_tile.BK,
        "C": problem.tile.C,
        "BEFORE": problem.terms.u is not None,
        "PACKED": problem.terms.cu_seqlens is not None,
        "GROUPED": k.shape[2] != problem.g.shape[2],
        "BF16_TERMS": 0 if INTERPRETED else bf16_terms,
        "PRECISION": fp32_dot_precision(),
        "num_warps": kernel_tile.warps,
        "num_stages": kernel_tile.stages,
    }


def _bound(problem: VectorDecayProblem) -> dict[str, Any]:
    """By which a chunk is one safe block, or not."""
    return {"ALL": power_of_two(problem.k.shape[-1]), "BOUND": BOUND[problem.k.dtype]}
