"""The mean of all tokens so far, weighted by exponentials, as an operator with gradients.

    z_t = log(exp(w + z_{t-1}) + exp(k_t))           r_t = k_t - w - z_{t-1}
    c_t = exp(k_t - z_t) = sigmoid(r_t)              a_t = exp(w + z_{t-1} - z_t) = 1 - c_t
    M_t = a_t M_{t-1} + c_t v_t                      s_t = sigmoid(r_t + w + u)
    o_t = M_{t-1} + s_t (v_t - M_{t-1})

slipstream::_running_mean gives o (RWKV-4). MATH.md has the gradients.

Running sums of exponentials in torch, by a maximum that runs along.

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

from slipstream.common.checks import widen
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.elementwise.token_shift import shift
from slipstream.kernels.gated_scan.op import scan
from slipstream.kernels.running_mean.inputs import MeanInputs
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair
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


def chosen(impl: str | None, k: Tensor, v: Tensor) -> str | None:
    """The impl of running_mean; None where torch computes it."""
    if impl == "reference" or autograd.transformed():
        return None
    impls = dispatch.choose(_CANDIDATES, (k, v), impl, "rwkv4", k).impls
    return impls if dispatch.is_triton(impls) else None


def running_mean(inputs: MeanInputs, impl: str) -> tuple[Tensor, Tensor]:
    """o [B, T, D] in v's dtype, and M and z after the last token."""
    inputs = MeanInputs._make(None if x is None else x.contiguous() for x in inputs)
    if autograd.needs_autograd(*inputs[:5]):
        return _Mean.apply(*inputs, impl)
    return _mean(*inputs, keep=False, impl=impl)[:2]


def _unsupported_reason(k: Tensor, *others: Tensor) -> str | None:
    """Why the Triton kernels can't take a call, or None if they can."""
    if k.numel() == 0:
        return "there are no tokens or channels"
    if torch.version.hip:
        return "its kernels have not been tried on AMD's GPUs"
    return None


def _kind(k: Tensor) -> KernelKey:
    return ("running_mean.triton", k.dtype)


def _plain_mean(inputs: MeanInputs, keep: bool) -> tuple[Tensor, ...]:
    """o, the state after the last token, and what backward reads, of no elements unless `keep`."""
    wide = widen(inputs.k), widen(inputs.v)
    sums = plain_sums(*wide, inputs.w, inputs.start, inputs.cu_seqlens)
    o = outputs(inputs.u, *wide, sums).to(inputs.v.dtype)
    mean, z = (x if keep else x.new_empty(0) for x in sums.before.chunk(2, -1))
    return o, sums.final.clone(), wide[0] - z if keep else z, mean


_LAUNCH = "slipstream.kernels.running_mean.triton_kernels"
_TENSORS = custom_op.schema_of(MeanInputs)
_mean = custom_op.KernelOp(
    "running_mean",
    f"({_TENSORS}, bool keep, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=f"{_LAUNCH}:means",
    plain=_plain_mean,
    kind=_kind,
    # packed sequences of more than a tile, with states
    probe={
        "k": (1, kernel_pair.TOKENS, 40),
        "v": (1, kernel_pair.TOKENS, 40),
        "w": lambda w: -torch.rand(40, device=w.device),
        "u": (40,),
        "start": lambda k: torch.randn(2, 80, device=k.device),
        "cu_seqlens": lambda k: torch.tensor([0, 40, kernel_pair.TOKENS], device=k.device),
        "keep": True,
    },
    packed={"inputs": MeanInputs},
    replay=True,
)
_Mean = _mean.with_gradient(
    f"({_TENSORS}, Tensor r, Tensor mean, Tensor do, Tensor? dafter, str impl) -> Tensor[]",
    f"{_LAUNCH}:means_backward",
    results="o after r mean",
    wrt="k v w u start",
    keep=True,
)
_CANDIDATES = _mean.candidates(_unsupported_reason)
