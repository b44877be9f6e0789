"""Tiles of the Triton kernels, found by timing them: what the tables of tiles are written from.

    python bench/tune.py all                    # on a GPU: every case of every family
    python bench/tune.py delta linear           # of these
    python bench/tune.py delta --case Q1        # cases whose name has this in it
    python bench/tune.py all --seconds 220      # and no candidate is begun after that
    python bench/tune.py all --propose          # without a GPU: what was recorded, as a diff
    python bench/tune.py all --write            # the same, into the tables; also after timing

A table is a dict by (family of architectures, bytes an element, width ...), of dataclasses. A
candidate (slipstream/tools/tile_cases.py) puts other numbers into one field of a row, the other
fields as the table has them. Its kernels are compiled in processes of their own meanwhile: what a
call launches is found out by compiler/trace.py, without a GPU, and left in Triton's cache, where
the call finds it. One that has no room, spills twice as much as the table's, or is not taken, is
not run. What it computes has to equal what the table's tile computes, at the timed shape and at an
odd one, to within rounding, and to be the same bits twice; the table's, too, or nothing is timed.

Rows go to results/tiles.csv as they are found: the same command goes on where it was cut off, on
that day, unless it says --again. Which are the best is said by tune_choice.py; what is best of all
fields of a row of the table is timed together at last, and proposed if that leads.
"""

import argparse
import ast
import datetime
import difflib
import importlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as TooLong
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import DEVICE, Provider, device_name, error, in_turns, read, record
from torch import Tensor
from tune_choice import expected, last_runs, replaced, text, together

from slipstream.compiler.arch import ARCHS
from slipstream.kernels.attention import tile_limits as attention
from slipstream.kernels.linear import tile_limits as linear
from slipstream.runtime import call_replay, guarded_launch
from slipstream.tools.catalog import Shape
from slipstream.tools.tile_cases import FAMILIES, Case, Family

FIT = ("registers", "stack", "shared")
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Seconds that one candidate's kernels may take to compile.
PATIENCE = 60.0
START = time.perf_counter()
Candidate = tuple[str, str, Any]  # field, numbers in words, tile


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
        """Stops the workers at once: a compilation whose result is not needed may take minutes."""
        running = multiprocessing.active_children()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()


def tried(family: Family, key: tuple, most: int | None = None) -> Iterator[Candidate]:
    """Candidates other than what the table has and can be, so many of a field."""
    tile = family.table[key]
    for field, rows in family.candidates(key).items():
        others = [(field, text(row), replaced(tile, field, row)) for row in rows]
        fit = [x for x in others if x[2] != tile and not refused(family, key, x[2])]
        yield from fit[:most]


def refused(family: Family, key: tuple, tile: Any) -> bool:
    """Whether a tile cannot run on the architecture."""
    arch, size, *width = key
    check: Any = attention.check if ".attention." in family.tiles else linear.check
    widths = (width or [128]) * (1 + (check is attention.check))
    try:
        check(tile, *widths, size, ARCHS[arch])
    except ValueError:
        return True
    return False


class Call(Provider):
    """An operator at a shape, by its Triton kernels."""

    def __init__(self, case: Case, shape: Shape) -> None:
        torch.manual_seed(0)
        args, fixed = case.sample.inputs(shape, DEVICE), case.sample.fixed
        super().__init__(lambda **given: case.sample.call(given, "triton"), args, fixed)

    def times(self) -> tuple[float, float]:
        found = in_turns({"forward": self.forward, "both": self.gradients}, 15)
        return found["forward"], found["both"]


