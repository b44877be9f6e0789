"""The only sequential part of the chunkwise path: the state carried from chunk to chunk.

    x_m     = rest_m + right_m S_m
    S_{m+1} = rows_m * S_m * columns_m + add_m + left_m^T x_m

Its backward pass is the same walk from the last chunk to the first with left and right exchanged.
Cost: 4 C K V flops a chunk and row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.eager.layout import Carry, Span


class Step(NamedTuple):
    """Of every chunk; None is one for the factors and zero for the rest.

    rows [M, G, K or 1, 1], columns [M, G, 1, V], add [M, G, K, V];
    left, right [M, G, C, K] and rest [M, G, C, V], which becomes x: all three or none.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    add: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    rest: Tensor | None = None

    def advance(self, S: Tensor, m: int, out: Tensor) -> None:
        """From the state before chunk m to the one after it, [G, K, V] both."""
        if self.rows is not None:
            torch.mul(S, self.rows[m], out=out)
        else:
            out.copy_(S)
        if self.columns is not None:
            out.mul_(self.columns[m])
        if self.add is not None:
            out.add_(self.add[m])
        if self.left is not None:
            assert self.right is not None and self.rest is not None
            x = self.rest[m].baddbmm_(self.right[m], S)  # [G, C, V]
            out.baddbmm_(self.left[m].mT, x)


def walk(step: Step, carry: Carry, span: Span, *, reverse: bool) -> Tensor:
    """Walks the chunks of a span, from the last one if `reverse`, and leaves `carry` behind them.

    Returns:
        The state that each chunk met, [n, K, V].
    """
    K, V = carry.S.shape[-2:]
    # Between chunks m - 1 and m the state is at place m; backwards it comes from place m + 1.
    states = carry.S.new_empty(span.steps + 1, span.layout.rows, K, V)
    come, go = (1, 0) if reverse else (0, 1)
    states[span.steps if reverse else 0] = carry.S
    begins = None
    if span.map is not None:
        begins = span.map.last if reverse else span.map.first
    for m in reversed(range(span.steps)) if reverse else range(span.steps):
        S = states[m + come]
        if begins is None:
            step.advance(S, m, states[m + go])
            continue
        assert span.map is not None and carry.ends is not None
        own = span.map.sequence[m : m + 1]
        S.copy_(torch.where(begins[m], carry.ends.index_select(0, own)[0], S))
        step.advance(S, m, states[m + go])
        carry.ends.index_copy_(0, own, states[m + go][None])
    carry.S = states[0 if reverse else span.steps]
    return states[come : come + span.steps].view(-1, K, V)
