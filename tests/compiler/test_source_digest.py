"""Digests of the kernels' code change with what it does and with nothing else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.compiler import compiler_state, source_digest
from slipstream.compiler.source_digest import definitions, digests
from tests.support.scripts import script

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


def test_packaged_digests_are_not_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support_page = script("tools/support_page")
    monkeypatch.setattr(support_page, "VERIFIED", tmp_path / "verified.json")
    support_page.write_verified({})
    packaged = tmp_path / source_digest.PACKAGED.name
    expected = {gluon: compiler_state.families(gluon) for gluon in (True, False)}
    with monkeypatch.context() as patch:
        patch.setattr(source_digest, "PACKAGED", packaged)
        patch.setattr(source_digest, "definitions", lambda text: pytest.fail("parsed"))
        for gluon, want in expected.items():
            found = digests(compiler_state.files_of(gluon), tmp_path / "absent.json")
            assert found == want
    # what is in the package is right wherever it is of these files
    monkeypatch.setattr(source_digest, "PACKAGED", tmp_path / "none.json")
    for gluon, want in expected.items():
        assert digests(compiler_state.files_of(gluon), tmp_path / "new.json") == want


@pytest.mark.slow
@pytest.mark.parametrize("python", ["python3.10", "python3.12", "python3.13", "python3.14"])
def test_definitions_agree_between_python_releases(python: str) -> None:
    found = shutil.which(python)
    if found is None or subprocess.run([found, "-c", ""]).returncode:
        pytest.skip(f"no {python}")
    file = Path(source_digest.__file__)
    kernels = sorted((file.parents[1] / "kernels").rglob("*.py"))[:40]
    script = (
        "import runpy, sys; f = runpy.run_path(sys.argv[1])['definitions'];"
        "print([f(open(x).read()) for x in sys.argv[2:]])"
    )
    command = ["-c", script, str(file), *map(str, kernels)]
    said = [
        subprocess.run([x, *command], capture_output=True, text=True, check=True).stdout
        for x in (found, sys.executable)
    ]
    assert said[0] == said[1]
