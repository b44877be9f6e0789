"""Which calls can be recorded on a GPU and replayed, found out without one. A call that cannot be
is right, and takes the host several times as long."""

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from slipstream.runtime.call_recorder import CallRecorder
from slipstream.runtime.call_replay import RecordedCall, call_key
from slipstream.runtime.custom_op import DirectCall
from slipstream.runtime.launch_cache import CachedKernel, FusedKernel, of_thread
from slipstream.runtime.recording import use_recorder
from slipstream.tools.catalog import SAMPLES, Sample, Shape
from tests.support import wants

pytestmark = wants.compiler
SHAPES = {
    "whole": Shape(B=1, T=130, H=2, K=64, V=64, state=True),
    "packed": Shape(B=2, T=70, H=2, K=64, V=64, packed=True, grouped=True),
    "split": Shape(B=1, T=8192, H=1, K=64, V=64),
    "wide, split": Shape(B=1, T=4096, H=16, K=128, V=128),
    "many heads": Shape(B=1, T=4096, H=64, K=128, V=128),
}

MAPS = mock.Mock(known={})


def record_launch(self: CachedKernel, recorder: Any, grid: tuple, *args: Any, **named: Any) -> None:
    """As CachedKernel's own, whose kernel is not launched."""
    given, named = self.in_order(args, named)
    named = {name: recorder.pinned(x) for name, x in named.items()}
    places = [*zip(given, self.kernel.params)]
    given = tuple(recorder.pinned(x) if p.is_constexpr else x for x, p in places)
    with torch._C.DisableTorchFunction():
        plain, plain_grid = map(recorder.plain, (given, grid))
        FusedKernel(self.kernel)[plain_grid](*plain, **named)
    for x, param in places:
        recorder.guard_number(x, not (param.is_constexpr or param.do_not_specialize))
    is_whole = len(given) == len(self.kernel.params)
    recorder.launched(print if is_whole else None, given, maps=[MAPS] * len(given))


class Recorded(NamedTuple):
    """A call: its operator, why it cannot be replayed, and the guards of its record."""

    name: str
    failed: str | None
    guards: list[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Calls of operators that are replayed."""
    found: list[Recorded] = []
    run = DirectCall._recorded

    def recorded(self: DirectCall, *args: Any) -> Any:
        if not self._replay or of_thread.recorder is not None:
            return run(self, *args)
        taking = CallRecorder(args)
        with taking, use_recorder(taking):
            result = run(self, *taking.args)
        taking.close()
        most = self._max_operations
        few = most is None or taking.operations <= max(most, taking.launches // 2)
        name = "?" if self._overload is None else self._overload.name()
        failed = taking.failed or (None if few else "operations")
        if failed is None:
            RecordedCall(taking, taking.result(result))
        guards = [x.text for x in taking.lines if x.kind == "guard"]
        found.append(Recorded(name, failed, guards))
        return result

    monkeypatch.setattr(DirectCall, "_recorded", recorded)
    monkeypatch.setattr(CachedKernel, "_record", record_launch)
    kept: dict[int, torch.UntypedStorage] = {}  # else another takes its place
    monkeypatch.setattr(
        torch.UntypedStorage,
        "data_ptr",  # of fake tensors all are 0
        lambda self: kept.setdefault(self._cdata, self)._cdata,
    )
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_can_be_replayed(calls: list[Recorded], shape: str) -> None:
    from slipstream.compiler.trace import PlainTorch, trace

    seen = 0
    # what long sequences and many heads change is the linear family's chunks
    chunked = SHAPES[shape].T > 1000
    for sample in [x for x in SAMPLES if not chunked or x.name.startswith("chunk_")]:
        for _ in range(2):
            calls.clear()
            with suppress(PlainTorch, ValueError, NotImplementedError):
                trace(partial(_call, sample, SHAPES[shape]), "sm_90")  # some refuse the shape
            not_played = [(x.name, x.failed) for x in calls if x.failed]
            if not not_played:  # else once more: tables that a first call makes are there then
                break
        assert not not_played, f"{sample.op}: {not_played}"
        seen += bool(calls)
    assert seen > (20 if chunked else 35)


def _call(sample: Sample, shape: Shape, device: torch.device) -> Any:
    return sample.call(sample.inputs(shape, device, blank=True))


def test_keys_are_of_kinds_and_not_of_sizes() -> None:
    x = torch.randn(8, 4)
    key = call_key((x, None, 3, 0.5, True))[0]
    same = [(x[:4], None, 64, 0.5, True), (torch.nn.Parameter(x), None, 3, 0.5, True)]
    assert all(call_key(args)[0] == key for args in same)
    others = [(x.T, None, 3, 0.5, True), (x[0], None, 3, 0.5, True), (x, x, 3, 0.5, True)]
    others += [(x, None, 3, 1.0, True), (x, None, 3, 0.5, 1), (x, None, 3.0, 0.5, True)]
    others += [(x.view(-1)[1:].view(31, 1), None, 3, 0.5, True), (x.half(), None, 3, 0.5, True)]
    assert all(call_key(args)[0] != key for args in others)
    assert call_key((x, x.as_subclass(type("Own", (torch.Tensor,), {}))))[0] is None
