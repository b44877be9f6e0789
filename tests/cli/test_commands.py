"""Every command has a page that names its options; how the matrix ends; slipstream convert and
precompile as they are called."""

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import slipstream
from slipstream.cli.commands import app, reported
from slipstream.compiler import compiler_state, support_matrix
from slipstream.compiler.support_matrix import Row
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.models.convert import convert
from slipstream.models.convert.files import Weights
from slipstream.runtime.files import read_text
from slipstream.tools.model_kernels import read, trace_model
from slipstream.tools.precompile_cache import is_model
from slipstream.training.config import load
from tests.support import wants
from tests.support.forked import run_code
from tests.support.scripts import ROOT, script

matrix, support_page = (script(f"tools/{x}") for x in ("matrix", "support_page"))


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("rich", name="rich"), ValueError("an\nerror")]
)
def test_errors_are_a_line_of_stderr(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), reported():
        raise error
    out, err = capfd.readouterr()
    assert not out and err.count("\n") == 1


@pytest.mark.parametrize("name", ["precompile", "doctor", "explain", "convert"])
def test_command_page_names_options(name: str) -> None:
    group: Any = typer.main.get_command(app)
    text = (ROOT / f"docs/tools/{name}.md").read_text()
    assert text.startswith(f"# slipstream {name}\n")
    for option in group.commands[name].params:
        if isinstance(option, click.Option) or option.param_type_name == "option":
            names = [x for x in (*option.opts, *option.secondary_opts) if x.startswith("--")]
            assert any(x in text for x in names), names


def test_readme_names_make_matrix() -> None:
    assert "`make matrix`" in (ROOT / "README.md").read_text()
    assert "\nmatrix: " in (ROOT / "Makefile").read_text()


def row(status: str) -> Row:
    of: dict[str, Any] = {
        "arch": "sm_80",
        "triton": "3.6.0",
        "ptxas": "12.8.93",
        "kernel": "some_kernel",
    }
    return Row(
        **of,
        module="slipstream.kernels.norm.triton_kernels",
        operators=("rms_norm",),
        status=status,
        reason="",
        warps=4,
        stages=1,
        constants={},
    )


