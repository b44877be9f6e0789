"""Which kernels a call compiles on a GPU, found out without one.

    trace(lambda device: ops.chunk_gla(...tensors on device...), "sm_90") -> list of aot.Job

The call runs on fake tensors of a device that is not there, backward too; each launch gets as far
as Triton's JIT asking its cache, which is where it is written down and stopped. So nothing has to
say twice which kernels and tiles a call takes. For tools, alone in their process: while it traces,
some attributes of torch and Triton are replaced.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.compiler import aot, triton_driver
from slipstream.compiler.arch import Arch, named
from slipstream.compiler.compiler_state import CompilerState, state_for
from slipstream.runtime import backends, compile_ahead, custom_op, guarded_launch

# Devices no machine has, one for each architecture and release: launches remember tiles by device.
_FIRST_DEVICE = 64
_DEVICES: dict[tuple[str, str], int] = {}

# Implementations that compile nothing: what `impl` of an operator calls them.
PLAIN = ("eager", "reference")


class PlainTorch(Exception):
    """The call takes an implementation in plain torch."""


def trace(
    call: Callable[[torch.device], Any],
    arch: str,
    backward: bool = True,
    remembers: bool = False,
    compilers: Mapping[str, str] | None = None,
    any_size: bool = False,
) -> list[aot.Job]:
    """The compilations of call(device) and, if asked for, of its gradients; each once.

    Args:
        remembers: what guarded compilation has learnt here counts.
        compilers: others than those that are here, as toolchain.versions names them.
        any_size: also those that the operators called say they compile in other sizes.

    Raises whatever the call raises for such tensors, PlainTorch where it compiles nothing.
    """
    jobs: dict[str, aot.Job] = {}
    state = state_for(arch, remembers, compilers)
    called: list[tuple[custom_op.DirectCall, compile_ahead.InOtherSizes, tuple]] = []
    noting = mock.patch.object(custom_op.DirectCall, "__call__", _noting(called))
    with _pretending(named(arch), jobs, state) as (device, functions):
        with noting if any_size else nullcontext(), torch.set_grad_enabled(backward):
            call(device)
        with noting if any_size else nullcontext(), torch.no_grad():
            for function, ctx, out in reversed(functions):
                outs = out if isinstance(out, tuple) else (out,)
                grads = [_gradient(x) for x in outs]
                function.backward(ctx, *grads)
                if len([x for x in grads if x is not None]) > 1 and not ctx.materializes:
                    # as most calls do, which use the first result alone
                    function.backward(ctx, grads[0], *[None] * (len(grads) - 1))
        with torch.no_grad():
            for op, at_sizes, args in called:
                for other in at_sizes(args):
                    op._compile(*other)
    return list(jobs.values())


def _noting(
    called: list[tuple[custom_op.DirectCall, compile_ahead.InOtherSizes, tuple]],
) -> Callable[..., Any]:
    """DirectCall.__call__, which adds the calls of those that have other sizes to `called`."""
    plain = custom_op.DirectCall.__call__

    def call(self: custom_op.DirectCall, *args: Any, **named: Any) -> Any:
        if self.at_sizes is not None:
            called.append((self, self.at_sizes, (*args, *named.values())))
        return plain(self, *args, **named)

    return call


def _gradient(x: Any) -> Tensor | None:
    floating = isinstance(x, Tensor) and x.is_floating_point()
    return torch.empty_like(x) if floating else None


def _getitem(x: Tensor, index: Any) -> Tensor:
    """x[index]; torch's own asks for the device's guard, which a build without CUDA lacks."""
    index = index if isinstance(index, tuple) else (index,)
    gathered: list[Tensor | None] = []
    dim = 0
    for place, i in enumerate(index):
        if i is None:
            x = x.unsqueeze(dim)
        elif i is Ellipsis:
            dim = x.dim() - sum(j is not None for j in index[place + 1 :])
            continue
        elif isinstance(i, Tensor):
            gathered += [None] * (dim - len(gathered)) + [i]
        elif isinstance(i, slice):
            x = torch.ops.aten.slice(x, dim, i.start, i.stop, i.step or 1)
        else:
            x = x.select(dim, i)
            continue
        dim += 1
    return torch.ops.aten.index(x, gathered) if gathered else x


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """x.contiguous(), of which torch's own asks for that guard too."""
    if x.is_contiguous(memory_format=memory_format):
        return x
    return x.clone(memory_format=memory_format)


