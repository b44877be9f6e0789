"""Projections of mixes of each token with the one before, which keep no mix for the backward.

    x_m = x + (before - x) mu_m          m = 0 .. M-1
    y = x_m W^T                          of each mix one or more

M mixes are M times the memory of x, which a chain of operators keeps for the gradients of the
weights; here backward makes them again, in one pass over x and before. slipstream::_token_mix gives
all mixes at once, slipstream::_token_mix_backward the gradients of x, before and mu.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common.checks import autocast_dtype
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair
from slipstream.runtime.autograd import Function, Saved, as_base, by_operation, needs_autograd

Weights = Sequence[Sequence[Tensor]]


def mixed_projections(
    x: Tensor,
    before: Tensor | None,
    mu: Tensor,
    weights: Weights,
    impl: str | None = None,
    starts: Tensor | None = None,
) -> list[Tensor] | None:
    """y of each weight in turn, or None where kernels do not take the call.

    Args:
        x: [B, T, D]. before: the same, of one dtype; None is x a token earlier, 0 before the first.
        mu: [M, D].
        weights: of each mix, matrices [F, D] of x's dtype. impl: as runtime.dispatch.choose.
        starts: uint8 [T] beside no `before`, not 0 where a packed sequence begins.
    """
    matrices = [w for row in weights for w in row]
    if by_operation() or autocast_dtype(x) is not None or any(w.dtype != x.dtype for w in matrices):
        return None
    impl = dispatch.choose(_CANDIDATES, (x, before, mu), impl, "token_mix", x).impls
    if not dispatch.is_triton(impl):
        return None
    counts = tuple(map(len, weights))
    if needs_autograd(x, before, mu, *matrices):
        return [*_MixedProjections.apply(x, before, starts, mu, counts, impl, *matrices)]
    return _project(_forward(x, before, starts, mu, impl=impl), counts, matrices)


def _project(mixes: Tensor, counts: Sequence[int], matrices: Sequence[Tensor]) -> list[Tensor]:
    return [as_base(F.linear(mixes[m], w)) for m, w in zip(_mix_of(counts), matrices)]


def _mix_of(counts: Sequence[int]) -> list[int]:
    """The number of each matrix's mix."""
    return [m for m, count in enumerate(counts) for _ in range(count)]


def plain(x: Tensor, before: Tensor | None, starts: Tensor | None, mu: Tensor) -> Tensor:
    """[M, B, T, D]"""
    before = F.pad(x, (0, 0, 1, -1)) if before is None else before
    if starts is not None:
        before = before.masked_fill(starts.bool()[:, None], 0)
    delta = before - x
    return torch.stack([torch.addcmul(x, delta, row) for row in mu])


class _MixedProjections(Function):
    operator = "slipstream::token_mix"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        x, before, starts, mu, counts, impl, *matrices = args
        autograd.save(ctx, x, before, starts, mu, *matrices)
        ctx.counts, ctx.impl = counts, impl
        return tuple(_project(_forward(x, before, starts, mu, impl=impl), counts, matrices))

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: Saved, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, before, starts, mu, *matrices = saved
        mixes = _forward(x, before, starts, mu, impl=ctx.impl)
        dmixes, dmatrices, begun = torch.empty_like(mixes), [], set()
        for m, w, dy, needed in zip(
            _mix_of(ctx.counts), matrices, dys, ctx.needs_input_grad[6:], strict=True
        ):
            if dy is None:  # nothing came of that projection
                dmatrices.append(None)
                continue
            rows, dmix = dy.reshape(-1, w.shape[0]), dmixes[m].view(-1, w.shape[1])
            if m in begun:
                dmix.addmm_(rows, w)
            else:
                torch.mm(rows, w, out=dmix)
            begun.add(m)
            dw = rows.t() @ mixes[m].view(-1, w.shape[1]) if needed else None
            dmatrices.append(dw)
        for m in set(range(len(mixes))) - begun:
            dmixes[m].zero_()
        dx, *dbefore, dmu = _backward(dmixes, x, before, starts, mu, impl=ctx.impl)
        return dx, *(dbefore or [None]), None, dmu, None, None, *dmatrices


def _kind(x: Tensor, mu: Tensor) -> KernelKey:
    return ("token_mix.triton", x.dtype, mu.dtype, mu.shape[0])


def _unsupported_reason(x: Tensor, before: Tensor | None, mu: Tensor) -> str | None:
    if x.numel() == 0:
        return "there are no tokens"
    if (before is not None and before.dtype != x.dtype) or mu.dtype == torch.float64:
        return "it takes tokens of one dtype, and computes in float32"
    return None


def _probe_rows(x: Tensor) -> Tensor:
    return kernel_pair.random_like(x, 1, 37, x.shape[-1])


_LAUNCH = "slipstream.kernels.time_mix.triton.token_mix"
_forward = custom_op.KernelOp(
    "token_mix",
    "(Tensor x, Tensor? before, Tensor? starts, Tensor mu, str impl) -> Tensor",
    fake=lambda x, before, starts, mu, impl: x.new_empty(mu.shape[0], *x.shape),
    kernel=f"{_LAUNCH}:forward",
    plain=plain,
    kind=_kind,
    # with a `before` and without, whole and packed
    probe=(
        {"x": _probe_rows, "before": _probe_rows, "starts": None},
        {"x": _probe_rows, "before": None, "starts": None},
        {
            "x": _probe_rows,
            "before": None,
            "starts": lambda x: torch.arange(37, device=x.device).eq(5).byte(),
        },
    ),
    replay=True,
)
_forward.with_gradient(
    "(Tensor dy, Tensor x, Tensor? before, Tensor? starts, Tensor mu, str impl) -> Tensor[]",
    f"{_LAUNCH}:backward",
    results="y",
    wrt="x before mu",
)
_backward = _forward.backward
_CANDIDATES = _forward.candidates(_unsupported_reason)
