"""Times of the device alone: it is kept busy until the host has queued all the runs.

triton.testing.do_bench queues one run after the other, so where the host takes longer over a call
than the device, it tells the host's time.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

# so much is written between two runs, that nothing of them is left in the L2 cache
FLUSHED = 256 << 20
CYCLES_A_SECOND = 2_000_000_000


@cache
def _flushed() -> Tensor:
    return torch.empty(FLUSHED // 4, dtype=torch.int32, device="cuda")


def ahead(run: Callable[[], Any], runs: int = 20) -> float:
    """Milliseconds of one run, the median."""
    return in_turns([run], runs)[0]


def in_turns(calls: Sequence[Callable[[], Any]], runs: int = 20) -> list[float]:
    """As ahead, of several that take turns, so that all see the card as warm as the others do."""
    return [sorted(x)[runs // 2] for x in turns(calls, runs)]


def turns(calls: Sequence[Callable[[], Any]], runs: int) -> list[list[float]]:
    """Milliseconds of each call's runs, turn by turn."""
    for run in calls:
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for run in [*calls, *calls]:
        run()
    host = (time.perf_counter() - start) / 2 + 5e-5 * len(calls)
    torch.cuda.synchronize()
    sleep: Any = torch.cuda._sleep
    sleep(int(2 * runs * host * CYCLES_A_SECOND))
    events = [
        (i, [torch.cuda.Event(enable_timing=True) for _ in range(2)])
        for i in [*range(len(calls))] * runs
    ]
    for i, (begin, end) in events:
        _flushed().zero_()
        begin.record()
        calls[i]()
        end.record()
    torch.cuda.synchronize()
    return [[b.elapsed_time(e) for j, (b, e) in events if j == i] for i in range(len(calls))]
