"""A run that begins with weights of another, goes on from its checkpoints, and says what it cannot
do."""

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.runtime.files import write_text
from slipstream.training import run as run_module
from slipstream.training import trainer as trainer_module
from slipstream.training.config import from_dict
from slipstream.training.console import COLUMNS
from slipstream.training.ranks import Interrupt
from slipstream.training.run import Result, train
from slipstream.training.sample import load
from tests.support.training_configs import CONFIG, config_of

STEPS = 6
TIMES = ("tokens_per_second", "train_runtime", "train_samples_per_second", "train_steps_per_second")

RUN = {
    "data": {"eval_rows": 4},
    "training": {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 256,
        "save_steps": 2,
        "save_total_limit": 5,
        "eval_strategy": "no",
    },
}


def go(out: Path, console: Console | None = None, **sections: dict) -> Result:
    config = from_dict(config_of(out, RUN, sections))
    return train(config, Interrupt(), console or Console(quiet=True))


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def log(out: Path) -> list[dict]:
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in history]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.use_deterministic_algorithms(True)
    out = tmp_path_factory.mktemp("whole") / "run"
    assert go(out).step == STEPS
    return out


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """The same run, as it was after the checkpoint at step 4."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoint-6")
    for name in ("model.safetensors", "result.json", "trainer_state.json"):
        (out / name).unlink()
    return out


def test_resumed_run_equals_whole_run(whole: Path, stopped: Path) -> None:
    go(stopped)
    assert same(weights(whole), weights(stopped))
    assert log(stopped) == log(whole)


def zeroed(path: Path) -> None:
    """As after a loss of power: the size is on the disk, what was written is not."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [Path.unlink, zeroed])
def test_resume_skips_interrupted_checkpoint(
    whole: Path, stopped: Path, damage: Callable[[Path], None]
) -> None:
    damage(stopped / "checkpoint-4" / "trainer_state.json")
    console = Console(record=True, width=300, file=io.StringIO())
    go(stopped, console)
    assert f"continuing at {stopped / 'checkpoint-2'}" in console.export_text()
    assert same(weights(whole), weights(stopped))


def test_resume_after_interrupted_first_save(whole: Path, stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoint-4")
    (stopped / "checkpoint-2" / "trainer_state.json").unlink()
    go(stopped)
    assert same(weights(whole), weights(stopped))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "learning_rate", 0.5),
        ("training", "weight_decay", 0.0),
        ("training", "seed", 3),
        ("model", "hidden_size", 32),
        ("data", "row_tokens", 8),
        ("tokenizer", "vocab_size", 301),
    ],
)
def test_resume_refuses_changed_config(stopped: Path, section: str, key: str, value: Any) -> None:
    before = (stopped / "run.yaml").read_text()
    with pytest.raises(ValueError, match=rf"{section}\.{key}: differs from the run in"):
        go(stopped, **{section: {key: value}})
    assert (stopped / "run.yaml").read_text() == before


@pytest.mark.parametrize("text", ["", "null", "{", "- 1"])
def test_resume_names_unreadable_run_yaml(stopped: Path, text: str) -> None:
    (stopped / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"run\.yaml"):
        go(stopped)
    for checkpoint in stopped.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert go(stopped, training={"max_steps": 1}).step == 1  # nothing was there to continue


