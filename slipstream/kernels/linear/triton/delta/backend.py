"""Launches of the delta rule's kernels: no synchronisation, nothing that depends on device values.

Forward: R (solve_tril.py), then the walk. Backward takes R, or computes it again, and walks twice,
writing for each chunk and head S, dS', w and dv, then takes all other gradients from those at once.
At C = 64 and K = V = 128 in 16 bits S is 32 KB, a chunk of w 16 KB: without S the gradients'
kernel, which is parallel over chunks, would have to walk. Memory beyond results, in tensors of the
size of v: R is C / V of one; w one and the states K / C each, of one slice at a time
(workspace.py); with grouped heads the gradients of q, k, p for each value head; for a sequence that
is split, two states a segment.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton.common.gqa_reduce import reduce_grouped_heads
from slipstream.kernels.linear.triton.common.state_passing_launch import state_passing
from slipstream.kernels.linear.triton.delta.chunk import (
    delta_chunk_dstate_kernel,
    delta_chunk_fwd_kernel,
)
from slipstream.kernels.linear.triton.delta.dqkg_launch import launch_dqkg
from slipstream.kernels.linear.triton.delta.plan import (
    choose_split,
    is_oversubscribed,
    launch_options,
    num_chunks,
    num_segments_and_sequences,
    state_descriptor,
    states_like,
    tile_of,
    tma_descriptor,
    uses_split_bf16,
)
from slipstream.kernels.linear.triton.delta.solve_tril import BASE, delta_solve_tril_kernel
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.launch import Segments, contiguous
from slipstream.kernels.linear.workspace import iter_slices, reuse_or_empty, slice_chunks
from slipstream.runtime.backends import device_of, fp32_dot_precision
from slipstream.runtime.launch_cache import cached

CAPABILITIES = BackendCapabilities(writes_out=True, checkpoints=True)


class WYFactors(NamedTuple):
    """By the names of solve_tril.py; growth: of another implementation, which wants it."""

    r: Tensor
    rows: Tensor
    growth: Tensor | None = None


class DeltaBackend(NamedTuple):
    """What launches the inverse, both walks and the gradients instead of the kernels of _solve,
    launch_walk, _walk_back, _grads, and how it splits sequences.

    together: how many value heads that share q and k have those gradients added up by `grads`.
    back: all of backward that comes after the inverse, where it takes the call.
    meet: the state that each segment meets, and what meet_back wants of it. Its walks write the
    states at the ends of sequences themselves.
    """

    solve: Callable[[LinearInputs, Tensor, Tensor], WYFactors]
    walk: Callable[..., None]
    walk_back: Callable[..., None]
    grads: Callable[..., None]
    together: Callable[[LinearInputs], int]
    split: Callable[[LinearInputs], Segments | None]
    meet: Callable[[LinearInputs, WYFactors, Segments], tuple[Tensor, Any]]
    meet_back: Callable[..., Tensor]
    back: Callable[..., dict[str, Tensor]] | None = None


def forward(
    terms: LinearInputs,
    scale: float,
    own: DeltaBackend | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V], float32.

    Args:
        own: another implementation's.
        out: memory for both.
        marks: memory for the states between spans of tokens, as many as there are and one more.
    """
    return forward_with_wy(terms, scale, own, out, marks)[:2]


def forward_with_wy(
    terms: LinearInputs,
    scale: float,
    own: DeltaBackend | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor, WYFactors]:
    """Those, and what backward need not compute once more: C / V of v's size, and a little."""
    terms = _prepare(terms)
    o, final = out or (
        terms.v.new_empty(terms.v.shape),
        terms.v.new_empty(terms.state_shape, dtype=torch.float32),
    )
    with device_of(o.device):
        solved = _solve_tril(terms, own)
        for tokens, part, there, after in iter_slices(terms, o, final, marks):
            run_chunks(part, _part(solved, tokens), scale, there, after, own)
    return o, final, solved


def run_chunks(
    terms: LinearInputs,
    solved: WYFactors,
    scale: float,
    o: Tensor,
    final: Tensor | None,
    own: DeltaBackend | None,
) -> None:
    """o and, if it is wanted, the final state are written."""
    if own is not None:
        split, met = own.split(terms), terms.initial_state
        if split is not None:
            met, _ = own.meet(terms, solved, split)
        own.walk(terms, solved, scale, o, s_in=met, s_out=final, split=split)
        return
    split = choose_split(terms)
    if split is None:
        launch_chunk_fwd(terms, solved, scale, o, s_in=terms.initial_state, s_out=final)
        return
    met, M = _segment_transition(terms, solved, split)
    state_passing(terms, split, met, M, terms.initial_state, final)
    launch_chunk_fwd(terms, solved, scale, o, s_in=met, split=split)


def _part(solved: WYFactors, tokens: slice) -> WYFactors:
    """Of a span of tokens of a single row."""
    r, *rest = solved
    chunks = slice_chunks(tokens, r.shape[-1])
    return WYFactors._make([r[:, tokens], *(None if x is None else x[chunks] for x in rest)])


