"""The decay gate as torch.library operators, its gradient, and its formula in plain torch.

    z = x + dt_bias        r = exp(A_log), 1 if there is no A_log
    g = -r softplus(z)     or, bounded, g = lower_bound sigmoid(r z)

slipstream::_decay_gate gives g, slipstream::_decay_gate_backward the gradients of x and of those
parameters that there are. Backward reads x, which may have 16 bits, and nothing in float32 but dg.
"""

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import custom_op, dispatch
from slipstream.runtime.autograd import by_operation, needs_autograd


def decay_gate(
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    impl: str | None = None,
) -> Tensor:
    """g in x's shape, float32, or float64 for such x.

    Args:
        x: [B, T, HV] or [B, T, HV, K].
        A_log: [HV], any shape; None only with lower_bound. dt_bias: [HV] or [HV K], any shape.
    """
    if impl in dispatch.PLAIN or by_operation():
        return plain(x, A_log, dt_bias, lower_bound)
    inputs = (x, A_log, dt_bias)
    impl = dispatch.choose(_CANDIDATES, inputs, None, "decay_gate", x).impls
    if not dispatch.is_triton(impl):
        return plain(*inputs, lower_bound)
    return (_Gate.apply if needs_autograd(*inputs) else _forward)(*inputs, lower_bound, impl)


def plain(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    z = x if x.dtype == torch.float64 else x.float()
    if dt_bias is not None:
        z = z + dt_bias.to(z.dtype).view(z.shape[2:])
    if A_log is None:
        assert lower_bound is not None
        return lower_bound * torch.sigmoid(z)
    rate = A_log.to(z.dtype).exp().view(z.shape[2], *([1] * (z.dim() - 3)))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * z)
    return -rate * torch.nn.functional.softplus(z)


def _kind(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> KernelKey:
    parameters = (None if p is None else p.dtype for p in (A_log, dt_bias))
    return ("decay_gate.triton", x.dtype, x.dim(), *parameters)


def _unsupported_reason(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> str | None:
    if x.numel() == 0:
        return "there are no tokens or heads"
    for parameter in (A_log, dt_bias):
        if parameter is not None and parameter.dtype == torch.float64:
            return "it computes in float32, and a parameter is float64"
    return None


_LAUNCH = "slipstream.kernels.elementwise.triton.decay_gate"
_PARAMETERS = "Tensor? A_log, Tensor? dt_bias, float? lower_bound, str impl"
_forward = custom_op.KernelOp(
    "decay_gate",
    f"(Tensor x, {_PARAMETERS}) -> Tensor",
    kernel=f"{_LAUNCH}:forward",
    plain=plain,
    kind=_kind,
    # a few tokens of as many heads and channels
    probe={"x": (2, 19, ...)},
    replay=True,
)
_Gate = _forward.with_gradient(
    f"(Tensor dg, Tensor x, {_PARAMETERS}) -> Tensor[]",
    f"{_LAUNCH}:backward",
    results="g",
    wrt="x A_log dt_bias",
)
_CANDIDATES = _forward.candidates(_unsupported_reason)
