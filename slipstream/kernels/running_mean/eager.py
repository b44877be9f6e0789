"""Running sums of exponentials in torch, by a maximum that runs along.

    Z_t = exp(w) Z_{t-1} + exp(k_t)                  z_t = log Z_t
    M_t = (exp(w) Z_{t-1} M_{t-1} + exp(k_t) v_t) / Z_t

With any m that stays near z, exp(-m_t) Z_t and exp(-m_t) Z_t M_t are gated scans: of exp(k_t - m_t)
and of it times v_t, whose decay is exp(w + m_{t-1} - m_t). m cancels, so it needs neither gradients
nor exact digits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.elementwise.token_shift import shift
from slipstream.kernels.gated_scan.op import scan
from slipstream.runtime.custom_op import KernelOp


class RunningSums(NamedTuple):
    """Rows [B, T, 2 D] (M, then z) after each token and before it, and [N, 2 D] after the last."""

    after: Tensor
    before: Tensor
    final: Tensor


def running_sums(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    start: Tensor,
    m: Tensor,
    gated_scan: Callable[[Tensor, Tensor, Tensor], Tensor],
    previous: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> RunningSums:
    """M and z. k, v [B, T, D] and w [D] in float32 or float64. start: rows before the first token
    of each sequence, whose z is -inf where there is nothing. m: running_max. gated_scan takes x,
    the log decays and what was before; previous rows and what was before.
    """
    first = start[:, -k.shape[2] :]
    m_before, _ = previous(m, first.detach().to(m.dtype))
    # where nothing is before, -inf - m: the decay of a state that is 0
    gate = m_before - m + w
    weight = (k - m).exp()
    x, g = torch.cat([weight * v, weight], -1), torch.cat([gate, gate], -1)
    one = torch.isfinite(first).to(m.dtype)  # Z exp(-m) before the first token, where m is z
    begin = torch.cat([start[:, : k.shape[2]] * one, one], -1)
    # the gradient of start's z, which m has no part in
    offset = torch.where(one > 0, first - first.detach(), 0).exp()
    sums = gated_scan(x, g, begin * torch.cat([offset, offset], -1))
    total, weights = sums.chunk(2, -1)
    after = torch.cat([total / weights, weights.log() + m], -1)
    return RunningSums(after, *previous(after, start.to(after.dtype)))


def outputs(u: Tensor, k: Tensor, v: Tensor, sums: RunningSums) -> Tensor:
    """o from M and z."""
    mean, z = sums.before.chunk(2, -1)
    return torch.lerp(mean, v, torch.sigmoid(u + k - z))


def plain_sums(
    k: Tensor, v: Tensor, w: Tensor, start: Tensor, cu_seqlens: Tensor | None
) -> RunningSums:
    """The sums of sequences that lie on this rank as a whole."""
    m = running_max(k, w, start[:, -k.shape[2] :].to(k.dtype), cu_seqlens)
    return running_sums(
        k, v, w, start, m,
        lambda x, g, before: scan(x, g, before, cu_seqlens, "eager")[0],
        lambda rows, before: shift(rows, before, cu_seqlens),
    )  # fmt: skip


@torch.no_grad()
def _max_impl(k: Tensor, w: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """By doubling: after step i each token has the maximum over 2^i of them."""
    T, m = k.shape[1], k.clone(memory_format=torch.contiguous_format)
    if T == 0 or k.numel() == 0:
        return m
    if cu_seqlens is None:
        place = torch.arange(T, device=k.device)
        m[:, 0] = torch.maximum(m[:, 0], start + w)
    else:
        at = torch.arange(T, device=k.device)
        sequence = torch.searchsorted(cu_seqlens[1:].long(), at, right=True)
        sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
        place = at - cu_seqlens[:-1].long()[sequence]
        begins = torch.where((place == 0)[:, None], (start + w)[sequence], -torch.inf)
        m[0] = torch.maximum(m[0], begins)
    step = 1
    while step < T:
        earlier = m[:, :-step] + step * w
        earlier = torch.where((place[step:] >= step)[:, None], earlier, -torch.inf)
        m = torch.cat([m[:, :step], torch.maximum(m[:, step:], earlier)], dim=1)
        step *= 2
    return m


_call_max = KernelOp(
    "running_max",
    "(Tensor k, Tensor w, Tensor start, Tensor? cu_seqlens) -> Tensor",
    _max_impl,
    lambda k, *_: k.new_empty(k.shape),
)


def running_max(k: Tensor, w: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """m_t = max(m_{t-1} + w, k_t) [B, T, D], from start [N, D]; without gradients in graphs, too,
    which forget torch.no_grad."""
    return _call_max(k.detach(), w.detach(), start.detach(), cu_seqlens)