def repeats(call: Call) -> bool:
    """Whether it gives the same bits twice."""
    return all(torch.equal(x, y) for x, y in zip(call.results(), call.results()))


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative RMS error."""
    return max(error(x, y) for x, y in zip(got, want, strict=True))


class Timed:
    """A case on the GPU: rows of candidates, each told and recorded as it is found."""

    def __init__(self, name: str, case: Case, known: list[dict[str, Any]]) -> None:
        self.name, self.case, self.family = name, case, FAMILIES[name]
        self.known = {(x["field"], x["tile"]): x for x in known}
        self.calls: list[Any] = []
        self.want: list[list[Tensor]] = []

    def ready(self) -> None:
        if not self.calls:
            self.calls = [Call(self.case, x) for x in (self.case.shape, self.case.odd)]
            self.want = [call.results() for call in self.calls]

    def table(self) -> None:
        tile = self.family.table[self.case.key]
        if ("table", str(tile)) not in self.known:
            self.ready()
            if not all(map(repeats, self.calls)):
                raise ValueError("the table's tile gives other bits the second time")
            self._note("table", str(tile), self._times())

    def candidate(self, field: str, label: str, tile: Any, fit: Fit) -> None:
        if (field, label) in self.known or fit.note == "not taken":
            return
        if fit.note:
            self._note(field, label, {"right": 0, "note": fit.note})
            return
        self.ready()
        try:
            with using(self.family, self.case.key, tile):
                error = max(worst(x.results(), y) for x, y in zip(self.calls, self.want))
                same = all(map(repeats, self.calls))
                found = self._times()
            right = same and error <= LIMITS[self.case.shape.dtype]
            found |= {} if same else {"note": "other bits the second time"}
            found |= {"right": int(right), "error": f"{error:.1e}"}
        except Exception as e:
            found = {"right": 0, "note": f"{type(e).__name__}: {str(e)[:60]}"}
        self._note(field, label, found)
        torch.cuda.synchronize()  # raises where the device is lost

    def _times(self) -> dict[str, Any]:
        forward, both = self.calls[0].times()
        return {"right": 1, "forward_ms": round(forward, 4), "both_ms": round(both, 4)}

    def _note(self, field: str, label: str, found: dict[str, Any]) -> None:
        what = {"family": self.name, "key": text(self.case.key), "case": self.case.name}
        row = {**what, "field": field, "tile": label, **found}
        self.known[field, label] = row
        record("tiles", [row])
        words = " ".join(str(x) for x in found.values())
        print(
            f"{_now()} {self.name} {self.case.name} {field or 'tile'} {label}: {words}", flush=True
        )


def _now() -> str:
    return f"{time.perf_counter() - START:5.0f} s"


def keys_of(name: str, part: str) -> dict[tuple, list[int]]:
    """By key, the cases with this in their names."""
    found: dict[tuple, list[int]] = {}
    for place, case in enumerate(FAMILIES[name].cases):
        if part in case.name:
            found.setdefault(case.key, []).append(place)
    return found


def tune(options: argparse.Namespace) -> None:
    call_replay.ENABLED = False  # a record of a call keeps the tile that it had
    guarded_launch.compiler_state(
        torch.device("cuda", 0)
    )  # chooses the compilers that the processes take too
    compiling = Compiling(options.jobs)
    keys = [(name, *x) for name in options.families for x in keys_of(name, options.case).items()]
    keys.sort(key=lambda x: x[1][1])  # float32 last, whose kernels take longest to compile
    asked: list[tuple[str, tuple, list[Candidate], dict[int, list[Any]]]] = []
    for name, key, places in keys:
        tiles = list(tried(FAMILIES[name], key, options.most))
        futures = {p: compiling.ask(name, p, [None, *(x[2] for x in tiles)]) for p in places}
        asked.append((name, key, tiles, futures))
    try:
        for name, key, tiles, futures in asked:
            tune_key(name, key, tiles, futures, options)
    finally:
        compiling.stop()


def tune_key(
    name: str,
    key: tuple,
    tiles: list[Candidate],
    futures: dict[int, list[Any]],
    options: argparse.Namespace,
) -> None:
    family = FAMILIES[name]
    cases = {p: Timed(name, family.cases[p], _known(name, key, p, options.again)) for p in futures}
    for place, case in cases.items():
        try:
            base = _waited(futures[place][0], options.seconds)
            if _late(options.seconds):
                return
            case.table()
            seen: set[tuple] = set()
            for (field, label, tile), future in zip(tiles, futures[place][1:]):
                fit = judged(_waited(future, options.seconds), base)
                if _late(options.seconds):
                    print(f"{_now()} {name} {family.cases[place].name}: no time left", flush=True)
                    return
                if fit.kernels and (field, *fit.kernels) in seen:
                    continue  # numbers that are cut to the same tile
                seen.add((field, *fit.kernels))
                case.candidate(field, label, tile, fit)
        except Exception as e:
            print(f"{_now()} {name} {family.cases[place].name}: {str(e)[:150]}", flush=True)
            torch.cuda.synchronize()  # raises where the device is lost
    kept = family.table[key]
    better = together(family, key, kept, last_runs(read("tiles"), name, key))
    if better != kept:
        for case in cases.values():
            case.candidate("all", str(better), better, Fit())
    for case in cases.values():
        case.calls, case.want = [], []


def _late(seconds: float) -> bool:
    return time.perf_counter() - START > seconds


def _waited(future: Any, seconds: float) -> Fit:
    left = START + seconds - time.perf_counter()
    try:
        return future.result(max(0.0, min(PATIENCE, left)))
    except TooLong:
        return Fit(note=f"over {PATIENCE:.0f} s to compile")
    except Exception as e:
        return Fit(note=f"{type(e).__name__}: {str(e)[:60]}")


def _known(name: str, key: tuple, place: int, again: bool) -> list[dict[str, str]]:
    """What was recorded today, here, from the tile that the table has."""
    if again:
        return []
    run = last_runs(read("tiles"), name, key).get(FAMILIES[name].cases[place].name, [])
    today = (datetime.date.today().isoformat(), device_name(), str(FAMILIES[name].table[key]))
    same = run and (run[0]["date"], run[0]["device"], run[0]["tile"]) == today
    return [dict(x) for x in run] if same else []


def propose(names: list[str], write: bool) -> None:
    """Prints what of the tables is not what was recorded as the best, and writes it if asked to."""
    rows = read("tiles")
    for name in names:
        family = FAMILIES[name]
        path = Path(str(importlib.import_module(family.tiles).__file__))
        before = source = path.read_text()
        for key in dict.fromkeys(case.key for case in family.cases):
            tile = expected(family, name, key, rows)
            if tile is not None and tile != family.table[key]:
                source = placed(source, family.name, key, tile)
        if source == before:
            print(f"{name}: as recorded")
            continue
        lines = (before.splitlines(), source.splitlines(), str(path), str(path))
        print("\n".join(difflib.unified_diff(*lines, lineterm="", n=0)))
        if write:
            path.write_text(source)
            print(f"{path}: written; wants `ruff format`")


def placed(source: str, table: str, key: tuple, tile: Any) -> str:
    """The source with this value of the table at key."""
    assigned = {
        ast.unparse(x.targets[0]): x.value
        for x in ast.parse(source).body
        if isinstance(x, ast.Assign) and isinstance(x.value, ast.Dict)
    }
    pairs = zip(assigned[table].keys, assigned[table].values)
    old = next(v for k, v in pairs if k and ast.literal_eval(k) == key)
    segment = ast.get_source_segment(source, old)
    assert segment is not None
    begin = sum(map(len, source.splitlines(keepends=True)[: old.lineno - 1])) + old.col_offset
    return source[:begin] + repr(tile) + source[begin + len(segment) :]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="+", choices=[*FAMILIES, "all"])
    parser.add_argument("--case", default="", help="part of the names of the cases wanted")
    parser.add_argument("--most", type=int, help="candidates of a field")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--again", action="store_true", help="what was recorded today too")
    parser.add_argument("--propose", action="store_true", help="print what it says of the tables")
    parser.add_argument("--write", action="store_true", help="and put that into them")
    options = parser.parse_args(argv)
    if "all" in options.families:
        options.families = list(FAMILIES)
    if torch.cuda.is_available() and not options.propose:
        tune(options)
    propose(options.families, options.write)


if __name__ == "__main__":
    main()
