"""The selective scan: checks, choice, and the torch.library operators with their gradient.

slipstream::_selective_scan_forward gives y, the final state and the states that backward reads;
slipstream::_selective_scan_backward the gradients of the tensors it was given. `impl` names the
implementation, or several to try in order.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.selective_scan import eager
from slipstream.kernels.selective_scan.inputs import (
    SM90_CHUNK,
    ScanInputs,
    empty_states,
)
from slipstream.runtime import autograd, compile_ahead, context_exchange, guarded_launch
from slipstream.runtime.backends import DTYPES, sm90_unsupported, triton_unsupported
from slipstream.runtime.context_in_segments import scan_of_rank
from slipstream.runtime.context_parallel import ContextParallel, Share
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.dispatch import Candidate, Selection, ValidationCache, choose, signature
from slipstream.runtime.kernel_pair import TOKENS, fresh, guarded, mismatch, random_like
from slipstream.runtime.token_ids import expect_offsets


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, (delta_softplus, for_backward, impl) = ScanInputs(*args[:10]), args[10:]
    if _has_no_states(inputs):
        return _without_states(inputs, delta_softplus, for_backward, impl)
    call = inputs, delta_softplus, for_backward
    return _guarded("forward", impl, inputs, partial(_plain_forward, impl), call)


def _plain_forward(
    impl: str, inputs: ScanInputs, delta_softplus: bool, for_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, final, states = eager.selective_scan_forward(inputs, delta_softplus)
    if impl.startswith("sm90") or not for_backward:  # whose backward makes them again
        states = _states_of(impl, inputs, for_backward)
    return y, final, states


def _states_of(impl: str, inputs: ScanInputs, for_backward: bool) -> Tensor:
    """Room for the states that backward reads, as implementations leave them."""
    if impl.startswith("sm90"):
        return empty_states(inputs, SM90_CHUNK, for_backward)
    return empty_states(inputs, for_backward=for_backward)


def _has_no_states(inputs: ScanInputs) -> bool:
    return inputs.u.numel() == 0 or inputs.A.numel() == 0


def _without_states(
    inputs: ScanInputs, delta_softplus: bool, for_backward: bool, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    y, final, states = _fake_forward(*inputs, delta_softplus, for_backward, impl)
    if inputs.u.numel():  # N is 0: y = D u silu(z)
        return (*eager.selective_scan_forward(inputs, delta_softplus)[:2], states)
    state = inputs.initial_state
    return y, final.zero_() if state is None else final.copy_(state), states


def kind(inputs: ScanInputs, name: str = "triton") -> KernelKey:
    """The calls that share a verdict on the kernels."""
    dtypes = (None if x is None else x.dtype for x in inputs[:9])
    return (f"selective_scan.{name}", inputs.A.shape[1], *dtypes)


def _guarded(what: str, impl: str, inputs: ScanInputs, plain: Callable, call: tuple) -> Any:
    """The launch of that name of the first of the implementations, or plain torch."""
    name = impl.partition("|")[0]
    kernel = f"slipstream.kernels.selective_scan.{name}_launch:{what}"
    probe = partial(_mismatch, inputs, name)
    return guarded(impl, inputs.u.device, kernel, plain, call, partial(kind, inputs, name), probe)


def _mismatch(like: ScanInputs, kernels: str) -> str | None:
    """The probe: two packed sequences in two groups of channels, with what the call has."""
    probe = {
        **dict.fromkeys(("u", "delta", "z"), (1, TOKENS, 40)),
        "A": lambda A: -random_like(A, 40, A.shape[1]).abs(),
        **dict.fromkeys("BC", (1, TOKENS, 2, 0)),
        **dict.fromkeys(("D", "delta_bias"), (40,)),
        "initial_state": (2, 40, 0),
        "cu_seqlens": lambda u: torch.tensor([0, 50, TOKENS], device=u.device),
    }

    def run(impl: str) -> Callable:
        return lambda tensors: selective_scan(ScanInputs(**tensors), True, impl)

    probe_inputs = fresh(probe, like._asdict())
    return mismatch(run(f"{kernels}|eager"), run("eager"), probe_inputs)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, (_, for_backward, impl) = ScanInputs(*args[:10]), args[10:]
    u = inputs.u
    final = u.new_empty(inputs.sequences, *inputs.A.shape, dtype=checks.wide_dtype(u))
    return u.new_empty(u.shape), final, _states_of(impl, inputs, for_backward)


def _backward(*args: Any) -> list[Tensor]:
    inputs, impl = ScanInputs(*args[:10]), args[-1]
    call = inputs, *args[10:-1]
    if _has_no_states(inputs):
        grads = eager.selective_scan_backward(*call)
    else:
        plain = _backward_again if impl.startswith("sm90") else eager.selective_scan_backward
        grads = _guarded("backward", impl, inputs, plain, call)
    return [x for x in grads if x is not None]


def _backward_again(
    inputs: ScanInputs, _: Tensor, dy: Tensor | None, dfinal: Tensor | None, delta_softplus: bool
) -> list[Tensor | None]:
    """In place of sm90's, whose states are others."""
    states = eager.selective_scan_forward(inputs, delta_softplus)[2]
    return eager.selective_scan_backward(inputs, states, dy, dfinal, delta_softplus)


