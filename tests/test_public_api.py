"""The public interface changes only where tests/public_api.txt changes with it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_public_api_matches_snapshot() -> None:
    # a process of its own: other tests register operators of their own
    command = [sys.executable, str(ROOT / "tools/api_snapshot.py")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    want = (ROOT / "tests/public_api.txt").read_text()
    assert found.stdout == want, "python tools/api_snapshot.py > tests/public_api.txt"
