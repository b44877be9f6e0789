"""What bench/results/tiles.csv says that the rows of the tables should be; no GPU, nothing timed.

Of a case the rows from its last "table" on count, which has the tile that the table had then, and
of a key those cases whose tile was the same. Of a field the candidate that was right in every case
that takes it, and whose times over the table's have the least product, is chosen if that is at most
WORTH of the table's. What is chosen of all fields together ("all") has to be so as well.
"""

import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.tools.tile_cases import JOINT, Family

Row = Mapping[str, Any]
WORTH = 0.98  # of the table's time


def text(row: Any) -> str:
    return " ".join(map(str, row))


def replaced(tile: Any, field: str, numbers: Sequence[int]) -> Any:
    if not field:
        return dataclasses.replace(tile, **dict(zip(JOINT, numbers)))
    return dataclasses.replace(tile, **{field: type(getattr(tile, field))(*numbers)})


def last_runs(rows: Sequence[Row], name: str, key: tuple) -> dict[str, list[Row]]:
    """By case, those that count."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row["family"] == name and row["key"] == text(key):
            if row["field"] == "table":
                runs[row["case"]] = []
            if row["case"] in runs:
                runs[row["case"]].append(row)
    if not runs:
        return {}
    last = next(x[0]["tile"] for x in reversed(list(runs.values())))
    return {case: x for case, x in runs.items() if x[0]["tile"] == last}


def expected(family: Family, name: str, key: tuple, rows: Sequence[Row]) -> Any:
    """The row of the table by what was recorded; None if nothing was."""
    runs = last_runs(rows, name, key)
    if not runs:
        return None
    kept = tile_of(family, next(iter(runs.values()))[0]["tile"])
    better = together(family, key, kept, runs)
    score = _score(runs, "all", str(better), "both_ms")
    return better if score is not None and score <= WORTH else kept


def together(family: Family, key: tuple, tile: Any, runs: Mapping[str, Sequence[Row]]) -> Any:
    """The tile with what is chosen of each field."""
    for field in family.candidates(key):
        if (best := chosen(family, field, runs)) is not None:
            tile = replaced(tile, field, [int(x) for x in best.split()])
    return tile


def chosen(family: Family, field: str, runs: Mapping[str, Sequence[Row]]) -> str | None:
    column = "forward_ms" if field in family.forward else "both_ms"
    labels = {x["tile"]: None for run in runs.values() for x in run if x["field"] == field}
    scores = {label: _score(runs, field, label, column) for label in labels}
    known = {label: x for label, x in scores.items() if x is not None}
    best = min(known, key=lambda x: known[x], default=None)
    return best if best is not None and known[best] <= WORTH else None


def _score(runs: Mapping[str, Sequence[Row]], field: str, label: str, column: str) -> float | None:
    """The mean of the times over the table's, None where one of the cases has it not, or wrong."""
    ratios = []
    for run in runs.values():
        mine = [x for x in run if x["field"] == field]
        if not mine:
            continue  # the case does not take the field
        found = [x for x in mine if x["tile"] == label]
        if not found or str(found[-1]["right"]) != "1":
            return None
        ratios.append(float(found[-1][column]) / float(run[0][column]))
    return math.prod(ratios) ** (1 / len(ratios)) if ratios else None


def tile_of(family: Family, written: str) -> Any:
    """The tile whose repr this is."""
    return eval(written, dict(vars(importlib.import_module(family.tiles))))
