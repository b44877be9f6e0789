"""The implementations of softmax attention, and the choice of one."""

from dataclasses import replace

import torch
from torch import Tensor

from slipstream.kernels.attention import cache, op
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.plan import cache_unsupported_reason, kind, unsupported_reason
from slipstream.kernels.attention.plan import sm90_unsupported_reason as sm90_unsupported
from slipstream.runtime import backends, guarded_launch
from slipstream.runtime.dispatch import Candidate, Selection, choose

NO_DROPOUT = "it has no dropout"


def _sm90_unsupported(call: tuple[AttentionInputs, AttentionOptions]) -> str | None:
    return NO_DROPOUT if call[1].dropout else sm90_unsupported(*call)


def _unsupported_reason(call: tuple[AttentionInputs, AttentionOptions]) -> str | None:
    inputs, options = call
    return unsupported_reason(inputs[:3]) or guarded_launch.known_failure(
        lambda: kind(inputs, options), inputs.q.device
    )


_SM90 = Candidate("sm90", "kernels for sm_90", _sm90_unsupported)
_TRITON = Candidate("triton", "kernels for any CUDA device", _unsupported_reason)
_EAGER = Candidate("eager", "plain torch, on any device")
CANDIDATES = (
    *(_SM90, _TRITON, _EAGER),
    Candidate(
        "reference",
        "dense, the oracle of the tests",
        lambda call: NO_DROPOUT if call[1].dropout else None,
        by_name_only=True,
    ),
)


def _gradients_unsupported_reason(call: tuple[AttentionInputs, AttentionOptions]) -> str | None:
    if not op.has_gradients("sm90", call[0]):
        return "its gradients want heads of q and v of one width, of at most 256"
    return _sm90_unsupported(call)


# what `choose` finds for a call on no CUDA device, at a tenth of what it takes
_ELSEWHERE = Selection(_EAGER.name, _EAGER.why)
OF_GRADIENTS = (
    replace(_SM90, unsupported_reason=_gradients_unsupported_reason),
    replace(_TRITON, why="its gradients by kernels for any CUDA device"),
    _EAGER,
)
CACHE_CANDIDATES = (replace(_TRITON, unsupported_reason=cache_unsupported_reason), _EAGER)


def plan_for(inputs: AttentionInputs, options: AttentionOptions, impl: str | None) -> Selection:
    if impl is None and not inputs.q.is_cuda and not backends.INTERPRETED:
        return _ELSEWHERE
    return choose(CANDIDATES, (inputs, options), impl, "attention", inputs.q)


def gradient_impls(inputs: AttentionInputs, options: AttentionOptions, impl: str | None) -> str:
    """Back ends of the gradient, in order."""
    return choose(OF_GRADIENTS, (inputs, options), impl, "attention", inputs.q).impls


def plan_across_ranks(
    inputs: AttentionInputs, options: AttentionOptions, impl: str | None
) -> tuple[str, str]:
    """The impl, forward and backward, for heads with the tokens of all ranks."""
    plan = plan_for(inputs, options, impl)
    if op.has_gradients(plan.impl, inputs):
        return plan.impls, plan.impls
    return plan.impls, gradient_impls(inputs, options, impl)


def decode(call: cache.Cache, options: AttentionOptions, impl: str | None) -> tuple[Tensor, Tensor]:
    """o and lse of a call on a cache, without gradients."""
    with torch.no_grad():
        return op.call_decode(*call, *options, impl=plan_cache(call.q, call.k, call.v, impl))


def plan_cache(q: Tensor, k: Tensor, v: Tensor, impl: str | None) -> str:
    """Which work on a cache, in order: "triton", "triton|eager" or "eager"."""
    if impl is None and not q.is_cuda and not backends.INTERPRETED:
        return _ELSEWHERE.impl
    return choose(CACHE_CANDIDATES, (q, k, v), impl, "attention on a cache", q).impls
