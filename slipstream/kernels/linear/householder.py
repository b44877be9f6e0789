"""Tokens among their n Householder steps, of which the first decays and the last reads, and back.

y[t n + i] = x[t] if i = at else 0            x[t] = y[t n + at]
"""

import torch
from torch import Tensor

from slipstream.runtime import dispatch, guarded_launch, numeric_probe


def at_step(x: Tensor, n: int, *, last: bool) -> Tensor:
    """x of each token at the first or the last of its n steps, zeros at the others."""
    zeros = x.new_zeros(x.shape[0], x.shape[1], n - 1, *x.shape[2:])
    x = x.unsqueeze(2)
    return torch.cat([zeros, x] if last else [x, zeros], dim=2).flatten(1, 2)


def interleave(
    q: Tensor, g: Tensor | None, do: Tensor | None, n: int, impl: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q [B, T, H, K] and do [B, T, HV, V] at the last steps, g [B, T, HV] at the first."""
    with _guard(impl, q) as usable:
        if usable:
            return _launch_interleave(q, g, do, n)
    return eager_interleave(q, g, do, n)


def deinterleave(
    q: Tensor, g: Tensor | None, n: int, to: Tensor, g_to: Tensor | None, impl: str
) -> None:
    """`to` and g_to, contiguous, are written: q at the last step of each token, g at the first."""
    with _guard(impl, q) as usable:
        if usable:
            _launch_deinterleave(q, g, n, to, g_to)
            return
    eager_deinterleave(q, g, n, to, g_to)


def _launch_interleave(
    q: Tensor, g: Tensor | None, do: Tensor | None, n: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    from slipstream.kernels.linear.triton import householder

    return householder.interleave(q, g, do, n)


def eager_interleave(
    q: Tensor, g: Tensor | None, do: Tensor | None, n: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    gates = None if g is None else at_step(g, n, last=False)
    return at_step(q, n, last=True), gates, None if do is None else at_step(do, n, last=True)


def _launch_deinterleave(
    q: Tensor, g: Tensor | None, n: int, to: Tensor, g_to: Tensor | None
) -> None:
    from slipstream.kernels.linear.triton import householder

    householder.deinterleave(q, g, n, to, g_to)


def eager_deinterleave(
    q: Tensor, g: Tensor | None, n: int, to: Tensor, g_to: Tensor | None
) -> None:
    for x, at, dest in ((q, n - 1, to), (g, 0, g_to)):
        if x is not None and dest is not None:
            dest.copy_(x[:, at::n])


def _guard(impl: str, x: Tensor) -> guarded_launch.Guard:
    """The guard of the kernels here: plain torch takes over, whatever runs the recurrence."""
    return guarded_launch.Guard(
        "eager" if impl.startswith("eager") else dispatch.TRITON_OR_EAGER,
        x.device,
        lambda: ("linear.steps", x.dtype, x.shape[3:]),
        lambda: _mismatch(x),
    )


def _mismatch(like: Tensor) -> str | None:
    """The probe: there and back on a few tokens as wide."""
    n = 3
    q, do = (numeric_probe.random_like(like, 2, 11, H, *like.shape[3:]) for H in (2, 4))
    g, gs = (torch.randn(2, T, 4, device=like.device) for T in (11, 11 * n))
    results = []
    for dest, back in (
        (_launch_interleave, _launch_deinterleave),
        (eager_interleave, eager_deinterleave),
    ):
        rows = dest(q, g, do, n)
        taken, gates = torch.empty_like(q), torch.empty_like(g)
        back(rows[0], gs, n, taken, gates)
        results.append((*rows, taken, gates))
    names = (*(f"{x} at its steps" for x in ("q", "g", "do")), "q taken back", "g taken back")
    for name, x, y in zip(names, *results):
        if (error := numeric_probe.relative_error(x, y)) != 0.0:
            return f"{name} is off by {error:.1e} of its size, where nothing is rounded"
    return None
