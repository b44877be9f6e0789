"""Rows of a pool by index, in plain torch and without a wait for the device.

A sequence whose index is negative or past the pool has no row. It reads that of the first sequence
that has one, and writes the same there.
"""

import torch
from torch import Tensor


class PoolRows:
    """indices: [N], no row twice; None is row n of sequence n. size: rows of the pool."""

    def __init__(self, indices: Tensor | None, size: int) -> None:
        self.live: Tensor | None = None  # [N], who has a row; None is everyone
        if indices is not None:
            self.live = (indices >= 0) & (indices < size)
            n = torch.arange(indices.shape[0], device=indices.device)
            self._source = torch.where(self.live, n, self.live.int().argmax())
            self._at = indices.long().index_select(0, self._source).clamp(0, max(size - 1, 0))

    def read(self, pool: Tensor) -> Tensor:
        """Each sequence's row [N, ...]: the pool itself without indices."""
        return pool if self.live is None else pool.index_select(0, self._at)

    def write(self, pool: Tensor, new: Tensor) -> None:
        if self.live is None:
            pool.copy_(new)
            return
        new = new.index_select(0, self._source).to(pool.dtype)
        # without any row, one stays as it is
        new = torch.where(self.live.any(), new, pool.index_select(0, self._at))
        pool.index_copy_(0, self._at, new)

    def or_zero(self, y: Tensor) -> Tensor:
        """y [N, ...], 0 for sequences without a row."""
        if self.live is None:
            return y
        return torch.where(self.live.view(-1, *([1] * (y.dim() - 1))), y, 0)
