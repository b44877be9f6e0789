"""Rows made of samples: packed one behind another, and as prefix trees."""

from itertools import islice, zip_longest

import pytest
import torch
from torch.utils.data import DataLoader

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.training import corpus as corpus_module
from slipstream.training.config import Data, Tokenizer
from slipstream.training.corpus import Corpus, find, split
from slipstream.training.rows import Batches, Collator, Cursor, Position, Rows
from slipstream.training.tokenizer import END, obtain, token_bytes
from slipstream.training.trees import TreeRow, tree_of_rows

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


@pytest.mark.parametrize("lanes", [1, 3])
def test_rows_continue_exactly_from_any_cursor(corpus, tokenizer, lanes: int) -> None:
    rows = list(islice(Rows(corpus, tokenizer, 16, lanes=lanes, seed=3), 150))  # some epochs
    assert all(place.epoch > 0 for place in rows[-1]["cursor"].lanes)
    for i, row in enumerate(rows[:-1]):
        later = Rows(corpus, tokenizer, 16, lanes=lanes, seed=3)
        later.start = row["cursor"]
        after = next(iter(later))
        assert torch.equal(after["input_ids"], rows[i + 1]["input_ids"])
        assert after["cursor"] == rows[i + 1]["cursor"]


def test_rows_of_lanes_are_those_of_their_files(corpus, tokenizer) -> None:
    def texts(lanes: int) -> list[str]:
        rows = Rows(corpus, tokenizer, 4, lanes=lanes, epochs=1)
        return [tokenizer.decode(row["input_ids"]) for row in rows]

    whole = sum(len(f.path.read_text(encoding="utf-8")) for f in corpus.files)
    one, three = texts(1), texts(3)
    assert one[:2] != three[:2]
    for rows in (one, three):  # all but the overlaps and each lane's last, short row
        assert 0.9 * whole < sum(map(len, rows)) * 3 / 4 < 1.3 * whole


def test_rows_of_empty_files_are_an_error(tmp_path, tokenizer) -> None:
    for i in range(30):
        (tmp_path / f"{i}.md").write_text("")
    given = Data(files=(f"{tmp_path}/*.md",))
    empty = Corpus(tuple(find(given.files, given)))
    with pytest.raises(ValueError, match="want text for a row of 8 tokens"):
        next(iter(Rows(empty, tokenizer, 8, lanes=4)))
    (tmp_path / "full.md").write_text(DOCUMENTS[4] * 3)
    some = Corpus(tuple(find(given.files, given)))
    assert len(list(islice(Rows(some, tokenizer, 8, lanes=4), 90))) == 90


def test_collator_separator_keeps_rows() -> None:
    cursors = [Cursor(0, (Position(token=i),)) for i in (1, 2)]
    rows = [{"input_ids": torch.tensor([5, 0, 7]), "cursor": cursor} for cursor in cursors]
    batch = Collator("separator", end=0, token_bytes=SIZES)(rows)
    assert batch["input_ids"].tolist() == [[5, 0, 7]] * 2
    assert batch["labels"].tolist() == [[-100, 0, 7]] * 2
    assert batch["tally"] == (cursors[1], 4, 2 * (0 + 3))


