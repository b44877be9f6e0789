"""Hyper-connections before a layer (pre) and after it (post): operators, and plain torch. MATH.md
has the formulas, and the gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common.checks import autocast_dtype
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, compile_ahead, custom_op, dispatch

# the most streams that the kernels take
STREAMS = 8


def pre(tensors: tuple[Any, ...], numbers: tuple[Any, ...], impl: str | None) -> list[Any]:
    """y [..., D], post [..., N] and comb [..., N, N], None those that M has no weights of. tensors,
    numbers: as those of eager_pre, streams [..., N, D], weight [M, N D], base [M], scale."""
    x, parts = tensors[0], len(tensors[3])
    impl = dispatch.choose(_PRE, tensors, impl, "mhc_pre", x).impls
    if impl.startswith(dispatch.PLAIN):
        if autocast_dtype(x) is None:
            return [*eager_pre(*tensors, *numbers)[:3]]
        with torch.autocast(x.device.type, enabled=False):
            return pre(tensors, numbers, impl)
    *batch, N, D = x.shape
    given = [t.contiguous() for t in (x.reshape(-1, N, D), *tensors[1:])]
    if autograd.needs_autograd(*given):
        found = _Pre.apply(*given, *numbers, impl)
    else:
        found = _pre(*given, *numbers, keep=False, impl=impl)
    sizes = (D,), (N,), (N, N)
    return [
        y.view(*batch, *size) if n < parts else None
        for n, (y, size) in enumerate(zip(found, sizes))
    ]


def eager_pre(
    x: Tensor, weight: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float,
    iterations: int, magnitude: float, post_eps: float, keep: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """y, post, comb, p, r, and what comb is divided by in each iteration if that is to be kept."""
    N, wide = x.shape[-2], torch.float64 if x.dtype == torch.float64 else torch.float32
    flat = x.flatten(-2).to(wide)
    rstd = (flat.square().sum(-1) / max(flat.shape[-1], 1) + norm_eps).rsqrt()
    p = F.linear(flat, weight.to(wide)) * rstd[..., None]
    sizes = [N, N, N * N][: len(scale)]
    terms = zip(p.split(sizes, -1), scale.to(wide).unbind(), base.to(wide).split(sizes))
    first, *others = (a * s + b for a, s, b in terms)
    y = ((torch.sigmoid(first) + eps)[..., None] * x).sum(-2).to(x.dtype)
    post = magnitude * torch.sigmoid(others[0]) + post_eps if others else None
    if len(others) < 2:
        return y, post, None, p, rstd, None
    comb, sums = others[1].unflatten(-1, (N, N)).softmax(-1) + eps, []
    for i in range(2 * iterations - 1):
        sums.append(comb.sum(-1 if i % 2 else -2, keepdim=True) + eps)
        comb = comb / sums[-1]
    sums = [s.flatten(-2) for s in (sums if keep else sums[:1])]
    return y, post, comb, p, rstd, torch.stack(sums)


def post(tensors: tuple[Any, ...], impl: str | None) -> Tensor:
    """streams' [..., N, D] of streams, y [..., D], post [..., N] and comb [..., N, N] or None."""
    x = tensors[0]
    impl = dispatch.choose(_POST, tensors, impl, "mhc_post", x).impls
    if impl.startswith(dispatch.PLAIN):
        return eager_post(*tensors)
    sizes = x.shape[-2:], x.shape[-1:], x.shape[-2:-1], 2 * x.shape[-2:-1]
    given = [t if t is None else t.reshape(-1, *n).contiguous() for t, n in zip(tensors, sizes)]
    return (_Post.apply if autograd.needs_autograd(*given) else _post)(*given, impl).view(x.shape)


def eager_post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mixed = x.to(wide)
    if comb is not None:  # no matmul, which autocast would round
        mixed = (comb.to(wide)[..., None] * mixed[..., :, None, :]).sum(-3)
    return (post.to(wide)[..., None] * y.to(wide)[..., None, :] + mixed).to(x.dtype)


def unsupported_reason(streams: Tensor, *others: Tensor | None) -> str | None:
    """Why the kernels can't take a call, or None if they can."""
    N, D = streams.shape[-2:]
    if not 0 < N <= STREAMS or D == 0:
        return f"there are no streams or features, or more than {STREAMS} streams"
    if any(x is not None and x.dtype == torch.float64 for x in others):
        return "it computes in float32, and an argument is float64"
    if streams.numel() // (N * D) >= 2**31:
        return "it counts tokens in 32 bits"
    return None


def _pre_kind(streams: Tensor, weight: Tensor) -> KernelKey:
    dtypes = streams.dtype, weight.dtype
    return ("hyper_connection.pre", *dtypes, weight.shape[0], *streams.shape[-2:])


def _post_kind(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor | None) -> KernelKey:
    dtypes = streams.dtype, y.dtype, post.dtype, None if comb is None else comb.dtype
    return ("hyper_connection.post", *dtypes, *streams.shape[-2:])


_LAUNCH = "slipstream.kernels.hyper_connection.triton_kernels"
_WEIGHTS = "Tensor streams, Tensor weight, Tensor base, Tensor scale"
_NUMBERS = "float eps, float norm_eps, int iterations, float magnitude, float post_eps"
_pre = custom_op.KernelOp(
    "mhc_pre",
    f"({_WEIGHTS}, {_NUMBERS}, bool keep, str impl) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=f"{_LAUNCH}:pre",
    plain=eager_pre,
    kind=_pre_kind,
    # a few tokens, whose logits no sigmoid cuts off
    probe={
        "streams": (9, ...),
        "weight": lambda weight: torch.randn_like(weight) / weight.shape[1] ** 0.5,
        "keep": True,
    },
    replay=True,
    # few tokens, and more than 16 a multiprocessor (triton_kernels.py: _tile)
    at_sizes=lambda args: [(compile_ahead.resized(args[0], n), *args[1:]) for n in (1, 8192)],
)
_Pre = _pre.with_gradient(
    f"({_WEIGHTS}, Tensor comb, Tensor p, Tensor rstd, Tensor sums, Tensor dy, Tensor? dpost, "
    f"Tensor? dcomb, {_NUMBERS}, str impl) -> Tensor[]",
    f"{_LAUNCH}:pre_backward",
    results="y post comb p rstd sums",
    wrt="streams weight base scale",
    keep=True,
)
_INTO = "Tensor streams, Tensor y, Tensor post, Tensor? comb, str impl"
_post = custom_op.KernelOp(
    "mhc_post",
    f"({_INTO}) -> Tensor",
    kernel=f"{_LAUNCH}:post",
    plain=eager_post,
    kind=_post_kind,
    probe=dict.fromkeys(("streams", "y", "post", "comb"), (9, ...)),
    replay=True,
)
_Post = _post.with_gradient(
    f"(Tensor dout, {_INTO}) -> Tensor[]",
    f"{_LAUNCH}:post_backward",
    results="out",
    wrt="streams y post comb",
)
_PRE = _pre.candidates(lambda streams, weight, base, scale: unsupported_reason(streams, weight))
_POST = _post.candidates(lambda streams, y, post, comb: unsupported_reason(streams, y, post, comb))
