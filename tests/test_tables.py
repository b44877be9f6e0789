"""Numbers of README.md and docs come from rows of bench/results (tools/tables.py)."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.scripts import ROOT, script

tables, specs = script("tools/tables"), script("tools/table_specs")
TEXTS = {x: table.text() for x, table in specs.TABLES.items()}
PAGES = [tables.name_of(x) for x in tables.pages()]
STATED = "docs/performance.md"


@pytest.mark.parametrize("page", PAGES)
def test_page_numbers_have_rows(page: str) -> None:
    assert tables.problems(page, (ROOT / page).read_text(encoding="utf-8"), TEXTS) == []


def test_rows_begin_with_a_date() -> None:
    """A row pasted from a diff begins with a sign."""
    names = sorted(x.stem for x in (ROOT / "bench/results").glob("*.csv"))
    rows = [(x, i, row["date"]) for x in names for i, row in enumerate(tables.read(x))]
    assert len(rows) > 1000
    assert [x for x in rows if not re.fullmatch(r"\d{4}-\d\d-\d\d", x[2])] == []


@pytest.mark.parametrize("name", specs.TABLES)
def test_every_column_of_a_table_has_a_number_somewhere(name: str) -> None:
    """A column that no row has is an error, not an empty table."""
    cells = specs.TABLES[name].cells()
    assert cells and all(any(x) for x in zip(*cells, strict=True))


def test_every_table_is_on_a_page() -> None:
    texts = [(ROOT / x).read_text(encoding="utf-8") for x in PAGES]
    shown = {x[2] for text in texts for x in tables.BLOCK.finditer(text)}
    assert shown | {x[0] for x in specs.SUMMARY} == set(TEXTS)


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
    assert tables.problems(STATED, text, TEXTS)


def test_changed_number_fails() -> None:
    text = (ROOT / STATED).read_text(encoding="utf-8")
    first = specs.TABLES["linear"].cells()[0][1]
    assert first in text
    assert tables.problems(STATED, text.replace(first, "0.001 / 0.002", 1), TEXTS)


@pytest.mark.parametrize(
    ("given", "place", "shown"),
    [("472", "c:3", "472"), ("0.8520", "c:3", "0.852"), ("0.85", "c:3", "0.85"), ("", "c:3", ""),
     ("12897.054", "c:3", "12897"), ("5.346", "c:3", "5.35"), ("0.06", "c:2", "0.06"),
     ("0.02041", "c*1000:3", "20.4"), ("o 3.8e-03, k 4e-03", "c!", "4e-3"),
     ("8", "c:3 ~ c:3", "1.00")],
)  # fmt: skip
def test_number_shows_no_digits_that_are_not_there(given: str, place: str, shown: str) -> None:
    assert tables.value(place, {"": {"c": given}}) == shown


def test_pair_without_one_number_has_a_dash() -> None:
    line = {"": {"a": "1.5", "b": ""}}
    assert tables.rendered("{a:3} / {b:3}", line) == "1.5\u00a0/\u00a0-"
    assert tables.rendered("{b:3} / {b:3}", line) == ""
    assert tables.rendered("{b:3} || {a:3} ms", line) == "1.5 ms"


def test_newest_row_counts() -> None:
    rows = [{"k": k, "ms": ms} for k, ms in (("a", "1"), ("b", "2"), ("a", "3"))]
    table = tables.Table(lambda: rows, "k", {"name": "{k}", "ms": "{ms:3}"})
    assert table.cells() == [["a", "3"], ["b", "2"]]


def test_docs_plots_are_there() -> None:
    pages = (ROOT / STATED, ROOT / "docs/index.md", *(ROOT / "docs/guides").glob("*.md"))
    texts = [x.read_text(encoding="utf-8") for x in pages]
    drawn = {y for x in texts for y in re.findall(r"\]\((?:\.\./)?plots/(\w+\.svg)\)", x)}
    assert drawn == {x.name for x in (ROOT / "docs/plots").glob("*.svg")}


def test_scripts_of_tables_are_there() -> None:
    named = [x.script.split()[0] for x in specs.TABLES.values() if x.script]
    assert named and all((ROOT / x).exists() for x in named)


def test_performance_page_is_short() -> None:
    assert len((ROOT / STATED).read_text(encoding="utf-8").splitlines()) <= 250


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable]:
    """Writes rows of (device, run, step, loss) as the only results."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.database.cache_clear()

    def write(*rows: tuple[str, str, int, float]) -> None:
        head = "date,device,torch,model,run,step,part,loss"
        lines = [f"2026-11-26,{x},2.11,kda,{run},{at},train,{loss}" for x, run, at, loss in rows]
        (tmp_path / "convergence.csv").write_text("\n".join([head, *lines]))

    yield write
    tables.database.cache_clear()


def test_gaps_between_seeds(losses: Callable) -> None:
    """Means over pairs: of ours and fla from a seed, of fla's seeds, of fla and fla moved."""
    given = {"ours 0": 1.0, "fla 0": 1.5, "ours 1": 2.0, "fla 1": 1.75, "moved 1": 2.75}
    losses(*(("A", run, 2, loss) for run, loss in given.items()))
    (row,) = tables.read(specs.CONVERGENCE)
    assert [row[f"end {i}"] for i in range(3)] == ["0.3750", "0.2500", "1.0000"]
    assert (row["ours"], row["fla"], row["seeds"], row["step"]) == ("1.5000", "1.6250", "2", "2")
    assert len(tables.sources([row])) == len(given)


def test_gaps_of_the_second_half_are_means_over_steps(losses: Callable) -> None:
    """Empty where a step has no moved run, and of several tries from a seed the farthest counts."""
    runs = [("A", f"{who} {x}", at, x + at * (who == "ours")) for who in ("ours", "fla")
            for x in (0, 1) for at in (1, 2, 4)]  # fmt: skip
    losses(*runs, ("A", "ours 0", 1, 50.0), ("A", "moved 0", 4, 8.0))
    (row,) = tables.read(specs.CONVERGENCE)
    assert [row[f"half {i}"] for i in range(3)] == ["3.0000", "1.0000", ""]
    assert row["end 2"] == "8.0000"


def test_losses_of_two_gpus_are_not_compared(losses: Callable) -> None:
    """Those of the last GPU with two seeds of ours and of fla's."""
    ran = [("A", "01"), ("B", "01"), ("A", "0"), ("C", "0")]
    losses(*((gpu, f"{who} {x}", 2, 1.0) for gpu, xs in ran for who in ("ours", "fla") for x in xs))
    rows = tables.read(f"{specs.LOSSES} SELECT * FROM losses")
    assert {x["run"] for x in rows} == {"ours 0", "ours 1", "fla 0", "fla 1"}
    assert {x["device"] for x in rows} == {"A"}
