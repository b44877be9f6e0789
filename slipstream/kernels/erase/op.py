"""The vector a of a transition that erases by channels, as operators, and in plain torch.

    a = -exp(g) b k                 S <- exp(g) S + k (v + a^T S)

slipstream::_erase gives a, _erase_backward the gradients of g, k and b. In plain torch a takes four
passes over as many numbers, and its gradients nine.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import by_operation, needs_autograd
from slipstream.runtime.custom_op import KernelOp, autograd_function
from slipstream.runtime.dispatch import PLAIN, TRITON_OR_EAGER, choose, is_triton, triton_or_eager
from slipstream.runtime.guarded_launch import Guard, known_failure


def erase(g: Tensor, k: Tensor, b: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """a in k's dtype and shape.

    Args:
        g: log decay, k: key, b: how much to erase, None is 1; of one shape, any floating dtypes.
        impl: of the recurrence that follows: plain torch here too if it is named.
    """
    if impl in PLAIN or by_operation():
        return plain(g, k, b)
    impl = choose(_CANDIDATES, (k, g, b), None, "erase", k).impls
    if not is_triton(impl):
        return plain(g, k, b)
    inputs = [None if x is None else x.contiguous() for x in (g, k, b)]
    return (_Erase.apply if needs_autograd(*inputs) else _forward)(*inputs, impl)


def plain(g: Tensor, k: Tensor, b: Tensor | None) -> Tensor:
    decay = -(g if g.dtype == torch.float64 else g.float()).exp()
    return (decay * k if b is None else decay * b * k).to(k.dtype)


def _unsupported_reason(k: Tensor, g: Tensor, b: Tensor | None) -> str | None:
    if k.numel() == 0:
        return "there are no tokens or heads"
    if any(x is not None and x.dtype == torch.float64 for x in (g, b)):
        return "it computes in float32, and a gate is float64"
    return known_failure(lambda: _kind(g, k, b), k.device)


_CANDIDATES = triton_or_eager(_unsupported_reason)


def _kind(g: Tensor, k: Tensor, b: Tensor | None) -> KernelKey:
    return ("erase.triton", k.dtype, g.dtype, None if b is None else b.dtype)


def _mismatch(*inputs: Tensor | None) -> str | None:
    """The probe: more than a tile."""
    g, k, b = (None if x is None else numeric_probe.random_like(x, 3, 1003) for x in inputs)
    assert g is not None
    return numeric_probe.mismatch(
        lambda t: _Erase.apply(t["g"], t["k"], t["b"], TRITON_OR_EAGER),
        lambda t: plain(t["g"], t["k"], t["b"]),
        {"k": k, "g": -g.abs(), "b": b},  # bars are those of the first one's dtype
    )


def _run_forward(g: Tensor, k: Tensor, b: Tensor | None, impl: str) -> Tensor:
    with _guard(impl, g, k, b) as usable:
        if usable:
            from slipstream.kernels.erase.triton import erase as kernels

            return kernels.forward(g, k, b)
    return plain(g, k, b).contiguous()


def _run_backward(da: Tensor, g: Tensor, k: Tensor, b: Tensor | None, impl: str) -> list[Tensor]:
    """dg, dk, and db if there is b."""
    da = da.contiguous()
    with _guard(impl, g, k, b) as usable:
        if usable:
            from slipstream.kernels.erase.triton import erase as kernels

            return kernels.backward(da, g, k, b)
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    d = -da.to(wide) * g.to(wide).exp()
    dk = d if b is None else d * b
    grads = [(dk * k).to(g.dtype), dk.to(k.dtype)]
    return grads if b is None else [*grads, (d * k).to(b.dtype)]


def _guard(impl: str, *inputs: Any) -> Guard:
    k = inputs[1]
    return Guard(impl, k.device, lambda: _kind(*inputs), lambda: _mismatch(*inputs))


_INPUTS = "Tensor g, Tensor k, Tensor? b, str impl"
_forward = KernelOp(
    "erase",
    f"({_INPUTS}) -> Tensor",
    _run_forward,
    lambda g, k, b, impl: k.new_empty(k.shape),
    replay=True,
)
_backward = KernelOp(
    "erase_backward",
    f"(Tensor da, {_INPUTS}) -> Tensor[]",
    _run_backward,
    lambda da, g, k, b, impl: [x.new_empty(x.shape) for x in (g, k, b) if x is not None],
    replay=True,
)
_Erase = autograd_function(_forward, _backward, results="a", wrt="g k b")
