"""Which compilers are here, when another ptxas than Triton's own is selected, where caches go."""

import os
import tempfile
from pathlib import Path

import pytest

from slipstream.compiler import compiler_state, toolchain
from slipstream.runtime.guarded_launch import KernelDisabledWarning


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


def test_caches_have_a_place_without_a_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SLIPSTREAM_CACHE_DIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("HOME", "~")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"slipstream-{os.getuid()}"
    assert compiler_state.cache_dir() == own / ".cache/slipstream"
    assert own.stat().st_mode & 0o777 == 0o700
    compiler_state.select_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(own / ".triton/cache")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "slipstream-12345").mkdir()
    with pytest.raises(PermissionError, match="belongs to another user"):
        compiler_state.cache_dir()


def test_unwritable_cache_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file/cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(KernelDisabledWarning, match=r"file/cache cannot be written"):
        compiler_state.select_cache()
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_dir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file/cache"))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: (_ for _ in ()).throw(OSError()))
    compiler_state.select_cache()  # never raises