def test_unreadable_result_is_made_again(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    before = json.loads((whole / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text('{"step"')
    go(tmp_path / "run")
    assert json.loads((tmp_path / "run/result.json").read_text())["held_out"] == before["held_out"]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_the_data_train_the_same_model(
    whole: Path, tmp_path: Path, workers: int
) -> None:
    go(tmp_path / "run", training={"dataloader_num_workers": workers})
    assert same(weights(whole), weights(tmp_path / "run"))


def full(*args: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_write_text_keeps_old_file_on_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "x.json"
    write_text(path, "old")
    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x.json"]
    monkeypatch.undo()
    write_text(path, "new")
    assert path.read_text() == "new" and oct(path.stat().st_mode & 0o600) == "0o600"


def test_run_files_are_replaced_whole() -> None:
    for module in (run_module, trainer_module):
        assert ".write_text(" not in Path(str(module.__file__)).read_text()


@pytest.mark.parametrize("what", ["missing", "unexpected", "mismatched", "pickled"])
def test_load_takes_nothing_but_the_models_own_safetensors(
    whole: Path, tmp_path: Path, what: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoint-*"))
    model, _ = load(out)
    assert model.config.hidden_size == 16
    path, state = out / "model.safetensors", weights(out)
    name = next(k for k in state if "mlp" in k or "mixer" in k)
    if what == "missing":
        words = f"missing weights: {name}"
        save_file({k: v for k, v in state.items() if k != name}, path, {"format": "pt"})
    elif what == "unexpected":
        words = "unexpected weights: extra"
        save_file({**state, "extra": torch.zeros(1)}, path, {"format": "pt"})
    elif what == "mismatched":
        words = "mismatch"
        key = next(k for k in state if "embed_tokens" in k)
        save_file({**state, key: state[key][1:].clone()}, path, {"format": "pt"})
    else:
        words = "model.safetensors"
        path.unlink()
        torch.save(state, out / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError, RuntimeError), match=words):
        load(out)


def raw_begin(
    out: Path, steps: int = 2, training: dict[str, Any] | None = None, **sections: Any
) -> dict[str, Any]:
    """With whole sections."""
    return config_of(out, RUN, {"training": {"max_steps": steps, **(training or {})}}) | sections


def go_begin(config: dict[str, Any], console: Console | None = None) -> Path:
    return train(from_dict(config), Interrupt(), console or Console(quiet=True)).directory


def test_run_begins_with_weights_and_tokenizer_of_another(tmp_path: Path) -> None:
    first = go_begin(raw_begin(tmp_path / "first"))
    options: dict[str, Any] = {"model": {}, "tokenizer": {}, "init_from": str(first)}
    still = {"learning_rate": 0.0, "weight_decay": 0.0}
    second = go_begin(raw_begin(tmp_path / "second", training=still, **options))
    before = SlipstreamForCausalLM.from_pretrained(first).state_dict()
    after = SlipstreamForCausalLM.from_pretrained(second).state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert (second / "tokenizer.json").read_text() == (first / "tokenizer.json").read_text()
    # it goes on from its own checkpoints, and not from another model
    (second / "result.json").unlink()
    go_begin(raw_begin(tmp_path / "second", steps=3, training=still, **options))
    with pytest.raises(ValueError, match="init_from: differs from the run in"):
        go_begin(
            raw_begin(
                tmp_path / "second", steps=4, training=still, **{**options, "init_from": "other"}
            )
        )


def test_beginnings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.hidden_size: has no use beside init_from"):
        from_dict(raw_begin(tmp_path / "out", init_from="x"))
    options: dict[str, Any] = {"model": {}, "tokenizer": {}, "init_from": str(tmp_path / "no")}
    with pytest.raises(FileNotFoundError, match="want a directory with a model"):
        go_begin(raw_begin(tmp_path / "out", **options))
    SlipstreamForCausalLM(SlipstreamConfig(vocab_size=30, **CONFIG["model"])).save_pretrained(
        tmp_path / "no"
    )
    with pytest.raises(ValueError, match=r"tokenizer.path: want a tokenizer"):
        go_begin(raw_begin(tmp_path / "out", **options))
    tokenizer = go_begin(raw_begin(tmp_path / "run")) / "tokenizer"
    with pytest.raises(ValueError, match="tokenizer: 300 ids are more than the 30 of init_from"):
        go_begin(raw_begin(tmp_path / "out", **{**options, "tokenizer": {"path": str(tokenizer)}}))


def test_reporters_of_transformers_get_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):
        def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(logs)

    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Reporter)
    go_begin(raw_begin(tmp_path / "out", training={"report_to": ["wandb", "tensorboard"]}))
    steps = [x for x in seen if "loss" in x]
    assert len(steps) == 2
    for name in ("bits_per_byte", "grad_norm", "learning_rate", "tokens_per_second"):
        assert all(x[name] >= 0 for x in steps), name


def test_step_lines_are_a_table(tmp_path: Path) -> None:
    file = io.StringIO()
    go_begin(raw_begin(tmp_path / "out"), Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    at = next(i for i, x in enumerate(lines) if x.split()[:1] == ["step"])
    assert lines[at].split() == [*COLUMNS] and len(lines[at]) <= 80
    assert [x.split()[0] for x in lines[at + 1 : at + 3]] == ["1", "2"]
    assert all(len(x) == len(lines[at]) and len(x.split()) == 6 for x in lines[at + 1 : at + 3])
    assert "%" not in file.getvalue()
