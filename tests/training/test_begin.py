"""Runs that begin with a model's weights; reporters; what the line of a step says."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import TrainerCallback

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.training import run as run_module
from slipstream.training import trainer as trainer_module
from slipstream.training.config import from_dict
from slipstream.training.console import columns
from slipstream.training.interrupt import Interrupt
from slipstream.training.run import arguments, train
from slipstream.training.speed import flops_per_token, peak_memory

MODEL = {"hidden_size": 16, "num_heads": 1, "mixers": ["retention"]}


def raw(out: Path, steps: int = 2, **sections: Any) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "model": MODEL,
        "tokenizer": {"vocab_size": 300, "train_bytes": 20000},
        "data": {"files": ["{stdlib}/json"], "held_out": 0.4, "row_tokens": 16, "eval_rows": 4},
        "training": {
            "max_steps": steps,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 256,
            "eval_strategy": "no",
            **sections.pop("training", {}),
        },
        **sections,
    }


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
    monkeypatch.setitem(run_module.INTEGRATION_TO_CALLBACK, "wandb", Reporter)
    go(raw(tmp_path / "out", training={"report_to": ["wandb", "tensorboard"]}))
    steps = [x for x in seen if "loss" in x]
    assert len(steps) == 2
    for name in ("bits_per_byte", "grad_norm", "learning_rate", "memory_gib", "tokens_per_second"):
        assert all(x[name] >= 0 for x in steps), name


def test_reporters_that_are_not_known_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training.report_to: want some of .*wandb.*'nonesuch'"):
        arguments(from_dict(raw(tmp_path, training={"report_to": "nonesuch"})))
    assert arguments(from_dict(raw(tmp_path))).report_to == []


def test_step_lines_are_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "peak_flops", lambda: 1e9)
    console = Console(file=io.StringIO(), width=80)
    go(raw(tmp_path / "out"), console)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    at = next(i for i, x in enumerate(lines) if x.split()[:1] == ["step"])
    headings = "step loss bits/byte tokens/s gradient rate GiB mfu left"
    assert lines[at].split() == headings.split()
    assert lines[at + 1].split()[0] == "1" and len(lines[at + 1].split()) == 9
    assert sum(x.split()[:2] == ["step", "loss"] for x in lines) == 1
    logs = {"tokens_per_second": 5e3, "grad_norm": 1.234, "learning_rate": 3e-4, "memory_gib": 2.5}
    found = {"tokens/s": "5,000", "gradient": "1.23", "rate": "3.0e-04", "GiB": "2.5"}
    assert columns(logs) == found


def test_flops_count_what_tokens_are_multiplied_with() -> None:
    moe = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    sizes: dict[str, Any] = {"vocab_size": 50, "intermediate_size": 24, **MODEL}
    plain = SlipstreamForCausalLM(SlipstreamConfig(**sizes))
    linear = sum(m.weight.numel() for m in plain.modules() if isinstance(m, nn.Linear))
    assert flops_per_token(plain) == 6 * linear
    assert linear == 50 * 16 + 3 * 24 * 16 + 4 * 32 * 16 + 2 * 16 * 16 - 32 * 16
    mlp = {"type": "qwen3_next_moe", "shared_expert_intermediate_size": 8, **moe}
    experts = SlipstreamForCausalLM(SlipstreamConfig(**{**sizes, "mlps": [mlp]}))
    chosen = 2 * 3 * 8 * 16  # two of four
    others = 4 * 16 + 3 * 8 * 16 + 16  # router, shared expert and its gate
    assert flops_per_token(experts) == 6 * (linear - 3 * 24 * 16 + chosen + others)
    assert peak_memory() > 1 << 20
