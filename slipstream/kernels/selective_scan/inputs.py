"""The inputs of the selective scan, and the layout of its states between the passes."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.backends import INTERPRETED

# Tokens from one saved state to the next; backward recomputes those in between.
CHUNK = 8 if INTERPRETED else 64
# The same of the kernels for sm_90.
SM90_CHUNK = 16


class ScanInputs(NamedTuple):
    """Tensors of one call.

    u, delta, z: [B, T, D]. A: [D, N]. B, C: [B, T, G, N]. D, delta_bias: [D]. initial_state:
    [S, D, N] for S sequences. cu_seqlens: [S + 1], or None for S = B.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def sequences(self) -> int:
        return self.u.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def compute_dtype(u: Tensor) -> torch.dtype:
    """The dtype of the arithmetic and the state: float64 for float64, else float32."""
    return torch.float64 if u.dtype == torch.float64 else torch.float32


def empty_states(inputs: ScanInputs, chunk: int = CHUNK, for_backward: bool = True) -> Tensor:
    """Room for the states before each chunk but a sequence's first, [chunks, N, D]; none unless a
    backward follows.

    Chunk i > 0 of the sequence whose first token is the t-th of all B T has place t // chunk + i -
    1: a sequence of T tokens needs (T - 1) // chunk places, so that none is shared, and the number
    of sequences does not count.
    """
    u = inputs.u
    # two more: a trace of unknown T would have to know whether there is one
    chunks = u.shape[0] * u.shape[1] // chunk + 2 if for_backward else 0
    return u.new_empty(chunks, inputs.A.shape[1], u.shape[2], dtype=compute_dtype(u))
