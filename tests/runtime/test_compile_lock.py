"""The lock of a kernel among processes, where the file system of Triton's cache has none."""

from pathlib import Path
from typing import Any

import filelock
import pytest

from slipstream.runtime.parallel_compile import _Once

pytest.importorskip("triton")


@pytest.mark.parametrize("error", [NotImplementedError, PermissionError])
def test_without_locks_every_process_compiles(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def acquire(self: Any, **options: Any) -> None:
        raise error

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    once = _Once("some kernel", "some_kernel")
    assert not once.is_elsewhere()
    once.wait()
    once.release()
    assert not list(tmp_path.rglob("*.json"))
