"""tools/sanitize.py runs the operators that it is asked for."""

import importlib
from pathlib import Path
from typing import Any

import pytest


def test_sanitize(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # left as it was afterwards
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    sanitize: Any = importlib.import_module("sanitize")
    sanitize.main(["--sizes", "odd", "--only", "rms_norm|chunk_kda$"])
    printed = capsys.readouterr().out
    assert "chunk_kda ran" in printed and "rms_norm ran" in printed
