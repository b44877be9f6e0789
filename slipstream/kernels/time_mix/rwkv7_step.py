"""RWKV-7's decoding step between its matrix products, one operator, slipstream::_rwkv7_step:

    w = slowest sigmoid(w + w_bias)             a = sigmoid(a + a_bias)
    v = v + (first_value - v) sigmoid(v_gate + v_bias)          where there is one
    kk = l2_norm_per_head(k k_k)                k = k (1 + (a - 1) k_a)
    S <- exp(w) S + (kk a) (-kk^T S) + k v^T
    y = (group_norm_per_head(S^T r) + sum(r k r_k) v) g

of one token each of N sequences, whose states are rows of a pool, updated in place. It has no
gradient; between its parts nothing is rounded.

The second matrices of RWKV-7's low-rank layers in a decoding step: slipstream::_low_rank_step.

    w = tanh(w) W_w        a = a W_a        g = sigmoid(g) W_g        v = v W_v, where there is one

of one token each of N sequences, in one launch and not rounded. It has no gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks, pool_rows
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.time_mix import rwkv7
from slipstream.kernels.time_mix.inputs import (
    TOKENS,
    LowRankInputs,
    OutputInputs,
    StepInputs,
    TermsInputs,
)
from slipstream.runtime import autograd, custom_op, guarded_launch, token_ids
from slipstream.runtime.dispatch import Selection, ValidationCache, choose, signature


def low_rank(t: LowRankInputs, impl: str | None = None) -> Tensor:
    """w, a, g and v [3 or 4, N, D], in float32 or float64. impl: as runtime.dispatch.choose."""
    impls = choose(_LOW_RANK_CANDIDATES, (t,), impl, "low_rank_step", t.w).impls
    return _low_rank(*t, impl=impls)


def plain_low_rank(t: LowRankInputs) -> Tensor:
    inner = [torch.tanh(t.w), t.a, torch.sigmoid(t.g), t.v]
    found = [x @ up for x, up in zip(inner, t[4:]) if x is not None and up is not None]
    return checks.widen(torch.stack(found))


def _low_rank_kind(t: LowRankInputs) -> KernelKey:
    return ("low_rank_step.triton", t.w.dtype, t.v is not None)


def _low_rank_unsupported(t: LowRankInputs) -> str | None:
    if t.w.numel() == 0:
        return "there are no tokens"
    if any(x is not None and x.dtype != t.w.dtype for x in t):
        return "it takes tensors of one dtype"
    return None


_low_rank = custom_op.KernelOp(
    "low_rank_step",
    f"({custom_op.schema_of(LowRankInputs)}, str impl) -> Tensor",
    kernel="slipstream.kernels.time_mix.triton.rwkv7_step:low_rank",
    plain=plain_low_rank,
    kind=_low_rank_kind,
    # three sequences, all matrices as they are wide
    probe=dict.fromkeys(("w", "a", "g", "v"), (3, ...)),
    packed={"t": LowRankInputs},
    replay=True,
)
_LOW_RANK_CANDIDATES = _low_rank.candidates(_low_rank_unsupported)

MAX_K = 1024  # all rows of a tile of columns are in one program's registers


class StepCall(NamedTuple):
    """state: [slots, H, K, K], of each head K-first, or V-first if v_first. indices: [N] or None.
    eps: of the norm."""

    state: Tensor
    indices: Tensor | None
    eps: float
    v_first: bool


def _unsupported_reason(t: StepInputs, state: Tensor) -> str | None:
    """Why the kernel can't take a call, or None if it can."""
    for name, x in {**t._asdict(), "state": state}.items():
        if x is not None and x.dtype == torch.float64:
            return f"it computes in float32, and {name} is float64"
    if t.r_k.shape[1] > MAX_K:
        return f"K may be at most {MAX_K}"
    if state.stride()[2:] != (state.shape[3], 1):
        return "the last two dimensions of state are not contiguous"
    return None


_PLANS = ValidationCache()


def run(t: StepInputs, call: StepCall, out: Tensor | None, impl: str | None) -> Tensor:
    """y [N, D], in out if that is given; the pool is updated."""
    state, indices, eps, v_first = call
    key = signature((*t, state, indices, out), v_first, impl)
    key = None if key is None else (*key, state.stride())
    plan = _PLANS.get(key, lambda: _plan(t, call, out, impl), (*t, state, indices, out))
    autograd.refuse_gradients("rwkv7_step", *t, state, out)
    out = t.r.new_empty(t.r.shape) if out is None else out
    # in a graph that is captured it would be one more launch
    if not guarded_launch.is_capturing(state.device):
        token_ids.expect_below("state_indices", indices, state.shape[0], "slots")
    if plan.impl == "reference":
        plain(out, state, indices, t, eps, v_first, torch.float64)
    else:
        _call(out, state, indices, *t, eps=eps, v_first=v_first, impl=plan.impls)
    return out


