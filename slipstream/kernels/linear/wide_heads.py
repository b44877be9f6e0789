"""Heads of more channels than the kernels take, as more heads.

Columns of the state never meet: V of 512 is two value heads of 256 that share q and k. Its rows
meet only where a token erases: without a transition K of 512 is two heads of q and k, each with v,
whose outputs are added up. Gates, states and gradients follow, by torch's own views and sums.

With an erase (the delta rule, DPLR) rows cannot be split: what token t writes is v less beta k^T S,
or a^T S, a sum over all rows of the state before t. Groups of rows would have to add up [C, V]
numbers after every chunk, before any of them can go on: no two programs of a launch can wait for
each other for that, and launches for every chunk are what plain torch does. So K above 256 runs in
plain torch there (triton/plan.py), which is said once.

Cost: a copy of each gate and state for every further group; scores of a chunk once a group; for
rows also v, and o in float32.

Columns are split besides where the kernels for sm_90 then take a call that they would not: heads of
128 or 256 channels of K and a multiple of that of V (dispatch.py).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.linear.inputs import MAX_HEAD_DIM, LinearInputs

_ALIGNED = 16  # channels of a group are a multiple


class HeadGroups(NamedTuple):
    """How many groups of how many rows (of K) and columns (of V); one group is the head itself."""

    rows: int
    K: int
    columns: int
    V: int

    @property
    def is_split(self) -> bool:
        return self.rows > 1 or self.columns > 1


def groups_of(terms: LinearInputs, widest: int = MAX_HEAD_DIM) -> HeadGroups:
    """By shapes alone."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    rows = (1, K) if terms.transition != "none" else _groups(K, widest)
    return HeadGroups(*rows, *_groups(V, widest))


def _groups(channels: int, widest: int) -> tuple[int, int]:
    """As few as there can be, or up to twice as many if they are then powers of two."""
    if channels <= widest:
        return 1, channels
    least = -(-channels // widest)
    for n in range(least, 2 * least + 1):
        if channels % n == 0 and channels // n in (widest // 2, widest):
            return n, channels // n
    return least, -(-channels // (least * _ALIGNED)) * _ALIGNED


def split_heads(terms: LinearInputs, groups: HeadGroups) -> LinearInputs:
    if groups.columns > 1:
        terms = _split_columns(terms, groups.columns, groups.V)
    if groups.rows > 1:
        terms = _split_rows(terms, groups.rows, groups.K)
    return terms


def join_heads(
    o: Tensor, state: Tensor, terms: LinearInputs, groups: HeadGroups
) -> tuple[Tensor, Tensor]:
    """o in the dtype of the terms' q, and the state, of the heads there were.

    Args:
        terms: before split_heads.
    """
    (H, K), (HV, V) = terms.q.shape[2:], terms.v.shape[2:]
    if groups.rows > 1:
        o = o.unflatten(2, (H, groups.rows, -1)).sum(3).flatten(2, 3)
        state = state.unflatten(1, (H, groups.rows, -1)).transpose(2, 3)  # [N, H, r, rows, ...]
        state = state.flatten(3, 4).flatten(1, 2)[:, :, :K]
    if groups.columns > 1:
        o = o.unflatten(2, (HV, groups.columns)).flatten(3)[..., :V]
        state = state.unflatten(1, (HV, groups.columns)).transpose(2, 3).flatten(3)[..., :V]
    return o.to(terms.q.dtype).contiguous(), state.contiguous()


def shapes_of_split(terms: LinearInputs, groups: HeadGroups) -> LinearInputs:
    """What split_heads makes, for those who look at shapes, dtypes and devices only."""
    if not groups.is_split:
        return terms
    meta = LinearInputs(
        *(None if x is None else torch.empty_like(x, device="meta") for x in terms)  # type: ignore
    )
    made = split_heads(meta, groups)
    pairs = zip(terms, made)
    return LinearInputs(*(None if x is None else x.new_empty(()).expand(y.shape) for x, y in pairs))  # type: ignore


def _padded(x: Tensor, channels: int) -> Tensor:
    more = channels - x.shape[-1]
    return F.pad(x, (0, more)) if more else x


def _split_columns(terms: LinearInputs, n: int, V: int) -> LinearInputs:
    def columns(x: Tensor | None) -> Tensor | None:
        """[B, T, HV, V] to [B, T, HV n, V / n]."""
        return None if x is None else _padded(x, n * V).unflatten(-1, (n, V)).flatten(2, 3)

    def each(x: Tensor | None, dim: int = 2) -> Tensor | None:
        return None if x is None else x.repeat_interleave(n, dim=dim)

    state, wide_beta = terms.initial_state, terms.beta is not None and terms.beta.dim() == 4
    if state is not None:
        state = _padded(state, n * V).unflatten(-1, (n, V)).movedim(3, 2).flatten(1, 2)
    v = columns(terms.v)
    assert v is not None
    return terms._replace(
        v=v,
        gv=columns(terms.gv),
        beta=columns(terms.beta) if wide_beta else each(terms.beta),
        g=each(terms.g),
        u=each(terms.u, 0),
        initial_state=state,
    )


def _split_rows(terms: LinearInputs, n: int, K: int) -> LinearInputs:
    """Value heads go by head of q, then group, then the value heads that share it."""
    H = terms.q.shape[2]

    def rows(x: Tensor) -> Tensor:
        """[B, T, H, K] to [B, T, H n, K / n]."""
        return _padded(x, n * K).unflatten(-1, (n, K)).flatten(2, 3)

    def rows_of_value_heads(x: Tensor, dim: int) -> Tensor:
        """[..., HV at dim, K] to [..., HV n, K / n]."""
        x = _padded(x, n * K).unflatten(-1, (n, K)).unflatten(dim, (H, -1))
        return x.movedim(-2, dim + 1).flatten(dim, dim + 2)

    def each(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.unflatten(2, (H, 1, -1))
        return x.expand(*x.shape[:3], n, *x.shape[4:]).flatten(2, 4)

    g, state, v = terms.g, terms.initial_state, each(terms.v)
    assert v is not None
    if g is not None:
        g = each(g) if g.dim() == 3 else rows_of_value_heads(g, 2)
    if state is not None:
        state = rows_of_value_heads(state.mT, 1).mT
    return terms._replace(
        q=rows(terms.q),
        k=rows(terms.k),
        v=v,
        g=g,
        gv=each(terms.gv),
        u=None if terms.u is None else rows_of_value_heads(terms.u, 0),
        initial_state=state,
    )
