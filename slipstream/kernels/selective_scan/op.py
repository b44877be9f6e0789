"""The selective scan as torch.library operators, and its gradient.

slipstream::_selective_scan_forward gives y, the final state and the states that backward reads;
slipstream::_selective_scan_backward the gradients of the tensors it was given. `impl` names the
implementation, or several to try in order.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.selective_scan.eager import selective_scan_backward, selective_scan_forward
from slipstream.kernels.selective_scan.inputs import (
    SM90_CHUNK,
    ScanInputs,
    compute_dtype,
    empty_states,
)
from slipstream.runtime import autograd, gradient, numeric_probe, size_ladder
from slipstream.runtime.custom_op import KernelOp, schema_of
from slipstream.runtime.kernel_pair import guarded


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, (delta_softplus, for_backward, impl) = ScanInputs(*args[:10]), args[10:]
    if _has_no_states(inputs):
        return _without_states(inputs, delta_softplus, for_backward, impl)
    call = inputs, delta_softplus, for_backward
    return _guarded("forward", impl, inputs, partial(_plain_forward, impl), call)


def _plain_forward(
    impl: str, inputs: ScanInputs, delta_softplus: bool, for_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, final, states = selective_scan_forward(inputs, delta_softplus)
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
        return (*selective_scan_forward(inputs, delta_softplus)[:2], states)
    state = inputs.initial_state
    return y, final.zero_() if state is None else final.copy_(state), states


def kind(inputs: ScanInputs, name: str = "triton") -> KernelKey:
    """The calls that share a verdict on the kernels."""
    dtypes = (None if x is None else x.dtype for x in inputs[:9])
    return (f"selective_scan.{name}", inputs.A.shape[1], *dtypes)


def _guarded(what: str, impl: str, inputs: ScanInputs, plain: Callable, call: tuple) -> Any:
    """The launch of that name of the first of the implementations, or plain torch."""
    name = impl.partition("|")[0]
    kernel = f"slipstream.kernels.selective_scan.{name}.launch:{what}"
    probe = partial(_mismatch, inputs, name)
    return guarded(impl, inputs.u.device, kernel, plain, call, partial(kind, inputs, name), probe)


def _mismatch(like: ScanInputs, kernels: str) -> str | None:
    """The probe: two packed sequences in two groups of channels, with what the call has."""
    device, N = like.u.device, like.A.shape[1]
    T, D, G, cuts = 150, 40, 2, [0, 50, 150]
    shapes = {
        "u": (1, T, D),
        "delta": (1, T, D),
        "A": (D, N),
        "B": (1, T, G, N),
        "C": (1, T, G, N),
        "D": (D,),
        "z": (1, T, D),
        "delta_bias": (D,),
        "initial_state": (2, D, N),
    }
    probe_inputs: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        x = getattr(like, name)
        if x is not None:
            values = torch.randn(shape, device=device)
            probe_inputs[name] = (-values.abs() if name == "A" else values).to(x.dtype)
    cu_seqlens = torch.tensor(cuts, device=device)

    def run(impl: str) -> Callable:
        def call(tensors: dict[str, Tensor]) -> Any:
            inputs = like._replace(cu_seqlens=cu_seqlens, **tensors)
            return selective_scan(inputs, True, impl)

        return call

    return numeric_probe.mismatch(run(f"{kernels}|eager"), run("eager"), probe_inputs)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, (_, for_backward, impl) = ScanInputs(*args[:10]), args[10:]
    u = inputs.u
    final = u.new_empty(inputs.sequences, *inputs.A.shape, dtype=compute_dtype(u))
    return u.new_empty(u.shape), final, _states_of(impl, inputs, for_backward)


def _backward(*args: Any) -> list[Tensor]:
    inputs, impl = ScanInputs(*args[:10]), args[-1]
    call = inputs, *args[10:-1]
    if _has_no_states(inputs):
        grads = selective_scan_backward(*call)
    else:
        plain = _backward_again if impl.startswith("sm90") else selective_scan_backward
        grads = _guarded("backward", impl, inputs, plain, call)
    return [x for x in grads if x is not None]


def _backward_again(
    inputs: ScanInputs, _: Tensor, dy: Tensor | None, dfinal: Tensor | None, delta_softplus: bool
) -> list[Tensor | None]:
    """In place of sm90's, whose states are others."""
    states = selective_scan_forward(inputs, delta_softplus)[2]
    return selective_scan_backward(inputs, states, dy, dfinal, delta_softplus)


def _fake_backward(*args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in args[:9] if x is not None]


def _backward_at_sizes(args: tuple) -> Iterator[tuple]:
    for *tensors, _, dy, dfinal, delta_softplus, impl in _DY_AT_SIZES(args):
        states = _states_of(impl, ScanInputs(*tensors), True)
        yield (*tensors, states, dy, dfinal, delta_softplus, impl)


# u, delta, B, C, z; kernels of other sizes, compiled after a first call
_AT_SIZES = size_ladder.AtSizes(tokens=(0, 1, 3, 4, 6), states=(8,), offsets=(9,))
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


_SelectiveScan = gradient.autograd_function(
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
