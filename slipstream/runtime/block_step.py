"""Steps of one token with the bits of blocks: what operators have seen of each row's open block.

With consistent=True a token's bits are those of a call of its whole block of 64 tokens. What works
on one token at a time (products, norms, gates) gives them for that token alone. What looks at other
tokens, the recurrences and the convolutions, keeps its inputs of the block here, and runs on these:
nothing is computed twice but the recurrence.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.runtime.consistent import BLOCK, consistent_scope


class BlockStep:
    """The inputs of the operators of a model for one block a row, at fixed addresses.

    A tensor is found by its place in the order of calls, which is the same in every step.

    Args:
        counts: int64 [N], how many tokens each row's block has before the step.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        # [N, W + 64, ...]: W tokens before the block, and the block; W of each
        self._inputs: list[Tensor] = []
        self._before: list[int] = []
        self._next, self._fills = 0, False
        self._places: dict[tuple[int, bool], Tensor] = {}

    @contextmanager
    def running(self, fills: bool = False) -> Iterator[None]:
        """A call of the model's layers within it is of one token a row, [N, 1, ...], or, with
        `fills`, of all 64 at once."""
        self._next, self._fills = 0, fills
        self._places.clear()
        consistent_scope.step = self
        try:
            yield
        finally:
            consistent_scope.step = None
            self._places.clear()

    def block(self, x: Tensor) -> Tensor:
        """The whole block [N, 64, ...] of the step's token x [N, 1, ...].

        Places after the token hold what they held before. An x [N, 64, ...] is returned as it is.
        """
        return self._keep(x)

    def token(self, y: Tensor) -> Tensor:
        """The step's token [N, 1, ...] of a result y [N, 64, ...] for whole blocks."""
        if self._fills:
            return y
        return y.reshape(-1, *y.shape[2:])[self._rows(0)][:, None]

    def behind(self, x: Tensor, before: Tensor, whole: bool = False) -> tuple[Tensor, Tensor]:
        """x [N, T, C] behind the W tokens before it, [N, W + T, C]; and the last W tokens of the
        block [N, W, C].

        Args:
            before: those before the block, [N, W, C].
            whole: the whole block instead, [N, W + 64, C]: for what goes into `block`.
        """
        line, width = self._keep(x, before), before.shape[1]
        if self._fills or whole:
            return line, line[:, BLOCK:]
        found = line.view(-1, line.shape[2])[self._rows(width, with_before=True)]
        return found.view(x.shape[0], width + 1, -1), line[:, BLOCK:]

    def close(self, whole: Tensor) -> None:
        """The rows of which `whole` [N] is true begin a block."""
        for line, width in zip(self._inputs, self._before):
            if width:
                last, before = line[:, BLOCK:], line[:, :width]
                line[:, :width] = torch.where(whole[:, None, None], last, before)

    def reorder(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        for line in self._inputs:
            line.copy_(line[rows])

    def _rows(self, width: int, with_before: bool = False) -> Tensor:
        """Indices [N] of the step's tokens into a tensor [N (width + 64), ...], flattened.

        `width` tokens precede each block. with_before: each token and `width` before it,
        [N (width + 1)].
        """
        if (width, with_before) not in self._places:
            counts = self.counts
            first = torch.arange(counts.shape[0], device=counts.device) * (width + BLOCK)
            last = first + counts + width
            if with_before:
                last = (last[:, None] + torch.arange(-width, 1, device=counts.device)).flatten()
            self._places[width, with_before] = last
        return self._places[width, with_before]

    def _keep(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        place, width = self._next, 0 if before is None else before.shape[1]
        self._next += 1
        if self._fills:
            if place == len(self._inputs):
                shape = x.shape[0], width + BLOCK, *x.shape[2:]
                self._inputs.append(x.new_empty(shape))
                self._before.append(width)
            if before is not None:
                self._inputs[place][:, :width] = before
            self._inputs[place][:, width:] = x
            return self._inputs[place]
        if x.shape[1] == BLOCK:
            return x
        line = self._inputs[place]
        line.view(-1, *line.shape[2:]).index_copy_(0, self._rows(width), x[:, 0])
        return line
