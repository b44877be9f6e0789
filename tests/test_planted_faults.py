"""tests/planted_faults.csv: each fault that tools/plant_faults.py drew has its place, and its test.
Where a line of the list has changed, its row gets the new line, or the next fault of the draw. Rows
of code that is gone are gone too."""

import ast
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.support.scripts import ROOT, script

plant_faults = script("tools/plant_faults")
FAULTS = plant_faults.listed()
SEEDS = {str(seed) for seed in range(40, 57)}
DRAWN = [x for x in FAULTS if x.result != "equivalent"]


@pytest.mark.parametrize("file", sorted({x.file for x in FAULTS}))
def test_faults_of_a_file_have_their_places(file: str) -> None:
    source = (ROOT / file).read_text()
    sites = {x[:5] for x in plant_faults.sites(file, source)}
    for fault in (x for x in FAULTS if x.file == file):
        assert fault[:5] in sites, fault
        ast.parse(planted := plant_faults.planted(source, fault))
        assert planted.split() != source.split(), fault


def test_every_fault_has_a_test() -> None:
    for fault in DRAWN:
        assert fault.result in ("found", "survived")
        path, _, name = fault.test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), fault
    assert {x.seed for x in DRAWN} == SEEDS
    for seed in SEEDS:
        found = Counter(x.kind for x in DRAWN if x.seed == seed)
        assert not found.keys() - {*plant_faults.KINDS}
        assert max(found.values()) == plant_faults.OF_A_KIND
    assert not {x.file for x in DRAWN} & plant_faults.LEFT_OUT
    assert all(x.note for x in FAULTS if x.result != "found")


def test_apply_and_revert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[0]
    path = tmp_path / fault.file
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / fault.file, path)
    before = path.read_text()
    monkeypatch.setattr(plant_faults, "ROOT", tmp_path)
    plant_faults.main("apply", "0")
    assert path.read_text() == plant_faults.planted(before, fault)
    with pytest.raises(AssertionError, match="its place is gone"):
        plant_faults.main("apply", "0")
    os.utime(path.with_suffix(plant_faults.SAVED), (1.0, 1.0))
    plant_faults.main("revert")
    assert path.stat().st_mtime > 1.0
    assert path.read_text() == before and [*path.parent.iterdir()] == [path]
