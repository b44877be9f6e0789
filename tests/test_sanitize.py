"""tools/sanitize.py runs the operators that it is asked for."""

from tests.support.forked import ROOT, run_code


def test_sanitize() -> None:
    given = "--sizes", "odd", "--only", "rms_norm|chunk_kda$"
    done = run_code(ROOT / "tools/sanitize.py", *given)  # a hook of its launches stays
    assert done.returncode == 0, done.stderr
    assert "chunk_kda ran" in done.stdout and "rms_norm ran" in done.stdout
