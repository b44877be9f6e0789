"""Launches of the kernels of per-channel decay, and of free a and b: no synchronisation.

Forward: what needs no state (wy.py), that of strong chunks again (intra_safe.py), whose
programs end at once where there are none, then the walk. Backward computes that again, walks
twice, writing for each chunk and head S, dS', x and y, and takes all gradients from those at once.
Memory beyond results, in tensors of the size of v at K = V: forward 5.5 for delta, 7 for dplr;
backward 8 and 10 of one slice at a time (workspace.py), besides what is where the gradients of q
and k will be; with grouped heads the gradients of q, k, a, b for each value head.
"""

from collections.abc import Mapping
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton.delta.tiles import KernelTile
from slipstream.kernels.linear.triton.dplr.dqkg import dplr_dqkg_kernel
from slipstream.kernels.linear.triton.dplr.intra_safe import dplr_intra_safe_kernel
from slipstream.kernels.linear.triton.dplr.intra_safe_bwd import dplr_intra_safe_bwd_kernel
from slipstream.kernels.linear.triton.dplr.launch import (
    IntraChunk,
    chunk_dstate,
    chunk_fwd,
    entry_states,
    launch_options,
    run_segment_ends,
    tile_of,
)
from slipstream.kernels.linear.triton.dplr.scores import dplr_scores_kernel
from slipstream.kernels.linear.triton.dplr.tiles import ANCHORED_TILES, LIMIT
from slipstream.kernels.linear.triton.dplr.wy import dplr_wy_kernel
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.launch import contiguous
from slipstream.kernels.linear.workspace import iter_slices, reuse_or_empty, slice_chunks
from slipstream.runtime.backends import device_of, fp32_dot_precision
from slipstream.runtime.launch_cache import cached

CAPABILITIES = BackendCapabilities(writes_out=True, checkpoints=True)


class BackwardStates(NamedTuple):
    """By the names of chunk.py."""

    x: Tensor
    y: Tensor
    states: Tensor
    dstates: Tensor


def forward(
    terms: LinearInputs,
    scale: float,
    own: Any = None,
    out: tuple[Tensor, Tensor] | None = None,
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V], float32.

    Args:
        own: what splits, and launches prepare, walk, walk_back and, where takes_grads, scores and
            grads.
        out: memory for both.
        marks: memory for the states between spans of tokens, as many as there are and one more.
    """
    terms = _all_contiguous(terms)
    o, final = out or (
        terms.v.new_empty(terms.v.shape),
        terms.v.new_empty(terms.state_shape, dtype=torch.float32),
    )
    with device_of(o.device):
        prepared, C = _prepare(terms, scale, keep=False, own=own), tile_of(terms)[0].C
        for tokens, part, there, after in iter_slices(terms, o, final, marks):
            chunks = slice_chunks(tokens, C)
            some = IntraChunk._make(None if x is None else x[chunks] for x in prepared)
            run_segment_ends(part, some, there, after, own)
    return o, final


def backward(
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    own: Any = None,
    out: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype.

    Args:
        out: memory for some of them, which they take if it fits.
    """
    given = terms
    terms = _all_contiguous(terms)
    do = torch.zeros_like(terms.v) if dout is None else dout.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    dstate = None
    if terms.initial_state is not None:
        dstate = out.get("initial_state")
        if dstate is None:
            dstate = terms.initial_state.new_empty(terms.state_shape)
    with device_of(do.device):
        prepared = _prepare(terms, scale, keep=True, own=own, room=out)
        split, state, dend, after = entry_states(terms, do, prepared, dfinal, dstate, own)
        x, states = _saved_intra_chunk(terms, prepared)
        chunk_fwd(terms, prepared, own, x=x, states=states, s_in=state, split=split)
        # what is not read again gives its memory to what comes after it
        prepared = prepared._replace(u=prepared.qb)
        walked = BackwardStates(x, torch.empty_like(x), states, torch.empty_like(states))
        back = {"y": walked.y, "dstates": walked.dstates, "s_in": dend, "s_out": after}
        chunk_dstate(terms, do, prepared, own, **back, split=split)
        del state, dend, back
        prepared = prepared._replace(q=prepared.qb, w=prepared.qb, b=prepared.qb, r=None)
        strong = prepared.strong
        scores, dv, dbeta = _scores(terms, do, prepared, walked, scale, own, out)
        del prepared
        grads = _grads(terms, do, walked, scores, dbeta, strong, scale, own, out)
    grads["v"] = dv
    if dstate is not None:
        grads["initial_state"] = dstate
    for name in ("g", "beta"):
        if name in grads:
            like = getattr(given, name)
            grads[name] = grads[name].view(like.shape)
            if name not in out:  # where it is rounded on its way
                grads[name] = grads[name].to(like.dtype)
    return grads


