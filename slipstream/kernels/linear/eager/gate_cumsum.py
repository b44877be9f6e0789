"""Sums of gates between the tokens of a chunk and the seams of its halvings, up and back down.

For blocks of `side` tokens, with g [n, C, K]:

    before[i] = sum of g from the block's first token to i - 1
    rest[j]   = sum of g from j + 1 to the block's last token
    total     = sum of g over the block

Doubling the side adds the earlier half's total to `before` of the later half and the later half's
total to `rest` of the earlier half: additions of numbers of one sign, which lose nothing. Coming
back down, gradients of these sums become gradients of the gates by the transposed additions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# A slice of chunks is worked on at a time so that what it needs stays in the cache of a core.
SLICE_ELEMENTS = 1 << 20


def slices(chunks: int, elements_each: int) -> Iterator[slice]:
    step = max(1, SLICE_ELEMENTS // max(1, elements_each))
    for start in range(0, chunks, step):
        yield slice(start, min(start + step, chunks))


def halves(x: Tensor, side: int) -> Tensor:
    """[n, C, ...] as [n, m, 2, side, ...]: m blocks of an earlier and a later half."""
    return x.view(x.shape[0], -1, 2, side, *x.shape[2:])


def squares_of(scores: Tensor, side: int) -> Tensor:
    """Scores [n, C, C] of later halves against earlier ones, as a view [n, m, side, side]."""
    n, C, _ = scores.shape
    m = C // (2 * side)
    blocks = scores.view(n, m, 2, side, m, 2, side)[:, :, 1, :, :, 0]
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


class Midpoint(NamedTuple):
    """Factors between the halves of each block, [n, m, side, K].

    after, before: exp of the gates from the seam to token i of the later half, with or without i's
    own. rest: exp of the gates from token j of the earlier half, without its own, to the seam.
    """

    after: Tensor
    before: Tensor
    rest: Tensor


class ChannelScan:
    def __init__(self, g: Tensor) -> None:
        _, self.chunk, self.width = g.shape
        self.g, self.sums = g, g  # sums: total of each block, [n, blocks, K]
        self.before, self.rest = torch.zeros_like(g), torch.zeros_like(g)

    def up(self) -> Iterator[tuple[int, Midpoint]]:
        """Sides 1, 2, ..., C/2, each with the factors of its seams."""
        side = 1
        while side < self.chunk:
            before = halves(self.before, side)[:, :, 1]
            rest = halves(self.rest, side)[:, :, 0]
            after = before + halves(self.g, side)[:, :, 1]
            yield side, Midpoint(after.exp_(), before.exp(), rest.exp())
            sums = self.sums.view(self.sums.shape[0], -1, 2, self.width)
            before += sums[:, :, 0, None]
            rest += sums[:, :, 1, None]
            self.sums = sums.sum(2)
            side *= 2

    def from_start(self) -> Tensor:
        return (self.before + self.g).exp_()

    def from_start_before(self) -> Tensor:
        return self.before.exp()

    def to_end(self) -> Tensor:
        return self.rest.exp()

    def total(self) -> Tensor:
        return self.sums[:, 0]

    # Down again: d* are gradients of the sums of the side reached, dg what is g's alone.

    def start_down(self, dtotal: Tensor) -> None:
        self.dsums = dtotal[:, None]
        self.dbefore, self.drest = torch.zeros_like(self.g), torch.zeros_like(self.g)
        self.dg = torch.zeros_like(self.g)

    def leave(self, after: Tensor | None, before: Tensor | None, rest: Tensor) -> None:
        """Adds gradients of the exponents of from_start, from_start_before and to_end."""
        self._leave(self.dbefore, self.dg, self.drest, after, before, rest)

    def leave_seam(
        self, side: int, after: Tensor | None, before: Tensor | None, rest: Tensor
    ) -> None:
        """The same for the factors of a Seam."""
        dbefore, dg = halves(self.dbefore, side)[:, :, 1], halves(self.dg, side)[:, :, 1]
        self._leave(dbefore, dg, halves(self.drest, side)[:, :, 0], after, before, rest)

    @staticmethod
    def _leave(
        dbefore: Tensor,
        dg: Tensor,
        drest: Tensor,
        after: Tensor | None,
        before: Tensor | None,
        rest: Tensor,
    ) -> None:
        if after is not None:
            dbefore += after
            dg += after
        if before is not None:
            dbefore += before
        drest += rest

    def split(self, side: int) -> None:
        """From blocks of 2 * side to blocks of side."""
        earlier = self.dsums + halves(self.dbefore, side)[:, :, 1].sum(2)
        later = self.dsums + halves(self.drest, side)[:, :, 0].sum(2)
        self.dsums = torch.stack([earlier, later], dim=2).flatten(1, 2)

    def gradient(self) -> Tensor:
        return self.dg + self.dsums
