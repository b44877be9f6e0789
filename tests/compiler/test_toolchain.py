"""Which compilers are here, and when another ptxas than Triton's own is selected."""

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
