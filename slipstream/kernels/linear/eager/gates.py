"""Decay inside a chunk: the decayed scores of its tokens and the factors to and from its edges.

With G_i = g_1 + ... + g_i inside a chunk of C tokens, reads r_i and writes w_j,

    scores[i, j] = r_i^T diag(exp(G_i - G_j)) w_j     j <= i ("after"), j < i ("strict")
    scores[i, j] = r_i^T diag(exp(G_{i-1} - G_j)) w_j j < i  ("before": reads the state before D_i)
    from_state   = r_i exp(G_i), or exp(G_{i-1})      what r_i reads of the state before the chunk
    to_state     = w_j exp(G_C - G_j)                 what is left of w_j in the state after it
    total        = exp(G_C)

Every exponent is a sum of gates between two tokens and computed as such, never as a difference of
larger numbers or a product of exp(G_i) and exp(-G_j): nothing overflows and nothing cancels,
whatever the gates. Likewise the gradient of g_t is summed over the pairs i >= t > j alone.

Shapes: n chunks; r and w reads and writes a token, so reads [n, C, r, K], writes [n, C, w, K],
scores [n, C, r, C, w] with zeros where no read reaches a write.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.eager.scan import ChannelScan, Seam, slices

KINDS = ("after", "strict", "before")


class Intra(NamedTuple):
    """scores [n, C, r, C, w], from_state [n, C, r, K], to_state [n, C, w, K], total [n, K|1, 1]."""

    scores: Tensor
    from_state: Tensor
    to_state: Tensor
    total: Tensor | None


class IntraGrads(NamedTuple):
    """Gradients of the fields of Intra, that of `total` as d/dG_C, [n, K]; scores unmasked."""

    scores: Tensor
    from_state: Tensor
    to_state: Tensor
    log_total: Tensor | None


class InputGrads(NamedTuple):
    reads: Tensor
    writes: Tensor
    g: Tensor | None


def _mask(kinds: tuple[str, ...], chunk: int, like: Tensor) -> Tensor:
    """[C, r, C, 1]: 1 where a read of the kind reaches the write."""
    lower = torch.ones(chunk, chunk, dtype=like.dtype, device=like.device)
    masks = [lower.tril() if kind == "after" else lower.tril(-1) for kind in kinds]
    return torch.stack(masks, dim=1)[..., None]


def _products(reads: Tensor, writes: Tensor) -> Tensor:
    """All r_i^T w_j as [n, C, r, C, w]."""
    n, C, r, K = reads.shape
    raw = torch.bmm(reads.view(n, C * r, K), writes.view(n, -1, K).mT)
    return raw.view(n, C, r, C, writes.shape[2])


class NoGate:
    """No decay: all factors are one."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds

    def forward(self, reads: Tensor, writes: Tensor) -> Intra:
        scores = _products(reads, writes)
        scores.mul_(_mask(self.kinds, reads.shape[1], reads))
        return Intra(scores, reads, writes, None)

    def backward(self, reads: Tensor, writes: Tensor, intra: Intra, d: IntraGrads) -> InputGrads:
        n, C, r, K = reads.shape
        w = writes.shape[2]
        raw = d.scores.mul_(_mask(self.kinds, C, reads)).view(n, C * r, C * w)
        dreads = torch.baddbmm(d.from_state.view(n, C * r, K), raw, writes.view(n, C * w, K))
        dwrites = torch.baddbmm(d.to_state.view(n, C * w, K), raw.mT, reads.view(n, C * r, K))
        return InputGrads(dreads.view(reads.shape), dwrites.view(writes.shape), None)


