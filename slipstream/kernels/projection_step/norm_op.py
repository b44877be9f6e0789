"""slipstream::_projection_norm_step: a linear layer of a step, its residual and the norm behind it.

Of few rows and of many they are other launches: takes() says of how many this is one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import eager, inputs, op
from slipstream.runtime import backends, consistent, custom_op, guarded_launch
from slipstream.runtime.dispatch import Candidate, choose
from slipstream.runtime.numeric_probe import random_like


def takes(rows: int, device: torch.device) -> bool:
    """Whether shares of K are faster for so many rows; consistent models want one order of sums
    whatever the rows."""
    return (
        inputs.MMA_ROWS < rows <= op.MAX_ROWS
        and not consistent.consistent_scope.on
        and backends.supports_pdl(device)
    )


def _unsupported_reason(t: inputs.NormedInputs) -> str | None:
    if reason := op.unsupported_reason(t.product):
        return reason
    if not t.x.dtype == t.weight.dtype == t.norm_weight.dtype or t.x.dtype.itemsize != 2:
        return "it takes x and weights of one dtype of 16 bits"
    if t.residual.stride(1) != 1 or not t.norm_weight.is_contiguous():
        return "rows of the residual, or the norm's weight, are not contiguous"
    return guarded_launch.known_failure(lambda: _kind(t), t.x.device)


CANDIDATES = (
    Candidate("triton", "shares of K by one Triton kernel, their sum by another, on CUDA",
              _unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
)  # fmt: skip


def run(t: inputs.NormedInputs, n: NormOptions, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """h = residual + x W^T + b [M, N] and its norm n, of rows, in the weight's dtype."""
    impls = choose(CANDIDATES, t, impl, "projection_norm_step", t.x).impls
    return _call(*t, *n, impl=impls)


def _eager(t: inputs.NormedInputs, n: NormOptions) -> tuple[Tensor, Tensor]:
    h = t.residual + F.linear(t.x, t.weight, t.bias).to(t.residual.dtype)
    y = eager.normed(h.to(t.weight.dtype), t.norm_weight, n)
    return h, y.to(t.weight.dtype)


def _kind(t: inputs.NormedInputs) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    dtypes = t.x.dtype, t.residual.dtype
    return ("projection_norm_step.triton", *dtypes, *t.weight.shape, t.bias is not None)


_call = custom_op.KernelOp(
    "projection_norm_step",
    f"({custom_op.schema_of(inputs.NormedInputs)}, {custom_op.schema_of(NormOptions)}, str impl) "
    "-> (Tensor, Tensor)",
    kernel=f"{op.LAUNCH}:projection_norm",
    plain=_eager,
    kind=_kind,
    packed={"t": inputs.NormedInputs, "n": NormOptions},
    in_torch_if=lambda x, residual: 0 in (x.numel(), residual.numel()),
    # of as many rows: they decide about the launches
    probe={"weight": lambda weight: random_like(weight, *weight.shape) * weight.shape[1] ** -0.5},
    replay=True,
)
