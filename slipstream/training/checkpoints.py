"""Which checkpoint of a run to continue from.

A checkpoint's trainer_state.json is the last of its files to be written, and lists the size of
every other one: where it can be read, all are there at that size and hold what their names say (a
machine that loses power leaves zeros), the checkpoint is whole.
"""

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

STATE = "trainer_state.json"
EXPORTED = "Place"
"""The callback of training/trainer.py whose state is in STATE."""


class Search(NamedTuple):
    """newest: the newest whole checkpoint. skipped: those after it, each with what is wrong.

    damaged: whether one of them was whole once.
    """

    newest: Path | None
    skipped: tuple[tuple[Path, str], ...]
    damaged: bool


class Incomplete(ValueError):
    """A checkpoint whose saving was interrupted."""


class Damaged(ValueError):
    """A checkpoint that has lost something since it was saved."""


def search(directory: Path) -> Search:
    """Looks at a run's checkpoints from the newest on, until one is whole."""
    skipped: list[tuple[Path, str]] = []
    damaged = False
    folders = [p for p in directory.glob("checkpoint-*") if re.fullmatch(r"\D+-\d+", p.name)]
    for checkpoint in sorted(folders, key=step_of, reverse=True):
        try:
            expect_whole(checkpoint)
        except (Incomplete, Damaged) as error:
            skipped.append((checkpoint, str(error)))
            damaged |= isinstance(error, Damaged)
        else:
            return Search(checkpoint, tuple(skipped), damaged)
    return Search(None, tuple(skipped), damaged)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def expect_whole(checkpoint: Path) -> None:
    """
    Raises:
        Incomplete: its saving was interrupted.
        Damaged: a file is missing, has another size than when it was saved or cannot be read.
    """
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        sizes = exported(state)["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Incomplete(f"its {STATE} is not there or cannot be read") from error
    for name, size in sizes.items():
        try:
            now = (checkpoint / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{name} is missing") from error
        if now != size:
            raise Damaged(f"{name} has {now:,} bytes, and had {size:,} when it was saved")
        expect_format(checkpoint / name)


def expect_format(file: Path) -> None:
    """Reads what a file of weights begins or ends with, and all of a JSON file.

    Raises:
        Damaged: that is not what the file's name says.
    """
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt"):
                pass
        elif file.suffix in (".pt", ".pth", ".bin"):
            with zipfile.ZipFile(file):
                pass
        elif file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError, zipfile.BadZipFile) as error:
        raise Damaged(f"{file.name} cannot be read: {error}") from error


def exported(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the callback EXPORTED in a trainer_state.json."""
    return state["stateful_callbacks"][EXPORTED]["attributes"]


def sizes(checkpoint: Path) -> dict[str, int]:
    """Bytes of each file but STATE."""
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p != checkpoint / STATE)
    return {p.relative_to(checkpoint).as_posix(): p.stat().st_size for p in files}
