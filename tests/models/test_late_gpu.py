"""The host waits for what a GPU that is as late as can be has written, without a GPU."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.models.generation import Flag
from slipstream.models.greedy import AHEAD, Greedy

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
