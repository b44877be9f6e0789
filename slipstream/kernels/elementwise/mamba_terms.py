"""What Mamba-2 makes of a token's inputs and step before its scan: operators, and plain torch.

    step = softplus(dt + dt_bias), between low and high        v = u step
    g = -exp(A_log) step                                       skip = D u

slipstream::_mamba_terms gives v, skip and g, _mamba_terms_backward the gradients of the five. In
plain torch their backward takes 17 passes over as many numbers as u has; here it takes 4.
"""

import torch
from torch import Tensor

from slipstream.common.checks import widen
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, dispatch


def mamba_terms(
    u: Tensor,
    dt: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor | None = None,
    limit: tuple[float, float] | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """v and skip [B, T, H, P] in u's dtype, g [B, T, H] in float32, or float64 for such u.

    Args:
        u: [B, T, H, P]. dt: [B, T, H]. A_log, dt_bias: [H].
        D: [H, P]; None leaves skip out, which is empty then.
        limit: least and largest step.
    """
    low, high = limit or (0.0, float("inf"))
    inputs = (u, dt, A_log, dt_bias, D)
    if impl in dispatch.PLAIN or autograd.by_operation():
        return plain(*inputs, low, high)
    impl = dispatch.choose(_CANDIDATES, inputs, impl, "mamba_terms", u).impls
    if not dispatch.is_triton(impl):
        return plain(*inputs, low, high)
    tensors = [None if x is None else x.contiguous() for x in inputs]
    return (_Terms.apply if autograd.needs_autograd(*tensors) else _forward)(
        *tensors, low, high, impl
    )


def plain(
    u: Tensor,
    dt: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor | None,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    z = widen(dt) + dt_bias
    step = torch.nn.functional.softplus(z)
    if (low, high) != (0.0, float("inf")):
        step = step.clamp(low, high)
    v = u * step.to(u.dtype)[..., None]
    skip = u[:0].flatten() if D is None else u * D.to(u.dtype)
    return v, skip, -widen(A_log).exp() * step


def _unsupported_reason(
    u: Tensor, dt: Tensor, A_log: Tensor, dt_bias: Tensor, D: Tensor | None
) -> str | None:
    if u.numel() == 0:
        return "there are no tokens or heads"
    if any(x is not None and x.dtype == torch.float64 for x in (dt, A_log, dt_bias, D)):
        return "it computes in float32, and an input is float64"
    return None


def _kind(u: Tensor, dt: Tensor, A_log: Tensor, dt_bias: Tensor, D: Tensor | None) -> KernelKey:
    dtypes = (None if x is None else x.dtype for x in (u, dt, A_log, dt_bias, D))
    return ("mamba_terms.triton", u.shape[-1], *dtypes)


_LAUNCH = "slipstream.kernels.elementwise.triton.mamba_terms"
_INPUTS = (
    "Tensor u, Tensor dt, Tensor A_log, Tensor dt_bias, Tensor? D, float low, float high, str impl"
)
_forward = custom_op.KernelOp(
    "mamba_terms",
    f"({_INPUTS}) -> (Tensor, Tensor, Tensor)",
    kernel=f"{_LAUNCH}:forward",
    plain=plain,
    kind=_kind,
    # a few tokens of as many heads and channels
    probe={"u": (2, 19, ...), "dt": (2, 19, ...), "low": 0.25, "high": 1.5},
    replay=True,
)
_Terms = _forward.with_gradient(
    f"(Tensor dv, Tensor dskip, Tensor dg, {_INPUTS}) -> Tensor[]",
    f"{_LAUNCH}:backward",
    results="v skip g",
    wrt="u dt A_log dt_bias D",
)
_CANDIDATES = _forward.candidates(_unsupported_reason)
