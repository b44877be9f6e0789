"""Launches of the delta rule's kernels: no synchronisation, nothing that depends on device values.

Forward: R (delta_solve.py), then the walk. Backward takes R, or computes it again, and walks twice,
writing for each chunk and head S, dS', w and dv, then takes all other gradients from those at once.
At C = 64 and K = V = 128 in 16 bits S is 32 KB, a chunk of w 16 KB: without S the gradients'
kernel, which is parallel over chunks, would have to walk. Memory beyond results, in tensors of the
size of v: R is C / V of one; w one and the states K / C each, of one slice at a time (slices.py);
with grouped heads the gradients of q, k, p for each value head; for a sequence that is split, two
states a segment.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import Terms
from slipstream.kernels.linear.triton.common.gqa_reduce import sum_heads
from slipstream.kernels.linear.triton.common.state_passing_launch import join
from slipstream.kernels.linear.triton.delta.chunk import delta_walk_back_kernel, delta_walk_kernel
from slipstream.kernels.linear.triton.delta.dqkg_launch import launch_grads
from slipstream.kernels.linear.triton.delta.plan import (
    chunk_slots,
    crowded,
    fine,
    options,
    slots_of,
    split_of,
    square,
    states_like,
    tile_of,
    tiles_of,
)
from slipstream.kernels.linear.triton.delta.solve_tril import BASE, delta_solve_kernel
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.launch import Split, contiguous
from slipstream.kernels.linear.workspace import chunks_of, fitting, walked
from slipstream.runtime.backends import on, precision
from slipstream.runtime.launch_cache import kept

# forward and backward write to memory that they are given, and forward leaves states (op.py)
IN_SLICES = MARKS = True


class Solved(NamedTuple):
    """By the names of delta_solve.py; growth: of another implementation, which wants it."""

    r: Tensor
    rows: Tensor
    growth: Tensor | None = None


class Own(NamedTuple):
    """What launches the inverse, both walks and the gradients instead of the kernels of _solve,
    launch_walk, _walk_back, _grads, and how it splits sequences.

    together: how many value heads that share q and k have those gradients added up by `grads`.
    back: all of backward that comes after the inverse, where it takes the call.
    meet: the state that each segment meets, and what meet_back wants of it. Its walks write the
    states at the ends of sequences themselves.
    """

    solve: Callable[[Terms, Tensor, Tensor], Solved]
    walk: Callable[..., None]
    walk_back: Callable[..., None]
    grads: Callable[..., None]
    together: Callable[[Terms], int]
    split: Callable[[Terms], Split | None]
    meet: Callable[[Terms, Solved, Split], tuple[Tensor, Any]]
    meet_back: Callable[..., Tensor]
    back: Callable[..., dict[str, Tensor]] | None = None


def forward(
    terms: Terms,
    scale: float,
    own: Own | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V], float32.

    Args:
        own: another implementation's.
        out: memory for both.
        marks: memory for the states between spans of tokens, as many as there are and one more.
    """
    return forward_solved(terms, scale, own, out, marks)[:2]


def forward_solved(
    terms: Terms,
    scale: float,
    own: Own | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Solved]:
    """Those, and what backward need not compute once more: C / V of v's size, and a little."""
    terms = _prepare(terms)
    o, final = out or (
        terms.v.new_empty(terms.v.shape),
        terms.v.new_empty(terms.state_shape, dtype=torch.float32),
    )
    with on(o.device):
        solved = _solve(terms, own)
        for tokens, part, there, after in walked(terms, o, final, marks):
            walk_whole(part, _part(solved, tokens), scale, there, after, own)
    return o, final, solved


def walk_whole(
    terms: Terms, solved: Solved, scale: float, o: Tensor, final: Tensor | None, own: Own | None
) -> None:
    """o and, if it is wanted, the final state are written."""
    if own is not None:
        split, met = own.split(terms), terms.initial_state
        if split is not None:
            met, _ = own.meet(terms, solved, split)
        own.walk(terms, solved, scale, o, s_in=met, s_out=final, split=split)
        return
    split = split_of(terms)
    if split is None:
        launch_walk(terms, solved, scale, o, s_in=terms.initial_state, s_out=final)
        return
    met, M = _ends(terms, solved, split)
    join(terms, split, met, M, terms.initial_state, final)
    launch_walk(terms, solved, scale, o, s_in=met, split=split)


def _part(solved: Solved, tokens: slice) -> Solved:
    """Of a span of tokens of a single row."""
    r, *rest = solved
    chunks = chunks_of(tokens, r.shape[-1])
    return Solved._make([r[:, tokens], *(None if x is None else x[chunks] for x in rest)])


