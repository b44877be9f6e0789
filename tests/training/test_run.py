"""A run from outside: checkpoints, signals, arguments; data sets and parquet files as its text."""

import gc
import json
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from slipstream.training import corpus, sample
from slipstream.training.config import Data, from_dict
from slipstream.training.ranks import Interrupt
from slipstream.training.run import arguments, train
from slipstream.training.trainer import LMTrainer, newest_checkpoint
from tests.support.byte_tokenizer import tokenizer
from tests.support.training_configs import config_of


def raw(out: Path, **training: Any) -> dict[str, Any]:
    return config_of(out, {"training": training})


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
    [
        ("training", "learning_rat", 1, "did you mean training.learning_rate"),
        ("training", "max_steps", "many", "'training.max_steps' expected int, got str"),
        ("training", "num_train_epochs", 3, "training.num_train_epochs: has no use here"),
        ("model", "hidden_sise", 32, "did you mean model.hidden_size"),
        ("model", "hidden_size", "wide", "^model: .*'hidden_size' expected int, got str"),
        ("model", "mixers", [{"type": "gla", "nonesuch": 1}], "model: .*nonesuch"),
    ],
)
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


TEXTS = [f"document {i}: " + "words and words, " * (i % 5) for i in range(40)]


class Rows(Sequence[Any]):
    """As much of datasets.Dataset as is used."""

    def __init__(self, texts: Sequence[Any], column: str = "text") -> None:
        self.texts, self.column_names = texts, [column, "id"]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: Any) -> Any:
        return {self.column_names[0]: self.texts[row], "id": row}


@pytest.fixture
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "load", lambda source: Rows(TEXTS))


def documents(found: corpus.Corpus) -> list[str]:
    return [piece.text for file in found.files for piece in found.pieces(file)]


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("lanes", [1, 3, 100])
def test_every_row_is_on_one_side(lanes: int) -> None:
    sides = corpus.split(Data(datasets=("some/set",), held_out=0.3, lanes=lanes))
    assert all(len(side.files) == min(lanes, len(TEXTS)) for side in sides)
    train_texts, held_out = map(documents, sides)
    assert sorted(train_texts + held_out) == sorted(TEXTS)
    assert 3 < len(held_out) < 22
    other = corpus.split(Data(datasets=("some/set",), held_out=0.3, lanes=7))
    assert sorted(documents(other[1])) == sorted(held_out)


@pytest.mark.usefixtures("_rows")
def test_reading_goes_on_at_any_row() -> None:
    side, _ = corpus.split(Data(datasets=("some/set",), held_out=0.3, lanes=2))
    for file in side.files:
        pieces = list(side.pieces(file))
        for i, piece in enumerate(pieces):
            assert list(side.pieces(file, piece.offset)) == pieces[i:]


@pytest.mark.parametrize("case", ["ends", "fails", "frozen before"])
def test_objects_are_frozen_from_the_second_step_on(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, counts = LMTrainer.training_step, []

    def training_step(*args: Any, **options: Any) -> Tensor:
        counts.append(gc.get_freeze_count())
        if case == "fails" and len(counts) == 2:
            raise RuntimeError("planted")
        return plain(*args, **options)

    monkeypatch.setattr(LMTrainer, "training_step", training_step)
    config = from_dict(raw(tmp_path / "out", max_steps=2, eval_strategy="no"))
    gc.unfreeze()
    if case == "frozen before":
        gc.freeze()
    before = gc.get_freeze_count()
    try:
        with pytest.raises(RuntimeError, match="planted") if case == "fails" else nullcontext():
            train(config, Interrupt(), Console(quiet=True))
        assert gc.get_freeze_count() > 0 if before else gc.get_freeze_count() == 0
        assert counts[0] > 0 if before else counts[0] == 0
        assert counts[1] > 0
    finally:
        gc.freeze()  # as pytest's own modules are


@pytest.mark.usefixtures("_rows")
def test_run_on_a_data_set(tmp_path: Path) -> None:
    given = raw(tmp_path / "out", max_steps=2, per_device_train_batch_size=2, eval_strategy="no")
    given["data"] = {"datasets": "some/set", "held_out": 0.3, "row_tokens": 16, "lanes": 4}
    result = train(from_dict(given), Interrupt(), Console(quiet=True))
    assert result.step == 2 and result.held_out is not None


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (Rows(TEXTS, "content"), "column 'text', data.text_field.*the columns are content, id"),
        (Rows([*TEXTS[:39], None]), "some/set, row 39: want text in .*, got None"),
    ],
)
def test_rows_without_text(rows: Rows, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "load", lambda source: rows)

    def read() -> None:
        side, held = corpus.split(Data(datasets=("some/set",), held_out=0.3))
        assert documents(side) + documents(held)

    with pytest.raises(ValueError, match=words):
        read()


def test_data_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.files: want at least one .* or data.datasets"):
        Data()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_saved_data_sets_and_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(40))})
    made.save_to_disk(str(tmp_path / "saved"))
    for i in range(2):
        made.shard(2, i).to_parquet(str(tmp_path / "files" / f"{i}.parquet"))
    for data in (
        Data(datasets=(str(tmp_path / "saved"),), held_out=0.3),
        Data(files=(str(tmp_path / "files"),), held_out=0.3),
    ):
        sides = corpus.split(data)
        assert sorted(documents(sides[0]) + documents(sides[1])) == sorted(TEXTS)
    (tmp_path / "bad.parquet").write_text("no parquet")
    for data in (
        Data(datasets=("no/such set",)),
        Data(datasets=("a:b:c:d",)),
        Data(files=(str(tmp_path / "bad.parquet"),)),
    ):
        with pytest.raises((ValueError, OSError, datasets.exceptions.DatasetsError)):
            corpus.split(data)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises((ValueError, KeyError)):
        documents(corpus.split(Data(datasets=(str(tmp_path / "both"),)))[0])
