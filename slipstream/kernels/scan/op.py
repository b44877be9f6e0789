"""The scan as torch.library operators, and its gradient.

slipstream::scan_forward gives h and the final state; slipstream::scan_backward the gradients of x,
g and, if it was given, initial_state. `impl` names the implementation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.core.library import define
from slipstream.kernels.scan.eager import scan_backward, scan_forward
from slipstream.kernels.scan.reference import compute_dtype


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _forward(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    if x.numel() > 0:
        if impl == "triton":
            return _triton().forward(x, g, initial_state, cu_seqlens)
        assert impl == "eager", impl
        return scan_forward(x, g, initial_state, cu_seqlens)
    final = x.new_zeros(_sequences(x, cu_seqlens), x.shape[2], dtype=compute_dtype(x))
    return x.new_empty(x.shape), final if initial_state is None else final.copy_(initial_state)


def _triton() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.scan.triton import launch

    return launch


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
        backward = _triton().backward if impl == "triton" else scan_backward
        grads = backward(g, h, initial_state, cu_seqlens, dh, dfinal)
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


_forward_op: Callable = define(
    "scan_forward",
    "(Tensor x, Tensor g, Tensor? initial_state, Tensor? cu_seqlens, str impl) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
_backward_op: Callable = define(
    "scan_backward",
    "(Tensor g, Tensor h, Tensor? initial_state, Tensor? cu_seqlens, Tensor? dh, Tensor? dfinal, "
    "str impl) -> Tensor[]",
    _backward,
    _fake_backward,
)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        g: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        impl: str,
    ) -> Any:
        h, final = _forward_op(x, g, initial_state, cu_seqlens, impl)
        ctx.save_for_backward(g, h, initial_state, cu_seqlens)
        ctx.impl = impl
        ctx.set_materialize_grads(False)
        return h, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dfinal: Tensor | None) -> Any:
        if dh is None and dfinal is None:
            return (None,) * 5
        grads = _backward_op(*ctx.saved_tensors, dh, dfinal, ctx.impl)
        return (*grads, *(None,) * (5 - len(grads)))


def scan(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    """h [B, T, D] in x's dtype and the final state [N, D], with gradients."""
    given = (x, g, initial_state)
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in given):
        return _Scan.apply(x, g, initial_state, cu_seqlens, impl)
    return _forward_op(x, g, initial_state, cu_seqlens, impl)
