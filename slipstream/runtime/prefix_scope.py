"""The scope in which layers leave their states within a prompt: models/prefixes.py opens it, and
operators and convolutions that return a final state look at it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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


class _Scope(threading.local):
    def __init__(self) -> None:
        # in each thread's own dictionary from the start: torch.compile guards on its being there
        self.prefixes: Prefixes | None = None


prefix_scope = _Scope()


@contextmanager
def leaving(prefixes: Prefixes) -> Iterator[None]:
    """Calls within leave their states there."""
    before = prefix_scope.prefixes
    prefix_scope.prefixes = prefixes
    try:
        yield
    finally:
        prefix_scope.prefixes = before
