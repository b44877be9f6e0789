"""docs/performance.md: the figures of its tables are rows of bench/results, its plots are there."""

import csv
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "performance.md").read_text()
FIGURE = re.compile(r"(?<![\w^.])(?:\d+\.\d+|\d{2,})(?![\w.])")
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
SOURCES = {  # of a section's tables: the rows that they are made of
    "The linear family on sm_90": (
        "linear_* channel_* dplr_* delta_* slices_* memory_* slots_* few_*"
    ),
    "Softmax attention on sm_90": "attention_*",
    "Around attention": "blocks_* matmul_* memory_* norm_*",
    "Decoding, the host, first calls": "step_* host_* first_calls*",
}
ELSEWHERE = re.compile(r"published|earlier")  # of a cell, which says that it is no row


def sections() -> dict[str, str]:
    heads = [*re.finditer(r"^## (.+)$", TEXT, re.MULTILINE)]
    ends = [m.start() for m in heads] + [len(TEXT)]
    return {m[1]: TEXT[a:b] for m, (a, b) in zip(heads, pairwise(ends), strict=True)}


def tables(section: str) -> list[list[list[str]]]:
    found: list[list[list[str]]] = [[]]
    for line in section.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [x for x in found if x]


def figures(section: str) -> list[str]:
    """Of all columns but the first and shares, "of" somebody's, which are quotients of others."""
    cells = []
    for head, _, *rows in tables(section):
        columns = [i for i, name in enumerate(head) if i and not name.startswith(("of ", "wanted"))]
        cells += [row[i] for row in rows for i in columns]
    return [x for cell in cells if not ELSEWHERE.search(cell) for x in FIGURE.findall(cell)]


def near(figure: str, value: float) -> bool:
    return abs(value - float(figure)) < 0.501 * 10.0 ** -len(figure.partition(".")[2])


def recorded(patterns: str) -> set[float]:
    found: set[float] = set()
    for pattern in patterns.split():
        for path in (ROOT / "bench" / "results").glob(f"{pattern}.csv"):
            with path.open(newline="") as file:
                for row in csv.reader(file):
                    found.update(float(x) for cell in row[3:] for x in NUMBER.findall(cell))
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_docs_figures_are_rows(name: str) -> None:
    values = recorded(SOURCES[name])
    given = figures(sections()[name])
    assert given
    wanting = [x for x in given if not any(near(x, value) for value in values)]
    assert not wanting, f"{wanting} in no row of {SOURCES[name]}"


def test_docs_plots_are_there() -> None:
    drawn = re.findall(r"\]\((plots/\w+\.svg)\)", TEXT)
    assert drawn and all((ROOT / "docs" / x).exists() for x in drawn)
    assert {Path(x).name for x in drawn} == {x.name for x in (ROOT / "docs/plots").glob("*.svg")}
