"""Numbers of README.md and docs come from rows of bench/results (tools/claims.py)."""

import re
from pathlib import Path

import pytest

from tests.support.scripts import ROOT, script

claims, convergence_table = script("tools/claims"), script("tools/convergence_table")
performance_tables = script("tools/performance_tables")
table_cells = script("tools/table_cells")
tables = performance_tables.tables
Row, is_number = table_cells.Row, table_cells.is_number
number, read = table_cells.number, table_cells.read

PAGES = [claims.name_of(x) for x in claims.pages()]
STATED = "docs/performance.md"


@pytest.mark.parametrize("page", PAGES)
def test_page_numbers_have_rows(page: str) -> None:
    assert claims.problems(page, (ROOT / page).read_text(encoding="utf-8"), tables()) == []


def test_rows_begin_with_a_date() -> None:
    """A row pasted from a diff begins with a sign, and its entry is found nevertheless."""
    files = sorted((ROOT / "bench/results").glob("*.csv"))
    rows = [(x.name, row) for x in files for row in read(x.stem)]
    wanted = re.compile(r"\d{4}-\d\d-\d\d")
    assert len(rows) > 1000
    assert [(x, y.line) for x, y in rows if not wanted.fullmatch(y.get("date"))] == []


def test_every_table_is_on_a_page() -> None:
    texts = [(ROOT / x).read_text(encoding="utf-8") for x in PAGES]
    assert {x[2] for text in texts for x in claims.BLOCK.finditer(text)} == set(tables())


@pytest.mark.parametrize(
    "sentence",
    [
        "The gated delta rule takes 0.3 ms.",
        "It is 2 times faster.",
        "kda needs 25% more memory.",
        "It reaches 657 TFLOP/s.",
        "Compilation takes 40 seconds.",
        "The losses are within 0.002.",
        "It takes half of the time.",
        "It takes two to three\ntimes as long.",
    ],
)
def test_number_without_row_fails(sentence: str) -> None:
    text = (ROOT / STATED).read_text(encoding="utf-8") + f"\n{sentence}\n"
    assert claims.problems(STATED, text, tables())


def test_changed_number_fails() -> None:
    text = (ROOT / STATED).read_text(encoding="utf-8")
    first = tables()["linear"].rows[0][1].text
    assert claims.problems(STATED, text.replace(first, "0.001 / 0.002", 1), tables())


def test_numbers_name_a_row_that_has_them() -> None:
    """The place of every number is a line and a column of a file, with that number in it."""
    checked = 0
    for _, _, cell in performance_tables.claims(tables().values()):
        for source in cell.sources:
            file, line, column = re.fullmatch(r"(\S+\.csv):(\d+) (.+)", source).groups()  # type: ignore[union-attr]
            row = read(Path(file).stem)[int(line) - 2]
            assert row.line == int(line) and row.get(column)
            checked += 1
        if len(cell.sources) == 1 and is_number(cell.text):
            values = re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", row.get(column))
            half = 0.501 * 10.0 ** -len(cell.text.partition(".")[2])
            # steps are stated in microseconds
            near = [abs(float(x) * y - float(cell.text)) <= half for x in values for y in (1, 1000)]
            assert any(near), source
    assert checked > 500


@pytest.mark.parametrize(
    ("given", "digits", "shown"),
    [("472", 3, "472"), ("0.8520", 3, "0.852"), ("0.85", 3, "0.85"), ("12897.054", 3, "12897"),
     ("5.346", 3, "5.35"), ("0.06", 2, "0.06"), ("", 3, "")],
)  # fmt: skip
def test_number_shows_no_digits_that_are_not_there(given: str, digits: int, shown: str) -> None:
    assert number(Row("x", 2, {"c": given}), "c", digits=digits).text == shown


def test_docs_plots_are_there() -> None:
    pages = (ROOT / STATED, *(ROOT / "docs/guides").glob("*.md"))
    texts = [x.read_text(encoding="utf-8") for x in pages]
    drawn = {y for x in texts for y in re.findall(r"\]\((?:\.\./)?plots/(\w+\.svg)\)", x)}
    assert drawn == {x.name for x in (ROOT / "docs/plots").glob("*.svg")}


def test_scripts_of_tables_are_there() -> None:
    named = [y for x in tables().values() for y in re.findall(r"bench/\w+\.py", x.script)]
    assert named and all((ROOT / x).exists() for x in named)


def test_gaps_between_seeds() -> None:
    """Means over pairs: of ours and fla from a seed, of fla's seeds, of fla and fla moved."""
    losses = {"ours 0": 1.0, "fla 0": 1.5, "ours 1": 2.0, "fla 1": 1.75, "moved 1": 2.75}
    runs = {x: {2: Row("convergence", 1, {"loss": str(loss)})} for x, loss in losses.items()}
    assert convergence_table.gaps(runs, 2, ["0", "1"]) == (0.375, 0.25, 1.0)


def test_losses_of_two_gpus_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last GPU with two seeds of ours and of fla's."""
    ran = [("A", "01"), ("B", "01"), ("A", "0"), ("C", "0")]
    named = [(gpu, f"{x} {seed}") for gpu, seeds in ran for x in ("ours", "fla") for seed in seeds]
    given = {"model": "kda", "part": "train", "step": "2"}
    rows = [
        Row("convergence", n, {**given, "device": gpu, "run": run})
        for n, (gpu, run) in enumerate(named)
    ]
    monkeypatch.setattr(convergence_table, "read", lambda name: rows)
    ((of, runs),) = convergence_table.losses().items()
    assert of == ("kda", "train") and list(runs) == ["ours 0", "ours 1", "fla 0", "fla 1"]
    assert {steps[2].get("device") for steps in runs.values()} == {"A"}
