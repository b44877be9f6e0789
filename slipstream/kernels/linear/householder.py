"""Tokens among their n Householder steps, of which the first decays and the last reads, and back.

y[t n + i] = x[t] if i = at else 0            x[t] = y[t n + at]
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.core import guard, probe


def at_step(x: Tensor, n: int, *, last: bool) -> Tensor:
    """x of each token at the first or the last of its n steps, zeros at the others."""
    zeros = x.new_zeros(x.shape[0], x.shape[1], n - 1, *x.shape[2:])
    x = x.unsqueeze(2)
    return torch.cat([zeros, x] if last else [x, zeros], dim=2).flatten(1, 2)


def spread(q: Tensor, g: Tensor | None, n: int, impl: str) -> tuple[Tensor, Tensor | None]:
    """q [B, T, H, K] at the last steps, g [B, T, HV] at the first."""
    return _attempt(_kernel_spread, plain_spread, (q, g, n), impl)


def take(y: Tensor, n: int, at: int, out: Tensor, impl: str) -> None:
    """out, contiguous, is written: y at that step of each token."""
    _attempt(_kernel_take, plain_take, (y, n, at, out), impl)


def _kernel_spread(q: Tensor, g: Tensor | None, n: int) -> tuple[Tensor, Tensor | None]:
    from slipstream.kernels.linear.triton import steps

    return steps.spread(q, g, n)


def plain_spread(q: Tensor, g: Tensor | None, n: int) -> tuple[Tensor, Tensor | None]:
    return at_step(q, n, last=True), None if g is None else at_step(g, n, last=False)


def _kernel_take(y: Tensor, n: int, at: int, out: Tensor) -> None:
    from slipstream.kernels.linear.triton import steps

    steps.take(y, n, at, out)


def plain_take(y: Tensor, n: int, at: int, out: Tensor) -> None:
    torch.ops.aten.slice_copy.Tensor_out(y, 1, at, y.shape[1], n, out=out)


def _attempt(run: Callable, plain: Callable, args: tuple, impl: str) -> tuple:
    x = args[0]
    if impl.startswith("eager"):
        return plain(*args)
    kind = ("linear.steps", x.dtype, x.shape[3:])
    return guard.attempt(lambda: kind, x.device, run, plain, args, lambda: _mismatch(x))


def _mismatch(like: Tensor) -> str | None:
    """The probe: there and back on a few tokens as wide."""
    n, q = 3, torch.randn(2, 11, 2, *like.shape[3:], device=like.device).to(like.dtype)
    g = torch.randn(2, 11, 4, device=like.device)
    ways, found = ((_kernel_spread, _kernel_take), (plain_spread, plain_take)), []
    for there, back in ways:
        rows, gates = there(q, g, n) if q.dim() == 4 else (at_step(q, n, last=True), g)
        out = torch.empty_like(q)
        back(rows, n, n - 1, out)
        found.append((rows, gates, out))
    for name, x, y in zip(("q at its steps", "g at its steps", "what is taken back"), *found):
        if (error := probe.relative(x, y)) != 0.0:
            return f"{name} is off by {error:.1e} of its size, where nothing is rounded"
    return None
