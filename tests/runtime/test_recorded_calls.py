"""Which calls can be recorded on a GPU and replayed, found out without one.

A call that cannot be is right, and takes the host several times as long.
"""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from slipstream.runtime.call_recorder import CallRecorder, use_recorder
from slipstream.runtime.custom_op import DirectCall
from slipstream.runtime.launch_cache import CachedKernel, FusedKernel, of_thread
from slipstream.tools.catalog import SAMPLES, Sample, Shape

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton's JIT")
SHAPES = {
    "whole": Shape(B=1, T=130, H=2, K=64, V=64, state=True),
    "packed": Shape(B=2, T=70, H=2, K=64, V=64, packed=True, grouped=True),
    "split": Shape(B=1, T=8192, H=1, K=64, V=64),
    "wide, split": Shape(B=1, T=4096, H=16, K=128, V=128),
    "many heads": Shape(B=1, T=4096, H=64, K=128, V=128),
}


def launch(self: CachedKernel, grid: tuple) -> Any:
    """As CachedKernel's own: a launch is kept if every argument has its place."""

    def run(*args: Any, **named: Any) -> None:
        given, options = self.in_order(args, named)
        kept = len(given) == len(self.kernel.params)
        if of_thread.recorder is not None:
            memory = [getattr(x, "base", x) for x in given]
            memory = [x for x in memory if isinstance(x, Tensor)]
            of_thread.recorder.launched(memory, (lambda pointers: None) if kept else None)
        FusedKernel(self.kernel)[grid](*given, **options)

    return run


class Recorder(CallRecorder):
    def _operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func.namespace != "prim":  # x.device, which fake tensors dispatch
            super()._operation(func, args, kwargs, out)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Calls of operators that are replayed, and whether each can be."""
    found: list[tuple[str, bool]] = []
    run = DirectCall._recorded

    def recorded(self: DirectCall, *args: Any) -> Any:
        if not self._replay:
            return run(self, *args)
        mine = [x.detach() if isinstance(x, Tensor) else x for x in args]
        taking = Recorder([x for x in mine if isinstance(x, Tensor)])
        with taking, use_recorder(taking):
            result = run(self, *mine)
        most = self._max_operations
        few = most is None or taking.operations <= max(most, taking.launches // 2)
        name = "?" if self._overload is None else self._overload.name()
        found.append((name, few and not taking.failed))
        return result

    monkeypatch.setattr(DirectCall, "_recorded", recorded)
    monkeypatch.setattr(CachedKernel, "__getitem__", launch)
    kept: dict[int, torch.UntypedStorage] = {}  # else another takes its place
    monkeypatch.setattr(
        torch.UntypedStorage,
        "data_ptr",  # of fake tensors all are 0
        lambda self: kept.setdefault(self._cdata, self)._cdata,
    )
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_can_be_replayed(calls: list[tuple[str, bool]], shape: str) -> None:
    from slipstream.compiler.trace import PlainTorch, trace

    seen = 0
    for sample in SAMPLES:
        for _ in range(2):  # tables that a first call makes are there for the second
            calls.clear()
            with suppress(PlainTorch, ValueError, NotImplementedError):
                trace(partial(_call, sample, SHAPES[shape]), "sm_90")  # some refuse the shape
        not_played = [name for name, can_be in calls if not can_be]
        assert not not_played, f"{sample.op}: {not_played}"
        seen += bool(calls)
    assert seen > 35


def _call(sample: Sample, shape: Shape, device: torch.device) -> Any:
    return sample.call(sample.inputs(shape, device))
