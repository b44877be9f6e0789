from itertools import islice

import pytest
import torch

from slipstream.training import corpus as corpus_module
from slipstream.training.config import Data, Tokenizer
from slipstream.training.corpus import split
from slipstream.training.rows import Collator, Position, Rows
from slipstream.training.tokenizer import END, obtain, token_bytes

DOCUMENTS = [f"Document {i}: " + "the quick brown füchs 🦊\n" * (1 + i % 5) for i in range(12)]

SIZES = torch.tensor([0, 1, 1, 1, 1, 2, 2, 3, 4])


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "PIECE", 50)  # several pieces a document
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / f"{i:02}.txt").write_text(text, encoding="utf-8")
    return split(Data(files=(str(tmp_path),), held_out=0.2))[0]


@pytest.fixture
def tokenizer(corpus, tmp_path):
    return obtain(Tokenizer(vocab_size=300), corpus, tmp_path / "tokenizer")


def test_tokenizer_gives_text_back_and_counts_its_bytes(tokenizer, corpus, tmp_path) -> None:
    text = "ünknown 🦊 text\n\tand   spaces" + DOCUMENTS[0]
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    sizes = token_bytes(tokenizer)
    assert sizes[ids].sum() == len(text.encode())
    assert sizes[tokenizer.convert_tokens_to_ids(END)] == 0
    again = obtain(Tokenizer(vocab_size=999), corpus, tmp_path / "tokenizer")
    assert again.get_vocab() == tokenizer.get_vocab()


def test_rows_are_the_text_each_token_predicted_once(corpus, tokenizer) -> None:
    stream = []
    for row in Rows(corpus, tokenizer, 8, epochs=1):
        ids = row["input_ids"].tolist()
        assert len(ids) == 8
        assert not stream or stream[-1] == ids[0]
        stream += ids if not stream else ids[1:]
    text = "".join(f.path.read_text(encoding="utf-8") + END for f in corpus.files)
    assert text.startswith(tokenizer.decode(stream))
    whole = len(tokenizer(text)["input_ids"])
    assert whole - 30 < len(stream) <= whole + 30  # pieces are tokenized one by one


def test_rows_continue_exactly_from_any_position(corpus, tokenizer) -> None:
    rows = list(islice(Rows(corpus, tokenizer, 16, seed=3), 150))  # some epochs
    assert rows[-1]["position"].epoch > 0
    for i, row in enumerate(rows[:-1]):
        later = Rows(corpus, tokenizer, 16, seed=3)
        later.start = row["position"]
        after = next(iter(later))
        assert torch.equal(after["input_ids"], rows[i + 1]["input_ids"])
        assert after["position"] == rows[i + 1]["position"]


def test_rows_are_shuffled_anew_each_epoch(corpus, tokenizer) -> None:
    orders = [Rows(corpus, tokenizer, 8, seed=s)._order(e) for s, e in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(len(corpus.files))) for order in orders)


def test_rows_of_empty_files_are_an_error(tmp_path, tokenizer) -> None:
    for i in range(30):
        (tmp_path / f"{i}.md").write_text("")
    empty, _ = split(Data(files=(f"{tmp_path}/*.md",), held_out=0.2))
    with pytest.raises(ValueError, match="empty"):
        next(iter(Rows(empty, tokenizer, 8)))


def test_collator_separator_keeps_rows() -> None:
    rows = [{"input_ids": torch.tensor([5, 0, 7]), "position": Position(token=i)} for i in (1, 2)]
    batch = Collator("separator", end=0, token_bytes=SIZES)(rows)
    assert batch["input_ids"].tolist() == [[5, 0, 7]] * 2
    assert batch["labels"].tolist() == [[-100, 0, 7]] * 2
    assert batch["tally"] == (Position(token=2), 4, 2 * (0 + 3))


def test_collator_reset_starts_documents_afresh() -> None:
    rows = [{"input_ids": torch.tensor([5, 0, 7, 8]), "position": Position()}] * 2
    batch = Collator("reset", end=0, token_bytes=SIZES)(rows)
    assert batch["input_ids"].tolist() == [[5, 0, 7, 8, 5, 0, 7, 8]]
    assert batch["labels"].tolist() == [[-100, 0, -100, 8, -100, 0, -100, 8]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 4, 6, 8]
    assert batch["tally"] == (Position(), 4, 2 * (0 + 4))
