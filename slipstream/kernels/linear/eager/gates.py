"""Decay inside a chunk: the decayed scores of its tokens and the factors to and from its edges.

With G_i = g_1 + ... + g_i inside a chunk of C tokens, a read r and a write w, both [n, C, K],

    scores[i, j] = r_i^T diag(exp(G_i - G_j)) w_j     j <= i ("after"), j < i ("strict")
    scores[i, j] = r_i^T diag(exp(G_{i-1} - G_j)) w_j j < i  ("before": reads the state before D_i)
    from_state   = r_i exp(G_i), or exp(G_{i-1})      what r_i reads of the state before the chunk
    to_state     = w_j exp(G_C - G_j)                 what is left of w_j in the state after it
    total        = exp(G_C)

Every exponent is a sum of gates between two tokens and computed as such, never as a difference of
larger numbers or a product of exp(G_i) and exp(-G_j): nothing overflows and nothing cancels,
whatever the gates. Likewise the gradient of g_t is summed over the pairs i >= t > j alone.

The three gates have one interface over lists of reads and writes: forward, from_state, backward.

Gates are summed between the tokens of a chunk and the seams of its halvings. For blocks of `side`
tokens, with g [n, C, K]:

    before[i] = sum of g from the block's first token to i - 1
    rest[j]   = sum of g from j + 1 to the block's last token
    total     = sum of g over the block

Doubling the side adds the earlier half's total to `before` of the later half and the later half's
total to `rest` of the earlier half: additions of numbers of one sign, which lose nothing. Coming
back down, gradients of these sums become gradients of the gates by the transposed additions.

Decay of the columns of the state, gv [n, C, V]: the rows of V decay between write and read.

    o_i = sum over j <= i of scores[i, j] exp(Gv_i - Gv_j) * v_j

The mirror of gates.ChannelGate, which decays what the scores are made of: here it is what they are
applied to. Only the additive transition has it in chunks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common.linear_rows import CHUNK_ELEMENTS


def slices(chunks: int, elements_each: int) -> Iterator[slice]:
    # what a slice of chunks needs stays in the cache of a core
    step = max(1, CHUNK_ELEMENTS["cpu"] // max(1, elements_each))
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


Rows = Sequence[Tensor]  # [n, C, K] each


class Intra(NamedTuple):
    """scores[r][w] [n, C, C], 0 where r does not reach w; to_state[w] [n, C, K]; total [n, K]."""

    scores: list[list[Tensor]]
    to_state: list[Tensor]
    total: Tensor | None


class IntraGrads(NamedTuple):
    """Gradients of scores (where they are not zero), from_state and to_state, and d/dG_C [n, K]."""

    scores: list[list[Tensor]]
    from_state: list[Tensor]
    to_state: list[Tensor]
    log_total: Tensor | None


class InputGrads(NamedTuple):
    reads: list[Tensor]
    writes: list[Tensor]
    g: Tensor | None


def _products_back(reads: Rows, writes: Rows, d: IntraGrads) -> tuple[list[Tensor], list[Tensor]]:
    """Adds to the gradients at the edges, in place, those through undecayed scores."""
    for r, read in enumerate(reads):
        for w, write in enumerate(writes):
            d.from_state[r].baddbmm_(d.scores[r][w], write)
            d.to_state[w].baddbmm_(d.scores[r][w].mT, read)
    return d.from_state, d.to_state


class NoGate:
    """No decay: all factors are one."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds

    def _mask(self, scores: Tensor, kind: str) -> Tensor:
        return scores.tril_(0 if kind == "after" else -1)

    def forward(self, reads: Rows, writes: Rows) -> Intra:
        scores = [
            [self._mask(read @ write.mT, kind) for write in writes]
            for read, kind in zip(reads, self.kinds)
        ]
        return Intra(scores, list(writes), None)

    def from_state(self, read: Tensor, r: int, lhs: Tensor | None = None) -> Tensor:
        """The operand by which read r reads the state, multiplied from the left by a matrix
        [n, C, C] if given."""
        return read if lhs is None else lhs @ read

    def backward(self, reads: Rows, writes: Rows, intra: Intra, d: IntraGrads) -> InputGrads:
        for kind, row in zip(self.kinds, d.scores):
            for scores in row:
                self._mask(scores, kind)
        return InputGrads(*_products_back(reads, writes, d), None)


