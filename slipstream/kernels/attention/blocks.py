"""Causal attention with consistent=True in plain torch: 64 queries of one sequence at a time.

Block j has the queries at positions 64 j to 64 j + 63, and all keys up to there. What is missing of
either is zeros, which no query sees. So the shapes of a call, and its bits, follow from where a
query stands alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions, slice_sequences
from slipstream.kernels.attention.op import softmax
from slipstream.runtime.consistent import BLOCK


def attention(
    inputs: AttentionInputs, options: AttentionOptions, impls: str = "eager"
) -> tuple[Tensor, Tensor]:
    """o and lse, as op.softmax. Reads offsets and lengths.

    Raises:
        NotImplementedError: a sequence has more queries than keys.
    """
    if 0 in inputs.q.shape or 0 in inputs.k.shape:
        return softmax(inputs, options, impls)
    results = []
    for n, (qb, q_rows, kb, k_rows) in enumerate(slice_sequences(inputs)):
        slopes = inputs.slopes
        sequence = AttentionInputs(
            inputs.q[qb, q_rows],
            inputs.k[kb, k_rows],
            inputs.v[kb, k_rows],
            None if inputs.g is None else inputs.g[kb, k_rows],
            inputs.sinks,
            slopes[n : n + 1] if slopes is not None and slopes.dim() == 2 else slopes,
        )
        results.append(_of_sequence(sequence, options))
    dims = (0, 0) if inputs.cu_q is None else (1, 2)
    o, lse = (torch.cat(x, dim) for x, dim in zip(zip(*results), dims))
    return o, lse


def _of_sequence(inputs: AttentionInputs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    T, S = inputs.q.shape[1], inputs.k.shape[1]
    if T > S:
        raise NotImplementedError(f"consistent: want as many keys as queries, got {S} for {T}")
    outputs, sums, begin = [], [], S - T
    while begin < S:
        first = begin // BLOCK * BLOCK
        end, after = min(first + BLOCK, S), first + BLOCK
        rows = slice(begin - first, end - first)
        block = inputs._replace(
            q=_padded(inputs.q[:, begin - (S - T) : end - (S - T)], begin - first, after - end),
            k=_padded(inputs.k[:, :end], 0, after - end),
            v=_padded(inputs.v[:, :end], 0, after - end),
            g=None if inputs.g is None else _padded(inputs.g[:, :end], 0, after - end),
        )
        o, lse = softmax(block, options, "eager")
        outputs.append(o[:, rows])
        sums.append(lse[:, :, rows])
        begin = end
    if not outputs:
        H, DV = inputs.q.shape[2], inputs.v.shape[-1]
        return inputs.q.new_empty(1, 0, H, DV), inputs.q.new_empty(1, H, 0, dtype=inputs.dtype)
    return torch.cat(outputs, 1), torch.cat(sums, 2)


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """A copy, so that it begins where any memory does."""
    if before == after == 0:
        return x.clone(memory_format=torch.contiguous_format)
    return F.pad(x, (0, 0) * (x.dim() - 2) + (before, after))
