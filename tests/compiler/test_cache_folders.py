"""Where caches go if their folders have no place or cannot be written."""

import os
import tempfile
from pathlib import Path

import pytest

from slipstream.compiler import compiler_state
from slipstream.runtime.guarded_launch import KernelDisabledWarning


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
