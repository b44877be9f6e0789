"""Attention over the depth: which implementation takes a call, its gradient, and plain torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.common.checks import wide_dtype
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.attnres.inputs import STREAMS, AttnresInputs, ForwardSums, for_backward
from slipstream.runtime import autograd, custom_op, dispatch, guarded_launch, kernel_pair

# The most features that the kernels take.
WIDEST = 8192


def attnres(inputs: AttnresInputs, impl: str | None) -> tuple[Tensor, Tensor]:
    """y [..., D] and p [L, ...], of which y has gradients."""
    residuals = inputs.residuals
    call = residuals[0], residuals, inputs.output_weight
    return _run(inputs, dispatch.choose(_CANDIDATES, call, impl, "attnres", residuals[0]).impls)


def _run(inputs: AttnresInputs, impl: str) -> tuple[Tensor, Tensor]:
    """impl: "eager", "triton", or several to try in order."""
    if impl.startswith(dispatch.PLAIN):
        y, s = eager(inputs)
        return y, s.detach().softmax(0)
    query, residuals, weight, output_weight, *options = inputs
    shape = residuals[0].shape
    output_weight = None if output_weight is None else output_weight.contiguous()
    query, weight = query.contiguous(), weight.contiguous()
    if autograd.needs_autograd(query, weight, output_weight, *residuals):
        y, s, lse = _Attnres.apply(query, weight, output_weight, *options, impl, *residuals)
    else:
        rows = _rows(residuals)
        given = AttnresInputs(query, rows, weight, output_weight, *options)
        y, s, _, lse, *_ = forward(*given, keep=False, impl=impl)
    return y.view(shape), (s - lse).exp().view(len(residuals), *shape[:-1])


def _rows(residuals: Sequence[Tensor]) -> list[Tensor]:
    """[R, D], contiguous."""
    return [x.reshape(-1, x.shape[-1]).contiguous() for x in residuals]


class _Attnres(autograd.Function):
    operator = "slipstream::attnres"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, weight, output_weight, eps, scale, impl, *residuals = args
        given = AttnresInputs(query, _rows(residuals), weight, output_weight, eps, scale)
        y, s, rstd, lse, o, rest = forward(*given, keep=True, impl=impl)
        o = y if output_weight is None else o
        # no views of them, of whose changes torch has another error
        autograd.save(ctx, query, weight, output_weight, o, rest, s, rstd, lse, *residuals)
        ctx.options = eps, scale, impl
        ctx.mark_non_differentiable(s, lse)
        return y, s, lse

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (query, weight, output_weight), sums, residuals = saved[:3], saved[3:8], saved[8:]
        eps, scale, impl = ctx.options
        given = AttnresInputs(query, _rows(residuals), weight, output_weight, eps, scale)
        da, dwo, *grads = backward(*given, dy, *sums, impl=impl)
        grads = [g.view(x.shape) for g, x in zip(grads, residuals)]
        dq, dw = da * weight * scale, da * query * scale
        dwo = None if output_weight is None else dwo.to(output_weight.dtype)
        return dq.to(query.dtype), dw.to(weight.dtype), dwo, None, None, None, *grads


def eager(inputs: AttnresInputs) -> tuple[Tensor, Tensor]:
    """y [..., D] in the residuals' dtype and s [L, ...]."""
    query, residuals, weight, output_weight, eps, scale = inputs
    dtype = residuals[0].dtype
    wide = wide_dtype(residuals[0])
    v = torch.stack([x.to(wide) for x in residuals])
    rstd = (v.square().mean(-1) + eps).rsqrt()
    s = (v @ (query.to(wide) * weight.to(wide) * scale)) * rstd
    o = (s.softmax(0)[..., None] * v).sum(0)
    if output_weight is not None:
        o = o * (o.square().mean(-1, keepdim=True) + eps).rsqrt() * output_weight.to(wide)
    return o.to(dtype), s


