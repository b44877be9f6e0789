"""Triton's digest of itself, remembered.

Every key in Triton's cache begins with a digest of the compiler: 400 MB, read anew by each process,
a third of a second of its first call. It is kept on disk, by the names, sizes and times of the
files that it is of; where none of these has changed, Triton is told what it found the last time.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.compiler.compiler_state import cache_dir
from slipstream.runtime.files import write_text

# What it is of, in Triton's folder: everything that can be imported, and the compiler.
HASHED_PATHS = ("__init__.py", "runtime", "compiler", "backends", "language", "_C")
SUFFIXES = (".py", ".so", ".pyd")
_begun: list[threading.Thread] = []


def _file() -> Path:
    return cache_dir() / "triton_digest.json"


def _files(root: Path) -> Iterator[Path]:
    for name in HASHED_PATHS:
        path = root / name
        files = [path] if path.is_file() else path.rglob("*")
        yield from (x for x in files if x.suffix in SUFFIXES and x.is_file())


def _state(root: Path) -> str:
    """Differs where one of the files has been written, replaced or moved."""
    digest = hashlib.sha1(str(root).encode(), usedforsecurity=False)
    for path in sorted(_files(root)):
        stat = path.stat()
        each = (path.relative_to(root), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        digest.update(repr(each).encode())
    return digest.hexdigest()


@cache
def reuse() -> None:
    """Gives Triton its digest of itself from an earlier process; a failure here only costs time."""
    with contextlib.suppress(Exception):
        import triton
        from triton.runtime import cache as triton_cache

        module: Any = triton_cache
        state = _state(Path(str(triton.__file__)).parent)
        cached = _read()
        if cached.get("state") == state:
            key = cached["key"]
            module.triton_key = lambda: key
        else:
            _write({"state": state, "key": module.triton_key()})


def begin() -> None:
    """Starts the digest in a thread where there is a GPU, for kernels that will be wanted soon."""
    if _begun:
        return
    thread = threading.Thread(target=_reuse_with_gpu, daemon=True)
    with contextlib.suppress(RuntimeError):  # there are no threads
        thread.start()
        _begun.append(thread)


def finish() -> None:
    """reuse() by the thread that has begun it, or now."""
    for thread in _begun:
        thread.join()
    reuse()


def _reuse_with_gpu() -> None:
    import torch

    if torch.cuda.device_count():
        reuse()


def _read() -> dict[str, str]:
    try:
        stored = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _write(entry: dict[str, str]) -> None:
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(entry))