class ScalarGate:
    """One decay a token, g [n, C]."""

    def __init__(self, g: Tensor, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        n, C = g.shape
        scan = ChannelScan(g[:, :, None])
        # By "before" or not: exp(G_{i-1} - G_j), j < i, and exp(G_i - G_j), j <= i, by squares as
        # in ChannelGate; and the factors of what a token reads of the state before the chunk.
        self.decay = {kind == "before": g.new_zeros(n, C, C) for kind in kinds}
        if False in self.decay:
            self.decay[False].diagonal(dim1=1, dim2=2).fill_(1.0)
        for side, seam in scan.up():
            for before, decay in self.decay.items():
                later = seam.before if before else seam.after
                torch.mul(later, seam.rest.mT, out=squares_of(decay, side))
        self.from_start = {
            before: scan.from_start_before() if before else scan.from_start()
            for before in self.decay
        }
        self.to_end = scan.to_end()
        self.total = scan.total().exp()  # [n, 1]

    def _decayed(self, scores: Tensor, kind: str) -> Tensor:
        scores.mul_(self.decay[kind == "before"])
        if kind == "strict":
            scores.diagonal(dim1=1, dim2=2).zero_()
        return scores

    def forward(self, reads: Rows, writes: Rows) -> Intra:
        scores = [
            [self._decayed(read @ write.mT, kind) for write in writes]
            for read, kind in zip(reads, self.kinds)
        ]
        return Intra(scores, [write * self.to_end for write in writes], self.total)

    def from_state(self, read: Tensor, r: int, lhs: Tensor | None = None) -> Tensor:
        """As NoGate's; a matrix from the left takes the factors, being the smaller of the two."""
        factor = self.from_start[self.kinds[r] == "before"]
        return read * factor if lhs is None else (lhs * factor.mT) @ read

    def backward(self, reads: Rows, writes: Rows, intra: Intra, d: IntraGrads) -> InputGrads:
        C = reads[0].shape[1]
        assert d.log_total is not None
        ones = torch.ones(C, C, dtype=reads[0].dtype, device=reads[0].device)
        entering = [x.mul_(self.to_end) * write for x, write in zip(d.to_state, writes)]
        dg = _sum(entering).sum(-1) @ ones.triu(1)  # j < t
        dg += d.log_total.sum(-1, keepdim=True)
        for before, factor in self.from_start.items():
            chosen = [r for r, kind in enumerate(self.kinds) if (kind == "before") == before]
            first = 1 if before else 0
            # P[i, j]: what scaling the decay from j to i would do; g_t is in those with j < t <= i,
            # or t < i where the read is before i's decay.
            P = _sum([x * y for r in chosen for x, y in zip(d.scores[r], intra.scores[r])])
            dg += torch.matmul(ones.triu(first), P).mul_(ones.tril(-1)).sum(-1)
            leave = _sum([d.from_state[r].mul_(factor) * reads[r] for r in chosen]).sum(-1)
            dg += leave @ ones.tril(-first)
        for kind, row in zip(self.kinds, d.scores):
            for scores in row:
                self._decayed(scores, kind)
        return InputGrads(*_products_back(reads, writes, d), dg)


class ChannelGate:
    """A decay for every channel of K, g [n, C, K].

    The lower triangle of a chunk is halved again and again: the square of the tokens of the later
    half of a block against those of the earlier one factors at the seam between them,
    exp(G_i - G_seam) exp(G_seam - G_j), both at most 1. Squares of side C/2, C/4, ..., 1 cover all
    j < i, each one product of matrices (ChannelScan has the exponents).
    """

    def __init__(self, g: Tensor, kinds: tuple[str, ...]) -> None:
        self.g, self.kinds = g, kinds
        # of the kinds there are
        self.from_start = {kind == "before": torch.empty_like(g) for kind in kinds}

    def forward(self, reads: Rows, writes: Rows) -> Intra:
        n, C, K = self.g.shape
        scores = [[self.g.new_zeros(n, C, C) for _ in writes] for _ in reads]
        to_state = [torch.empty_like(write) for write in writes]
        total = self.g.new_empty(n, K)
        for cut in slices(n, C * K * (len(reads) + len(writes))):
            scan = ChannelScan(self.g[cut])
            for side, seam in scan.up():
                later = self._later(reads, cut, side, seam)
                earlier = [halves(write[cut], side)[:, :, 0] * seam.rest for write in writes]
                for r, row in enumerate(scores):
                    for w, square in enumerate(row):
                        squares_of(square[cut], side).copy_(later[r] @ earlier[w].mT)
            for before, factor in self.from_start.items():
                factor[cut] = scan.from_start_before() if before else scan.from_start()
            for w, write in enumerate(writes):
                torch.mul(write[cut], scan.to_end(), out=to_state[w][cut])
            total[cut] = scan.total().exp()
        for r, kind in enumerate(self.kinds):
            if kind == "after":  # a token reads its own write undecayed
                for w, write in enumerate(writes):
                    diag = (reads[r] * write).sum(-1)
                    scores[r][w].diagonal(dim1=1, dim2=2).copy_(diag)
        return Intra(scores, to_state, total)

    def from_state(self, read: Tensor, r: int, lhs: Tensor | None = None) -> Tensor:
        """As NoGate's."""
        out = read * self.from_start[self.kinds[r] == "before"]
        return out if lhs is None else lhs @ out

    def _later(self, reads: Rows, cut: slice, side: int, seam: Midpoint) -> list[Tensor]:
        """The reads of the later halves, decayed from the seam, [n, m, side, K] each."""
        return [
            halves(read[cut], side)[:, :, 1] * (seam.before if kind == "before" else seam.after)
            for read, kind in zip(reads, self.kinds)
        ]

    def backward(self, reads: Rows, writes: Rows, intra: Intra, d: IntraGrads) -> InputGrads:
        n, C, K = self.g.shape
        dg = torch.empty_like(self.g)
        for cut in slices(n, 4 * C * K * (len(reads) + len(writes))):
            self._backward(cut, reads, writes, d, dg)
        for r, kind in enumerate(self.kinds):
            if kind == "after":
                for w, write in enumerate(writes):
                    diag = d.scores[r][w].diagonal(dim1=1, dim2=2)[..., None]
                    d.from_state[r].addcmul_(diag, write)
                    d.to_state[w].addcmul_(diag, reads[r])
        return InputGrads(d.from_state, d.to_state, dg)

    def _backward(self, cut: slice, reads: Rows, writes: Rows, d: IntraGrads, dg: Tensor) -> None:
        """A slice of chunks, except the diagonals; d.from_state and to_state become the result."""
        assert d.log_total is not None
        scan = ChannelScan(self.g[cut])
        seams = list(scan.up())
        for x, kind in zip(d.from_state, self.kinds):
            x[cut] *= self.from_start[kind == "before"][cut]
        for x in d.to_state:
            x[cut] *= scan.to_end()
        scan.start_down(d.log_total[cut])
        leaving = [read[cut] * x[cut] for read, x in zip(reads, d.from_state)]
        entering = [write[cut] * x[cut] for write, x in zip(writes, d.to_state)]
        scan.leave(*self._by_kind(leaving), _sum(entering))
        for side, seam in reversed(seams):
            scan.split(side)
            later = self._later(reads, cut, side, seam)
            earlier = [halves(write[cut], side)[:, :, 0] * seam.rest for write in writes]
            squares = [[squares_of(x[cut], side).contiguous() for x in row] for row in d.scores]
            dlater = [_sum([s @ e for s, e in zip(row, earlier)]) for row in squares]
            dearlier = [
                _sum([row[w].mT @ x for row, x in zip(squares, later)]) for w in range(len(writes))
            ]
            for x, dx in zip((*later, *earlier), (*dlater, *dearlier)):
                x.mul_(dx)  # r_i . dr_i: the gradient of the exponent
            scan.leave_seam(side, *self._by_kind(later), _sum(earlier))
            for x, dx, kind in zip(d.from_state, dlater, self.kinds):
                factor = seam.before if kind == "before" else seam.after
                halves(x[cut], side)[:, :, 1].addcmul_(dx, factor)
            for x, dx in zip(d.to_state, dearlier):
                halves(x[cut], side)[:, :, 0].addcmul_(dx, seam.rest)
        dg[cut] = scan.gradient()

    def _by_kind(self, rows: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Summed over the reads after the decay, and over those before it."""
        after = [x for x, kind in zip(rows, self.kinds) if kind != "before"]
        before = [x for x, kind in zip(rows, self.kinds) if kind == "before"]
        return _sum(after) if after else None, _sum(before) if before else None


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for x in tensors[1:]:
        total = total + x
    return total


class ValueGate:
    def __init__(self, gv: Tensor) -> None:
        self.gv = gv
        self.from_start, self.to_end = torch.empty_like(gv), torch.empty_like(gv)
        self.total = gv.new_empty(gv.shape[0], 1, gv.shape[2])
        for cut in self._slices():
            scan = ChannelScan(gv[cut])
            for _ in scan.up():
                pass
            self.from_start[cut] = scan.from_start()
            self.to_end[cut] = scan.to_end()
            self.total[cut] = scan.total().exp()[:, None]

    def _slices(self):
        n, C, V = self.gv.shape
        return slices(n, 4 * C * V)

    def forward(self, scores: Tensor, v: Tensor) -> Tensor:
        """Scores [n, C, C], lower triangular, applied to v [n, C, V]."""
        o = torch.diagonal(scores, dim1=1, dim2=2)[..., None] * v
        for cut in self._slices():
            for side, seam in ChannelScan(self.gv[cut]).up():
                squares = squares_of(scores[cut], side)  # [n, m, s, s]
                earlier = halves(v[cut], side)[:, :, 0] * seam.rest
                halves(o[cut], side)[:, :, 1].add_((squares @ earlier) * seam.after)
        return o

    def backward(
        self, scores: Tensor, v: Tensor, do: Tensor, leave: Tensor, enter: Tensor, dtotal: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of scores, v and gv.

        Args:
            do: gradient of forward's output, [n, C, V].
            leave, enter: gradients of the exponents of from_start and to_end, [n, C, V].
            dtotal: gradient of the exponent of total, [n, V].
        """
        dscores = torch.zeros_like(scores)
        dv = torch.diagonal(scores, dim1=1, dim2=2)[..., None] * do
        torch.diagonal(dscores, dim1=1, dim2=2).copy_((do * v).sum(-1))
        dgv = torch.empty_like(self.gv)
        for cut in self._slices():
            scan = ChannelScan(self.gv[cut])
            seams = list(scan.up())
            scan.start_down(dtotal[cut])
            scan.leave(leave[cut], None, enter[cut])
            for side, seam in reversed(seams):
                scan.split(side)
                self._seam(scan, side, seam, scores[cut], v[cut], do[cut], dscores[cut], dv[cut])
            dgv[cut] = scan.gradient()
        return dscores, dv, dgv

    @staticmethod
    def _seam(
        scan: ChannelScan,
        side: int,
        seam: Midpoint,
        scores: Tensor,
        v: Tensor,
        do: Tensor,
        dscores: Tensor,
        dv: Tensor,
    ) -> None:
        earlier = halves(v, side)[:, :, 0] * seam.rest  # [n, m, s, V]
        later = halves(do, side)[:, :, 1] * seam.after
        squares = squares_of(scores, side)
        out = squares @ earlier
        dearlier = squares.mT @ later
        scan.leave_seam(side, later * out, None, earlier * dearlier)
        squares_of(dscores, side).copy_(later @ earlier.mT)
        halves(dv, side)[:, :, 0].add_(dearlier.mul_(seam.rest))
