"""Other Triton releases, each in a folder that a child process puts before its sys.path.

No environment of its own: torch and the rest stay those that are here.
"""

import os
import subprocess
import sys
from pathlib import Path


def install(version: str, root: Path) -> Path:
    """The folder with Triton `version`, installed from PyPI by pip unless it is there.

    Raises:
        ValueError: pip could not; with its last line.
    """
    folder = root / f"triton-{version}"
    if folder.exists():
        return folder
    partial_folder = root / f"triton-{version}.{os.getpid()}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(partial_folder), f"triton=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"triton {version}: pip could not install it: {words}")
    partial_folder.rename(folder)
    return folder
