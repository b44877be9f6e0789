"""The delta rule and free a and b on sm_90: all but a few small kernels are here.

Portable are the ends and the joining of segments; the gradients of the scores, where gates are per
channel or a and b free; and those of q, k, a and b without a gate per channel.

The portable walk that keeps states fits a multiprocessor twice without gates, this one once: that
one is taken where there are more programs than multiprocessors.
"""

import torch
from torch import Tensor

from slipstream.kernels.linear.hopper import delta_launch as sm90
from slipstream.kernels.linear.hopper import dplr_launch
from slipstream.kernels.linear.hopper.plan import per_channel
from slipstream.kernels.linear.terms import Terms
from slipstream.kernels.linear.triton import delta_launch as portable
from slipstream.kernels.linear.triton import dplr_launch as dplr_portable
from slipstream.kernels.linear.triton.delta_plan import crowded, slots_of
from slipstream.kernels.linear.triton.launch import Split


def forward(terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
    """As the portable one."""
    if per_channel(terms):
        return dplr_portable.forward(_placed(terms), scale, dplr_launch)
    return portable.forward(_placed(terms), scale, _OWN)


def backward(
    terms: Terms, dout: Tensor | None, dfinal: Tensor | None, scale: float
) -> dict[str, Tensor]:
    """As the portable one."""
    dout = None if dout is None else _at_16_bytes(dout)
    if per_channel(terms):
        return dplr_portable.backward(_placed(terms), dout, dfinal, scale, dplr_launch)
    return portable.backward(_placed(terms), dout, dfinal, scale, _OWN)


def _placed(terms: Terms) -> Terms:
    """With all as TMA reads them."""
    names = ("q", "k", "v", "a", "b", "g")
    given = {name: x for name in names if (x := getattr(terms, name)) is not None}
    return terms._replace(**{name: _at_16_bytes(x) for name, x in given.items()})


def _at_16_bytes(x: Tensor) -> Tensor:
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
) -> None:
    ends = {"states": states, "s_in": s_in, "s_out": s_out}
    if states is not None and terms.g is None and crowded(terms, slots_of(terms, split)):
        portable._walk(terms, solved, scale, o, **ends, split=split)
    else:
        sm90.walk(terms, *solved, scale, o, **ends, segment=_segment(split))


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
) -> None:
    ends = {"s_in": s_in, "s_out": s_out, "segment": _segment(split)}
    sm90.walk_back(terms, do, *solved, scale, dv, dstates, **ends)


def _segment(split: Split | None) -> tuple[int, int] | None:
    return None if split is None else (split.tokens, split.slots)


_OWN = portable.Own(sm90.solve, _walk, _walk_back, sm90.grads)
