"""slipstream::_place_tokens writes a token of each row into that row's block, in place:

y[n, counts[n]] = x[n]

of up to six tensors in one launch, at places that only the device knows. No gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import custom_op, dispatch

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
        impls = dispatch.choose(_CANDIDATES, xs[some], impl, "place_tokens", counts).impls
        _call_with(xs[some], ys[some], counts, impls)


def _call_with(xs: list[Tensor], ys: list[Tensor], counts: Tensor, impl: str) -> None:
    missing = [None] * (MAX_TENSORS - len(xs))
    _call(counts, *xs, *missing, *ys, *missing, impl=impl)


def _plain(counts: Tensor, *tensors: Tensor | None) -> None:
    for x, y in zip(tensors[:MAX_TENSORS], tensors[MAX_TENSORS:]):
        if x is not None and y is not None:
            is_place = torch.arange(y.shape[1], device=counts.device) == counts[:, None]
            y.copy_(torch.where(is_place[:, :, None], x[:, None], y))


def _kind(x0: Tensor) -> KernelKey:
    return ("place_tokens.triton", x0.dtype)


def _unsupported_reason(x0: Tensor, *others: Tensor) -> str | None:
    """Why the Triton kernel can't take a call, or None if it can."""
    if any(x.numel() == 0 or x.dtype == torch.float64 for x in (x0, *others)):
        return "there are no rows or channels, or float64"
    return None


_Y = ", ".join(f"Tensor({'abcdef'[i]}!){'?' if i else ''} y{i}" for i in range(MAX_TENSORS))
_call = custom_op.KernelOp(
    "place_tokens",
    "(Tensor counts, Tensor x0, Tensor? x1, Tensor? x2, Tensor? x3, Tensor? x4, Tensor? x5, "
    f"{_Y}, str impl) -> ()",
    fake=lambda *args: None,
    kernel="slipstream.kernels.elementwise.triton.place_tokens:place_tokens",
    plain=_plain,
    kind=_kind,
    # two tensors of three rows, one of which has no place
    probe={
        **dict.fromkeys(f"{name}{i}" for name in "xy" for i in range(2, MAX_TENSORS)),
        "counts": lambda counts: torch.tensor([4, 0, -1], device=counts.device),
        "x0": (3, 70),
        "x1": lambda counts: torch.randn(3, 2, device=counts.device),
        "y0": (3, 5, 70),
        "y1": lambda counts: torch.randn(3, 5, 2, device=counts.device),
    },
    replay=True,
)
_CANDIDATES = _call.candidates(_unsupported_reason)
