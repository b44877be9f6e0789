"""The host waits for what a GPU that is as late as can be has written, without a GPU."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.models.generation import Flag
from slipstream.models.greedy import AHEAD, Greedy
from slipstream.tools import doctor_bench

ON_DEVICE = torch.tensor(True)


class LateEvent:
    """What the device has as it is recorded reaches the host as that waits, and no earlier."""

    def __init__(self, host: Tensor | None = None, **options: Any) -> None:
        self.host = host

    def record(self) -> None:
        self.due = ON_DEVICE.clone()

    def synchronize(self) -> None:
        assert self.host is not None
        self.host.copy_(self.due)


def test_end_of_all_sequences_is_seen_steps_later() -> None:
    greedy = Greedy.like(torch.zeros(1, 1).long(), None, 8, torch.tensor([5]))
    greedy.events = [LateEvent(greedy.done) for _ in range(AHEAD)]
    assert [greedy.ended(i) for i in range(AHEAD + 1)] == [False] * AHEAD + [True]


def test_flag_is_read_after_its_copy() -> None:
    flag: Any = Flag(torch.device("cpu"), True)
    flag.copied = LateEvent(flag.value)
    assert not flag.set(torch.tensor([False, False]))
    flag.value.zero_()  # nothing of it is there yet
    assert flag.raised()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Flag(torch.device("cuda"), True),
        lambda: Greedy.like(
            mock.MagicMock(shape=(2, 1), is_cuda=True, device="cpu"), None, 8, None
        ),
    ],
)
def test_flags_of_a_gpu_are_in_pinned_memory(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into other memory a copy waits for all that the GPU was given."""
    pinned = mock.Mock()
    monkeypatch.setattr(torch, "zeros", pinned)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    make()
    assert pinned.call_args.kwargs["pin_memory"] is True


def test_times_are_read_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    class Timer(LateEvent):
        def elapsed_time(self, end: Any) -> float:
            return float(waits.pop())

    monkeypatch.setattr(torch.cuda, "Event", Timer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.zeros(1))
    call = mock.Mock()
    assert doctor_bench.milliseconds(call, torch.device("cuda")) == 1.0
    assert call.call_count > doctor_bench.RUNS


def test_times_of_a_cpu_are_milliseconds() -> None:
    assert 2 <= doctor_bench.milliseconds(lambda: time.sleep(0.002), torch.device("cpu")) < 1000
