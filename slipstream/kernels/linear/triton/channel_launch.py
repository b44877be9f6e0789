"""Launches with a decay per channel: no synchronisation, nothing that depends on device values.

Forward: the state before each chunk (channel_states.py), then o, all chunks at once
(channel_read.py). Backward: both walks in one launch, then the gradients on the side that decays
(channel_grads.py) and dv, a read backwards. One walk that keeps its state to itself would write
less, but has a chain of log2(C) products of scores a chunk, once for every tile of the state, and
in backward would have to get dg from differences of long sums.

A state is K / C of a chunk of v. So that all of them take at most SHARE of what the call holds
anyway, heads are worked on in groups, one after the other. Beyond that, memory for results alone;
with grouped heads the gradients of q and k for each value head.

Decay of the columns of the state, gv, is decay of the rows with the roles exchanged: with q, k, v
and do there for do, v, k and q here, dq there is o here, dk is dv, o is dq and dv is dk.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.terms import Terms
from slipstream.kernels.linear.triton.channel_grads import channel_grads_kernel
from slipstream.kernels.linear.triton.channel_read import channel_read_kernel
from slipstream.kernels.linear.triton.channel_states import channel_states_kernel
from slipstream.kernels.linear.triton.channel_tiles import ChannelTile, Part, choose
from slipstream.kernels.linear.triton.launch import _contiguous, _family, _on
from slipstream.kernels.linear.triton.plan import INTERPRETED

# of inputs and results that states may take, and the bytes that they may in any case
SHARE = 0.25
LEAST_STATES = 32 << 20
# What the gates of a block that channel_decay.py calls safe add up to at least, negated: its
# factors, exp of it at most, times k have to fit the dtype, and in float32 its rounding counts.
BOUND = {torch.bfloat16: 60.0, torch.float16: 6.0, torch.float32: 6.0}


class Work(NamedTuple):
    """A call by the names of the kernels, where K is the side that decays."""

    q: Tensor | None  # [B, T, HK, K]; not needed for forward with gv
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HX, V]
    do: Tensor | None  # [B, T, HX, V]
    g: Tensor  # [B, T, HV, K]
    terms: Terms
    scale: float
    tile: ChannelTile

    @property
    def slots(self) -> int:
        """Chunks, at most (delta_solve.find_chunk)."""
        B, T = self.k.shape[:2]
        packed = self.terms.cu_seqlens is not None
        return T // self.tile.C + self.terms.sequences if packed else B * -(-T // self.tile.C)


class Heads(NamedTuple):
    """A group of value heads, and room for the states of all its chunks."""

    first: int
    count: int
    states: Tensor  # [slots, heads, V, K]
    dstates: Tensor | None


@cache
def _tile(device: torch.device, K: int, V: int, bytes_each: int) -> ChannelTile:
    return choose("interpreter" if INTERPRETED else _family(device), K, V, bytes_each)


def forward(terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V], float32."""
    terms = _prepare(terms)
    o = terms.v.new_empty(terms.v.shape)
    final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
    work = _work(terms, None, scale)
    with _on(o.device):
        for heads in _groups(work, [o], 1):
            _states(work, heads, {"final": final})
            if terms.gv is None:
                _read(work, heads, o, back=False)
            else:
                _grads(work._replace(do=terms.q), heads, {"q": o})
    return o, final


