"""Decay of the columns of the state, gv [n, C, V]: the rows of V decay between write and read.

    o_i = sum over j <= i of scores[i, j] exp(Gv_i - Gv_j) * v_j

The mirror of gates.ChannelGate, which decays what the scores are made of: here it is what they are
applied to. Only the additive transition has it in chunks.
"""

import torch
from torch import Tensor

from slipstream.kernels.linear.eager import gate_cumsum


class ValueGate:
    def __init__(self, gv: Tensor) -> None:
        self.gv = gv
        self.from_start, self.to_end = torch.empty_like(gv), torch.empty_like(gv)
        self.total = gv.new_empty(gv.shape[0], 1, gv.shape[2])
        for cut in self._slices():
            scan = gate_cumsum.ChannelScan(gv[cut])
            for _ in scan.up():
                pass
            self.from_start[cut] = scan.from_start()
            self.to_end[cut] = scan.to_end()
            self.total[cut] = scan.total().exp()[:, None]

    def _slices(self):
        n, C, V = self.gv.shape
        return gate_cumsum.slices(n, 4 * C * V)

    def forward(self, scores: Tensor, v: Tensor) -> Tensor:
        """Scores [n, C, C], lower triangular, applied to v [n, C, V]."""
        o = torch.diagonal(scores, dim1=1, dim2=2)[..., None] * v
        for cut in self._slices():
            for side, seam in gate_cumsum.ChannelScan(self.gv[cut]).up():
                squares = gate_cumsum.squares_of(scores[cut], side)  # [n, m, s, s]
                earlier = gate_cumsum.halves(v[cut], side)[:, :, 0] * seam.rest
                gate_cumsum.halves(o[cut], side)[:, :, 1].add_((squares @ earlier) * seam.after)
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
            scan = gate_cumsum.ChannelScan(self.gv[cut])
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
        scan: gate_cumsum.ChannelScan,
        side: int,
        seam: gate_cumsum.Midpoint,
        scores: Tensor,
        v: Tensor,
        do: Tensor,
        dscores: Tensor,
        dv: Tensor,
    ) -> None:
        earlier = gate_cumsum.halves(v, side)[:, :, 0] * seam.rest  # [n, m, s, V]
        later = gate_cumsum.halves(do, side)[:, :, 1] * seam.after
        squares = gate_cumsum.squares_of(scores, side)
        out = squares @ earlier
        dearlier = squares.mT @ later
        scan.leave_seam(side, later * out, None, earlier * dearlier)
        gate_cumsum.squares_of(dscores, side).copy_(later @ earlier.mT)
        gate_cumsum.halves(dv, side)[:, :, 0].add_(dearlier.mul_(seam.rest))
