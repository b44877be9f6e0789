"""Steps of one token with the bits of blocks: what operators have seen of each row's open block.

With consistent=True a token's bits are those of a call of its whole block of 64 tokens. Operators
that work on one token at a time (products, norms, gates) have these bits for that token alone, and
so do convolutions, which see the few tokens of a window. Only the recurrences need the whole block,
and their inputs for it are kept here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.runtime.consistent import BLOCK, consistent_scope


class BlockStep:
    """Buffers of a model's operators for one block a row, at fixed addresses.

    A tensor is found by its place in the order of calls, which is the same in every step.

    Args:
        counts: int64 [N], how many tokens each row's block has before the step.
        place: writes tokens [N, 1, ...] into blocks [N, 64, ...] at these places.
    """

    def __init__(self, counts: Tensor, place: Callable[..., None]) -> None:
        self.counts, self._place = counts, place
        self._kept: list[Tensor] = []
        self._next, self._fills = 0, False
        self._rows: Tensor | None = None

    @property
    def of_tokens(self) -> bool:
        """Whether the call that runs is of one token a row."""
        return not self._fills

    @contextmanager
    def running(self, fills: bool = False) -> Iterator[None]:
        """A call of the model's layers within it is of one token a row, [N, 1, ...], or, with
        `fills`, of all 64 at once."""
        self._next, self._fills, self._rows = 0, fills, None
        before, consistent_scope.step = consistent_scope.step, self
        try:
            yield
        finally:
            consistent_scope.step, self._rows = before, None

    def blocks(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """The whole blocks [N, 64, ...] of the step's tokens, each [N, 1, ...].

        Places after the token hold what they held before.
        """
        if self._fills:
            return [self._fill(x) for x in tokens]
        if tokens[0].shape[1] == BLOCK:  # of take
            return [*tokens]
        blocks = self.take(len(tokens))
        self._place(tokens, blocks, self.counts)
        return blocks

    def token(self, y: Tensor) -> Tensor:
        """The step's token [N, 1, ...] of a result y [N, 64, ...] for whole blocks."""
        if self._fills:
            return y
        if self._rows is None:
            first = torch.arange(0, y.shape[0] * BLOCK, BLOCK, device=y.device)
            self._rows = first + self.counts
        return y.flatten(0, 1).index_select(0, self._rows)[:, None]

    def window(self, x: Tensor, before: Tensor) -> Tensor | None:
        """The W tokens before the step's, [N, C, W], for the caller to move on in place.

        Args:
            x: the call's tokens, [N, T, C]. before: the W tokens before the block, [N, C, W].

        Returns:
            None where the call is of whole blocks, which need no window.
        """
        if not self._fills:
            return self.take(1)[0].mT
        at = self.counts[:, None] + torch.arange(before.shape[2], device=x.device)
        line = torch.cat([before.mT, x], 1)
        row = torch.arange(x.shape[0], device=x.device)[:, None]
        self._fill(line[row, at])
        return None

    def take(self, count: int) -> list[Tensor]:
        """The windows [N, W, C] and blocks that the next `count` operators keep: the caller writes
        the step's tokens into them."""
        self._next += count
        return self._kept[self._next - count : self._next]

    def _fill(self, x: Tensor) -> Tensor:
        if self._next == len(self._kept):
            self._kept.append(torch.empty_like(x, memory_format=torch.contiguous_format))
        return self.take(1)[0].copy_(x)

    def reorder(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was."""
        for x in self._kept:
            x.copy_(x[rows])