class ScalarGate:
    """One decay a token, g [n, C]; reads of kind "before" are the channel gate's."""

    def __init__(self, g: Tensor, kinds: tuple[str, ...]) -> None:
        assert "before" not in kinds
        self.kinds = kinds
        G = g.double().cumsum(-1)  # float64: a difference of float32 sums would lose C * eps
        between = (G[:, :, None] - G[:, None, :]).to(g.dtype)
        above = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu(1)
        self.decay = between.masked_fill_(above, -torch.inf).exp_()  # [n, C, C]
        self.from_start = G.exp().to(g.dtype)[:, :, None, None]
        self.to_end = (G[:, -1:] - G).exp_().to(g.dtype)[:, :, None, None]
        self.total = self.from_start[:, -1]  # [n, 1, 1]

    def forward(self, reads: Tensor, writes: Tensor) -> Intra:
        scores = self._decayed(_products(reads, writes))
        return Intra(scores, reads * self.from_start, writes * self.to_end, self.total)

    def _decayed(self, scores: Tensor) -> Tensor:
        scores.mul_(self.decay[:, :, None, :, None])
        for r, kind in enumerate(self.kinds):
            if kind == "strict":
                scores[:, :, r].diagonal(dim1=1, dim2=2).zero_()
        return scores

    def backward(self, reads: Tensor, writes: Tensor, intra: Intra, d: IntraGrads) -> InputGrads:
        n, C, r, K = reads.shape
        w = writes.shape[2]
        assert d.log_total is not None
        # P[i, j]: what scaling the decay from j to i would do; g_t is in those with i >= t > j.
        P = (d.scores * intra.scores).sum((2, 4))
        ones = torch.ones(C, C, dtype=P.dtype, device=P.device)
        dg = (torch.matmul(ones.triu(), P).mul_(ones.tril(-1))).sum(-1)
        leave = (d.from_state * intra.from_state).sum((2, 3))  # [n, C] through exp(G_i)
        enter = (d.to_state * intra.to_state).sum((2, 3))  # [n, C] through exp(G_C - G_j)
        dg += leave @ ones.tril() + enter @ ones.triu(1) + d.log_total.sum(-1, keepdim=True)
        raw = self._decayed(d.scores).view(n, C * r, C * w)
        dreads = d.from_state.mul_(self.from_start).view(n, C * r, K)
        dwrites = d.to_state.mul_(self.to_end).view(n, C * w, K)
        dreads.baddbmm_(raw, writes.view(n, C * w, K))
        dwrites.baddbmm_(raw.mT, reads.view(n, C * r, K))
        return InputGrads(dreads.view(reads.shape), dwrites.view(writes.shape), dg)


