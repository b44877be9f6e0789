"""tools/road.py counts what it says, and fails where a limit is passed."""

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
SOURCE = """
def f(x, y):
    if x and y or not x:        # 1 if, 1 and, 1 or
        return 1 if x else 2    # 1
    for a in [b for b in y]:    # 2
        while a:                # 1
            pass
    def inner():
        if x:
            pass
    return lambda: 1 if x else 2
"""


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import road

    return road


def test_branches_are_counted(road: ModuleType) -> None:
    (function,) = ast.parse(SOURCE).body
    assert road.branches(function) == 7


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        ("MAX_STAYS", 3, "functions take beta, at most 3"),
        ("MAX_CLIMBS", 0, "calls go to a higher layer, at most 0"),
    ],
)
def test_check_fails_past_a_limit(
    road: ModuleType, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, words: str
) -> None:
    monkeypatch.setattr(road, limit, most)
    monkeypatch.setattr(
        road.call_path, "CALLS", dict.fromkeys(road.call_path.CALLS, lambda device: None)
    )
    monkeypatch.setattr(sys, "argv", ["road.py", "--check"])
    with pytest.raises(SystemExit, match=words):
        road.main()
