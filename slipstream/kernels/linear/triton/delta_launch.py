"""Launches of the delta rule's kernels: no synchronisation, nothing that depends on device values.

Forward: R (delta_solve.py), then the walk. Backward computes R again and walks twice, writing for
each chunk and head S, dS', x and y, then takes all gradients from those at once. At C = 64 and
K = V = 128 in 16 bits S is 32 KB, a chunk of x 16 KB: without S the gradients' kernel, which is
parallel over chunks, would have to walk. Memory beyond results, in tensors of the size of v: R is
C / V of one, x and y one each, the states K / C each; with grouped heads the gradients of q, k, p
for each value head.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.terms import Terms
from slipstream.kernels.linear.triton.delta_grads import delta_grads_kernel
from slipstream.kernels.linear.triton.delta_solve import BASE, delta_solve_kernel
from slipstream.kernels.linear.triton.delta_tiles import DeltaTile, Part, choose
from slipstream.kernels.linear.triton.delta_walk import delta_walk_back_kernel, delta_walk_kernel
from slipstream.kernels.linear.triton.launch import _contiguous, _descriptors, _family, _on
from slipstream.kernels.linear.triton.plan import INTERPRETED


class Solved(NamedTuple):
    """By the names of delta_solve.py."""

    r: Tensor
    rows: Tensor


@cache
def _tile(device: torch.device, K: int, V: int, bytes_each: int) -> tuple[DeltaTile, int]:
    return choose("interpreter" if INTERPRETED else _family(device), K, V, bytes_each)


def _tile_of(terms: Terms) -> tuple[DeltaTile, int]:
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return _tile(terms.q.device, K, V, terms.q.element_size())


def forward(terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V], float32."""
    terms = _prepare(terms)
    o = terms.v.new_empty(terms.v.shape)
    final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
    tile, _ = _tile_of(terms)
    with _on(o.device):
        _walk(terms, tile.walk, _solve(terms), scale, o=o, final=final)
    return o, final