class _Context:
    """Tensors that an autograd.Function saves between forward and backward."""

    saved_tensors: tuple = ()
    # whether gradients that there are not come in as zeros
    materializes = True

    def __init__(self, args: tuple) -> None:
        self.needs_input_grad = tuple(isinstance(x, Tensor) and x.is_floating_point() for x in args)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass


class _Implementations(TorchDispatchMode):
    """Our operators run what they run on CUDA, where fake tensors would only make shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == custom_op.NAMESPACE:
            if any(x in PLAIN for x in args if isinstance(x, str)):
                raise PlainTorch
            return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def _pretending(
    arch: Arch, jobs: dict[str, aot.Job], state: CompilerState
) -> Iterator[tuple[torch.device, list]]:
    from triton.runtime import driver

    functions: list[tuple[Any, _Context, Any]] = []
    capability = arch.capability

    def apply(function: Any, *args: Any) -> Any:
        ctx = _Context(args)
        with torch.no_grad():
            if function.setup_context is torch.autograd.Function.setup_context:
                out = function.forward(ctx, *args)
            else:
                out = function.forward(*args)
                function.setup_context(ctx, args, out)
        if torch.is_grad_enabled():
            functions.append((function, ctx, out))
        return out

    def record_job(*, fn: Any, compile: dict, **_: Any) -> bool:
        job = aot.job_of(fn.module, fn.name, compile, arch.name)
        jobs.setdefault(job.key, job)
        return True  # nothing to launch

    index = _DEVICES.setdefault((arch.name, state.triton), _FIRST_DEVICE + len(_DEVICES))
    with ExitStack() as stack:
        enter = stack.enter_context
        for target, name, value in (
            (torch.autograd.Function, "apply", classmethod(apply)),
            # no autograd graph: a build of torch without CUDA cannot make it
            (FakeTensor, "requires_grad", property(_wants_gradient)),
            (FakeTensor, "detach", _detach),
            (fake_tensor, "init_gpu_context", lambda device: None),
            (FakeTensor, "data_ptr", lambda x: 0),
            (FakeTensor, "__getitem__", _getitem),
            (FakeTensor, "contiguous", _contiguous),
            (FakeTensor, "__invert__", lambda x: torch.bitwise_not(x)),
            (FakeTensor, "__setitem__", lambda x, index, value: None),
            (FakeTensor, "copy_", lambda x, y, *more: x),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device", lambda device: nullcontext()),
            (torch.cuda, "current_device", lambda: index),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.cuda, "get_device_properties", lambda device=None: _properties(arch)),
            (torch.version, "hip", None if arch.warp == 32 else "6.4"),
            (
                guarded_launch,
                "compiler_state",
                lambda device: state if device.type == "cuda" else None,
            ),
            (backends, "TRACING", True),
            (driver, "_active" if hasattr(driver, "_active") else "active", _Driver(arch.name)),
            (*triton_driver.compile_hook(), record_job),
        ):
            enter(mock.patch.object(target, name, value, create=True))
        fake = enter(FakeTensorMode())
        fake.cache_enabled = False  # it would give outputs the gradients they pretend to want
        enter(_Implementations())
        yield torch.device("cuda", index), functions


def _wants_gradient(x: Tensor) -> bool:
    return x.is_floating_point() and not hasattr(x, "detached")


def _detach(x: Tensor) -> Tensor:
    y: Any = Tensor.detach(x)
    y.detached = True
    return y


def _properties(arch: Arch) -> Any:
    major, minor = arch.capability
    return SimpleNamespace(
        name=arch.name,
        major=major,
        minor=minor,
        multi_processor_count=arch.units,
        shared_memory_per_block_optin=arch.shared,
        warp_size=arch.warp,
        L2_cache_size=40 << 20,
        total_memory=80 << 30,
    )


class _Driver:
    """The driver's answers that the JIT needs before it compiles."""

    def __init__(self, arch: str) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        return aot.gpu_target(self._arch)

    def get_current_device(self) -> str:
        return f"traced {self._arch}"

    def get_current_stream(self, device: Any) -> int:
        return 0
