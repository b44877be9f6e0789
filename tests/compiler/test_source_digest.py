"""Digests of the kernels' code change with what it does and with nothing else."""

from pathlib import Path

import pytest

from slipstream.compiler import source_digest
from slipstream.compiler.source_digest import definitions, digests

SOURCE = '''"""A module."""
import os
from a import b

LIMIT = 3  # bytes


def f(x, n: int = 2):
    """Adds."""
    return f"{x}" + n[1:]


class Tile:
    """A tile."""

    rows: int = 4

    def area(self):
        """In elements."""
'''
SAME = [
    SOURCE.replace("  # bytes", ""),
    SOURCE.replace("A module", "Another text"),
    SOURCE.replace('    """Adds."""\n', ""),
    SOURCE.replace('"""In elements."""', '"""Of it."""'),
    SOURCE.replace("from a import b", "from c import b"),
    SOURCE.replace("x, n: int = 2", "x, n: int=2,"),
    "\n\n" + SOURCE,
]
OTHER = [
    SOURCE.replace("LIMIT = 3", "LIMIT = 4"),
    SOURCE.replace("n: int = 2", "n: int = None"),
    SOURCE.replace("n: int = 2", "n: int"),
    SOURCE.replace("n[1:]", "n[:1]"),
    SOURCE.replace("rows: int = 4", "rows: int = 5"),
]


@pytest.mark.parametrize("text", SAME)
def test_definitions_ignore_prose_imports_and_format(text: str) -> None:
    assert text != SOURCE
    assert definitions(text) == definitions(SOURCE)


@pytest.mark.parametrize("text", OTHER)
def test_definitions_differ_where_the_code_does(text: str) -> None:
    assert definitions(text) != definitions(SOURCE)


def test_digests_ignore_which_file_holds_a_definition(tmp_path: Path) -> None:
    one, two, whole = (tmp_path / x for x in ("one.py", "two.py", "whole.py"))
    one.write_text("A = 1\n")
    two.write_text("import x\nB = 2\n")
    whole.write_text("B = 2\nA = 1\n")
    cache = tmp_path / "cache.json"
    apart = digests({"linear": [one, two]}, cache)
    assert digests({"linear": [whole]}, cache) == apart
    whole.write_text("B = 2\nA = 2\n")
    assert digests({"linear": [whole]}, cache) != apart


def test_digests_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "a.py", tmp_path / "folder/cache.json"
    file.write_text("A = 1\n")
    first = digests({"linear": [file]}, cache)
    with monkeypatch.context() as patch:
        patch.setattr(source_digest, "definitions", lambda text: pytest.fail("parsed again"))
        assert digests({"linear": [file]}, cache) == first
    file.write_text("A = 2\n")
    assert digests({"linear": [file]}, cache) != first
    cache.write_text("{")  # damaged
    file.write_text("A = 1\n")
    assert digests({"linear": [file]}, cache) == first
