"""Figures of docs/dev/log, and the rows of bench/results that they come from.

An entry is a dated heading. Figures of entries from FIRST on are rows of
bench/results/experiments.csv under the same page and heading, or of a CSV that the entry names;
tools/claims.py --check fails for others. Entries before it are records of scripts that are not
kept: their rows are in bench/results/archive, as far as there are any.

experiments.csv has a line for each figure: the page, the heading without its verdict, what it is
of, its value as it was printed, its unit, and its kind: measured, counted (by a tool, in compiled
code), bound (a limit that was computed), bar (what was wanted) or ratio (of two of the others).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from table_cells import RESULTS, Table, is_number, place, read

FIRST = "2026-11-26"
LOG = "docs/dev/log/"
EXPERIMENTS = "experiments"
HEADING = re.compile(r"^## (\d{4}-\d\d-\d\d): (.*)$", re.MULTILINE)
NAMED = re.compile(r"(\w+)\.csv")
CODE = re.compile(r"`[^`\n]*`|\]\([^)]*\)")
# names of devices and releases, dates, powers, intervals, shapes such as 8x1024 and 16/64
NO_FIGURE = re.compile(
    r"H\d00(?: \d+GB)?(?: HBM\d)?"
    r"|\b(?:torch|Triton|ptxas|CUDA|Python|numpy|under|by) \(?\d+(?:\.\d+)+|\b\d+\.\d+\.\d+\b"
    r"|\d{4}-\d\d-\d\d|\b\d+\^-?\d+|\[-[\d.]+, [\d.]+\]|\d+ ?x ?\d+|\d+/\d+"
)
UNIT = r"(?:[num]?s|seconds?|minutes?|TFLOP/s|[TG]B/s|[KMG]i?B|tokens/s|%|percent|times)"
FIGURE = re.compile(
    r"(?<![\w.,^])(?:\d+\.\d+(?:e-?\d+)?|\d+e-\d+|\d{1,3}(?:,\d{3})+(?:\.\d+)?"
    rf"|\d+(?= ?{UNIT}(?![\w/])))(?![\w^])"
)
# in a table
CELL = re.compile(r"(?<![\w.,^])\d{3,}(?![\w.,^])")


@dataclass(frozen=True)
class Entry:
    page: str
    date: str
    heading: str
    text: str

    @property
    def title(self) -> str:
        """The heading without its verdict."""
        return self.heading.partition(" (")[0].strip()

    def figures(self) -> list[str]:
        """As they are written, each once."""
        text = NO_FIGURE.sub("", CODE.sub("", f"{self.heading}\n{self.text}"))
        found = [x[0] for x in FIGURE.finditer(text)]
        for line in text.splitlines():
            if line.startswith("|"):
                found += CELL.findall(line.strip().strip("|").partition("|")[2])
        return list(dict.fromkeys(found))


def entries(page: str, text: str) -> Iterator[Entry]:
    """Entries of a page of the log; only those whose figures need rows."""
    heads = list(HEADING.finditer(text))
    for head, following in zip(heads, [*heads[1:], None]):
        if head[1] >= FIRST:
            end = following.start() if following else len(text)
            yield Entry(page, head[1], head[2], text[head.end() : end])


def same(figure: str, value: str) -> bool:
    """Whether the value, rounded as the figure is, is the figure."""
    shown, exact = float(figure.replace(",", "")), float(value.replace(",", ""))
    digits, _, power = figure.replace(",", "").partition("e")
    half = 0.501 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return abs(exact - shown) <= half


def known(entry: Entry, tables: Mapping[str, Table]) -> Iterator[tuple[str, str]]:
    """Numbers that the entry may state, each with its place."""
    for row in read(EXPERIMENTS):
        if (row.get("log"), row.get("entry")) == (Path(entry.page).stem, entry.title):
            yield row.get("value"), f"{place(row, 'value')} of {row.get('what')}"
    named = {x for x in NAMED.findall(entry.text) if (RESULTS / f"{x}.csv").exists()}
    for row in (x for name in sorted(named - {EXPERIMENTS}) for x in read(name)):
        if row.get("date") == entry.date:
            yield from ((x, place(row, column)) for column, x in row.cells.items() if is_number(x))
    # what the tables of the pages compute from them
    for table in (x for x in tables.values() if named & {row.file for row in x.used}):
        for cell in (cell for row in table.rows for cell in row):
            for number in re.findall(r"\d+\.\d+(?:e-?\d+)?", cell.text):
                yield number, "; ".join(cell.sources)


def sources(entry: Entry, tables: Mapping[str, Table]) -> dict[str, list[str]]:
    """Figure -> the places that have it."""
    stated = list(known(entry, tables))
    return {x: [where for value, where in stated if same(x, value)] for x in entry.figures()}


def unsupported(page: str, text: str, tables: Mapping[str, Table]) -> list[str]:
    """Figures of a page that have no row."""
    return [
        f"{page}: {entry.title}: {figure}: has no row in bench/results/{EXPERIMENTS}.csv"
        for entry in entries(page, text)
        for figure, found in sources(entry, tables).items()
        if not found
    ]


def pages(root: Path) -> dict[str, str]:
    """Name and text of every page of the log."""
    found = sorted((root / LOG).glob("*.md"))
    return {x.relative_to(root).as_posix(): x.read_text(encoding="utf-8") for x in found}


def without_entry(texts: Mapping[str, str]) -> list[str]:
    """Rows whose heading is gone."""
    there = {(Path(x).stem, y.title) for x, text in texts.items() for y in entries(x, text)}
    rows = {(x.get("log"), x.get("entry")) for x in read(EXPERIMENTS)}
    return [
        f"bench/results/{EXPERIMENTS}.csv: {LOG}{log}.md has no entry {title!r}"
        for log, title in sorted(rows - there)
    ]
