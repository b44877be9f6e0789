"""Data sets and parquet files as text: each row once, in two parts, from any row on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.training import corpus
from slipstream.training.config import Data, from_dict
from slipstream.training.ranks import Interrupt
from slipstream.training.run import train

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


@pytest.mark.usefixtures("_rows")
def test_run_on_a_data_set(tmp_path: Path) -> None:
    raw: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"),
        "model": {"hidden_size": 16, "num_heads": 1, "mixers": ["retention"]},
        "tokenizer": {"vocab_size": 300},
        "data": {"datasets": "some/set", "held_out": 0.3, "row_tokens": 16, "lanes": 4},
        "training": {"max_steps": 2, "per_device_train_batch_size": 2, "eval_strategy": "no"},
    }
    result = train(from_dict(raw), Interrupt(), Console(quiet=True))
    assert result.step == 2 and result.held_out is not None


@pytest.mark.parametrize(
    ("rows", "words"),
    [(Rows(TEXTS, "content"), "column 'text', data.text_field.*the columns are content, id"),
        (Rows([*TEXTS[:39], None]), "some/set, row 39: want text in .*, got None")],
)  # fmt: skip
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
