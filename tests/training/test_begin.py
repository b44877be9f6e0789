"""Runs that begin with a model's weights; reporters; what the line of a step says."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import TrainerCallback

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.training.config import from_dict
from slipstream.training.console import COLUMNS
from slipstream.training.ranks import Interrupt
from slipstream.training.run import train

MODEL = {"hidden_size": 16, "num_heads": 1, "mixers": ["retention"]}


def raw(out: Path, steps: int = 2, **sections: Any) -> dict[str, Any]:
    return {
        "output_dir": str(out), "model": MODEL,
        "tokenizer": {"vocab_size": 300, "train_bytes": 20000},
        "data": {"files": ["{stdlib}/json"], "held_out": 0.4, "row_tokens": 16, "eval_rows": 4},
        "training": {"max_steps": steps, "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 256, "eval_strategy": "no",
            **sections.pop("training", {})},
        **sections,
    }  # fmt: skip


def go(config: dict[str, Any], console: Console | None = None) -> Path:
    return train(from_dict(config), Interrupt(), console or Console(quiet=True)).directory


def test_run_begins_with_weights_and_tokenizer_of_another(tmp_path: Path) -> None:
    first = go(raw(tmp_path / "first"))
    options: dict[str, Any] = {"model": {}, "tokenizer": {}, "init_from": str(first)}
    still = {"learning_rate": 0.0, "weight_decay": 0.0}
    second = go(raw(tmp_path / "second", training=still, **options))
    before = SlipstreamForCausalLM.from_pretrained(first).state_dict()
    after = SlipstreamForCausalLM.from_pretrained(second).state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert (second / "tokenizer.json").read_text() == (first / "tokenizer.json").read_text()
    # it goes on from its own checkpoints, and not from another model
    (second / "result.json").unlink()
    go(raw(tmp_path / "second", steps=3, training=still, **options))
    with pytest.raises(ValueError, match="init_from: differs from the run in"):
        go(raw(tmp_path / "second", steps=4, training=still, **{**options, "init_from": "other"}))


def test_beginnings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.hidden_size: has no use beside init_from"):
        from_dict(raw(tmp_path / "out", init_from="x"))
    options: dict[str, Any] = {"model": {}, "tokenizer": {}, "init_from": str(tmp_path / "no")}
    with pytest.raises(FileNotFoundError, match="want a directory with a model"):
        go(raw(tmp_path / "out", **options))
    SlipstreamForCausalLM(SlipstreamConfig(vocab_size=30, **MODEL)).save_pretrained(tmp_path / "no")
    with pytest.raises(ValueError, match=r"tokenizer.path: want a tokenizer"):
        go(raw(tmp_path / "out", **options))
    tokenizer = go(raw(tmp_path / "run")) / "tokenizer"
    with pytest.raises(ValueError, match="tokenizer: 300 ids are more than the 30 of init_from"):
        go(raw(tmp_path / "out", **{**options, "tokenizer": {"path": str(tokenizer)}}))


def test_reporters_of_transformers_get_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):
        def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(logs)

    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Reporter)
    go(raw(tmp_path / "out", training={"report_to": ["wandb", "tensorboard"]}))
    steps = [x for x in seen if "loss" in x]
    assert len(steps) == 2
    for name in ("bits_per_byte", "grad_norm", "learning_rate", "tokens_per_second"):
        assert all(x[name] >= 0 for x in steps), name


def test_step_lines_are_a_table(tmp_path: Path) -> None:
    file = io.StringIO()
    go(raw(tmp_path / "out"), Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    at = next(i for i, x in enumerate(lines) if x.split()[:1] == ["step"])
    assert lines[at].split() == [*COLUMNS] and len(lines[at]) <= 80
    assert [x.split()[0] for x in lines[at + 1 : at + 3]] == ["1", "2"]
    assert all(len(x) == len(lines[at]) and len(x.split()) == 6 for x in lines[at + 1 : at + 3])
    assert "%" not in file.getvalue()
