"""The scan as torch.library operators, and its gradient.

slipstream::scan_forward gives h and the final state; slipstream::scan_backward the gradients of x,
g and, if it was given, initial_state. `impl` names the implementation, or
several to try in order.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.gated_scan.eager import scan_backward, scan_forward
from slipstream.kernels.gated_scan.reference import compute_dtype
from slipstream.runtime import guarded_launch, numeric_probe
from slipstream.runtime.autograd import Function, Saved, needs_autograd, once_differentiable
from slipstream.runtime.custom_op import KernelOp


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _forward(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    if x.numel() > 0:
        tensors = (x, g, initial_state, cu_seqlens)
        if impl == "eager":
            return scan_forward(*tensors)
        return _run_guarded(impl, x, g, lambda: _triton().forward, scan_forward, tensors)
    final = x.new_zeros(_sequences(x, cu_seqlens), x.shape[2], dtype=compute_dtype(x))
    return x.new_empty(x.shape), final if initial_state is None else final.copy_(initial_state)


@cache
def _triton() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.gated_scan.triton import launch

    return launch


def kind(x: Tensor, g: Tensor) -> KernelKey:
    """What a verdict on the kernels holds for."""
    return ("gated_scan.triton", x.dtype, g.dtype)


def _run_guarded(
    impl: str, x: Tensor, g: Tensor, kernels: Callable, plain: Callable, args: tuple
) -> Any:
    fallback = None if impl == "triton" else plain
    return guarded_launch.run_guarded(
        lambda: kind(x, g),
        x.device,
        lambda *args: kernels()(*args),
        fallback,
        args,
        lambda: _mismatch(x, g),
    )


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
    final = x.new_empty(_sequences(x, cu_seqlens), x.shape[2], dtype=compute_dtype(x))
    return x.new_empty(x.shape), final


def _backward(
    g: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dh: Tensor | None,
    dfinal: Tensor | None,
    impl: str,
) -> list[Tensor]:
    if h.numel() > 0:
        tensors = (g, h, initial_state, cu_seqlens, dh, dfinal)
        if impl == "eager":
            grads = scan_backward(*tensors)
        else:
            grads = _run_guarded(impl, h, g, lambda: _triton().backward, scan_backward, tensors)
        return [x for x in grads if x is not None]
    grads = [h.new_empty(h.shape), g.new_empty(g.shape)]
    if initial_state is not None:
        state = initial_state.new_zeros(initial_state.shape)
        grads.append(state if dfinal is None else state.copy_(dfinal))
    return grads


def _fake_backward(
    g: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dh: Tensor | None,
    dfinal: Tensor | None,
    impl: str,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (h, g, initial_state) if x is not None]


_call_forward = KernelOp(
    "scan_forward",
    "(Tensor x, Tensor g, Tensor? initial_state, Tensor? cu_seqlens, str impl) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    replay=True,
)
_call_backward = KernelOp(
    "scan_backward",
    "(Tensor g, Tensor h, Tensor? initial_state, Tensor? cu_seqlens, Tensor? dh, Tensor? dfinal, "
    "str impl) -> Tensor[]",
    _backward,
    _fake_backward,
    replay=True,
)


class _Scan(Function):
    operator = "slipstream::scan"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        g: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        impl: str,
    ) -> Any:
        h, final = _call_forward(x, g, initial_state, cu_seqlens, impl)
        ctx.save_for_backward(g, h, initial_state, cu_seqlens)
        ctx.impl = impl
        ctx.set_materialize_grads(False)
        return h, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dh: Tensor | None, dfinal: Tensor | None) -> Any:
        if dh is None and dfinal is None:
            return (None,) * 5
        grads = _call_backward(*saved, dh, dfinal, ctx.impl)
        return (*grads, *(None,) * (5 - len(grads)))


_call_forward.set_gradient(_Scan.apply)


def scan(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    """h [B, T, D] in x's dtype and the final state [N, D], with gradients."""
    tensors = (x, g, initial_state)
    if needs_autograd(*tensors):
        return _Scan.apply(x, g, initial_state, cu_seqlens, impl)
    return _call_forward(x, g, initial_state, cu_seqlens, impl)
