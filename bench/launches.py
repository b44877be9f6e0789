"""How long each kernel of a call takes, by the clock of the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from types import ModuleType
from typing import Any

import torch

RUNS = 7


class _Timed:
    """A kernel that notes when each of its launches begins and ends."""

    def __init__(self, kernel: Any, name: str, noted: list) -> None:
        self.kernel, self.name, self.noted = kernel, name, noted

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.kernel[grid](*args, **options)
            end.record()
            self.noted.append((self.name + _flags(options), start, end))

        return run


def _flags(options: dict[str, Any]) -> str:
    """What tells the launches of one kernel apart."""
    words = {"REVERSE": " reversed", "ROWS": " rows", "TRANSPOSED": " transposed"}
    return "".join(word for name, word in words.items() if options.get(name))


@contextmanager
def _noting(modules: tuple[ModuleType, ...]) -> Iterator[list]:
    noted: list = []
    kept = [(m, n, x) for m in modules for n, x in vars(m).items() if n.endswith("_kernel")]
    try:
        for module, name, kernel in kept:
            setattr(module, name, _Timed(kernel, name.removesuffix("_kernel"), noted))
        yield noted
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


def per_kernel(fn: Callable[[], Any], *modules: ModuleType) -> dict[str, float]:
    """Median ms of each launch of fn() whose kernel is a name in one of the modules."""
    runs: list[dict[str, float]] = []
    for _ in range(RUNS):
        with _noting(modules) as noted:
            torch.cuda._sleep(20_000_000)  # so that the host is ahead
            fn()
            torch.cuda.synchronize()
        run: dict[str, float] = {}
        for i, (name, start, end) in enumerate(noted):
            run[f"{i} {name}"] = start.elapsed_time(end)
        runs.append(run)
    return {name: median(run[name] for run in runs) for name in runs[0]}
