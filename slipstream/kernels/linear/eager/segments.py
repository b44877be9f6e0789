"""Plain torch in calls of fixed shapes: by segments from each sequence's first token on, by blocks.

Libraries round a product by its shape and by how many there are at once. In calls of the same
shapes results have the same bits, however many tokens of a sequence a rank has.

With consistent=True it is a sequence, and 64 tokens, at a time. Every call of torch then has the
same shapes wherever a sequence is cut and whatever else there is in the batch, and so the same
bits. What is missing of the last 64 tokens is zeros, which leave the state alone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import Exchange
from slipstream.kernels.linear.eager.chunk import chunk_forward
from slipstream.kernels.linear.inputs import TOKEN_TERMS, LinearInputs
from slipstream.runtime.consistent import BLOCK

Forward = Callable[[LinearInputs, float], tuple[Tensor, Tensor]]
Backward = Callable[[LinearInputs, Tensor | None, Tensor | None, float], dict[str, Tensor]]


def forward_after(exchange: Exchange | None, forward: Forward) -> Forward:
    """forward of what other ranks have sent, by the segments of the exchange if it has any."""
    if exchange is None:
        return forward
    exchange.by_calls()
    tokens = exchange.segment_tokens
    return forward if tokens is None else partial(_forward, forward, tokens)


def backward_after(exchange: Exchange | None, forward: Forward, backward: Backward) -> Backward:
    """As forward_after."""
    if exchange is None:
        return backward
    exchange.by_calls()
    tokens = exchange.segment_tokens
    return backward if tokens is None else partial(_backward, forward, backward, tokens)


def _forward(
    forward: Forward, tokens: int, terms: LinearInputs, scale: float
) -> tuple[Tensor, Tensor]:
    o, final = terms.q.new_empty(terms.v.shape), _first_states(terms)
    for rows, segments in _sequences(terms, tokens):
        for piece in segments:
            o[:, piece], final[rows] = forward(_segment(terms, piece, final[rows]), scale)
    return o, final


def _backward(
    forward: Forward,
    backward: Backward,
    tokens: int,
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
) -> dict[str, Tensor]:
    states = _first_states(terms)
    dstates = torch.zeros_like(states) if dfinal is None else dfinal.to(states.dtype, copy=True)
    grads: dict[str, Tensor] = {}
    for rows, segments in _sequences(terms, tokens):
        pieces = []
        for piece in segments:
            pieces.append((piece, _segment(terms, piece, states[rows].clone())))
            if piece.stop < segments[-1].stop:
                states[rows] = forward(pieces[-1][1], scale)[1]
        for piece, inputs in reversed(pieces):
            do = None if dout is None else dout[:, piece]
            found = backward(inputs, do, dstates[rows], scale)
            dstates[rows] = found.pop("initial_state")
            for name, x in found.items():
                whole = getattr(terms, name)
                to = grads.setdefault(name, x.new_zeros(whole.shape))
                (to[:, piece] if name in TOKEN_TERMS else to).add_(x)
    if (given := terms.initial_state) is not None:
        grads["initial_state"] = dstates.to(given.dtype)
    return grads


def _first_states(terms: LinearInputs) -> Tensor:
    states = terms.v.new_zeros(terms.state_shape, dtype=terms.dtype)
    return states if terms.initial_state is None else states.copy_(terms.initial_state)


def _segment(terms: LinearInputs, piece: slice, state: Tensor) -> LinearInputs:
    terms = terms.of_tokens(lambda x: x[:, piece])
    return terms._replace(initial_state=state, cu_seqlens=None)


def _sequences(terms: LinearInputs, tokens: int) -> Iterator[tuple[slice, list[slice]]]:
    """The states of each sequence, and its segments."""
    offsets, rows = [0, terms.q.shape[1]], slice(None)
    if terms.cu_seqlens is not None:
        offsets = terms.cu_seqlens.tolist()
    for n, (begin, end) in enumerate(pairwise(offsets)):
        at = rows if terms.cu_seqlens is None else slice(n, n + 1)
        yield at, [slice(t, min(t + tokens, end)) for t in range(begin, end, tokens)]


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
    y = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return y if missing else y.clone(memory_format=torch.contiguous_format)