def backward(
    terms: Terms, dout: Tensor | None, dfinal: Tensor | None, scale: float
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    given = terms
    terms = _prepare(terms)
    do = torch.zeros_like(terms.v) if dout is None else dout.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    dstate = None
    if terms.initial_state is not None:
        dstate = terms.initial_state.new_empty(terms.state_shape)
    with _on(do.device):
        tile, _ = _tile_of(terms)
        solved = _solve(terms)
        x, y = (torch.empty_like(do) for _ in range(2))
        states, dstates = _states(terms), _states(terms)
        _walk(terms, tile.keep, solved, scale, x=x, states=states)
        _walk_back(terms, do, solved, y, dstates, dfinal, dstate, scale)
        grads = _grads(terms, do, solved.rows, x, y, states, dstates, scale)
    if dstate is not None:
        grads["initial_state"] = dstate
    for name in ("g", "beta"):
        if name in grads:
            like = getattr(given, name)
            grads[name] = grads[name].view(like.shape).to(like.dtype)
    return grads


def _prepare(terms: Terms) -> Terms:
    """Everything as the kernels index it."""
    assert terms.beta is not None
    return _contiguous(terms)._replace(
        p=None if terms.p is None else terms.p.contiguous(),
        g=None if terms.g is None else terms.g.contiguous(),
        beta=terms.beta.contiguous(),
    )


def _slots(terms: Terms, C: int) -> int:
    """Chunks, at most (delta_solve.find_chunk)."""
    B, T = terms.q.shape[:2]
    return B * -(-T // C) if terms.cu_seqlens is None else T // C + terms.sequences


def _states(terms: Terms) -> Tensor:
    K, (HV, V) = terms.q.shape[-1], terms.v.shape[2:]
    return terms.v.new_empty(_slots(terms, _tile_of(terms)[0].C), HV, V, K)


def _options(terms: Terms, part: Part) -> dict[str, Any]:
    return {
        "HAS_GATE": terms.g is not None,
        "PACKED": terms.cu_seqlens is not None,
        "EXACT": terms.q.dtype == torch.float32,
        "PRECISION": "ieee" if INTERPRETED else "tf32x3",
        "num_warps": part.warps,
        "num_stages": part.stages,
    }


def _tiles(terms: Terms, tensors: list[Tensor | None], widths: list[int]) -> tuple[list[Any], bool]:
    """The tensors [B, T, heads, ...] as the kernels take them, and whether by descriptors."""
    tile, _ = _tile_of(terms)
    if tile.tma and terms.cu_seqlens is None:
        made = _descriptors(tensors, widths, tile.C)
        if made is not None:
            return made, True
    return tensors, False


def _square(states: Tensor, BV: int, BK: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(states, list(states.shape), list(states.stride()), [1, 1, BV, BK])


def _solve(terms: Terms) -> Solved:
    B, T, HV, _ = terms.v.shape
    H, K = terms.q.shape[2:]
    tile, _ = _tile_of(terms)
    exact = terms.q.dtype == torch.float32
    slots, gates = _slots(terms, tile.C), 0 if terms.g is None else 1 + exact
    r = terms.v.new_empty(B, T, HV, tile.C)
    rows = r.new_empty(slots, HV, 1 + gates, tile.C, dtype=torch.float32)
    # R is rounded to the inputs' dtype: in 16 bits either is as good as float32
    inner = "tf32x3" if exact else "halves" if tile.tma else "tf32"
    launch: Any = delta_solve_kernel[(slots * HV,)]
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
        **_options(terms, tile.solve),
    )
    return Solved(r, rows)


def _walk(
    terms: Terms,
    part: Part,
    solved: Solved,
    scale: float,
    o: Tensor | None = None,
    final: Tensor | None = None,
    x: Tensor | None = None,
    states: Tensor | None = None,
) -> None:
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    tile, BK = _tile_of(terms)
    q = terms.q if states is None else None
    (q, k, p, v, r, o, x), tma = _tiles(
        terms,
        [q, terms.k, terms.p, terms.v, solved.r, o, x],
        [BK, BK, BK, part.B, tile.C, part.B, part.B],
    )
    launch: Any = delta_walk_kernel[(-(-V // part.B) * HV * terms.sequences,)]
    launch(
        q,
        k,
        p,
        v,
        solved.rows,
        r,
        o,
        x,
        _square(states, part.B, BK) if tma and states is not None else states,
        terms.initial_state,
        final,
        terms.cu_seqlens,
        scale,
        T,
        HV,
        H,
        K=K,
        V=V,
        BK=BK,
        BV=part.B,
        C=tile.C,
        KEEP=states is not None,
        HAS_P=terms.p is not None,
        HAS_S_IN=terms.initial_state is not None,
        GROUPED=H != HV,
        TMA=tma,
        **_options(terms, part),
    )


def _walk_back(
    terms: Terms,
    do: Tensor,
    solved: Solved,
    y: Tensor,
    dstates: Tensor,
    dfinal: Tensor | None,
    dstate: Tensor | None,
    scale: float,
) -> None:
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    tile, BK = _tile_of(terms)
    BV = tile.back.B
    (q, k, p, do, r, y), tma = _tiles(
        terms,
        [terms.q, terms.k, terms.p, do, solved.r, y],
        [BK, BK, BK, BV, tile.C, BV],
    )
    launch: Any = delta_walk_back_kernel[(-(-V // BV) * HV * terms.sequences,)]
    launch(
        q,
        k,
        p,
        do,
        solved.rows,
        r,
        y,
        _square(dstates, BV, BK) if tma else dstates,
        dfinal,
        dstate,
        terms.cu_seqlens,
        scale,
        T,
        HV,
        H,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        C=tile.C,
        HAS_P=terms.p is not None,
        HAS_S_IN=dfinal is not None,
        HAS_S_OUT=dstate is not None,
        GROUPED=H != HV,
        TMA=tma,
        **_options(terms, tile.back),
    )


def _grads(
    terms: Terms,
    do: Tensor,
    rows: Tensor,
    x: Tensor,
    y: Tensor,
    states: Tensor,
    dstates: Tensor,
    scale: float,
) -> dict[str, Tensor]:
    """Gradients of q, k, v, beta, and p and g if given; those of beta and g in float32."""
    B, T, HV, V = terms.v.shape
    H, K = terms.q.shape[2:]
    tile, _ = _tile_of(terms)
    BK = tile.grads.B
    BV = min(64, BK)
    wide = {name: do.new_empty(B, T, HV, K) for name in "qkp" if getattr(terms, name) is not None}
    sums = {
        name: do.new_empty(B, T, HV, dtype=torch.float32)
        for name in ("beta", "g")
        if getattr(terms, name) is not None
    }
    dv = torch.empty_like(do)
    made, tma = _tiles(
        terms,
        [do, x, y, wide["q"], wide["k"], wide.get("p")],
        [BV, BV, BV, BK, BK, BK],
    )
    given = [_square(s, BV, BK) if tma else s for s in (states, dstates)]
    launch: Any = delta_grads_kernel[(HV * states.shape[0],)]
    launch(
        terms.q,
        terms.k,
        terms.p,
        terms.v,
        *made[:3],
        *given,
        *made[3:],
        rows,
        y,
        states,
        dstates,
        dv,
        sums["beta"],
        sums.get("g"),
        terms.cu_seqlens,
        scale,
        T,
        terms.sequences,
        HV,
        H,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        C=tile.C,
        HAS_P=terms.p is not None,
        GROUPED=H != HV,
        TMA=tma,
        **_options(terms, tile.grads),
    )
    if HV != H:
        wide = {name: x.view(B, T, H, HV // H, K).sum(3) for name, x in wide.items()}
    return {**wide, "v": dv, **sums}
