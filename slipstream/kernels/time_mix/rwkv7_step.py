"""RWKV-7's decoding step behind its projections, one operator, slipstream::rwkv7_step:

    w = slowest sigmoid(tanh(w) W_w + b_w)      a = sigmoid(a W_a + b_a)      gate = sigmoid(g) W_g
    v = v + (first_value - v) sigmoid(v_gate W_v + b_v)                       where there is one
    kk = l2_norm_per_head(k k_k)                k = k (1 + (a - 1) k_a)
    S <- exp(w) S + (kk a) (-kk^T S) + k v^T
    y = (group_norm_per_head(S^T r) + sum(r k r_k) v) gate

of one token each of N sequences. Beside y it writes the states and the token that the next one is
mixed with. It has no gradient; between its parts nothing is rounded.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.time_mix import rwkv7
from slipstream.kernels.time_mix.inputs import OutputInputs, TermsInputs
from slipstream.runtime import numeric_probe
from slipstream.runtime.backends import triton_unsupported
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.dispatch import TRITON_OR_EAGER
from slipstream.runtime.guarded_launch import Guard, known_failure

MAX_K = 128  # a head's state is in one program's registers


class StepInputs(NamedTuple):
    """N sequences, D channels, H heads of K. Rows of tokens [N, ...] may have other numbers between
    them; v_gate, first_value, v_up and v_bias are all given or none of them."""

    x: Tensor  # [N, D], what the next token is mixed with
    r: Tensor  # [N, D] up to v
    k: Tensor
    v: Tensor
    w: Tensor  # [N, rank] up to v_gate, behind the first matrix of each pair
    a: Tensor
    g: Tensor
    v_gate: Tensor | None
    first_value: Tensor | None  # [N, D]
    w_up: Tensor  # [rank, D], the second matrices
    a_up: Tensor
    g_up: Tensor
    v_up: Tensor | None
    w_bias: Tensor  # [D]
    a_bias: Tensor
    v_bias: Tensor | None
    k_k: Tensor
    k_a: Tensor
    weight: Tensor  # of the norm
    bias: Tensor
    r_k: Tensor  # [H, K]


TOKENS = StepInputs._fields[: StepInputs._fields.index("w_up")]


def unsupported_reason(t: StepInputs, state: Tensor) -> str | None:
    """Why the kernel can't take a call, or None if it can. state: [N, H, K, K]."""
    if reason := triton_unsupported(t.x, "x"):
        return reason
    if t.x.dtype == torch.float64 or state.dtype != torch.float32 or not state.is_contiguous():
        return "it takes contiguous states in float32"
    if state.shape[-1] > MAX_K:
        return f"it takes heads of at most {MAX_K} channels"
    if t.x.shape[1] != t.r_k.numel():
        return "it takes all heads of a layer"
    if any(x is not None and x.dtype != t.x.dtype for x in t[: len(TOKENS)]):
        return "it takes tokens of one dtype"
    if not all(x is None or x.is_contiguous() for x in t[len(TOKENS) :]):
        return "a parameter is not contiguous"
    return known_failure(lambda: _kind(t, state), t.x.device)


def step(
    t: StepInputs, state: Tensor, shift: Tensor, eps: float, impl: str = TRITON_OR_EAGER
) -> Tensor:
    """y [N, D]; state [N, H, K, K] and shift [N, D] are overwritten. eps: of the norm."""
    return _call(state, shift, *t, eps=eps, impl=impl)


def plain(t: StepInputs, state: Tensor, shift: Tensor, eps: float) -> Tensor:
    """In plain torch, in float32 at least."""
    H, K = t.r_k.shape
    dtype, out = (torch.float64 if t.x.dtype == torch.float64 else torch.float32), t.x.dtype
    shift.copy_(t.x)
    wide: Any = StepInputs._make(None if x is None else x.to(dtype) for x in t)
    values: list[Any] = [None, None, None]
    if wide.v_gate is not None:
        values = [wide.v, wide.v_gate @ wide.v_up, wide.first_value]
    inner: Any = torch.tanh(wide.w) @ wide.w_up, wide.k, wide.a @ wide.a_up
    terms = [x if x is None else x[:, None] for x in (*inner, *values)]
    biases = wide.w_bias, wide.a_bias, wide.v_bias
    found = rwkv7.plain_terms(TermsInputs._make([*terms, wide.k_k, wide.k_a, *biases]), H)
    heads = [x[:, 0] for x in found]
    w, k, a, b = heads[:4]
    v = heads[4] if len(heads) > 4 else wide.v.unflatten(-1, (H, K))
    r, S = wide.r.unflatten(-1, (H, K)), state.to(dtype)
    read = (a[..., None] * S).sum(-2, keepdim=True)
    S = S * w.exp()[..., None] + b[..., None] * read + k[..., None] * v[..., None, :]
    state.copy_(S)
    o = (r[..., None] * S).sum(-2)
    gate = torch.sigmoid(wide.g) @ wide.g_up
    tokens = (x[:, None] for x in (o, r, k, v, gate))
    return rwkv7.plain_output(OutputInputs(*tokens, *wide[-3:]), eps)[:, 0].to(out)


def _kind(t: StepInputs, state: Tensor) -> KernelKey:
    has_first = t.v_gate is not None
    return ("rwkv7_step.triton", t.x.dtype, t.k_k.dtype, state.shape[-1], has_first)


def _impl(*args: Any) -> Tensor:
    (state, shift, *given), eps, impl = args[:-2], *args[-2:]
    t = StepInputs(*given)
    if t.x.numel() == 0:
        return torch.empty_like(t.x)
    kind = _kind(t, state)
    with Guard(impl, t.x.device, lambda: kind, lambda: _mismatch(t, state)) as usable:
        if usable:
            from slipstream.kernels.time_mix.triton import rwkv7_step

            return rwkv7_step.step(t, state, shift, eps)
    return plain(t, state, shift, eps)


def _mismatch(t: StepInputs, like: Tensor) -> str | None:
    """The probe: three sequences."""

    def values(name: str, x: Tensor) -> Tensor:
        shape = (3, *x.shape[1:]) if name in (*TOKENS, "state") else x.shape
        made = numeric_probe.random_like(x, *shape)
        return made * x.shape[0] ** -0.5 if name.endswith("_up") else made

    tensors = {**t._asdict(), "state": like}
    given = {name: values(name, x) for name, x in tensors.items() if x is not None}

    def run(tensors: numeric_probe.Given, impl: str) -> tuple[Tensor, ...]:
        inputs = StepInputs._make(tensors.get(name) for name in StepInputs._fields)
        state, shift = tensors["state"].clone(), torch.empty_like(tensors["x"])
        return step(inputs, state, shift, rwkv7.EPS, impl), state, shift

    return numeric_probe.mismatch(
        lambda t: run(t, TRITON_OR_EAGER), lambda t: run(t, "eager"), given, gradients=False
    )


_call = KernelOp(
    "rwkv7_step",
    f"(Tensor(a!) state, Tensor(b!) shift, {schema_of(StepInputs)}, float eps, str impl) -> Tensor",
    _impl,
    lambda state, shift, x, *others: x.new_empty(x.shape),
    replay=True,
)
