"""The inputs of softmax attention (reference.py has the formula, MATH.md the rest)."""

from typing import NamedTuple

import torch
from torch import Tensor

# a gate below this is this: the exponential is 0 in float64 already
MIN_GATE = -1e4


class AttentionInputs(NamedTuple):
    """B batch, T queries, S keys, H heads of q, HKV of k and v, N sequences.

    Queries are [B, T] with N = B, or packed [1, T] by cu_q; keys [N, S], or packed [1, S] by cu_k.
    """

    q: Tensor  # [B, T, H, D]
    k: Tensor  # [N or 1, S, HKV, D]
    v: Tensor  # [N or 1, S, HKV, DV]
    g: Tensor | None = None  # [N or 1, S, H], log of what a token forgets; only with right = 0
    sinks: Tensor | None = None  # [H]
    slopes: Tensor | None = None  # [H] or [N, H]
    cu_q: Tensor | None = None  # [N + 1]
    cu_k: Tensor | None = None  # [N + 1]
    lengths: Tensor | None = None  # [N], how many of its keys a sequence uses, the first ones
    seed: Tensor | None = None  # int64 [1], of the dropout

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def simple(self) -> bool:
        """Nothing but q, k and v."""
        packed = self.cu_q is not None or self.cu_k is not None or self.lengths is not None
        return not packed and self.seed is None and not self.biased

    @property
    def biased(self) -> bool:
        return self.g is not None or self.sinks is not None or self.slopes is not None


class AttentionOptions(NamedTuple):
    """left, right: how far a query sees, -1 without bound. softcap: 0 for none.

    dropout: the probability with which a weight is dropped; Terms.seed is given beside it.
    """

    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    dropout: float = 0.0


# by whose name gradients are returned, in the order of Terms
DIFFERENTIABLE = ("q", "k", "v", "g", "sinks")


# batch and rows of q, batch and rows of k
Slices = tuple[slice, slice, slice, slice]


def slice_sequences(inputs: AttentionInputs) -> list[Slices]:
    """Where each sequence lies. Reads the offsets."""
    N = inputs.sequences
    _, T = inputs.q.shape[:2]
    S = inputs.k.shape[1]
    q_of = None if inputs.cu_q is None else inputs.cu_q.tolist()
    k_of = None if inputs.cu_k is None else inputs.cu_k.tolist()
    used = None if inputs.lengths is None else inputs.lengths.tolist()
    result = []
    for n in range(N):
        qb, q_rows = _rows(n, q_of, T, None)
        kb, k_rows = _rows(n, k_of, S, None if used is None else used[n])
        result.append((qb, q_rows, kb, k_rows))
    return result


def _rows(n: int, offsets: list[int] | None, rows: int, used: int | None) -> tuple[slice, slice]:
    batch = slice(n, n + 1) if offsets is None else slice(0, 1)
    begin, end = (0, rows) if offsets is None else (offsets[n], offsets[n + 1])
    if used is not None:
        end = min(end, begin + max(used, 0))
    return batch, slice(begin, end)
