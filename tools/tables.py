"""The tables of README.md and docs that are made of rows of bench/results.

    python tools/tables.py            prints them
    python tools/tables.py --write    writes them into the pages
    python tools/tables.py --check    fails if one is not up to date or a number has no row

A page has a table between the lines "<!-- table NAME -->" and "<!-- end of table -->". Outside of
them a page must not state a measurement: a number with a unit of time, speed or memory, a
comparison such as "half of the time", and on README and the performance page any number with
decimals. ALLOWED lists what else is meant. table_specs.py says what the tables have.
"""

import csv
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
PLACE = re.compile(r"\{([^{}]+)\}")
Row = Mapping[str, str]
Line = Mapping[str, Row]  # of a table: its rows by the value of the column `by`


@cache
def database() -> sqlite3.Connection:
    """Loads bench/results: a table for each file, its cells as text. n is the number of a row, and
    source says "file:n"; a query that makes a row of several joins their sources by spaces."""
    made = sqlite3.connect(":memory:")
    made.create_function("regexp", 2, lambda pattern, x: bool(re.fullmatch(pattern, x)))
    made.create_function("is_number", 1, is_number)
    for path in sorted(RESULTS.glob("*.csv")):
        with path.open(newline="") as file:
            head, *rows = filter(None, csv.reader(file))
        columns = ", ".join(f'"{x}" TEXT' for x in head)
        made.execute(f"CREATE TABLE {path.stem} ({columns}, source TEXT, n INTEGER PRIMARY KEY)")
        # rows from before a column was added are shorter
        filled = [(*x, *[""] * (len(head) - len(x))) for x in rows]
        places = ", ".join("?" * (len(head) + 2))
        numbered = [(*x, f"{path.stem}:{i}", i) for i, x in enumerate(filled, 1)]
        made.executemany(f"INSERT INTO {path.stem} VALUES ({places})", numbered)
    return made


def read(query: str) -> list[Row]:
    """The rows of a file or of a query; of two columns of one name the latter counts."""
    found = database().execute(query if " " in query else f"SELECT * FROM {query} ORDER BY n")
    names = [x[0] for x in found.description]
    return [dict(zip(names, ("" if x is None else str(x) for x in row))) for row in found]


def sources(rows: Iterable[Row]) -> list[Row]:
    """The rows of files that rows of queries are made of."""
    named = dict.fromkeys(x for row in rows for x in row["source"].split())
    places = (x.split(":") for x in named)
    return [read(f"SELECT * FROM {file} WHERE n = {n}")[0] for file, n in places]


@dataclass(frozen=True)
class Table:
    """A line for each value of the columns `key`, of the last row of the query that has it.

    query: the name of a file, or SQL over `database`, in the order of age; or what makes the rows.
    columns: heading -> template. In a template {column} is a cell's text, {column:3} its number to
        three digits at most, {column*1000:3} of a thousand times it, {a+b!} the largest error of
        two cells, {a:3 ~ b:3} a ratio of both as shown. Where `by` names a column, {who@column} is
        of the row with that value. {gpu} and {measured} are the card, and the card and the day.
        Of two templates with " || " between them the second counts where the first is empty.
    lines: the keys that are shown, in this order; all, in that of the rows, if none are given.
    """

    query: str | Callable[[], list[Row]]
    key: str
    columns: Mapping[str, str]
    script: str = ""
    by: str = ""
    lines: tuple[str, ...] = ()

    def found(self) -> Mapping[str, Line]:
        lines: dict[str, dict[str, Row]] = {}
        for row in read(self.query) if isinstance(self.query, str) else self.query():
            line = lines.setdefault(" ".join(row[x] for x in self.key.split(", ")), {})
            line[row[self.by] if self.by else ""] = row
        return {x: lines[x] for x in self.lines} if self.lines else lines

    def cells(self) -> list[list[str]]:
        lines = self.found().values()
        return [[rendered(x, line) for x in self.columns.values()] for line in lines]

    def text(self) -> str:
        return "\n".join([*grid(self.columns, self.cells()), "", self.about()])

    def used(self) -> list[Row]:
        return sources(row for line in self.found().values() for row in line.values())

    def about(self) -> str:
        """Device, versions and dates of the rows, and where they are."""
        named = {x for y in self.found().values() for z in y.values() for x in z["source"].split()}
        used = self.used()
        dates = sorted({x["date"] for x in used})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        devices, torch = (", ".join(sorted({x[y] for x in used})) for y in ("device", "torch"))
        files = ", ".join(f"`{x}.csv`" for x in sorted({x.partition(":")[0] for x in named}))
        by = f", written by `python {self.script}`" if self.script else ""
        return f"{devices}, torch {torch}, {when}. Rows: {files}{by}."


