"""The delta rule and free a and b on sm_90: all but a few small kernels are here.

Portable are the gradients of the scores, where gates are per channel or a and b free; and those of
q, k, a and b without a gate per channel.

The portable walk that keeps states fits a multiprocessor twice without gates, this one once: that
one is taken where there are more programs than multiprocessors.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isqrt
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import Terms
from slipstream.kernels.linear.sm90.delta import bwd_fused_launch
from slipstream.kernels.linear.sm90.delta import launch as sm90
from slipstream.kernels.linear.sm90.delta.bwd_schedule import Cut, cut_of, marks_like
from slipstream.kernels.linear.sm90.dplr import backend
from slipstream.kernels.linear.sm90.plan import CHUNK, TILE_V, per_channel
from slipstream.kernels.linear.triton.delta import backend as portable
from slipstream.kernels.linear.triton.delta.plan import crowded, slots_of
from slipstream.kernels.linear.triton.dplr import backend as dplr_portable
from slipstream.kernels.linear.triton.scalar_decay.launch import Split, split_into

IN_SLICES = MARKS = True  # as the portable ones
ACTIVE = True  # takes how many of the packed sequences have tokens
SPENDS_Q = True
PROGRAMS = 132  # multiprocessors: a walk's program takes one
LEAST = 8  # chunks of a segment
WORTH = 18  # chunks that a split has to take off a walk: about 30 us
# Value heads whose gradients of q and k are added up at once, at most: each sum is rounded.
TOGETHER = 4


def forward(
    terms: Terms,
    scale: float,
    out: tuple[Tensor, Tensor] | None = None,
    marks: Tensor | None = None,
    active: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As the portable one.

    Args:
        active: how many packed sequences have tokens, about; the others' states stay where they
            are. None: all.
    """
    if per_channel(terms):
        return dplr_portable.forward(as_tma_reads(terms), scale, backend, out, marks)
    return portable.forward(as_tma_reads(terms), scale, _own(active), out, marks)


