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
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.eager import gate_cumsum
from slipstream.kernels.linear.eager.gate_cumsum import ChannelScan, halves, slices, squares_of

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
    j < i, each one product of matrices (gate_cumsum.py has the exponents).
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

    def _later(
        self, reads: Rows, cut: slice, side: int, seam: gate_cumsum.Midpoint
    ) -> list[Tensor]:
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
