"""The matrix: a sample of it compiles as it should, and its judgement of what comes back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.core import matrix
from slipstream.core.aot import Compiled, Job
from slipstream.core.worker import Outcome
from slipstream.kernels.linear.triton.plan import HAVE_TRITON, INTERPRETED

compiles = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)
NONE = dict.fromkeys(("wgmma", "mma.sync", "tcgen05", "mfma"), 0)
JOB = Job("module:some_kernel", {}, {"C": 64}, {}, 4, 3, {}, "sm_90")


def outcome(**of: Any) -> Outcome:
    instructions = {**NONE, **of.pop("instructions", {})}
    sound = {"shared": 1000, "registers": 100, "stack": 0, "dots": 1, "seconds": 1.0, "hash": ""}
    return Outcome("ok", compiled=Compiled(**{**sound, **of}, instructions=instructions, asm={}))


@pytest.mark.parametrize(
    ("arch", "of", "status", "words"),
    [
        ("sm_90", {"instructions": {"wgmma": 4}}, "ok", ""),
        ("sm_90", {"dots": 0}, "ok", ""),
        ("sm_90", {"instructions": {"mma.sync": 4}}, "slow", "mma.sync instead of wgmma"),
        ("sm_90", {"instructions": {"wgmma": 4, "mma.sync": 1}}, "slow", "some products"),
        ("sm_80", {}, "slow", "no tensor cores instead of mma.sync"),
        ("sm_70", {}, "slow", "no longer"),
        ("sm_80", {"instructions": {"mma.sync": 1}, "stack": 5000}, "slow", "spills 5000 bytes"),
        ("sm_86", {"shared": 120000}, "refused", "sm_86 has 101376; it runs on sm_80, sm_90"),
        ("gfx942", {"instructions": {"mfma": 9}}, "ok", ""),
    ],
)
def test_judge(arch: str, of: dict, status: str, words: str) -> None:
    got, reason = matrix.judge(replace(JOB, arch=arch), outcome(**of))
    assert got == status and words in reason and bool(words) == bool(reason)


class _Worker:
    """Answers by stages; `about` as a child's."""

    def __init__(self, answers: dict[int, Outcome]) -> None:
        self.about = {"triton": "3.3.1", "ptxas_sm_90": "12.4.99", "ptxas_sm_100": "12.8.61"}
        self.answers = answers

    def compile(self, job: Job, timeout: float) -> Outcome:
        return self.answers[job.stages]


def test_attempt_names_the_nearest_configuration_that_runs() -> None:
    answers = {3: outcome(shared=150000), 2: outcome(shared=110000), 1: outcome(shared=70000)}
    worker: Any = _Worker(answers)
    row = matrix.attempt(worker, (replace(JOB, arch="sm_86"), ("op",)), 1.0)
    assert row.status == "refused" and row.shared == 150000
    assert "some_kernel with 3 stages: needs 150000" in row.reason
    assert "with 1 stages it needs 70000 and runs" in row.reason


def test_attempt_names_the_known_fault_behind_a_crash() -> None:
    """bf16 retention on sm_70 under Triton 3.3: an LLVM error, and the way out."""
    worker: Any = _Worker({3: Outcome("crash", "the compiler's process died: LLVM ERROR")})
    row = matrix.attempt(worker, (replace(JOB, arch="sm_70"), ("chunk_retention",)), 1.0)
    assert (row.status, row.ptxas) == ("crash", "12.4.99")
    assert "rounding-mode: Triton 3.4 or later, or operands in float32" in row.reason
    table = matrix.by_operator([row, replace(row, status="ok", reason="")])
    assert table["chunk_retention"]["sm_70"][0] == "crash"
    assert matrix.verified([row]) == set()
    assert matrix.verified([replace(row, status="slow")]) == {("sm_70", "3.3.1", "12.4.99")}


@compiles
def test_a_sample_of_the_matrix(tmp_path: Path) -> None:
    """As the command runs it: one operator, forward, on two architectures."""
    from typer.testing import CliRunner

    from slipstream.cli import app

    out = tmp_path / "rows.json"
    run = ["matrix", "chunk_retention", "--arch", "sm_80,sm_90", "--forward", "--shapes", "2"]
    result = CliRunner().invoke(app, [*run, "--jobs", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "chunk_retention" in result.stdout
    rows = json.loads(out.read_text())
    assert {x["arch"] for x in rows} == {"sm_80", "sm_90"}
    assert {x["status"] for x in rows} <= {"ok", "slow"}
    assert all(x["triton"] and x["ptxas"] and x["registers"] for x in rows)


def test_the_page_says_what_runs_where() -> None:
    from slipstream.cli.support import page

    ok, slow, refused = ["ok", ""], ["slow", "spills 4096 bytes a thread"], ["refused", "too wide"]
    known = {"sm_80": ok, "sm_86": refused, "sm_90": slow}
    data = {
        "releases": {"3.6.0": {"ptxas": {"sm_90": "12.8.93"}, "operators": {"chunk_gla": known}}},
        "without": {"rotary": "plain torch"},
    }
    text = page(data)
    assert "| operator | sm_80 | sm_86 | sm_90 |" in text
    assert "| chunk_gla | ok | refused [1] | slow [2] |" in text
    assert "1. too wide\n2. spills\n" in text
    assert "- rotary: plain torch" in text
