"""Means of all tokens so far, weighted by exponentials, as operators with gradients.

    z_t = log(exp(w + z_{t-1}) + exp(k_t))           r_t = k_t - w - z_{t-1}
    c_t = exp(k_t - z_t) = sigmoid(r_t)              a_t = exp(w + z_{t-1} - z_t) = 1 - c_t
    M_t = a_t M_{t-1} + c_t v_t                      s_t = sigmoid(r_t + w + u)
    o_t = M_{t-1} + s_t (v_t - M_{t-1})

slipstream::_running_weights gives c and log a, of w = 0: what a state decays by and a token writes
with, so that it stays a mean (LightNet). _running_mean gives o (RWKV-4). MATH.md has the
gradients.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.running_mean import eager
from slipstream.kernels.running_mean.inputs import MeanInputs
from slipstream.runtime import autograd, custom_op, dispatch, numeric_probe


def chosen(operator: str, impl: str | None, k: Tensor, *others: Tensor) -> str | None:
    """The impl of running_weights and running_mean; None where torch computes them."""
    if impl == "reference" or autograd.transformed():
        return None
    impls = dispatch.choose(_CANDIDATES, (k, *others), impl, operator, k).impls
    return impls if dispatch.is_triton(impls) else None


def running_weights(
    k: Tensor, z: Tensor, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """c [B, T, D] in k's dtype, log a, float32, 0 where nothing is before, and z after the last
    token. k: any floating dtype but float64. z: [N, D], float32, -inf for nothing."""
    inputs = k.contiguous(), z.contiguous(), cu_seqlens
    return (_Weights.apply if autograd.needs_autograd(k, z) else _weights)(*inputs, impl)


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


def _mismatch(k: Tensor) -> str | None:
    """The probe: packed sequences of more than a tile, with states, by both operators."""
    inputs = {
        "k": numeric_probe.random_like(k, 1, 150, 40),
        "v": numeric_probe.random_like(k, 1, 150, 40),
        "start": torch.randn(2, 80, device=k.device),
        "w": -torch.rand(40, device=k.device),
        "u": torch.randn(40, device=k.device),
    }
    cu_seqlens = torch.tensor([0, 40, 150], device=k.device)

    def both(weights: Callable, mean: Callable) -> Callable:
        return lambda t: (
            *weights(t["k"], t["start"][:, 40:], cu_seqlens),
            *mean(MeanInputs(t["k"], t["v"], t["w"], t["u"], t["start"], cu_seqlens)),
        )

    return numeric_probe.mismatch(
        both(
            partial(running_weights, impl=dispatch.TRITON_OR_EAGER),
            partial(running_mean, impl=dispatch.TRITON_OR_EAGER),
        ),
        both(_plain_weights, lambda inputs: _plain_mean(inputs, False)[:2]),
        inputs,
    )


def _plain_weights(
    k: Tensor, z: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _widen(k)
    sums = eager.plain_sums(wide, None, None, z, cu_seqlens)
    c, g = eager.weights_and_decays(wide, sums)
    return c.to(k.dtype), g, sums.final.clone()


def _plain_mean(inputs: MeanInputs, keep: bool) -> tuple[Tensor, ...]:
    """o, the state after the last token, and what backward reads, of no elements unless `keep`."""
    wide = _widen(inputs.k), _widen(inputs.v)
    sums = eager.plain_sums(*wide, inputs.w, inputs.start, inputs.cu_seqlens)
    o = eager.outputs(inputs.u, *wide, sums).to(inputs.v.dtype)
    mean, z = (x if keep else x.new_empty(0) for x in sums.before.chunk(2, -1))
    return o, sums.final.clone(), wide[0] - z if keep else z, mean


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


_LAUNCH = "slipstream.kernels.running_mean.triton.launch"
_TENSORS = custom_op.schema_of(MeanInputs)
_weights = custom_op.KernelOp(
    "running_weights",
    "(Tensor k, Tensor z, Tensor? cu_seqlens, str impl) -> (Tensor, Tensor, Tensor)",
    kernel=f"{_LAUNCH}:weights",
    plain=_plain_weights,
    kind=_kind,
    probe=_mismatch,
    replay=True,
)
_Weights = _weights.with_gradient(
    "(Tensor k, Tensor g, Tensor z, Tensor? cu_seqlens, Tensor dc, Tensor dg, Tensor? dafter, "
    "str impl) -> Tensor[]",
    f"{_LAUNCH}:weights_backward",
    results="c g after",
    wrt="k z",
)
_mean = custom_op.KernelOp(
    "running_mean",
    f"({_TENSORS}, bool keep, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=f"{_LAUNCH}:means",
    plain=_plain_mean,
    kind=_kind,
    probe=_mismatch,
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
_CANDIDATES = _weights.candidates(_unsupported_reason)
