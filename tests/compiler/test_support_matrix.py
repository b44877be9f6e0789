"""The matrix: a sample of it compiles as it should, its judgement of what comes back; digests of
the kernels' code, which change with what it does and with nothing else."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from slipstream.compiler import compiler_state, source_digest, support_matrix
from slipstream.compiler.aot import Compiled, Job
from slipstream.compiler.compile_worker import Outcome
from slipstream.compiler.source_digest import definitions, digests
from tests.support import wants
from tests.support.planted_fault import FAULT, plant
from tests.support.scripts import script
from tests.support.traced_in_a_thread import trace_in_a_thread

LAYER_SAMPLES = script("tools/layer_samples").LAYER_SAMPLES
matrix, support_page = script("tools/matrix"), script("tools/support_page")
rows = script("tools/matrix_cache")
variants = script("tools/variant_cover")
BAD = ("refused", "crash", "hang")
NONE = dict.fromkeys(("wgmma", "mma.sync", "tcgen05", "mfma"), 0)
JOB = Job("module:some_kernel", {}, {"C": 64}, {}, 4, 3, {}, "sm_90")


def outcome(**of: Any) -> Outcome:
    instructions = {**NONE, **of.pop("instructions", {})}
    sound = {"shared": 1000, "registers": 100, "stack": 0, "seconds": 1.0, "hash": ""}
    sound |= {"dots": 1, "dot_rows": 64}
    return Outcome("ok", compiled=Compiled(**{**sound, **of}, instructions=instructions, asm={}))


class _Worker:
    """Answers by stages; `about` as a child's."""

    def __init__(self, answers: dict[int, Outcome]) -> None:
        self.about = {"triton": "3.3.1", "ptxas": "12.4.99", "ptxas_blackwell": "12.8.61"}
        self.answers = answers

    def compile(self, job: Job, timeout: float) -> Outcome:
        return self.answers[job.stages]

    def close(self) -> None:
        pass


def test_attempt_names_the_nearest_configuration_that_runs() -> None:
    for fits in (70000, 99 << 10):  # and all that sm_86 has
        answers = {3: outcome(shared=150000), 2: outcome(shared=110000), 1: outcome(shared=fits)}
        worker: Any = _Worker(answers)
        row = support_matrix.compile_row(worker, (replace(JOB, arch="sm_86"), ("op",)), 1.0)
        assert row.status == "refused" and row.shared == 150000
        assert "some_kernel with 3 stages: needs 150000" in row.reason
        assert f"with 1 stages it needs {fits} and runs" in row.reason


@pytest.mark.parametrize(("beyond", "status"), [(0, "ok"), (1, "slow")])
def test_kernels_may_spill_so_much(beyond: int, status: str) -> None:
    of = outcome(stack=support_matrix.MAX_SPILL_BYTES + beyond, instructions={"wgmma": 1})
    found, reason = support_matrix.judge(JOB, of)
    assert found == status and ("spills" in reason) == bool(beyond)


def test_attempt_names_the_known_fault_behind_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, replace(FAULT, archs=("sm_70",), triton=None))
    worker: Any = _Worker({3: Outcome("crash", "the compiler's process died: LLVM ERROR")})
    row = support_matrix.compile_row(
        worker, (replace(JOB, arch="sm_70"), ("chunk_retention",)), 1.0
    )
    assert (row.status, row.ptxas) == ("crash", "12.4.99")
    assert f"{FAULT.name}: {FAULT.way_out}" in row.reason
    table = support_page.by_operator([row, replace(row, status="ok", reason="")])
    assert table["chunk_retention"]["sm_70"][0] == "crash"
    compilers = ("sm_70", "3.3.1", "12.4.99")
    sound = replace(row, module="slipstream.kernels.norm.triton_kernels", status="slow")
    assert support_page.verified([row, sound]) == {compilers: {"norm"}}
    assert support_page.verified([row, replace(row, status="ok")]) == {compilers: set()}