def backward(
    terms: Terms, dout: Tensor | None, dfinal: Tensor | None, scale: float
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    given = terms
    terms = _prepare(terms)
    do = torch.zeros_like(terms.v) if dout is None or scale == 0.0 else dout.contiguous()
    work = _work(terms, do, scale or 1.0)  # o does not depend on q, k, v then, and do is 0
    wide = do.shape[:3]
    dq, dk = (do.new_empty(*wide, terms.q.shape[-1]) for _ in range(2))
    dv, dg = torch.empty_like(do), torch.empty_like(work.g)
    edges: dict[str, Tensor | None] = {"dfinal": None if dfinal is None else dfinal.contiguous()}
    state = terms.initial_state
    edges["dinitial"] = dinitial = None if state is None else state.new_empty(terms.state_shape)
    u = terms.u
    du = None if u is None else u.new_empty(work.slots, *u.shape, dtype=torch.float32)
    with _on(do.device):
        for heads in _groups(work, [dq, dk, dv, dg], 2):
            _states(work, heads, edges)
            if terms.gv is None:
                _grads(work, heads, {"q": dq, "k": dk, "g": dg, "u": du})
            else:
                _grads(work, heads, {"k": dv, "g": dg})
                _read(work, heads, dq, back=False)
            _read(work, heads, dv if terms.gv is None else dk, back=True)
    if terms.q.shape[2] != wide[2]:
        groups = (*terms.q.shape[:3], -1, terms.q.shape[3])
        dq, dk = (x.view(groups).sum(3) for x in (dq, dk))
    grads = {"q": dq, "k": dk, "v": dv, "gv" if terms.g is None else "g": dg}
    if u is not None and du is not None:
        grads["u"] = du.sum(0).to(u.dtype)
    if dinitial is not None:
        grads["initial_state"] = dinitial
    return _as_given(grads, given)


def _prepare(terms: Terms) -> Terms:
    """Everything as the kernels index it, the gate one a channel."""
    g, gv, u = terms.g, terms.gv, terms.u
    if gv is None:
        g = terms.v.new_zeros(terms.v.shape[:3]) if g is None else g
        g = g[..., None] if g.dim() == 3 else g
        g = g.expand(*g.shape[:3], terms.q.shape[-1]).contiguous()
    return _contiguous(terms)._replace(
        g=g,
        gv=None if gv is None else gv.contiguous(),
        u=None if u is None else u.contiguous(),
    )


def _as_given(grads: dict[str, Tensor], given: Terms) -> dict[str, Tensor]:
    """Without the gradient of a gate that was not given, and that of one a token summed."""
    if given.g is None:
        grads.pop("g", None)
    elif given.g.dim() == 3:
        grads["g"] = grads["g"].sum(-1)
    return grads


def _work(terms: Terms, do: Tensor | None, scale: float) -> Work:
    q, k, v, g = terms.q, terms.k, terms.v, terms.g
    if terms.gv is not None:
        q, k, v, g, do = do, v, k, terms.gv, None if do is None else q
    assert g is not None
    tile = _tile(k.device, k.shape[-1], v.shape[-1], k.element_size())
    return Work(q, k, v, do, g, terms, scale, tile)


def _groups(work: Work, results: list[Tensor], walks: int) -> Iterator[Heads]:
    """The value heads in groups that share one room."""
    HV, state = work.g.shape[2], work.k.shape[-1] * work.v.shape[-1]
    inputs = [work.q, work.k, work.v, work.do, work.g]
    held = sum(x.numel() * x.element_size() for x in (*inputs, *results) if x is not None)
    a_head = walks * work.slots * state * work.k.element_size()
    most = max(1, int(max(SHARE * held, LEAST_STATES)) // a_head)
    count = -(-HV // -(-HV // most))  # in groups as even as can be
    rooms = [work.k.new_empty(work.slots * count * state) for _ in range(walks)]
    for first in range(0, HV, count):
        yield Heads(first, min(count, HV - first), rooms[0], rooms[1] if walks == 2 else None)


def _sizes(work: Work, heads: Heads) -> tuple[int, ...]:
    return work.g.shape[2], work.k.shape[2], work.v.shape[2], heads.first, heads.count


def _options(work: Work, part: Part) -> dict[str, Any]:
    HV = work.g.shape[2]
    parts = 1 if work.g.dtype == torch.bfloat16 else 2
    if work.k.dtype == torch.float32:
        parts = 3
    return {
        "K": work.k.shape[-1],
        "V": work.v.shape[-1],
        "BK": part.BK,
        "BV": part.BV,
        "C": work.tile.C,
        "BEFORE": work.terms.u is not None,
        "PACKED": work.terms.cu_seqlens is not None,
        "GROUPED": work.terms.q.shape[2] != HV,
        "PARTS": 0 if INTERPRETED else parts,
        "PRECISION": "ieee" if INTERPRETED else "tf32x3",
        "num_warps": part.warps,
        "num_stages": part.stages,
    }


def _states(work: Work, heads: Heads, edges: dict[str, Tensor | None]) -> None:
    """Every S of the heads, and with dstates every dS'; edges: final, dfinal and dinitial."""
    part, terms = work.tile.states, work.terms
    K, V = work.k.shape[-1], work.v.shape[-1]
    programs = -(-K // part.BK) * -(-V // part.BV) * heads.count * terms.sequences
    back = heads.dstates is not None
    launch: Any = channel_states_kernel[(programs * (1 + back),)]
    launch(
        work.q if back else None,
        work.k,
        work.v,
        work.do,
        work.g,
        heads.states,
        heads.dstates,
        terms.initial_state,
        edges.get("final"),
        edges.get("dfinal"),
        edges.get("dinitial"),
        terms.cu_seqlens,
        work.scale,
        1 / work.scale if back else 1.0,
        work.k.shape[1],
        *_sizes(work, heads),
        programs,
        TRANSPOSED=terms.gv is None,
        **_options(work, part),
    )


def _read(work: Work, heads: Heads, y: Tensor, *, back: bool) -> None:
    part, terms = work.tile.read, work.terms
    tiles = -(-work.v.shape[-1] // part.BV)
    launch: Any = channel_read_kernel[(tiles * heads.count * work.slots,)]
    launch(
        work.q,
        work.k,
        work.g,
        terms.u,
        work.do if back else work.v,
        heads.dstates if back else heads.states,
        y,
        terms.cu_seqlens,
        work.scale,
        work.k.shape[1],
        terms.sequences,
        *_sizes(work, heads),
        LEVELS=work.tile.C.bit_length() - 1,
        BOUND=BOUND[work.k.dtype],
        BACK=back,
        **_options(work, part),
    )


def _grads(work: Work, heads: Heads, grads: dict[str, Tensor | None]) -> None:
    part, terms = work.tile.grads, work.terms
    tiles = -(-work.k.shape[-1] // part.BK)
    launch: Any = channel_grads_kernel[(tiles * heads.count * work.slots,)]
    launch(
        work.q if "k" in grads else None,
        work.k,
        work.g,
        terms.u,
        work.v,
        work.do,
        heads.states,
        heads.dstates,
        *(grads.get(name) for name in "qkgu"),
        terms.cu_seqlens,
        work.scale,
        work.k.shape[1],
        terms.sequences,
        *_sizes(work, heads),
        LEVELS=work.tile.C.bit_length() - 1,
        BOUND=BOUND[work.k.dtype],
        **_options(work, part),
    )
