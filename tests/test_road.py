"""tools/road.py counts what it says, and fails where a limit is passed."""

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED

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


def test_holds_looks_into_containers(road: ModuleType) -> None:
    import torch

    x, y = torch.zeros(1), torch.zeros(1)
    assert road.holds(x, x) and road.holds([(y, {"a": x})], x)
    assert not road.holds([y, {"a": y}], x)


def test_check_fails_past_a_limit(road: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(road, "MAX_STAYS", 3)
    monkeypatch.setattr(
        road.call_path, "CALLS", dict.fromkeys(road.call_path.CALLS, lambda device: None)
    )
    monkeypatch.setattr(sys, "argv", ["road.py", "--check"])
    with pytest.raises(SystemExit, match="functions take beta, at most 3"):
        road.main()


@pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="launches are traced")
@pytest.mark.parametrize(
    ("call", "passed"),
    [
        ("attention", {"ops/attention.py attention", "kernels/attention/run.py make_plan"}),
        ("rms_norm", {"ops/norm.py rms_norm", "kernels/norm/op.py forward"}),
    ],
)
def test_walk_passes_choice_and_operator(road: ModuleType, call: str, passed: set[str]) -> None:
    codes = road.walk(road.call_path.CALLS[call]).codes
    found = {f"{Path(x.co_filename).relative_to(road.PACKAGE)} {x.co_name}" for x in codes}
    common = {"runtime/dispatch.py choose", "runtime/custom_op.py __call__"}
    assert passed | common <= found
