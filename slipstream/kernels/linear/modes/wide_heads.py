"""Heads of more channels than the kernels take, as more heads.

Columns of the state never meet: V of 512 is two value heads of 256 that share q and k. Its rows
meet only where a token erases: without a transition K of 512 is two heads of q and k, each with v,
whose outputs are added up. Gates, states and gradients follow, by torch's own views and sums.

With an erase (the delta rule, DPLR) rows cannot be split: what token t writes is v less beta k^T S,
or a^T S, a sum over all rows of the state before t. Groups of rows would have to add up [C, V]
numbers after every chunk, before any of them can go on: no two programs of a launch can wait for
each other for that, and launches for every chunk are what plain torch does. So K above 256 runs in
plain torch there (plan.py), which is said once.

Cost: a copy of each gate and state for every further group; scores of a chunk once a group; for
rows also v, and o in float32.

Columns are split besides where the kernels for sm_90 then take a call that they would not: heads of
128 or 256 channels of K and a multiple of that of V (dispatch.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from slipstream.common.checks import plain_int
from slipstream.kernels.linear.inputs import MAX_HEAD_DIM, LinearInputs
from slipstream.kernels.linear.modes.call import Call, Results


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
    return least, -(-channels // (least * 16)) * 16


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
        o = _cut(o.unflatten(2, (HV, groups.columns)).flatten(3), V)
        state = state.unflatten(1, (HV, groups.columns)).transpose(2, 3).contiguous().flatten(3)
        state = _cut(state, V)
    return o.to(terms.q.dtype).contiguous(), state.contiguous()


def shapes_of_split(terms: LinearInputs, groups: HeadGroups) -> LinearInputs:
    """The result of split_heads without data, for its shapes, dtypes and devices: made without an
    operation on the terms, so that a plan can be recorded."""
    if not groups.is_split:
        return terms
    times = {"H": groups.rows, "HV": groups.rows * groups.columns}
    widths = {"K": groups.K, "V": groups.V}
    found = {}
    for name, x, dims in _given(terms):
        shape = [widths.get(d, n * times.get(d, 1)) for d, n in zip(dims, x.shape, strict=True)]
        found[name] = x.new_empty(()).expand(shape)
    return terms._replace(**found)


def _padded(x: Tensor, channels: int) -> Tensor:
    more = channels - x.shape[-1]
    return F.pad(x, (0, more)) if more else x


def _cut(x: Tensor, channels: int) -> Tensor:
    return x if x.shape[-1] == channels else x[..., :channels]


def _split_columns(terms: LinearInputs, n: int, V: int) -> LinearInputs:
    """Each value head becomes n, a group of columns each."""
    found = {}
    for name, x, dims in _given(terms):
        if "HV" not in dims:
            continue
        heads = dims.index("HV")
        if "V" in dims:  # the last
            x = _padded(x, n * V).unflatten(-1, (n, V))
            found[name] = x.movedim(-2, heads + 1).flatten(heads, heads + 1)
        else:
            found[name] = x.repeat_interleave(plain_int(n), dim=heads)
    return terms._replace(**found)


def _split_rows(terms: LinearInputs, n: int, K: int) -> LinearInputs:
    """Value heads go by head of q, then group, then the value heads that share it."""
    H, found = terms.q.shape[2], {}
    for name, x, dims in _given(terms):
        heads = dims.index("HV" if "HV" in dims else "H")
        if "K" in dims:
            rows = dims.index("K")
            x = _padded(x.movedim(rows, -1), n * K).unflatten(-1, (n, K)).unflatten(heads, (H, -1))
            x = x.movedim(-2, heads + 1).flatten(heads, heads + 2).movedim(-1, rows)
        else:
            x = x.unflatten(heads, (H, 1, -1))
            shape = list(x.shape)
            shape[heads + 1] = n
            x = x.expand(shape).flatten(heads, heads + 2)
        found[name] = x
    return terms._replace(**found)


def _given(terms: LinearInputs) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
    """Name, tensor and dimensions of each term."""
    for name, dims in terms.dims.items():
        yield name, getattr(terms, name), dims


class WideHeads(NamedTuple):
    groups: HeadGroups

    def into(self, call: Call) -> Call:
        terms = split_heads(call.terms, self.groups)
        return call._replace(terms=terms, how=call.how._replace(wide=self.groups.rows > 1))

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        assert state is not None
        return join_heads(o, state, call.terms, self.groups)