EMPTY = '{"reasons": [], "releases": {}}'


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Where tools/matrix.py writes instead."""
    found = {}
    for name, text in {"DATA": EMPTY, "PAGE": "", "VERIFIED": "[]"}.items():
        found[name] = tmp_path / name
        found[name].write_text(text)
        monkeypatch.setattr(support_page, name, found[name])
    return found


def test_table_of_the_matrix_is_in_words() -> None:
    run = matrix.MatrixRun([], [], ["sm_80", "sm_90"], True, "flags")
    console = Console(width=120, record=True, file=io.StringIO())
    run._show([row("ok"), replace(row("slow"), operators=("swiglu",))], console)
    text = console.export_text()
    assert "Triton 3.6.0, kernels: 1 ok, 1 slow" in text and "{" not in text
    assert "slow: compiles and fits, but spills registers" in text and "refused:" not in text
    found = replace(row("ok"), shared=1024, registers=64, instructions={"wgmma": 3, "mma.sync": 0})
    line = matrix.line(found)
    assert (
        "1024 bytes of shared memory, 64 registers and 0 bytes of stack a thread, 3 wgmma" in line
    )
    assert "{" not in line and "mma.sync" not in line


def test_matrix_records_nothing_partial(
    recorded: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def compile(self: Any, *args: Any) -> list[Row]:
        self.failures.append("rms_norm: not traced")
        return [row("ok")]

    monkeypatch.setattr(matrix.MatrixRun, "compile", compile)
    assert matrix.main(["--arch", "sm_80", "--record"]) == 1
    assert "not recorded" in capsys.readouterr().err
    assert recorded["DATA"].read_text() == EMPTY


def test_records_of_other_machines_are_merged(
    recorded: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Columns of other releases stay, and kernels that have changed are not verified."""
    about = {"ptxas": "12.8.93", "variants": "few", "shapes": 7, "kernels": 1, "operators": {}}
    support_page.write(recorded["DATA"], {"3.6.0": {"sm_80": about}})
    now = compiler_state.families(False)
    old = {
        "arch": "sm_80",
        "triton": "3.6.0",
        "ptxas": "12.8.93",
        "families": {"norm": "as it was"},
    }
    recorded["VERIFIED"].write_text(json.dumps([old]))
    found = {"norm": now["norm"], "loss": "another"}
    new = {"arch": "sm_80", "triton": "3.7.1", "ptxas": "12.8.93", "families": found}
    column = {**about, "operators": {"rms_norm": ["slow", "spills 9 bytes"]}}
    support_page.write(tmp_path / "support.json", {"3.7.1": {"sm_80": column}})
    (tmp_path / "verified.json").write_text(json.dumps([new]))
    script("tools/carry_verified").merge(tmp_path)
    data = support_page.read(recorded["DATA"])
    assert data == {"3.6.0": {"sm_80": about}, "3.7.1": {"sm_80": column}}
    assert "| rms_norm | slow [1] |" in recorded["PAGE"].read_text()
    kept = {**new, "families": {"norm": now["norm"]}}
    assert json.loads(recorded["VERIFIED"].read_text()) == [old, kept]
    said = capsys.readouterr().out
    assert "changed: loss\n" in said and "not recorded: attention" in said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--arch", "sm_91"], "arch: want one of sm_70"),
        (["--variants", "some"], "--variants: want one of auto"),
        (["rms_nrm"], "operator: no 'rms_nrm'; did you mean rms_norm"),
    ],
)
def test_matrix_rejects_wrong_options(args: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(words)):
        matrix.main(args)


def test_command_help_and_version() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0 and "train" in result.output and "doctor" in result.output
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output == f"slipstream {slipstream.__version__}\n"


def test_help_breaks_no_line_within_a_paragraph() -> None:
    helps = {x.callback.__name__: x.help for x in app.registered_commands if x.callback}
    assert len(helps) == 6 and len(str(helps["train"]).split("\n\n")) == 2
    assert not [name for name, x in helps.items() if "\n" in str(x).replace("\n\n", "")]


@pytest.mark.parametrize(
    ("missing", "extra"),
    [("typer", "cli"), ("rich", "cli"), ("yaml", "cli"), ("transformers", "lm")],
)
def test_missing_package_is_named_with_its_extra(missing: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("output_dir: x")
    code = f"""
import sys
sys.modules[{missing!r}] = None
from slipstream.cli import main
train = sys.argv[1:]
sys.argv[1:] = ["--version"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
sys.argv[1:] = train
main()
"""
    done = run_code(code, "train", tmp_path / "x.yaml")
    (line,) = done.stderr.strip().splitlines()
    assert done.stdout.startswith("slipstream ")
    assert done.returncode == 1 and missing in line and f"pip install 'slipstream[{extra}]'" in line


def test_command_ends_quietly_where_nothing_reads_its_output(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    with pytest.raises(typer.Exit) as ended, reported():
        raise BrokenPipeError
    sys.stdout.close()
    assert ended.value.exit_code == 1 and capsys.readouterr().err == ""


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config of a run": ("run.yaml", load),
    "config of a model": ("config.json", lambda path: read(str(path))),
    "model to convert": ("config.json", lambda path: convert(path.parent, path.parent / "to")),
    "weights in parts": ("model.safetensors.index.json", lambda path: Weights(path.parent)),
    "prompts": ("prompts.txt", read_text),
}

DAMAGED = [(name, b"\xff\xfe\x00") for name in READERS]
DAMAGED += [(name, x) for name in READERS if name != "prompts" for x in (b"{", b"[0]", b"3")]
DAMAGED += [("weights in parts", x) for x in (b"{}", b'{"weight_map": {"x": 1}}')]


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_file_that_cannot_be_read_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    file, reader = READERS[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / file))):
        reader(tmp_path / file)


