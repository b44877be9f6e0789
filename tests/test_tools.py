"""Tools are of the checkout that they measure, run what they are asked for, and hold kept bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import wants
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


def test_sanitize() -> None:
    given = "--sizes", "odd", "--only", "rms_norm|chunk_kda$"
    done = run_code(ROOT / "tools/sanitize.py", *given)  # a hook of its launches stays
    assert done.returncode == 0, done.stderr
    assert "chunk_kda ran" in done.stdout and "rms_norm ran" in done.stdout


# bytes for a token and channel, and without what is made again
LIMITS = {
    "attention": (22.5, 22.5),
    "gated_deltanet": (25.5, 35.5),
    "kda": (28.5, 42.5),
    "mamba2": (30.5, 46.5),
    "rwkv7": (57.5, 57.5),
}


@wants.triton
def test_layers_keep_no_more_than_they_did() -> None:
    done = run_code(ROOT / "tools/kept_bytes.py", *LIMITS)
    assert done.returncode == 0, done.stderr[-3000:]
    _, *lines = done.stdout.splitlines()
    rows = {name: (float(kept), float(without)) for name, kept, without in map(str.split, lines)}
    assert rows.keys() == LIMITS.keys()
    over = {name: row for name, row in rows.items() if any(map(float.__gt__, row, LIMITS[name]))}
    assert not over
