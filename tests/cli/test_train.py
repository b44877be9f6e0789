"""slipstream train and generate as a user runs them: in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.training import sample
from tests.support.processes import start_command

CONFIG = """
model:
  {hidden_size: 32, num_heads: 2, intermediate_size: 64, mixers: [gated_deltanet, attention]}
tokenizer: {vocab_size: 400, train_bytes: 100000}
data: {files: ["{stdlib}/json", "{stdlib}/email"], held_out: 0.15, row_tokens: 32, eval_rows: 4}
training: {max_steps: 9, per_device_train_batch_size: 2, learning_rate: 3e-3,
           save_steps: 5, eval_steps: 4, per_device_eval_batch_size: 64}
"""
MODULE = "slipstream"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", MODULE, *map(str, arguments)]


def start(*arguments: object) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command(*arguments), stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment
    )


def finish(*arguments: object) -> str:
    process = start(*arguments)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def interrupted(config: Path, out: Path, number: signal.Signals, step: int) -> str:
    """Runs until the line of a step is printed, sends the signal, waits for the end."""
    text, sent = "", False
    (process,), lines = start_command(["train", config, f"output_dir={out}"])
    with lines:
        for line in lines:
            text += line
            if not sent and line.split()[:1] == [str(step)]:
                assert process.pid is not None
                os.kill(process.pid, number)
                sent = True
    process.join(60)
    assert process.exitcode == 0, text
    assert sent, text
    return text


MEASURED = (
    "tokens_per_second",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
)


def loss_log(run: Path) -> list[dict]:
    """All that is logged, but for times and memory."""
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in entry.items() if k not in MEASURED} for entry in log]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    text = finish("train", config, f"output_dir={out}")
    assert "bits per byte" in text
    assert "tokens/s" in text
    return out


def test_train_leaves_what_it_promises(trained) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "run.yaml", "result.json"):
        assert (trained / name).is_file(), name
    assert list((trained / "runs").glob("*/events.out.tfevents*"))
    assert sorted(p.name for p in trained.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-9"]
    log = loss_log(trained)
    assert [e["step"] for e in log if "loss" in e] == list(range(1, 10))
    assert [e["step"] for e in log if "eval_loss" in e] == [4, 8, 9]
    assert 0 < json.loads((trained / "result.json").read_text())["held_out"] < 8


def test_train_interrupted_and_resumed_equals_uninterrupted(config, trained, tmp_path) -> None:
    out = tmp_path / "parts"
    text = interrupted(config, out, signal.SIGINT, 2)
    assert "stopped after step" in text
    assert not (out / "model.safetensors").exists()
    assert "continuing at" in interrupted(config, out, signal.SIGTERM, 6)
    status, text = invoked("train", config, f"output_dir={out}")
    assert status == 0, text
    whole, parts = load_file(trained / "model.safetensors"), load_file(out / "model.safetensors")
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    assert loss_log(out) == loss_log(trained)


def invoked(*arguments: object) -> tuple[int, str]:
    """A command in this process, which has imported everything already."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_train_does_not_repeat_a_finished_run(config, trained) -> None:
    before = (trained / "model.safetensors").stat().st_mtime_ns
    status, text = invoked("train", config, f"output_dir={trained}")
    assert status == 0 and "is finished" in text
    assert (trained / "model.safetensors").stat().st_mtime_ns == before


def test_train_fresh_refuses_a_run_that_has_begun(config, trained, tmp_path) -> None:
    before = (trained / "model.safetensors").stat().st_mtime_ns
    status, out = invoked("train", config, f"output_dir={trained}", "--fresh")
    assert status == 2 and f"output_dir: {trained} holds a run" in out
    assert (trained / "model.safetensors").stat().st_mtime_ns == before


def test_generate_prints_text(trained) -> None:
    status, out = invoked("generate", trained, "def main(", "--tokens", 12)
    assert status == 0, out
    assert out.startswith("def main(")
    assert len(out) > len("def main(\n")


def test_generate_continues_every_line_of_a_file(trained, tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("def main(\n\nimport os\nx\n")
    status, out = invoked(
        "generate", trained, "--file", file, "--batch", 2, "--tokens", 6, "--temperature", 0
    )
    assert status == 0, out
    assert "tokens/s" in out
    for line in ("def main(", "import os", "x"):
        alone = invoked("generate", trained, line, "--tokens", 6, "--temperature", 0)[1]
        text = alone.rpartition("\n")[0].rpartition("\n")[0].strip() if alone else ""
        assert text in out
    status, out = invoked("generate", trained, "x", "--file", file)
    assert status == 2
    assert "either a prompt or --file" in out


@pytest.mark.parametrize(("batch", "rows"), [(1, [1, 1, 1]), (2, [2, 1]), (16, [3])])
def test_generate_continues_a_batch_at_once(batch, rows, trained, tmp_path, monkeypatch) -> None:
    file, called = tmp_path / "prompts.txt", []
    file.write_text("def main(\nimport os\nx\n")
    model, tokenizer = sample.load(trained)
    generate = model.generate

    def counted(**given: object) -> object:
        called.append(len(given["input_ids"]))  # pyright: ignore
        return generate(**given)

    monkeypatch.setattr(model, "generate", counted)
    monkeypatch.setattr(sample, "load", lambda directory: (model, tokenizer))
    status, out = invoked("generate", trained, "--file", file, "--batch", batch, "--tokens", 2)
    assert status == 0 and called == rows, out


def test_generate_without_a_model_says_so(tmp_path) -> None:
    status, out = invoked("generate", tmp_path, "x")
    assert status == 2
    assert "error: checkpoint" in out


def torchrun(*arguments: object) -> tuple[int, str]:
    """Two ranks of a command on this CPU."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", MODULE]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*run, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_two_ranks_equal_twice_the_batch(config, tmp_path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    finish("train", config, f"output_dir={one}", "training.per_device_train_batch_size=4")
    status, text = torchrun("train", config, f"output_dir={two}")
    assert status == 0, text
    assert text.count("on all held-out text") == 1
    assert (two / "checkpoint-5" / "rng_state_1.pth").is_file()
    whole, parts = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(loss_log(one), loss_log(two), strict=True):
        assert ours["step"] == theirs["step"]
        for key in ("loss", "eval_loss", "held_out_loss", "bits_per_byte"):
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-4)
    status, text = torchrun("train", config, f"output_dir={two}", "training.learning_rate=1")
    assert status != 0 and "error: training.learning_rate: differs" in text
