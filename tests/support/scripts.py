"""Modules of tools/ and bench/, which are no packages: they import each other by name."""

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def script(path: str) -> Any:
    """The module tools/NAME or bench/NAME, whatever else is called NAME where the tests started."""
    folder, name = str((ROOT / path).parent), Path(path).name
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
