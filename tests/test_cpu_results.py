"""tools/cpu_results.py: the same tree has the same hashes, and one bit more makes another."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from tests.support.forked import run_code
from tests.support.scripts import script

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools/cpu_results.py"


def _run(*args: object) -> CompletedProcess:
    return run_code(SCRIPT, *args)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("results") / "one.json"
    made = _run("write", file, "--only", "^(rms_norm|chunk_kda|cross_entropy|matmul) ")
    assert made.returncode == 0, made.stderr
    return file


def test_write_repeats_itself(written: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    _run("write", again, "--only", "^(rms_norm|chunk_kda|cross_entropy|matmul) ")
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) > 12 and all(len(x) == 16 for x in rows.values()), rows
    assert _run("compare", written, again).returncode == 0


def test_compare_names_what_differs(written: Path, tmp_path: Path) -> None:
    found = json.loads(written.read_text())
    found["rows"]["rms_norm fp32 eager"] = "0" * 16
    other = tmp_path / "other.json"
    other.write_text(json.dumps(found))
    compared = _run("compare", written, other)
    assert compared.returncode == 1 and "rms_norm fp32 eager" in compared.stdout


def test_digest_sees_one_bit() -> None:
    digest = script("tools/cpu_results").digest
    x = torch.ones(3)
    y = torch.nextafter(x, torch.tensor([1.0, 2.0, 1.0]))
    assert digest([x]) == digest([x.clone()]) != digest([y])
    assert digest([x]) != digest([x.double()]) and digest([x.view(1, 3)]) != digest([x])
