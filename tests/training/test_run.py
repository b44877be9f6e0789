import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from slipstream.training import sample
from slipstream.training.config import from_dict
from slipstream.training.ranks import Interrupt
from slipstream.training.run import arguments, train
from slipstream.training.trainer import newest_checkpoint
from tests.support.byte_tokenizer import tokenizer


def raw(out, **training) -> dict:
    return {
        "output_dir": str(out),
        "model": {"hidden_size": 16, "num_heads": 1, "mixers": ["retention"]},
        "tokenizer": {"vocab_size": 300, "train_bytes": 20000},
        "data": {"files": ["{stdlib}/json"], "held_out": 0.4, "row_tokens": 16},
        "training": training,
    }


def planted(directory: Path, step: int, text: str | None = None) -> Path:
    """A checkpoint of which only the last file matters."""
    folder = directory / f"checkpoint-{step}"
    folder.mkdir()
    state = {"stateful_callbacks": {"Place": {"attributes": {"cursor": [0, []]}}}}
    (folder / "trainer_state.json").write_text(json.dumps(state) if text is None else text)
    return folder


def test_newest_checkpoint_is_whole(tmp_path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (9, 10):
        planted(tmp_path, step)
    (tmp_path / "checkpoint-abc").mkdir()
    (tmp_path / "checkpoint-99").mkdir()
    for step, text in enumerate(("", "{}", "[]", "null", '{"glob', '{"stateful_callbacks": {}}')):
        planted(tmp_path, 11 + step, text)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_interrupt_of_two_signals(request) -> None:
    # a shell starts what it runs in the background with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_train_stopped_while_preparing(tmp_path) -> None:
    interrupt = Interrupt()
    interrupt.requested = signal.SIGTERM
    result = train(from_dict(raw(tmp_path)), interrupt, Console(quiet=True))
    assert result.step == 0
    assert result.held_out is None
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["nonesuch", "output_dir", "disable_tqdm"])
def test_arguments_rejects(tmp_path, name: str) -> None:
    with pytest.raises(ValueError, match=f"training.{name}"):
        arguments(from_dict(raw(tmp_path, **{name: "x"})))


@pytest.mark.parametrize("name", ["optim", "lr_scheduler_type", "save_strategy"])
def test_arguments_names_what_is_no_choice(tmp_path, name: str) -> None:
    with pytest.raises(ValueError, match=r"training: nonesuch is not a valid .*, please select"):
        arguments(from_dict(raw(tmp_path, **{name: "nonesuch"})))


def test_arguments_rejects_no_steps(tmp_path) -> None:
    with pytest.raises(ValueError, match="max_steps"):
        arguments(from_dict(raw(tmp_path, max_steps=0)))


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [("training", "learning_rat", 1, "did you mean training.learning_rate"),
        ("training", "max_steps", "many", "'training.max_steps' expected int, got str"),
        ("training", "num_train_epochs", 3, "training.num_train_epochs: has no use here"),
        ("model", "hidden_sise", 32, "did you mean model.hidden_size"),
        ("model", "hidden_size", "wide", "^model: .*'hidden_size' expected int, got str"),
        ("model", "mixers", [{"type": "gla", "nonesuch": 1}], "model: .*nonesuch")],
)  # fmt: skip
def test_train_refuses_before_it_writes(
    tmp_path, section: str, key: str, value: object, words: str
) -> None:
    config = raw(tmp_path / "out")
    config[section][key] = value
    with pytest.raises((ValueError, TypeError), match=words):
        train(from_dict(config), Interrupt(), Console(quiet=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("count", [1, 2], ids=["as it comes", "by lines"])
def test_marks_of_texts_are_not_printed(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What a tokenizer puts between texts, in a prompt's continuation."""
    words = tokenizer()
    new = torch.tensor([[words.eos_token_id, *words("x")["input_ids"]]])

    def generate(input_ids: Tensor, streamer: Any, **_: Any) -> Tensor:
        for part in (input_ids, *new[0].split(1)) if streamer else ():
            streamer.put(part)
        if streamer:
            streamer.end()
        return torch.cat([input_ids, new], 1)

    model = SimpleNamespace(device=torch.device("cpu"), generate=generate)
    sample.generate(model, words, ["ab"] * count, tokens=2)
    assert capsys.readouterr().out == "abx\n" * count
