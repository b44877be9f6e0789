"""Code in a forked process ends as in one of its own: tests/support/forked.py."""

from tests.support.forked import run_code

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