def grid(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    head = [*columns]
    lines = ["| " + " | ".join(x) + " |" for x in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def rendered(template: str, line: Line) -> str:
    """The template with its places filled; empty if all are, else "-" where one is."""
    template, _, other = template.partition(" || ")
    found = [value(x, line) for x in PLACE.findall(template)]
    if not any(found):
        return rendered(other, line) if other else ""
    texts = iter(found)
    # these spaces do not break, so that a pair stays on one line of a narrow column
    return PLACE.sub(lambda _: next(texts) or "-", template.replace(" / ", "\u00a0/\u00a0"))


def value(place: str, line: Line) -> str:
    if " ~ " in place:
        above, below = (value(x, line) for x in place.split(" ~ "))
        return f"{float(above) / float(below):.2f}" if above and below else ""
    who, _, column = place.rpartition("@")
    row = line.get(who) if who else next(iter(line.values()))
    column, _, digits = column.partition(":")
    column, _, factor = column.partition("*")
    if row is None:
        return ""
    if column == "gpu":
        return gpu(row)
    if column == "measured":
        day = date.fromisoformat(row["date"])
        return f"{gpu(row)}, {day.day} {day:%b}"
    if column.endswith("!"):
        return largest(row[x] for x in column[:-1].split("+"))
    return number(row[column], int(digits), int(factor or 1)) if digits else row[column]


def gpu(row: Row) -> str:
    return "CPU" if "CPU" in row["device"] else row["device"].split()[1]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def number(text: str, digits: int, factor: int = 1) -> str:
    """To so many digits, at most those that are there; empty where it is no number."""
    if not is_number(text):
        return ""
    given = Decimal(text) * factor
    there = len(text.partition(".")[2])
    decimals = max(0, -int(given.normalize().as_tuple().exponent), there) - len(str(factor)) + 1
    wanted = digits - 1 - given.adjusted() if given else 0
    return f"{round(given, max(0, min(wanted, decimals))):f}"


def largest(cells: Iterable[str]) -> str:
    """Of cells such as "o 3.8e-03" and "o 3.9e-03, k 3.5e-03"."""
    found = [x for cell in cells for x in cell.replace(",", " ").split() if is_number(x)]
    return max(found, key=float).replace("e-0", "e-") if found else ""


CODE = re.compile(r"^```.*?^```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
UNIT = r"(?:[num]?s|seconds?|minutes?|hours?|TFLOP/s|[TGM]B/s|[KMG]i?B|tokens/s|%|percent|times|x)"
MEASURED = re.compile(rf"(?<![\w.^])\d+(?:[.,]\d+)*(?:e-?\d+)? ?{UNIT}(?![\w/])")
COMPARED = re.compile(
    r"\b(?:twice|half|thirds?|quarter|double|(?:two|three|four|five|six|ten|several)\s+times)\b"
    r"[^.]{0,40}?\b(?:as\s+(?:long|fast|much|large)|faster|slower|longer|time|memory|speed)\b",
    re.IGNORECASE,
)
VERSION = re.compile(
    r"\b(?:Python|torch|Triton|transformers|ptxas|CUDA|Slipstream|fla-core|FlashQLA|TRL|numpy|and|to|or)"
    r" \(?\d+(?:\.\d+)+"
)
DECIMAL = re.compile(r"(?<![\w.^])\d+\.\d+(?:e-?\d+)?(?!\w|\.\d)")
# what was tried, facts without a time, and what is generated from other data
RECORDS = ("docs/dev/", "docs/SUPPORT.md", "docs/_build/")
STRICT = ("README.md", "docs/performance.md", "docs/index.md")
# (page, text): what is no measurement
ALLOWED = {
    ("CHANGELOG.md", "4 GiB"): "a bound that the code sets",
    ("docs/precision.md", "4 GiB"): "the same",
}


def pages() -> list[Path]:
    top = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "bench/README.md")
    found = [*(ROOT / x for x in top), *sorted((ROOT / "docs").rglob("*.md"))]
    return [x for x in found if not name_of(x).startswith(RECORDS)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def written(text: str, texts: Mapping[str, str], block: re.Pattern = BLOCK) -> str:
    """A page with its tables as they should be."""

    def made(match: re.Match[str]) -> str:
        if match[2] not in texts:
            raise ValueError(f"table {match[2]}: no such table; want one of {', '.join(texts)}")
        return f"{match[1]}{texts[match[2]]}\n{match[4]}"

    return block.sub(made, text)


def unsupported(page: str, text: str) -> list[str]:
    """Numbers outside of generated tables and of code that state a measurement."""
    prose = VERSION.sub("", CODE.sub("", BLOCK.sub("", text)))
    found = [x[0] for x in MEASURED.finditer(prose)]
    found += [" ".join(x[0].split()) for x in COMPARED.finditer(prose)]
    if page in STRICT:
        found += [x[0] for x in DECIMAL.finditer(prose)]
    return [x for x in dict.fromkeys(found) if (page, x) not in ALLOWED]


def problems(page: str, text: str, texts: Mapping[str, str]) -> list[str]:
    lines = [f"{page}: {x}: has no row in bench/results" for x in unsupported(page, text)]
    if written(text, texts) != text:
        lines.append(f"{page}: run python tools/tables.py --write")
    return lines


def main(arguments: list[str]) -> int:
    from table_specs import TABLES

    texts = {x: table.text() for x, table in TABLES.items()}
    wrong = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if "--write" in arguments and (new := written(text, texts)) != text:
            path.write_text(new, encoding="utf-8")
        elif "--check" in arguments:
            wrong += problems(name_of(path), text, texts)
    if "--check" in arguments:
        print("\n".join(wrong) or "tables: every number has its row")
    elif "--write" not in arguments:
        print("\n\n".join(f"# {x}\n\n{y}" for x, y in texts.items()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