KDA = {"type": "kda", "gate_bias": True, "norm_eps": 1e-6}


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, words)])
    return result.exit_code, result.output


def test_convert_there_and_back_and_errors(tmp_path: Path) -> None:
    ours, theirs, again = (tmp_path / x for x in ("ours", "theirs", "again"))
    config = SlipstreamConfig(vocab_size=17, hidden_size=16, num_heads=2, mixers=[KDA])
    SlipstreamForCausalLM(config).save_pretrained(ours)
    status, output = run(ours, theirs, "--to", "kda")
    assert status == 0 and output.startswith("slipstream to kda: ")
    status, output = run(theirs, again)
    assert status == 0 and output.startswith("kda to slipstream: ")
    status, output = run(ours, tmp_path / "more")
    assert status == 2 and "error: to: want one of gla, retnet" in output
    status, output = run(theirs, tmp_path / "more", "--ignore", "nothing")
    assert status == 2 and "error: ignore: nothing is not in" in output


SMALL = {"vocab_size": 512, "hidden_size": 128, "num_heads": 2}
BF16 = torch.bfloat16
CONFIGS = Path(__file__).parents[2] / "configs"


def small(*mixers: str) -> SlipstreamConfig:
    return SlipstreamConfig(**SMALL, mixers=list(mixers))


def test_operators_are_no_models_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("kda", "chunk_kda", "run"):
        (tmp_path / name).mkdir()
    assert not is_model("kda") and not is_model("chunk_kda")
    assert is_model("run") and is_model("./kda") and is_model("config.json")


@wants.compiler
def test_kernels_of_a_step() -> None:
    names = [x.name for x in trace_model(small(*["kda"] * 5), BF16, (2, 512), "sm_90", True)]
    both = {"conv_fwd", "conv_bwd", "dplr_chunk_fwd_sm90", "dplr_dqkg_sm90", "norm_bwd"}
    both |= {"embedding", "cross_entropy", "decay_gate"}
    assert {f"{x}_kernel" for x in both} <= {*names}
    few = [x.name for x in trace_model(small("kda", "kda"), BF16, (2, 512), "sm_90", True)]
    assert sorted(few) == sorted(names)  # the other blocks are like these
    forward = {x.name for x in trace_model(small("kda"), BF16, (2, 512), "sm_90", False)}
    assert forward < {*names} and not any("bwd" in x for x in forward)


def test_configurations_are_read_from_folders_and_files(tmp_path: Path) -> None:
    config = small("gla", "attention")
    config.save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        assert read(str(name)).mixers == config.mixers
    assert read(f"{CONFIGS}/kda.yaml").mixers == ["kda"] * 4
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="want model_type 'slipstream', got 'llama'"):
        read(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="got None"):
        read(str(tmp_path))
    with pytest.raises(ValueError, match="want a model's folder"):
        read(str(tmp_path / "no.json"))


@wants.compiler
def test_command_compiles_what_it_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[str] = []

    def run(tasks: list, **options: object) -> list:
        compiled.extend(job.name for job, _ in tasks)
        return []

    monkeypatch.setattr(support_matrix, "run", run)
    options = ["--batch", "2x256", "--cache", str(tmp_path / "cache")]
    got = CliRunner().invoke(app, ["precompile", f"{CONFIGS}/retention.yaml", *options])
    assert got.exit_code == 0, got.output
    assert any("scalar_decay" in x for x in compiled)
    for wrong in ("8", "0x4", "8x1", "axb"):
        got = CliRunner().invoke(app, ["precompile", f"{CONFIGS}/kda.yaml", "--batch", wrong])
        assert got.exit_code == 2 and "--batch: want rows and tokens" in got.output
