"""Titles of commits since the rule is kept: at most 72 characters (CONTRIBUTING.md)."""

import re
import subprocess

import pytest

from tests.support.scripts import ROOT

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
