"""Code in a forked process ends as in one of its own: tests/support/forked.py."""

import pytest

from tests.support.forked import run_code, run_script

CODE = """
import atexit, sys
atexit.register(print, "at exit")
print("before", *sys.argv)
"""


def test_forked_code_ends_as_a_process_does() -> None:
    for more, status, error in (
        ("", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("sys.exit('why')", 1, "why"),
        ("raise KeyError('name')", 1, "KeyError"),
        ("atexit.register(dict.pop, {}, 'name')", 0, "KeyError"),
    ):
        done = run_code(CODE + more, "word")
        assert (done.returncode, done.stdout) == (status, "before -c word\nat exit\n"), more
        assert error in done.stderr and bool(error) == bool(done.stderr)


def test_forked_code_has_the_environment_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what a test had set in which the process started that forks."""
    told = "import os; print(os.environ.get('HERE'))"
    for value in ("here", "there", "None"):
        monkeypatch.delenv("HERE") if value == "None" else monkeypatch.setenv("HERE", value)
        assert run_code(told).stdout == f"{value}\n"
        assert run_script("timeit", "-n1", "-r1", told)[1].startswith(f"{value}\n")
