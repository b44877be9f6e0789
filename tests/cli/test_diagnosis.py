"""slipstream doctor, explain and precompile, as a user runs them on a machine without a GPU."""

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from slipstream import ops
from slipstream.cli.commands import app
from slipstream.compiler import compiler_state, toolchain
from slipstream.runtime import guarded_launch
from slipstream.tools import doctor_checks
from slipstream.tools.catalog import SAMPLES
from slipstream.tools.precompile_cache import stale
from tests.support import wants
from tests.support.triton_release import HAS_GLUON, INTERPRETS


@pytest.fixture(autouse=True)
def _same_ptxas_afterwards() -> Iterator[None]:
    """explain selects one for the process, which may not know other tests' architectures."""
    with mock.patch.dict(os.environ):
        yield


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.output


def test_every_public_operator_has_a_sample() -> None:
    """But for tables of positions, and for decoding steps, which are called by name."""
    public = {name for name, fn in vars(ops).items() if inspect.isfunction(fn)}
    without = {x for x in public if "step" in x or "update" in x or "position" in x}
    # attention and the short convolution under other names
    without |= {x for x in public if x.startswith(("flash_attn_", "causal_conv1d"))}
    without |= {"index_loss", "rotary_embedding", "rotary_tables"}  # no kernels, or no samples
    assert {x.op for x in SAMPLES} <= public
    assert public - without - {x.op for x in SAMPLES} == set()


def test_doctor_leaves_a_broken_interpreter_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.9.0")
    status, text = invoke("doctor", "rms_norm", "--thorough")
    assert status == 0 and "interpreter-mask" in text and "none: plain torch\n" in text
    assert not [x for x in text.splitlines() if x.startswith("ok") and "interpreted" in x]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize("release", [None, "3.6.0"])
