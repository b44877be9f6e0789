"""Keys times factors that follow the decayed sums of their squares, as operators.

    A_t = exp(g_t) A_{t-1} + beta_t k_t^2
    y_t = k_t x^(-r_t / (1 + |r_t|))                 r_t = log(A_t + eps) - centre

slipstream::_precondition gives y and the last A, and 1 / the factor if wanted; in plain torch it
takes a scan and eight passes.
"""

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.elementwise.inputs import CENTRE
from slipstream.kernels.elementwise.inputs import PreconditionerInputs as Inputs
from slipstream.kernels.gated_scan.op import scan
from slipstream.runtime import autograd, custom_op, dispatch, guarded_launch, numeric_probe


def chosen(impl: str | None, k: Tensor, *others: Tensor | None) -> str | None:
    """The impl of precondition; None where plain torch computes it."""
    if impl == "reference" or autograd.transformed():
        return None
    impls = dispatch.choose(_CANDIDATES, (k, *others), impl, "precond_delta_rule", k).impls
    return impls if dispatch.is_triton(impls) else None


def precondition(inputs: Inputs, impl: str, inverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, H, K] in k's dtype, A after the last token [N, H, K], float32, and 1 / the factors
    as y, of no elements unless `inverse`."""
    inputs = Inputs._make(t.contiguous() if isinstance(t, Tensor) else t for t in inputs)
    if autograd.needs_autograd(*inputs.differentiable):
        return _Precondition.apply(*inputs, inverse, impl)
    return _forward(*inputs, keep=False, inverse=inverse, impl=impl)[:3]


def squashed(sums: Tensor, centre: Tensor | None, x: float, eps: float) -> Tensor:
    """The factors [..., H, K], from A."""
    r = torch.log(sums + eps) - (CENTRE if centre is None else centre.to(sums.dtype)[:, None])
    return torch.exp(-math.log(x) * r / (1 + r.abs()))


def plain(inputs: Inputs, inverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    k, g, beta, centre, state, cu_seqlens, x, eps = inputs
    wide = k if k.dtype == torch.float64 else k.float()
    squares = beta.to(wide.dtype)[..., None] * wide.square()
    gates = g.to(wide.dtype)[..., None].expand_as(wide).flatten(2)
    before = None if state is None else state.flatten(1)
    sums, final = scan(squares.flatten(2), gates, before, cu_seqlens, "eager")
    factors = squashed(sums.view(k.shape), centre, x, eps)
    by = factors.reciprocal().to(k.dtype) if inverse else k.new_empty(0)
    return (wide * factors).to(k.dtype), final.unflatten(1, k.shape[2:]), by


def _plain_forward(inputs: Inputs, keep: bool, inverse: bool) -> tuple[Tensor, ...]:
    """y, A after the last token, 1 / the factors, of no elements unless `inverse`, and A of each
    token, of none unless `keep`."""
    y, final, by = plain(inputs, inverse)
    # backward by torch needs no sums
    return y, final, by, final.new_zeros(inputs.k.shape if keep else (0,))


def _plain_backward(
    inputs: Inputs, sums: Tensor, dy: Tensor, dfinal: Tensor | None, dby: Tensor | None
) -> list[Tensor]:
    # of no elements where forward made no factors
    dby = None if dby is None or dby.numel() == 0 else dby

    def outputs(*leaves: Any) -> tuple[Tensor, ...]:
        return plain(Inputs._make([*leaves, *inputs[len(leaves) :]]), dby is not None)

    return guarded_launch.plain_gradients(outputs, inputs.differentiable, [dy, dfinal, dby])


def _kind(k: Tensor) -> KernelKey:
    return ("preconditioner.triton", k.dtype)


def _unsupported_reason(k: Tensor, *others: Tensor | None) -> str | None:
    """Why the Triton kernels can't take a call, or None if they can."""
    if k.numel() == 0:
        return "there are no tokens or channels"
    if torch.float64 in (k.dtype, *(t.dtype for t in others if t is not None)):
        return "it computes in float32"
    if torch.version.hip:
        return "its kernels have not been tried on AMD's GPUs"
    return None


# packed sequences of more than a tile, with states; K is two tiles and a half
_PROBE = {
    "k": lambda k: numeric_probe.random_like(k, 1, 150, 2, 40),
    "g": lambda k: -torch.rand(1, 150, 2, device=k.device),
    "beta": lambda k: torch.rand(1, 150, 2, device=k.device),
    "centre": lambda k: torch.randn(2, device=k.device),
    "state": lambda k: torch.rand(2, 2, 40, device=k.device),
    "cu_seqlens": lambda k: torch.tensor([0, 40, 150], device=k.device),
    "x": 1.5,
    "eps": 1e-2,
    "keep": True,
    "inverse": True,
}
_LAUNCH = "slipstream.kernels.elementwise.triton.preconditioner"
_INPUTS = custom_op.schema_of(Inputs)
_forward = custom_op.KernelOp(
    "precondition",
    f"({_INPUTS}, bool keep, bool inverse, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=f"{_LAUNCH}:forward",
    plain=_plain_forward,
    kind=_kind,
    probe=_PROBE,
    packed={"inputs": Inputs},
    replay=True,
)
_Precondition = _forward.with_gradient(
    f"({_INPUTS}, Tensor sums, Tensor dy, Tensor? dfinal, Tensor? dby, str impl) -> Tensor[]",
    f"{_LAUNCH}:backward",
    plain=_plain_backward,
    results="y final by sums",
    wrt="k g beta centre state",
    keep=True,
)
_CANDIDATES = _forward.candidates(_unsupported_reason)
