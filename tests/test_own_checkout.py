"""tools/*.py are of the checkout that they measure (tools/own_checkout.py)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import run_code
from tests.support.scripts import ROOT

IMPORT = re.compile(r"^\s*(?:import|from) slipstream\b", re.MULTILINE)
# these take it from a tool that looks, or put their own checkout first
BY_OTHERS = {"own_checkout.py", "reference.py", "transformers_table.py"}


def test_every_tool_asks_whose_package_it_is() -> None:
    tools = {x.name: x.read_text() for x in (ROOT / "tools").glob("*.py")}
    import_it = {x for x, text in tools.items() if IMPORT.search(re.sub(r'"""[^"]*"""', "", text))}
    assert len(import_it) > 8
    assert {x for x in import_it if "own_checkout import" not in tools[x]
            and "import own_checkout" not in tools[x]} - BY_OTHERS == set()  # fmt: skip


@pytest.mark.parametrize("tool", ["own_checkout", "api_snapshot"])
def test_package_of_another_checkout_is_refused(tool: str, tmp_path: Path) -> None:
    package = tmp_path / "slipstream"
    package.mkdir()
    (package / "__init__.py").write_text("")
    found = subprocess.run(
        [sys.executable, str(ROOT / f"tools/{tool}.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1 and found.stdout == ""
    assert f"that of {tmp_path}" in found.stderr and f"PYTHONPATH={ROOT}" in found.stderr


def test_hashes_of_a_run_that_was_ended_are_refused(tmp_path: Path) -> None:
    """They are written as they come, so that a file may have a part of them."""
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    rows = [["sm_90 a_kernel", "0"], ["sm_90 b_kernel", "1"]]
    lines = [json.dumps(x) + "\n" for x in (*rows, "complete")]
    whole.write_text("".join(lines))
    part.write_text("".join(lines[:1]))
    tool = ROOT / "tools/kernel_hashes.py"
    same = run_code(tool, "compare", whole, whole)
    assert same.returncode == 0 and "2 before, 2 after, 0 lost, 0 new" in same.stdout
    ended = run_code(tool, "compare", whole, part)
    assert ended.returncode == 1 and "is not complete (1 hashes)" in ended.stderr


def test_hashes_say_how_far_they_are(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "one.json"
    made = run_code(ROOT / "tools/kernel_hashes.py", "write", file, "l2_norm", "--level", "call",
                    "--shapes", "1", "--jobs", "1")  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "sm_90, operators traced: 1 of 1" in made.stderr and "hashes: 1 of" in made.stderr
    assert json.loads(file.read_text().splitlines()[-1]) == "complete"