class ChannelGate:
    """A decay for every channel of K, g [n, C, K].

    The lower triangle of a chunk is halved again and again: the square of the tokens of the later
    half of a block against those of the earlier one factors at the seam between them,
    exp(G_i - G_seam) exp(G_seam - G_j), both at most 1. Squares of side C/2, C/4, ..., 1 cover all
    j < i, each one product of matrices (scan.py has the exponents).
    """

    def __init__(self, g: Tensor, kinds: tuple[str, ...]) -> None:
        self.g, self.kinds = g, kinds

    def forward(self, reads: Tensor, writes: Tensor) -> Intra:
        n, C, r, K = reads.shape
        w = writes.shape[2]
        scores = reads.new_zeros(n, C, r, C, w)
        from_state, to_state = torch.empty_like(reads), torch.empty_like(writes)
        total = reads.new_empty(n, K, 1)
        for cut in slices(n, C * K * (r + w)):
            R, W, A = reads[cut], writes[cut], scores[cut]
            scan = ChannelScan(self.g[cut])
            for side, seam in scan.up():
                later, earlier = self._to_seam(R, W, side, seam)
                _square(A, side).copy_(_square_of(later, earlier, r, w))
            for i, kind in enumerate(self.kinds):
                if kind == "after":  # a token reads its own write undecayed
                    own = (R[:, :, i : i + 1] * W).sum(-1)  # [n, C, w]
                    A[:, :, i].diagonal(dim1=1, dim2=2).copy_(own.mT)
                torch.mul(R[:, :, i], self._read(scan, kind), out=from_state[cut, :, i])
            torch.mul(W, scan.to_end()[:, :, None], out=to_state[cut])
            total[cut] = scan.total().exp()[:, :, None]
        return Intra(scores, from_state, to_state, total)

    @staticmethod
    def _read(scan: ChannelScan, kind: str) -> Tensor:
        return scan.from_start_before() if kind == "before" else scan.from_start()

    def _to_seam(self, R: Tensor, W: Tensor, side: int, seam: Seam):
        """The later halves' reads and the earlier halves' writes, decayed to the seam between."""
        later = _halves(R, side)[:, :, 1]  # [n, m, s, r, K]
        if all(kind == "before" for kind in self.kinds):
            later = later * seam.before[:, :, :, None]
        elif "before" not in self.kinds:
            later = later * seam.after[:, :, :, None]
        else:
            factors = [seam.before if kind == "before" else seam.after for kind in self.kinds]
            later = later * torch.stack(factors, dim=3)
        return later, _halves(W, side)[:, :, 0] * seam.rest[:, :, :, None]

    def backward(self, reads: Tensor, writes: Tensor, intra: Intra, d: IntraGrads) -> InputGrads:
        dreads, dwrites, dg = (torch.empty_like(x) for x in (reads, writes, self.g))
        assert d.log_total is not None
        C, r, K = reads.shape[1:]
        for cut in slices(reads.shape[0], 4 * C * K * (r + writes.shape[2])):
            part = IntraGrads(*(x[cut] for x in d if x is not None))
            out = self._backward(self.g[cut], reads[cut], writes[cut], part)
            dreads[cut], dwrites[cut], dg[cut] = out
        return InputGrads(dreads, dwrites, dg)

    def _backward(self, g: Tensor, R: Tensor, W: Tensor, d: IntraGrads):
        scan = ChannelScan(g)
        seams = list(scan.up())
        dR = torch.empty_like(R)
        for i, kind in enumerate(self.kinds):
            torch.mul(d.from_state[:, :, i], self._read(scan, kind), out=dR[:, :, i])
        dW = d.to_state * scan.to_end()[:, :, None]
        scan.start_down(d.log_total)
        scan.leave(*self._by_kind(R * dR), (W * dW).sum(2))
        for side, seam in reversed(seams):
            scan.split(side)
            later, earlier = self._to_seam(R, W, side, seam)
            square = _square(d.scores, side).permute(0, 5, 1, 2, 3, 4)  # [n, m, s, r, s, w]
            square = square.reshape(-1, side * R.shape[2], side * W.shape[2])
            K = g.shape[-1]
            dlater = torch.bmm(square, earlier.view(-1, side * W.shape[2], K)).view(later.shape)
            dearlier = torch.bmm(square.mT, later.view(-1, side * R.shape[2], K)).view(
                earlier.shape
            )
            later.mul_(dlater)  # r_i . dr_i: the gradient of the exponent
            earlier.mul_(dearlier)
            scan.leave_seam(side, *self._by_kind(later), earlier.sum(3))
            for i, kind in enumerate(self.kinds):
                dlater[:, :, :, i].mul_(seam.before if kind == "before" else seam.after)
            _halves(dR, side)[:, :, 1] += dlater
            _halves(dW, side)[:, :, 0] += dearlier.mul_(seam.rest[:, :, :, None])
        for i, kind in enumerate(self.kinds):
            if kind == "after":
                own = d.scores[:, :, i].diagonal(dim1=1, dim2=2).mT  # [n, C, w]
                dR[:, :, i] += (own[..., None] * W).sum(2)
                dW += own[..., None] * R[:, :, i : i + 1]
        return dR, dW, scan.gradient()

    def _by_kind(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """x [..., r, K] summed over the reads after the decay, and over those before it."""
        after = [x[..., i, :] for i, kind in enumerate(self.kinds) if kind != "before"]
        before = [x[..., i, :] for i, kind in enumerate(self.kinds) if kind == "before"]
        return tuple(torch.stack(xs).sum(0) if xs else None for xs in (after, before))  # type: ignore


def _halves(x: Tensor, side: int) -> Tensor:
    """[n, C, ...] as [n, m, 2, side, ...]: m blocks of an earlier and a later half."""
    return x.view(x.shape[0], -1, 2, side, *x.shape[2:])


def _square(scores: Tensor, side: int) -> Tensor:
    """The squares of one side in scores [n, C, r, C, w], as a view [n, s, r, s, w, m]."""
    n, C, r, _, w = scores.shape
    m = C // (2 * side)
    blocks = scores.view(n, m, 2, side, r, m, 2, side, w)[:, :, 1, :, :, :, 0]
    return blocks.diagonal(dim1=1, dim2=4)


def _square_of(later: Tensor, earlier: Tensor, r: int, w: int) -> Tensor:
    """later [n, m, s, r, K], earlier [n, m, s, w, K] to the layout of _square."""
    n, m, side, _, K = later.shape
    out = torch.bmm(later.view(n * m, side * r, K), earlier.view(n * m, side * w, K).mT)
    return out.view(n, m, side, r, side, w).permute(0, 2, 3, 4, 5, 1)
