"""Several processes of one run, as torchrun starts them: the first writes files for all.

SIGINT and SIGTERM are noted, so that a run can stop where nothing is lost.
"""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_first_rank(call: Callable[[], T]) -> T:
    """Runs call() on the first rank; returns its result, or raises its error, on all ranks."""
    if not in_group():
        return call()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = call()
        except Exception as error:  # raised below, on every rank
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def summed(values: list[float], device: torch.device) -> list[float]:
    """Sums over the ranks."""
    if not in_group():
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def any_of(condition: bool, device: torch.device) -> bool:
    """Whether `condition` is true on any rank: others would wait for one that stops alone."""
    return summed([float(condition)], device)[0] > 0


def leave() -> None:
    """Ends the group once all ranks are here: a rank that exits earlier may abort the others."""
    if in_group():
        dist.barrier()
        dist.destroy_process_group()


def wait() -> None:
    """Waits until all ranks have called it."""
    if in_group():
        dist.barrier()


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """From `with` on, the first signal only sets `requested`; a second one acts as it always did.

    Made before anything slow happens, so that no moment of a run is unprotected.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        self._before = {s: signal.signal(s, self._request_stop) for s in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        signal.signal(number, self._before[self.requested])
