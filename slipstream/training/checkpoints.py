"""Which checkpoint of a run to continue from."""

import json
from pathlib import Path

STATE = "trainer_state.json"
"""Written last of all a checkpoint's files: where it is whole, so is the checkpoint."""


def last_checkpoint(directory: Path) -> Path | None:
    """The newest complete one."""
    whole = [p.parent for p in directory.glob(f"checkpoint-*/{STATE}") if _is_whole(p)]
    return max(whole, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _is_whole(state: Path) -> bool:
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True