def _plan(t: StepInputs, call: StepCall, out: Tensor | None, impl: str | None) -> Selection:
    """Checks the arguments and chooses; looks at nothing but shapes, strides, dtypes, devices."""
    checks.expect_rank("r", t.r, 2, "[N, D]")
    checks.expect_rank("r_k", t.r_k, 2, "[H, K]")
    (N, D), (H, K), (state, indices, _, v_first) = t.r.shape, t.r_k.shape, call
    checks.expect_shape("r", t.r, (N, H * K))
    for name, x in t._asdict().items():
        if x is not None and name != "r_k":
            checks.expect_shape(name, x, (N, D) if name in TOKENS else (D,))
    if (t.v_gate is None) != (t.first_value is None):
        raise ValueError("v_gate: wants first_value too, or neither")
    if t.v_gate is None and t.v_bias is not None:
        raise ValueError("v_bias: wants v_gate and first_value too")
    checks.expect_rank("state", state, 4, "[slots, H, V, K]" if v_first else "[slots, H, K, V]")
    checks.expect_shape("state", state, (N if indices is None else state.shape[0], H, K, K))
    checks.expect_index("state_indices", indices, (N,))
    if out is not None:
        checks.expect_shape("out", out, (N, D))
    tensors = {**t._asdict(), "state": state, "out": out}
    checks.expect_one_device({**tensors, "state_indices": indices})
    checks.expect_floating(tensors)
    return choose(_CANDIDATES, (t, state), impl, "rwkv7_step", t.r)


def plain(
    out: Tensor,
    state: Tensor,
    indices: Tensor | None,
    t: StepInputs,
    eps: float,
    v_first: bool,
    dtype: Any = None,
) -> None:
    """In plain torch, in float32 at least."""
    if out.numel() == 0:
        return
    if indices is not None:
        token_ids.expect_unique("state_indices", indices, "slot")
    state, (H, K) = state.mT if v_first else state, t.r_k.shape
    dtype = dtype or checks.wide_dtype(t.r)
    wide = StepInputs._make(None if x is None else x.to(dtype) for x in t)
    values: list[Any] = [None] * 3
    if wide.v_gate is not None:
        values = [wide.v, wide.v_gate, wide.first_value]
    terms = [x if x is None else x[:, None] for x in (wide.w, wide.k, wide.a, *values)]
    biases = wide.w_bias, wide.a_bias, wide.v_bias
    found = rwkv7.plain_terms(TermsInputs._make([*terms, wide.k_k, wide.k_a, *biases]), H)
    w, k, a, b, *v = (x[:, 0] for x in found)
    value = v[0] if v else wide.v.unflatten(-1, (H, K))
    rows = pool_rows.PoolRows(indices, state.shape[0])
    r, S = wide.r.unflatten(-1, (H, K)), rows.read(state).to(dtype)
    read = (a[..., None] * S).sum(-2, keepdim=True)
    S = S * w.exp()[..., None] + b[..., None] * read + k[..., None] * value[..., None, :]
    rows.write(state, S)
    o = (r[..., None] * S).sum(-2)
    tokens = [x[:, None] for x in (o, r, k, value, wide.g)]
    inputs = OutputInputs._make([*tokens, wide.norm_weight, wide.norm_bias, wide.r_k])
    out.copy_(rows.or_zero(rwkv7.plain_output(inputs, eps)[:, 0]))


def _kind(t: StepInputs, state: Tensor) -> KernelKey:
    has_first = t.v_gate is not None
    return ("rwkv7_step.triton", t.r.dtype, state.dtype, t.r_k.shape[1], has_first)


_call = custom_op.KernelOp(
    "rwkv7_step",
    "(Tensor(a!) out, Tensor(b!) state, Tensor? state_indices, "
    f"{custom_op.schema_of(StepInputs)}, float eps, bool v_first, str impl) -> ()",
    fake=lambda *args: None,
    kernel="slipstream.kernels.time_mix.triton.rwkv7_step:step",
    plain=plain,
    kind=_kind,
    packed={"t": StepInputs},
    in_torch_if=lambda out: out.numel() == 0,
    # three sequences of a pool of four
    probe={
        **dict.fromkeys(("out", *TOKENS), (3, ...)),
        "state": (4, ...),
        "state_indices": lambda state: torch.tensor([2, -1, 0], device=state.device),
    },
    replay=True,
)
_CANDIDATES = _call.candidates(_unsupported_reason, asks_interpreter=True)
