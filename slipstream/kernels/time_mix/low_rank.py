"""The second matrices of RWKV-7's low-rank layers in a decoding step: slipstream::_low_rank_step.

    w = tanh(w) W_w        a = a W_a        g = sigmoid(g) W_g        v = v W_v, where there is one

of one token each of N sequences, in one launch and not rounded. It has no gradient.
"""

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.time_mix import rwkv7
from slipstream.kernels.time_mix.inputs import LowRankInputs
from slipstream.runtime import custom_op, dispatch, guarded_launch


def low_rank(t: LowRankInputs, impl: str | None = None) -> Tensor:
    """w, a, g and v [3 or 4, N, D], in float32 or float64. impl: as runtime.dispatch.choose."""
    return _call(*t, impl=dispatch.choose(_CANDIDATES, t, impl, "low_rank_step", t.w).impls)


def plain(t: LowRankInputs) -> Tensor:
    inner = [torch.tanh(t.w), t.a, torch.sigmoid(t.g), t.v]
    found = [x @ up for x, up in zip(inner, t[4:]) if x is not None and up is not None]
    return rwkv7.wide(torch.stack(found))


def _kind(t: LowRankInputs) -> KernelKey:
    return ("low_rank_step.triton", t.w.dtype, t.v is not None)


def _unsupported_reason(*t: Tensor | None) -> str | None:
    inputs = LowRankInputs._make(t)
    if inputs.w.numel() == 0:
        return "there are no tokens"
    if any(x is not None and x.dtype != inputs.w.dtype for x in t):
        return "it takes tensors of one dtype"
    return guarded_launch.known_failure(lambda: _kind(inputs), inputs.w.device)


_CANDIDATES = dispatch.triton_or_eager(_unsupported_reason)


_call = custom_op.KernelOp(
    "low_rank_step",
    f"({custom_op.schema_of(LowRankInputs)}, str impl) -> Tensor",
    kernel="slipstream.kernels.time_mix.triton.low_rank:low_rank",
    plain=plain,
    kind=_kind,
    # three sequences, all matrices as they are wide
    probe=dict.fromkeys(("w", "a", "g", "v"), (3, ...)),
    packed={"t": LowRankInputs},
    replay=True,
)
