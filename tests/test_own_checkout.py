"""tools/*.py are of the checkout that they measure (tools/own_checkout.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