def _fake_backward(*args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in args[:9] if x is not None]


def _backward_at_sizes(args: tuple) -> Iterator[tuple]:
    for *tensors, _, dy, dfinal, delta_softplus, impl in _DY_AT_SIZES(args):
        states = _states_of(impl, ScanInputs(*tensors), True)
        yield (*tensors, states, dy, dfinal, delta_softplus, impl)


# u, delta, B, C, z; kernels of other sizes, compiled after a first call
_AT_SIZES = compile_ahead.AtSizes(tokens=(0, 1, 3, 4, 6), states=(8,), offsets=(9,))
_DY_AT_SIZES = _AT_SIZES._replace(tokens=(*_AT_SIZES.tokens, 11), states=(8, 12))
_TENSORS = schema_of(ScanInputs)
_call_forward = KernelOp(
    "selective_scan_forward",
    f"({_TENSORS}, bool delta_softplus, bool for_backward, str impl) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    replay=True,
    at_sizes=_AT_SIZES,
)
_call_backward = KernelOp(
    "selective_scan_backward",
    f"({_TENSORS}, Tensor states, Tensor? dy, Tensor? dfinal, bool delta_softplus, str impl) "
    "-> Tensor[]",
    _backward,
    _fake_backward,
    replay=True,
    at_sizes=_backward_at_sizes,
)

_SelectiveScan = autograd.autograd_function(
    _call_forward,
    _call_backward,
    results="y final states",
    wrt="u delta A B C D z delta_bias initial_state",
    for_backward=True,
)


def selective_scan(inputs: ScanInputs, delta_softplus: bool, impl: str) -> tuple[Tensor, Tensor]:
    """y [B, T, D] in u's dtype and the final state [S, D, N], with gradients."""
    if autograd.needs_autograd(*inputs[:9]):
        return _SelectiveScan.apply(*inputs, delta_softplus, impl)
    y, final, _ = _call_forward(
        *inputs, delta_softplus=delta_softplus, for_backward=False, impl=impl
    )
    return y, final


# numbers of a channel's state that registers have room for, on sm_90
MAX_N = 64


def unsupported_reason(inputs: ScanInputs) -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    if torch.version.hip:
        return "its kernels have not been compiled for AMD's GPUs"
    if inputs.u.shape[0] * inputs.u.shape[1] * inputs.A.shape[1] >= 2**31:
        return "it counts all tokens' B in 32 bits"
    return _wider(inputs) or triton_unsupported(inputs.u, "u") or _failure(inputs, "triton")


def _sm90_unsupported(inputs: ScanInputs) -> str | None:
    if reason := sm90_unsupported(inputs.u) or _wider(inputs):
        return reason
    if inputs.A.shape[1] > MAX_N:
        return f"a state of more than {MAX_N} numbers a channel has no room in registers"
    return _failure(inputs, "sm90")


def _wider(inputs: ScanInputs) -> str | None:
    for name, x in zip(ScanInputs._fields[:-1], inputs):
        if x is not None and x.dtype not in DTYPES:
            return f"it computes in float32, and {name} is {x.dtype}"
    return None


def _failure(inputs: ScanInputs, name: str) -> str | None:
    return guarded_launch.known_failure(lambda: kind(inputs, name), inputs.u.device)