def _all_contiguous(terms: LinearInputs) -> LinearInputs:
    names = ("a", "b", "g", "beta")
    given = {name: x for name in names if (x := getattr(terms, name)) is not None}
    return contiguous(terms)._replace(**{name: x.contiguous() for name, x in given.items()})


def _gate_options(terms: LinearInputs) -> dict[str, Any]:
    return {
        "DELTA": terms.beta is not None,
        "CHANNEL": terms.decay == "channel",
        # bfloat16 products are wrong in the interpreter
        "EXACT": terms.q.dtype == torch.float32 or INTERPRETED,
    }


@cache
def _triangles(device: torch.device, C: int, dtype: torch.dtype) -> Tensor:
    ones = torch.ones(C, C, device=device, dtype=dtype)
    return torch.stack([ones.tril(), ones.tril(-1)])


def _ones(terms: LinearInputs) -> Tensor:
    """What dplr_gates.triangle reads."""
    dtype = torch.float32 if _gate_options(terms)["EXACT"] else torch.bfloat16
    return _triangles(terms.q.device, tile_of(terms)[0].C, dtype)


def _num_chunks(terms: LinearInputs) -> int:
    """Chunks, at most (delta_solve.find_chunk)."""
    B, T = terms.q.shape[:2]
    C = tile_of(terms)[0].C
    return B * -(-T // C) if terms.cu_seqlens is None else T // C + terms.sequences


def _prepare(
    terms: LinearInputs,
    scale: float,
    *,
    keep: bool,
    own: Any = None,
    room: Mapping[str, Tensor] = MappingProxyType({}),
) -> IntraChunk:
    """room: memory that is free until the gradients are written."""
    _, T, HV, V = terms.v.shape
    H, K = terms.q.shape[2:]
    tile, WIDE = tile_of(terms)
    slots, C, v = _num_chunks(terms), tile.C, terms.v
    delta = terms.beta is not None
    size = (slots, HV, C, WIDE)
    out = IntraChunk(
        q=_within(room.get("q"), v, size),
        w=_within(room.get("k"), v, size),
        b=v.new_empty(slots, HV, C, WIDE),
        k=None if delta else v.new_empty(slots, HV, C, WIDE),
        u=v.new_empty(slots, HV, V, C, dtype=torch.float32),
        total=None if terms.g is None else v.new_empty(slots, HV, WIDE, dtype=torch.float32),
        qb=v.new_empty(slots, HV, C, C),
        qk=None if delta else v.new_empty(slots, HV, C, C),
        ak=v.new_empty(slots, HV, C, C) if keep and not delta else None,
        r=v.new_empty(slots, HV, C, C) if keep else None,
        strong=None if terms.g is None else v.new_empty(slots, HV, dtype=torch.int32),
    )
    # R is rounded to the inputs' dtype; C = 64 is wgmma's, which is slow with tf32
    # (delta/solve_tril.py)
    inner = fp32_dot_precision() if v.dtype == torch.float32 else "halves" if C == 64 else "tf32"
    given = (terms.q, terms.k, terms.a, terms.b, v, terms.g, terms.beta)
    ak = None if delta else out.ak if keep else out.qb  # never written if not keep
    made = (*out[:-3], ak, out.r if keep else out.qb, out.strong)
    sizes = (terms.cu_seqlens, scale, int(keep), T, terms.sequences, HV, H)
    options = {"K": K, "V": V, "WIDE": WIDE, "STEPS": tile.steps, **_gate_options(terms)}
    options["INNER"] = "ieee" if INTERPRETED else inner

    def run(kernel: Any, part: KernelTile, *args: Any, **flags: Any) -> None:
        flags |= {"BK": part.B, "BV": part.B, **options, **launch_options(terms, part)}
        cached(kernel)[(slots * HV,)](*given, *made, *args, *sizes, **flags)

    gated = terms.g is not None
    if own is not None:
        flags = {**options, **launch_options(terms, tile.prepare)}
        flags |= {"HAS_GATE": gated, "LIMIT": ANCHORED_TILES[v.dtype]}
        own.wy(given, made, sizes, slots * HV, flags)
        return out
    run(dplr_wy_kernel, tile.prepare, HAS_GATE=gated, LIMIT=ANCHORED_TILES[v.dtype])
    if gated:
        run(dplr_intra_safe_kernel, tile.prepare, _ones(terms), LIMIT=LIMIT[v.dtype])
    return out


def _within(room: Tensor | None, like: Tensor, size: tuple[int, ...]) -> Tensor:
    """In room, if it is of that many elements of the same dtype."""
    if room is not None and room.dtype == like.dtype and room.numel() == prod(size):
        return room.view(size)
    return like.new_empty(size)


def _saved_intra_chunk(terms: LinearInputs, prepared: IntraChunk) -> tuple[Tensor, Tensor]:
    """x and the states before each chunk, to be written."""
    slots, HV, V, C = prepared.u.shape
    v = terms.v
    return v.new_empty(slots, HV, V, C), v.new_empty(slots, HV, V, prepared.q.shape[-1])


def _scores(
    terms: LinearInputs,
    do: Tensor,
    prepared: IntraChunk,
    walked: BackwardStates,
    scale: float,
    own: Any = None,
    grads: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[list[Tensor | None], Tensor, Tensor | None]:
    """Gradients of qb, ab, qk, ak, and those of pairs (i, i); that of v; and the shares of beta's,
    of which the first is written.
    """
    B, T, HV, V = terms.v.shape
    tile, WIDE = tile_of(terms)
    delta = terms.beta is not None
    out = [None if delta and n > 1 else torch.empty_like(prepared.qb) for n in range(4)]
    dv, dbeta = reuse_or_empty(grads.get("v"), do.shape, do.dtype, do.device), None
    if delta:
        NK = -(-terms.q.shape[-1] // tile.grads.B)
        dbeta = do.new_empty(NK + 1, B, T, HV, dtype=torch.float32)
    same = do.new_empty(prepared.qb.shape[0], HV, 2, tile.C, dtype=torch.float32)
    if own is not None and terms.g is not None and own.supports_dqkg(terms, do):
        own.scores(terms, do, prepared, walked, out, same, dv, dbeta, scale)
        return [*out, same], dv, dbeta
    launch: Any = cached(dplr_scores_kernel)[(prepared.qb.shape[0] * HV,)]
    launch(
        terms.v,
        do,
        terms.beta,
        walked.x,
        walked.y,
        prepared.k,
        prepared.qk,
        prepared.ak,
        None if delta else walked.dstates,
        dv,
        dbeta,
        *out,
        same,
        terms.cu_seqlens,
        scale,
        T,
        terms.sequences,
        HV,
        V=V,
        WIDE=WIDE,
        BK=min(64, WIDE),
        BV=tile.scores.B,
        DELTA=delta,
        **launch_options(terms, tile.scores),
    )
    return [*out, same], dv, dbeta


def _grads(
    terms: LinearInputs,
    do: Tensor,
    walked: BackwardStates,
    scores: list[Tensor | None],
    dbeta: Tensor | None,
    strong: Tensor | None,
    scale: float,
    own: Any = None,
    out: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Gradients of q, k, and a, b, beta, g if given; that of beta in float32, and that of g
    in its dtype where it is of channels."""
    B, T, HV, V = terms.v.shape
    H, K = terms.q.shape[2:]
    tile, WIDE = tile_of(terms)
    shape = (B, T, HV, K)
    names = [n for n in "qkab" if getattr(terms, n) is not None]
    wide = {n: reuse_or_empty(out.get(n), shape, do.dtype, do.device) for n in names}
    gated = terms.g is not None
    dg = None
    if terms.g is not None:
        dtype = terms.g.dtype if terms.decay == "channel" else torch.float32
        dg = reuse_or_empty(out.get("g"), shape, dtype, do.device)
    ins = (terms.q, terms.k, terms.a, terms.b, terms.g, terms.beta)
    ins += (None if terms.a is None else terms.v, do, *walked, *scores)
    outs = (*(wide.get(name) for name in "qkab"), dg, dbeta, strong)
    sizes = (terms.cu_seqlens, scale, T, terms.sequences, HV, H, B * T)

    def run(kernel: Any, part: KernelTile, *args: Any, **flags: Any) -> None:
        flags |= {"K": K, "V": V, "WIDE": WIDE, "BK": part.B, "BV": part.B}
        grid = (-(-K // part.B) * HV * walked.x.shape[0],)
        cached(kernel)[grid](
            *ins,
            *outs,
            *args,
            *sizes,
            **flags,
            **_gate_options(terms),
            **launch_options(terms, part),
        )

    if own is not None and strong is not None and own.supports_dqkg(terms, do):
        own.chunk_dqkg(terms, do, walked, scores, strong, {**wide, "g": dg}, dbeta, scale)
    else:
        run(dplr_dqkg_kernel, tile.grads, HAS_GATE=gated)
        if gated:
            flags = {"STEPS": tile.steps, "LIMIT": LIMIT[do.dtype]}
            run(dplr_intra_safe_bwd_kernel, tile.grads, _ones(terms), **flags)
    if HV != H:
        groups, one = (B, T, H, HV // H, K), (B, T, H, K)
        for name, x in wide.items():
            there = reuse_or_empty(out.get(name), one, x.dtype, x.device)
            wide[name] = torch.sum(x.view(groups), 3, out=there)
    if dg is not None:
        wide["g"] = dg if terms.decay == "channel" else dg.sum(-1)
    if dbeta is not None:
        wide["beta"] = torch.sum(
            dbeta, 0, out=reuse_or_empty(out.get("beta"), (B, T, HV), torch.float32, do.device)
        )
    return wide
