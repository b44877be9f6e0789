"""bench/tune.py: the tables hold what was recorded as the best, and it goes on where it was cut."""

import argparse
import dataclasses
import importlib
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from slipstream.tools import tile_cases as cases

BENCH = Path(__file__).parents[1] / "bench"
pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="tables are Triton's")


def bench(name: str) -> Any:
    """A module of bench/, which is no package."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


tune, choice, harness = (bench(x) for x in ("tune", "tune_choice", "harness"))
KEYS = [
    (name, key)
    for name, family in cases.FAMILIES.items()
    for key in dict.fromkeys(case.key for case in family.cases)
]
every_key = pytest.mark.parametrize(("name", "key"), KEYS, ids=str)


def recorded(name: str, key: tuple) -> Any:
    return choice.expected(cases.FAMILIES[name], name, key, tune.read("tiles"))


@pytest.mark.parametrize(("name", "key"), [x for x in KEYS if recorded(*x) is not None], ids=str)
def test_table_is_the_best_that_was_recorded(name: str, key: tuple) -> None:
    """Of those rows of the tables that have been timed."""
    best = recorded(name, key)
    assert best == cases.FAMILIES[name].table[key], "bench/tune.py all --propose says what differs"


@every_key
def test_candidates_are_few_and_can_run(name: str, key: tuple) -> None:
    family = cases.FAMILIES[name]
    found = list(tune.tried(family, key))
    assert 0 < len(found) <= 24
    for field, label, tile in found:
        numbers = [int(x) for x in label.split()]
        assert tile == choice.replaced(family.table[key], field, numbers) != family.table[key]
    assert all(case.sample.op for case in family.cases)


def timed(tile: Any, ms: dict[tuple[str, str], float], case: str = "A") -> list[dict[str, Any]]:
    """Rows of a case: of the table, 1 ms, and of candidates by field and numbers."""
    what = {"family": "delta", "key": "sm_90 2 128", "case": case}
    found = {("table", str(tile)): 1.0, **ms}
    return [
        {**what, "field": f, "tile": x, "right": "1", "forward_ms": str(t), "both_ms": str(t)}
        for (f, x), t in found.items()
    ]


def test_expected_tile_is_best_of_all_cases() -> None:
    family, key = cases.FAMILIES["delta"], ("sm_90", 2, 128)
    kept = family.table[key]

    def expected(*runs: list[dict[str, Any]]) -> Any:
        return choice.expected(family, "delta", key, [row for run in runs for row in run])

    solved = dataclasses.replace(kept, solve=type(kept.solve)(64, 4, 2))
    fast = {("solve", "64 4 1"): 0.95, ("solve", "64 4 2"): 0.9, ("grads", "64 4 1"): 0.99}
    led, late = {**fast, ("all", str(solved)): 0.9}, {**fast, ("all", str(solved)): 0.99}
    assert expected() is None
    assert expected(timed(kept, {})) == expected(timed(kept, fast)) == kept
    assert expected(timed(kept, led)) == solved and expected(timed(kept, late)) == kept
    # another case, which does not take the field, takes it too, or finds it wrong
    assert expected(timed(kept, led), timed(kept, {("all", str(solved)): 1.0}, "Q1")) == solved
    assert expected(timed(kept, led), timed(kept, led, "Q1")) == solved
    wrong = [{**x, "right": "0"} for x in timed(kept, {("solve", "64 4 2"): 0.5}, "Q1")]
    assert expected(timed(kept, led), wrong) == kept
    # what came before the last time that the table was timed is past
    assert expected(timed(kept, led), timed(kept, {})) == kept
    assert expected(timed(kept, led), timed(solved, {})) == solved


@every_key
def test_written_row_is_read_as_it_is(name: str, key: tuple) -> None:
    family = cases.FAMILIES[name]
    *_, (_, _, tile) = tune.tried(family, key)
    assert choice.tile_of(family, str(tile)) == tile
    module: Any = importlib.import_module(family.tiles)
    source = tune.placed(Path(module.__file__).read_text(), family.name, key, tile)
    names: dict[str, Any] = {"__name__": "tiles_with_another_row"}
    sys.modules[names["__name__"]] = type(sys)(names["__name__"])  # where dataclasses look
    exec(compile(source, "tiles", "exec"), names)
    del sys.modules[names["__name__"]]
    assert str(names[family.name][key]) == str(tile)
    others = {str(k): str(x) for k, x in names[family.name].items() if k != key}
    assert others == {str(k): str(x) for k, x in family.table.items() if k != key}


class Stub:
    """A call on a GPU that is not there: what its tile costs, by its solve and its scan."""

    made = 0
    fails_at: int | None = None

    def __init__(self, case: Any, shape: Any) -> None:
        self.table, self.key = cases.FAMILIES["delta"].table, case.key

    def results(self) -> list[torch.Tensor]:
        return [torch.ones(3)]

    def times(self) -> tuple[float, float]:
        if Stub.made == Stub.fails_at:
            raise KeyboardInterrupt
        Stub.made += 1
        tile = self.table[self.key]
        ms = 1.0 - 0.1 * (tile.solve.B == 64) - 0.05 * (tile.fwd.stages == 2)
        return ms, ms


class Wavering(Stub):
    """Other bits each time with two stages of its solve."""

    def results(self) -> list[torch.Tensor]:
        Stub.made += 1
        wavers = self.table[self.key].solve.stages == 2
        return [torch.ones(3) + 1e-5 * Stub.made * wavers]


def test_tile_with_varying_bits_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tune, "Call", Wavering)
    monkeypatch.setattr(Stub, "made", 0)
    family = cases.FAMILIES["delta"]
    timed = tune.Timed("delta", family.cases[0], [])
    table = family.table[family.cases[0].key]
    for stages in (1, 2):
        solve = dataclasses.replace(table.solve, stages=stages)
        tile = dataclasses.replace(table, solve=solve)
        timed.candidate("solve", str(stages), tile, tune.Fit())
    right, wrong = (timed.known["solve", str(x)] for x in (1, 2))
    assert right["right"] == 1 and "note" not in right
    assert wrong["right"] == 0 and "other bits" in str(wrong["note"])


def test_goes_on_where_it_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(tune, "Call", Stub)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    family, key = cases.FAMILIES["delta"], ("sm_90", 2, 128)
    options = argparse.Namespace(again=False, seconds=float("inf"))
    tiles = list(tune.tried(family, key))

    def run() -> None:
        futures: list[Future] = [Future() for _ in range(len(tiles) + 1)]
        for i, x in enumerate(futures):
            x.set_result(tune.Fit(note="spills" if i == 1 else "", kernels=(str(i),)))
        tune.tune_key("delta", key, tiles, {0: futures}, options)

    Stub.fails_at = 4
    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(tune.read("tiles")) == 5  # the table's, one that spills, three
    Stub.fails_at = None
    run()
    rows = tune.read("tiles")
    assert len(rows) == len(tiles) + 2 and Stub.made == len(tiles) + 1
    want = dataclasses.replace(family.table[key], solve=type(family.table[key].solve)(64, 4, 2))
    assert choice.together(family, key, family.table[key], {"A": rows}).solve == want.solve
    best = choice.expected(family, "delta", key, rows)
    assert best.solve == want.solve and best.fwd.stages == 2
    tune.propose(["delta"], write=False)
    assert '+    ("sm_90", 2, 128)' in capsys.readouterr().out.replace("'", '"')
