"""The operators before and after RWKV-7's recurrence: its terms, and its output's norm and gate.

    w' = slowest sigmoid(w + w_bias)        a = sigmoid(a + a_bias)
    kk = l2_norm_per_head(k k_k)            k' = k (1 + (a - 1) k_a)
    a' = -kk        b' = kk a               v' = v + (first_value - v) sigmoid(v_gate + v_bias)

    y = (group_norm_per_head(o) + sum(r k r_k) v) gate

slipstream::_rwkv7_terms gives w' to v', of which w' is float32, slipstream::_rwkv7_output y;
_rwkv7_terms_backward and _rwkv7_output_backward the gradients of the tensors that there are.
Backward reads what forward read, and nothing in between.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.common.checks import widen
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.time_mix.inputs import (
    EPS,
    SLOWEST_LOG_DECAY,
    OutputInputs,
    TermsGrads,
    TermsInputs,
)
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair
from slipstream.runtime.autograd import Function, Saved, as_base, by_operation, needs_autograd
from slipstream.runtime.guarded_launch import plain_gradients


def recurrence_terms(inputs: TermsInputs, heads: int, impl: str | None = None) -> list[Tensor]:
    """w', k', a', b' and, if v is given, v', each [B, T, H, K]; then k' and v' for `output`.
    impl: as runtime.dispatch.choose."""
    by_kernels = False
    if not by_operation():
        impl = dispatch.choose(_TERMS, (inputs,), impl, "rwkv7", inputs.w).impls
        by_kernels = dispatch.is_triton(impl)
    if by_kernels and needs_autograd(*inputs):
        return [*_Terms.apply(*inputs, heads, impl)]
    found = _terms(*inputs, heads=heads, impl=impl) if by_kernels else plain_terms(inputs, heads)
    return [*found, found[1], *found[4:]]


def output(inputs: OutputInputs, eps: float, impl: str | None = None) -> Tensor:
    """y [B, T, D]. eps: of the norm. impl: as runtime.dispatch.choose."""
    if by_operation():
        return plain_output(inputs, eps)
    impl = dispatch.choose(_OUTPUT, (inputs,), impl, "rwkv7", inputs.o).impls
    if not dispatch.is_triton(impl):
        return plain_output(inputs, eps)
    return (_Output.apply if needs_autograd(*inputs) else _output)(*inputs, eps, impl)


def plain_terms(inputs: TermsInputs, heads: int) -> list[Tensor]:
    w, k, a, v, v_gate, first_value, k_k, k_a, w_bias, a_bias, v_bias = inputs
    dtype, shape = k.dtype, (heads, -1)
    k, k_k, k_a = (widen(x) for x in (k, k_k, k_a))
    w, a = _biased(w, w_bias), torch.sigmoid(_biased(a, a_bias))
    unit = (k * k_k).unflatten(-1, shape)
    unit = unit * (unit.square().sum(-1, keepdim=True) + EPS).rsqrt()
    k = k * torch.addcmul(1 - k_a, a, k_a)
    found = [k.unflatten(-1, shape), -unit, unit * a.unflatten(-1, shape)]
    if v is not None and v_gate is not None and first_value is not None:
        v = torch.lerp(widen(v), widen(first_value), torch.sigmoid(_biased(v_gate, v_bias)))
        found.append(v.unflatten(-1, shape))
    w = SLOWEST_LOG_DECAY * torch.sigmoid(w)
    return [w.unflatten(-1, shape), *(x.to(dtype) for x in found)]


def plain_output(inputs: OutputInputs, eps: float) -> Tensor:
    dtype, heads = inputs.o.dtype, inputs.r_k.shape
    o, r, k, v, gate, weight, bias, r_k = map(widen, inputs)
    o = torch.nn.functional.layer_norm(o, o.shape[-1:], eps=eps)
    o = torch.addcmul(bias.view(heads), o, weight.view(heads))
    bonus = (r * k * r_k).sum(-1, keepdim=True) * v
    return ((o + bonus).flatten(-2) * gate).to(dtype)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return widen(x) if bias is None else widen(x) + widen(bias)


class _Terms(Function):
    """Returns k', and v' if there is one, once more at the end, for _Output to read: so both of
    their gradients come in here, and are added up on the way."""

    operator = "slipstream::rwkv7_terms"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *inputs, heads, impl = args
        autograd.save(ctx, *inputs)
        ctx.options = heads, impl
        ctx.set_materialize_grads(False)
        w, k, a, b, *v = _terms(*args)
        return w, k, a, b, *v, as_base(k.detach()), *(as_base(x.detach()) for x in v)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: Saved, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        (_, k, _, v, *_), heads = saved, ctx.options[0]
        dw, dk, da, db, *dv, dk_read = douts if v is None else douts[:-1]
        dv_read = None if v is None else douts[-1]
        if all(x is None for x in douts):
            return (None,) * (len(saved) + 2)
        given: list[Any] = [dw, dk, da, db, *dv]
        if any(x is None for x in given):
            zeros = k.new_zeros((*k.shape[:2], heads, k.shape[2] // heads))
            given = [zeros if x is None else x for x in given]
            given[0] = zeros.float() if dw is None else dw
        grads = [*given, *([None] if v is None else []), dk_read, dv_read]
        found = iter(_terms_backward(*grads, *saved, *ctx.options))
        return *(None if x is None else next(found) for x in saved), None, None


def _unsupported_reason(inputs: TermsInputs | OutputInputs) -> str | None:
    given = [x for x in inputs if x is not None]
    tokens = [x for x in given if x.dim() > 2]
    if tokens[0].numel() == 0:
        return "there are no tokens"
    if any(x.dtype != tokens[0].dtype for x in tokens):
        return "it takes tokens of one dtype"
    if any(x.dtype == torch.float64 for x in given if x.dim() <= 2):
        return "it computes in float32, and a parameter is float64"
    return None


def _kind(x: Tensor, parameter: Tensor | None) -> KernelKey:
    return ("rwkv7.triton", x.dtype, None if parameter is None else parameter.dtype)


def _probe_tokens(w: Tensor) -> Tensor:
    return kernel_pair.random_like(w, 1, 37, w.shape[-1])


def terms_grads(douts: TermsGrads, inputs: TermsInputs, heads: int) -> list[Tensor]:
    """The backward in plain torch."""
    grads = [x for x in douts[:5] if x is not None]
    for i, more in ((1, douts.dk_read), (4, douts.dv_read)):
        if more is not None:
            grads[i] = grads[i] + more
    return plain_gradients(lambda *x: plain_terms(TermsInputs(*x), heads), inputs, grads)


_TERMS_ARGS = f"{custom_op.schema_of(TermsInputs)}, int heads, str impl"
_OUTPUT_ARGS = f"{custom_op.schema_of(OutputInputs)}, float eps, str impl"
_LAUNCH = "slipstream.kernels.time_mix.triton.rwkv7"
_terms = custom_op.KernelOp(
    "rwkv7_terms",
    f"({_TERMS_ARGS}) -> Tensor[]",
    kernel=f"{_LAUNCH}:terms",
    plain=plain_terms,
    kind=lambda inputs: _kind(inputs.w, inputs.k_k),
    # a few tokens, with all that there may be
    probe={
        **dict.fromkeys(TermsInputs._fields[:6], _probe_tokens),
        **dict.fromkeys(
            TermsInputs._fields[6:], lambda k_k: kernel_pair.random_like(k_k, len(k_k))
        ),
    },
    packed={"inputs": TermsInputs},
    replay=True,
)
_terms_backward = custom_op.KernelOp(
    "rwkv7_terms_backward",
    f"({custom_op.schema_of(TermsGrads)}, {_TERMS_ARGS}) -> Tensor[]",
    fake=lambda *args: [x.new_empty(x.shape) for x in args[7:-2] if x is not None],
    kernel=f"{_LAUNCH}:terms_backward",
    plain=terms_grads,
    kind=lambda inputs: _kind(inputs.w, inputs.k_k),
    forward=_terms,
    packed={"douts": TermsGrads, "inputs": TermsInputs},
    replay=True,
)
_terms.set_gradient(lambda *args: _Terms.apply(*args)[: 4 if args[3] is None else 5])
_output = custom_op.KernelOp(
    "rwkv7_output",
    f"({_OUTPUT_ARGS}) -> Tensor",
    fake=lambda o, r, k, v, gate, *_: o.new_empty(gate.shape),
    kernel=f"{_LAUNCH}:output",
    plain=plain_output,
    kind=lambda inputs: _kind(inputs.o, inputs.weight),
    probe={**dict.fromkeys("orkv", (1, 37, 0, 0)), "gate": (1, 37, 0)},
    packed={"inputs": OutputInputs},
    replay=True,
)
_Output = _output.with_gradient(
    f"(Tensor dy, {_OUTPUT_ARGS}) -> Tensor[]",
    f"{_LAUNCH}:output_backward",
    results="y",
    wrt=" ".join(OutputInputs._fields),
)
_TERMS, _OUTPUT = (x.candidates(_unsupported_reason) for x in (_terms, _output))
