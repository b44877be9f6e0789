"""The linear family with consistent=True in plain torch: a sequence, and 64 tokens, at a time.

Every call of torch then has the same shapes wherever a sequence is cut and whatever else there is
in the batch, and so the same bits. What is missing of the last 64 tokens is zeros, which leave the
state alone.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.linear.eager.chunk import chunk_forward
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.consistent import BLOCK


def block_forward(terms: LinearInputs, scale: float, chunk: int) -> tuple[Tensor, Tensor]:
    """As chunk_forward. Reads the offsets."""
    o = terms.v.new_empty(terms.v.shape, dtype=terms.q.dtype)
    final = terms.v.new_zeros(terms.state_shape, dtype=terms.dtype)
    if terms.initial_state is not None:
        final.copy_(terms.initial_state)
    T = terms.q.shape[1]
    if terms.cu_seqlens is None:
        places = [(b, 0, T) for b in range(terms.q.shape[0])]
    else:
        places = [(0, *ends) for ends in pairwise(terms.cu_seqlens.tolist())]
    for n, (row, begin, end) in enumerate(places):
        for at in range(begin, end, BLOCK):
            tokens = slice(at, min(at + BLOCK, end))
            block = _block(terms, row, tokens, final[n : n + 1])
            o_block, state = chunk_forward(block, scale, chunk)
            o[row, tokens] = o_block[0, : tokens.stop - at]
            final[n] = state[0]
    return o, final


def _block(terms: LinearInputs, row: int, tokens: slice, state: Tensor) -> LinearInputs:
    missing = BLOCK - (tokens.stop - tokens.start)
    terms = terms.of_tokens(lambda x: _padded(x[row : row + 1, tokens], missing))
    return terms._replace(initial_state=state, cu_seqlens=None)


def _padded(x: Tensor, missing: int) -> Tensor:
    """A copy, so that it begins where any memory does."""
    y = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return y if missing else y.clone(memory_format=torch.contiguous_format)
