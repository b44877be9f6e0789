"""The vector a of a transition that erases by channels, as operators, and in plain torch.

    a = -exp(g) b k                 S <- exp(g) S + k (v + a^T S)

slipstream::_erase gives a, _erase_backward the gradients of g, k and b. In plain torch a takes four
passes over as many numbers, and its gradients nine.
"""

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair


def erase(g: Tensor, k: Tensor, b: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """a in k's dtype and shape.

    Args:
        g: log decay, k: key, b: how much to erase, None is 1; of one shape, any floating dtypes.
        impl: of the recurrence that follows: plain torch here too if it is named.
    """
    if impl in dispatch.PLAIN or autograd.by_operation():
        return plain(g, k, b)
    impl = dispatch.choose(_CANDIDATES, (k, g, b), None, "erase", k).impls
    if not dispatch.is_triton(impl):
        return plain(g, k, b)
    inputs = [None if x is None else x.contiguous() for x in (g, k, b)]
    return (_Erase.apply if autograd.needs_autograd(*inputs) else _forward)(*inputs, impl)


def plain(g: Tensor, k: Tensor, b: Tensor | None) -> Tensor:
    decay = -(g if g.dtype == torch.float64 else g.float()).exp()
    return (decay * k if b is None else decay * b * k).to(k.dtype)


def _kind(g: Tensor, k: Tensor, b: Tensor | None) -> KernelKey:
    return ("erase.triton", k.dtype, g.dtype, None if b is None else b.dtype)


def _unsupported_reason(k: Tensor, g: Tensor, b: Tensor | None) -> str | None:
    if k.numel() == 0:
        return "there are no tokens or heads"
    if any(x is not None and x.dtype == torch.float64 for x in (g, b)):
        return "it computes in float32, and a gate is float64"
    return None


_LAUNCH = "slipstream.kernels.elementwise.triton.erase"
_INPUTS = "Tensor g, Tensor k, Tensor? b, str impl"
_forward = custom_op.KernelOp(
    "erase",
    f"({_INPUTS}) -> Tensor",
    kernel=f"{_LAUNCH}:forward",
    plain=plain,
    kind=_kind,
    probe={
        # more than a tile
        "g": lambda g: -kernel_pair.random_like(g, 3, 1003).abs(),
        "k": (3, 1003),
        "b": (3, 1003),
    },
    replay=True,
)
_Erase = _forward.with_gradient(
    f"(Tensor da, {_INPUTS}) -> Tensor[]", f"{_LAUNCH}:backward", results="a", wrt="g k b"
)
_CANDIDATES = _forward.candidates(_unsupported_reason)
