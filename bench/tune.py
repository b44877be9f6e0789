"""Tiles of the Triton kernels, found by timing them: what the tables of tiles are written from.

    python bench/tune.py delta                  # on a GPU: every case of a family, 1 to 2 minutes
    python bench/tune.py delta --case Q1        # cases whose name has this in it
    python bench/tune.py delta --fit sm_90      # without a GPU: what each candidate compiles to
    python bench/tune.py delta --write          # and the row of the table anew, if that is faster
    python bench/tune.py delta --rows           # what was recorded, fastest first, and the choice

A table is a dict TILES, by (family of architectures, bytes an element, width ...), of dataclasses.
A candidate puts other numbers into one field of a row, the other fields as the table has them. One
that by --fit has no room, spills twice as much as the table's, or is not taken, is left out. What
it computes has to equal what the table's tile computes, at the timed shape and at an odd one, to
within rounding. The fastest of a field is chosen if it beats the table's by 2%; what is chosen of
all fields together is tried at last ("all"), and is what --write puts into the table if it leads.
All of it goes to results/tiles.csv, --fit to results/tiles_fit.csv; a row of a table names the file
its numbers came from.
"""

import argparse
import ast
import csv
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, record
from torch import Tensor
from tune_cases import FAMILIES, Case, Family

from slipstream.cli.samples import Shape
from slipstream.core import replay
from slipstream.core.arch import ARCHS
from slipstream.kernels.linear import needs as linear
from slipstream.kernels.softmax import needs as softmax

WORTH = 0.98  # of the table's time
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def tried(family: Family, key: tuple, most: int | None = None) -> Iterator[tuple[str, Any]]:
    """Fields and candidates other than what the table has, so many of a field."""
    tile = family.table[key]
    for name, rows in family.candidates.items():
        others = [(row, replaced(tile, name, row)) for row in rows]
        fit = (row for row, x in others if x != tile and not refused(family, key, x))
        for row in islice(fit, most):
            yield name, row


def refused(family: Family, key: tuple, tile: Any) -> bool:
    """Whether a tile cannot run on the architecture; says why, and which could."""
    arch, size, *width = key
    check: Any = softmax.check if "softmax" in family.tiles else linear.check
    widths = (width or [128]) * (1 + (check is softmax.check))
    try:
        check(tile, *widths, size, ARCHS[arch])
    except ValueError as error:
        print(f"left out: {error}")
        return True
    return False


def replaced(tile: Any, name: str, row: Any) -> Any:
    if not name:
        return dataclasses.replace(tile, **row)
    return dataclasses.replace(tile, **{name: type(getattr(tile, name))(*row)})


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


def text(row: Any) -> str:
    return " ".join(map(str, row.values() if isinstance(row, dict) else row))


def fit(name: str, arch: str, cases: list[Case]) -> None:
    """Registers, spills and shared memory of each candidate's kernels."""
    from slipstream.core.trace import trace

    def compiled(case: Case) -> dict[str, Any]:
        def call(device: torch.device) -> Any:
            return case.sample.call(case.sample.inputs(case.shape, device), "triton")

        return {job.key: job for job in trace(call, arch)}

    family, rows = FAMILIES[name], []
    for case in cases:
        tile = family.table[case.key]
        base = compiled(case)
        stack = max(job.compile().stack for job in base.values())
        for field, row in tried(family, case.key):
            with using(family, case.key, replaced(tile, field, row)):
                jobs = [job for key, job in compiled(case).items() if key not in base]
            try:
                made = [job.compile() for job in jobs]
                most: dict[str, int] = {
                    x: max((getattr(y, x) for y in made), default=0) for x in FIT
                }
                fits = most["shared"] <= ARCHS[arch].shared and most["stack"] <= 2 * stack + 64
                fits, note = fits and bool(jobs), "" if jobs else "not taken"
            except Exception as e:
                most, fits, note = dict.fromkeys(FIT, 0), False, type(e).__name__
            what = {"family": name, "case": case.name, "field": field, "tile": text(row)}
            rows.append({**what, "arch": arch, **most, "fits": int(fits), "note": note})
            print(*rows[-1].values(), flush=True)
    print("recorded in", record("tiles_fit", rows))


FIT: tuple[str, ...] = ("registers", "stack", "shared")


def unfit(name: str) -> set[tuple[str, ...]]:
    """(case, field, tile) that --fit found without room."""
    return {
        (row["case"], row["field"], row["tile"])
        for row in _read("tiles_fit")
        if row["family"] == name and row["fits"] == "0"
    }


def _read(name: str) -> list[dict[str, str]]:
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Call:
    """An operator at a shape, its results and its times."""

    def __init__(self, case: Case, shape: Shape) -> None:
        torch.manual_seed(0)
        self.sample = case.sample
        self.args = self.sample.inputs(shape, torch.device("cuda"))
        self.given = [x.requires_grad_() for x in self.args.values() if x.is_floating_point()]
        out = self.forward()
        self.weights = [torch.randn_like(x) for x in out[:1]]

    def forward(self) -> list[Tensor]:
        with torch.no_grad():
            return self.sample.call(self.args, "triton")

    def both(self) -> list[Tensor]:
        out = self.sample.call(self.args, "triton")
        return list(torch.autograd.grad(out[:1], self.given, self.weights, allow_unused=True))

    def results(self) -> list[Tensor]:
        return [x.double() for x in (*self.forward(), *self.both()) if x is not None]

    def times(self) -> tuple[float, float]:
        return bench(self.forward), bench(self.both)