def eager_backward(inputs: AttnresInputs, dy: Tensor, sums: ForwardSums) -> list[Tensor]:
    """As the kernels' backward, from the inputs alone."""
    query, residuals, weight, output_weight, eps, scale = inputs

    def plain(a: Tensor, last: Tensor | None, *rows: Tensor) -> Tensor:
        return eager(AttnresInputs(a, list(rows), torch.ones_like(a), last, eps, 1.0))[0]

    a = query.float() * weight.float() * scale
    last = None if output_weight is None else output_weight.float()
    found = guarded_launch.plain_gradients(plain, [a, last, *residuals], [dy])
    return found if output_weight is not None else [found[0], found[0].new_empty(0), *found[1:]]


def _unsupported_reason(
    first: Tensor, residuals: Sequence[Tensor], output_weight: Tensor | None
) -> str | None:
    """Why the Triton kernels can't take a call, or None if they can."""
    if len(residuals) > STREAMS:
        return f"there are more than {STREAMS} residuals"
    if first.shape[-1] == 0:
        return "there are no features"
    if first.shape[-1] > WIDEST:
        return f"there are more than {WIDEST} features"
    if len(residuals) * (first.numel() // first.shape[-1]) >= 2**31:
        return "it counts the rows of all residuals in 32 bits"
    return None


def _kind(residuals: Sequence[Tensor]) -> KernelKey:
    return ("attnres.triton", residuals[0].dtype, residuals[0].shape[-1], len(residuals))


def _mismatch(residuals: Sequence[Tensor], output_weight: Tensor | None) -> str | None:
    """The probe: rows of the same width."""
    first, width = residuals[0], residuals[0].shape[-1]
    made = {f"r{i}": kernel_pair.random_like(first, 37, width) for i in range(len(residuals))}
    made |= {x: kernel_pair.random_like(first, width) for x in ("query", "weight")}
    if output_weight is not None:
        made["last"] = kernel_pair.random_like(first, width)

    def of(run: Any, given: Any, *impl: str) -> Tensor:
        rows = [given[f"r{i}"] for i in range(len(residuals))]
        tensors = given["query"], rows, given["weight"], given.get("last")
        return run(AttnresInputs(*tensors, 1e-6, width**-0.5), *impl)[0]

    return kernel_pair.mismatch(
        lambda given: of(_run, given, dispatch.TRITON_OR_EAGER),
        lambda given: of(eager, given),
        made,
    )


def _plain_forward(inputs: AttnresInputs, keep: bool) -> tuple[Tensor, ...]:
    """As the launch."""
    residuals, output_weight = inputs.residuals, inputs.output_weight
    y, s = eager(inputs)
    o, rest = (x.zero_() for x in for_backward(residuals[0], output_weight, keep))
    if keep and output_weight is not None:
        o = eager(inputs._replace(output_weight=None))[0]
    rstd = torch.stack([(x.float().square().mean(-1) + inputs.eps).rsqrt() for x in residuals])
    return y, s.float(), rstd, s.float().logsumexp(0), o, rest


def _backward_fake(*args: Any) -> list[Tensor]:
    query, residuals, _, output_weight = args[:4]
    da = query.new_empty(query.shape[0], dtype=torch.float32)
    dwo = da.new_empty(0) if output_weight is None else torch.empty_like(da)
    return [da, dwo, *(torch.empty_like(x) for x in residuals)]


_INPUTS = (
    "Tensor query, Tensor[] residuals, Tensor weight, Tensor? output_weight, float eps, float scale"
)
forward = custom_op.KernelOp(
    "attnres",
    f"({_INPUTS}, bool keep, str impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel="slipstream.kernels.attnres.triton_kernels:forward",
    plain=_plain_forward,
    kind=_kind,
    probe=_mismatch,
    packed={"inputs": AttnresInputs},
)

backward = custom_op.KernelOp(
    "attnres_backward",
    f"({_INPUTS}, Tensor dy, {custom_op.schema_of(ForwardSums)}, str impl) -> Tensor[]",
    fake=_backward_fake,
    kernel="slipstream.kernels.attnres.triton_kernels:backward",
    plain=eager_backward,
    kind=_kind,
    probe=_mismatch,
    packed={"inputs": AttnresInputs, "sums": ForwardSums},
)
_CANDIDATES = forward.candidates(_unsupported_reason)
