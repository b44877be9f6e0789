"""The part of a StateCache that models with consistent=True use: sequences by themselves
(consistent.py), in place of tensors of all rows."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class OpenRows(Cache):
    """
    Attributes:
        open_rows: a Row of each sequence; None before the first call, and for other models.
    """

    open_rows: list[Any] | None = None

    def _expect_tensors(self, what: str) -> None:
        if self.open_rows is not None:
            raise NotImplementedError(f"{what}: not with the cache of a consistent model")

    def _choose(self, rows: list[int]) -> None:
        if self.open_rows is not None:
            self.open_rows = [self.open_rows[n] for n in rows]

    def bytes_of_rows(self) -> int:
        return sum(row.bytes() for row in self.open_rows or ())

    def reorder_cache(self, beam_idx: Any) -> None:
        self._choose(beam_idx.tolist())
        super().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        self._expect_tensors("crop")
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        self.open_rows = None
        super().reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.open_rows is not None:
            self._choose(torch.arange(len(self.open_rows), device="cpu")[indices.cpu()].tolist())
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose([n for n in range(len(self.open_rows or ())) for _ in range(repeats)])
        super().batch_repeat_interleave(repeats)
