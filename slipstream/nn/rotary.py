"""Rotary positions of queries and keys."""

import torch
from torch import Tensor, nn

from slipstream.common.checks import expect_tensor, wide_dtype
from slipstream.ops.rotary import packed_positions, rotary_embedding, rotary_tables


class RotaryEmbedding(nn.Module):
    """Turns the first `dim` features of every head of q and k by their tokens' positions.

    Args:
        dim: how many features turn; even.
        base: the slowest pair turns once in about 2 pi base tokens.
        interleaved: the pairs are (2i, 2i + 1), as GPT-J, not (i, i + dim / 2), as GPT-NeoX.
        xpos: None is plain rotary. Else scores decay with the distance of query and key; 512 is
            usual.
    """

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, xpos: float | None = None
    ) -> None:
        super().__init__()
        if dim < 0 or dim % 2:
            raise ValueError(f"dim: want an even number of features, got {dim}")
        self.dim, self.base, self.interleaved, self.xpos = dim, base, interleaved, xpos

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q [B, T, H, K], k [B, T, HK, K].

        positions: [T] or [1 or B, T]; None is 0, 1, ..., in each of the sequences that cu_seqlens
        [N+1] has packed; with parents [N] each goes on from the end of that sequence, -1 for none.
        """
        expect_tensor("q", q)
        expect_tensor("k", k)
        if positions is None and cu_seqlens is not None:
            positions = packed_positions(cu_seqlens, q.shape[1], parents=parents)
        elif positions is None:
            positions = torch.arange(q.shape[1], device=q.device)
        at = positions if positions.dim() == 2 else positions[None]
        return self._rotate(q, at, self.xpos), self._rotate(
            k, at, -self.xpos if self.xpos else None
        )

    def _rotate(self, x: Tensor, at: Tensor, xpos: float | None) -> Tensor:
        wide = wide_dtype(x)
        cos, sin = rotary_tables(at, self.dim, base=self.base, xpos=xpos, dtype=wide)
        return rotary_embedding(x, cos, sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}, xpos={self.xpos}"
