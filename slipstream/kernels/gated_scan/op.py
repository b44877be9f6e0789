"""The scan as torch.library operators, and its gradient.

slipstream::_scan_forward gives h and the final state; _scan_backward the gradients of x, g and, if
it was given, initial_state. `impl` names the implementation, or several to try in order.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.gated_scan import eager, reference
from slipstream.runtime import autograd, custom_op, numeric_probe, size_ladder
from slipstream.runtime.gradient import autograd_function


def kind(x: Tensor, g: Tensor) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    return ("gated_scan.triton", x.dtype, g.dtype)


def _mismatch(x: Tensor, g: Tensor) -> str | None:
    """The probe: two packed sequences, with states."""
    probe_inputs = {
        "x": torch.randn(1, 150, 40, device=x.device).to(x.dtype),
        "g": (-torch.rand(1, 150, 40, device=x.device)).to(g.dtype),
        "s": torch.randn(2, 40, device=x.device),
        "cu": torch.tensor([0, 50, 150], device=x.device),
    }

    def run(impl: str) -> Callable:
        return lambda tensors: scan(*tensors.values(), impl=impl)

    return numeric_probe.mismatch(run("triton|eager"), run("eager"), probe_inputs)


def _fake_forward(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty(rows, x.shape[2], dtype=reference.compute_dtype(x))


def _fake_backward(g: Tensor, h: Tensor, initial_state: Tensor | None, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (h, g, initial_state) if x is not None]


_LAUNCH = "slipstream.kernels.gated_scan.triton.scan"
_call_forward = custom_op.KernelOp(
    "scan_forward",
    "(Tensor x, Tensor g, Tensor? initial_state, Tensor? cu_seqlens, str impl) -> (Tensor, Tensor)",
    fake=_fake_forward,
    kernel=f"{_LAUNCH}:forward",
    plain=eager.scan_forward,
    kind=kind,
    probe=_mismatch,
    in_torch_if=lambda x: x.numel() == 0,
    replay=True,
    at_sizes=size_ladder.AtSizes(tokens=(0, 1), states=(2,), offsets=(3,)),
)
_call_backward = custom_op.KernelOp(
    "scan_backward",
    "(Tensor g, Tensor h, Tensor? initial_state, Tensor? cu_seqlens, Tensor? dh, Tensor? dfinal, "
    "str impl) -> Tensor[]",
    fake=_fake_backward,
    kernel=f"{_LAUNCH}:backward",
    plain=eager.scan_backward,
    kind=lambda h, g: kind(h, g),
    probe=lambda h, g: _mismatch(h, g),
    in_torch_if=lambda h: h.numel() == 0,
    replay=True,
    at_sizes=size_ladder.AtSizes(tokens=(0, 1, 4), states=(2, 5), offsets=(3,)),
)
_Scan = autograd_function(_call_forward, _call_backward, results="h final", wrt="x g initial_state")


def scan(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    """h [B, T, D] in x's dtype and the final state [N, D], with gradients."""
    tensors = (x, g, initial_state)
    if autograd.needs_autograd(*tensors):
        return _Scan.apply(x, g, initial_state, cu_seqlens, impl)
    return _call_forward(x, g, initial_state, cu_seqlens, impl=impl)
