"""Rows of a pool by index, in plain torch and without a wait for the device.

A sequence whose index is negative or past the pool has no row. It reads that of the first sequence
that has one, and writes the same there.
"""

import torch
from torch import Tensor


class PoolRows:
    """indices: [N], no row twice; None is row n of sequence n. size: rows of the pool, maybe 0."""

    def __init__(self, indices: Tensor | None, size: int) -> None:
        self.live: Tensor | None = None  # [N], who has a row; None is everyone
        self._at: Tensor | None = None  # [N], the rows; None if there are none
        if indices is not None:
            self.live = (indices >= 0) & (indices < size)
            if size > 0 and indices.shape[0] > 0:
                n = torch.arange(indices.shape[0], device=indices.device)
                self._source = torch.where(self.live, n, self.live.int().argmax())
                self._at = indices.long().index_select(0, self._source).clamp(0, size - 1)

    def read(self, pool: Tensor) -> Tensor:
        """Each sequence's row [N, ...]: the pool itself without indices."""
        if self.live is None:
            return pool
        if self._at is None:
            return pool.new_zeros(self.live.shape[0], *pool.shape[1:])
        return pool.index_select(0, self._at)

    def write(self, pool: Tensor, new: Tensor) -> None:
        if self.live is None:
            pool.copy_(new)
        if self.live is None or self._at is None:
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