def bench(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=8, rep=30, return_mode="median")


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative RMS error."""
    errors = [(x - y).square().mean().sqrt() / y.square().mean().sqrt() for x, y in zip(got, want)]
    return max((e.item() for e in errors if not e.isnan()), default=float("nan"))


def tune(name: str, case: Case, most: int | None) -> tuple[list[dict[str, object]], Any]:
    """Rows of what was tried, and the tile to be had instead of the table's, if there is one."""
    family, table = FAMILIES[name], FAMILIES[name].table
    tile, skipped = table[case.key], unfit(name)
    shapes = case.shape, dataclasses.replace(case.shape, B=1, T=333, H=3)
    calls = [Call(case, shape) for shape in shapes]
    want = [call.results() for call in calls]
    base = calls[0].times()
    print(f"{name} {case.name}: forward {base[0]:.3f} ms, with backward {base[1]:.3f}", flush=True)
    what = {"family": name, "key": text(case.key), "case": case.name}

    def measured(field: str, label: str, other: Any) -> dict[str, object]:
        found: dict[str, object] = {}
        try:
            with using(family, case.key, other):
                error = max(worst(call.results(), x) for call, x in zip(calls, want))
                times = calls[0].times()
            found = {"forward_ms": round(times[0], 4), "both_ms": round(times[1], 4)}
            found["error"] = f"{error:.1e}"
            right = error <= LIMITS[case.shape.dtype]
        except Exception as e:
            right, found["note"] = False, f"{type(e).__name__}: {str(e)[:60]}"
        return {**what, "field": field, "tile": label, "right": int(right), **found}

    rows: list[dict[str, object]] = []
    made: dict[tuple[str, str], Any] = {}
    for field, row in tried(family, case.key, most):
        if (case.name, field, text(row)) not in skipped:
            made[field, text(row)] = row
            rows.append(measured(field, text(row), replaced(tile, field, row)))
    _choose(family, rows, base)
    for field in family.candidates:
        line = [_line(row) for row in rows if row["field"] == field]
        print(f"  {field or 'tile'}:", "; ".join(line), flush=True)
    better = tile
    for row in [x for x in rows if x.get("chosen")]:
        field = str(row["field"])
        better = replaced(better, field, made[field, str(row["tile"])])
    table_row = {**what, "field": "table", "tile": str(tile), "right": 1}
    rows.insert(0, {**table_row, "forward_ms": round(base[0], 4), "both_ms": round(base[1], 4)})
    if better == tile:
        return rows, None
    rows.append(measured("all", str(better), better))
    print("  all:", _line(rows[-1]), flush=True)
    leads = rows[-1]["right"] and float(str(rows[-1]["both_ms"])) <= WORTH * base[1]
    return rows, better if leads else None


def write(family: Family, key: tuple, tile: Any) -> None:
    """The value of TILES at key, in the source of the table."""
    path = Path(str(importlib.import_module(family.tiles).__file__))
    source = path.read_text()
    named = {
        ast.unparse(x.targets[0]): x.value
        for x in ast.parse(source).body
        if isinstance(x, ast.Assign) and isinstance(x.value, ast.Dict)
    }
    pairs = zip(named["TILES"].keys, named["TILES"].values)
    old = next(v for k, v in pairs if k and ast.literal_eval(k) == key)
    segment = ast.get_source_segment(source, old)
    assert segment is not None
    begin = sum(map(len, source.splitlines(keepends=True)[: old.lineno - 1])) + old.col_offset
    path.write_text(source[:begin] + repr(tile) + source[begin + len(segment) :])
    print(f"{path}: {key} is {tile}; wants `ruff format`")


def _line(row: dict[str, object]) -> str:
    end = "" if row["right"] else f" WRONG {row.get('error', '')}"
    if "note" in row:
        return f"{row['tile']} {str(row['note'])[:20]}"
    mark = "*" if row.get("chosen") else ""
    return f"{row['tile']} {row['forward_ms']:.3f}|{row['both_ms']:.3f}{mark}{end}"


def _choose(family: Family, rows: list[dict[str, object]], base: tuple[float, float]) -> None:
    """Marks the fastest right one of each field that is worth it."""
    for field in family.candidates:
        column, limit = ("forward_ms", base[0]) if field in family.forward else ("both_ms", base[1])
        mine = [row for row in rows if row["field"] == field and row["right"]]
        best = min(mine, key=lambda row: float(str(row[column])), default=None)
        if best is not None and float(str(best[column])) <= WORTH * limit:
            best["chosen"] = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--case", default="", help="part of the names of the cases wanted")
    parser.add_argument("--most", type=int, help="candidates of a field")
    parser.add_argument("--fit", metavar="ARCH", help="compile the candidates, without a GPU")
    parser.add_argument("--rows", action="store_true", help="print what was recorded")
    parser.add_argument("--write", action="store_true", help="put what is better into the table")
    options = parser.parse_args()
    cases = [x for x in FAMILIES[options.family].cases if options.case in x.name]
    if options.rows:
        return show(options.family)
    if options.fit:
        return fit(options.family, options.fit, cases)
    replay.ON = False  # a record of a call keeps the tile that it had
    for case in cases:
        try:
            rows, better = tune(options.family, case, options.most)
            print("recorded in", record("tiles", rows))
            if options.write and better is not None:
                write(FAMILIES[options.family], case.key, better)
        except Exception as e:
            print(f"{options.family} {case.name}: {type(e).__name__}: {str(e)[:150]}", flush=True)
    return None


def show(name: str) -> None:
    rows = [x for x in _read("tiles") if x["family"] == name]
    rows.sort(key=lambda x: (x["case"], x["field"], float(x["both_ms"] or "inf")))
    for row in rows:
        print(", ".join(f"{k} {v}" for k, v in row.items() if v and k not in ("torch", "key")))


if __name__ == "__main__":
    main()
