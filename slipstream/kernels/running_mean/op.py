"""The mean of all tokens so far, weighted by exponentials, as an operator with gradients.

    z_t = log(exp(w + z_{t-1}) + exp(k_t))           r_t = k_t - w - z_{t-1}
    c_t = exp(k_t - z_t) = sigmoid(r_t)              a_t = exp(w + z_{t-1} - z_t) = 1 - c_t
    M_t = a_t M_{t-1} + c_t v_t                      s_t = sigmoid(r_t + w + u)
    o_t = M_{t-1} + s_t (v_t - M_{t-1})

slipstream::_running_mean gives o (RWKV-4). MATH.md has the gradients.
"""

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.running_mean import eager
from slipstream.kernels.running_mean.inputs import MeanInputs
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair


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
    wide = _widen(inputs.k), _widen(inputs.v)
    sums = eager.plain_sums(*wide, inputs.w, inputs.start, inputs.cu_seqlens)
    o = eager.outputs(inputs.u, *wide, sums).to(inputs.v.dtype)
    mean, z = (x if keep else x.new_empty(0) for x in sums.before.chunk(2, -1))
    return o, sums.final.clone(), wide[0] - z if keep else z, mean


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


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
