"""Queries and keys rotated by angles of their tokens, and their products, as operators.

    pair i of y = pair i of x by theta_i             dots[r, s] = q_r . k_s

Pair i is channels 2 i and 2 i + 1; those from 2 P on stay. slipstream::_rotate_qk gives both and
the products, which a rotation leaves as they are; in plain torch that takes twenty passes.
"""

import torch
from torch import Tensor

from slipstream.common.checks import autocast_dtype
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import by_operation, needs_autograd
from slipstream.runtime.custom_op import KernelOp, autograd_function
from slipstream.runtime.dispatch import PLAIN, TRITON_OR_EAGER, choose, is_triton, triton_or_eager
from slipstream.runtime.guarded_launch import Guard, known_failure, plain_gradients

# inputs a token that the kernels take, whose products they make one by one, and channels
INPUTS, WIDEST = 8, 1024
Rotated = tuple[Tensor, Tensor, Tensor]


def rotate_qk(q: Tensor, k: Tensor, theta: Tensor, impl: str | None = None) -> Rotated:
    """q and k rotated, in their dtypes, and dots [..., R, R], float32 at least.

    Args:
        q, k: [..., R, K]. theta: angles in radians [..., P], P at most K / 2, float32 at least.
        impl: of the recurrence: plain torch here too if it is named.
    """
    if impl in PLAIN or by_operation():
        return plain(q, k, theta)
    impl = choose(_CANDIDATES, (q, k, theta), None, "mamba3", q).impls
    if not is_triton(impl):
        return plain(q, k, theta)
    inputs = [x.contiguous() for x in (q, k, theta)]
    return (_Rotate.apply if needs_autograd(*inputs) else _forward)(*inputs, impl)


def plain(q: Tensor, k: Tensor, theta: Tensor) -> Rotated:
    theta = theta[..., None, :]  # [..., 1, P]
    cos, sin = theta.cos(), theta.sin()
    return _rotated(q, cos, sin), _rotated(k, cos, sin), product(_wide(q), _wide(k).mT)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, not rounded by autocast either."""
    if autocast_dtype(a) is None:
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    first, second = _wide(x[..., :width]).unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([pairs.flatten(-2).to(x.dtype), x[..., width:]], -1)


def _unsupported_reason(q: Tensor, k: Tensor, theta: Tensor) -> str | None:
    if q.numel() == 0 or theta.numel() == 0:
        return "there are no tokens, heads or angles"
    if q.dtype != k.dtype or theta.dtype != torch.float32:
        return "it takes q and k of one dtype, and angles in float32"
    if q.shape[-2] > INPUTS or q.shape[-1] > WIDEST:
        return f"it takes at most {INPUTS} inputs a token, of at most {WIDEST} channels"
    return known_failure(lambda: _kind(q, theta), q.device)


_CANDIDATES = triton_or_eager(_unsupported_reason)


def _kind(q: Tensor, theta: Tensor) -> KernelKey:
    return ("rotation.triton", q.dtype, *q.shape[-2:], theta.shape[-1])


def _mismatch(q: Tensor, theta: Tensor) -> str | None:
    """The probe: more than a tile."""
    R, K = q.shape[-2:]
    q, k = (numeric_probe.random_like(q, 37, R, K) for _ in "qk")
    return numeric_probe.mismatch(
        lambda t: _Rotate.apply(*t.values(), TRITON_OR_EAGER),
        lambda t: plain(*t.values()),
        {"q": q, "k": k, "theta": numeric_probe.random_like(theta, 37, theta.shape[-1])},
    )


def _run_forward(q: Tensor, k: Tensor, theta: Tensor, impl: str) -> Rotated:
    with _guard(impl, q, theta) as usable:
        if usable:
            from slipstream.kernels.rotation.triton import rotation as kernels

            return kernels.forward(q, k, theta)
    q, k, dots = plain(q, k, theta)
    return q.contiguous(), k.contiguous(), dots.contiguous()


def _run_backward(
    q: Tensor,
    k: Tensor,
    theta: Tensor,
    dq_out: Tensor,
    dk_out: Tensor,
    ddots: Tensor,
    impl: str,
) -> list[Tensor]:
    """dq, dk and dtheta."""
    douts = [x.contiguous() for x in (dq_out, dk_out, ddots)]
    with _guard(impl, q, theta) as usable:
        if usable:
            from slipstream.kernels.rotation.triton import rotation as kernels

            return kernels.backward(q, k, theta, *douts)
    return plain_gradients(plain, (q, k, theta), douts)


def _guard(impl: str, q: Tensor, theta: Tensor) -> Guard:
    return Guard(impl, q.device, lambda: _kind(q, theta), lambda: _mismatch(q, theta))


def _fake(q: Tensor, k: Tensor, theta: Tensor, impl: str) -> Rotated:
    wide = torch.promote_types(q.dtype, torch.float32)
    dots = q.new_empty(*q.shape[:-1], q.shape[-2], dtype=wide)
    return q.new_empty(q.shape), k.new_empty(k.shape), dots


_forward = KernelOp(
    "rotate_qk",
    "(Tensor q, Tensor k, Tensor theta, str impl) -> (Tensor, Tensor, Tensor)",
    _run_forward,
    _fake,
    replay=True,
)
_backward = KernelOp(
    "rotate_qk_backward",
    "(Tensor q, Tensor k, Tensor theta, Tensor dq_out, Tensor dk_out, Tensor ddots, str impl) "
    "-> Tensor[]",
    _run_backward,
    lambda q, k, theta, *_: [x.new_empty(x.shape) for x in (q, k, theta)],
    replay=True,
)
_Rotate = autograd_function(_forward, _backward, results="q_out k_out dots", wrt="q k theta")
