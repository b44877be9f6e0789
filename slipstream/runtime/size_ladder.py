"""Sizes that between them ask for every kernel variant that any size asks for.

What a call computes, its widths, heads, dtypes and options, says which kernels it can take; its
sizes choose among a few ways through them: tokens one after the other or in chunks, with fewer
programs than the GPU has multiprocessors or with more, with sequences cut into segments where they
are few and long. No number of tokens, rows or sequences is compiled into a kernel.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from slipstream.compiler.arch import named


class Size(NamedTuple):
    """A batch of B rows of T tokens, or `sequences` packed in one row of T. keys: of a cache, per
    sequence; 0: as many as there are tokens."""

    B: int
    T: int
    sequences: int = 0
    keys: int = 0


# Tokens of a sequence, and of all sequences together how many heads there are at most. The numbers
# of heads are the last before something changes: half of an H200's 132 multiprocessors, the fused
# backward of the delta rule (96), the same of so few packed sequences that all wait for the longest
# (115), and where sequences are cut into 2 to 8 segments.
STEPS = (
    (1, (1, 1024)),
    (12, (1,)),
    (100, (1, 66, 95, 115, named("sm_90").units)),
    (256, (1,)),
    (1024, (1, 33)),
    (2048, (1, 16, 24, 33, 66)),
    (8192, (1, 16)),
    (40000, (1,)),
)
# Keys of a cache, of which a number of programs share a sequence's: each power of 4 that their
# number is rounded up to (attention/triton/decode_launch.py), whatever the keys of a tile.
KEYS = (1, 64, 256, 1024, 4096, 16384, 65536)


def sizes(heads: int, packed: bool) -> list[Size]:
    """Lists the distinct sizes for calls of so many heads."""
    found: dict[Size, None] = {}
    for tokens, at_most in STEPS:
        for count in at_most:
            n = max(1, count // max(heads, 1))
            found[Size(1, n * tokens, n) if packed else Size(n, tokens)] = None
    return list(found)


class AtSizes(NamedTuple):
    """Makes the arguments of an operator in other sizes; tensors stay on their device.

    Attributes:
        tokens: places of arguments [B, T, ...], or [B T, D]. They lie in memory as they did.
        states: those [N, ...], N sequences.
        offsets: those [N + 1], which pack sequences if they are given.
        by_heads: those [B, H, T].
        heads: of an argument with a program for each entry of its dimension 2, or more.
        steps: the sizes, where they are not those of STEPS. T = 0: as many tokens as there are.
    """

    tokens: tuple[int, ...]
    states: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    by_heads: tuple[int, ...] = ()
    heads: int | None = None
    steps: tuple[Size, ...] = ()

    def __call__(self, args: tuple) -> Iterator[tuple]:
        packed = any(args[n] is not None for n in self.offsets)
        heads = 1 if self.heads is None else args[self.heads].shape[2]
        for size in self.steps or sizes(heads, packed):
            given: list[Any] = list(args)
            for n in self.tokens:
                given[n] = _of_tokens(args[n], size)
            for n in self.states:
                given[n] = resized(args[n], size.sequences or size.B)
            for n in self.offsets:
                given[n] = resized(args[n], (size.sequences or size.B) + 1)
            for n in self.by_heads:
                x = args[n]
                given[n] = None if x is None else x.new_empty(size.B, x.shape[1], size.T)
            yield tuple(given)


def _of_tokens(x: Tensor | None, size: Size) -> Tensor | None:
    if x is None or x.dim() < 2:
        return x
    T = size.T or x.shape[1]
    return resized(x, size.B, T) if x.dim() > 2 else resized(x, size.B * (size.T or 1))


def resized(x: Tensor | None, *first: int) -> Tensor | None:
    """A tensor like x whose first dimensions have these sizes, of which the first is outermost."""
    if x is None:
        return None
    outer = x.stride(1) * first[1] if len(first) > 1 else x.stride(0)
    shape, strides = (*first, *x.shape[len(first) :]), (outer, *x.stride()[1:])
    return x.new_empty_strided(shape, strides)