def test_doctor_speaks_of_an_interpreter_where_triton_is(
    release: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.compiler.toolchain.triton_version", lambda: release)
    code, text = invoke("doctor", "--no-checks")
    assert code == 0 and "device      none: plain torch" in text
    assert ("interpreter" in text) == (release is not None)


def test_doctor_agrees_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    names = ("retention", "delta_rule", "rms_norm", "linear_kl_div")
    status, text = invoke("doctor", *names, "--no-interpreted")
    assert status == 0 and "all agree" in text
    assert all(x in text for x in (*names, "chunk_delta_rule", str(tmp_path)))
    status, text = invoke("doctor", "hgrn", "--no-interpreted", "--json")
    report = json.loads(text)
    assert status == 0 and {x["operator"] for x in report["checks"]} >= {"chunk_hgrn"}
    assert all(0 < x["output"] < 1e-4 for x in report["checks"])


def test_doctor_agrees_about_every_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    status, text = invoke("doctor", "--no-interpreted")
    assert "recurrent_step" in text
    assert status == 0, [x for x in text.splitlines() if x.startswith("FAIL")]


def test_doctor_checks_small_inputs_with_one_thread() -> None:
    """Two that share busy cores took three times as long."""
    from slipstream.tools import doctor_checks
    from slipstream.tools.catalog import chosen

    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        show = lambda check: seen.append(torch.get_num_threads())  # noqa: E731
        assert list(doctor_checks.examine(chosen(["rms_norm"]), False, show))
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_doctor_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.chunk_retention

    def wrong(*args: object, **options: object) -> object:
        o, state = right(*args, **options)  # pyright: ignore
        return (o if options.get("impl") == "reference" else o * 1.01), state

    wrong.__signature__ = __import__("inspect").signature(right)  # pyright: ignore
    monkeypatch.setattr(ops, "chunk_retention", wrong)
    status, text = invoke("doctor", "chunk_retention", "--no-interpreted")
    assert status == 1 and "FAIL chunk_retention" in text and "worst: output 0" in text


def test_doctor_finds_missing_and_nan() -> None:
    """An oracle's NaN agrees with nothing, a result that is not there is no result."""
    one, nan = torch.ones(3, dtype=torch.float64), torch.full((3,), torch.nan, dtype=torch.float64)
    assert doctor_checks._error(one, one) == 0.0
    assert (
        doctor_checks._error(one, nan)
        == doctor_checks._error(nan, one)
        == doctor_checks._error(nan, nan)
    )
    assert doctor_checks._error(one, nan) == float("inf")
    blank = doctor_checks.Check("op", "eager", "", ok=False, bars=(1e-4, 1e-3))
    two, less = (doctor_checks._Result([one] * n, {}, {}) for n in (2, 1))
    assert doctor_checks._judged(blank, two, two).ok
    found = doctor_checks._judged(blank, less, two)
    assert not found.ok and found.error == "1 outputs instead of 2"
    bad = doctor_checks._judged(blank, doctor_checks._Result([nan, one], {}, {}), two)
    text = json.dumps(doctor_checks.as_json(bad), allow_nan=False)
    assert doctor_checks.from_json(json.loads(text)) == bad and bad.output == float("inf")


@pytest.fixture
def sm90(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 with driver 575.51.03, Triton 3.6.0 and ptxas 12.8.93."""
    from slipstream.compiler import arch, compiler_state, toolchain

    for name, words in {"nvidia-smi": "575.51.03", "ptxas": "release 12.8, V12.8.93"}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{words}'\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(toolchain.VARIABLE, str(tmp_path / "bin/ptxas"))
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(compiler_state, "arch_of_device", lambda device: arch.named("sm_90"))
    here = compiler_state.CompilerState("sm_90", "3.6.0", "12.8.93", passive=True, remembers=False)
    monkeypatch.setattr(guarded_launch, "compiler_state", lambda device: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "planted H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))


@pytest.mark.usefixtures("sm90")
def test_doctor_reports_the_gpu_and_its_compilers(tmp_path: Path) -> None:
    status, text = invoke("doctor", "--no-checks", "--json")
    report = json.loads(text)
    memory = {"free": 3 << 30, "total": 80 << 30}
    about = {"name": "planted H100", "arch": "sm_90", "driver": "575.51.03", "memory": memory}
    assert status == 0 and report["device"] == about
    ptxas = tmp_path / "bin/ptxas"
    assert report["ptxas"]["path"] == str(ptxas) and report["ptxas"]["version"] == "12.8.93"
    assert [x["name"] for x in report["faults"]] == [
        "narrow-dot",
        "transposed-dot",
        "chained-dots",
        "overwritten-tile",
    ]
    status, text = invoke("doctor", "--no-checks")
    assert status == 0 and "planted H100, sm_90, driver 575.51.03" in text
    assert "3.0 of 80.0 GiB free" in text and f"12.8.93 (the toolkit at {tmp_path}'s" in text
    assert "narrow-dot (wrong result)" in text and "avoided by how kernels are written" in text


@wants.compiler
def test_doctor_interprets_the_kernels_where_no_gpu_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    status, text = invoke("doctor", "swiglu", "--json")
    checks = json.loads(text)["checks"]
    assert status == 0 and [x["impl"] for x in checks] == ["eager", "interpreted"][: 1 + INTERPRETS]
    assert all(x["operator"] == "swiglu" and x["ok"] and 0 < x["output"] < 1e-4 for x in checks)


@pytest.mark.parametrize(("full", "thorough"), [(False, False), (True, True)])
def test_doctor_compiles_ahead_what_it_examines(
    monkeypatch: pytest.MonkeyPatch, full: bool, thorough: bool
) -> None:
    compiled, examined = [], []

    def find_kernels(samples: Any, shapes: Any, arch: str, impls: Any) -> SimpleNamespace:
        compiled.extend(
            (x.name, shape, impl) for x in samples for shape in shapes for impl in impls
        )
        assert arch == "sm_90"
        return SimpleNamespace(tasks=())

    def examine_one(sample: Any, shape: Any, device: torch.device, impls: Any) -> tuple:
        # plain torch compiles nothing
        examined.extend((sample.name, shape, impl) for impl in impls if impl != "eager")
        return ()

    arch = lambda device: SimpleNamespace(name="sm_90")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor_checks.compiler_state, "arch_of_device", arch)

    def run(args: list[str], env: dict[str, str], capture_output: bool) -> None:
        assert (
            env["CUDA_VISIBLE_DEVICES"] == "" and capture_output
        )  # the report is all that is shown
        exec(args[-1])

    monkeypatch.setattr(doctor_checks.subprocess, "run", run)
    monkeypatch.setattr(doctor_checks.support_matrix, "run", lambda tasks, processes: None)
    monkeypatch.setattr(doctor_checks, "find_kernels", find_kernels)
    monkeypatch.setattr(doctor_checks, "examine_one", examine_one)
    samples = doctor_checks.chosen(["swiglu", "chunk_retention"])
    assert not list(doctor_checks.examine(samples, full, thorough=thorough))
    assert len(examined) > 1 and {*examined} <= {*compiled}


@wants.compiler
def test_doctor_says_how_an_interpreter_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "SAMPLES", [*SAMPLES, SAMPLES[0].__class__("none", "q=BT")])
    checks = list(doctor_checks.interpreted([doctor_checks.SAMPLES[-1]]))
    assert len(checks) == INTERPRETS
    assert all(not x.ok and "IndexError" in x.error for x in checks)


def test_doctor_names_what_it_does_not_know() -> None:
    status, text = invoke("doctor", "retentoin")
    assert status == 2 and "no 'retentoin'; did you mean retention" in text
    status, text = invoke("doctor", "zzz")
    assert status == 2 and "no 'zzz'; want one of chunk_linear_attn" in text


@wants.compiler
def test_explain_names_kernels_tiles_and_reasons() -> None:
    status, text = invoke("explain", "chunk_simple_gla", "--arch", "sm_80", "--shape", "K=64,V=64")
    assert status == 0
    assert "  scalar_decay_chunk_kernel " in text and text.count("166912 bytes") == 1
    (compiler,) = (x.partition(": ")[0] for x in text.splitlines() if x.startswith("  Triton "))
    assert ("ptxas none" in compiler) is not compiler.endswith(")")  # whose it is
    headings = next(x.split() for x in text.splitlines() if "kernel  " in x)
    assert headings == ["kernel", "launches", "tile", "warps", "stages", "file"]
    assert " linear/triton/scalar_decay/chunk.py" in text
    assert text.count("tile: what one program") == 1 and "HAS_" not in text
    status, text = invoke("explain", "chunk_simple_gla", "--shape", "K=64,V=64", "--flags")
    assert status == 0 and text.count("flags: options compiled into") == 1 and "HAS_" in text
    status, text = invoke("explain", "chunk_delta_rule", "--shape", "K=512")
    assert status == 0 and "at most 256" in text
    status, text = invoke("explain", "chunk_simple_gla", "--arch", "sm_91")
    assert status == 2 and "arch: want one of" in text


@wants.compiler
@pytest.mark.parametrize("operator", ["chunk_simple_gla", "attention", "rms_norm"])
def test_explain_says_what_was_learnt_here(
    operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that was demoted, or that a known fault stops, is rejected for that reason."""
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "select_ptxas", lambda *args: None)
    width = 64
    kinds = {
        "chunk_simple_gla": ("linear.triton", "none", "scalar", torch.bfloat16, width, width),
        "attention": ("attention.triton", torch.bfloat16, width, width, "right"),
        "rms_norm": ("norm.triton", torch.bfloat16, 2 * width, torch.bfloat16),
    }
    shape = f"K={width},V={width}"
    compiler_state.state_for("sm_80").mark_unusable(kinds[operator], "killed by SIGABRT")
    status, text = invoke("explain", operator, "--arch", "sm_80", "--shape", shape)
    assert status == 0 and "chosen: eager" in text
    assert "rejected: triton, killed by SIGABRT" in text
    monkeypatch.setattr(toolchain, "ptxas_version", lambda path: "13.0.88")
    status, text = invoke("explain", operator, "--arch", "sm_70", "--shape", shape)
    assert status == 0 and "rejected: triton, any kernel: ptxas 13 has no sm_70" in text


@wants.compiler
def test_explain_shows_gradient_backend() -> None:
    status, text = invoke("explain", "attention", "--arch", "sm_90", "--shape", "K=192,V=128")
    assert status == 0
    if HAS_GLUON:
        chosen, _, besides = text.partition("besides: triton")
        assert "chosen: sm90" in chosen
        assert "rejected: sm90, its gradients want heads" in besides
    else:
        assert "chosen: triton" in text and "rejected: sm90" in text


@wants.compiler
def test_explain_is_of_the_dtype_asked_for() -> None:
    """Tiles of float32 are smaller; sm_90's own kernels take none of it."""
    run = ["explain", "attention", "--arch"]
    half, single = (invoke(*run, "sm_80", "--dtype", x) for x in ("fp16", "fp32"))
    assert half[0] == single[0] == 0
    assert "fp16  sm_80" in half[1] and "fp32  sm_80" in single[1]
    tiles = [[x for x in text.splitlines() if "_kernel " in x] for _, text in (half, single)]
    assert tiles[0] and tiles[1] and tiles[0] != tiles[1]
    reason = "rejected: sm90, it computes in float16 and bfloat16, and q is torch.float32"
    texts = [invoke(*run, "sm_90", "--dtype", x)[1] for x in ("fp16", "fp32")]
    assert reason not in texts[0] and ("Gluon" in texts[0] or reason in texts[1])
    status, text = invoke(*run, "sm_90", "--dtype", "fp64")
    assert status == 2 and "--dtype: want one of" in text and "'fp64'" in text


@wants.compiler
def test_precompile_fills_a_cache_that_says_by_what(tmp_path: Path) -> None:
    run = ["precompile", "chunk_retention", "--arch", "sm_80", "--head-dim", "32", "--forward"]
    run += ["--no-packed", "--no-state", "--no-grouped", "--jobs", "1", "--cache", str(tmp_path)]
    status, text = invoke(*run)
    assert status == 0, text
    assert list(tmp_path.glob("*/scalar_decay_chunk_kernel.cubin"))
    assert stale(tmp_path, "sm_80") is None
    assert "arch sm_80 there, sm_90 here" in str(stale(tmp_path, "sm_90"))
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert f"path {tmp_path} there, {moved} here" in str(stale(moved, "sm_80"))


@wants.compiler
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--jobs", "0"], "jobs: want at least 1"),
        (["--head-dim", "0"], "--head-dim: want K or KxV"),
        (["--head-dim", "²"], "--head-dim: want K or KxV"),
        (["--cache", "/dev/null/x"], "Not a directory"),
    ],
)
def test_precompile_says_what_it_wants(options: list[str], words: str, tmp_path: Path) -> None:
    run = ["precompile", "squared_relu", "--arch", "sm_80", "--forward", "--cache", str(tmp_path)]
    status, text = invoke(*run, *options)
    assert status == 2 and words in text and not list(tmp_path.iterdir())
