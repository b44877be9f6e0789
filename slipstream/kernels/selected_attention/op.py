"""Attention to selected keys as operators, and the choice of an implementation."""

from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.attention import inputs as dense
from slipstream.kernels.attention import plan, probe, reference
from slipstream.kernels.selected_attention import eager
from slipstream.kernels.selected_attention import inputs as arguments
from slipstream.runtime import autograd, custom_op, dispatch, kernel_pair
from slipstream.runtime.context_parallel import ContextParallel


def run(
    terms: dense.AttentionInputs,
    options: dense.AttentionOptions,
    asked: dense.Asked,
    context: ContextParallel | None,
    by: arguments.SelectedBy,
) -> dense.Results:
    """As attention.run's run."""
    inputs, how = arguments.checked(terms, options, asked, context, by)
    arguments.check_values(inputs, how)
    impl = dispatch.choose(_CANDIDATES, (inputs, how), asked.impl, "attention", inputs.q).impls
    if impl == "reference":
        wide = dense.in_compute_dtype(inputs.dense)
        seen = arguments.visible(
            reference.placed_keys(wide)[3], inputs.selected, inputs.k.shape[1], how
        )
        o, lse = reference.softmax_reference(wide, options, seen.transpose(1, 2))
        return o.to(inputs.q.dtype), lse if asked.lse else None
    if torch.compiler.is_compiling():
        inputs = arguments.SelectedInputs(*checks.apart(inputs))
    apply = _Selected.apply if autograd.needs_autograd(*inputs) else _forward
    o, lse = apply(*inputs, *how, impl)
    return o, lse if asked.lse else None


def unsupported_reason(
    inputs: arguments.SelectedInputs, options: arguments.SelectedOptions
) -> str | None:
    """Why the kernels can't take a call, or None if they can."""
    if max(inputs.selected.numel(), 32 * inputs.k.shape[1] * inputs.k.shape[0]) >= 2**31:
        return "it counts the lists' entries, and keys times 32, in 32 bits"
    if max(inputs.q.shape[-1], inputs.v.shape[-1]) > 256:
        return "heads have more than 256 channels"
    return plan.unsupported_reason(inputs[:3])


def _kind(inputs: arguments.SelectedInputs, options: arguments.SelectedOptions) -> KernelKey:
    """The calls that share a verdict on the kernels."""
    flags = [
        name for name in arguments.SelectedInputs._fields[4:] if getattr(inputs, name) is not None
    ]
    window = options.left + options.right >= 0 and "window"
    by_head = inputs.selected.shape[2] > inputs.k.shape[2] and "by head"
    sizes = inputs.q.dtype, inputs.q.shape[-1], inputs.v.shape[-1], options.block
    if arguments.takes_sm90(inputs, options):
        flags.append(f"sm_90 {inputs.q.shape[2] // inputs.k.shape[2]}")
    return ("selected_attention.triton", *sizes, window, by_head, *flags)


def _mismatch(inputs: arguments.SelectedInputs, options: arguments.SelectedOptions) -> str | None:
    """The probe: one head of keys, and lists of a few of its blocks."""
    like = probe.like(inputs.dense)
    G = like.q.shape[2] if inputs.selected.shape[2] > inputs.k.shape[2] else 1
    blocks = -(-kernel_pair.TOKENS // options.block)
    lists = torch.randint(-1, blocks, (1, kernel_pair.TOKENS, G, 5), device=like.q.device)
    fresh = arguments.SelectedInputs(*like[:3], lists.int(), like.sinks, *like[6:9])
    near = options._replace(left=min(options.left, 70), right=min(options.right, 70))

    def run(impl: str) -> Any:
        return lambda args: _Selected.apply(*arguments.SelectedInputs(**args), *near, impl)

    kernels, plain = (run(x) for x in (dispatch.TRITON_OR_EAGER, dispatch.PLAIN[0]))
    return kernel_pair.mismatch(kernels, plain, fresh._asdict())


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, v = args[0], args[2]
    B, T, H, _ = q.shape
    return q.new_empty(B, T, H, v.shape[-1]), q.new_empty(B, H, T, dtype=checks.wide_dtype(q))


_LAUNCH = "slipstream.kernels.selected_attention.launch"
_TENSORS, _NUMBERS = (
    custom_op.schema_of(x) for x in (arguments.SelectedInputs, arguments.SelectedOptions)
)
_PACKED = {"inputs": arguments.SelectedInputs, "options": arguments.SelectedOptions}
_forward = custom_op.KernelOp(
    "selected_attention",
    f"({_TENSORS}, {_NUMBERS}, str impl) -> (Tensor, Tensor)",
    fake=_fake,
    kernel=f"{_LAUNCH}:forward",
    plain=eager.forward,
    kind=_kind,
    probe=_mismatch,
    packed=_PACKED,
    replay=True,
    max_operations=64,  # a backward by entries has 49, beside 46 launches
)
_Selected = _forward.with_gradient(
    f"({_TENSORS}, Tensor o, Tensor lse, Tensor? do, Tensor? dlse, {_NUMBERS}, str impl) "
    "-> Tensor[]",
    f"{_LAUNCH}:backward",
    results="o lse",
    wrt="q k v sinks",
    plain=eager.backward,
)
_CANDIDATES = _forward.candidates(unsupported_reason)
