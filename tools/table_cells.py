"""Rows of bench/results/*.csv, and the cells and tables that are made of them.

A cell keeps the places of its numbers: tests/test_claims.py looks each of them up again.
"""

import csv
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "bench" / "results"


@dataclass(frozen=True)
class Row:
    """line: where it stands in the file, counted from 1."""

    file: str
    line: int
    cells: dict[str, str]

    def get(self, column: str) -> str:
        return self.cells.get(column) or ""


@dataclass(frozen=True)
class Cell:
    """The text that a table shows, and the places of the numbers that it is made of."""

    text: str
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """script: what wrote the rows."""

    name: str
    script: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    used: tuple[Row, ...]

    def text(self) -> str:
        lines = ["| " + " | ".join(self.headings) + " |", "|---" * len(self.headings) + "|"]
        lines += ["| " + " | ".join(x.text for x in row) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.about()])

    def about(self) -> str:
        """Device, versions and dates of the rows, and where they are."""
        dates = sorted({x.get("date") for x in self.used})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        devices = ", ".join(sorted({x.get("device") for x in self.used}))
        torch = ", ".join(sorted({x.get("torch") for x in self.used}))
        files = ", ".join(f"`{x}.csv`" for x in sorted({x.file for x in self.used}))
        by = f", written by `python {self.script}`" if self.script else ""
        return f"{devices}, torch {torch}, {when}. Rows: {files}{by}."


@cache
def read(name: str) -> tuple[Row, ...]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(Row(name, i + 2, row) for i, row in enumerate(rows))


def card_and_day(row: Row) -> Cell:
    """The GPU and the day of a row, for tables whose rows have several."""
    day = date.fromisoformat(row.get("date"))
    return label(f"{row.get('device').split()[1]}, {day.day} {day:%b}")


def matching(name: str, **wanted: str) -> list[Row]:
    return [x for x in read(name) if all(x.get(k) == v for k, v in wanted.items())]


def newest(name: str, *columns: str, **wanted: str) -> Row:
    """The last row with these values, and with numbers in these columns if one has them."""
    found = matching(name, **wanted)
    full = [x for x in found if all(is_number(x.get(y)) for y in columns)]
    if not found:
        raise ValueError(f"bench/results/{name}.csv: has no row with {wanted}")
    return (full or found)[-1]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def number(row: Row | None, column: str, factor: int = 1, digits: int = 3) -> Cell:
    """A cell of the CSV to some significant digits, at most those that are there; empty where it is
    no number."""
    if row is None or not is_number(row.get(column)):
        return Cell("")
    given = Decimal(row.get(column)) * factor
    decimals = max(0, -int(given.normalize().as_tuple().exponent), decimals_of(row.get(column)))
    decimals -= len(str(factor)) - 1
    wanted = digits - 1 - given.adjusted() if given else 0
    text = f"{round(given, max(0, min(wanted, decimals))):f}"
    return Cell(text, (place(row, column),))


def decimals_of(text: str) -> int:
    return len(text.partition(".")[2])


def place(row: Row, column: str) -> str:
    return f"bench/results/{row.file}.csv:{row.line} {column}"


def ratio(above: Cell, below: Cell) -> Cell:
    """How many times `below` goes into `above`, from the numbers as they stand in the table."""
    if not above.text or not below.text or not float(below.text):
        return Cell("")
    value = f"{float(above.text) / float(below.text):.2f}"
    return Cell(value, (*above.sources, *below.sources))


def pair(first: Cell, second: Cell) -> Cell:
    if not first.text and not second.text:
        return Cell("")
    # the spaces do not break, so that a pair stays on one line of a narrow column
    text = f"{first.text or '-'}\u00a0/\u00a0{second.text or '-'}"
    return Cell(text, first.sources + second.sources)


def triple(*cells: Cell) -> Cell:
    """As `pair`, of three."""
    if not any(x.text for x in cells):
        return Cell("")
    sources = tuple(y for x in cells for y in x.sources)
    return Cell("\u00a0/\u00a0".join(x.text or "-" for x in cells), sources)


def label(text: str) -> Cell:
    """A name or a shape."""
    return Cell(text)


def error(row: Row, column: str) -> Cell:
    """The largest of "o 3.8e-03" or "o 3.9e-03, k 3.5e-03"."""
    found = [x for x in row.get(column).replace(",", " ").split() if is_number(x)]
    if not found:
        return Cell("")
    return Cell(max(found, key=float).replace("e-0", "e-"), (place(row, column),))


def largest_error(row: Row) -> Cell:
    """The largest error of outputs, gradients and gradients of gates."""
    found = [error(row, f"{x} error") for x in ("out", "grad", "gate")]
    return max((x for x in found if x.text), key=lambda x: float(x.text), default=Cell(""))
