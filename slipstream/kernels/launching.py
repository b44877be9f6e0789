"""What the launches of the norms, losses, convolutions and pointwise kernels share."""

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.core.plan import Candidate, choose

HAVE_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs the kernels on a CPU, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NOWHERE = nullcontext()


_NAMED = (
    Candidate("triton", "portable Triton kernels, on CUDA", lambda call: _refuses(*call)),
    Candidate("eager", "plain torch, on any device"),
    Candidate("reference", "the formula, the oracle of the tests"),
)


def choose_impl(
    impl: str | None, x: Tensor, refuses: Callable[..., str | None], *given: Any
) -> str:
    """One of eager, triton and reference.

    None is Triton on CUDA where it takes the call, else eager.

    Args:
        x: decides about device and dtype.
        refuses: given x and `given`, why the family's Triton kernels can't take the call, or None
            if they can.
    """
    if impl is not None:
        return choose(_NAMED, (x, refuses, given), impl).impl
    return "triton" if x.is_cuda and _refuses(x, refuses, given) is None else "eager"


def _refuses(x: Tensor, refuses: Callable[..., str | None], given: tuple) -> str | None:
    if not HAVE_TRITON:
        return "Triton is not installed"
    if not (x.is_cuda or INTERPRETED):
        return f"it runs on CUDA devices, and the tensors are on {x.device.type}"
    if x.dtype not in DTYPES:
        return f"it computes in float32, and the input is {x.dtype}"
    return refuses(x, *given)


def on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOWHERE
    return torch.cuda.device(device)


@cache
def processors(index: int) -> int:
    """Multiprocessors of a CUDA device; two for -1, the CPU, where the interpreter runs."""
    return 2 if index < 0 else torch.cuda.get_device_properties(index).multi_processor_count


@cache
def shared_memory(index: int) -> int:
    """Bytes of it that a program may use."""
    if index < 0:
        return 1 << 16
    # AMD's have no more than the rest of them
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", 1 << 16)
