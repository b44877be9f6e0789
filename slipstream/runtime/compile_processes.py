"""Kernels compiled in forked processes, whose results the parent finds in Triton's cache.

A kernel's first form is made by Python out of its source, and so is a part of each later step.
Threads take turns for that, processes do not. A child is forked from the process that wants the
kernels: it has their modules, sources and options already, does nothing but compile, and never
touches the GPU. What no child has finished, since it died or hung, is left to the parent.

    SLIPSTREAM_FORK   on, or off
"""

import contextlib
import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

ENABLED = os.environ.get("SLIPSTREAM_FORK", "on") != "off"
# Below so many processors threads do as well, and below so many kernels.
LEAST_PROCESSORS, LEAST_KERNELS = 4, 3
MAX_CHILDREN = 16
# Seconds without news of any child, after which the parent compiles what is left.
PATIENCE = 60.0


def begin(work: Sequence[Callable[[], object]]) -> "Children | None":
    """Children that do `work`, the first first; None where there are to be none.

    Ranks of a distributed run share their kernels by locks in Triton's cache instead, as memory
    that is registered with a network card is not to be forked.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if not ENABLED or not LEAST_KERNELS <= len(work) < 256 or processors < LEAST_PROCESSORS:
        return None
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return None
    try:
        return Children(work, min(len(work), processors - 1, MAX_CHILDREN))
    except OSError:  # no more files may be open
        return None


class Children:
    """Each takes the number of a task out of one pipe, and puts it into another when it is done."""

    def __init__(self, work: Sequence[Callable[[], object]], count: int) -> None:
        self._left = len(work)
        self._pids: list[int] = []
        todo, numbers = os.pipe()
        self._done, done = os.pipe()
        os.write(numbers, bytes(range(len(work))))
        os.close(numbers)
        with contextlib.suppress(OSError):  # no memory, or too many processes
            for _ in range(count):
                pid = _fork()
                if pid == 0:
                    _serve(work, todo, done)
                self._pids.append(pid)
        os.close(todo)
        os.close(done)

    def finished(self) -> Iterator[int]:
        """The tasks that children have done, as they come. All children are gone after it."""
        try:
            while self._left and select.select([self._done], [], [], PATIENCE)[0]:
                numbers = os.read(self._done, 256)
                if not numbers:
                    break
                self._left -= len(numbers)
                yield from numbers
        finally:
            os.close(self._done)
            for pid in self._pids:
                # one that someone else has waited for is no child any more
                with contextlib.suppress(ChildProcessError, ProcessLookupError):
                    if self._left and os.waitpid(pid, os.WNOHANG)[0] == 0:
                        os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns where there are other threads: a lock that one of them holds stays locked in
        # the child. A child that waits for one is given up.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(work: Sequence[Callable[[], object]], todo: int, done: int) -> None:
    """The child, which ends here whatever happens."""
    try:
        while number := os.read(todo, 1):
            with contextlib.suppress(Exception):  # the parent hears of it when it tries
                work[number[0]]()
                os.write(done, number)
    finally:
        os._exit(0)
