"""The only sequential part of the chunkwise path: the state carried from chunk to chunk.

    x_m     = rest_m + right_m S_m
    S_{m+1} = rows_m * S_m * columns_m + add_m + left_m^T x_m

Its backward pass is the same walk from the last chunk to the first with left and right exchanged.
Cost: 4 C K V flops a chunk and row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.eager.layout import Layout


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


def walk(step: Step, ends: Tensor, layout: Layout, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Walks the chunks of every row, from the last one if `reverse`.

    Args:
        ends: state of each sequence where the walk begins, [N, HV, K, V]; overwritten.

    Returns:
        The state that each chunk met, [n, K, V], and each sequence's state where the walk ends.
    """
    K, V = ends.shape[-2:]
    chunks, chunk_map = layout.chunks, layout.map
    # Between chunks m - 1 and m the state is at place m; backwards it comes from place m + 1.
    states = ends.new_empty(chunks + 1, layout.rows, K, V)
    come, go = (1, 0) if reverse else (0, 1)
    order = reversed(range(chunks)) if reverse else range(chunks)
    if chunk_map is None:
        states[chunks if reverse else 0] = ends.view(-1, K, V)
        for m in order:
            step.advance(states[m + come], m, states[m + go])
        ends = states[0 if reverse else chunks].view(ends.shape)
        return states[come : come + chunks].view(-1, K, V), ends.clone()
    # One more sequence takes what the spare chunk slots produce.
    ends = torch.cat([ends, ends.new_zeros(1, *ends.shape[1:])])
    begins = chunk_map.last if reverse else chunk_map.first
    states[chunks if reverse else 0] = 0.0
    for m in order:
        S, own = states[m + come], chunk_map.sequence[m : m + 1]
        S.copy_(torch.where(begins[m], ends.index_select(0, own)[0], S))
        step.advance(S, m, states[m + go])
        ends.index_copy_(0, own, states[m + go][None])
    return states[come : come + chunks].view(-1, K, V), ends[:-1].clone()