def backward(
    terms: Terms,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    own: Own | None = None,
    solved: Solved | None = None,
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
    with on(do.device):
        solved = _solve(terms, own) if solved is None else solved
        if own is not None and own.back is not None:
            grads = own.back(terms, do, dfinal, solved, scale, dstate, out)
        else:
            grads = _walked_back(terms, do, dfinal, solved, scale, dstate, own, out)
    if dstate is not None:
        grads["initial_state"] = dstate
    for name in ("g", "beta"):
        if name in grads:
            like = getattr(given, name)
            grads[name] = grads[name].view(like.shape)
            if name not in out:  # where it is rounded on its way
                grads[name] = grads[name].to(like.dtype)
    return grads


def _walked_back(
    terms: Terms,
    do: Tensor,
    dfinal: Tensor | None,
    solved: Solved,
    scale: float,
    dstate: Tensor | None,
    own: Own | None,
    out: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """By two walks; into dstate too."""
    split = split_of(terms) if own is None else own.split(terms)
    met, met_back, after = terms.initial_state, dfinal, dstate
    if split is not None and own is not None:
        met, made = own.meet(terms, solved, split)
        met_back = own.meet_back(terms, do, solved, scale, dfinal, made, split)
        del made
    elif split is not None:
        met, M = _ends(terms, solved, split)
        join(terms, split, met, M, terms.initial_state, None)
        met_back = torch.empty_like(met)
        _walk_back(terms, do, solved, scale, s_out=met_back, split=split)
        join(terms, split, met_back, M, dfinal, dstate, reverse=True)
        del M
        after = None
    like = do.shape, do.dtype, do.device
    w = fitting(None if own is None else out.get("k"), *like)  # _grads
    dv = fitting(out.get("v"), *like)
    states, dstates = states_like(terms), states_like(terms)
    walk, walk_back = (launch_walk, _walk_back) if own is None else (own.walk, own.walk_back)
    walk(terms, solved, scale, w, states=states, s_in=met, split=split)
    walk_back(terms, do, solved, scale, dv, dstates, met_back, after, split)
    return _grads(terms, do, solved.rows, w, dv, states, dstates, scale, own, out)


def _prepare(terms: Terms) -> Terms:
    """Everything as the kernels index it."""
    assert terms.beta is not None
    return contiguous(terms)._replace(
        p=None if terms.p is None else terms.p.contiguous(),
        g=None if terms.g is None else terms.g.contiguous(),
        beta=terms.beta.contiguous(),
    )


def _solve(terms: Terms, own: Own | None = None) -> Solved:
    B, T, HV, _ = terms.v.shape
    H, K = terms.q.shape[2:]
    tile, _ = tile_of(terms)
    exact = terms.q.dtype == torch.float32
    slots, gates = chunk_slots(terms, tile.C), 0 if terms.g is None else 1 + exact
    wide = torch.float32 if fine(terms) else terms.v.dtype
    r = terms.v.new_empty(B, T, HV, tile.C, dtype=wide)
    rows = r.new_empty(slots, HV, 1 + gates, tile.C, dtype=torch.float32)
    if own is not None:
        return own.solve(terms, r, rows)
    # R is rounded to the inputs' dtype: in 16 bits either is as good as float32
    inner = precision() if exact else "halves" if tile.tma else "tf32"
    launch: Any = kept(delta_solve_kernel)[(slots * HV,)]
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
        **options(terms, tile.solve),
    )
    return Solved(r, rows)


def _ends(terms: Terms, solved: Solved, split: Split) -> tuple[Tensor, Tensor]:
    """What segments add to the state [slots, HV, K, V], and their factors [slots, HV, K, K]."""
    (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
    E = solved.rows.new_empty(split.slots, HV, K, V)
    M = solved.rows.new_empty(split.slots, HV, K, K)
    launch_walk(terms, solved, 1.0, None, s_out=E, m=M, split=split)
    return E, M


def launch_walk(
    terms: Terms,
    solved: Solved,
    scale: float,
    out: Tensor | None,
    *,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    m: Tensor | None = None,
    split: Split | None = None,
) -> None:
    """out: o, or w where states are wanted."""
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    tile, BK = tile_of(terms)
    slots = slots_of(terms, split)
    make = "ends" if m is not None else "o" if states is None else "states"
    many = crowded(terms, slots)
    if make == "o":
        part = tile.crowded_walk if many else tile.walk
    else:
        part = tile.crowded_keep if many and terms.g is not None else tile.keep
    (q, k, p, v, r, out), tma = tiles_of(
        terms,
        [terms.q if make == "o" else None, terms.k, terms.p, terms.v, solved.r, out],
        [BK, BK, BK, part.B, tile.C, part.B],
    )
    tiles = -(-V // part.B) + (-(-K // part.B) if make == "ends" else 0)
    launch: Any = kept(delta_walk_kernel)[(tiles * HV * slots,)]
    launch(
        q,
        k,
        p,
        v,
        solved.rows,
        r,
        out,
        square(states, part.B, BK) if tma and states is not None else states,
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
        FINE=fine(terms),
        **options(terms, part),
    )


def _walk_back(
    terms: Terms,
    do: Tensor,
    solved: Solved,
    scale: float,
    dv: Tensor | None = None,
    dstates: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    split: Split | None = None,
) -> None:
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    tile, BK = tile_of(terms)
    slots = slots_of(terms, split)
    part = tile.crowded_back if crowded(terms, slots) else tile.back
    BV = part.B
    (q, k, p, do, r, dv), tma = tiles_of(
        terms,
        [terms.q, terms.k, terms.p, do, solved.r, dv],
        [BK, BK, BK, BV, tile.C, BV],
    )
    launch: Any = kept(delta_walk_back_kernel)[(-(-V // BV) * HV * slots,)]
    launch(
        q,
        k,
        p,
        do,
        solved.rows,
        r,
        dv,
        square(dstates, BV, BK) if tma and dstates is not None else dstates,
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
        FINE=fine(terms),
        **options(terms, part),
    )


def _grads(
    terms: Terms,
    do: Tensor,
    rows: Tensor,
    w: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
    scale: float,
    own: Own | None = None,
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
    wide = {name: fitting(x, *like) for name, x in there.items()}
    sums = {
        name: fitting(out.get(name), (B, T, HV), torch.float32, do.device)
        for name in ("beta", "g")
        if getattr(terms, name) is not None
    }
    if own is not None:
        own.grads(terms, do, rows, w, dv, states, dstates, scale, {**wide, **sums})
    else:
        launch_grads(terms, do, rows, w, dv, states, dstates, scale, {**wide, **sums})
    made = {name: sum_heads(x, H, out.get(name)) for name, x in wide.items()}
    return {**made, "v": dv, **sums}
