"""Tools are of the checkout that they measure, run what they are asked for, and hold kept bytes.
.ci/run with a make that only writes down what it is asked for; titles of commits, which since the
rule is kept have at most 72 characters (CONTRIBUTING.md). tests/planted_faults.csv: each fault that
tools/plant_faults.py drew has its place, and its test; where a line of the list has changed, its
row gets the new line, or the next fault of the draw, and rows of code that is gone are gone too.
Code in a forked process ends as in one of its own (tests/support/forked.py)."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import wants
from tests.support.forked import run_code, run_script
from tests.support.scripts import ROOT, script

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


plant_faults = script("tools/plant_faults")
FAULTS = plant_faults.listed()
SEEDS = {str(seed) for seed in range(40, 57)}
DRAWN = [x for x in FAULTS if x.result != "equivalent"]


@pytest.mark.parametrize("file", sorted({x.file for x in FAULTS}))
def test_faults_of_a_file_have_their_places(file: str) -> None:
    source = (ROOT / file).read_text()
    sites = {x[:5] for x in plant_faults.sites(file, source)}
    for fault in (x for x in FAULTS if x.file == file):
        assert fault[:5] in sites, fault
        ast.parse(planted := plant_faults.planted(source, fault))
        assert planted.split() != source.split(), fault


def test_every_fault_has_a_test() -> None:
    for fault in DRAWN:
        assert fault.result in ("found", "survived")
        path, _, name = fault.test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), fault
    assert {x.seed for x in DRAWN} == SEEDS
    for seed in SEEDS:
        found = Counter(x.kind for x in DRAWN if x.seed == seed)
        assert not found.keys() - {*plant_faults.KINDS}
        assert max(found.values()) == plant_faults.OF_A_KIND
    assert not {x.file for x in DRAWN} & plant_faults.LEFT_OUT
    assert all(x.note for x in FAULTS if x.result != "found")


def test_apply_and_revert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[0]
    path = tmp_path / fault.file
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / fault.file, path)
    before = path.read_text()
    monkeypatch.setattr(plant_faults, "ROOT", tmp_path)
    plant_faults.main("apply", "0")
    assert path.read_text() == plant_faults.planted(before, fault)
    with pytest.raises(AssertionError, match="its place is gone"):
        plant_faults.main("apply", "0")
    os.utime(path.with_suffix(plant_faults.SAVED), (1.0, 1.0))
    plant_faults.main("revert")
    assert path.stat().st_mtime > 1.0
    assert path.read_text() == before and [*path.parent.iterdir()] == [path]


CODE = """
import atexit, sys
atexit.register(print, "at exit")
print("before", *sys.argv)
"""


def test_forked_code_ends_as_a_process_does() -> None:
    for more, status, error in (
        ("", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("sys.exit('why')", 1, "why"),
        ("raise KeyError('name')", 1, "KeyError"),
        ("atexit.register(dict.pop, {}, 'name')", 0, "KeyError"),
    ):
        done = run_code(CODE + more, "word")
        assert (done.returncode, done.stdout) == (status, "before -c word\nat exit\n"), more
        assert error in done.stderr and bool(error) == bool(done.stderr)


def test_forked_code_has_the_environment_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what a test had set in which the process started that forks."""
    told = "import os; print(os.environ.get('HERE'))"
    for value in ("here", "there", "None"):
        monkeypatch.delenv("HERE") if value == "None" else monkeypatch.setenv("HERE", value)
        assert run_code(told).stdout == f"{value}\n"
        assert run_script("timeit", "-n1", "-r1", told)[1].startswith(f"{value}\n")
