"""slipstream precompile of a model: the kernels of its training step, found from its configuration
without a GPU."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.compiler import support_matrix
from slipstream.models import SlipstreamConfig
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from slipstream.tools.model_kernels import read, trace_model
from slipstream.tools.precompile_cache import is_model

needs_compiler = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)
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


@needs_compiler
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


@needs_compiler
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
