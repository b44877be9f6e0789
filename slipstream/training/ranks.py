"""Several processes of one run, as torchrun starts them: the first writes files for all."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if in_group() else 0


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


# Once one rank of a machine has exited, torchrun ends the others within this time. So the first
# rank exits first: otherwise it might be ended before it has said why.
SECONDS_FOR_FIRST = 10.0

# What the communication libraries' errors say where another process is gone.
_GONE = ("closed by peer", "reset by peer", "Socket closed", "remote process exited", "Broken pipe")


@contextmanager
def reported_once() -> Iterator[None]:
    """For errors that every rank finds alike, such as a wrong config: the first of each machine
    raises at once, and torchrun then ends the others. A rank that is not ended raises too: it may
    be the only one with the error, as where a file is missing for it alone."""
    try:
        yield
    except (ValueError, TypeError, OSError, NotImplementedError):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            with _ended_by_sigterm():
                time.sleep(SECONDS_FOR_FIRST)
        raise


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process at once, also where a run has a handler that would finish a step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: set by no Python code


@contextmanager
def others_needed() -> Iterator[None]:
    """For code that needs all ranks.

    Raises:
        OSError: another process of the run has ended. It takes the place of the communication
            library's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if not in_group() or not any(words in str(error) for words in _GONE):
            raise
        raise OSError(
            f"rank {dist.get_rank()}: another process of the run has ended, and the others cannot "
            "go on without it; the same command continues from the newest checkpoint"
        ) from error


def leave() -> None:
    """Ends the group once all ranks are here: a rank that exits earlier may abort the others."""
    if in_group():
        dist.barrier()
        dist.destroy_process_group()


def wait() -> None:
    """Waits until all ranks have called it."""
    if in_group():
        dist.barrier()