def forward_kept(
    terms: Terms,
    scale: float,
    out: tuple[Tensor, Tensor] | None = None,
    marks: Tensor | None = None,
    active: int | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Those, and what backward takes as `kept`: empty where it would take nothing."""
    if per_channel(terms):
        return *forward(terms, scale, out, marks), []
    own, left = _own(active), []
    if marks is None and (cut := _cut(terms, active)):
        left = [marks_like(terms, cut)]
        own = own._replace(walk=partial(_walk, parts=(cut.every, left[0])))
    o, final, solved = portable.forward_solved(as_tma_reads(terms), scale, own, out, marks)
    return o, final, [x for x in (*solved, *left) if x is not None]


def backward(
    terms: Terms,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    kept: Sequence[Tensor] = (),
    out: Mapping[str, Tensor] = MappingProxyType({}),
    active: int | None = None,
    spends_q: bool = False,
) -> dict[str, Tensor]:
    """As the portable one; active as forward has it.

    Args:
        spends_q: the gradient of q may take q's memory, where heads are not grouped.
    """
    dout = None if dout is None else at_16_bytes(dout)
    if per_channel(terms):
        return dplr_portable.backward(as_tma_reads(terms), dout, dfinal, scale, backend, out)
    own, terms, count = _own(active), as_tma_reads(terms), 2 if terms.g is None else 3
    solved = portable.Solved(*kept[:count]) if kept else None
    if cut := _cut(terms, active):
        own = own._replace(back=partial(_back, cut=cut, left=kept[count:]))
    if spends_q and terms.q.shape[2] == terms.v.shape[2]:
        out = {**out, "q": terms.q}
    return portable.backward(terms, dout, dfinal, scale, own, solved, out)


def as_tma_reads(terms: Terms) -> Terms:
    """With all as TMA reads them."""
    names = ("q", "k", "v", "a", "b", "g")
    given = {name: x for name in names if (x := getattr(terms, name)) is not None}
    return terms._replace(**{name: at_16_bytes(x) for name, x in given.items()})


def at_16_bytes(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x


def _walk(
    terms: Terms,
    solved: portable.Solved,
    scale: float,
    o: Tensor,
    *,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    split: Split | None = None,
    active: int | None = None,
    parts: tuple[int, Tensor] | None = None,
) -> None:
    ends: dict[str, Any] = {"states": states, "s_in": s_in, "s_out": s_out}
    skip = active is not None and split is None
    slots = slots_of(terms, split) if active is None else active
    if states is not None and terms.g is None and crowded(terms, slots):
        portable.launch_walk(terms, solved, scale, o, **ends, split=split)
    elif split is None and _takes_two(terms, active):
        sm90.walk_wide(terms, solved.r, solved.rows, scale, o, **ends, skip=skip, parts=parts)
    else:
        more = {"segment": _segment(split), "skip": skip, "parts": parts}
        sm90.walk(terms, solved.r, solved.rows, scale, o, **ends, **more)


def _takes_two(terms: Terms, active: int | None = None) -> bool:
    """Whether a program takes two tiles of V: with one each they would not run all at once."""
    HV, V = terms.v.shape[2:]
    programs = V // TILE_V * HV * (terms.sequences if active is None else active)
    return V % (2 * TILE_V) == 0 and programs > PROGRAMS


def _walk_back(
    terms: Terms,
    do: Tensor,
    solved: portable.Solved,
    scale: float,
    dv: Tensor,
    dstates: Tensor,
    s_in: Tensor | None,
    s_out: Tensor | None,
    split: Split | None,
    active: int | None = None,
) -> None:
    ends = {"s_in": s_in, "s_out": s_out, "segment": _segment(split)}
    skip = active is not None and split is None
    sm90.walk_back(terms, do, solved.r, solved.rows, scale, dv, dstates, **ends, skip=skip)


def _back(
    terms: Terms,
    do: Tensor,
    dfinal: Tensor | None,
    solved: portable.Solved,
    scale: float,
    dstate: Tensor | None,
    out: Mapping[str, Tensor],
    cut: Cut,
    left: Sequence[Tensor],
) -> dict[str, Tensor]:
    def forward(o: Tensor, marks: Tensor) -> None:
        own = _OWN._replace(walk=partial(_walk, parts=(cut.every, marks)))
        portable.walk_whole(terms, solved, scale, o, None, own)

    return bwd_fused_launch.backward(
        terms, do, dfinal, solved, scale, dstate, out,
        cut=cut, together=_together(terms), forward=forward, left=left,
    )  # fmt: skip


def _cut(terms: Terms, active: int | None) -> Cut | None:
    """What a whole call goes back through at a time, where it goes back in one walk."""
    return cut_of(terms) if active is None else None


def _together(terms: Terms) -> int:
    """A divisor of how many share q and k."""
    share = terms.v.shape[2] // terms.q.shape[2]
    return max(n for n in range(1, TOGETHER + 1) if share % n == 0)


def _segment(split: Split | None) -> tuple[int, int] | None:
    return None if split is None else (split.tokens, split.slots)


def _split(terms: Terms) -> Split | None:
    """By shapes alone: as many segments as find a multiprocessor for each of their programs.

    Where states do not decay their ends take two walks' time at most, for two segments one.
    """
    T, HV, V = terms.v.shape[1:]
    programs = V // TILE_V * HV * terms.sequences
    packed = terms.cu_seqlens is not None
    chunks = T // CHUNK // (terms.sequences if packed else 1)  # packed ones have so many on average
    wanted = min(PROGRAMS // programs, isqrt(2 * chunks), chunks // LEAST)
    if wanted < 2 or chunks - chunks // wanted < WORTH:
        return None
    return split_into(terms, -(-chunks // wanted) * CHUNK)


def _meet(
    terms: Terms, solved: portable.Solved, split: Split
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    segment = (split.tokens, split.slots)
    made = sm90.ends(terms, solved, terms.initial_state, segment)
    return sm90.meet(terms, made[0], *made, terms.initial_state, segment), made


def _meet_back(
    terms: Terms,
    do: Tensor,
    solved: portable.Solved,
    scale: float,
    dfinal: Tensor | None,
    made: tuple[Tensor, Tensor],
    split: Split,
) -> Tensor:
    segment = (split.tokens, split.slots)
    ends = sm90.ends_back(terms, do, solved, scale, dfinal, segment)
    return sm90.meet(terms, ends, *made, dfinal, segment, back=True)


def _own(active: int | None) -> portable.Own:
    if active is None:
        return _OWN
    walks = {"walk": _walk, "walk_back": _walk_back}
    return _OWN._replace(**{name: partial(x, active=active) for name, x in walks.items()})


_OWN = portable.Own(sm90.solve, _walk, _walk_back, sm90.grads, _together, _split, _meet, _meet_back)
