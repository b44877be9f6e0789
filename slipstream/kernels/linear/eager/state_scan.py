"""The only sequential part of the chunkwise path: the state carried from chunk to chunk.

    x_m     = rest_m + right_m S_m
    S_{m+1} = rows_m * S_m * columns_m + add_m + left_m^T x_m

Its backward pass is the same scan from the last chunk to the first with left and right exchanged.
Cost: 4 C K V flops a chunk and row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.eager.layout import Carry, ChunkBlock


class Step(NamedTuple):
    """The steps of all chunks; None is one for the factors and zero for the rest.

    rows [M, G, K or 1, 1], columns [M, G, 1, V], add [M, G, K, V];
    lhs, rhs [M, G, C, K] and rest [M, G, C, V], which becomes x: all three or none.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    add: Tensor | None = None
    lhs: Tensor | None = None
    rhs: Tensor | None = None
    rest: Tensor | None = None

    def unbind(self) -> list["Step"]:
        """A step for each m, without that dimension."""
        given = {name: x.unbind(0) for name, x in self._asdict().items() if x is not None}
        steps = len(next(iter(given.values())))
        return [Step(**{name: xs[m] for name, xs in given.items()}) for m in range(steps)]

    def advance(self, S: Tensor, out: Tensor) -> None:
        """From the state before a chunk to the one after it, [G, K, V] both; out may be S."""
        x = None
        if self.rhs is not None and self.rest is not None:
            x = self.rest.baddbmm_(self.rhs, S)  # [G, C, V]
        if self.rows is not None:
            torch.mul(S, self.rows, out=out)
        elif out is not S:
            out.copy_(S)
        if self.columns is not None:
            out.mul_(self.columns)
        if self.add is not None:
            out.add_(self.add)
        if self.lhs is not None and x is not None:
            out.baddbmm_(self.lhs.mT, x)


def state_scan(step: Step, carry: Carry, span: ChunkBlock, *, reverse: bool) -> Tensor:
    """Scans the chunks of a span, from the last one if `reverse`, and leaves `carry` behind them.

    Returns:
        The state that each chunk met, [n, K, V].
    """
    # Between chunks m - 1 and m the state is at place m; backwards it comes from place m + 1.
    states = carry.S.new_empty(span.steps + 1, *carry.S.shape)
    come, go = (1, 0) if reverse else (0, 1)
    states[span.steps if reverse else 0] = carry.S
    steps = step.unbind()
    for m in reversed(range(span.steps)) if reverse else range(span.steps):
        S = _enter(states[m + come], carry, span, m, reverse)
        steps[m].advance(S, states[m + go])
        _leave(states[m + go], carry, span, m)
    carry.S = states[0 if reverse else span.steps]
    return states[come : come + span.steps].flatten(0, 1)


def state_scan_in_place(
    step: Step, carry: Carry, span: ChunkBlock, reads: Tensor | None
) -> Tensor | None:
    """Scans forward keeping no states; what `reads` [M, G, C, K] see of them is [n, C, V]."""
    S, seen = carry.S, None
    if reads is not None:
        seen = S.new_empty(*reads.shape[:3], S.shape[-1])
    for m, one in enumerate(step.unbind()):
        S = _enter(S, carry, span, m, reverse=False)
        if reads is not None and seen is not None:
            torch.bmm(reads[m], S, out=seen[m])
        one.advance(S, S)
        _leave(S, carry, span, m)
    return None if seen is None else seen.flatten(0, 1)


def _enter(S: Tensor, carry: Carry, span: ChunkBlock, m: int, reverse: bool) -> Tensor:
    """S, with the state of its own sequence in place of it where the chunk begins one."""
    if span.map is None:
        return S
    assert carry.ends is not None
    begins = (span.map.last if reverse else span.map.first)[m]
    entry = carry.ends.index_select(0, span.map.sequence[m : m + 1])[0]
    return S.copy_(torch.where(begins, entry, S))


def _leave(S: Tensor, carry: Carry, span: ChunkBlock, m: int) -> None:
    if span.map is not None:
        assert carry.ends is not None
        carry.ends.index_copy_(0, span.map.sequence[m : m + 1], S[None])