def test_collator_reset_starts_documents_afresh() -> None:
    rows = [{"input_ids": torch.tensor([5, 0, 7, 8]), "cursor": None}] * 2
    batch = Collator("reset", end=0, token_bytes=SIZES)(rows)
    assert batch["input_ids"].tolist() == [[5, 0, 7, 8, 5, 0, 7, 8]]
    assert batch["labels"].tolist() == [[-100, 0, -100, 8, -100, 0, -100, 8]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 4, 6, 8]
    assert batch["tally"] == (None, 4, 2 * (0 + 4))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_are_each_row_once_in_order(corpus, tokenizer, workers: int, ranks: int) -> None:
    """With any number of workers, and divided among any number of ranks."""
    rows = Rows(corpus, tokenizer, 16, lanes=3, seed=3, epochs=1)
    want = [row["input_ids"].tolist() for row in rows]
    cursors = [row["cursor"] for row in rows]
    loaders = [
        DataLoader(
            Batches(rows, 2, rank, ranks), batch_size=None, num_workers=workers, collate_fn=list
        )
        for rank in range(ranks)
    ]
    got, after = [], []
    for group in zip_longest(*loaders, fillvalue=()):
        got += [row["input_ids"].tolist() for batch in group for row in batch]
        after += [row["cursor"] for batch in group for row in batch]
    assert got == want and len(want) > 8
    size = 2 * ranks
    assert after == [cursors[min(i // size * size + size, len(want)) - 1] for i in range(len(want))]


PROMPT = [3, 1, 4, 1, 5]
ROWS = [[*PROMPT, 9, 2], [*PROMPT, 9, 7, 7], [2, 7], [*PROMPT], [], [*PROMPT, 9, 2], [2, 8, 1]]


def tokens_of(row: TreeRow) -> list[list[int]]:
    """Of each sample, by its path."""
    ids = row.input_ids[0].tolist()
    return [
        [t for n in path for t in ids[slice(*row.tree.offsets[n : n + 2])]] for path in row.paths
    ]


@pytest.mark.parametrize("least", [1, 2, 3])
def test_tree_has_every_row_and_what_they_share_once(least: int) -> None:
    row = tree_of_rows(ROWS, least=least)
    assert tokens_of(row) == ROWS
    wanted = {1: 5 + 1 + 1 + 2 + 1 + 1 + 2, 2: 5 + 2 + 3 + 2 + 3, 3: 5 + 2 + 3 + 2 + 2 + 3}
    assert row.tree.tokens == wanted[least]
    assert row.tree.to_levels is None  # recurrences read it as it lies


def test_tokens_with_labels_are_not_shared() -> None:
    labels = [[-100] * 5 + row[5:] if row[:5] == PROMPT else row for row in ROWS]
    row = tree_of_rows(ROWS, labels)
    assert tokens_of(row) == ROWS
    assert row.tree.tokens == 5 + sum(len(x) - 5 if x[:5] == PROMPT else len(x) for x in ROWS)
    kept = [x for own in labels for x in own if x != -100]
    assert sorted(x for x in row.labels[0].tolist() if x != -100) == sorted(kept)


def test_labels_have_to_be_as_many_as_tokens() -> None:
    with pytest.raises(ValueError, match="want 7 for row 0, got 6"):
        tree_of_rows(ROWS, [row[1:] for row in ROWS])
    with pytest.raises(ValueError, match="least: want at least 1"):
        tree_of_rows(ROWS, least=0)


def test_step_of_a_tree_is_that_of_its_rows() -> None:
    """Loss, log-probabilities and gradients."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 10, "hidden_size": 16, "num_heads": 2, "intermediate_size": 8}
    config = SlipstreamConfig(mixers=["gated_deltanet", "attention"], **sizes)
    model = SlipstreamForCausalLM(config).double().train()
    rows = [x for x in ROWS if len(x) > 5]
    labels = [[-100] * 5 + x[5:] for x in rows]
    row = tree_of_rows(rows, labels)
    loss = model(**row.inputs()).loss
    each = [model(torch.tensor([x]), labels=torch.tensor([y])).loss for x, y in zip(rows, labels)]
    counts = torch.tensor([len(x) - 5.0 for x in rows])
    wanted = (torch.stack(each) * counts).sum() / counts.sum()
    torch.testing.assert_close(loss, wanted)
    parameters = [*model.parameters()]
    pairs = zip(*(torch.autograd.grad(x, parameters) for x in (loss, wanted)))
    for x, y in pairs:
        torch.testing.assert_close(x, y)
    h = model.model(row.input_ids, context=row.tree).last_hidden_state
    found, entropies = row.log_probs(h, model.lm_head.weight, temperature=0.7)
    for x, got, entropy in zip(rows, found, entropies):
        each = (model(torch.tensor([x])).logits[0, :-1] / 0.7).log_softmax(-1)
        torch.testing.assert_close(got[1 : len(x)], each.gather(1, torch.tensor(x)[1:, None])[:, 0])
        torch.testing.assert_close(entropy[1 : len(x)], -(each.exp() * each).sum(-1))
        assert got[0] == 0
        assert not got[len(x) :].any()
    alone = [model(torch.tensor([x])).logits[0, :-1].log_softmax(-1) for x in rows]
    each = [y.gather(1, torch.tensor(x)[1:, None]).sum() for x, y in zip(rows, alone)]
    h = model.model(row.input_ids, context=row.tree).last_hidden_state
    whole = row.log_probs(h, model.lm_head.weight)[0].sum()
    sums = whole, torch.stack(each).sum()
    for results in zip(*(torch.autograd.grad(x, parameters) for x in sums)):
        torch.testing.assert_close(*results)
