"""Which compilers are here, and when another ptxas than Triton's own is selected."""

import os
import sys
from pathlib import Path

import pytest

from slipstream.compiler import toolchain


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Triton 3.6.0 with ptxas 12.8.93, and nvidia-cuda-nvcc's 13.1.80 beside it."""
    places = {"own/ptxas": "12.8.93", "own/ptxas-blackwell": "12.9.86", "cu13/bin/ptxas": "13.1.80"}
    for name, version in places.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release x, V{version}'\n")
        path.chmod(0o755)
    found = tmp_path / "cu13/bin/ptxas"
    monkeypatch.delenv(toolchain.VARIABLE, raising=False)
    monkeypatch.setattr(toolchain, "_bundled", lambda: tmp_path / "own")
    monkeypatch.setattr(toolchain, "installed_ptxas", lambda: [found])
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.6.0")
    return found


def test_select_ptxas_where_tritons_own_is_faulty(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert toolchain.select_ptxas(("sm_80",)) is None
    why = toolchain.select_ptxas(("sm_90",))
    assert why is not None and "13.1.80" in why and "narrow-dot" in why
    assert toolchain.ptxas_path("sm_90") == str(other)
    monkeypatch.delenv(toolchain.VARIABLE)


def test_select_ptxas_leaves_what_would_break(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas 13 has no sm_70; a user's own path stays; a cured release wants none."""
    assert toolchain.select_ptxas(("sm_90", "sm_70")) is None
    monkeypatch.setattr(toolchain, "installed_ptxas", list)
    assert toolchain.select_ptxas(("sm_90",)) is None
    monkeypatch.setattr(toolchain, "installed_ptxas", lambda: [other])
    theirs = str(other.parents[2] / "own/ptxas-blackwell")
    monkeypatch.setenv(toolchain.VARIABLE, theirs)
    assert toolchain.select_ptxas(("sm_90",)) is None
    assert toolchain.ptxas_path("sm_90") == theirs


@pytest.mark.parametrize("given", ["/nowhere/ptxas", ""])
def test_broken_ptxas_path_is_replaced(
    other: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Triton itself would take its own without a word, or fail."""
    monkeypatch.setenv(toolchain.VARIABLE, given)
    assert toolchain.ptxas_path("sm_90") == str(other.parents[2] / "own/ptxas")
    with pytest.warns(RuntimeWarning, match=f"TRITON_PTXAS_PATH: {given!r} does not run"):
        why = toolchain.select_ptxas(("sm_90",))
    assert why is not None and toolchain.ptxas_path("sm_90") == str(other)
    monkeypatch.delenv(toolchain.VARIABLE)


def test_broken_blackwell_ptxas_path_warns(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.BLACKWELL, "/nowhere/ptxas")
    with pytest.warns(RuntimeWarning, match=r"BLACKWELL_PATH: '/nowhere/ptxas' does not run"):
        toolchain.select_ptxas(("sm_100",))
    assert toolchain.BLACKWELL not in os.environ
    assert toolchain.ptxas_path("sm_100") == str(other.parents[2] / "own/ptxas-blackwell")


def test_ptxas_path_and_version(other: Path) -> None:
    own = toolchain.ptxas_path("sm_90")
    assert own is not None and toolchain.ptxas_version(own) == "12.8.93"
    blackwell = toolchain.ptxas_path("sm_120")
    assert blackwell is not None and toolchain.ptxas_version(blackwell) == "12.9.86"
    assert toolchain.ptxas_path("gfx942") is None
    assert toolchain.ptxas_version("/nowhere/ptxas") is None


def test_sm_90_takes_second_ptxas_from_triton_3_9(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton's own get_ptxas does, so what is recorded and verified names the right one."""
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.9.0")
    own = other.parents[2] / "own"
    assert toolchain.ptxas_path("sm_90") == str(own / "ptxas-blackwell")
    assert toolchain.ptxas_path("sm_89") == str(own / "ptxas")
    assert toolchain.select_ptxas(("sm_90",)) is None
    monkeypatch.setenv(toolchain.BLACKWELL, str(other))
    assert toolchain.ptxas_path("sm_90") == str(other)
    assert toolchain.selected("sm_90") != "Triton's own" == toolchain.selected("sm_89")
    found = toolchain.versions()
    assert found == {"triton": "3.9.0", "ptxas": "12.8.93", "ptxas_blackwell": "13.1.80"}
    takes = [toolchain.ptxas_of(x, found) for x in ("sm_89", "sm_90", "sm_120", "gfx942")]
    assert takes == ["12.8.93", "13.1.80", "13.1.80", ""]
    assert toolchain.ptxas_of("sm_90", found | {"triton": "3.8.0"}) == "12.8.93"


def test_triton_assembles_by_the_ptxas_that_is_named_here() -> None:
    """Of the Triton that is installed."""
    nvidia = pytest.importorskip("triton.backends.nvidia.compiler")
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert toolchain.ptxas_path(arch) == nvidia.get_ptxas(int(arch[3:])).path


def test_toolkit_ptxas_if_new_enough(
    other: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.delenv(toolchain.VARIABLE, raising=False)
    monkeypatch.setattr(toolchain, "_bundled", lambda: tmp_path / "own")
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    for name, release in {"old": "12.6.20", "new": "13.0.88"}.items():
        path = tmp_path / name / "bin/ptxas"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho 'release x, V{release}'\n")
        path.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "new"))
    assert toolchain.select_ptxas(("sm_90",), driver=12) is None
    why = toolchain.select_ptxas(("sm_90",), driver=13)
    assert why is not None and "13.0.88 of the toolkit at" in why and "narrow-dot" in why
    assert "toolkit" in toolchain.selected("sm_90")
    monkeypatch.delenv(toolchain.VARIABLE)
    assert toolchain.selected("sm_90") == "Triton's own"


@pytest.mark.parametrize("named", ["CUDA_HOME", "PATH"])
def test_installed_ptxas_finds_what_pip_laid_down(
    named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nvidia-cuda-nvcc shares the folder nvidia with other wheels, and has no __init__.py there.

    Found ahead of a toolkit, the newest first, and without what does not run.
    """

    def lay(place: str, words: str) -> Path:
        path = tmp_path / place / "bin/ptxas"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{words}\n")
        path.chmod(0o755)
        return path

    lay("site/nvidia/cu14", "exit 1")
    old = lay("site/nvidia/cu13", "echo 'release 13.1, V13.1.80'")
    new = lay("other/nvidia/cu13", "echo 'release 13.2, V13.2.51'")
    toolkit = lay("toolkit", "echo 'release 13.4, V13.4.1'")
    own = lay("own", "echo 'release 12.8, V12.8.93'")
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    for place in ("site", "other"):
        monkeypatch.syspath_prepend(tmp_path / place)
    for variable in ("CUDA_HOME", "CUDA_PATH", toolchain.VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    places = {"CUDA_HOME": str(toolkit.parents[1])}
    places["PATH"] = f"{toolkit.parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv(named, places[named])
    found = [x for x in toolchain.installed_ptxas() if tmp_path in x.parents]
    assert found == [new, old, toolkit]
    assert [toolchain.ptxas_version(str(x)) for x in found] == ["13.2.51", "13.1.80", "13.4.1"]
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(toolchain, "_bundled", lambda: own.parent)
    why = toolchain.select_ptxas(("sm_90",), driver=13)
    assert why is not None and why.startswith("ptxas 13.2.51 of nvidia-cuda-nvcc: ")
    assert toolchain.selected("sm_90") == "nvidia-cuda-nvcc's"
