"""A small run of training, as its configuration file has it."""

import copy
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model": {"hidden_size": 16, "num_heads": 1, "mixers": ["retention"]},
    "tokenizer": {"vocab_size": 300, "train_bytes": 20000},
    "data": {"files": ["{stdlib}/json"], "held_out": 0.4, "row_tokens": 16},
}


def config_of(out: Path, *changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """With sections of each of the changes, the last one's last."""
    made = {"output_dir": str(out), **copy.deepcopy(CONFIG)}
    for change in changes:
        made |= {name: made.get(name, {}) | section for name, section in change.items()}
    return made