def backward(
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    own: DeltaBackend | None = None,
    solved: WYFactors | None = None,
    out: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype.

    Args:
        solved: what forward kept.
        out: memory for some of them, which they take if it fits; q's may be q where own is given
            and heads are not grouped.
    """
    given = terms
    terms = _prepare(terms)
    do = torch.zeros_like(terms.v) if dout is None else dout.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    dstate = None
    if terms.initial_state is not None:
        dstate = out.get("initial_state")
        if dstate is None:
            dstate = terms.initial_state.new_empty(terms.state_shape)
    with device_of(do.device):
        solved = _solve_tril(terms, own) if solved is None else solved
        if own is not None and own.back is not None:
            grads = own.back(terms, do, dfinal, solved, scale, dstate, out)
        else:
            grads = _backward_two_kernels(terms, do, dfinal, solved, scale, dstate, own, out)
    if dstate is not None:
        grads["initial_state"] = dstate
    for name in ("g", "beta"):
        if name in grads:
            like = getattr(given, name)
            grads[name] = grads[name].view(like.shape)
            if name not in out:  # where it is rounded on its way
                grads[name] = grads[name].to(like.dtype)
    return grads


def _backward_two_kernels(
    terms: LinearInputs,
    do: Tensor,
    dfinal: Tensor | None,
    solved: WYFactors,
    scale: float,
    dstate: Tensor | None,
    own: DeltaBackend | None,
    out: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """By two walks; into dstate too."""
    split = choose_split(terms) if own is None else own.split(terms)
    met, met_back, after = terms.initial_state, dfinal, dstate
    if split is not None and own is not None:
        met, made = own.meet(terms, solved, split)
        met_back = own.meet_back(terms, do, solved, scale, dfinal, made, split)
        del made
    elif split is not None:
        met, M = _segment_transition(terms, solved, split)
        state_passing(terms, split, met, M, terms.initial_state, None)
        met_back = torch.empty_like(met)
        _chunk_dstate(terms, do, solved, scale, s_out=met_back, split=split)
        state_passing(terms, split, met_back, M, dfinal, dstate, reverse=True)
        del M
        after = None
    like = do.shape, do.dtype, do.device
    w = reuse_or_empty(None if own is None else out.get("k"), *like)  # _grads
    dv = reuse_or_empty(out.get("v"), *like)
    states, dstates = states_like(terms), states_like(terms)
    walk, walk_back = (
        (launch_chunk_fwd, _chunk_dstate) if own is None else (own.walk, own.walk_back)
    )
    walk(terms, solved, scale, w, states=states, s_in=met, split=split)
    walk_back(terms, do, solved, scale, dv, dstates, met_back, after, split)
    return _chunk_dqkg(terms, do, solved.rows, w, dv, states, dstates, scale, own, out)


def _prepare(terms: LinearInputs) -> LinearInputs:
    """Everything as the kernels index it."""
    assert terms.beta is not None
    return contiguous(terms)._replace(
        p=None if terms.p is None else terms.p.contiguous(),
        g=None if terms.g is None else terms.g.contiguous(),
        beta=terms.beta.contiguous(),
    )


def _solve_tril(terms: LinearInputs, own: DeltaBackend | None = None) -> WYFactors:
    B, T, HV, _ = terms.v.shape
    H, K = terms.q.shape[2:]
    tile, _ = tile_of(terms)
    exact = terms.q.dtype == torch.float32
    slots, gates = num_chunks(terms, tile.C), 0 if terms.g is None else 1 + exact
    wide = torch.float32 if uses_split_bf16(terms) else terms.v.dtype
    r = terms.v.new_empty(B, T, HV, tile.C, dtype=wide)
    rows = r.new_empty(slots, HV, 1 + gates, tile.C, dtype=torch.float32)
    if own is not None:
        return own.solve(terms, r, rows)
    # R is rounded to the inputs' dtype: in 16 bits either is as good as float32
    inner = fp32_dot_precision() if exact else "halves" if tile.tma else "tf32"
    launch: Any = cached(delta_solve_tril_kernel)[(slots * HV,)]
    launch(
        terms.k,
        terms.p,
        terms.g,
        terms.beta,
        r,
        rows,
        terms.cu_seqlens,
        T,
        terms.sequences,
        HV,
        H,
        K=K,
        BK=tile.solve.B,
        C=tile.C,
        LEVELS=(tile.C // BASE.value).bit_length() - 1,
        HAS_P=terms.p is not None,
        INNER="ieee" if INTERPRETED else inner,
        **launch_options(terms, tile.solve),
    )
    return WYFactors(r, rows)


def _segment_transition(
    terms: LinearInputs, solved: WYFactors, split: Segments
) -> tuple[Tensor, Tensor]:
    """What segments add to the state [slots, HV, K, V], and their factors [slots, HV, K, K]."""
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    E = solved.rows.new_empty(split.slots, HV, K, V)
    M = solved.rows.new_empty(split.slots, HV, K, K)
    launch_chunk_fwd(terms, solved, 1.0, None, s_out=E, m=M, split=split)
    return E, M


def launch_chunk_fwd(
    terms: LinearInputs,
    solved: WYFactors,
    scale: float,
    out: Tensor | None,
    *,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    m: Tensor | None = None,
    split: Segments | None = None,
) -> None:
    """out: o, or w where states are wanted."""
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    tile, BK = tile_of(terms)
    slots = num_segments_and_sequences(terms, split)
    make = "ends" if m is not None else "o" if states is None else "states"
    many = is_oversubscribed(terms, slots)
    if make == "o":
        part = tile.crowded_walk if many else tile.walk
    else:
        part = tile.crowded_keep if many and terms.g is not None else tile.keep
    (q, k, p, v, r, out), tma = tma_descriptor(
        terms,
        [terms.q if make == "o" else None, terms.k, terms.p, terms.v, solved.r, out],
        [BK, BK, BK, part.B, tile.C, part.B],
    )
    tiles = -(-V // part.B) + (-(-K // part.B) if make == "ends" else 0)
    launch: Any = cached(delta_chunk_fwd_kernel)[(tiles * HV * slots,)]
    launch(
        q,
        k,
        p,
        v,
        solved.rows,
        r,
        out,
        state_descriptor(states, part.B, BK) if tma and states is not None else states,
        s_in,
        s_out,
        m,
        terms.cu_seqlens,
        scale,
        T,
        terms.sequences,
        HV,
        H,
        T if split is None else split.tokens,
        K=K,
        V=V,
        BK=BK,
        BV=part.B,
        C=tile.C,
        MAKE=make,
        HAS_P=terms.p is not None,
        HAS_S_IN=s_in is not None,
        HAS_S_OUT=s_out is not None,
        SPLIT=split is not None,
        GROUPED=H != HV,
        TMA=tma,
        FINE=uses_split_bf16(terms),
        **launch_options(terms, part),
    )


def _chunk_dstate(
    terms: LinearInputs,
    do: Tensor,
    solved: WYFactors,
    scale: float,
    dv: Tensor | None = None,
    dstates: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    split: Segments | None = None,
) -> None:
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    tile, BK = tile_of(terms)
    slots = num_segments_and_sequences(terms, split)
    part = tile.crowded_back if is_oversubscribed(terms, slots) else tile.back
    BV = part.B
    (q, k, p, do, r, dv), tma = tma_descriptor(
        terms,
        [terms.q, terms.k, terms.p, do, solved.r, dv],
        [BK, BK, BK, BV, tile.C, BV],
    )
    launch: Any = cached(delta_chunk_dstate_kernel)[(-(-V // BV) * HV * slots,)]
    launch(
        q,
        k,
        p,
        do,
        solved.rows,
        r,
        dv,
        state_descriptor(dstates, BV, BK) if tma and dstates is not None else dstates,
        s_in,
        s_out,
        terms.cu_seqlens,
        scale,
        T,
        terms.sequences,
        HV,
        H,
        T if split is None else split.tokens,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        C=tile.C,
        MAKE="ends" if dstates is None else "states",
        HAS_P=terms.p is not None,
        HAS_S_IN=s_in is not None,
        HAS_S_OUT=s_out is not None,
        SPLIT=split is not None,
        GROUPED=H != HV,
        TMA=tma,
        FINE=uses_split_bf16(terms),
        **launch_options(terms, part),
    )


def _chunk_dqkg(
    terms: LinearInputs,
    do: Tensor,
    rows: Tensor,
    w: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
    scale: float,
    own: DeltaBackend | None = None,
    out: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Gradients of q, k, v, beta, and p and g if given; those of beta and g in float32."""
    B, T, HV = terms.v.shape[:3]
    H, K = terms.q.shape[2:]
    heads = HV if own is None else HV // own.together(terms)
    there = {name: out.get(name) for name in "qkp" if getattr(terms, name) is not None}
    if own is not None and heads == HV and w.shape[-1] == K:
        # each of its programs has read its own part of w, and of q, before it writes there
        there["k" if H == HV else "q"] = w
    like = (B, T, heads, K), do.dtype, do.device
    wide = {name: reuse_or_empty(x, *like) for name, x in there.items()}
    sums = {
        name: reuse_or_empty(out.get(name), (B, T, HV), torch.float32, do.device)
        for name in ("beta", "g")
        if getattr(terms, name) is not None
    }
    if own is not None:
        own.grads(terms, do, rows, w, dv, states, dstates, scale, {**wide, **sums})
    else:
        launch_dqkg(terms, do, rows, w, dv, states, dstates, scale, {**wide, **sums})
    made = {name: reduce_grouped_heads(x, H, out.get(name)) for name, x in wide.items()}
    return {**made, "v": dv, **sums}
