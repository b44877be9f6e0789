"""bench/: every script runs at tiny sizes on a CPU, and rows go where the README says."""

import datetime
import io
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream import ops
from slipstream.tools.catalog import chosen
from tests.support.forked import run_script
from tests.support.scripts import script

BENCH = Path(__file__).parents[1] / "bench"
DOCS = BENCH.parent / "docs"
README = (BENCH / "README.md").read_text()
MODULES = ("decode_drafts", "decode_serving", "harness", "processes", "snapshots")
SCRIPTS = [x.stem for x in sorted(BENCH.glob("*.py")) if x.stem not in MODULES]
harness, linear = script("bench/harness"), script("bench/linear")


@pytest.fixture(autouse=True)
def _records_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)  # bench/matmul.py sets it


def rows(captured: str) -> list[dict[str, str]]:
    """The printed rows."""
    lines = [x.rsplit(" after ", 1)[0] for x in captured.splitlines() if " after " in x]
    return [{y.split()[0]: y.split()[-1] for y in line.split(", ")} for line in lines]


@pytest.mark.parametrize(
    ("name", "arguments", "many"),
    [
        ("linear", "", 20),
        ("linear", "--lengths", 8),
        ("linear", "--once --only gla", 3),
        ("engines", "", 6),
        ("delta", "", 36),
        ("gates", "", 25),
        ("delta", "--once --only 96.*-5", 1),
        ("attention", "", 20),
        ("attention", "--errors --only causal", 8),
        ("blocks", "", 20),
        ("blocks", "--errors", 11),
        ("matmul", "", 15),
        ("decode", "--only step|scan", 19),
        ("decode", "--only generate.*(gla|attention|gated)", 14),
        ("decode", "--only ^(mixer|prompts)", 30),
        ("decode", "--once --only ^(mixer.*1|prompts.*4)", 10),
        ("decode", "--only ^drafts", 4),
        ("host", "--only norm|chunk_kda", 6),
        ("context_parallel", "--only gated_delta|attention", 4),
        ("trees", "--only (hybrid|attention|kda|hgrn|short_convolution).deep", 5),
        ("parallel_training", "--only fsdp2|million", 3),
        ("linear", "--memory", 16),
        ("linear", "--memory --packed --only kda", 1),
        ("training", "--only gated_deltanet|packed", 5),
        ("varying", "--only (packed|prefill|decode|host).*gated_delta", 5),
        ("selected_overlap", "", 40),
        ("selected", "--only local.8192.(ours|eager)", 9),
        ("selected_model", "", 6),
        ("varying", "--only sizes.gla|operator.chunk_gdn2", 9),
        # each way is a process of its own, which imports transformers
        ("transformers_models", "--cpu --only nemotron_h.*patched", 1),
        ("transformers_turns", "--only ^xlstm", 4),
        pytest.param("convergence", "--seeds 2 --only qwen3_next", 4, marks=pytest.mark.slow),
    ],
)
def test_small_run(
    name: str, arguments: str, many: int, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    whole = ("training", "convergence", "varying", "selected_model")
    if name in whole or "transformers" in name or re.search("generate|--cpu|drafts", arguments):
        pytest.importorskip("transformers")
    script(f"bench/{name}").main(["--small", *arguments.split()])
    found = rows(capsys.readouterr().out)
    assert len(found) >= many
    assert list(tmp_path.iterdir()) == []


def test_rows_of_peers_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(harness.Report, "runs", lambda self, count: 2)
    linear.main(["--peer", "cpu", "--only", "decoding"])
    kept = harness.read("linear_cpu")
    assert [x["work"] for x in kept] == ["gated delta rule decoding step", "kda decoding step"]
    assert all(float(x["ours_ms"]) > 0 and float(x["ratio"]) > 0 for x in kept)
    assert list(kept[0])[:3] == ["date", "device", "torch"]


def told(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """A process that waits for lines on stdin gets these."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))


def test_process_of_a_first_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    told(monkeypatch, "go\n")
    script("bench/first_calls").main(["--small", "--child", "rms_norm"])
    ready, found = map(json.loads, capsys.readouterr().out.splitlines())
    assert ready == {"ready": True} and found["call_s"] > 0 and found["again_ms"] > 0


def test_process_of_a_state_of_the_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    host = script("bench/host")
    monkeypatch.setattr(host, "samples", lambda: {"rms_norm": chosen(["rms_norm"])[0]})
    threads = torch.get_num_threads()
    told(monkeypatch, "0\n1\n")
    host.main(["--child"])
    torch.set_num_threads(threads)
    told_calls, *times = map(json.loads, capsys.readouterr().out.splitlines())
    assert told_calls == {"calls": ["rms_norm", "rms_norm both"]}
    assert len(times) == 2 and all(x["us"] > 0 for x in times)


def test_tables_take_new_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows as the scripts write them today, behind those that are there."""
    tables, specs = script("tools/tables"), script("tools/table_specs")
    for path in (BENCH / "results").glob("*.csv"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    # small runs record too
    monkeypatch.setattr(harness.Report, "keeps", property(lambda x: True, lambda x, y: None), False)
    for name, arguments in (
        ("linear", "--only ^gla"),
        ("attention", "--only ^4,4096,16,128"),
        ("blocks", "--only l2_norm"),
        ("matmul", "--only 128x"),
        ("decode", "--only kda"),
    ):
        script(f"bench/{name}").main(["--small", *arguments.split()])
    tables.database.cache_clear()
    try:
        used = {x: table.used() for x, table in specs.TABLES.items()}
    finally:
        tables.database.cache_clear()
    here = datetime.date.today().isoformat(), harness.device_name()
    new = {x for x, rows in used.items() if here in {(y["date"], y["device"]) for y in rows}}
    assert {"attention", "linear", "matmul", "steps"} <= new


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        script(f"bench/{name}").main(["--help"])
    usage, _, described = capsys.readouterr().out.partition("\n\n")
    assert ended.value.code == 0 and f"bench/{name}.py" in described
    # commands of its docstring and of the documentation
    pages = [x for x in DOCS.rglob("*.md") if "_build" not in x.relative_to(DOCS).parts]
    text = "\n".join([described, *(x.read_text() for x in (*pages, BENCH / "README.md"))])
    for command in re.findall(rf"bench/{name}\.py( -[^`\n]*)", text):
        for option in re.findall(r" (--[a-z-]+)", command):
            assert re.search(rf"{option}\b", usage), f"bench/{name}.py{command}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_one_seed_is_refused(capsys: pytest.CaptureFixture) -> None:
    """There are no gaps between one seed, which is said before anything is trained."""
    for count in ("1", "-1"):
        with pytest.raises(SystemExit):
            script("bench/convergence").main(["--small", "--seeds", count])
        assert "--seeds: want at least 2" in capsys.readouterr().err


def test_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="--small tries the script on a CPU"):
        linear.main([])


def test_every_script_and_file_is_listed() -> None:
    listed = {x[0]: set(re.findall(r"`(\w+)`", x[1]))
              for x in re.findall(r"^\| `(\w+)\.py`.*\| ([^|]*) \|$", README, re.M)}  # fmt: skip
    assert set(listed) == set(SCRIPTS)
    files = {x.stem for x in (BENCH / "results").glob("*.csv")}
    of_others = {"strong_gates", "peer_suites"}  # a script of its day; tools/peer_suites.py
    assert files <= of_others.union(*listed.values()), "no script writes it"
    for name, written in listed.items():
        source = (BENCH / f"{name}.py").read_text()
        assert all(f'"{x}"' in source for x in written), name


def test_every_chunk_operator_is_beside_fla() -> None:
    assert {x.sample.op for x in linear.CASES} == {x for x in dir(ops) if x.startswith("chunk_")}


class Peer(torch.autograd.Function):
    """Ours, without a backward."""

    @staticmethod
    def forward(ctx: Any, fn: Any, *args: Any) -> tuple:
        return fn(*args, output_final_state=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("not on this GPU")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla and FlashQLA, which are not installed, in modules of ours."""
    fakes = {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops")}
    for name in ("gla", "kda", "gated_delta_rule", "generalized_delta_rule"):
        fakes[f"fla.ops.{name}"] = module = ModuleType(name)
        for op in (f"chunk_{name}", "chunk_dplr_delta_rule"):
            setattr(module, op, getattr(ops, op, None))
    names = "q", "k", "v", "a", "b", "gk"

    def dplr(*args: Any, **options: Any) -> Any:
        return ops.chunk_dplr_delta_rule(**dict(zip(names, args)), **options)

    fakes["fla.ops.generalized_delta_rule"].chunk_dplr_delta_rule = lambda **given: Peer.apply(  # type: ignore[attr-defined]
        dplr, *(given[n] for n in names)
    )
    fakes["flash_qla"] = ModuleType("flash_qla")
    fakes["flash_qla"].chunk_gated_delta_rule = ops.chunk_gated_delta_rule  # type: ignore[attr-defined]

    def of_rows(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
        given = (x[None] for x in (q, k, v, g.log(), beta))
        return tuple(x[0] for x in Peer.apply(partial(gated, **options), *given))

    def gated(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
        return ops.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **options)

    fakes |= {n: ModuleType(n) for n in ("flashinfer", "flashinfer.gdn_prefill")}
    fakes["flashinfer.gdn_prefill"].chunk_gated_delta_rule = of_rows  # type: ignore[attr-defined]
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_linear_beside_peers(peers: None, capsys: pytest.CaptureFixture) -> None:
    linear.main(["--small", "--only", "^(gla|kda) A"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and all("differs 0.0e+00" in x for x in printed)
    assert all(re.search(r"fla fwd \S+, .*fla both \S+, .*fla error o", x) for x in printed)


@pytest.mark.parametrize(
    ("only", "who"),
    [
        ("kda .*(8192x16|8x1024x32) -1", ["slipstream", "fla"]),
        ("gdn 8x1024 8/24 -1", ["slipstream", "flashinfer", "flash_qla"]),
    ],
)
def test_delta_beside_peers(
    peers: None, capsys: pytest.CaptureFixture, only: str, who: list[str]
) -> None:
    script("bench/delta").main(["--small", "--peers", *who[1:], "--only", only])
    found = [x for x in capsys.readouterr().out.splitlines() if x.startswith("shape")]
    assert [x.split("who ")[1].split(",")[0] for x in found] == who * (1 + ("kda" in only))
    assert all(re.search(r"forward_ms \S+, .*error \S+e-0[78] ", x) for x in found)
    assert [x.split("who ")[1].split(",")[0] for x in found if "both_ms" not in x] == [
        name for name in who if name == "flashinfer"
    ]


@pytest.mark.parametrize("got", [torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 3.0])])
def test_error_is_relative_and_sees_nan(got: torch.Tensor) -> None:
    found = harness.error(got, torch.tensor([1.0, 2.0]))
    assert found == (float("inf") if got.isnan().any() else pytest.approx(0.2**0.5))


def test_new_column_goes_last() -> None:
    harness.record("x", [{"a": 1}])
    harness.record("x", [{"b": 2, "a": 3}])
    assert [list(x.values())[3:] for x in harness.read("x")] == [["1", ""], ["3", "2"]]


class Clock:
    """A device that is not there: an event notes the time, which goes on with each call."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Clock.now

    def elapsed_time(self, end: "Clock") -> float:
        return end.at - self.at


def test_calls_take_turns_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    took = {"a": itertools.cycle([1.0]), "b": itertools.cycle([3.0, 5.0, 100.0])}

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            Clock.now += next(took[name])

        return run

    slept: list[int] = []
    monkeypatch.setattr(harness, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(harness, "_flushed", lambda: torch.empty(1))
    for name, stub in (("synchronize", lambda: None), ("_sleep", slept.append), ("Event", Clock)):
        monkeypatch.setattr(torch.cuda, name, stub)
    assert harness.in_turns({"a": call("a"), "b": call("b")}, 9) == {"a": 1.0, "b": 5.0}
    assert order == ["a", "b"] * 11 and slept[0] > 0


def test_states_after_each_draft() -> None:
    """Drafts by mixer_step are timed beside these states."""
    pytest.importorskip("triton")
    status, printed = run_script("tests.support.draft_states", str(BENCH))
    assert status == 0, printed
