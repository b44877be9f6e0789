"""Candidates of bench/tune.py compiled in processes of their own, before they are timed.

What a call launches is found out by compiler/trace.py, without a GPU, and left in Triton's cache,
where the call finds it. So it is known which candidates spill, or are not taken, before one is run.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from tune_cases import FAMILIES, Case, Family

FIT = ("registers", "stack", "shared")


class Fit(NamedTuple):
    """Of the kernels that a candidate alone has: the most of each, and their names in short.

    note: why it is not to be run, or "".
    """

    registers: int = 0
    stack: int = 0
    shared: int = 0
    kernels: tuple[str, ...] = ()
    note: str = ""


@contextmanager
def using(family: Family, key: tuple, tile: Any) -> Iterator[None]:
    kept = family.table[key]
    family.table[key] = tile
    family.forget()
    try:
        yield
    finally:
        family.table[key] = kept
        family.forget()


def fitting(name: str, place: int, tile: Any) -> Fit:
    """Compiles what the call of a case takes with this tile and not with the table's; with None
    what it takes with the table's."""
    from slipstream.compiler.arch import ARCHS

    family, case = FAMILIES[name], FAMILIES[name].cases[place]
    base = _jobs(name, place)
    if tile is None:
        jobs = list(base.values())
    else:
        with using(family, case.key, tile):
            jobs = [job for key, job in _traced(case).items() if key not in base]
    if not jobs:
        return Fit(note="not taken")
    try:
        made = [job.compile() for job in jobs]
    except Exception as e:
        return Fit(note=f"{type(e).__name__}: {str(e)[:60]}")
    most = {field: max(getattr(x, field) for x in made) for field in FIT}
    fit = Fit(**most, kernels=tuple(sorted(job.key for job in jobs)))
    limit = ARCHS[case.key[0]].shared
    return fit if fit.shared <= limit else fit._replace(note=f"shared {fit.shared} of {limit}")


def judged(fit: Fit, table: Fit) -> Fit:
    """Against what the table's tile takes."""
    if fit.note or table.note or fit.stack <= 2 * table.stack + 64:
        return fit
    return fit._replace(note=f"spills {fit.stack} bytes, the table's {table.stack}")


def _traced(case: Case) -> dict[str, Any]:
    from slipstream.compiler.trace import trace

    found: dict[str, Any] = {}
    for shape in (case.shape, case.odd):

        def call(device: torch.device, shape: Any = shape) -> Any:
            return case.sample.call(case.sample.inputs(shape, device), "triton")

        found |= {job.key: job for job in trace(call, case.key[0])}
    return found


@cache
def _jobs(name: str, place: int) -> dict[str, Any]:
    return _traced(FAMILIES[name].cases[place])


def _blind(arch: str) -> None:
    from slipstream.compiler import toolchain

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    toolchain.select_ptxas((arch,))


class Compiling:
    """Processes that compile what they are asked for, in that order."""

    def __init__(self, jobs: int, arch: str = "sm_90") -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, context, _blind, (arch,))

    def ask(self, name: str, place: int, tiles: Sequence[Any]) -> list["Future[Fit]"]:
        return [self._pool.submit(fitting, name, place, tile) for tile in tiles]

    def stop(self) -> None:
        """At once: a compilation may take minutes, which nobody waits for any more."""
        running = multiprocessing.active_children()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()
