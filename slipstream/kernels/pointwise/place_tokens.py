"""slipstream::_place_tokens writes a token of each row into that row's block, in place:

y[n, counts[n]] = x[n]

of up to six tensors in one launch, at places that only the device knows. No gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import numeric_probe
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.dispatch import TRITON_OR_EAGER, choose, triton_or_eager
from slipstream.runtime.guarded_launch import Guard, known_failure

# of one launch, two arguments of the kernel each
MAX_TENSORS = 6


def place_tokens(
    tokens: Sequence[Tensor], blocks: Sequence[Tensor], counts: Tensor, impl: str | None = None
) -> None:
    """tokens: each [N, 1, ...]; blocks: each [N, T, ...], contiguous; counts: int64 [N], below T.

    Of a negative count, or one that is not below T, nothing is written.
    """
    N = counts.shape[0]
    xs = [x.reshape(N, -1).to(y.dtype) for x, y in zip(tokens, blocks, strict=True)]
    ys = [y.view(N, y.shape[1], -1) for y in blocks]
    for at in range(0, len(xs), MAX_TENSORS):
        some = slice(at, at + MAX_TENSORS)
        impls = choose(_CANDIDATES, xs[some], impl, "place_tokens", counts).impls
        _call_with(xs[some], ys[some], counts, impls)


def _call_with(xs: list[Tensor], ys: list[Tensor], counts: Tensor, impl: str) -> None:
    missing = [None] * (MAX_TENSORS - len(xs))
    _call(counts, *xs, *missing, *ys, *missing, impl=impl)


def _unsupported_reason(*tensors: Tensor) -> str | None:
    """Why the Triton kernel can't take a call, or None if it can."""
    if any(x.numel() == 0 or x.dtype == torch.float64 for x in tensors):
        return "there are no rows or channels, or float64"
    return known_failure(lambda: _kind(tensors[0]), tensors[0].device)


_CANDIDATES = triton_or_eager(_unsupported_reason)


def _kind(x: Tensor) -> KernelKey:
    return ("place_tokens.triton", x.dtype)


def _impl(counts: Tensor, *args: Any) -> None:
    *tensors, impl = args
    xs, ys = tensors[:MAX_TENSORS], tensors[MAX_TENSORS:]
    with Guard(impl, counts.device, lambda: _kind(xs[0]), lambda: _mismatch(xs[0])) as usable:
        if usable:
            from slipstream.kernels.pointwise.triton.place_tokens import place_tokens

            return place_tokens(xs, ys, counts)
    return _eager(xs, ys, counts)


def _eager(xs: Sequence[Tensor | None], ys: Sequence[Tensor | None], counts: Tensor) -> None:
    for x, y in zip(xs, ys):
        if x is not None and y is not None:
            is_place = torch.arange(y.shape[1], device=counts.device) == counts[:, None]
            y.copy_(torch.where(is_place[:, :, None], x[:, None], y))


def _mismatch(x: Tensor) -> str | None:
    """The probe: two tensors of three rows, one of which has no place."""
    probe_inputs: dict[str, Tensor] = {
        "x": numeric_probe.random_like(x, 3, 70),
        "gate": torch.randn(3, 2, device=x.device),
        "y": numeric_probe.random_like(x, 3, 5, 70),
        "gates": torch.randn(3, 5, 2, device=x.device),
    }
    counts = torch.tensor([4, 0, -1], device=x.device)

    def placed(impl: str, t: numeric_probe.Given) -> tuple[Tensor, Tensor]:
        _call_with([t["x"], t["gate"]], [t["y"], t["gates"]], counts, impl)
        return t["y"], t["gates"]

    return numeric_probe.mismatch(
        lambda t: placed(TRITON_OR_EAGER, t),
        lambda t: placed("eager", t),
        probe_inputs,
        gradients=False,
    )


_call = KernelOp(
    "place_tokens",
    "(Tensor counts, Tensor x0, Tensor? x1, Tensor? x2, Tensor? x3, Tensor? x4, Tensor? x5, "
    "Tensor(a!) y0, Tensor(b!)? y1, Tensor(c!)? y2, Tensor(d!)? y3, Tensor(e!)? y4, "
    "Tensor(f!)? y5, str impl) -> ()",
    _impl,
    lambda *args: None,
    replay=True,
)