CANDIDATES = (
    Candidate("sm90", "kernels for sm_90", _sm90_unsupported),
    Candidate("triton", "portable Triton kernels, on CUDA", unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
    Candidate("reference", "token by token, the oracle of the tests", by_name_only=True),
)
_PLANS = ValidationCache()


def run(
    inputs: ScanInputs,
    delta_softplus: bool,
    output_final_state: bool,
    impl: str | None,
    context: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] in u's dtype, and the final state [S, D, N] if asked for."""
    if context is not None:
        args = inputs, delta_softplus, output_final_state, impl, context
        return context.eagerly(_run_across_ranks, *args)
    plan = _plan(inputs, impl)
    cu_seqlens = inputs.cu_seqlens
    if cu_seqlens is not None and cu_seqlens.is_cuda:  # plain torch looks on the CPU
        expect_offsets("cu_seqlens", cu_seqlens, inputs.u.shape[1])
    if plan.impl == "reference":
        y, final = eager.selective_scan_reference(inputs, delta_softplus)
    else:
        y, final = selective_scan(inputs, delta_softplus, plan.impls)
    return y, final if output_final_state else None


def _plan(inputs: ScanInputs, impl: str | None) -> Selection:
    return _PLANS.get(signature(inputs, impl), lambda: _checked(inputs, impl), inputs)


def _run_across_ranks(
    inputs: ScanInputs,
    delta_softplus: bool,
    output_final_state: bool,
    impl: str | None,
    context: ContextParallel,
) -> tuple[Tensor, Tensor | None]:
    """As run, of this rank's tokens: its head starts from what the ranks before it come to."""
    context.expect_no_offsets(inputs.cu_seqlens, impl)
    u, A, initial_state = inputs.u, inputs.A, inputs.initial_state
    inputs = inputs._replace(initial_state=None, cu_seqlens=context.offsets_on(u.device))
    plan = _plan(inputs, impl)
    share, rows = context.share(u.shape[1]), 1 if inputs.cu_seqlens is not None else u.shape[0]
    if initial_state is not None:
        checks.expect_shape("initial_state", initial_state, (share.sequences * rows, *A.shape))
        checks.expect_floating({"initial_state": initial_state})
        checks.expect_one_device({"u": u, "initial_state": initial_state})
    y, after = _scan_of_rank(inputs, initial_state, share, delta_softplus, plan.impls)
    if not output_final_state:
        return y, None
    tensors = [x for x in inputs[:8] if x is not None]
    return y, share.whole_states(context_exchange.tie(after, *tensors), initial_state, rows)


def _scan_of_rank(
    inputs: ScanInputs, initial_state: Tensor | None, share: Share, delta_softplus: bool, impls: str
) -> tuple[Tensor, Tensor]:
    """y, and the states after this rank's pieces."""
    names = [name for name in ("u", "delta", "B", "C", "z") if getattr(inputs, name) is not None]

    def of(*args: Any) -> ScanInputs:
        *tensors, state, offsets = args
        tokens = dict(zip(names, tensors, strict=True))
        return inputs._replace(**tokens, initial_state=state, cu_seqlens=offsets)

    def change(*args: Any) -> tuple[Tensor, Tensor]:
        return _change_of(of(*args, None), delta_softplus, impls)

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        return selective_scan(of(*args), delta_softplus, impls)

    u, tensors = inputs.u, [getattr(inputs, name) for name in names]
    rows = 1 if share.packed else u.shape[0]
    like = u.new_empty(rows, *inputs.A.shape, dtype=checks.wide_dtype(u))
    others = [x for x in (inputs.A, inputs.D, inputs.delta_bias) if x is not None]
    return scan_of_rank(change, run, tensors, initial_state, like, share, inputs.cu_seqlens, others)


def _change_of(inputs: ScanInputs, delta_softplus: bool, impls: str) -> tuple[Tensor, Tensor]:
    """The state after a sequence's tokens, from zeros or the given one, and the product of their
    decays, [rows, D, N] each."""
    alone = inputs._replace(D=None, z=None)
    _, added = selective_scan(alone, delta_softplus, impls)
    steps = inputs.delta.to(added.dtype, memory_format=torch.contiguous_format)
    if inputs.delta_bias is not None:
        steps = steps + inputs.delta_bias.to(added.dtype)
    if delta_softplus:
        steps = torch.nn.functional.softplus(steps)
    return added, (steps.sum(1)[..., None] * inputs.A.to(added.dtype)).exp()


def _checked(inputs: ScanInputs, impl: str | None) -> Selection:
    """Looks at nothing but shapes, dtypes and devices."""
    check(inputs)
    return choose(CANDIDATES, inputs, impl, "selective_scan", inputs.u)


def check(inputs: ScanInputs) -> None:
    u, A, B, cu_seqlens = inputs.u, inputs.A, inputs.B, inputs.cu_seqlens
    checks.expect_rank("u", u, 3, "[B, T, D]")
    checks.expect_rank("A", A, 2, "[D, N]")
    checks.expect_rank("B", B, 4, "[B, T, G, N]")
    rows, tokens, channels = u.shape
    checks.expect_shape("A", A, (channels, A.shape[1]))
    checks.expect_shape("B", B, (rows, tokens, B.shape[2], A.shape[1]))
    checks.expect_shape("C", inputs.C, B.shape)
    checks.expect_multiple("channels of u", channels, "groups of B", B.shape[2])
    sequences = rows
    if cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, rows, tokens)
        sequences = cu_seqlens.shape[0] - 1
    shapes = {
        "delta": u.shape,
        "z": u.shape,
        "D": (channels,),
        "delta_bias": (channels,),
        "initial_state": (sequences, *A.shape),
    }
    for name, shape in shapes.items():
        x = getattr(inputs, name)
        if x is not None:
            checks.expect_shape(name, x, shape)
    tensors = inputs._asdict()
    checks.expect_one_device(tensors)
    del tensors["cu_seqlens"]
    checks.expect_floating(tensors)
