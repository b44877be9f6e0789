"""Running sums of exponentials, by a maximum that runs along: what rwkv4 and lightnet divide by.

    Z_t = exp(w) Z_{t-1} + exp(k_t)                  z_t = log Z_t
    M_t = (exp(w) Z_{t-1} M_{t-1} + exp(k_t) v_t) / Z_t

M is the mean of the values, weighted by exp(k) and how long ago they were. With any m that stays
near z, exp(-m_t) Z_t and exp(-m_t) Z_t M_t are gated scans: of exp(k_t - m_t) and of it times v_t,
whose decay is exp(w + m_{t-1} - m_t). m cancels, so it needs neither gradients nor exact digits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gated_scan.dispatch import run as gated_scan
from slipstream.ops._fp32 import widen
from slipstream.ops.token_shift import token_shift
from slipstream.runtime.context_parallel import ContextParallel, Share
from slipstream.runtime.custom_op import KernelOp


class Packing(NamedTuple):
    """Where sequences begin: side by side, packed, or dealt out to ranks."""

    cu_seqlens: Tensor | None
    context: ContextParallel | None
    impl: str | None


class RunningSums(NamedTuple):
    """Rows [B, T, D] (z alone) or [B, T, 2 D] (M, then z) after each token and before it, and
    [N, .] after the last."""

    after: Tensor
    before: Tensor
    final: Tensor


def running_sums(
    k: Tensor, v: Tensor | None, w: Tensor | None, start: Tensor, packing: Packing
) -> RunningSums:
    """z, or M and z if there are values.

    k, v [B, T, D] and w [D] in float32 or float64; w None is 0. start: rows before the first token
    of each sequence, whose z is -inf where there is nothing.
    """
    cu_seqlens, context, impl = packing
    m = running_max(k, w, start, cu_seqlens, context)
    options = {"cu_seqlens": cu_seqlens, "context": context}
    first = start[:, -k.shape[2] :]
    m_before, _ = token_shift(
        m, initial_state=first.detach().to(m.dtype), impl=_plain(impl), **options
    )
    # where nothing is before, -inf - m: the decay of a state that is 0
    gate = m_before - m if w is None else m_before - m + w
    weight = (k - m).exp()
    x, g = (
        (weight, gate)
        if v is None
        else (torch.cat([weight * v, weight], -1), torch.cat([gate, gate], -1))
    )
    one = torch.isfinite(first).to(m.dtype)  # Z exp(-m) before the first token, where m is z
    begin = one if v is None else torch.cat([start[:, : k.shape[2]] * one, one], -1)
    # the gradient of start's z, which m has no part in
    offset = torch.where(one > 0, first - first.detach(), 0).exp()
    begin = begin * (offset if v is None else torch.cat([offset, offset], -1))
    sums, _ = gated_scan(x, g, begin, False, False, cu_seqlens, impl, context)
    if v is None:
        after = sums.log() + m
    else:
        total, weights = sums.chunk(2, -1)
        after = torch.cat([total / weights, weights.log() + m], -1)
    before, final = token_shift(
        after,
        initial_state=start.to(after.dtype),
        output_final_state=True,
        impl=_plain(impl),
        **options,
    )
    assert final is not None
    return RunningSums(after, before, final)


def _plain(impl: str | None) -> str | None:
    """Of a shift, which is a copy: the reference would look at the offsets."""
    return None if impl == "reference" else impl


@torch.no_grad()
def running_max(
    k: Tensor,
    w: Tensor | None,
    start: Tensor,
    cu_seqlens: Tensor | None,
    context: ContextParallel | None,
) -> Tensor:
    """m_t = max(m_{t-1} + w, k_t) [B, T, D], from the last D columns of start [N, .]."""
    first = start[:, -k.shape[2] :].to(k.dtype)
    if context is None:
        return _running_max(k, w, first, cu_seqlens)
    share, offsets = context.share(k.shape[1]), context.offsets_on(k.device)
    rows = 1 if share.packed else k.shape[0]
    nothing = k.new_full((rows, k.shape[2]), -torch.inf)
    local = share.local_states(first, nothing if share.earlier else None, rows)
    assert local is not None
    m = _running_max(k, w, local, offsets)
    if not share.crossings.any:
        return m
    every = share.gather(m[:, -1] if share.later else nothing)
    if share.earlier:
        m = torch.cat([_continued(m, w, every, share), m[:, share.head_end :]], dim=1)
    return m


def _continued(m: Tensor, w: Tensor | None, every: list[Tensor], share: Share) -> Tensor:
    """m of the head's tokens, with what the ranks before have of its sequence."""
    n, before = share.pieces[0], torch.full_like(every[0], -torch.inf)
    w = torch.zeros_like(m[0, 0]) if w is None else w
    for rank in share.earlier:
        before = torch.maximum(before + w * share.tokens_of(rank, n), every[rank])
    steps = torch.arange(1, share.head_end + 1, device=m.device, dtype=m.dtype)
    return torch.maximum(m[:, : share.head_end], before[:, None] + steps[:, None] * w)


def _max_impl(k: Tensor, w: Tensor | None, start: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """By doubling: after step i each token has the maximum over 2^i of them."""
    T, m = k.shape[1], k.clone(memory_format=torch.contiguous_format)
    if T == 0 or k.numel() == 0:
        return m
    if cu_seqlens is None:
        place = torch.arange(T, device=k.device)
        m[:, 0] = torch.maximum(m[:, 0], start if w is None else start + w)
    else:
        at = torch.arange(T, device=k.device)
        sequence = torch.searchsorted(cu_seqlens[1:].long(), at, right=True)
        sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
        place = at - cu_seqlens[:-1].long()[sequence]
        before = start if w is None else start + w
        begins = torch.where((place == 0)[:, None], before[sequence], -torch.inf)
        m[0] = torch.maximum(m[0], begins)
    step = 1
    while step < T:
        earlier = m[:, :-step] if w is None else m[:, :-step] + step * w
        earlier = torch.where((place[step:] >= step)[:, None], earlier, -torch.inf)
        m = torch.cat([m[:, :step], torch.maximum(m[:, step:], earlier)], dim=1)
        step *= 2
    return m


def _max_fake(k: Tensor, w: Tensor | None, start: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return k.new_empty(k.shape)


_running_max = KernelOp(
    "running_max",
    "(Tensor k, Tensor? w, Tensor start, Tensor? cu_seqlens) -> Tensor",
    _max_impl,
    _max_fake,
)


def nothing_yet(k: Tensor, with_values: bool, sequences: int) -> Tensor:
    """Rows before the first token: the mean 0, whose weight is 0."""
    z = widen(k).new_full((sequences, k.shape[2]), -torch.inf)
    return torch.cat([torch.zeros_like(z), z], -1) if with_values else z
