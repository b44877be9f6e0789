""".ci/run with a make that only writes down what it is asked for; titles of commits. Since the rule
is kept these have at most 72 characters (CONTRIBUTING.md)."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import ROOT

STEPS = ["venv", "lint", "test", "test-avx2", "test-oldest"]
IN_PARALLEL = "newest", "docs"  # to another step
STAND_IN = """#!/bin/sh
echo "$1" >> "$LOG"
case " $FAILS " in *" $1 "*) exit 1 ;; esac
"""


def _ci(folder: Path, fails: str, **options: str) -> tuple[int, list[str], str]:
    """Exit status, what it made in order without what is beside it, and stderr."""
    make = folder / "make"
    make.write_text(STAND_IN)
    make.chmod(0o755)
    log = folder / "log"
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "LOG": str(log), "FAILS": fails}
    ran = subprocess.run(
        [ROOT / ".ci/run"], env=env | options, capture_output=True, text=True, check=False
    )
    made = log.read_text().split()
    assert fails in STEPS or {*IN_PARALLEL} <= {*made}
    return ran.returncode, [x for x in made if x not in IN_PARALLEL], ran.stderr


def test_ci_runs_the_tests_under_the_newest_torch(tmp_path: Path) -> None:
    assert _ci(tmp_path, "") == (0, [*STEPS, "test-newest"], "")


def test_ci_says_that_the_newest_torch_is_missing(tmp_path: Path) -> None:
    status, made, error = _ci(tmp_path, "newest")
    assert status == 0 and made == STEPS and "NOT RUN: make test-newest" in error


def test_ci_fails_without_a_required_newest_torch(tmp_path: Path) -> None:
    status, _, error = _ci(tmp_path, "newest", REQUIRE_NEWEST="1")
    assert status != 0 and "NOT RUN" in error


@pytest.mark.parametrize("step", [*STEPS, "test-newest", "docs"])
def test_ci_fails_where_a_step_fails(tmp_path: Path, step: str) -> None:
    status, made, _ = _ci(tmp_path, step)
    assert status != 0 and made[-1] == ("lint" if step == "docs" else step)


def test_workflow_requires_the_newest_torch() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    (job,) = (x for x in text.split("\n\n") if "run: .ci/run" in x)
    assert 'REQUIRE_NEWEST: "1"' in job


def test_makefile_names_tests_that_are_there_once() -> None:
    lists = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    names = [[x for x in line.split() if x.startswith("tests/")] for line in lists]
    files = {x.partition("::")[0] for some in names for x in some}
    assert len(files) > 20 and not [x for x in files if not (ROOT / x).exists()]
    assert not [x for some in names for x in some if some.count(x) > 1]


SINCE = "2026-11-28T19:50:00+00:00"  # a clone may be shallow: no commit is named
LONGEST = 72


def too_long(titles: list[str]) -> list[str]:
    return [x for x in titles if len(x) > LONGEST and not re.match(r'Revert "', x)]


def test_commit_titles_are_short() -> None:
    command = ["git", "log", "--no-merges", f"--since={SINCE}", "--format=%s"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("no git, or no repository")
    assert too_long(found.stdout.splitlines()) == []


def test_long_title_is_seen() -> None:
    assert too_long(["x" * 72, "y" * 73, f'Revert "{"z" * 72}"']) == ["y" * 73]
