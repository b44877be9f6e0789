"""Projections of mixes of each token with the one before, which keep no mix for the backward.

    x_m = x + (before - x) mu_m          m = 0 .. M-1
    y = x_m W^T                          of each mix one or more

M mixes are M times the memory of x, which a chain of operators keeps for the gradients of the
weights; here backward makes them again, in one pass over x and before. slipstream::_token_mix gives
all mixes at once, slipstream::_token_mix_backward the gradients of x, before and mu.

Mixes of one token each of N sequences with the one before, which is a row of a pool:
slipstream::_token_mix_step.

    y_m = x + (before - x) mu_m          m = 0 .. M-1
    before <- x

It has no gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks, pool_rows
from slipstream.common.checks import autocast_dtype, widen
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, dispatch, guarded_launch, kernel_pair, token_ids
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
        dx, *dbefore, dmu = _forward.backward(dmixes, x, before, starts, mu, impl=ctx.impl)
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
_CANDIDATES = _forward.candidates(_unsupported_reason)


def run(x: Tensor, mu: Tensor, state: Tensor, indices: Tensor | None, impl: str | None) -> Tensor:
    """y [M, N, D]; the pool is updated."""
    checks.expect_rank("x", x, 2, "[N, D]")
    checks.expect_rank("mu", mu, 2, "[M, D]")
    N, D = x.shape
    checks.expect_shape("mu", mu, (mu.shape[0], D))
    checks.expect_rank("state", state, 2, "[slots, D]")
    checks.expect_shape("state", state, (N if indices is None else state.shape[0], D))
    checks.expect_index("state_indices", indices, (N,))
    tensors = {"x": x, "mu": mu, "state": state}
    checks.expect_one_device({**tensors, "state_indices": indices})
    checks.expect_floating(tensors)
    autograd.refuse_gradients("token_mix_step", *tensors.values())
    impls = dispatch.choose(_STEP_CANDIDATES, (x, mu, state), impl, "token_mix_step", x).impls
    # in a graph that is captured it would be one more launch
    if not guarded_launch.is_capturing(x.device):
        token_ids.expect_below("state_indices", indices, state.shape[0], "slots")
    return _step(x, mu, state, indices, impl=impls)


def plain_step(x: Tensor, mu: Tensor, state: Tensor, indices: Tensor | None) -> Tensor:
    if indices is not None:
        token_ids.expect_unique("state_indices", indices, "slot")
    rows, token = pool_rows.PoolRows(indices, state.shape[0]), widen(x)
    before = rows.read(state).to(token.dtype)
    y = token + (before - token) * mu.to(token.dtype)[:, None]
    rows.write(state, x)
    return rows.or_zero(y.transpose(0, 1)).transpose(0, 1).to(x.dtype).contiguous()


def _step_kind(x: Tensor, mu: Tensor, state: Tensor) -> KernelKey:
    return ("token_mix_step.triton", x.dtype, mu.dtype, state.dtype, mu.shape[0])


def _step_unsupported(x: Tensor, mu: Tensor, state: Tensor) -> str | None:
    if x.numel() == 0 or mu.numel() == 0:
        return "there are no tokens"
    if torch.float64 in (mu.dtype, state.dtype):
        return "it computes in float32, and a tensor is float64"
    if x.stride(1) != 1 or state.stride(1) != 1:
        return "rows of x or state are not contiguous"
    return None


_step = custom_op.KernelOp(
    "token_mix_step",
    "(Tensor x, Tensor mu, Tensor(a!) state, Tensor? state_indices, str impl) -> Tensor",
    fake=lambda x, mu, *_: x.new_empty(mu.shape[0], *x.shape),
    kernel="slipstream.kernels.time_mix.triton.token_mix:token_mix_step",
    plain=plain_step,
    kind=_step_kind,
    # three sequences of a pool of four, of as many channels
    probe={
        "x": (3, 0),
        "state": (4, 0),
        "state_indices": lambda x: torch.tensor([2, -1, 0], device=x.device),
    },
    replay=True,
)
_STEP_CANDIDATES = _step.candidates(_step_unsupported)
