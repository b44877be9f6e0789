"""Other Triton releases: pip installs one once, here from a folder; the matrix compiles with it."""

import json
import sys
from importlib.metadata import distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support import wants
from tests.support.scripts import script
from tests.support.traced_in_a_thread import trace_in_a_thread

install = script("tools/triton_releases").install


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel of a Triton 3.6.99, where pip looks instead of on PyPI."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    about = "triton-3.6.99.dist-info"
    with ZipFile(folder / "triton-3.6.99-py3-none-any.whl", "w") as wheel:
        wheel.writestr("triton/__init__.py", "__version__ = '3.6.99'\n")
        wheel.writestr(f"{about}/METADATA", _metadata("3.6.99"))
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _metadata(version: str) -> str:
    return f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n"


def test_release_is_installed_once(wheels: Path, tmp_path: Path) -> None:
    # Neither imported nor looked for: setuptools would leave distutils alone from then on, and warn
    # later, when torch's inductor imports it, that distutils was there before.
    if not any(x.name == "pip" for x in distributions()):
        pytest.skip("needs pip")
    root = tmp_path / "releases"
    folder = install("3.6.99", root)
    assert folder == root / "triton-3.6.99"
    assert "3.6.99" in (folder / "triton/__init__.py").read_text()
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert install("3.6.99", root) == folder
    with pytest.raises(ValueError, match=r"triton 3\.6\.98: pip could not install it: .*3\.6\.98"):
        install("3.6.98", root)
    assert list(root.iterdir()) == [folder]


@wants.compiler
def test_matrix_under_another_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In a child that finds it before the one that is here: the same code, of another version."""
    trace_in_a_thread(monkeypatch)
    here = find_spec("triton")
    assert here is not None and here.origin is not None
    folder = tmp_path / "releases/triton-3.6.99"
    about = folder / "triton-3.6.99.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(_metadata("3.6.99"))
    backends = distribution("triton").read_text("entry_points.txt")
    (about / "entry_points.txt").write_text(backends or "")
    (folder / "triton").symlink_to(Path(here.origin).parent)
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    out = tmp_path / "rows.json"
    run = ["squared_relu", "--arch", "sm_80", "--forward", "--shapes", "1", "--jobs", "1"]
    matrix = script("tools/matrix")
    assert matrix.main([*run, "--triton", "3.6.99", "--json", str(out)]) == 0
    assert "Triton 3.6.99" in capsys.readouterr().out
    rows = json.loads(out.read_text())
    assert rows and {x["triton"] for x in rows} == {"3.6.99"}
    assert {x["status"] for x in rows} == {"ok"}
    assert str(folder) not in sys.path
    (kept,) = (tmp_path / "matrix").iterdir()
    assert kept.name.startswith("3.6.99-")


@wants.compiler
def test_blocking_fault_is_the_reason_of_each_operator() -> None:
    from slipstream.tools.backend_query import find_kernels
    from slipstream.tools.catalog import REPRESENTATIVE, chosen

    new = {"triton": "3.6.0", "ptxas": "13.0.88", "ptxas_blackwell": "13.0.88"}
    samples = chosen(["embedding", "retention"])
    found = find_kernels(samples, REPRESENTATIVE[:1], "sm_70", compilers=new)
    assert (found.tasks, found.failures) == ([], [])
    assert set(found.without) == {x.op for x in samples}
    reason = "any kernel: ptxas 13 has no sm_70: ptxas13-volta; unset TRITON_PTXAS_PATH"
    assert all(x.startswith(reason) for x in found.without.values())
    assert find_kernels(samples, REPRESENTATIVE[:1], "sm_90", compilers=new).without == {}
