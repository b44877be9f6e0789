"""The decay gate as torch.library operators, its gradient, and its formula in plain torch.

    z = x + dt_bias        r = exp(A_log), 1 if there is no A_log
    g = -r softplus(z)     or, bounded, g = lower_bound sigmoid(r z)

slipstream::_decay_gate gives g, slipstream::_decay_gate_backward the gradients of x and of those
parameters that there are. Backward reads x, which may have 16 bits, and nothing in float32 but dg.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import by_operation, needs_autograd
from slipstream.runtime.custom_op import KernelOp, autograd_function
from slipstream.runtime.dispatch import PLAIN, TRITON_OR_EAGER, choose, is_triton, triton_or_eager
from slipstream.runtime.guarded_launch import Guard, known_failure, plain_gradients


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
    if impl in PLAIN or by_operation():
        return plain(x, A_log, dt_bias, lower_bound)
    inputs = (x, A_log, dt_bias)
    impl = choose(_CANDIDATES, inputs, None, "decay_gate", x).impls
    if not is_triton(impl):
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
    return -rate * F.softplus(z)


def _unsupported_reason(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> str | None:
    if x.numel() == 0:
        return "there are no tokens or heads"
    for parameter in (A_log, dt_bias):
        if parameter is not None and parameter.dtype == torch.float64:
            return "it computes in float32, and a parameter is float64"
    return known_failure(lambda: _kind(x, A_log, dt_bias), x.device)


_CANDIDATES = triton_or_eager(_unsupported_reason)


def _kind(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> KernelKey:
    parameters = (None if p is None else p.dtype for p in (A_log, dt_bias))
    return ("decay_gate.triton", x.dtype, x.dim(), *parameters)


def _mismatch(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> str | None:
    """The probe: a few tokens of as many heads and channels."""
    probe_inputs = {
        "x": numeric_probe.random_like(x, 2, 19, *x.shape[2:]),
        "A_log": None if A_log is None else numeric_probe.random_like(A_log, *A_log.shape),
        "dt_bias": None if dt_bias is None else numeric_probe.random_like(dt_bias, *dt_bias.shape),
    }
    bound = -4.0 if A_log is None else None
    return numeric_probe.mismatch(
        lambda t: _Gate.apply(t["x"], t["A_log"], t["dt_bias"], bound, TRITON_OR_EAGER),
        lambda t: plain(**t, lower_bound=bound),
        probe_inputs,
    )


def _run_forward(
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    impl: str,
) -> Tensor:
    inputs = (x, A_log, dt_bias)
    with Guard(impl, x.device, lambda: _kind(*inputs), lambda: _mismatch(*inputs)) as usable:
        if usable:
            from slipstream.kernels.decay_gate.triton import launch

            return launch.forward(*inputs, lower_bound)
    return plain(*inputs, lower_bound).contiguous()


def _run_backward(
    dg: Tensor,
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    impl: str,
) -> list[Tensor]:
    """dx, and those that there are of dA_log and ddt_bias."""
    inputs = (x, A_log, dt_bias)
    with Guard(impl, x.device, lambda: _kind(*inputs), lambda: _mismatch(*inputs)) as usable:
        if usable:
            from slipstream.kernels.decay_gate.triton import launch

            return launch.backward(dg, x, A_log, dt_bias, lower_bound)
    return plain_gradients(partial(plain, lower_bound=lower_bound), inputs, [dg])


def _forward_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _backward_fake(
    dg: Tensor, x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, *_: Any
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (x, A_log, dt_bias) if t is not None]


_PARAMETERS = "Tensor? A_log, Tensor? dt_bias, float? lower_bound, str impl"
_forward = KernelOp(
    "decay_gate",
    f"(Tensor x, {_PARAMETERS}) -> Tensor",
    _run_forward,
    _forward_fake,
    replay=True,
)
_backward = KernelOp(
    "decay_gate_backward",
    f"(Tensor dg, Tensor x, {_PARAMETERS}) -> Tensor[]",
    _run_backward,
    _backward_fake,
    replay=True,
)
_Gate = autograd_function(_forward, _backward, results="g", wrt="x A_log dt_bias")
