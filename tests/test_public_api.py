"""The public interface changes only where tests/public_api.txt changes with it."""

from pathlib import Path

from tests.support.forked import run_code

ROOT = Path(__file__).parents[1]


def test_public_api_matches_snapshot() -> None:
    # a process of its own: other tests register operators of their own
    found = run_code(ROOT / "tools/api_snapshot.py")
    assert found.returncode == 0, found.stderr
    want = (ROOT / "tests/public_api.txt").read_text()
    assert found.stdout == want, "python tools/api_snapshot.py > tests/public_api.txt"
