"""The second matrices of RWKV-7's low-rank layers in a decoding step: slipstream::_low_rank_step.

    w = tanh(w) W_w        a = a W_a        g = sigmoid(g) W_g        v = v W_v, where there is one

of one token each of N sequences, in one launch and not rounded. It has no gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.time_mix import rwkv7
from slipstream.runtime import numeric_probe
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.dispatch import TRITON_OR_EAGER, choose, triton_or_eager
from slipstream.runtime.guarded_launch import Guard, known_failure


class LowRankInputs(NamedTuple):
    """Behind the first matrices [N, rank], and the second ones [rank, D]; of one dtype."""

    w: Tensor
    a: Tensor
    g: Tensor
    v: Tensor | None
    w_up: Tensor
    a_up: Tensor
    g_up: Tensor
    v_up: Tensor | None


def low_rank(t: LowRankInputs, impl: str | None = None) -> Tensor:
    """w, a, g and v [3 or 4, N, D], in float32 or float64. impl: as runtime.dispatch.choose."""
    return _call(*t, impl=choose(_CANDIDATES, t, impl, "low_rank_step", t.w).impls)


def _unsupported_reason(*t: Tensor | None) -> str | None:
    inputs = LowRankInputs._make(t)
    if inputs.w.numel() == 0:
        return "there are no tokens"
    if any(x is not None and x.dtype != inputs.w.dtype for x in t):
        return "it takes tensors of one dtype"
    return known_failure(lambda: _kind(inputs), inputs.w.device)


_CANDIDATES = triton_or_eager(_unsupported_reason)


def plain(t: LowRankInputs) -> Tensor:
    inner = [torch.tanh(t.w), t.a, torch.sigmoid(t.g), t.v]
    found = [x @ up for x, up in zip(inner, t[4:]) if x is not None and up is not None]
    return rwkv7.wide(torch.stack(found))


def _kind(t: LowRankInputs) -> KernelKey:
    return ("low_rank_step.triton", t.w.dtype, t.v is not None)


def _impl(*args: Any) -> Tensor:
    t, impl = LowRankInputs(*args[:-1]), args[-1]
    with Guard(impl, t.w.device, lambda: _kind(t), lambda: _mismatch(t)) as usable:
        if usable:
            from slipstream.kernels.time_mix.triton import low_rank

            return low_rank.low_rank(t)
    return plain(t)


def _mismatch(t: LowRankInputs) -> str | None:
    """The probe: three sequences, all matrices as they are wide."""
    given = {
        name: numeric_probe.random_like(x, 3 if i < 4 else x.shape[0], x.shape[1])
        * (1 if i < 4 else x.shape[0] ** -0.5)
        for i, (name, x) in enumerate(t._asdict().items())
        if x is not None
    }

    def run(tensors: numeric_probe.Given, impl: str) -> Tensor:
        return _call(*map(tensors.get, LowRankInputs._fields), impl=impl)

    return numeric_probe.mismatch(
        lambda t: run(t, TRITON_OR_EAGER), lambda t: run(t, "eager"), given, gradients=False
    )


def _fake(*args: Any) -> Tensor:
    t = LowRankInputs(*args[:-1])
    dtype = torch.float64 if t.w.dtype == torch.float64 else torch.float32
    count = 3 if t.v is None else 4
    return t.w.new_empty(count, t.w.shape[0], t.w_up.shape[1], dtype=dtype)


_call = KernelOp(
    "low_rank_step", f"({schema_of(LowRankInputs)}, str impl) -> Tensor", _impl, _fake, replay=True
)
