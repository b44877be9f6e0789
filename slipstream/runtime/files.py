"""Small files: read with errors that name them, written whole or left as they were before."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """
    Raises:
        ValueError: it is no UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read as UTF-8: {error}") from error


def read_json(path: Path) -> Any:
    """
    Raises:
        ValueError: it is no JSON in UTF-8.
        OSError: it cannot be read.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step: a reader, or the next start after a crash, sees the old text or
    the new one.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