@wants.compiler
def test_matrix_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As the tool runs it: one operator, forward, on two architectures."""
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    out = tmp_path / "rows.json"
    run = ["chunk_retention", "--arch", "sm_80,sm_90", "--forward", "--shapes", "1"]
    assert matrix.main([*run, "--jobs", "1", "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert "chunk_retention" in printed.out
    said = " ".join(printed.err.split())
    assert " compiled, 0 kept from earlier runs; " in said and " of processor time" in said
    rows = json.loads(out.read_text())
    assert {x["arch"] for x in rows} == {"sm_80", "sm_90"}
    assert {x["status"] for x in rows} <= {"ok", "slow"}
    assert all(x["triton"] and x["ptxas"] and x["registers"] for x in rows)


@wants.compiler
def test_matrix_retries_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    trace_in_a_thread(monkeypatch)
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    run = ["squared_relu", "--arch", "sm_80", "--forward", "--shapes", "1", "--jobs", "1"]
    assert matrix.main([*run, "--timeout", "0"]) == 1
    assert "hang" in capsys.readouterr().out
    assert matrix.main(run) == 0
    assert "hang" not in capsys.readouterr().out


def test_page_is_that_of_the_recorded_data() -> None:
    text = support_page.DATA.read_text()
    assert text.count("\n") < 2000
    assert support_page.page(support_page.read(support_page.DATA)) == support_page.PAGE.read_text()


def test_refused_families_are_not_verified() -> None:
    ops = {"chunk_simple_gla": "linear", "chunk_gla": "linear", "chunk_kda": "linear"}
    ops |= {"delta_rule_across_ranks": "linear", "chunk_gated_delta_rule": "linear"}
    ops |= {"attention": "attention", "rms_norm": "norm", "matmul": "matmul", "swiglu": "pointwise"}
    data = support_page.read(support_page.DATA)
    for row in json.loads(support_page.VERIFIED.read_text()):
        cells = data[row["triton"]][row["arch"]]["operators"]
        bad = {ops[x] for x, (status, _) in cells.items() if x in ops and status in BAD}
        assert not bad & row["families"].keys(), (row["arch"], row["triton"])


def test_support_page_cells() -> None:
    ok, slow, refused = ["ok", ""], ["slow", "spills 4096 bytes a thread"], ["refused", "too wide"]
    known = {"sm_80": ok, "sm_86": refused, "sm_90": slow}
    about = {"ptxas": "12.8.93", "variants": "flags", "kernels": 3}
    data = {
        "3.6.0": {
            arch: {**about, "operators": {"chunk_gla": cell, "rotary": ["torch", "too plain"]}}
            for arch, cell in known.items()
        }
    }
    text = support_page.page(data)
    assert "| operator | sm_80 | sm_86 | sm_90 |" in text
    assert "| chunk_gla | ok | refused [1] | slow [2] |" in text
    assert "1. too wide\n2. spills; with workarounds for overwritten-tile\n" in text
    assert "- rotary: too plain" in text and "| rotary" not in text
    assert "sm_86 3 (flags)" in text
    data["3.6.0"]["sm_86"]["shapes"] = 2
    assert "sm_86 3 (flags, 2 shapes)" in support_page.page(data)
    for arch, day in (("sm_80", 24), ("sm_86", 26), ("sm_90", 24)):
        data["3.6.0"][arch]["date"] = f"2026-11-{day}"
    assert "\nRecorded 2026-11-24: sm_80, sm_90; 2026-11-26: sm_86.\n" in support_page.page(data)


def test_matrix_raises_errors_of_done() -> None:
    """A full disk, say: else the rows that are missing would not be missed."""

    def full(job: Job, row: support_matrix.Row) -> None:
        raise OSError("no space left on device")

    tasks: list[support_matrix.Task] = [(replace(JOB, arch="sm_80"), ("op",))] * 3
    with (
        mock.patch.object(
            support_matrix.compile_worker, "Worker", return_value=_Worker({3: outcome()})
        ),
        pytest.raises(OSError, match="no space left"),
    ):
        support_matrix.run(tasks, processes=2, done=full)
    with pytest.raises(ValueError, match="jobs: want at least 1 process, got 0"):
        support_matrix.run(tasks, processes=0)


def test_cover_has_every_value_of_every_flag() -> None:
    tasks = [
        (replace(JOB, constants={"C": c, "PACKED": p, "GATE": g}, warps=4 * w), (f"op{c}",))
        for c, p, g, w in product((16, 32, 64), (False, True), (False, True), (1, 2))
    ]
    other = (replace(JOB, kernel="module:other_kernel"), ("op16",))
    few, pairs = (variants.cover([*tasks, other], x) for x in ("flags", "pairs"))
    assert len(few) == 4 and 7 <= len(pairs) <= 10 and other in few
    for name in ("C", "PACKED", "GATE"):
        values = {x.constants.get(name) for x, _ in tasks}
        assert {x.constants.get(name) for x, _ in few[:3]} == values
    assert {op for _, ops in few for op in ops} == {"op16", "op32", "op64"}
    found = {(x.constants.get("C"), x.constants.get("GATE")) for x, _ in pairs[:-1]}
    assert len(found) == 6
    assert variants.cover(tasks, "all") == tasks
    assert len(variants.cover([*tasks, other], "few")) == 4
    assert [variants.resolved("auto", x) for x in ("sm_80", "sm_86", "sm_90")] == [
        "flags",
        "few",
        "flags",
    ]
    with pytest.raises(ValueError, match="--variants: want one of auto"):
        variants.resolved("some", "sm_80")


def test_cover_takes_the_fewest() -> None:
    """Beginning with the one that has the most takes three."""
    assert variants.smallest_cover([{1, 2, 3, 4}, {1, 2, 5}, {3, 4, 6}]) == [1, 2]
    assert variants.smallest_cover([]) == [] and variants.smallest_cover([{1}, {1, 2}]) == [1]


def test_cover_counts_other_tensor_types() -> None:
    """Three dtypes, a gate of that or float32, and a bias that is there or not: three variants."""
    tensors = [
        {"x_ptr": f"*{x}", "g_ptr": f"*{g}", **({"b_ptr": f"*{x}"} if biased else {})}
        for x, biased in product(("bf16", "fp16", "fp32"), (False, True))
        for g in sorted({x, "fp32"})
    ]
    tasks = [
        (replace(JOB, tensors=x, constants={} if "b_ptr" in x else {"b_ptr": None}), ("op",))
        for x in tensors
    ]
    found = [x.tensors for x, _ in variants.cover(tasks, "flags")]
    assert len(found) == 3 and {x["x_ptr"] for x in found} == {"*bf16", "*fp16", "*fp32"}
    assert {"b_ptr" in x for x in found} == {False, True}
    assert {x["g_ptr"] == x["x_ptr"] for x in found} == {False, True}


@wants.compiler
def test_rows_are_valid_until_sources_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    about = {"triton": "3.6.0", "ptxas": "12.8.93", "ptxas_blackwell": "12.9.86"}
    job = replace(JOB, kernel="slipstream.kernels.norm.triton_kernels:norm_fwd_kernel")
    kept = rows.RowCache(about)
    assert kept.split([(job, ("rms_norm",))]) == ([], [(job, ("rms_norm",))])
    row = support_matrix.compile_row(_Worker({3: outcome()}), (job, ("rms_norm",)), 1.0)  # type: ignore
    kept.add(job, row)
    again, rest = rows.RowCache(about).split([(job, ("layer_norm",))])
    assert rest == [] and again == [replace(row, operators=("layer_norm",))]
    for changed in (
        rows.RowCache({**about, "triton": "3.7.1"}),
        rows.RowCache(about, recompile=True),
    ):
        assert changed.split([(job, ("rms_norm",))])[0] == []
    assert rows.RowCache(about).split([(replace(job, stages=2), ("rms_norm",))])[0] == []
    other, (file,) = replace(job, stages=2), (tmp_path / "matrix").iterdir()
    file.write_text(file.read_text() + '{"digest": "half of a l')  # a run that was killed
    rows.RowCache(about).add(other, row)
    both = rows.RowCache(about).split([(job, ("rms_norm",)), (other, ("rms_norm",))])
    assert len(both[0]) == 2 and both[1] == []
    kernel = rows.load(job.kernel)
    monkeypatch.setattr(rows, "load", lambda path: SimpleNamespace(cache_key="other source"))
    assert kernel.cache_key != "other source"
    assert rows.RowCache(about).split([(job, ("rms_norm",))])[0] == []


def test_changed_family_is_unverified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(support_page, "VERIFIED", tmp_path / "verified.json")
    support_page.VERIFIED.write_text("[]")
    worker: Any = _Worker({3: outcome()})
    kernels = ("norm.triton.norm:a", "linear.triton.walk:b")
    jobs = [replace(JOB, kernel=f"slipstream.kernels.{x}") for x in kernels]
    found = [support_matrix.compile_row(worker, (x, ("op",)), 1.0) for x in jobs]
    support_page._record_verified([found[0], replace(found[1], status="hang")], whole=True)
    (entry,) = json.loads(support_page.VERIFIED.read_text())
    assert entry["families"] == {"norm": compiler_state.families(False)["norm"]}  # 3.3.1
    gone = {("sm_90", "3.3.1", "12.4.99"): entry["families"] | {"a_folder_that_went": "0"}}
    support_page.write_verified(gone)
    assert json.loads(support_page.VERIFIED.read_text()) == [entry]
    # of some operators: nothing becomes verified, and what is refused is so no longer
    support_page._record_verified(found, whole=False)
    assert json.loads(support_page.VERIFIED.read_text()) == [entry]
    support_page._record_verified([replace(found[0], status="refused")], whole=False)
    assert json.loads(support_page.VERIFIED.read_text()) == [{**entry, "families": {}}]
    support_page._record_verified([replace(found[0], arch="sm_80")], whole=False)
    assert len(json.loads(support_page.VERIFIED.read_text())) == 1
    support_page.VERIFIED.write_text(json.dumps([entry]))
    here = ("sm_90", "3.3.1", "12.4.99")
    monkeypatch.setattr(compiler_state, "verified", lambda: {here: frozenset({"norm"})})
    trusted = compiler_state.CompilerState(*here, remembers=False)
    assert trusted.guards and not trusted.unguarded
    assert not trusted.should_probe(("norm.triton",)) and trusted.should_probe(("linear.step",))
    assert trusted.trust.startswith(
        "verified by the support matrix, except for the kernels of attention"
    )
    trusted.compiles("slipstream.kernels.norm.triton_kernels", "a", {})  # looks at nothing
    with pytest.raises(KeyError):
        trusted.compiles("slipstream.kernels.linear.triton.scalar_decay.chunk", "b", {})


def test_families_have_digests_of_what_their_kernels_are() -> None:
    found = compiler_state.families()
    rows = json.loads(support_page.VERIFIED.read_text())
    assert len(rows) > 30 and {name for row in rows for name in row["families"]} <= set(found)
    assert {"linear", "attention", "norm", "core"} <= set(found) and len(set(found.values())) > 5
    assert compiler_state.family_of("slipstream.kernels.attention.sm90.forward") == "attention"
    # kernels in Gluon change nothing where they are not taken
    gluon = {"linear", "attention", "selected_attention", "matmul", "mixer_step", "selective_scan"}
    portable = compiler_state.families(False)
    alike = {name for name, digest in found.items() if portable[name] == digest}
    assert set(portable) == set(found) and alike == set(found) - gluon
    takes = [compiler_state.uses_gluon("sm_90", x) for x in ("3.5.1", "3.6.0", "3.9.0", "3.10.0")]
    assert takes == [False, True, True, False] and not compiler_state.uses_gluon("sm_100", "3.6.0")
    assert compiler_state.family_of("slipstream.runtime.token_ids_kernel") == "core"


@wants.compiler
def test_every_row_of_layers_launches_kernels() -> None:
    """A row whose arguments an operator refuses compiles nothing, and no other test notices it."""
    from slipstream.tools.backend_query import trace_operator
    from slipstream.tools.catalog import REPRESENTATIVE

    for sample in LAYER_SAMPLES:
        shapes = REPRESENTATIVE[0], REPRESENTATIVE[-1]
        traces = [trace_operator(sample, shape, "sm_90") for shape in shapes]  # as the matrix does
        assert any(x.jobs.get(None) for x in traces), (sample.name, traces[0].refused)


RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")


def test_recorded_releases_have_retention_on_volta() -> None:
    """docs/SUPPORT.md has what docs/support.json says, of all architectures; none dies there."""
    from slipstream.compiler.arch import ARCHS

    root = Path(__file__).parents[2]
    recorded = script("tools/support_page").read(root / "docs/support.json")
    table = (root / "docs/SUPPORT.md").read_text()
    assert set(re.findall(r"^## Triton (\S+)", table, re.M)) == set(recorded)
    (made,) = re.findall(r"^RELEASES\W+(.+)$", (root / "Makefile").read_text(), re.M)
    assert set(re.findall(r"[\d.]+", made)) <= set(recorded)
    for release, archs in recorded.items():
        assert release in RELEASES and set(archs) == set(ARCHS), release
        status, why = archs["sm_70"]["operators"]["chunk_retention"]
        assert status in ("ok", "slow") or (status in ("torch", "refused") and why), release


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
