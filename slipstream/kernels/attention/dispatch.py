"""From checked terms to an implementation."""

from dataclasses import replace

import torch
from torch import Tensor

from slipstream.kernels.attention import blocks, eager, op
from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.reference import softmax_reference
from slipstream.kernels.attention.sm90.plan import unsupported_reason as sm90_unsupported
from slipstream.kernels.attention.triton.plan import (
    cache_unsupported_reason,
    kind,
    unsupported_reason,
)
from slipstream.runtime import guarded_launch
from slipstream.runtime.autograd import needs_autograd
from slipstream.runtime.backends import INTERPRETED, is_fake, triton_unsupported
from slipstream.runtime.consistent import BLOCK, consistent_scope
from slipstream.runtime.dispatch import Candidate, Selection, ValidationCache, choose, signature

NO_DROPOUT = "it has no dropout"


def _sm90_unsupported(call: tuple[AttentionInputs, AttentionOptions]) -> str | None:
    return NO_DROPOUT if call[1].dropout else sm90_unsupported(*call)


def _unsupported_reason(call: tuple[AttentionInputs, AttentionOptions]) -> str | None:
    inputs, options = call
    return unsupported_reason(inputs[:3]) or guarded_launch.known_failure(
        lambda: kind(inputs, options), inputs.q.device
    )


CANDIDATES = (
    Candidate("sm90", "kernels for sm_90", _sm90_unsupported),
    Candidate("triton", "kernels for any CUDA device", _unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
    Candidate(
        "reference",
        "dense, the oracle of the tests",
        lambda call: NO_DROPOUT if call[1].dropout else None,
        by_name_only=True,
    ),
)


def _gradients_unsupported_reason(call: tuple[AttentionInputs, AttentionOptions]) -> str | None:
    if not op.has_gradients("sm90", call[0]):
        return "its gradients want heads of q and v of one width"
    return _sm90_unsupported(call)


_PLANS = ValidationCache()
# what `choose` finds for a call on no CUDA device, at a tenth of what it takes
_ELSEWHERE = Selection(CANDIDATES[2].name, CANDIDATES[2].why)
OF_GRADIENTS = (
    replace(CANDIDATES[0], unsupported_reason=_gradients_unsupported_reason),
    replace(CANDIDATES[1], why="its gradients by kernels for any CUDA device"),
    CANDIDATES[2],
)
CACHE_CANDIDATES = (
    Candidate("triton", "kernels for any CUDA device", cache_unsupported_reason),
    CANDIDATES[2],
)


def run(
    inputs: AttentionInputs,
    options: AttentionOptions,
    want_lse: bool,
    impl: str | None,
    consistent: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, H, DV] in q's dtype and, if wanted, lse [B, H, T], float32 or float64.

    consistent: as ops.attention. Kernels decide nothing by sizes, and go through keys in one order.
    """
    consistent = consistent or consistent_scope.on
    if consistent:
        _expect_consistent(options, impl)
    plan = plan_for(inputs, options, impl)
    chosen = plan.impl
    if chosen == "eager" and consistent:
        return blocks.attention(inputs, options, want_lse)
    if chosen == "reference":
        o, lse = softmax_reference(_in_compute_dtype(inputs), options)
        return o.to(inputs.q.dtype), lse if want_lse else None
    if chosen == "eager" and not want_lse and eager.torch_takes(inputs, options):
        return eager.with_torch(inputs, options), None
    # rows of few queries have kernels that cut the keys into shares (triton/decode_launch.py)
    rows = consistent and inputs.cu_q is None and inputs.g is None
    rows = rows and 0 < inputs.q.shape[1] <= BLOCK
    B, T = inputs.q.shape[:2]
    inputs = _packed_rows(inputs) if rows else inputs
    gradients = None
    if not op.has_gradients(chosen, inputs) and needs_autograd(*inputs):
        gradients = choose(OF_GRADIENTS, (inputs, options), impl, "attention", inputs.q).impls
    o, lse = op.softmax(inputs, options, plan.impls, gradients)
    if rows:
        o, lse = o.view(B, T, *o.shape[2:]), lse.view(o.shape[2], B, T).transpose(0, 1)
    return o, lse if want_lse else None


def plan_for(inputs: AttentionInputs, options: AttentionOptions, impl: str | None) -> Selection:
    if impl is None and not inputs.q.is_cuda and not INTERPRETED:
        return _ELSEWHERE
    return _PLANS.get(
        signature(inputs, options, impl),
        lambda: choose(CANDIDATES, (inputs, options), impl, "attention", inputs.q),
        inputs,
    )


def plan_of_rotated(inputs: AttentionInputs, options: AttentionOptions) -> str | None:
    """Back ends to try, in order, for a call that applies a rotary embedding itself (rotary.py).

    None where no kernel takes the call, and for consistent calls.
    """
    if consistent_scope.on:
        return None
    if is_fake(inputs.q) or triton_unsupported(inputs.q, "the input") is not None:
        return None
    plan = plan_for(inputs, options, None)
    return None if plan.impl == "eager" else plan.impls


def _packed_rows(inputs: AttentionInputs) -> AttentionInputs:
    """Queries [B, T] as B packed sequences, keys as they are."""
    (B, T), S, device = inputs.q.shape[:2], inputs.k.shape[1], inputs.q.device
    lengths = inputs.lengths
    if lengths is None:
        lengths = torch.full((B,), S, dtype=torch.int32, device=device)
    offsets = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)
    return inputs._replace(
        q=inputs.q.reshape(1, B * T, *inputs.q.shape[2:]), cu_q=offsets, lengths=lengths
    )


def _expect_consistent(options: AttentionOptions, impl: str | None) -> None:
    """
    Raises:
        NotImplementedError: for what goes through keys in no fixed order.
    """
    if options.right != 0:
        raise NotImplementedError("consistent: want causal attention")
    if options.dropout:
        raise NotImplementedError("consistent: want dropout_p=0")
    if impl == "reference" or torch.compiler.is_compiling():
        other = "impl='reference'" if impl == "reference" else "torch.compile"
        raise NotImplementedError(f"consistent: is not implemented with {other}")


def plan_across_ranks(
    inputs: AttentionInputs, options: AttentionOptions, impl: str | None
) -> tuple[str, str]:
    """The impl, forward and backward, for heads with the tokens of all ranks."""
    plan = choose(CANDIDATES, (inputs, options), impl, "attention", inputs.q)
    if op.has_gradients(plan.impl, inputs):
        return plan.impls, plan.impls
    return plan.impls, choose(OF_GRADIENTS, (inputs, options), impl, "attention", inputs.q).impls


def _in_compute_dtype(inputs: AttentionInputs) -> AttentionInputs:
    floating = {
        n: x for n, x in inputs._asdict().items() if x is not None and x.is_floating_point()
    }
    return inputs._replace(**{name: x.to(inputs.dtype) for name, x in floating.items()})


def decode(call: Cache, options: AttentionOptions, impl: str | None) -> tuple[Tensor, Tensor]:
    """As run, from a cache, without gradients."""
    with torch.no_grad():
        return op.call_decode(*call, *options, impl=plan_cache(call.q, call.k, call.v, impl))


def plan_cache(q: Tensor, k: Tensor, v: Tensor, impl: str | None) -> str:
    """Which work on a cache, in order: "triton", "triton|eager" or "eager"."""
    if impl is None and not q.is_cuda and not INTERPRETED:
        return _ELSEWHERE.impl
    return choose(CACHE_CANDIDATES, (q, k, v), impl, "attention on a cache", q).impls
