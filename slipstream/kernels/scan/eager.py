"""The scan in plain torch, in blocks of tokens, forward and backward.

    h_t = a_t h_{t-1} + x_t                                      a_t = exp(g_t)

Blocks of C tokens side by side: C steps inside them, all blocks at once, make of x each block's h
from a zero start and of a the decay p_t since the block's start; then h gets p_t times the end of
the block before, block after block. Nothing is divided by a decay, so gates may be -inf.

The state before a sequence enters as a_t h_{-1} added to its first x, whose decay is then 0: from
there on packed sequences are one.

Backward is the same scan from the last token to the first, with D_t the whole gradient of h_t:

    D_t = dh_t + a_{t+1} D_{t+1}          dx_t = D_t          dg_t = D_t a_t h_{t-1}

Symbols: B batch, T tokens, D channels, N sequences, C tokens a block, M blocks.
Cost: 6 B T D flops; about 5 passes over [B, T, D] in the arithmetic's dtype, in C + M steps.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.varlen import check_cu_seqlens_values
from slipstream.kernels.scan.reference import compute_dtype

BLOCK = 64


class Ends(NamedTuple):
    """Where packed sequences begin and end: owner [T], first and last [T, 1], begin and end [N],
    live [N, 1]: whether the sequence has a token."""

    owner: Tensor
    first: Tensor
    last: Tensor
    begin: Tensor
    end: Tensor
    live: Tensor


def scan_forward(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h [B, T, D] in x's dtype and the final state [N, D]."""
    ends = _ends(cu_seqlens, x.shape[1])
    decay, h = _own(g, compute_dtype(x)).exp_(), _own(x, compute_dtype(x))
    if ends is None:
        if initial_state is not None:
            h[:, 0].addcmul_(decay[:, 0], initial_state.to(h.dtype))
        _scan(decay, h)
        return h.to(x.dtype), h[:, -1].clone()
    if initial_state is not None:
        entering = initial_state.to(h.dtype).index_select(0, ends.owner)  # [T, D]
        h[0] += torch.where(ends.first, decay[0] * entering, 0)
    _scan(decay.masked_fill_(ends.first, 0), h)
    final = h[0].index_select(0, ends.end)
    kept = final.new_zeros(()) if initial_state is None else initial_state.to(h.dtype)
    return h.to(x.dtype), torch.where(ends.live, final, kept)


def scan_backward(
    g: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dh: Tensor | None,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, g and initial_state from h, the scan's result, and dh, dfinal."""
    dtype = compute_dtype(h)
    ends = _ends(cu_seqlens, h.shape[1])
    decay = _own(g, dtype).exp_()
    total = torch.zeros_like(decay) if dh is None else _own(dh, dtype)
    after = torch.cat([decay[:, 1:], decay.new_zeros(decay[:, :1].shape)], dim=1)  # a_{t+1}
    before = torch.cat([h.new_zeros(h[:, :1].shape), h[:, :-1]], dim=1).to(dtype)  # h_{t-1}
    if ends is None:
        if dfinal is not None:
            total[:, -1] += dfinal
        if initial_state is not None:
            before[:, 0] = initial_state
    else:
        after = after.masked_fill_(ends.last, 0)
        if dfinal is not None:
            total[0] += torch.where(ends.last, dfinal.to(dtype).index_select(0, ends.owner), 0)
        before.masked_fill_(ends.first, 0)
        if initial_state is not None:
            entering = initial_state.to(dtype).index_select(0, ends.owner)
            before[0] = torch.where(ends.first, entering, before[0])
    _scan(after, total, reverse=True)
    decayed = total * decay  # the gradient of h_{t-1} by way of h_t
    dg = (decayed * before).to(g.dtype)
    return total.to(h.dtype), dg, _initial_gradient(decayed, initial_state, ends, dfinal)


def _own(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _initial_gradient(
    decayed: Tensor, initial_state: Tensor | None, ends: Ends | None, dfinal: Tensor | None
) -> Tensor | None:
    if initial_state is None:
        return None
    if ends is None:
        return decayed[:, 0].to(initial_state.dtype, copy=True)
    # a sequence without tokens hands its state on
    kept = decayed.new_zeros(()) if dfinal is None else dfinal.to(decayed.dtype)
    grad = torch.where(ends.live, decayed[0].index_select(0, ends.begin), kept)
    return grad.to(initial_state.dtype)


def _ends(cu_seqlens: Tensor | None, tokens: int) -> Ends | None:
    if cu_seqlens is None:
        return None
    check_cu_seqlens_values(cu_seqlens, tokens)
    offsets = cu_seqlens.long()
    begin, end = offsets[:-1], offsets[1:]
    t = torch.arange(tokens, device=cu_seqlens.device)
    owner = torch.searchsorted(end, t, right=True).clamp(max=max(end.shape[0] - 1, 0))
    return Ends(
        owner=owner,
        first=(t == begin[owner])[:, None],
        last=(t == end[owner] - 1)[:, None],
        begin=begin.clamp(max=tokens - 1),
        end=(end - 1).clamp(min=0),
        live=(end > begin)[:, None],
    )


def _scan(decay: Tensor, h: Tensor, *, reverse: bool = False) -> None:
    """h_t = decay_t h_{t-1} + h_t (h_{t+1} if reverse) in place, of [B, T, D]."""
    T = h.shape[1]
    left = T % BLOCK  # tokens past the last whole block, one by one
    body, step = (slice(left, T), 1) if reverse else (slice(0, T - left), -1)
    if T >= BLOCK:
        blocks = (T // BLOCK, BLOCK)
        p, inside = decay[:, body].clone(), h[:, body].unflatten(1, blocks)
        _scan_blocks(p.unflatten(1, blocks), inside, step)
    for t in range(left - 1, -1, -1) if reverse else range(T - left, T):
        if 0 <= t + step < T:
            h[:, t].addcmul_(decay[:, t], h[:, t + step])


def _scan_blocks(p: Tensor, h: Tensor, step: int) -> None:
    """The same of [B, M, C, D], where token t follows t + step; p: decays, then their products."""
    order = slice(None, None, -step)
    places, blocks = range(h.shape[2])[order], range(h.shape[1])[order]
    for before, now in pairwise(places):
        h[:, :, now].addcmul_(p[:, :, now], h[:, :, before])
        p[:, :, now].mul_(p[:, :, before])
    end = places[-1]
    for before, now in pairwise(blocks):
        h[:, now, end].addcmul_(p[:, now, end], h[:, before, end])
    early, late = slice(None, -1), slice(1, None)
    before, now, rest = (early, late, early) if step < 0 else (late, early, late)
    h[:, now, rest].addcmul_(p[:, now, rest], h[:, before, end, None])
