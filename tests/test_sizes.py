"""tools/sizes.py and tools/road.py count what they say, and fail where a limit is passed."""

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import ROOT

KERNEL = "def {}_kernel():\n    gl.warp_specialize([])\n\n\n"


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import sizes

    return sizes


@pytest.mark.parametrize(
    ("source", "most"),
    [
        ("", 500),
        (KERNEL.format("one"), 1000),
        (KERNEL.format("one") + KERNEL.format("other"), 500),
        ("def one_kernel():\n    pass\n", 500),
    ],
    ids=["host", "partitions", "two kernels", "no partitions"],
)
def test_length_of_a_file(sizes: ModuleType, tmp_path: Path, source: str, most: int) -> None:
    path = tmp_path / "file.py"
    for lines in (most, most + 1):
        path.write_text(source + "x = 1\n" * (lines - source.count("\n")))
        found = sizes.too_long(path)
        assert found == ([] if lines == most else [f"{path}: {lines} lines, at most {most}"])


CODE = '''"""Of what it is."""

from triton import (
    jit,
)

# a number
SIZE = [
    64,  # of a tile
]  # fmt: skip
TEXT = """
two lines, which are host code
"""


@triton.jit(debug=True)
def f_kernel(x_ptr):
    """What it does."""
    # why
    y = 1

    return y


def launch(x):
    """As it is
    launched."""
    import torch

    return f_kernel[1](
        x,
    )
'''


def test_lines_are_counted(sizes: ModuleType, tmp_path: Path) -> None:
    paths = [tmp_path / "one.py", tmp_path / "other.py"]
    paths[0].write_text(CODE)
    paths[1].write_text("x = 1\n")
    # SIZE 3, TEXT 3, launch 1 + 3; the decorator, the signature, y, its return
    assert sizes.code_lines(paths[0]) == (10, 4)
    assert sizes.import_share(paths) == 4 / (CODE.count("\n") + 1)
    assert sizes.unformatted(paths, str(tmp_path)) == 1
    assert sizes.unformatted(paths, "elsewhere") == 0


def passing(sizes: ModuleType, some: list[Path], limit: str) -> tuple[Any, Any, str]:
    """The last value of a limit that the files pass, the next, and what is said of that."""
    lines, constants = sum(x.read_text().count("\n") for x in some), sum(map(sizes.numbers, some))
    if limit in ("PACKAGE_LINES", "CONSTANTS"):
        count = lines if limit == "PACKAGE_LINES" else constants
        return count, count - 1, f"at most {count - 1}\n"
    if limit == "TEST_LINES":
        return 0, -1, "tests: 0 lines, at most -1\n"
    if limit == "IMPORT_SHARE":
        return 1.0, 0.0, "of its lines, at most 0.0%"
    return {limit: 9.0}, {limit: 0.5}, f"{limit}: 1.7"


@pytest.mark.parametrize(
    "limit",
    ["kernels", "small families", "IMPORT_SHARE", "PACKAGE_LINES", "TEST_LINES", "CONSTANTS"],
)
def test_package_has_limits(
    sizes: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, limit: str
) -> None:
    monkeypatch.chdir(ROOT)
    some = [x for x in sizes.tracked() if x.is_relative_to("slipstream/kernels/norm")]
    monkeypatch.setattr(sizes, "tracked", lambda: some)
    monkeypatch.setattr(sizes, "IMPORT_SHARE", 1.0)
    monkeypatch.setattr(sizes, "HOST_PER_DEVICE", {})
    *values, words = passing(sizes, some, limit)
    for passed, value in zip((True, False), values):
        monkeypatch.setattr(sizes, limit if limit.isupper() else "HOST_PER_DEVICE", value)
        assert sizes.main() == (not passed)
        assert (words in capsys.readouterr().out) == (not passed)


# if, and, or; if; for, for; while; what is within another function is its own
SOURCE = """
def f(x, y):
    if x and y or not x:
        return 1 if x else 2
    for a in [b for b in y]:
        while a: pass
    return lambda: 1 if x else 2
"""


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
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
