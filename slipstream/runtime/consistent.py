"""The scopes that operators look at: of `consistent=True`, of its steps, of states within a prompt.

Within consistent() nothing that decides about arithmetic looks at how many sequences or tokens a
call has.

Kernels then take every sequence as one segment, from its first chunk to its last, by the same
program. Plain torch has no such promise of torch's own functions, whose sums depend on sizes and,
on a CPU, on where an element lies; it works on one sequence and BLOCK tokens at a time.

A step (BlockStep) has the bits of blocks. A token's bits are those of a call of its whole block of
64 tokens. Operators that work on one token at a time (products, norms, gates) have these bits for
that token alone, and so do convolutions, which see the few tokens of a window. Only the recurrences
need the whole block, and their inputs for it are kept here.

In the scope that models/prefixes.py opens (leaving), operators and convolutions that return a final
state leave those within a prompt, too.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# Tokens between the places of a sequence at which it may be cut: a multiple of all chunks.
BLOCK = 64


class _Scope(threading.local):
    def __init__(self) -> None:
        # in each thread's own dictionary from the start: torch.compile guards on its being there
        self.on = False
        self.step: BlockStep | None = None


# Of this thread: `on` within consistent(), `step` within a decoding step of such a model.
consistent_scope = _Scope()


@contextmanager
def consistent(on: bool = True) -> Iterator[None]:
    """Calls within give the bits that any other cut or batch gives; on=False changes nothing."""
    before = consistent_scope.on
    consistent_scope.on = before or on
    try:
        yield
    finally:
        consistent_scope.on = before


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


class Prefixes:
    """States of one sequence after each `every` of its tokens, `count` times.

    Attributes:
        rows: int32 [1, ceil(T / 64)], the place of each 64 tokens' state among them, or -1.
        tensors: [count, ...] by their names in a layer's state, in the order of the calls.
    """

    def __init__(self, every: int, count: int, rows: Tensor) -> None:
        self.every, self.count, self.rows = every, count, rows
        self.tensors: dict[str, list[Tensor]] = {}

    def are_of(self, x: Tensor) -> bool:
        """Whether x [B, T, ...] has the tokens of the call."""
        return x.shape[:2] == (1, self.every * self.count)

    def add(self, name: str, states: Tensor) -> None:
        self.tensors.setdefault(name, []).append(states)

    def add_windows(self, x: Tensor, before: Tensor | None, width: int) -> None:
        """A convolution's: the last W tokens [count, C, W] of x [1, T, C] behind `before`."""
        if not self.are_of(x):
            return
        before = x.new_zeros(1, x.shape[2], width) if before is None else before
        line = torch.cat([before.mT.to(x.dtype), x], 1)[0]
        at = self._ends(x)[:, None] + torch.arange(width, device=x.device)
        self.add("conv", line[at].mT)

    def add_last_tokens(self, x: Tensor) -> None:
        """A token shift's: x [1, T, D] at the ends, [count, D]."""
        if self.are_of(x):
            self.add("shift", x[0, self._ends(x) - 1])

    def _ends(self, x: Tensor) -> Tensor:
        return torch.arange(1, self.count + 1, device=x.device) * self.every


class _PrefixScope(threading.local):
    def __init__(self) -> None:
        # in each thread's own dictionary from the start: torch.compile guards on its being there
        self.prefixes: Prefixes | None = None


prefix_scope = _PrefixScope()


@contextmanager
def leaving(prefixes: Prefixes) -> Iterator[None]:
    """Calls within leave their states there."""
    before = prefix_scope.prefixes
    prefix_scope.prefixes = prefixes
    try:
        yield
    finally:
        prefix_scope.prefixes = before
