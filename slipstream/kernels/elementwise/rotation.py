"""Queries and keys rotated by angles of their tokens, and their products, as operators.

    pair i of y = pair i of x by theta_i             dots[r, s] = q_r . k_s

Pair i is channels 2 i and 2 i + 1; those from 2 P on stay. slipstream::_rotate_qk gives both and
the products, which a rotation leaves as they are; in plain torch that takes twenty passes.
"""

import torch
from torch import Tensor

from slipstream.common.checks import autocast_dtype, widen
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, dispatch

# inputs a token that the kernels take, whose products they make one by one, and channels
INPUTS, WIDEST = 8, 1024
Rotated = tuple[Tensor, Tensor, Tensor]


def rotate_qk(q: Tensor, k: Tensor, theta: Tensor, impl: str | None = None) -> Rotated:
    """q and k rotated, in their dtypes, and dots [..., R, R], float32 at least.

    Args:
        q, k: [..., R, K]. theta: angles in radians [..., P], P at most K / 2, float32 at least.
        impl: of the recurrence: plain torch here too if it is named.
    """
    if impl in dispatch.PLAIN or autograd.by_operation():
        return plain(q, k, theta)
    impl = dispatch.choose(_CANDIDATES, (q, k, theta), None, "mamba3", q).impls
    if not dispatch.is_triton(impl):
        return plain(q, k, theta)
    inputs = [x.contiguous() for x in (q, k, theta)]
    return (_Rotate.apply if autograd.needs_autograd(*inputs) else _forward)(*inputs, impl)


def plain(q: Tensor, k: Tensor, theta: Tensor) -> Rotated:
    theta = theta[..., None, :]  # [..., 1, P]
    cos, sin = theta.cos(), theta.sin()
    return _rotated(q, cos, sin), _rotated(k, cos, sin), product(widen(q), widen(k).mT)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, not rounded by autocast either."""
    if autocast_dtype(a) is None:
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    first, second = widen(x[..., :width]).unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([pairs.flatten(-2).to(x.dtype), x[..., width:]], -1)


def _kind(q: Tensor, theta: Tensor) -> KernelKey:
    return ("rotation.triton", q.dtype, *q.shape[-2:], theta.shape[-1])


def _unsupported_reason(q: Tensor, k: Tensor, theta: Tensor) -> str | None:
    if q.numel() == 0 or theta.numel() == 0:
        return "there are no tokens, heads or angles"
    if q.dtype != k.dtype or theta.dtype != torch.float32:
        return "it takes q and k of one dtype, and angles in float32"
    if q.shape[-2] > INPUTS or q.shape[-1] > WIDEST:
        return f"it takes at most {INPUTS} inputs a token, of at most {WIDEST} channels"
    return None


_LAUNCH = "slipstream.kernels.elementwise.triton.rotation"
_forward = custom_op.KernelOp(
    "rotate_qk",
    "(Tensor q, Tensor k, Tensor theta, str impl) -> (Tensor, Tensor, Tensor)",
    kernel=f"{_LAUNCH}:forward",
    plain=plain,
    kind=_kind,
    # more than a tile
    probe={"q": (37, 0, 0), "k": (37, 0, 0), "theta": (37, 0)},
    replay=True,
)
_Rotate = _forward.with_gradient(
    "(Tensor q, Tensor k, Tensor theta, Tensor dq_out, Tensor dk_out, Tensor ddots, str impl) "
    "-> Tensor[]",
    f"{_LAUNCH}:backward",
    results="q_out k_out dots",
    wrt="q k theta",
)
_CANDIDATES = _forward.candidates(_unsupported_reason)
