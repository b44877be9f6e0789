"""Registration of operators with torch.library, in one namespace.

An operator is `define`d with one implementation for CPU and CUDA and a fake one that only makes
outputs of the right shape; gradients are an autograd.Function outside of it. So torch.compile
(fullgraph=True), torch.export, fake tensors and dispatch modes all see one opaque node and never
look inside. A graph made by torch.export has the operator without the autograd.Function, so the
operator has its gradient as well (runtime/gradient.py). Plain calls on plain tensors go to the
implementation at once: the dispatcher would take as long as a launch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from slipstream.runtime import call_replay, gradient, parallel_compile
from slipstream.runtime.device_guard import device_of
from slipstream.runtime.token_ids import raise_pending

NAMESPACE = "slipstream"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# overload -> device -> implementation
_IMPLEMENTATIONS: dict[Any, dict[str, Callable]] = {}


def is_plain_call(x: Any) -> bool:
    """Whether nobody looks at what a call on x does: no tracer, mode, transform, subclass."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


# Set by compiler/trace.py, whose fake tensors go where real ones would.
TRACING = False


def is_fake(x: torch.Tensor) -> bool:
    """Whether x has no memory that a kernel could be given."""
    return type(x) not in _PLAIN and isinstance(x, FakeTensor) and not TRACING


def _without_autocast(impl: Callable, device: str) -> Callable:
    """Autocast would reach the torch operations inside; dtypes are decided before the boundary."""

    def call(*args: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return impl(*args)
        with torch.autocast(device, enabled=False):
            return impl(*args)

    return call


def register_op(name: str, schema: str, impl: Callable, fake: Callable) -> Any:
    """Registers slipstream::name and returns its overload.

    Args:
        schema: arguments and returns as torch.library wants them, "(Tensor x) -> Tensor".
        impl: called on CPU and CUDA tensors, below autograd; outputs must not alias inputs.
        fake: the same arguments, shapes only; its strides must be those of `impl`.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    inside = {device: _without_autocast(impl, device) for device in ("cpu", "cuda")}
    for device, call in inside.items():
        _LIBRARY.impl(name, call, device.upper())
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _LIBRARY.impl(name, gradient.autograd_kernel(overload), "Autograd", with_keyset=True)
    _IMPLEMENTATIONS[overload] = inside
    return overload


def bypass_dispatcher(
    overload: Any,
    *,
    replays: bool = False,
    follows: Callable[[tuple, Any], object] | None = None,
) -> Callable:
    """Calls the implementation where nobody is looking, else the operator. For callers above whom
    autograd is dealt with, and whose first argument is a tensor.

    Args:
        replays: what the implementation does on a GPU follows from what replay.key_of looks at.
        follows: given the arguments and the results, calls what such a call is followed by, its
            gradient, so that the kernels of both are compiled at once.
    """
    inside = _IMPLEMENTATIONS[overload]

    def call(*args: Any) -> Any:
        # what has no implementation of its own, such as meta, goes by the dispatcher
        device_impl = inside.get(args[0].device.type) if is_plain_call(args[0]) else None
        return overload(*args) if device_impl is None else device_impl(*args)

    return _with_replay(call, inside["cuda"], follows) if replays else call


def with_replay(impl: Callable, follows: Callable[[tuple, Any], object] | None = None) -> Callable:
    """shortcut(..., replays=True) of what is no operator, for calls of CUDA tensors alone that
    nobody looks at."""
    call = _without_autocast(impl, "cuda")
    return _with_replay(call, call, follows)


def _with_replay(
    call: Callable, inside: Callable, follows: Callable[[tuple, Any], object] | None = None
) -> Callable:
    # key -> True where the next call is recorded, then the record, or False if there is none
    known: dict[tuple, Any] = {}
    # of calls that take the same kernels, but for what a short or long sequence adds
    kinds: set[tuple] = set()

    def first(*args: Any) -> None:
        results = inside(*args)
        if follows is not None:
            follows(args, results)

    def again(*args: Any) -> Any:
        x = args[0]
        if TRACING or not call_replay.is_enabled(x) or not is_plain_call(x):
            return call(*args)
        key = call_replay.call_key(args)
        if key is None:
            return call(*args)
        found = known.get(key)
        if found is None:
            if len(known) >= call_replay.MAX_KEYS:
                known.clear()
            known[key] = True
            kind = call_replay.compile_class_key(args)
            if kind not in kinds:
                kinds.add(kind)
                parallel_compile.compile_kernels(first, args)
        if not found:
            return call(*args)
        if found is True:
            result, record = call_replay.record(inside, args)
            known[key] = record or False
            return result
        if found.operations and torch.is_autocast_enabled(x.device.type):
            return call(*args)
        raise_pending()
        with device_of(x.device):
            return found.play(args)

    return again
