"""Calls that are recorded and played on a CPU, by a launch in Python."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.runtime import backends, call_replay, custom_op, parallel_compile
from slipstream.runtime.backends import HAVE_TRITON
from slipstream.runtime.launch_cache import of_thread
from slipstream.runtime.symbolic_sizes import value_of

if HAVE_TRITON:
    from triton import knobs


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_replay, "is_enabled", lambda x: True)
    monkeypatch.setattr(backends, "INTERPRETED", True)  # kernels run there
    monkeypatch.setattr(parallel_compile, "compile_kernels", lambda call, args: None)


class Toy:
    """Calls of `body`, and how many of them were not played."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.calls = 0

        def counted(*args: Any) -> Any:
            self.calls += 1
            return body(*args)

        self.run = custom_op.DirectCall(counted)


def double(source: int, target: int, count: int) -> None:
    """target = 2 source, by address as a kernel has it."""
    xs, ys = ((ctypes.c_float * count).from_address(p) for p in (source, target))
    for i in range(count):
        ys[i] = 2 * xs[i]


def launch(x: Tensor, y: Tensor) -> None:
    """y = 2 x"""
    n = x.numel()
    if of_thread.recorder is not None:
        of_thread.recorder.launched(double, (x, y, n))
    with torch._C.DisableTorchFunction():
        knobs.runtime.launch_enter_hook(None)
        double(x.data_ptr(), y.data_ptr(), value_of(n))
