"""Facts about tensors, devices and Triton for the launches and plans of all families."""

import importlib.util
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from slipstream.compiler import arch


def _release() -> tuple[int, ...]:
    """Triton's, as (3, 6), out of its source: importing it takes half a second."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return ()
    found = re.search(r"__version__ = ['\"](\d+)\.(\d+)", Path(spec.origin).read_text())
    return () if found is None else tuple(map(int, found.groups()))


RELEASE = _release()
HAVE_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs the kernels on a CPU, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN = (Tensor, torch.nn.Parameter)
# Options of launches whose kernels spill under Triton 3.9: LLVM orders instructions for fewer
# registers. The delta rule's backward then takes 1.13 of 3.6.0's time for 1.40 on an H100. Earlier
# releases do not know it.
FEWER_REGISTERS = {"sched4reg": True} if RELEASE == (3, 9) and not INTERPRETED else {}
# Programs of a launch on axes 1 and 2 of its grid: CUDA takes 65,535, and a multiple of 16 rows
# leaves addresses as even as they are.
GRID_ROWS = 65_520
# Set by compiler/trace.py, whose fake tensors go where real ones would.
TRACING = False
_NOWHERE = nullcontext()
_THREAD = threading.local()


def is_plain_call(x: Any) -> bool:
    """Whether a call on x is plain: no tracer, mode, transform or subclass sees what it does."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def is_fake(x: Tensor) -> bool:
    """Whether x has no memory that a kernel could be given."""
    return type(x) not in _PLAIN and isinstance(x, FakeTensor) and not TRACING


def is_current(device: torch.device) -> bool:
    """Whether this thread's launches go to the device as they are."""
    if not hasattr(_THREAD, "bound"):
        _bind(device)
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def device_of(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    return _NOWHERE if is_current(device) else torch.cuda.device(device)


def row_parts(rows: int, *tensors: Tensor | None) -> Iterator[list[Any]]:
    """Views of the tensors, whose first axis is rows, of GRID_ROWS at a time. A recorded call that
    asks for them is of its number of rows alone."""
    for i in range(0, rows, GRID_ROWS):
        yield [None if x is None else x[i : i + GRID_ROWS] for x in tensors]


def _bind(device: torch.device) -> None:
    """A thread of autograd has no CUDA context before it asks the runtime for something, and the
    driver, which makes the descriptors for TMA, wants one."""
    _THREAD.bound = True
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.mem_get_info(device)


def triton_unsupported(x: Tensor, name: str) -> str | None:
    """Why no Triton kernel can take a call on x, or None."""
    if not HAVE_TRITON:
        return "Triton is not installed"
    if not (x.is_cuda or INTERPRETED):
        return f"it runs on CUDA devices, and the tensors are on {x.device.type}"
    if x.dtype not in DTYPES:
        return f"it computes in float32, and {name} is {x.dtype}"
    return None


def sm90_unsupported(x: Tensor) -> str | None:
    """Why no sm_90 kernel can take a call on x, or None."""
    if not HAVE_TRITON:
        return "Triton is not installed"
    if INTERPRETED or not x.is_cuda:
        return f"it runs on sm_90, and the tensors are on {x.device.type}"
    if torch.version.hip or torch.cuda.get_device_capability(x.device) != (9, 0):
        return "it is written for sm_90"
    first, last = arch.GLUON_RELEASES
    if not first <= RELEASE <= last:
        found, first, last = (".".join(map(str, x)) for x in (RELEASE, first, last))
        reason = f"its language, Gluon, is not that of Triton {found} (it is of {first} to {last})"
        _warn(f"the kernels for sm_90 are not used, slower portable ones run: {reason}")
        return reason
    return None


@cache
def _warn(text: str) -> None:
    """Warns once a process."""
    from slipstream.compiler.compiler_state import KernelDisabledWarning

    warnings.warn(text, KernelDisabledWarning, stacklevel=2)


def fp32_dot_precision() -> str:
    """The precision of float32 products: the fastest that is right to float32 on this backend."""
    return "ieee" if INTERPRETED or torch.version.hip else "tf32x3"


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel may be there before the one that it waits for has ended."""
    if device.type != "cuda" or torch.version.hip or INTERPRETED:
        return False
    return _capability(device.index) >= (9, 0)


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def sm_count(index: int) -> int:
    """Multiprocessors of a CUDA device; two for -1, the CPU, where the interpreter runs."""
    return 2 if index < 0 else torch.cuda.get_device_properties(index).multi_processor_count


@cache
def shared_memory_bytes(index: int) -> int:
    """Bytes of it that a program may use."""
    if index < 0:
        return 1 << 16
    # AMD's have no more than the rest of them
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", 1 << 16)
